"""`engram runs`: list, show, compare and export the runs of a folder."""

from __future__ import annotations

import csv
import difflib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram.cli.options import BENCHMARK_NAMES, METHOD_NAMES
from engram.common.errors import InputError, check_choice, printable

if TYPE_CHECKING:
    from rich.console import Console

    from engram.runs.run import Run
    from engram.runs.store import Listing, Report

runs_app = typer.Typer(help="List, show, compare and export the runs of a folder.", no_args_is_help=True)

RUNS = Path("runs")  # where `engram run` puts them
MANY = 200  # runs to read before a progress bar is shown

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with runs, at any depth.")]
Method = Annotated[str | None, typer.Option(help=f"{METHOD_NAMES}.", show_default=False)]
Benchmark = Annotated[str | None, typer.Option(help=f"{BENCHMARK_NAMES}, custom.", show_default=False)]
DatasetName = Annotated[
    str | None,
    typer.Option("--dataset", help="mnist, mnist-small, fashion-mnist, notmnist, …", show_default=False),
]
State = Annotated[str | None, typer.Option(help="finished, unfinished, diverged, damaged.", show_default=False)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SETTING=VALUE", help="Any setting, also with !=, <, <=, >, >=; may be repeated.", show_default=False
    ),
]


@runs_app.command("list")
def list_runs(
    folder: Folder = RUNS,
    method: Method = None,
    benchmark: Benchmark = None,
    dataset: DatasetName = None,
    state: State = None,
    where: Where = None,
    settings: Annotated[
        str | None, typer.Option(metavar="NAMES", help="More columns: settings, comma-separated.", show_default=False)
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="A column or a setting; -COLUMN for the highest first.")
    ] = "run",
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most N rows.", show_default="all")] = None,
    format: Annotated[str, typer.Option(help="table, json or csv.")] = "table",
) -> None:
    """List the methods of each run: state, accuracy, BWT, and when it started.

    Columns that do not fit the terminal are left out; --format csv and --format json have all.

    Example: engram runs list runs --method dhp+si --where 'epochs>=5' --sort -accuracy
    """
    from engram.report.listing import listing
    from engram.runs.export import in_csv
    from engram.runs.store import parse_conditions, select, shown_columns

    check_choice("format", format, ("table", "json", "csv"))
    chosen = [name.strip() for name in settings.split(",")] if settings else []
    columns = shown_columns(chosen)
    given = {"method": method, "benchmark": benchmark, "dataset": dataset, "state": state}
    conditions = parse_conditions(given, where or ())
    found = select(_list(folder).rows, conditions, sort=sort, limit=limit)
    rows = [{name: row[name] for name in columns} for row in found]
    if format == "json":
        print(json.dumps(rows, indent=1))
    elif format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([in_csv(value) for value in row.values()] for row in rows)
    else:
        print(listing(rows, chosen, folder, shutil.get_terminal_size().columns).to_text(), end="")


@runs_app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in runs.", show_default=False)],
) -> None:
    """Show a run, a sweep or a reproduction: results, changed settings, versions, data and times.

    Example: engram runs show runs/demo
    """
    from rich.console import Console

    from engram.runs.display import print_line
    from engram.runs.run import open_runs

    console = Console()
    unreadable: dict[str, str] = {}
    for found in open_runs(_path_of(run), dynamics=False, unreadable=unreadable).values():
        _show(found, console)
    for name, reason in unreadable.items():
        print_line(console, f"{name} is left out: {reason}")


def _show(run: Run, console: Console) -> None:
    from engram.cli.terminal import print_table, print_tables
    from engram.report.html.run_page import changes_table
    from engram.report.layout import Table, data_table, time_taken, versions_table
    from engram.runs.display import print_line

    about, results = run.about, run.results
    facts = {"state": ", ".join(dict.fromkeys(run.state(label) for label in run.configs))}
    facts |= {name: str(about[name]) for name in ("command", "started", "finished") if about.get(name)}
    facts |= {"time": taken} if (taken := time_taken(about)) else {}
    print_table(Table(str(run.path), ("what", "value"), list(facts.items())), console)
    if results:
        print_tables(results, console)
        for made in (changes_table(results), versions_table(about), data_table(about)):
            if made is not None:
                print_table(made, console)
    for label in run.configs:
        if label in run.problems:
            print_line(console, f"{label}: {run.problems[label]}")
        elif label not in results:
            print_line(console, f"{label}: no trials yet")


