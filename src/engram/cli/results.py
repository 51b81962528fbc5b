"""`engram table`, `figures` and `report`: what a run, a sweep or a reproduction found."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.common.errors import InputError, check_choice, printable

if TYPE_CHECKING:
    from engram.report.layout import Table
    from engram.runs.run import Run

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a run, a sweep or a reproduction.", show_default=False)
]


def table(
    folder: Folder,
    format: Annotated[str, typer.Option(help="text, markdown or csv.")] = "text",
) -> None:
    """Print the table of a run, a sweep or a reproduction; csv leaves out the differences.

    Example: engram table runs/demo --format markdown
    """
    check_choice("format", format, ("text", "markdown", "csv"))
    from engram.report.tables import summary

    unreadable: dict[str, str] = {}
    runs = _open(folder, unreadable)
    _warn(unreadable)
    if format == "csv":
        found = {name: summary(run.results) for name, run in runs.items()}
        print((_joined(found) if len(found) + len(unreadable) > 1 else next(iter(found.values()))).to_csv(), end="")
        return
    tables = _tables(folder, runs)
    if format == "markdown":
        print("\n".join(made.to_markdown() for made in tables), end="\n")
        return
    from rich.console import Console

    from engram.cli.terminal import print_table
    from engram.runs.display import print_line

    console = Console()
    for made in tables:
        print_table(made, console)
    for name, run in runs.items():
        for line in _notes(run):
            print_line(console, f"{name}: {line}" if len(runs) > 1 else line)


def figures(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to draw.", show_default="DIR/figures")] = None,
    format: Annotated[str, typer.Option(help="png, pdf, csv (the numbers), or several: png,csv.")] = "png,pdf,csv",
) -> None:
    """Draw the figures of a run, a sweep or a reproduction, and write their numbers.

    Example: engram figures runs/demo --format png
    """
    from engram.report.figures import parse_formats
    from engram.reproduction.page import write_figures

    formats = parse_formats(format)
    unreadable: dict[str, str] = {}
    try:
        paths = write_figures(folder, out or folder / "figures", formats, unreadable)
    except OSError as reason:
        raise InputError(f"cannot draw into {out or folder / 'figures'}: {reason.strerror or reason}") from reason
    _warn(unreadable)
    for path in paths:
        print(path)


def report(
    folder: Folder,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write.", show_default="DIR/report.html")
    ] = None,
) -> None:
    """Write one HTML page that needs no network: tables, figures, settings, and what is missing.

    Example: engram report runs/demo
    """
    from engram.reproduction.page import write_report

    unreadable: dict[str, str] = {}
    path = write_report(folder, out, unreadable)
    _warn(unreadable)
    print(path)


def _warn(unreadable: dict[str, str]) -> None:
    """Name the runs that are left out."""
    for name, reason in unreadable.items():
        print(printable(f"engram: {name} is left out: {reason}"), file=sys.stderr)


def _open(folder: Path, unreadable: dict[str, str]) -> dict[str, Run]:
    """The runs of a folder that have results; there is at least one."""
    from engram.runs.run import open_runs

    runs = open_runs(folder, dynamics=False, unreadable=unreadable)
    found = {name: run for name, run in runs.items() if run.results}
    if not found:
        problems = [problem for run in runs.values() for problem in run.problems.values()]
        raise InputError(problems[0] if problems else f"there are no results in {folder} yet")
    return found


def _tables(folder: Path, runs: dict[str, Run]) -> list[Table]:
    """The tables of a reproduction as a whole, then those of each run."""
    from engram.report.sweep_table import run_tables
    from engram.reproduction.folder import holds_reproduction, read_reproduction
    from engram.reproduction.page import reproduction_tables

    tables = reproduction_tables(read_reproduction(folder)) if holds_reproduction(folder) else []
    for name, run in runs.items():
        own = run_tables(run)
        tables += [replace(made, title=f"{name}: {made.title}") for made in own] if len(runs) > 1 else own
    return tables


def _joined(tables: Mapping[str, Table]) -> Table:
    """Tables as one, with the name of the run in a first column; a table may lack some of the columns."""
    first = next(iter(tables.values()))
    label = first.columns[0] if len({made.columns[0] for made in tables.values()}) == 1 else "settings"
    columns = dict.fromkeys(column for made in tables.values() for column in made.columns[1:])
    rows = []
    for name, made in tables.items():
        for row in made.rows:
            cells = dict(zip(made.columns[1:], row[1:], strict=True))
            rows.append((name, row[0], *(cells.get(column, "") for column in columns)))
    return replace(first, columns=("run", label, *columns), rows=rows)


def _notes(run: Run) -> list[str]:
    """What is missing from a run."""
    notes = [f"{label}: {problem}" for label, problem in run.problems.items()]
    if not run.finished:
        notes.append(f"This run is not finished; `engram run --resume {run.path}` resumes it.")
    return notes
