"""A drawing: a figure with its numbers, drawn once and kept as PNG, PDF, CSV, or SVG for a page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.common.errors import check_choice
from engram.common.files import write_atomically
from engram.report.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "csv")
# Files that depend on nothing but the results: no date, and no names that are drawn by chance.
STEADY: Any = {"svg.hashsalt": "engram", "svg.fonttype": "none", "pdf.fonttype": 42}
WITHOUT_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}

Cell = str | int | float


@dataclass(frozen=True)
class Drawing:
    """What a figure shows, for eyes, in words and in numbers."""

    name: str  # of its files
    title: str
    caption: str  # how to read it
    figure: Figure
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]  # every number that is drawn, in long form
    numbers: Table = field(repr=False)  # the same, or the gist of it, for readers

    def to_csv(self) -> str:
        """The numbers as exactly as they are known; what was not measured is empty."""
        text = io.StringIO()
        exact = [["" if _is_nan(cell) else cell for cell in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows([self.columns, *exact])
        return text.getvalue()

    def to_bytes(self, format: str) -> bytes:
        """The figure as a file of this format; the same results give the same bytes."""
        import matplotlib  # late: it is slow to load

        if format == "csv":
            return self.to_csv().encode()
        image = io.BytesIO()
        with matplotlib.rc_context(STEADY):
            self.figure.savefig(
                image, format=format, dpi=200, metadata=WITHOUT_DATE[format], transparent=format == "svg"
            )
        return image.getvalue()


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # late, and without pyplot, which looks for a screen

    return Figure(figsize=(width, height), layout="constrained")


def parse_formats(text: str) -> list[str]:
    """The formats in a comma list, as a person types it."""
    formats = [name.strip() for name in text.split(",")]
    for name in formats:
        check_choice("format", name, FORMATS)
    return formats


def save_drawings(drawings: Iterable[Drawing], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write each drawing in each format, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings:
        for format in formats:
            paths.append(folder / f"{drawing.name}.{format}")
            write_atomically(paths[-1], drawing.to_bytes(format))
    return paths


def _is_nan(cell: Cell) -> bool:
    return isinstance(cell, float) and math.isnan(cell)
