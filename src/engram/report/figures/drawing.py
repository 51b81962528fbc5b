"""A drawing: a figure with its numbers, drawn once and saved as PNG, PDF, CSV, or SVG for a page; and its look."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as xml

import numpy as np

from engram.common.errors import InputError, check_choice
from engram.common.files import write_atomically
from engram.config.methods import parts_of
from engram.report.layout import Table, number
from engram.runs import metrics
from engram.runs.format import RUN
from engram.runs.metrics import Array, Estimate
from engram.runs.result import Result
from engram.runs.run import REPRODUCTION, SWEEP

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "csv")
# The files depend on nothing but the results: no date, and no random names.
STEADY: Any = {"svg.hashsalt": "engram", "svg.fonttype": "none", "pdf.fonttype": 42}
WITHOUT_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}

# Okabe and Ito's colours, which can be told apart with any colour vision: one per penalty, dashed without a named head.
COLOURS: dict[str | None, str] = {
    None: "#000000",
    "si": "#0072B2",
    "ewc": "#E69F00",
    "online-ewc": "#D55E00",
    "mas": "#009E73",
}
OTHER = "#CC79A7"  # for a penalty that has no colour here
LINES = ("-", "--", ":", "-.")
INK = "#000000"  # for text and axes; a page replaces it by its own
WIDTH = 4.8  # inches: a column of a paper, and about the width of a phone
SMALL, MEDIUM = 9.0, 10.0  # sizes of text, in points: on a phone a point is a pixel
SCREEN = 120  # pixels to the inch in a notebook, which gets twice as many for sharp screens
LONGEST_LABEL = 24  # characters, in a legend of two columns

# Ours is filled and the paper's is hollow, in every figure.
PAPER: dict[str, Any] = {"marker": "D", "ms": 5, "mfc": "none", "mew": 1.1, "ls": "none", "zorder": 4}
OURS: dict[str, Any] = {"marker": "o", "ms": 4.5, "zorder": 3}

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
REFERENCE = re.compile(r"#([\w.-]+)")

Cell = str | int | float


@dataclass(frozen=True)
class Look:
    """How one label is drawn in all figures of a run."""

    colour: str
    line: str


def looks(results: Mapping[str, Result]) -> dict[str, Look]:
    """A look for each label: by its method, or in turn where several labels are of one method.

    Example:
        looks(run.results)["dhp+si"].colour
    """
    by_method = {label: look_of(result.config.method) for label, result in results.items()}
    if len(set(by_method.values())) == len(by_method):
        return by_method
    colours = [*COLOURS.values(), OTHER]
    return {
        label: Look(colours[k % len(colours)], LINES[k // len(colours) % len(LINES)]) for k, label in enumerate(results)
    }


def are_by_method(results: Mapping[str, Result]) -> bool:
    """Whether colours stand for penalties, and dashes for methods that name no head."""
    return len({look_of(result.config.method) for result in results.values()}) == len(results)


def look_of(method: str) -> Look:
    """The look of a method: a colour for its penalty, a dashed line if it names no head."""
    return Look(colour_of_method(method), "--" if parts_of(method).head is None else "-")


@dataclass(frozen=True)
class Drawing:
    """What a figure shows, for eyes, in words and in numbers."""

    name: str  # the name of its files
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
    return _shown_figure()(figsize=(width, height), layout="constrained")


@cache
def _shown_figure() -> type[Figure]:
    """A figure that a notebook shows: of one that was made without pyplot it would print the size."""
    from matplotlib.figure import Figure  # late, and without pyplot, which looks for a screen

    class ShownFigure(Figure):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=2 * SCREEN)
            width, height = (round(inches * SCREEN) for inches in self.get_size_inches())
            return image.getvalue(), {"width": width, "height": height}

    return ShownFigure


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


def check_no_run(folder: Path) -> None:
    """Refuse to draw where a file of a run would be overwritten, such as dynamics.csv."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot draw into {folder}: it is not a folder")
    if any((folder / name).exists() for name in (RUN, SWEEP, REPRODUCTION)):
        raise InputError(f"cannot draw into {folder}, which holds results: name another folder")


def _is_nan(cell: Cell) -> bool:
    return isinstance(cell, float) and math.isnan(cell)


def colour_of_method(method: str) -> str:
    """The colour of a method's penalty; all rehearsals have the one for others."""
    _, penalty, rehearsal = parts_of(method)
    return COLOURS.get(rehearsal or penalty, OTHER)


