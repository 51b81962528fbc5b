"""Runs as one flat table for other programs: a row for each trial of each label of each run, as CSV or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from engram.common.errors import InputError
from engram.common.files import replacement
from engram.config.settings import SETTINGS
from engram.runs.result import Result
from engram.runs.run import read_run
from engram.runs.store import Report, Row

NAMED: dict[str, type] = {"run": str, "kind": str, "label": str, "state": str, "started": str}
MEASURED: dict[str, type] = {"average_accuracy": float, "bwt": float, "forgetting": float, "forward_transfer": float}
MEASURED |= {"first_task": float, "last_task": float, "diverged": bool}
IN_MATRIX: dict[str, type] = {"after": int, "task": int, "accuracy": float}
ROWS_AT_ONCE = 20_000


def columns(matrix: bool) -> dict[str, type]:
    """The columns of a table with their types."""
    settings = {name: setting.type for name, setting in SETTINGS.items()}
    return {**NAMED, **settings, "trial": int, **(IN_MATRIX if matrix else MEASURED)}


def export(
    folder: Path,
    chosen: Sequence[Row],
    out: Path,
    *,
    matrix: bool = False,
    report: Report = lambda done, total: None,
) -> tuple[int, int]:
    """Write the trials of chosen rows to a file.

    Args:
        folder: the folder that was listed.
        chosen: rows of `store.list_runs`, or those that `store.select` left.
        out: a .csv or .parquet file, which is replaced.
        matrix: a row for each accuracy that was measured, on a task after a number of tasks (0: before the first),
            in place of a row for each trial.
        report: called with how many of how many runs have been read.

    Returns:
        How many rows were written, and how many of the chosen ones had no results.

    Example:
        >>> listing = list_runs("runs")
        >>> export(listing.folder, listing.rows, Path("runs.csv"))
    """
    write = {".csv": _write_csv, ".parquet": _write_parquet}.get(out.suffix)
    if write is None:
        raise InputError(f"an export is a .csv or a .parquet file, not {out}")
    table = _Rows(folder, chosen, matrix, report)
    try:
        with replacement(out) as path:
            write(path, columns(matrix), table)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from error
    return table.written, table.without_results


class _Rows:
    """The rows of an export, made one after the other; afterwards it knows how many there were."""

    def __init__(self, folder: Path, chosen: Sequence[Row], matrix: bool, report: Report):
        self.folder, self.matrix, self.report = folder, matrix, report
        self.runs: dict[str, list[Row]] = {}
        for row in chosen:
            self.runs.setdefault(row["run"], []).append(row)
        self.written = self.without_results = 0

    def __iter__(self) -> Iterator[Row]:
        for done, (name, rows) in enumerate(self.runs.items()):
            self.report(done, len(self.runs))
            for row in self._of_run(name, rows):
                self.written += 1
                yield row

    def _of_run(self, name: str, rows: Sequence[Row]) -> Iterator[Row]:
        try:
            run = read_run(self.folder / name, dynamics=False)
        except InputError:
            self.without_results += len(rows)
            return
        for row in rows:
            result = run.results.get(row["label"])
            if result is None:
                self.without_results += 1
                continue
            named = {column: row[column] for column in NAMED} | {"state": run.state(row["label"])}
            for cells in _cells(result, self.matrix):
                yield {**named, **result.config.to_dict(), **cells}


def _cells(result: Result, matrix: bool) -> Iterator[Row]:
    """The rows of one result, with None where nothing was measured."""
    columns = result.columns(matrix)
    for values in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield {name: value if math.isfinite(value) else None for name, value in zip(columns, values, strict=True)}


def in_csv(value: Any) -> Any:
    """Numbers to their last digit, nothing for None, and JSON for lists and booleans."""
    return json.dumps(value) if isinstance(value, bool | list) else value


def _write_csv(path: Path, kinds: dict[str, type], rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kinds)
        writer.writerows([in_csv(row[name]) for name in kinds] for row in rows)


def _write_parquet(path: Path, kinds: dict[str, type], rows: Iterable[Row]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError("pyarrow is not installed: pip install 'engram-cl[parquet]'") from None
    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    types[tuple] = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])
    waiting = iter(rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while portion := list(islice(waiting, ROWS_AT_ONCE)):
            try:
                writer.write_table(pyarrow.Table.from_pylist(portion, schema=schema))
            except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
                raise InputError(f"a value does not fit into Parquet ({error}); a .csv file takes it") from error
