"""A table of text, and how it is written down: in Markdown, as CSV, in plain letters."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, the first column to the left and the others to the right, with notes below."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|" + "|".join(["---"] + ["---:"] * (len(self.columns) - 1)) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def to_text(self) -> str:
        """In plain letters: what a terminal shows of ten thousand rows, in a small part of the time."""
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
    """As text, a dash for what was not measured."""
    return "–" if math.isnan(value) else f"{rounded(value, digits):.{digits}f}"


def rounded(value: float, digits: int) -> float:
    """Rounded, and never a negative zero, which would be printed with its sign."""
    return round(value, digits) + 0.0


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
