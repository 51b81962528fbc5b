"""`engram reproduce`: run the paper's experiments, or some of them, and write a page about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engram.cli.data import DataFolder, load_or_fetch
from engram.cli.run import Address, Device, EngineName, Precision, StackSize, command_line
from engram.common.errors import InputError
from engram.config.paper import PAPER_BENCHMARKS, PARTS
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.cli.interruption import Interruption
    from engram.data.samples import Dataset
    from engram.engine import Engine
    from engram.runs.parts import Part
    from engram.runs.sheets import Sheet


def reproduce(
    context: typer.Context,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PAPER_BENCHMARKS)}; may be repeated.", show_default="all four"),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; may be repeated.", show_default="all")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes on a laptop: few samples, one epoch, 2 trials.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="At most N trials of anything.", show_default="the paper's")
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
    """Run the paper's table, figures and grids, and our study of them, and write a page about them.

    Finished parts in the folder are not run again, and parts that were stopped are resumed.

    Example: engram reproduce --quick
    """
    from engram.cli.display import Bars, print_line
    from engram.cli.interruption import interruptible
    from engram.engine import start_engine
    from engram.reproduction.page import write_report
    from engram.reproduction.plan import plan
    from engram.runs.experiment import Setting
    from engram.runs.parts import Part, groups_of, run_part
    from engram.runs.sheets import sheet_path
    from engram.runs.start import check_options

    console = Console()
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    planned = plan(tuple(benchmark or PAPER_BENCHMARKS), tuple(part or PARTS), quick, trials)
    parts = [Part(each.name, each.benchmark, each.configs) for each in planned]
    if not parts:
        raise InputError(f"there is no {' or '.join(part or ())} of {' or '.join(benchmark or ())}")
    command = command_line(context)
    with (
        start_engine(engine, address) as started,
        interruptible(lambda: f"`{command}` resumes it", console) as interruption,
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
                print_line(console, _done(sheet, there))

            _run_all(run, wanted, started)
    print_line(console, f"Results are in {folder}; the page about them is {write_report(folder)}")


def _run_all(run: Callable[[Part], None], parts: Sequence[Part], engine: Engine) -> None:
    """Run part after part, or all at the same time where the engine has room for more than one stack."""
    if engine.at_once == 1:
        for part in parts:
            run(part)
        return
    with ThreadPoolExecutor(max_workers=len(parts) or 1) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


class _Loader:
    """Loads each dataset once, for all parts that use it."""

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
        from engram.cli.display import print_line
        from engram.runs.sheets import sheet_path

        if sheet_path(folder, part.benchmark, part.name).exists():
            return True
        try:
            self.load(next(iter(part.entries.values())))
        except InputError as reason:
            if needed:
                raise
            if part.benchmark not in self.left_out:
                self.left_out.add(part.benchmark)
                print_line(self.console, f"{part.benchmark} is left out: {reason}")
            return False
        return True


def _done(sheet: Sheet, was_there: bool) -> str:
    lost = sum(len(result.diverged) for result in sheet.entries.values())
    how = "was finished already" if was_there else f"{sheet.about['models']} models in {sheet.about['seconds']:.0f} s"
    return f"{sheet.benchmark}: {sheet.part}, {how}" + (f"; {lost} diverged" if lost else "")
