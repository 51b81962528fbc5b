"""Many runs as one table that fits a terminal: what all rows share stands above it, and what is left out is named."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from engram.common.errors import printable
from engram.report.layout import Table, count, number

Row = Mapping[str, Any]
SHARED = ("benchmark", "dataset", "tasks", "trials", "state")  # said once in the title, if all rows agree
LEFT_OUT = ("started", "tasks", "dataset", "benchmark", "trials", "state")  # in this order, where a line is too long
SHORTENED = ("run", "label")  # then runs lose their middle, and the words of labels their ends
SHORTEST = 12  # characters of such a name
SHORTEST_WORD = 3
WORD = re.compile(r"([^\W\d_]+)")
GAP = 2  # spaces between columns


def listing(rows: Sequence[Row], settings: Sequence[str], folder: Path, width: int) -> Table:
    """The rows as a table of at most this many columns of text, if its settings and names allow it.

    Args:
        rows: from `store.select`.
        settings: further settings to show, which are never left out.
        folder: the folder that was listed.
        width: of the terminal.

    Example:
        print(listing(list_runs("runs").rows, ["strength"], Path("runs"), 80).to_text())
    """
    columns = _columns(rows, settings)
    title = f"{count(len(rows), 'label')} of {count(len({row['run'] for row in rows}), 'run')} in {folder}"
    if _width(columns) > width:
        shared = {name: columns[name][0] for name in SHARED if len(set(columns[name])) == 1}
        columns = {name: cells for name, cells in columns.items() if name not in shared}
        facts = [_in_words(name, value) for name, value in shared.items() if value != "–"]
        title = "\n".join([title, *textwrap.wrap(", ".join(facts), width)])
    left_out = []
    for name in LEFT_OUT:
        if _width(columns) > width and name in columns:
            del columns[name]
            left_out.append(name)
    whole = columns["label"]
    _shorten(columns, _width(columns) - width)
    notes = _why_damaged(rows)
    if left_out:
        more = f"Left out: {', '.join(left_out)}. A wider terminal shows more, and --format csv everything."
        cut = " The words of long labels are cut." if columns["label"] != whole else ""
        notes = (*notes, *textwrap.wrap(more + cut, width))
    return Table(title, tuple(columns), list(zip(*columns.values(), strict=True)), notes)


def _columns(rows: Sequence[Row], settings: Sequence[str]) -> dict[str, list[str]]:
    """The cells of each column by its heading."""
    made: dict[str, list[str]] = {
        "run": [printable(row["run"]) for row in rows],
        "label": [_label(row) for row in rows],
        "benchmark": [row["benchmark"] or "–" for row in rows],
        "dataset": [row["dataset"] or "–" for row in rows],
        "tasks": [_or_dash(row["tasks"]) for row in rows],
        "trials": [_trials(row) for row in rows],
        "state": [row["state"] for row in rows],
    }
    made |= {name: [_or_dash(row[name]) for row in rows] for name in settings}
    made |= {
        "ACC %": [_percent(row["accuracy"]) for row in rows],
        "± SEM": [_percent(row["sem"]) for row in rows],
        "BWT": ["–" if row["bwt"] is None else number(row["bwt"], 3) for row in rows],
        "started": [_when(row["started"]) for row in rows],
    }
    return made


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    widest = (max(map(cell_len, (name, *cells))) for name, cells in columns.items())
    return sum(widest) + GAP * (len(columns) - 1)


def _shorten(columns: dict[str, list[str]], too_much: int) -> None:
    """Take so many characters from the names, always from the column that is the widest."""
    rooms = {name: max(map(cell_len, (name, *columns[name]))) for name in SHORTENED}
    while too_much > 0 and max(rooms.values()) > SHORTEST:
        rooms[max(rooms, key=lambda name: rooms[name])] -= 1
        too_much -= 1
    for name, room in rooms.items():
        columns[name] = [
            _shortened(_in_short_words(cell, room) if name == "label" else cell, room) for cell in columns[name]
        ]


def _shortened(text: str, room: int) -> str:
    """Both ends of a text, with "…" between them."""
    if cell_len(text) <= room:
        return text
    half = len(text) // 2
    first, last = text[:half], text[half:]
    while cell_len(first) + cell_len(last) > room - 1:
        first, last = (first[:-1], last) if cell_len(first) >= cell_len(last) else (first, last[1:])
    return f"{first}…{last}"


def _in_short_words(label: str, room: int) -> str:
    """A label whose longest words have lost their ends: its methods and its numbers still tell it from others."""
    parts = WORD.split(label)
    for _ in range(cell_len(label) - room):
        longest = max(range(len(parts)), key=lambda k: len(parts[k]) if k % 2 else 0)  # words have odd places
        if len(parts[longest]) <= SHORTEST_WORD:
            break
        parts[longest] = parts[longest][:-1]
    return "".join(parts)


def _in_words(name: str, value: str) -> str:
    if name not in ("tasks", "trials"):
        return value
    return count(int(value), name.removesuffix("s")) if value.isdecimal() else f"{value} {name}"


def _label(row: Row) -> str:
    """The label, and the form of the head where the label does not tell it."""
    label = printable(row["label"]) or "–"
    return f"{label} ({row['form']})" if row["form"] else label


def _percent(value: float | None) -> str:
    return "–" if value is None else number(100 * value, 2)


def _why_damaged(rows: Sequence[Row]) -> tuple[str, ...]:
    """A sentence for each run that is damaged, or of another format; labels that share it have it once."""
    damaged = [row for row in rows if row["state"] == "damaged"]
    return tuple(dict.fromkeys(printable(f"{row['run']}: {row['problem']}") for row in damaged))


def _trials(row: Row) -> str:
    """How many trials are finished, of how many."""
    if row["trials"] is None:
        return "–"
    return str(row["trials"]) if row["done"] == row["trials"] else f"{row['done']}/{row['trials']}"


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)


@cache
def _when(started: str | None) -> str:
    return "–" if started is None else f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
