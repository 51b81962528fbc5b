"""`engram reproduce`: the whole paper, or a part of it, into one folder; and the page about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engram.cli.data import DataFolder
from engram.cli.display import Bars, say
from engram.cli.interruption import Interruption, interruptible
from engram.cli.run import Address, Device, EngineName, Precision, StackSize, load_or_fetch
from engram.common.errors import InputError
from engram.config.settings import BENCHMARKS, Config
from engram.data.samples import Dataset
from engram.engine import Engine, start_engine
from engram.reproduction.plan import plan
from engram.reproduction.write import write_report
from engram.runs.experiment import Setting
from engram.runs.parts import Part, groups_of, run_part
from engram.runs.sheets import PARTS, Sheet, sheet_path
from engram.runs.start import check_options


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
    engine: EngineName = "in-process",
    address: Address = None,
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
    command = shlex.join(["engram", *context.find_root().obj])
    with (
        start_engine(engine, address) as started,
        interruptible(lambda: f"`{command}` goes on", console) as interruption,
    ):
        setting = Setting(device, precision, stack, engine=started, stop_asked=interruption.asked)
        first = list(groups_of(parts[0])[0].entries.values())
        check_options(first, setting)  # before anything is made or fetched
        loader = _Loader(data, console, interruption)
        wanted = [each for each in parts if loader.can_load(each, folder, needed=bool(benchmark))]
        with Bars(console) as bars:

            def run(each: Part) -> None:
                path = sheet_path(folder, each.benchmark, each.name)
                there = path.exists()
                with bars.bar(f"{parts.index(each) + 1}/{len(parts)} {each.benchmark}: {each.name}") as show:
                    sheet = run_part(
                        each, path, loader.load, command=command, quick=quick, setting=setting, report=show
                    )
                say(console, _done(sheet, there))

            _run_all(run, wanted, started)
    say(console, f"Results are in {folder}; the page about them is {write_report(folder)}")


def _run_all(run: Callable[[Part], None], parts: Sequence[Part], engine: Engine) -> None:
    """Part after part; all of them at the same time where the engine has room for more than one stack."""
    if engine.at_once == 1:
        for part in parts:
            run(part)
        return
    with ThreadPoolExecutor(max_workers=len(parts) or 1) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


class _Loader:
    """Loads each dataset once, for all parts that learn it."""

    def __init__(self, data: str | None, console: Console, interruption: Interruption):
        self.data = data
        self.console = console
        self.interruption = interruption
        self.loaded: dict[str, list[Dataset]] = {}
        self.left_out: set[str] = set()

    def load(self, config: Config) -> list[Dataset]:
        if config.dataset not in self.loaded:
            with self.interruption.at_once():
                self.loaded[config.dataset] = load_or_fetch(config, self.data, self.console)
        return self.loaded[config.dataset]

    def can_load(self, part: Part, folder: Path, needed: bool) -> bool:
        """Whether there are data for a part. One that was not asked for by name is left out where there are none."""
        if sheet_path(folder, part.benchmark, part.name).exists():
            return True
        try:
            self.load(next(iter(part.entries.values())))
        except InputError as reason:
            if needed:
                raise
            if part.benchmark not in self.left_out:
                self.left_out.add(part.benchmark)
                say(self.console, f"{part.benchmark} is left out: {reason}")
            return False
        return True


def _done(sheet: Sheet, was_there: bool) -> str:
    lost = sum(len(result.diverged) for result in sheet.entries.values())
    how = "was there already" if was_there else f"{sheet.about['models']} models in {sheet.about['seconds']:.0f} s"
    return f"{sheet.benchmark}: {sheet.part}, {how}" + (f"; {lost} diverged" if lost else "")
