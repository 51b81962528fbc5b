"""The command line: parse, call, print."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from engram.build import choose_device, dataset_names, load_datasets
from engram.cli_data import DataFolder, data_app, fetch_datasets
from engram.config import BENCHMARKS, METHODS, PAPER_METHODS, Config, load_config, parse_setting
from engram.data.sources import is_present, named_folder
from engram.display import RunDisplay, print_table
from engram.errors import InputError, check_choice
from engram.figures import draw_all
from engram.presets import preset
from engram.results import Result, read_run
from engram.runs import default_folder, run_methods
from engram.tables import gains, summary
from engram.version import __version__

app = typer.Typer(
    help="Differentiable Hebbian Consolidation: networks that learn task after task without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.", show_default=False)]


@app.command()
def run(
    context: typer.Context,
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)}; or a config.toml of a run.", show_default=False
        ),
    ],
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
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated."),
    ] = None,
    data: DataFolder = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results.", show_default="runs/…")
    ] = None,
) -> None:
    """Run methods on a benchmark, show how they fare, and keep the results.

    Example: engram run split-mnist --methods finetune,dhp+si --dataset mnist-small --trials 3
    """
    given: dict[str, Any] = {"trials": trials, "epochs": epochs, "num_tasks": tasks, "strength": strength}
    given |= {"eta": eta, "seed": seed, "dataset": dataset}
    changes = {name: value for name, value in given.items() if value is not None}
    for setting in settings or []:
        changes |= parse_setting(setting)
    configs = _configs(benchmark, methods, changes)
    choose_device(device)  # refuse it before anything is downloaded
    console = Console()
    _fetch_if_ours(configs[0], data, console)
    datasets = load_datasets(configs[0], data)
    folder = out or default_folder(configs[0].benchmark)
    with RunDisplay(configs, console) as display:
        results = run_methods(configs, datasets, folder, command=_command(context), device=device, report=display.show)
    _print_tables(results, console)
    console.print(
        f"Results are in {folder}; `engram figures {folder}` draws them.",
        highlight=False,
        markup=False,
        soft_wrap=not console.is_terminal,
    )
    _fail_if_diverged(results)


@app.command()
def table(
    folder: RunFolder,
    format: Annotated[str, typer.Option(help="text, markdown or csv.")] = "text",
) -> None:
    """Print a run's table again; csv is the table of methods alone.

    Example: engram table runs/demo --format markdown
    """
    check_choice("format", format, ("text", "markdown", "csv"))
    description, results = read_run(folder)
    if format == "text":
        _print_tables(results, Console())
        if "finished" not in description:
            print("This run is not finished: methods or trials are missing.")
        return
    if format == "csv":
        print(summary(results).to_csv(), end="")
        return
    for made in (summary(results), gains(results)):
        if made is not None:
            print(made.to_markdown())


@app.command()
def figures(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to draw.", show_default="DIR/figures")] = None,
) -> None:
    """Draw a run's figures as PNG.

    Example: engram figures runs/demo
    """
    _, results = read_run(folder)
    try:
        paths = draw_all(results, out or folder / "figures")
    except OSError as reason:
        raise InputError(f"cannot draw into {out or folder / 'figures'}: {reason.strerror or reason}") from reason
    for path in paths:
        print(path)


def _configs(benchmark: str, methods: str | None, changes: dict[str, Any]) -> list[Config]:
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
    configs = [base.replace(**changes) for base in bases]
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


def _fetch_if_ours(config: Config, data: str | None, console: Console) -> None:
    """Download what is missing into Engram's own cache; a folder that a person named is theirs to fill."""
    if named_folder(data) is not None:
        return
    missing = [name for name in dataset_names(config) if not is_present(name)]
    if missing:
        try:
            fetch_datasets(missing, None, console)
        except InputError as reason:
            hint = "" if config.dataset == "five-datasets" else "; `--dataset mnist-small` needs no download"
            raise InputError(f"{reason}{hint}") from reason


def _print_tables(results: list[Result], console: Console) -> None:
    for made in (summary(results), gains(results)):
        if made is not None:
            print_table(made, console)


def _fail_if_diverged(results: list[Result]) -> None:
    lost = [f"{result.config.method}, {divergence}" for result in results for divergence in result.diverged]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise typer.Exit(_refuse(f"{lost[0]}{more}; what was learned until then is kept"))


def _command(context: typer.Context) -> str:
    """The command as it was given, however it was started."""
    return shlex.join(["engram", *context.find_root().obj])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _engram(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


INTERRUPTED = 130  # as shells number it; some releases of Typer return it, others raise

# Typer carries a copy of click of its own in some releases, so click's exceptions are found by way of Typer's.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """The `engram` command. What a person can mend ends in one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters gets question marks
    try:
        given = sys.argv[1:] if arguments is None else [str(argument) for argument in arguments]
        code = app(args=given, standalone_mode=False, obj=given)
    except ClickException as error:
        code = _refuse(error.format_message())
    except InputError as error:
        code = _refuse(str(error))
    except OSError as error:  # a full disk, a folder that vanished
        code = _refuse(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("engram: stopped; what was finished is kept", file=sys.stderr)
    sys.exit(code)


def _refuse(sentence: str) -> int:
    if sentence:  # a bare `engram` shows its help and has nothing to add
        print(f"engram: {' '.join(sentence.split())}", file=sys.stderr)
    return 2
