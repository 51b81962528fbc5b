"""The terminal of a command: progress bars while it trains, Ctrl-C to stop it, tables afterwards."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

from engram.common.errors import INTERRUPTED, Stopped, printable
from engram.runs.display import STEPS, columns, print_line, times

if TYPE_CHECKING:
    from engram.cli.options import TimeLimit
    from engram.engine.learner import Progress as RunProgress
    from engram.report.layout import Table
    from engram.runs.result import Result

TIME_IS_OVER = 124  # the exit code of a command that was stopped because its time was over, as of `timeout`
SECONDS_BETWEEN_LINES = 30.0
PATIENCE = 1.0  # seconds in which a second signal is the first one once more
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Bars:
    """A progress bar for each part that is running; without a terminal a line now and then. Notes are printed once."""

    def __init__(self, console: Console):
        self.console = console
        self.bars = Progress(*columns("{task.description}"), console=console, transient=True)
        self.printed: set[tuple[str, str]] = set()

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    @contextmanager
    def bar(self, what: str) -> Iterator[Callable[[RunProgress], None]]:
        """One bar; yields the function that takes its progress. The first bar starts the display."""
        if self.console.is_terminal:
            self.bars.start()
        task = self.bars.add_task(what, total=STEPS)
        lines = PeriodicLines(self.console, what)

        def show(progress: RunProgress) -> None:
            self.bars.update(task, completed=round(STEPS * progress.done))
            if not self.console.is_terminal:
                lines.show(progress.done)
            if progress.note and (what, progress.note) not in self.printed:
                self.printed.add((what, progress.note))
                print_line(self.console, progress.note)

        try:
            yield show
        finally:
            self.bars.remove_task(task)


class PeriodicLines:
    """How far something long has come, in a line every half a minute, for a file or a pipe.

    Args:
        console: where.
        what: what it is.
    """

    def __init__(self, console: Console, what: str):
        self.console = console
        self.what = what
        self.started = self.printed = time.monotonic()
        self.first: tuple[float, float] | None = None  # when it was first shown, and how much was done then

    def show(self, done: float) -> None:
        """Print a line if the last one was long ago; `done` lies in [0, 1]."""
        now = time.monotonic()
        self.first = self.first or (now, done)
        if now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        since, before = self.first
        left = (now - since) * (1 - done) / (done - before) if done > before else None
        print_line(self.console, f"{self.what}: {100 * done:.0f}%, {times(now - self.started, left)}")


def print_tables(results: Mapping[str, Result], console: Console) -> None:
    """Print all tables of a run."""
    from engram.report.tables import tables_of

    for made in tables_of(results):
        print_table(made, console)


def print_table(table: Table, console: Console) -> None:
    """Print a table. Its text comes from files, so it is neither markup nor control characters."""
    title = Text(printable(table.title), style="bold")
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    drawn.add_column(Text(printable(table.columns[0])), no_wrap=True)
    for column in table.columns[1:]:
        drawn.add_column(Text(printable(column)), justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    # A narrow terminal breaks lines rather than numbers.
    drawn.width = console.measure(drawn, options=console.options.update(max_width=1000)).maximum
    console.print(drawn, crop=False, overflow="ignore", no_wrap=True)
    for note in table.notes:
        console.print(printable(note), style="dim", highlight=False, markup=False, soft_wrap=not console.is_terminal)


class Interruption:
    """Whether the command is to stop: by Ctrl-C, SIGTERM, SIGHUP, or a time limit.

    Clusters send SIGTERM before they take a node. A terminal that is closed sends SIGHUP, which `nohup` ignores.

    Args:
        how_to_resume: returns the words that follow "stopped", or nothing.
        console: the console whose cursor is shown again.
        limit: when the command stops by itself; None for never.
    """

    def __init__(self, how_to_resume: Callable[[], str], console: Console, limit: TimeLimit | None = None):
        self.how_to_resume = how_to_resume
        self.console = console
        self.limit = limit
        self.exit_code: int | None = None  # set by the first signal, or when the time is over
        self.signalled_at: float | None = None
        self.was_asked = False
        self.nothing_to_save = False

    def asked(self) -> bool:
        # Some steps are taken first, whatever the limit: a command that is resumed again and again comes to its end.
        if self.exit_code is None and self.was_asked and self.limit is not None and self.limit.is_over:
            self.exit_code = TIME_IS_OVER
            _print(f"stopping after {self.limit}: finishing and saving the current steps")
        self.was_asked = True
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
        now, before = time.monotonic(), self.signalled_at
        if before is not None and now - before < PATIENCE:
            return  # `timeout` and others send a signal twice, to the process and to its group
        self.signalled_at = now
        if before is not None:
            # An ordinary exit would wait for threads that train a hundred models; the folder is intact anyway.
            self.console.show_cursor()
            self._print_stopped()
            sys.stdout.flush()
            os._exit(128 + number)
        if self.exit_code is not None:  # the time is over: it is stopping already
            return
        self.exit_code = 128 + number
        if self.nothing_to_save:
            raise KeyboardInterrupt
        _print("stopping: finishing and saving the current steps; press Ctrl-C again to stop immediately")

    def end(self) -> NoReturn:
        self._print_stopped()
        atexit.register(_ignore_signals)  # Python's own end would let one that comes twice kill it
        sys.exit(self.exit_code or INTERRUPTED)

    def _print_stopped(self) -> None:
        how = self.how_to_resume()
        _print(f"stopped{'; ' if how else ''}{how}")


def _print(line: str) -> None:
    print(f"engram: {line}", file=sys.stderr, flush=True)


@contextmanager
def interruptible(
    how_to_resume: Callable[[], str], console: Console, limit: TimeLimit | None = None
) -> Iterator[Interruption]:
    """Handle these signals and a limit of time in this context, and print how to resume after them."""
    interruption = Interruption(how_to_resume, console, limit)
    in_main = threading.current_thread() is threading.main_thread()
    usual = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    ours = [number for number, handler in usual.items() if _may_be_replaced(handler)]
    for number in ours:
        signal.signal(number, interruption.signalled)
    try:
        yield interruption
    except (KeyboardInterrupt, Stopped):
        interruption.end()
    finally:
        if interruption.exit_code is None:  # else the command ends now, and a signal may come once more
            for number in ours:
                signal.signal(number, usual[number])


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _may_be_replaced(handler: object) -> bool:
    usual = (signal.default_int_handler, signal.SIG_DFL)
    return handler in usual or isinstance(getattr(handler, "__self__", None), Interruption)
