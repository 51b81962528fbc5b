"""`engram run`: begin a run, or go on with one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from engram.cli.data import DataFolder, fetch_datasets
from engram.cli.display import RunDisplay, print_tables, say
from engram.cli.interruption import Interruption, interruptible
from engram.common.errors import InputError, check_choice
from engram.config.presets import STEADY, preset
from engram.config.settings import BENCHMARKS, METHODS, PAPER_METHODS, Config, load_config, parse_setting
from engram.data.samples import Dataset
from engram.data.sources import is_present, named_folder
from engram.engine import start_engine
from engram.engine.build import dataset_names, load_datasets
from engram.runs.experiment import Setting
from engram.runs.result import Result
from engram.runs.start import check_options, default_folder, has_begun, read_unfinished, resume_methods, run_methods
from engram.runs.tensorboard import check_log

GOES_WITH_RESUME = ("resume", "data", "engine", "address")  # where a run goes on is no part of it

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Precision = Annotated[str, typer.Option(help="tf32 (on GPUs that have it), float32 or float64.")]
StackSize = Annotated[
    int | None, typer.Option(metavar="N", help="At most so many models at a time.", show_default="all that fit")
]
EngineName = Annotated[str, typer.Option(metavar="ENGINE", help="in-process, or ray: stacks on a cluster.")]
Address = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster.", show_default="$RAY_ADDRESS, else one of this machine's own"),
]


def run(
    context: typer.Context,
    benchmark: Annotated[
        str | None,
        typer.Argument(
            metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)}; or a config.toml of a run.", show_default=False
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated, or 'all': {', '.join(METHODS)}.", show_default="the paper's eight"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Repetitions with other weights, orders and tasks.", show_default="10")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task.", show_default="the paper's")] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.", show_default="the paper's")] = None,
    strength: Annotated[
        float | None, typer.Option(help="Strength λ of the penalties.", show_default="the paper's")
    ] = None,
    eta: Annotated[float | None, typer.Option(help="Initial η of the trace.", show_default="the paper's")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", show_default="0")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="mnist, mnist-small (needs no download), fashion-mnist or notmnist.",
            show_default="the paper's",
        ),
    ] = None,
    steady: Annotated[
        bool, typer.Option("--steady", help="DHP with the steady trace (docs/reproduction.md) in place of the paper's.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated."),
    ] = None,
    data: DataFolder = None,
    device: Device = "auto",
    precision: Precision = "tf32",
    stack: StackSize = None,
    engine: EngineName = "in-process",
    address: Address = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.", show_default="runs/…")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="tensorboard: event files in DIR/tensorboard.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with the run in this folder, that was stopped.", show_default=False),
    ] = None,
) -> None:
    """Run methods on a benchmark, show how they fare, and keep the results.

    Example: engram run split-mnist --methods finetune,dhp+si --dataset mnist-small --trials 3
    """
    console = Console()
    if resume is not None:
        _refuse_beside_resume(context)
        _, configs = read_unfinished(resume)
        datasets = load_or_fetch(configs[0], data, console)
        with start_engine(engine, address) as started, _watched(configs, resume, console) as (display, interruption):
            results = resume_methods(
                resume, datasets, engine=started, stop_asked=interruption.asked, report=display.show
            )
        _finish(results, resume, console)
        return
    if benchmark is None:
        raise InputError(f"BENCHMARK is missing: {', '.join(BENCHMARKS)}; or go on with a run: --resume DIR")
    given: dict[str, Any] = {"trials": trials, "epochs": epochs, "num_tasks": tasks, "strength": strength}
    given |= {"eta": eta, "seed": seed, "dataset": dataset}
    changes = {name: value for name, value in given.items() if value is not None}
    for text in settings or []:
        changes |= parse_setting(text)
    configs = configs_of(benchmark, methods, changes, steady)
    check_log(log)
    folder = out or default_folder(configs[0].benchmark)
    with start_engine(engine, address) as started:
        setting = Setting(device, precision, stack, engine=started)
        check_options(configs, setting)  # before anything is downloaded
        datasets = load_or_fetch(configs[0], data, console)
        with _watched(configs, folder, console) as (display, interruption):
            results = run_methods(
                configs,
                datasets,
                folder,
                command=shlex.join(["engram", *context.find_root().obj]),  # as it was given, however it was started
                setting=replace(setting, stop_asked=interruption.asked),
                log=log,
                report=display.show,
            )
    _finish(results, folder, console)


def _refuse_beside_resume(context: typer.Context) -> None:
    """A run goes on as it began: nothing about it can be chosen again."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in GOES_WITH_RESUME:
            said = "a BENCHMARK" if name == "benchmark" else parameter.opts[0]
            raise InputError(f"--resume goes on with a run as it began, so {said} has no place beside it")


@contextmanager
def _watched(configs: list[Config], folder: Path, console: Console) -> Iterator[tuple[RunDisplay, Interruption]]:
    """A display for the run. Who stops it is told how to go on."""

    def how() -> str:
        return f"`engram run --resume {shlex.quote(str(folder))}` goes on" if has_begun(folder) else ""

    with interruptible(how, console) as interruption, RunDisplay(configs, console) as display:
        yield display, interruption


def _finish(results: list[Result], folder: Path, console: Console) -> None:
    print_tables(results, console)
    drawn = f"`engram figures {folder}` draws them, `engram report {folder}` makes one page"
    say(console, f"Results are in {folder}; {drawn}.")
    lost = [f"{result.config.method}, {divergence}" for result in results for divergence in result.diverged]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise InputError(f"{lost[0]}{more}; what was learned until then is kept")


def configs_of(benchmark: str, methods: str | None, changes: dict[str, Any], steady: bool = False) -> list[Config]:
    """One config a method, from presets or from a file, with the changes made."""
    for name in ("benchmark", "method"):
        if name in changes:
            raise InputError(f"--set cannot change the {name}: name it in the command itself")
    if benchmark.endswith((".toml", ".json")):
        if methods is not None:
            raise InputError(f"{benchmark} names its own method, so --methods has no place beside it")
        bases = [load_config(benchmark)]
        if bases[0].benchmark == "own":
            raise InputError(f"{benchmark} is of a stream of one's own, which runs from Python: engram.run")
    else:
        check_choice("benchmark", benchmark, BENCHMARKS)
        bases = [preset(benchmark, name) for name in _method_names(methods)]
    if steady and not any(base.plastic for base in bases):
        raise InputError("--steady is a form of DHP, and no method with it is to be run")
    configs = [base.replace(**{**(STEADY if steady and base.plastic else {}), **changes}) for base in bases]
    return [config if config.penalty else config.replace(strength=None) for config in configs]


def _method_names(methods: str | None) -> list[str]:
    if methods is None:
        return list(PAPER_METHODS)
    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(",")]
    for name in names:
        check_choice("method", name, METHODS)
    if len(set(names)) < len(names):
        raise InputError(f"a method is named twice in {methods!r}")
    return names


def load_or_fetch(config: Config, data: str | None, console: Console) -> list[Dataset]:
    """The datasets. What is missing is downloaded into Engram's own cache; a folder that a person named is theirs."""
    missing = [name for name in dataset_names(config) if not is_present(name)] if named_folder(data) is None else []
    if missing:
        try:
            fetch_datasets(missing, None, console)
        except InputError as reason:
            hint = "" if config.dataset == "five-datasets" else "; `--dataset mnist-small` needs no download"
            raise InputError(f"{reason}{hint}") from reason
    return load_datasets(config, data)
