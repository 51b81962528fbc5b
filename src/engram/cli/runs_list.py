"""`engram runs list`: the runs of a folder, or those that fulfil some conditions."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from engram.common.errors import check_choice, printable
from engram.config.settings import BENCHMARKS, DATASETS, METHODS
from engram.report.layout import Table, count, number
from engram.runs.store.cells import in_csv
from engram.runs.store.index import Index, Report
from engram.runs.store.query import parse_conditions, select, shown_columns
from engram.runs.store.survey import STATES

RUNS = Path("runs")  # where `engram run` puts them
LONG = 200  # runs to be read before a person is shown a bar

Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder with runs, at any depth.")]
Method = Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}.", show_default=False)]
Benchmark = Annotated[str | None, typer.Option(help=f"{', '.join(BENCHMARKS)}, own.", show_default=False)]
DatasetName = Annotated[str | None, typer.Option("--dataset", help=f"{', '.join(DATASETS)}.", show_default=False)]
State = Annotated[str | None, typer.Option(help=f"{', '.join(STATES)}.", show_default=False)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SETTING=VALUE", help="Any setting, also with !=, <, <=, >, >=; may be repeated.", show_default=False
    ),
]


def list_runs(
    folder: Folder = RUNS,
    method: Method = None,
    benchmark: Benchmark = None,
    dataset: DatasetName = None,
    state: State = None,
    where: Where = None,
    settings: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Settings to show too, comma-separated.", show_default=False)
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="COLUMN", help="A column or a setting; -COLUMN for the highest first.")
    ] = "run",
    limit: Annotated[int | None, typer.Option(metavar="N", help="At most so many rows.", show_default="all")] = None,
    format: Annotated[str, typer.Option(help="table, json or csv.")] = "table",
) -> None:
    """A row for each method of each run: its state, accuracy and BWT, and when it began.

    Example: engram runs list runs --method dhp+si --where 'epochs>=5' --sort -accuracy
    """
    check_choice("format", format, ("table", "json", "csv"))
    chosen = [name.strip() for name in settings.split(",")] if settings else []
    given = {"method": method, "benchmark": benchmark, "dataset": dataset, "state": state}
    conditions = parse_conditions(given, where or ())
    index = open_index(folder)
    rows = select(index, conditions, settings=chosen, sort=sort, limit=limit)
    if format == "json":
        print(json.dumps(rows, indent=1))
    elif format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(shown_columns(chosen))
        writer.writerows([in_csv(value) for value in row.values()] for row in rows)
    else:
        print(_listing(rows, chosen, index).to_text(), end="")


def open_index(folder: Path) -> Index:
    with bar("reading runs") as report:
        index = Index(folder, report)
    if index.closed:
        more = f" (and {len(index.closed) - 1} more)" if len(index.closed) > 1 else ""
        print(f"engram: cannot look into {folder / index.closed[0]}{more}", file=sys.stderr)
    return index


@contextmanager
def bar(what: str) -> Iterator[Report]:
    """A bar on the terminal, if there is enough to do."""
    with ExitStack() as shown:
        update: Report | None = None

        def report(done: int, total: int) -> None:
            nonlocal update
            if total >= LONG:
                update = update or shown.enter_context(_drawn(what))
                update(done, total)

        yield report


@contextmanager
def _drawn(what: str) -> Iterator[Report]:
    from rich.console import Console  # late: a listing that needs no bar is over before these are imported
    from rich.progress import Progress

    from engram.cli.display import columns

    console = Console(stderr=True)
    with Progress(*columns(what), console=console, transient=True, disable=not console.is_terminal) as drawn:
        task = drawn.add_task("")
        yield lambda done, total: drawn.update(task, completed=done, total=total)


def _listing(rows: Sequence[dict[str, Any]], settings: Sequence[str], index: Index) -> Table:
    shown = [
        (
            printable(row["run"]),
            (row["label"] if row["kind"] == "sheet" else row["method"]) or "–",
            row["benchmark"] or "–",
            row["dataset"] or "–",
            _or_dash(row["tasks"]),
            _trials(row),
            row["state"],
            *(_or_dash(row[name]) for name in settings),
            _percent(row["accuracy"]),
            _percent(row["sem"]),
            "–" if row["bwt"] is None else number(row["bwt"], 3),
            _when(row["started"]),
        )
        for row in rows
    ]
    columns = ("run", "method", "benchmark", "dataset", "tasks", "trials", "state", *settings)
    title = f"{count(len(rows), 'method')} of {count(len({row['run'] for row in rows}), 'run')} in {index.folder}"
    return Table(title, (*columns, "ACC %", "± SEM", "BWT", "started"), shown)


def _trials(row: dict[str, Any]) -> str:
    """How many were learned to their end, of how many."""
    if row["trials"] is None:
        return "–"
    return str(row["trials"]) if row["done"] == row["trials"] else f"{row['done']}/{row['trials']}"


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else number(100 * value, 2)


@cache
def _when(started: str | None) -> str:
    return "–" if started is None else f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
