"""What the index has of a run: a row for each of its methods."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engram.common.registry import BENCHMARKS
from engram.config.methods import all_methods
from engram.config.settings import SETTINGS
from engram.runs import metrics
from engram.runs.store.cells import as_cell
from engram.runs.store.stored import Entry, Stored, read_stored


def read_rows(path: Path, kind: str) -> tuple[tuple[str, ...], list[list[Any]]]:
    """The files on which all depends, and the rows: the index's MEASURES, then all settings."""
    stored = read_stored(path, kind)
    return stored.files, [_row(position, entry, stored) for position, entry in enumerate(stored.entries)]


def _row(position: int, entry: Entry, stored: Stored) -> list[Any]:
    done, accuracy, sem, bwt = 0, None, None, None
    if entry.result is not None:
        accuracy, sem, done = metrics.mean_and_sem(entry.result.average_accuracy[:, -1])
        bwt, _, _ = metrics.mean_and_sem(entry.result.bwt)
    measures = [position, entry.label, entry.state, entry.problem, _started(stored.about), done, accuracy, sem, bwt]
    settings: dict[str, Any] = {}
    if entry.config is not None:
        settings = entry.config.to_dict()
    else:  # what the run says of itself still finds a method that is damaged
        settings["benchmark"] = (
            stored.about.get("benchmark") if stored.about.get("benchmark") in BENCHMARKS.names() else None
        )
        settings["method"] = entry.label if entry.label in all_methods() else None
    return [as_cell(value) for value in (*measures, *(settings.get(name) for name in SETTINGS))]


def _started(about: dict[str, Any]) -> str | None:
    """In universal time, so that the order of words is the order in time."""
    try:
        return datetime.fromisoformat(about["started"]).astimezone(UTC).isoformat(timespec="seconds")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None
