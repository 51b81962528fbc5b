"""All runs as one flat table for other programs: a row for each trial of each method of each run, as CSV or Parquet."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from engram.common.errors import InputError
from engram.common.files import replacement
from engram.config.settings import SETTINGS
from engram.runs.result import Result
from engram.runs.store.cells import in_csv
from engram.runs.store.index import Index, Report
from engram.runs.store.stored import Stored, read_stored

Row = dict[str, Any]

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
    index: Index,
    chosen: Sequence[Row],
    out: Path,
    *,
    matrix: bool = False,
    report: Report = lambda done, total: None,
) -> tuple[int, int]:
    """Write the chosen rows of the index, a row a trial; returns how many rows, and how many of those had no results.

    With `matrix`, a row for each accuracy that was measured: on a task, after so many tasks; 0 is before the first.
    The numbers are read from the runs themselves.
    """
    write = {".csv": _write_csv, ".parquet": _write_parquet}.get(out.suffix)
    if write is None:
        raise InputError(f"an export is a .csv or a .parquet file, not {out}")
    table = _Rows(index, chosen, matrix, report)
    try:
        with replacement(out) as path:
            write(path, columns(matrix), table)
    except OSError as reason:
        raise InputError(f"cannot write {out}: {reason.strerror or reason}") from reason
    return table.written, table.without_results


class _Rows:
    """The rows of an export, made one after the other; afterwards it knows how many there were."""

    def __init__(self, index: Index, chosen: Sequence[Row], matrix: bool, report: Report):
        self.index, self.matrix, self.report = index, matrix, report
        self.labels: dict[str, dict[str, Row]] = {}
        for row in chosen:
            self.labels.setdefault(row["run"], {})[row["label"]] = row
        self.written = self.without_results = 0

    def __iter__(self) -> Iterator[Row]:
        for done, (run, wanted) in enumerate(self.labels.items()):
            self.report(done, len(self.labels))
            kind = next(iter(wanted.values()))["kind"]
            stored = read_stored(self.index.folder / run, kind)
            for row in self._rows(stored, wanted):
                self.written += 1
                yield row

    def _rows(self, stored: Stored, wanted: dict[str, Row]) -> Iterator[Row]:
        for entry in stored.entries:
            if entry.label not in wanted:
                continue
            if entry.result is None:
                self.without_results += 1
                continue
            named = {name: wanted[entry.label][name] for name in NAMED} | {"state": entry.state}
            for cells in _matrices(entry.result) if self.matrix else _trials(entry.result):
                yield {**named, **entry.result.config.to_dict(), **cells}


def _trials(result: Result) -> Iterator[Row]:
    lost = {divergence.trial for divergence in result.diverged}
    measured = {
        "average_accuracy": result.average_accuracy[:, -1],
        "bwt": result.bwt,
        "forgetting": result.forgetting,
        "forward_transfer": result.forward_transfer,
        "first_task": result.first_task[:, -1],
        "last_task": result.latest_task[:, -1],
    }
    for k in range(len(result.accuracy)):
        trial = result.config.first_trial + k
        yield {"trial": trial, "diverged": trial in lost, **{name: _or_none(v[k]) for name, v in measured.items()}}


def _matrices(result: Result) -> Iterator[Row]:
    for k, matrix in enumerate(result.accuracy):
        for after, row in enumerate((result.untrained[k], *matrix)):
            for task, accuracy in enumerate(row, start=1):
                if math.isfinite(accuracy):
                    trial = result.config.first_trial + k
                    yield {"trial": trial, "after": after, "task": task, "accuracy": float(accuracy)}


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


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
            except (pyarrow.ArrowException, OverflowError, UnicodeError) as reason:
                raise InputError(f"a value does not fit into Parquet ({reason}); a .csv file takes it") from reason
