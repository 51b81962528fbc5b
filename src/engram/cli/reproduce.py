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
    from engram.reproduction.plan import Part
    from engram.runs.run import Run


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
    from engram.engine.runtime import Runtime
    from engram.reproduction.folder import claim_reproduction, part_folder
    from engram.reproduction.page import write_report
    from engram.reproduction.plan import plan
    from engram.runs.start import check_run, complete_run

    console = Console()
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    parts = plan(tuple(benchmark or PAPER_BENCHMARKS), tuple(part or PARTS), quick, trials)
    if not parts:
        raise InputError(f"there is no {' or '.join(part or ())} of {' or '.join(benchmark or ())}")
    command = command_line(context)
    with (
        start_engine(engine, address) as started,
        interruptible(lambda: f"`{command}` resumes it", console) as interruption,
    ):
        runtime = Runtime(device, precision, stack, engine=started)
        check_run(parts[0].configs, runtime)  # before anything is made or fetched
        loader = _Loader(data, console, interruption)
        wanted = [each for each in parts if loader.can_load(each, folder, needed=bool(benchmark))]
        warning = claim_reproduction(folder, command, quick, runtime)
        if warning:
            print_line(console, warning)
        with Bars(console) as bars:

            def run(each: Part) -> None:
                path = part_folder(folder, each.benchmark, each.name)
                there = _is_finished(path)
                with bars.bar(f"{parts.index(each) + 1}/{len(parts)} {each.benchmark}: {each.name}") as show:
                    found = complete_run(
                        each.configs,
                        [] if there else loader.load(next(iter(each.configs.values()))),
                        path,
                        command=command,
                        runtime=runtime,
                        about={"part": each.name, "quick": quick},
                        report=show,
                        stop_asked=interruption.asked,
                    )
                print_line(console, _done(each, found, there))

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
        from engram.reproduction.folder import part_folder

        if _is_finished(part_folder(folder, part.benchmark, part.name)):
            return True
        try:
            self.load(next(iter(part.configs.values())))
        except InputError as reason:
            if needed:
                raise
            if part.benchmark not in self.left_out:
                self.left_out.add(part.benchmark)
                print_line(self.console, f"{part.benchmark} is left out: {reason}")
            return False
        return True


def _is_finished(path: Path) -> bool:
    from engram.runs.run import has_started, read_run

    return has_started(path) and read_run(path, dynamics=False).finished


def _done(part: Part, run: Run, was_there: bool) -> str:
    diverged = sum(len(result.diverged) for result in run.results.values())
    how = "was finished already" if was_there else f"{run.num_models} models in {run.about['seconds']:.0f} s"
    return f"{part.benchmark}: {part.name}, {how}" + (f"; {diverged} diverged" if diverged else "")
