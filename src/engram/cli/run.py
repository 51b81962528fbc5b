"""`engram run`: start a run, or resume the run, sweep or reproduction in a folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from engram.cli.data import DataFolder, load_or_fetch
from engram.cli.options import (
    BENCHMARK_NAMES,
    Address,
    DatasetName,
    Device,
    EngineName,
    Epochs,
    HelpSettings,
    Methods,
    Minutes,
    Precision,
    ScenarioName,
    Settings,
    StackSize,
    Steady,
    Tasks,
    TimeLimit,
    Trials,
)
from engram.common.errors import InputError, check_choice
from engram.common.registry import BENCHMARKS, REHEARSALS
from engram.config.effect import refuse_without_effect
from engram.config.methods import check_method, usable_methods
from engram.config.paper import PAPER_METHODS
from engram.config.presets import STEADY, load_config, parse_setting, preset
from engram.config.settings import Config

if TYPE_CHECKING:
    from engram.cli.terminal import Interruption
    from engram.runs.display import RunDisplay
    from engram.runs.run import Run

ALLOWED_WITH_RESUME = ("resume", "data", "engine", "address", "minutes")  # where a run is resumed is not part of it


def run(
    context: typer.Context,
    benchmark: Annotated[
        str | None,
        typer.Argument(
            metavar="BENCHMARK",
            help=f"{BENCHMARK_NAMES}; or a .toml file of settings.",
            show_default=False,
        ),
    ] = None,
    methods: Methods = None,
    trials: Trials = None,
    epochs: Epochs = None,
    tasks: Tasks = None,
    strength: Annotated[
        float | None, typer.Option(help="Strength λ of the penalties.", show_default="the paper's")
    ] = None,
    eta: Annotated[float | None, typer.Option(help="Initial η of the trace.", show_default="the paper's")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", show_default="0")] = None,
    dataset: DatasetName = None,
    scenario: ScenarioName = None,
    steady: Steady = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best",
            help="The best settings that we know of each method (docs/reproduction/settings.md), not the paper's.",
        ),
    ] = False,
    settings: Settings = None,
    help_settings: HelpSettings = False,
    data: DataFolder = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    stack: StackSize = None,
    engine: EngineName = "in-process",
    address: Address = None,
    minutes: Minutes = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.", show_default="runs/…")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="tensorboard (in DIR/tensorboard), mlflow or wandb.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Resume the run, sweep or reproduction in this folder.", show_default=False),
    ] = None,
) -> None:
    """Run methods on a benchmark, show their progress, and save the results.

    Example: engram run split-mnist --methods finetune,dhp+si --dataset mnist-small --trials 3
    """
    if resume is not None:
        _refuse_other_options(context)
        _resume(context, resume, data, engine, address, minutes)
        return
    if benchmark is None:
        raise InputError(f"BENCHMARK is missing: {BENCHMARK_NAMES}; or resume a run: --resume DIR")
    options = {"trials": trials, "epochs": epochs, "num_tasks": tasks, "dataset": dataset, "scenario": scenario}
    changes = given_changes(settings, **options, strength=strength, eta=eta, seed=seed)
    configs = {config.method: config for config in configs_of(benchmark, methods, changes, steady, best)}
    refuse_without_effect(given_changes(settings, strength=strength, eta=eta), list(configs.values()))
    how, command = (device, precision, stack), command_line(context)
    _start(configs, data, how, (engine, address), minutes, out, log, command)


def _start(
    configs: dict[str, Config],
    data: str | None,
    how: tuple[str, str, int | None],
    engine: tuple[str, str | None],
    minutes: TimeLimit | None,
    out: Path | None,
    log: str | None,
    command: str,
) -> None:
    from engram.engine import start_engine
    from engram.engine.training import Runtime
    from engram.runs.folder import default_folder
    from engram.runs.start import check_run, start_run

    console, first = Console(), next(iter(configs.values()))
    folder = out or default_folder(first.benchmark)
    with start_engine(*engine) as started:
        runtime = Runtime(*how, engine=started)
        check_run(configs, runtime, log=log)  # before anything is downloaded
        datasets = load_or_fetch(first, data, console)
        with _watched(configs, folder, console, minutes) as (display, interruption):
            run = start_run(
                configs,
                datasets,
                folder,
                command=command,
                runtime=runtime,
                log=log,
                report=display.show,
                stop_asked=interruption.asked,
            )
    _finish(run, console)


def _resume(
    context: typer.Context, folder: Path, data: str | None, engine: str, address: str | None, minutes: TimeLimit | None
) -> None:
    from engram.engine import start_engine
    from engram.runs.display import print_line
    from engram.runs.run import has_finished, saved_arguments
    from engram.runs.start import read_finished, read_unfinished, resume_run

    if (arguments := saved_arguments(folder)) is not None:
        changes = {"out": folder, "engine": engine, "address": address, "minutes": minutes}
        _run_again(context, arguments, folder, changes | ({"data": data} if data is not None else {}))
        return
    console = Console()
    if has_finished(folder):
        run = read_finished(folder)
        print_line(console, f"The run in {folder} was finished already.")
        _finish(run, console)
        return
    configs, _ = read_unfinished(folder)
    datasets = load_or_fetch(max(configs.values(), key=lambda config: config.num_tasks), data, console)
    watched = _watched(configs, folder, console, minutes)
    with start_engine(engine, address) as started, watched as (display, interruption):
        run = resume_run(folder, datasets, engine=started, report=display.show, stop_asked=interruption.asked)
    _finish(run, console)


def _run_again(context: typer.Context, arguments: list[str], folder: Path, changes: dict[str, Any]) -> None:
    """Run the command of a sweep or a reproduction again, which trains what is not finished."""
    name, *words = arguments
    if name not in ("sweep", "reproduce"):
        raise InputError(f"{folder} was not made by engram sweep or engram reproduce")
    root: Any = context.find_root()
    command = root.command.commands[name]
    with command.make_context(name, words, parent=root, obj=arguments) as again:
        again.params |= changes
        command.invoke(again)


def _refuse_other_options(context: typer.Context) -> None:
    """Refuse options that would change a run that is resumed."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in ALLOWED_WITH_RESUME:
            given = "BENCHMARK" if name == "benchmark" else parameter.opts[0]
            raise InputError(f"--resume keeps the settings of the run, so {given} cannot be given with it")


