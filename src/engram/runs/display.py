"""What a person sees while models train: a bar on a terminal or in a notebook, or lines where there is neither."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from engram.common.errors import printable
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.engine.learner import Progress as RunProgress
    from engram.engine.learner import Report

STEPS = 10_000  # in which a bar advances
SECONDS_BETWEEN_UPDATES = 0.25  # of a notebook, which gets a message for each


def print_line(console: Console, line: str) -> None:
    """Print text as it is: no markup, no colours, wrapped only on a terminal."""
    console.print(printable(line), highlight=False, markup=False, soft_wrap=not console.is_terminal)


def clock(seconds: float) -> str:
    """A duration as clocks show it: `clock(75)` is "1:15", and `clock(3675)` is "1:01:15"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def times(elapsed: float, left: float | None) -> str:
    """Both times, each with its own word: "0:12 elapsed, 1:40 left"."""
    return f"{clock(elapsed)} elapsed" + ("" if left is None else f", {clock(left)} left")


class Times(ProgressColumn):
    """How long a task has taken and, while it is not finished, how long it will still take."""

    def render(self, task: Task) -> Text:
        """The two times of a bar."""
        left = None if task.finished else task.time_remaining
        return Text(times((task.finished_time if task.finished else task.elapsed) or 0.0, left))


def columns(what: str) -> tuple[ProgressColumn, ...]:
    """The columns of a progress bar: name, bar, percentage, time so far and time left."""
    return (TextColumn(what), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"), Times())


class ProgressLines:
    """Turns `Progress` into lines; each line is returned once.

    Args:
        earlier: lines of the same run from before it was resumed. Except for notes, they are not returned again.
    """

    def __init__(self, earlier: Collection[str] = ()) -> None:
        self.seen = set(earlier)
        self.notes: set[str] = set()

    def task_lines(self, progress: RunProgress) -> list[str]:
        """When a task has ended, a line for each label that has learned it."""
        if not progress.task_ended:
            return []
        task, lines = progress.task, []
        for label, config in progress.configs.items():
            if task < config.num_tasks and (row := task_row(progress, label)):
                lines.append(f"{label}, task {task + 1}/{config.num_tasks}: {row}")
        return self._new(lines)

    def warnings(self, progress: RunProgress) -> list[str]:
        """The note, and trials that diverged."""
        lines = []
        for (label, _), outcome in progress.outcomes.items():
            if outcome.diverged is not None:
                lines.append(f"{label}, {outcome.diverged}")
        notes = [progress.note] if progress.note and progress.note not in self.notes else []
        self.notes.update(notes)
        return [*notes, *self._new(lines)]

    def _new(self, lines: list[str]) -> list[str]:
        new = [line for line in dict.fromkeys(lines) if line not in self.seen]
        self.seen.update(new)
        return new


def task_row(progress: RunProgress, label: str) -> str:
    """A label's accuracies after a task on each task so far, as means over the trials that have learned it; or ""."""
    task = progress.task
    learned = [
        outcome.rows[task][: task + 1]
        for (of, _), outcome in progress.outcomes.items()
        if of == label and len(outcome.rows) > task
    ]
    if not learned:
        return ""
    percents = " ".join(f"{100 * value:.1f}" for value in np.array(learned).mean(axis=0))
    return f"{percents} ({f'mean of {len(learned)} trials' if len(learned) > 1 else 'one trial'})"


class RunDisplay:
    """A bar for the whole run, and below it a line for each method with its accuracies so far.

    Without a terminal, lines are printed instead of the bar. Notes and diverged trials are printed in both cases.
    """

    def __init__(
        self,
        configs: Mapping[str, Config],
        console: Console,
        earlier: Collection[str] = (),
        transient: bool = False,
    ):
        self.console = console
        self.lines = ProgressLines(earlier)
        self.num_tasks = max(config.num_tasks for config in configs.values())
        self.rows = dict.fromkeys(configs, "")
        self.bar = Progress(*columns("[bold]task {task.fields[now]}"), console=console)
        self.whole = self.bar.add_task("", total=STEPS, now=f"1/{self.num_tasks}")
        # What a program prints to a file or a pipe must not be drawn on the terminal.
        to_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=4,
            transient=transient,
            redirect_stdout=to_terminal,
        )

    def __enter__(self) -> RunDisplay:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, progress: RunProgress) -> None:
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
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True)
        lines.add_column(no_wrap=True, overflow="ellipsis")
        for label, row in self.rows.items():
            lines.add_row(label, row)
        return Group(self.bar, lines)


class NotebookDisplay:
    """The bar and the lines of `RunDisplay` in a notebook; it disappears at the end. Warnings stay, as text."""

    def __init__(self, configs: Mapping[str, Config]):
        self.lines = ProgressLines()
        self.num_tasks = max(config.num_tasks for config in configs.values())
        self.rows = dict.fromkeys(configs, "")
        self.handle: Any = None
        self.started = self.updated = time.monotonic()

    def __enter__(self) -> NotebookDisplay:
        from IPython.display import display

        self.handle = display(self._content(0.0, 0), raw=True, display_id=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.update({"text/plain": ""}, raw=True)

    def show(self, progress: RunProgress) -> None:
        for line in self.lines.warnings(progress):
            print(printable(line), file=sys.stderr)
        if progress.task_ended:
            self.rows |= {label: row for label in self.rows if (row := task_row(progress, label))}
        now = time.monotonic()
        if now - self.updated >= SECONDS_BETWEEN_UPDATES:
            self.updated = now
            self.handle.update(self._content(progress.done, progress.task), raw=True)

    def _content(self, done: float, task: int) -> dict[str, str]:
        elapsed = time.monotonic() - self.started
        left = elapsed * (1 - done) / done if done else None
        words = f"task {task + 1}/{self.num_tasks}, {100 * done:.0f}%, {times(elapsed, left)}"
        lines = [f"{label}  {row}" for label, row in self.rows.items() if row]
        bar = f'<progress value="{done:.4f}" max="1"></progress> {words}'
        return {
            "text/plain": "\n".join([words, *lines]),
            "text/html": f"<div>{bar}</div>" + (f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""),
        }


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@contextmanager
def shown(configs: Mapping[str, Config], progress: bool | None, report: Report) -> Iterator[Report]:
    """Show the progress of a run; yields the report for an engine, which also calls the given one.

    Args:
        configs: what is being trained, by label.
        progress: whether to show it; None to do so where somebody watches: on a terminal, and in a notebook.
        report: the caller's own.
    """
    notebook = in_notebook()
    watched = notebook or (sys.stderr is not None and sys.stderr.isatty())
    if not (watched if progress is None else progress):
        yield report
        return
    display: NotebookDisplay | RunDisplay = (
        NotebookDisplay(configs) if notebook else RunDisplay(configs, Console(stderr=True), transient=True)
    )
    with display as entered:
        yield _both(entered.show, report)


def _both(first: Callable[[RunProgress], None], second: Report) -> Report:
    def report(progress: RunProgress) -> None:
        first(progress)
        second(progress)

    return report
