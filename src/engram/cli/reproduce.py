"""`engram reproduce`: run the paper's experiments, or some of them, and write a page about them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engram.cli.data import DataFolder, load_or_fetch
from engram.cli.options import Address, Device, EngineName, Minutes, Precision, StackSize
from engram.cli.run import command_line, resume_hint
from engram.common.errors import InputError
from engram.config.paper import PAPER_BENCHMARKS, PARTS
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.data.samples import Dataset
    from engram.engine.learner import Report
    from engram.reproduction.plan import Part


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
    minutes: Minutes = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results.", show_default="reproduction, or reproduction-quick"),
    ] = None,
) -> None:
    """Run the paper's table, figures and grids, and our study of them, and write a page about them.

    Finished parts in the folder are not run again, and parts that were stopped are resumed.

    Example: engram reproduce --quick
    """
    from engram.cli.terminal import Bars, interruptible
    from engram.engine import start_engine
    from engram.engine.training import Runtime
    from engram.reproduction.page import write_report
    from engram.reproduction.plan import plan
    from engram.reproduction.run import run_reproduction
    from engram.runs.display import print_line

    console = Console()
    folder = out or Path("reproduction-quick" if quick else "reproduction")
    parts = plan(tuple(benchmark or PAPER_BENCHMARKS), part, quick, trials)
    if not parts:
        asked = " or ".join(part or ())
        raise InputError(f"nothing to run: {' and '.join(benchmark or ())} has no part {asked}")
    with (
        start_engine(engine, address) as started,
        interruptible(lambda: resume_hint(folder), console, minutes) as interruption,
        Bars(console) as bars,
    ):

        def load(config: Config) -> list[Dataset]:
            with interruption.at_once():
                return load_or_fetch(config, data, console)

        def show(each: Part) -> AbstractContextManager[Report]:
            return bars.bar(f"{parts.index(each) + 1}/{len(parts)} {each.benchmark}: {each.name}")

        run_reproduction(
            parts,
            folder,
            load,
            command=command_line(context),
            quick=quick,
            skip_without_data=not benchmark,
            runtime=Runtime(device, precision, stack, engine=started),
            show=show,
            tell=lambda line: print_line(console, line),
            stop_asked=interruption.asked,
        )
        with interruption.at_once():
            page = write_report(folder)
    print_line(console, f"Results are in {folder}; the page about them is {page}")
