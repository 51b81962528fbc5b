"""A table of text, as Markdown, CSV, HTML or plain text; values and labels as text; and what a run says of itself."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any

from rich.cells import cell_len

MOST_NAMED = 8  # labels in one sentence
MANY_COLUMNS = 9  # tables with more are printed in smaller type
MINUS = re.compile(r"(?<![\w.-])-(?=\.?\d)")  # of a number, not of a name or a date
# A space within "97.31 ± 0.12", "[−0.12, +0.34]", "3 of 10 diverged" or "2 above".
WITHIN = re.compile(r" (?=±)|(?<=±) | (?=[−+.\d]+\])|(?<=\d) (?=of \d|diverged|above|below)|(?<=\d of) (?=\d)")


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, the first column aligned left and the others right, with notes below.

    Example:
        print(Table("Accuracy", ("method", "%"), [("si", "97.31")]).to_markdown())
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.to_text().rstrip()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_html()

    def to_markdown(self) -> str:
        """The title in bold, the table, and a paragraph for each note."""
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join(["---"] + ["---:"] * (len(self.columns) - 1)) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def to_csv(self) -> str:
        """The columns and rows, without title and notes."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def to_html(self, kind: str = "") -> str:
        """The title, the table and a list of the notes, with all text escaped.

        Args:
            kind: the class of the table in a page; by default "dense" where there are many columns.
        """
        kind = kind or ("dense" if len(self.columns) > MANY_COLUMNS else "")
        title, named = escape(self.title), f' class="{escape(kind)}"' if kind else ""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in self.columns)
        cells = ("".join(f"<td>{escape(set_cell(cell))}</td>" for cell in row[1:]) for row in self.rows)
        rows = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>{of_row}</tr>'
            for row, of_row in zip(self.rows, cells, strict=True)
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f'<p class="title">{title}</p><div class="scroll" role="region" tabindex="0" aria-label="{title}">'
            f"<table{named}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
            + (f'<ul class="notes">{notes}</ul>' if notes else "")
        )

    def to_text(self) -> str:
        """Plain text: much faster than a table of the terminal where there are ten thousand rows."""
        padded = []
        for k, cells in enumerate(zip(self.columns, *self.rows, strict=True)):
            lengths = [len(cell) if cell.isascii() else cell_len(cell) for cell in cells]
            width = max(lengths)
            spaces = [" " * (width - length) for length in lengths]
            column = [cell + space if k == 0 else space + cell for cell, space in zip(cells, spaces, strict=True)]
            padded.append([column[0], "─" * width, *column[1:]])
        lines = ("  ".join(line).rstrip() for line in zip(*padded, strict=True))
        return "\n".join([self.title, *lines, *self.notes]) + "\n"


def set_cell(cell: str) -> str:
    """A number's minus is as wide as its plus; and where a table is too wide, intervals stand below their means.

    Example:
        >>> set_cell("-0.12 [-0.30, +0.06]")
        '−0.12 [−0.30,\xa0+0.06]'
    """
    return WITHIN.sub("\u00a0", MINUS.sub("−", cell))


def number(value: float, digits: int) -> str:
    """A number as text, with a dash for what was not measured: `number(0.12345, 3)` is "0.123"."""
    return "–" if math.isnan(value) else f"{rounded(value, digits):.{digits}f}"


def rounded(value: float, digits: int) -> float:
    """Rounded, and never a negative zero, which would be printed with its sign."""
    return round(value, digits) + 0.0


def count(n: int, what: str) -> str:
    """A number of things: `count(2, "trial")` is "2 trials"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def shown(value: Any) -> str:
    """A setting's value as text."""
    return "none" if value is None else str(value)


def gathered(values: Iterable[tuple[str, Any]]) -> str:
    """One value if all labels have it, else each value with its labels: "1.0 (si); 1.5 (mas)"."""
    by_value: dict[str, list[str]] = {}
    for label, value in values:
        by_value.setdefault(shown(value), []).append(label)
    if len(by_value) <= 1:
        return "".join(by_value)
    return "; ".join(f"{value} ({in_short(list(dict.fromkeys(labels)))})" for value, labels in by_value.items())


def in_short(labels: Sequence[str], last: str = ", ") -> str:
    """The labels, or how many they are; `last` stands before the last of them."""
    if len(labels) > MOST_NAMED:
        return f"{len(labels)} settings"
    return last.join([*([", ".join(labels[:-1])] if labels[1:] else []), *labels[-1:]])


def interval_of_accuracy(low: float, high: float) -> str:
    """A 95% interval in %: `interval_of_accuracy(0.9, 1.02)` is "90.00 to 100.00", as no accuracy is above 100%."""
    return f"{number(100 * max(low, 0.0), 2)} to {number(100 * min(high, 1.0), 2)}"


def versions_table(about: Mapping[str, Any], title: str = "Versions") -> Table | None:
    """What the numbers may depend on besides settings; None where it was not saved."""
    found: dict[str, str] = {}
    for part in ("versions", "environment", "runtime"):
        content = about.get(part)
        for name, value in content.items() if isinstance(content, dict) else ():
            if value is not None:
                found.setdefault(str(name), str(value))
    return Table(title, ("what", "version"), list(found.items())) if found else None


def data_table(about: Mapping[str, Any], title: str = "Data") -> Table | None:
    """Which files the tasks were made of, and whether they are the published ones; None where it was not saved."""
    words = {"published": "the published files", "structure": "other files of the same form"}
    rows = [
        (
            str(record["name"]),
            words.get(record["origin"], str(record["origin"])),
            f"{record['train']} + {record['test']}",
        )
        for record in about.get("data", ())
    ]
    return Table(title, ("dataset", "files", "training + test samples"), rows) if rows else None


def device_of(about: Mapping[str, Any]) -> str:
    """The GPU, or else the kind of device; empty where it was not saved."""
    environment, runtime = (about.get(name) for name in ("environment", "runtime"))
    gpu = environment.get("gpu") if isinstance(environment, dict) else None
    device = runtime.get("device") if isinstance(runtime, dict) else None
    return str(gpu or device or "")


def time_taken(about: Mapping[str, Any]) -> str:
    """From start to finish, in words; empty where it was not saved, or the clock was set back meanwhile."""
    try:
        taken = datetime.fromisoformat(about["finished"]) - datetime.fromisoformat(about["started"])
    except (KeyError, TypeError, ValueError):
        return ""
    return in_words(taken.total_seconds()) if taken.total_seconds() >= 0 else ""


def in_words(seconds: float) -> str:
    """A duration in words: `in_words(300)` is "5 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
