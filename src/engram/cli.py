"""The command line: parse, call, print."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from engram.cli_bench import bench
from engram.cli_data import data_app
from engram.cli_reproduce import reproduce
from engram.cli_run import run
from engram.cli_runs import runs_app
from engram.cli_sweep import sweep
from engram.display import print_tables
from engram.errors import InputError, check_choice, plain
from engram.figures import FORMATS, parse_formats, write_figures
from engram.interruption import INTERRUPTED
from engram.report import write_report
from engram.results import read_run
from engram.tables import gains, summary
from engram.version import __version__

app = typer.Typer(
    help="Differentiable Hebbian Consolidation: networks that learn task after task without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(sweep)
app.command()(reproduce)
app.command()(bench)
app.add_typer(data_app, name="data")
app.add_typer(runs_app, name="runs")

LONGEST = 1000  # characters of a sentence that are shown

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.", show_default=False)]
AnyFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a run or of a reproduction.", show_default=False)
]


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
        print_tables(results, Console())
        if "finished" not in description:
            print(f"This run is not finished: tasks or trials are missing; `engram run --resume {folder}` goes on.")
        return
    if format == "csv":
        print(summary(results).to_csv(), end="")
        return
    for made in (summary(results), gains(results)):
        if made is not None:
            print(made.to_markdown())


@app.command()
def figures(
    folder: AnyFolder,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to draw.", show_default="DIR/figures")] = None,
    format: Annotated[str, typer.Option(help="png, pdf, csv (the numbers), or several: png,csv.")] = ",".join(FORMATS),
) -> None:
    """Draw the figures of a run or of a reproduction, and write down their numbers.

    Example: engram figures runs/demo --format png
    """
    formats = parse_formats(format)
    try:
        paths = write_figures(folder, out or folder / "figures", formats)
    except OSError as reason:
        raise InputError(f"cannot draw into {out or folder / 'figures'}: {reason.strerror or reason}") from reason
    for path in paths:
        print(path)


@app.command()
def report(
    folder: AnyFolder,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write.", show_default="DIR/report.html")
    ] = None,
) -> None:
    """Write one HTML page that needs no network: tables, figures, settings, and what is missing.

    Example: engram report runs/demo
    """
    print(write_report(folder, out))


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
    except (KeyboardInterrupt, typer.Abort):  # some releases of Typer raise, others return the code
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("engram: stopped", file=sys.stderr)
    sys.exit(code)


def _refuse(sentence: str) -> int:
    if sentence:  # a bare `engram` shows its help and has nothing to add
        line = plain(" ".join(sentence.split()))  # what was typed, or stands in a file, is no command to a terminal
        print(f"engram: {line if len(line) <= LONGEST else line[:LONGEST] + '…'}", file=sys.stderr)
    return 2
