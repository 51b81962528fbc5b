"""The `engram` command: which commands there are, and how errors end.

Command modules import PyTorch, NumPy and other slow modules inside their functions, so that every `--help` answers
immediately (tests/cli/test_cli_help.py).
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from engram import __version__
from engram.cli.data import data_app
from engram.cli.output import lost_output, prepare_output
from engram.cli.predict import predict
from engram.cli.reproduce import reproduce
from engram.cli.results import figures, report, table
from engram.cli.run import run
from engram.cli.runs import runs_app
from engram.cli.sweep import sweep
from engram.common.errors import INTERRUPTED, InputError, printable

LONGEST = 1000  # characters of an error message that are shown

app = typer.Typer(
    help="Continual learning with PyTorch: networks that learn one task after another and forget less.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, sweep, reproduce, table, figures, report, predict):
    app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(runs_app, name="runs")


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


# Some releases of Typer contain their own copy of click, so click's exception is found through Typer's.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> None:
    """Run the `engram` command. Input that a person can correct ends in one sentence and exit code 2."""
    prepare_output()
    try:
        given = sys.argv[1:] if arguments is None else [str(argument) for argument in arguments]
        code = app(args=given, standalone_mode=False, obj=given)
    except ClickException as error:
        code = _refuse(error.format_message())
    except InputError as error:
        code = _refuse(str(error))
    except OSError as error:  # for example a full disk
        code = _refuse(f"cannot use {error.filename or 'the output'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):  # some releases of Typer raise, others return the code
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("engram: stopped", file=sys.stderr)
    if (lost := lost_output()) is not None:
        code = _refuse(f"cannot use the output: {lost.strerror or lost}")
    sys.exit(code)


def _refuse(sentence: str) -> int:
    if sentence:  # a bare `engram` shows its help and has nothing to add
        line = printable(" ".join(sentence.split()))  # no escape sequences from arguments or files
        print(f"engram: {line if len(line) <= LONGEST else line[:LONGEST] + '…'}", file=sys.stderr)
    return 2
