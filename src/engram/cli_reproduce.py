"""`engram reproduce`: the whole paper, or a part of it, into one folder; and the page about it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar

from engram.cli_data import DataFolder
from engram.cli_run import Device, Precision, StackSize, load_or_fetch, stopping
from engram.config import BENCHMARKS, Config
from engram.data.samples import Dataset
from engram.display import STEPS, columns
from engram.errors import InputError
from engram.experiment import Progress, Setting
from engram.report import write_report
from engram.reproduction.plan import Part, plan
from engram.reproduction.run import groups_of, run_part
from engram.runs import check_options
from engram.sheets import PARTS, Sheet, sheet_path


def reproduce(
    context: typer.Context,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(BENCHMARKS)}; may be repeated.", show_default="all four"),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; may be repeated.", show_default="all")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes on a laptop: few samples, one epoch, 2 trials.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many trials of anything.", show_default="the paper's")
    ] = None,
    data: DataFolder = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    stack: StackSize = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results.", show_default="reproduction, or reproduction-quick"),
    ] = None,
) -> None:
    """Run the paper's table, figures and grids, and our study of them, and write a page about it all.

    What the folder already holds is not run again, and what was stopped goes on.

    Example: engram reproduce --quick
    """
    console = Console()
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    parts = plan(tuple(benchmark or BENCHMARKS), tuple(part or PARTS), quick, trials)
    if not parts:
        raise InputError(f"there is no {' or '.join(part or ())} of {' or '.join(benchmark or ())}")
    check_options(
        list(groups_of(parts[0])[0].entries.values()), device, precision, stack
    )  # before anything is made or fetched
    command = shlex.join(["engram", *context.find_root().obj])
    loaded: dict[str, list[Dataset]] = {}
    left_out: dict[str, str] = {}

    def load(config: Config) -> list[Dataset]:
        if config.dataset not in loaded:
            loaded[config.dataset] = load_or_fetch(config, data, console)
        return loaded[config.dataset]

    with stopping(lambda: f"`{command}` goes on", console):
        for number, each in enumerate(parts, start=1):
            if each.benchmark in left_out:
                continue
            there = sheet_path(folder, each.benchmark, each.name).exists()
            try:
                if not there:
                    load(next(iter(each.entries.values())))
            except InputError as reason:
                if benchmark:  # it was asked for by name
                    raise
                left_out[each.benchmark] = str(reason)
                _say(console, f"{each.benchmark} is left out: {reason}")
                continue
            with _Watched(each, f"{number}/{len(parts)}", console) as watched:
                sheet = run_part(
                    each,
                    folder,
                    load,
                    command=command,
                    quick=quick,
                    setting=Setting(device, precision, stack),
                    report=watched.show,
                )
            _say(console, _done(sheet, there))
    _say(console, f"Results are in {folder}; the page about them is {write_report(folder)}")


class _Watched:
    """A bar for one part."""

    def __init__(self, part: Part, number: str, console: Console):
        self.console = console
        self.bar = Bar(*columns(f"{number} {part.benchmark}: {part.name}"), console=console, transient=True)
        self.task = self.bar.add_task("", total=STEPS)
        self.said: set[str] = set()

    def __enter__(self) -> _Watched:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def show(self, progress: Progress) -> None:
        self.bar.update(self.task, completed=round(STEPS * progress.share))
        if progress.note and progress.note not in self.said:
            self.said.add(progress.note)
            _say(self.console, progress.note)


def _done(sheet: Sheet, was_there: bool) -> str:
    lost = sum(len(result.diverged) for result in sheet.entries.values())
    how = "was there already" if was_there else f"{sheet.about['models']} models in {sheet.about['seconds']:.0f} s"
    return f"{sheet.benchmark}: {sheet.part}, {how}" + (f"; {lost} diverged" if lost else "")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
