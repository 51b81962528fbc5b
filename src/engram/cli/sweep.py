"""`engram sweep`: try many settings of some methods on one benchmark, and print the best."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from engram.cli.data import DataFolder, load_or_fetch
from engram.cli.options import (
    BENCHMARK_NAMES,
    METHOD_NAMES,
    Address,
    DatasetName,
    Device,
    EngineName,
    Epochs,
    Minutes,
    Precision,
    ScenarioName,
    Settings,
    StackSize,
    Steady,
    Tasks,
    TimeLimit,
)
from engram.cli.run import command_line, configs_of, given_changes, resume_hint
from engram.common.errors import InputError
from engram.config.effect import refuse_without_effect
from engram.config.presets import CHOOSING, preset
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.runs.sweep.points import Tried
    from engram.runs.sweep.run import Plan

POINTS = 30
TRIALS = 10


def sweep(
    context: typer.Context,
    benchmark: Annotated[str, typer.Argument(metavar="BENCHMARK", help=BENCHMARK_NAMES, show_default=False)],
    methods: Annotated[str, typer.Option(help=f"Comma-separated, or 'all': {METHOD_NAMES}.", show_default=False)],
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B,…", help="Values of a setting; may be repeated: every combination is tried."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A..B[:log]",
            help="A range, or values, that Optuna searches; may be repeated.",
            show_default=False,
        ),
    ] = None,
    points: Annotated[
        int | None, typer.Option(metavar="N", help="Number of points to search.", show_default=str(POINTS))
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Trials of the points that are not dropped.", show_default=str(TRIALS))
    ] = None,
    prune: Annotated[
        bool, typer.Option(help="After 1/3 of the trials, at least three, drop points that are clearly worse.")
    ] = True,
    epochs: Epochs = None,
    tasks: Tasks = None,
    dataset: DatasetName = None,
    scenario: ScenarioName = None,
    steady: Steady = False,
    settings: Settings = None,
    data: DataFolder = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    stack: StackSize = None,
    engine: EngineName = "in-process",
    address: Address = None,
    minutes: Minutes = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.", show_default="sweeps/BENCHMARK")
    ] = None,
) -> None:
    """Try many settings, drop those that are clearly worse, and print the best with error bars.

    Settings are chosen on held-out training samples, with a seed that no result uses. The same command, or
    `engram run --resume DIR`, resumes a sweep that was stopped.

    Example: engram sweep split-mnist --methods si,dhp+si --grid strength=0.1,1,10 --dataset mnist-small --trials 3
    """
    options = {"trials": trials, "epochs": epochs, "num_tasks": tasks, "dataset": dataset, "scenario": scenario}
    given = given_changes(settings, **options)
    bases = configs_of(benchmark, methods, {**CHOOSING, "trials": TRIALS, **given}, steady)
    plan = _plan(bases, grid or [], search or [], points, prune)
    refuse_without_effect(given_changes(settings), [config for base in bases for config in plan.varied(base)])
    folder = out or Path("sweeps") / benchmark
    _run(plan, folder, data, (device, precision, stack), (engine, address), minutes, command_line(context))


def _plan(bases: list[Config], grid: list[str], search: list[str], points: int | None, prune: bool) -> Plan:
    from engram.runs.sweep.axes import parse_axis
    from engram.runs.sweep.run import Plan

    if grid and search:
        raise InputError("--grid and --search cannot be given together")
    if points is not None and not search:
        raise InputError("--points applies only to --search")
    axes = [parse_axis(text) for text in search or grid]
    return Plan(bases, axes, (POINTS if points is None else points) if search else None, prune)


def _run(
    plan: Plan,
    folder: Path,
    data: str | None,
    how: tuple[str, str, int | None],
    engine: tuple[str, str | None],
    minutes: TimeLimit | None,
    command: str,
) -> None:
    from engram.cli.terminal import Bars, interruptible
    from engram.engine import start_engine
    from engram.engine.training import Runtime
    from engram.runs.display import print_line
    from engram.runs.run import has_finished
    from engram.runs.start import check_run
    from engram.runs.sweep.run import run_sweep

    console, was_finished = Console(), has_finished(folder)
    with (
        start_engine(*engine) as started,
        interruptible(lambda: resume_hint(folder), console, minutes) as interruption,
    ):
        runtime = Runtime(*how, engine=started)
        check_run({base.method: base for base in plan.bases}, runtime, dynamics=False)  # before anything is downloaded
        with interruption.at_once():
            datasets = load_or_fetch(plan.bases[0], data, console)
        with Bars(console) as bars, bars.bar(f"sweep of {plan.bases[0].benchmark}") as show:
            tried = run_sweep(
                plan,
                datasets,
                folder,
                command=command,
                runtime=runtime,
                report=show,
                stop_asked=interruption.asked,
            )
    if was_finished:
        print_line(console, f"The sweep in {folder} was finished already.")
    _finish(plan, tried, folder, console)


def _finish(plan: Plan, tried: list[Tried], folder: Path, console: Console) -> None:
    from engram.cli.terminal import print_table
    from engram.common.files import write_atomically
    from engram.report.figures.drawing import save_drawings
    from engram.report.figures.settings import draw_sweep
    from engram.report.sweep_table import on_what, points_csv, sweep_table, to_run
    from engram.runs.display import print_line
    from engram.runs.sweep.points import best_of
    from engram.runs.sweep.search import STUDY

    write_atomically(folder / "points.csv", points_csv(tried))
    of_method = {base.method: [each for each in tried if each.config.method == base.method] for base in plan.bases}
    best = {method: best_of(own) for method, own in of_method.items()}
    save_drawings([draw_sweep(tried, best)], folder, ("png",))
    for method, own in of_method.items():
        print_table(sweep_table(own), console)
        path = folder / f"best-{method}.toml"
        config = to_run(best[method], preset(plan.bases[0].benchmark, method))
        write_atomically(path, config.to_toml())
        line = f"`engram run {shlex.quote(str(path))}` runs the best {on_what(best[method].config, config)}."
        print_line(console, line)
    print_line(console, f"All points are in {folder / 'points.csv'}, and drawn in {folder / 'sweep.png'}.")
    print_line(console, f"`engram report {shlex.quote(str(folder))}` makes a page of them.")
    if (folder / STUDY).is_file():
        address = shlex.quote(f"sqlite:///{folder / STUDY}")
        print_line(console, f"`optuna-dashboard {address}` shows the search, if that package is installed.")
