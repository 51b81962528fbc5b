"""The terminal of a command: progress bars while it trains, Ctrl-C to stop it, tables afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from engram.common.errors import INTERRUPTED, Stopped, printable
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.engine.learner import Progress as RunProgress
    from engram.report.layout import Table
    from engram.runs.result import Result

STEPS = 10_000  # in which a bar advances
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name))


def print_line(console: Console, line: str) -> None:
    """Print text as it is: no markup, no colours, wrapped only on a terminal."""
    console.print(printable(line), highlight=False, markup=False, soft_wrap=not console.is_terminal)


def columns(what: str) -> tuple[ProgressColumn, ...]:
    """The columns of a progress bar: name, bar, percentage, time so far and time left."""
    percent = TextColumn("{task.percentage:>3.0f}%")
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return (TextColumn(what), BarColumn(bar_width=24), percent, *times)


class RunDisplay:
    """A bar for the whole run, and below it a line for each method with its accuracies so far.

    Without a terminal, lines are printed instead of the bar. Notes and diverged trials are printed in both cases.
    """

    def __init__(self, configs: Mapping[str, Config], console: Console, earlier: Collection[str] = ()):
        from engram.runs.log import ProgressLines

        self.console = console
        self.lines = ProgressLines(earlier)
        self.num_tasks = max(config.num_tasks for config in configs.values())
        self.rows = dict.fromkeys(configs, "")
        self.bar = Progress(*columns("[bold]task {task.fields[now]}"), console=console)
        self.whole = self.bar.add_task("", total=STEPS, now=f"1/{self.num_tasks}")
        self.live = Live(get_renderable=self._draw, console=console, refresh_per_second=4)

    def __enter__(self) -> RunDisplay:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, progress: RunProgress) -> None:
        from engram.runs.log import task_row

        completed = round(STEPS * progress.done)
        if progress.note and completed and self.bar.tasks[0].completed == 0:
            # A resumed run: what was done before says nothing about its speed now.
            self.bar.reset(self.whole, completed=completed)
        self.bar.update(self.whole, completed=completed, now=f"{progress.task + 1}/{self.num_tasks}")
        for line in self.lines.warnings(progress):
            print_line(self.console, line)
        for line in self.lines.task_lines(progress):
            if not self.console.is_terminal:
                print_line(self.console, line)
        if progress.task_ended:
            self.rows |= {label: row for label in self.rows if (row := task_row(progress, label))}

    def _draw(self) -> RenderableType:
        lines = RichTable.grid(padding=(0, 2))
        lines.add_column(no_wrap=True)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        for label, row in self.rows.items():
            lines.add_row(label, row)
        return Group(self.bar, lines)


class Bars:
    """A progress bar for each part that is running, on a terminal. Notes are printed once."""

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

        def show(progress: RunProgress) -> None:
            self.bars.update(task, completed=round(STEPS * progress.done))
            if progress.note and (what, progress.note) not in self.printed:
                self.printed.add((what, progress.note))
                print_line(self.console, progress.note)

        try:
            yield show
        finally:
            self.bars.remove_task(task)


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
