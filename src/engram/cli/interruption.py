"""Ctrl-C: the first saves the run and ends it, the second ends it immediately."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rich.console import Console

from engram.common.errors import INTERRUPTED, Stopped

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))


class Interruption:
    """Whether the command was asked to stop: by Ctrl-C, or by SIGTERM, which clusters send before taking a node.

    Args:
        how_to_resume: returns the words that follow "stopped", or nothing.
        console: the console whose cursor is shown again.
    """

    def __init__(self, how_to_resume: Callable[[], str], console: Console):
        self.how_to_resume = how_to_resume
        self.console = console
        self.exit_code: int | None = None  # set by the first signal
        self.nothing_to_save = False

    def asked(self) -> bool:
        return self.exit_code is not None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the first Ctrl-C end the command: inside this context there is nothing to save."""
        self.nothing_to_save = True
        try:
            yield
        finally:
            self.nothing_to_save = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        again = self.asked()
        self.exit_code = 128 + number
        if again:
            # An ordinary exit would wait for threads that train a hundred models; the folder is intact anyway.
            self.console.show_cursor()
            self._print_stopped()
            sys.stdout.flush()
            os._exit(self.exit_code)
        if self.nothing_to_save:
            raise KeyboardInterrupt
        _print("stopping: finishing and saving the current steps; press Ctrl-C again to stop immediately")

    def end(self) -> NoReturn:
        self._print_stopped()
        sys.exit(self.exit_code or INTERRUPTED)

    def _print_stopped(self) -> None:
        how = self.how_to_resume()
        _print(f"stopped{'; ' if how else ''}{how}")


def _print(line: str) -> None:
    print(f"engram: {line}", file=sys.stderr, flush=True)


@contextmanager
def interruptible(how_to_resume: Callable[[], str], console: Console) -> Iterator[Interruption]:
    """Handle Ctrl-C and SIGTERM in this context, and print how to resume after them."""
    interruption = Interruption(how_to_resume, console)
    in_main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    ours = [number for number, handler in usual.items() if handler in (signal.default_int_handler, signal.SIG_DFL)]
    for number in ours:
        signal.signal(number, interruption.signalled)
    try:
        yield interruption
    except (KeyboardInterrupt, Stopped):
        interruption.end()
    finally:
        for number in ours:
            signal.signal(number, usual[number])