@runs_app.command("compare")
def compare_runs(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs; the others are compared with the first.", show_default=False),
    ],
) -> None:
    """Compare runs: settings that differ, accuracies side by side, and paired differences to the first run.

    Example: engram runs compare runs/paper runs/steady
    """
    from rich.console import Console

    from engram.cli.terminal import print_table
    from engram.report.compare import accuracy_table, differences_table, settings_table, sides_of_folders
    from engram.runs.display import print_line
    from engram.runs.run import open_runs

    if len({_path_of(name).resolve() for name in runs}) < 2:
        raise InputError("name two different runs to compare")
    console = Console()
    opened: dict[str, dict[str, Run]] = {}
    for name in runs:
        unreadable: dict[str, str] = {}
        opened[name] = open_runs(_path_of(name), dynamics=False, unreadable=unreadable)
        for each, reason in unreadable.items():
            print(printable(f"engram: {name}/{each} is left out: {reason}"), file=sys.stderr)
    sides = sides_of_folders(opened)
    for made in (settings_table(sides), accuracy_table(sides)):
        print_table(made, console)
    differences = differences_table(sides)
    if differences.rows:
        print_table(differences, console)
    else:
        for note in differences.notes:
            print_line(console, note)
    for name, found in opened.items():
        for run in found.values():
            for label, problem in run.problems.items():
                print_line(console, f"{label} of {name} is left out: {problem}")


@runs_app.command("export")
def export_runs(
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .csv or a .parquet file.", show_default=False)],
    folder: Folder = RUNS,
    method: Method = None,
    benchmark: Benchmark = None,
    dataset: DatasetName = None,
    state: State = None,
    where: Where = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="A row for each entry of the accuracy matrices.")] = False,
) -> None:
    """Write one flat table for other programs: a row per trial, with all settings as columns.

    Example: engram runs export runs --out runs.csv
    """
    from engram.report.layout import count
    from engram.runs.export import export
    from engram.runs.store import parse_conditions, select

    given = {"method": method, "benchmark": benchmark, "dataset": dataset, "state": state}
    conditions = parse_conditions(given, where or ())
    chosen = select(_list(folder).rows, conditions)
    with _bar("exporting runs") as report:
        written, without = export(folder, chosen, out, matrix=matrix, report=report)
    left_out = f"; {without} without results left out" if without else ""
    print(f"{count(written, 'row')} in {out}{left_out}")


def _path_of(run: str) -> Path:
    """The path of a run that was given as a path or as a name in the folder of runs."""
    for path in (Path(run), RUNS / run):
        if path.exists():
            return path
    parent = Path(run).parent if Path(run).parent.is_dir() and Path(run).parent != Path() else RUNS
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(run).name, names, n=1)
    raise InputError(f"there is no run {run}" + (f" (did you mean {parent / near[0]}?)" if near else ""))


def _list(folder: Path) -> Listing:
    from engram.runs.store import list_runs

    with _bar("reading runs") as report:
        listing = list_runs(folder, report)
    if listing.unreadable:
        more = f" (and {len(listing.unreadable) - 1} more)" if len(listing.unreadable) > 1 else ""
        print(f"engram: cannot read {listing.unreadable[0]}{more}", file=sys.stderr)
    return listing


@contextmanager
def _bar(what: str) -> Iterator[Report]:
    """A progress bar on the terminal, if there are many runs."""
    with ExitStack() as shown:
        update: Report | None = None

        def report(done: int, total: int) -> None:
            nonlocal update
            if total >= MANY:
                update = update or shown.enter_context(_drawn_bar(what))
                update(done, total)

        yield report


@contextmanager
def _drawn_bar(what: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import Progress

    from engram.runs.display import columns

    console = Console(stderr=True)
    with Progress(*columns(what), console=console, transient=True, disable=not console.is_terminal) as drawn:
        task = drawn.add_task("")
        yield lambda done, total: drawn.update(task, completed=done, total=total)
