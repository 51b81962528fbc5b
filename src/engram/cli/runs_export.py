"""`engram runs export`: the runs of a folder as one table for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engram.cli.runs_list import RUNS, Benchmark, DatasetName, Folder, Method, State, Where, bar, open_index
from engram.report.layout import count
from engram.runs.store.export import export
from engram.runs.store.query import parse_conditions, select


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
    """One flat table for other programs: a row a trial, with all settings as columns.

    Example: engram runs export runs --out runs.csv
    """
    given = {"method": method, "benchmark": benchmark, "dataset": dataset, "state": state}
    conditions = parse_conditions(given, where or ())
    index = open_index(folder)
    with bar("exporting runs") as report:
        written, without = export(index, select(index, conditions), out, matrix=matrix, report=report)
    left_out = f"; {without} without results left out" if without else ""
    print(f"{count(written, 'row')} in {out}{left_out}")
