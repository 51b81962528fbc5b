"""What a person sees while a run goes on, and after it: bars, a live line of accuracies, tables."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from engram.config import Config
from engram.experiment import Progress as Seen
from engram.tables import Table


class RunDisplay:
    """A bar for the whole run and one for each method, with the accuracies on the tasks so far beside it.

    Where the output is no terminal, a line for each trial takes the bars' place. A trial that diverged is said anyhow.
    """

    def __init__(self, configs: Sequence[Config], console: Console):
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.whole = self.bars.add_task("[bold]all methods", total=len(configs), line="")
        self.methods: dict[str, TaskID] = {
            config.method: self.bars.add_task(config.method, total=1, line="", start=False) for config in configs
        }
        self.done: dict[str, float] = dict.fromkeys(self.methods, 0.0)

    def __enter__(self) -> RunDisplay:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def show(self, seen: Seen) -> None:
        method = seen.config.method
        bar = self.methods[method]
        if self.done[method] == 0:
            self.bars.start_task(bar)
        self.done[method] = seen.share
        self.bars.update(bar, completed=seen.share)
        self.bars.update(self.whole, completed=sum(self.done.values()))
        for divergence in seen.result.diverged if seen.result is not None else ():
            if divergence.trial == seen.trial:
                self.console.print(f"{method}, {divergence}", highlight=False)
        if seen.row is not None:
            last = seen.config.first_trial + seen.config.trials
            self.bars.update(bar, line=f"trial {seen.trial + 1}/{last}: {_percents(seen.row)}")
            if not self.console.is_terminal and seen.task + 1 == seen.config.num_tasks:
                self.console.print(f"{method}, trial {seen.trial + 1}/{last}: {_percents(seen.row)}")


def print_table(table: Table, console: Console) -> None:
    drawn = RichTable(
        title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    drawn.add_column(table.columns[0], no_wrap=True)
    for column in table.columns[1:]:
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    # A narrow terminal breaks lines rather than numbers.
    drawn.width = console.measure(drawn, options=console.options.update(max_width=1000)).maximum
    console.print(drawn, crop=False, overflow="ignore", no_wrap=True)
    for note in table.notes:
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _percents(row: Sequence[float]) -> str:
    return " ".join(f"{100 * value:.1f}" for value in row)
