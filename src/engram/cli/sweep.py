"""`engram sweep`: many settings of some methods on one benchmark, and which of them is the best."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from engram.cli.data import DataFolder
from engram.cli.display import Bars, print_table, say
from engram.cli.interruption import interruptible
from engram.cli.run import Address, Device, EngineName, Precision, StackSize, configs_of, load_or_fetch
from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.config.presets import CHOOSING, preset
from engram.config.settings import BENCHMARKS, METHODS, Config, parse_setting
from engram.data.samples import Dataset
from engram.engine import start_engine
from engram.report.figures.drawing import save_drawings
from engram.report.figures.sweep import draw_sweep
from engram.report.sweep_table import on_what, points_csv, sweep_table, to_run
from engram.runs.experiment import Setting
from engram.runs.start import check_options
from engram.runs.sweep.run import Plan, Tried, best_of, run_sweep
from engram.runs.sweep.space import parse_axis

POINTS = 30


def sweep(
    context: typer.Context,
    benchmark: Annotated[str, typer.Argument(metavar="BENCHMARK", help=", ".join(BENCHMARKS), show_default=False)],
    methods: Annotated[str, typer.Option(help=f"Comma-separated, or 'all': {', '.join(METHODS)}.", show_default=False)],
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B,…", help="A setting's values; may be repeated: every combination is tried."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A..B[:log]",
            help="A range in which Optuna seeks, or values; may be repeated.",
            show_default=False,
        ),
    ] = None,
    points: Annotated[
        int | None, typer.Option(metavar="N", help="How many points are sought.", show_default=str(POINTS))
    ] = None,
    trials: Annotated[int, typer.Option(help="Of the points that are not given up.")] = 10,
    prune: Annotated[
        bool, typer.Option(help="Give up the worse two thirds after a ninth, and after a third, of the trials.")
    ] = True,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task.", show_default="the paper's")] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.", show_default="the paper's")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="mnist, mnist-small, fashion-mnist or notmnist.", show_default="the paper's")
    ] = None,
    steady: Annotated[bool, typer.Option("--steady", help="DHP with the steady trace.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated.")
    ] = None,
    data: DataFolder = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    stack: StackSize = None,
    engine: EngineName = "in-process",
    address: Address = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.", show_default="sweeps/BENCHMARK")
    ] = None,
) -> None:
    """Try many settings, give up what is clearly worse, and print the best with its error bars.

    Settings are chosen on held-out training samples, with a seed that no result is made with. The same command goes on
    with a sweep that was stopped.

    Example: engram sweep split-mnist --methods si,dhp+si --grid strength=0.1,1,10 --dataset mnist-small --trials 3
    """
    console = Console()
    given = {"epochs": epochs, "num_tasks": tasks, "dataset": dataset}
    changes: dict[str, Any] = {**CHOOSING, "trials": trials}
    changes |= {name: value for name, value in given.items() if value is not None}
    for text in settings or []:
        changes |= parse_setting(text)
    plan = _plan(configs_of(benchmark, methods, changes, steady), grid or [], search or [], points, prune)
    folder = out or Path("sweeps") / benchmark
    command = shlex.join(["engram", *context.find_root().obj])
    with (
        start_engine(engine, address) as started,
        interruptible(lambda: f"`{command}` goes on", console) as interruption,
    ):
        setting = Setting(device, precision, stack, engine=started, stop_asked=interruption.asked)
        check_options(list(plan.bases), setting)  # before anything is made or fetched
        with interruption.at_once():
            datasets = load_or_fetch(plan.bases[0], data, console)

        def load(config: Config) -> list[Dataset]:
            return datasets

        with Bars(console) as bars, bars.bar(f"sweep of {benchmark}") as show:
            tried = run_sweep(plan, folder, load, command=command, setting=setting, report=show)
    if not (folder / "sweep.json").exists():
        raise InputError(f"{folder} was removed, so what the sweep found cannot be written there")
    _finish(plan, tried, folder, console)


def _plan(bases: list[Config], grid: list[str], search: list[str], points: int | None, prune: bool) -> Plan:
    if grid and search:
        raise InputError("--grid tries every combination and --search seeks: a sweep does one of them")
    if points is not None and not search:
        raise InputError("--points is how many points are sought, and goes with --search")
    axes = [parse_axis(text) for text in search or grid]
    return Plan(bases, axes, (POINTS if points is None else points) if search else None, prune)


def _finish(plan: Plan, tried: list[Tried], folder: Path, console: Console) -> None:
    write_atomically(folder / "points.csv", points_csv(tried))
    of_method = {base.method: [each for each in tried if each.config.method == base.method] for base in plan.bases}
    best = {method: best_of(own) for method, own in of_method.items()}
    save_drawings([draw_sweep(tried, best)], folder, ("png",))
    for method, own in of_method.items():
        print_table(sweep_table(own), console)
        path = folder / f"best-{method}.toml"
        config = to_run(best[method], preset(plan.bases[0].benchmark, method))
        write_atomically(path, config.to_toml())
        say(console, f"`engram run {shlex.quote(str(path))}` runs the best {on_what(best[method].config, config)}.")
    say(console, f"All points are in {folder / 'points.csv'}, and drawn in {folder / 'sweep.png'}.")