def paper_mark() -> Artist:
    """The paper's mark, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, label="the paper's", **PAPER)


def tidy(axes: Axes, xlabel: str, ylabel: str = "") -> None:
    axes.set_xlabel(xlabel, fontsize=MEDIUM)
    axes.set_ylabel(ylabel, fontsize=MEDIUM)
    axes.tick_params(labelsize=SMALL, width=0.6, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_linewidth(0.6)


def rule(axes: Axes, *, x: float | None = None, y: float | None = None, strength: float = 0.15) -> None:
    """A thin line across, behind everything."""
    draw = axes.axvline if x is not None else axes.axhline
    draw(x if x is not None else y or 0.0, color=INK, alpha=strength, lw=0.6, zorder=0)


def legend_below(figure: Figure, handles: Sequence[Artist], ncols: int = 2) -> None:
    """In columns; where each method has its pair, those without DHP stand left of those with it."""
    plastic = [str(handle.get_label()).startswith("dhp") for handle in handles]
    if 2 * sum(plastic) == len(handles):
        handles = [handle for _, handle in sorted(zip(plastic, handles, strict=True), key=lambda entry: entry[0])]
    if handles:
        ncols = 1 if are_long([str(handle.get_label()) for handle in handles]) else ncols
        figure.legend(handles=handles, frameon=False, fontsize=SMALL, ncols=ncols, loc="outside lower center")


def are_long(labels: Iterable[str]) -> bool:
    """Whether labels are too long for a legend of two columns."""
    return max(map(len, labels), default=0) > LONGEST_LABEL


def legend_height(results: Mapping[str, Result]) -> float:
    """What a legend of one column needs more than one of two, in inches."""
    return 0.17 * (len(results) // 2) if are_long(results) else 0.0


def band(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], look: Look, label: str) -> Artist:
    """Draw means over trials in % with a band of one SEM; returns the line, for a legend."""
    mean = 100 * np.array([e.mean for e in estimates])
    sem = 100 * np.nan_to_num(np.array([e.sem for e in estimates]))
    colour = look.colour
    (line,) = axes.plot(x, mean, look.line, color=colour, marker="o", ms=3, lw=1.3, label=label)
    axes.fill_between(x, mean - sem, mean + sem, color=colour, alpha=0.15, lw=0)
    return line


def estimates_of(values: Array) -> list[Estimate]:
    """Of each column of (trials, columns)."""
    return [metrics.estimate(column) for column in values.T]


def percent(estimate: Estimate) -> str:
    """For readers: the mean in %, with its SEM where there is one."""
    sem = "" if np.isnan(estimate.sem) else f" ± {number(100 * estimate.sem, 2)}"
    return f"{number(100 * estimate.mean, 2)}{sem}"


def to_svg(drawing: Drawing, prefix: str) -> str:
    """The figure as an <svg> element. `prefix` must be unique in its page: ids of two figures would collide."""
    root = xml.fromstring(drawing.to_bytes("svg"))
    wanted = {name for element in root.iter() for name in _references(element)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(SVG) in ("metadata", "style"):  # says where matplotlib is; rules for a whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        _rewrite(element, wanted, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": f"{drawing.title}. {drawing.caption}", "fill": "currentColor"}
    title = xml.Element("title")
    title.text = drawing.title
    root.insert(0, title)
    return xml.tostring(root, encoding="unicode")


def _references(element: xml.Element) -> list[str]:
    attributes = (element.get(name, "") for name in (f"{XLINK}href", "clip-path"))
    return [name for value in attributes for name in REFERENCE.findall(value)]


def _rewrite(element: xml.Element, wanted: set[str], prefix: str) -> None:
    attributes = dict(element.attrib)
    element.attrib.clear()
    for name, value in attributes.items():
        if name == "id":
            if value not in wanted:
                continue
            value = f"{prefix}-{value}"
        elif name == f"{XLINK}href":
            name, value = "href", re.sub("^#", f"#{prefix}-", value)  # an image holds its own bytes
        elif name == "clip-path":
            value = REFERENCE.sub(rf"#{prefix}-\1", value)
        elif name == "style":
            value = value.replace(INK, "currentColor")
            value = re.sub(r"(font: [^;]*?[\d.]+px) [^;]*", r"\1 var(--sans, sans-serif)", value)
        element.set(name, value)
