"""A table of text, as Markdown, CSV or plain text; and numbers, values and labels as text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

MOST_NAMED = 8  # labels in one sentence


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
        from engram.report.html.page import table  # late: pages are made of tables

        return table(self)

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


def in_short(labels: Sequence[str]) -> str:
    """The labels, or how many they are."""
    return ", ".join(labels) if len(labels) <= MOST_NAMED else f"{len(labels)} settings"
