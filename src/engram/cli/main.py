"""The command line: parse, call, print."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from engram import __version__
from engram.cli.late import late
from engram.common.errors import INTERRUPTED, InputError, printable

LONGEST = 1000  # characters of a sentence that are shown

app = typer.Typer(
    cls=late(
        {
            "run": "run.run",
            "sweep": "sweep.sweep",
            "reproduce": "reproduce.reproduce",
            "table": "results.table",
            "figures": "results.figures",
            "report": "results.report",
            "data": "data.data_app",
            "runs": "runs.runs_app",
        }
    ),
    help="Differentiable Hebbian Consolidation: networks that learn task after task without forgetting.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
        line = printable(" ".join(sentence.split()))  # what was typed, or stands in a file, is no command to a terminal
        print(f"engram: {line if len(line) <= LONGEST else line[:LONGEST] + '…'}", file=sys.stderr)
    return 2
