"""Ctrl-C, once and twice: the first asks a run to be kept and to end, the second ends it at once."""

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

ASKING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))


class Interruption:
    """Whether somebody asked to stop: with Ctrl-C, or with the SIGTERM by which clusters take a machine back."""

    def __init__(self, how_to_go_on: Callable[[], str], console: Console):
        self.how_to_go_on = how_to_go_on
        self.console = console
        self.code: int | None = None  # with which to end, once somebody asked
        self.ends_at_once = False

    def asked(self) -> bool:
        return self.code is not None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within it there is nothing that would have to be kept: the first Ctrl-C ends it."""
        self.ends_at_once = True
        try:
            yield
        finally:
            self.ends_at_once = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        again = self.asked()
        self.code = 128 + number
        if again:
            # Threads at work on a hundred models would else be waited for, and the folder is sound anyhow.
            self.console.show_cursor()
            self._say()
            sys.stdout.flush()
            os._exit(self.code)
        if self.ends_at_once:
            raise KeyboardInterrupt
        _say("stopping: the steps that are being taken are ended and kept; Ctrl-C again stops at once")

    def end(self) -> NoReturn:
        self._say()
        sys.exit(self.code or INTERRUPTED)

    def _say(self) -> None:
        how = self.how_to_go_on()
        _say(f"stopped{'; ' if how else ''}{how}")


def _say(line: str) -> None:
    print(f"engram: {line}", file=sys.stderr, flush=True)


@contextmanager
def interruptible(how_to_go_on: Callable[[], str], console: Console) -> Iterator[Interruption]:
    """Within it, who stops the command is told how it goes on."""
    interruption = Interruption(how_to_go_on, console)
    in_main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in ASKING} if in_main else {}
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