@contextmanager
def _watched(
    configs: dict[str, Config], folder: Path, console: Console, minutes: TimeLimit | None
) -> Iterator[tuple[RunDisplay, Interruption]]:
    """Show the progress of a run, and say how to resume it when it is stopped."""
    from engram.cli.terminal import interruptible
    from engram.runs.display import RunDisplay
    from engram.runs.folder import logged_lines
    from engram.runs.run import has_started

    def how_to_resume() -> str:
        return resume_hint(folder) if has_started(folder) else ""

    shown = RunDisplay(configs, console, logged_lines(folder))
    with interruptible(how_to_resume, console, minutes) as interruption, shown as display:
        yield display, interruption


def _finish(run: Run, console: Console) -> None:
    from engram.cli.terminal import print_tables
    from engram.runs.display import print_line

    print_tables(run.results, console)
    drawn = f"`engram figures {run.path}` draws them, `engram report {run.path}` makes one page"
    print_line(console, f"Results are in {run.path}; {drawn}.")
    diverged = [f"{label}, {divergence}" for label, result in run.results.items() for divergence in result.diverged]
    if diverged:
        more = f" (and {len(diverged) - 1} more)" if len(diverged) > 1 else ""
        raise InputError(f"{diverged[0]}{more}; what was learned before is saved")


def resume_hint(folder: Path) -> str:
    """How to resume what is in a folder; nothing if nothing has started there yet."""
    from engram.runs.run import REPRODUCTION, SWEEP, has_started

    if has_started(folder) or any((folder / name).exists() for name in (REPRODUCTION, SWEEP)):
        return f"`engram run --resume {shlex.quote(str(folder))}` resumes it"
    return ""


def command_line(context: typer.Context) -> str:
    """The command as it was typed, so that it can be run again."""
    return shlex.join(["engram", *context.obj])


def given_changes(settings: list[str] | None, **options: Any) -> dict[str, Any]:
    """The settings that were given as options, and those of --set."""
    changes = {name: value for name, value in options.items() if value is not None}
    for text in settings or []:
        ((name, value),) = parse_setting(text).items()
        if name in changes:
            raise InputError(f"the setting {name} is given twice")
        changes[name] = value
    return changes


def configs_of(
    benchmark: str, methods: str | None, changes: dict[str, Any], steady: bool = False, best: bool = False
) -> list[Config]:
    """One config per method, from presets or from a file, with changes."""
    for name in ("benchmark", "method"):
        if name in changes:
            raise InputError(f"--set cannot change the {name}; give it as an argument or with --methods")
    if benchmark.endswith((".toml", ".json")):
        if methods is not None:
            raise InputError(f"{benchmark} names its own method, so --methods cannot be given with it")
        if best:
            raise InputError(f"{benchmark} has its own settings, so --best cannot be given with it")
        bases = [load_config(benchmark)]
        refuse_without_effect([] if bases[0].strength is None else ["strength"], bases)
        if bases[0].benchmark == "custom":
            raise InputError(f"{benchmark} has a custom stream, which only runs from Python: engram.run")
    else:
        check_choice("benchmark", benchmark, BENCHMARKS.names())
        bases = [preset(benchmark, name, best=best) for name in _method_names(methods)]
    if steady and not any(base.head == "dhp" for base in bases):
        raise InputError("--steady applies only to DHP methods")
    configs = [base.replace(**{**(STEADY if steady and base.head == "dhp" else {}), **changes}) for base in bases]
    configs = [config if config.penalty else config.replace(strength=None) for config in configs]
    return [config.replace(consolidate_every=None) if config.rehearsal else config for config in configs]


def _method_names(methods: str | None) -> list[str]:
    if methods is None:
        return list(PAPER_METHODS)
    if methods == "all":
        return usable_methods(lambda sentence: print(f"engram: {sentence}", file=sys.stderr))
    typed = [name.strip() for name in methods.split(",")]
    names = [name for word in typed for name in (REHEARSALS.names() if word == "reference" else (word,))]
    for name in names:
        check_method(name)
    if len(set(names)) < len(names):
        raise InputError(f"a method is named twice in {methods!r}")
    return names
