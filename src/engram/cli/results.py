"""`engram table`, `figures` and `report`: what a run, a sweep or a reproduction found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.common.errors import InputError, check_choice

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a run, a sweep or a reproduction.", show_default=False)
]


def table(
    folder: Folder,
    format: Annotated[str, typer.Option(help="text, markdown or csv.")] = "text",
) -> None:
    """Print the table of a run; csv has the methods without their differences.

    Example: engram table runs/demo --format markdown
    """
    check_choice("format", format, ("text", "markdown", "csv"))
    from rich.console import Console

    from engram.cli.display import print_line, print_tables
    from engram.report.tables import gains, summary
    from engram.runs.run import open_runs

    runs = open_runs(folder, dynamics=False)
    with_results = {name: run for name, run in runs.items() if run.results}
    problems = [problem for run in runs.values() for problem in run.problems.values()]
    if not with_results:
        raise InputError(problems[0] if problems else f"there are no results in {folder} yet")
    if format == "csv" and len(with_results) > 1:
        raise InputError(f"{folder} holds several runs: name one of them, such as {folder / next(iter(with_results))}")
    console = Console()
    for name, run in with_results.items():
        if format == "csv":
            print(summary(run.results).to_csv(), end="")
            return
        if len(with_results) > 1:
            print(name if format == "text" else f"## {name}\n")
        if format == "text":
            print_tables(run.results, console)
        else:
            for made in (summary(run.results), gains(run.results)):
                print("" if made is None else made.to_markdown())
        if not run.finished and format == "text":
            print_line(console, f"This run is not finished; `engram run --resume {folder}` resumes it.")
    for problem in problems:
        print_line(console, problem)


def figures(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to draw.", show_default="DIR/figures")] = None,
    format: Annotated[str, typer.Option(help="png, pdf, csv (the numbers), or several: png,csv.")] = "png,pdf,csv",
) -> None:
    """Draw the figures of a run, and write their numbers.

    Example: engram figures runs/demo --format png
    """
    from engram.report.figures import parse_formats
    from engram.reproduction.page import write_figures

    formats = parse_formats(format)
    try:
        paths = write_figures(folder, out or folder / "figures", formats)
    except OSError as reason:
        raise InputError(f"cannot draw into {out or folder / 'figures'}: {reason.strerror or reason}") from reason
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

    print(write_report(folder, out))
