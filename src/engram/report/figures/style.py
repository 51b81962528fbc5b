"""The look that all figures share: colours, lines, and one way to say paper and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engram.report.layout import number
from engram.runs import metrics
from engram.runs.metrics import Array, Estimate
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any kind of colour vision: one a penalty, dashed without DHP.
COLOURS: dict[str | None, str] = {
    None: "#000000",
    "si": "#0072B2",
    "ewc": "#E69F00",
    "online-ewc": "#D55E00",
    "mas": "#009E73",
}
OTHER = "#CC79A7"  # of a penalty that has no colour of its own yet
INK = "#000000"  # of words and axes; a page puts its own in this one's place
WIDTH = 4.8  # inches: a column of a paper, and about the width of a phone
SMALL, MEDIUM = 7.5, 8.5  # sizes of words, in points

# Ours is filled, the paper's is hollow: everywhere.
PAPER: dict[str, Any] = {"marker": "D", "ms": 5, "mfc": "none", "mew": 1.1, "ls": "none", "zorder": 4}
OURS: dict[str, Any] = {"marker": "o", "ms": 4.5, "zorder": 3}


def colour_of(result: Result) -> str:
    return COLOURS.get(result.config.penalty, OTHER)


def colour_of_method(method: str) -> str:
    last = method.split("+")[-1]
    return COLOURS[None] if last in ("finetune", "dhp") else COLOURS.get(last, OTHER)


def line_of(result: Result) -> str:
    return "-" if result.config.plastic else "--"


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


def legend_below(figure: Figure, handles: Sequence[Artist]) -> None:
    """In two columns; where each method has its pair, those without DHP stand left and those with it right."""
    plastic = [str(handle.get_label()).startswith("dhp") for handle in handles]
    if 2 * sum(plastic) == len(handles):
        handles = [handle for _, handle in sorted(zip(plastic, handles, strict=True), key=lambda entry: entry[0])]
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=SMALL, ncols=2, loc="outside lower center")


def band(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], result: Result, label: str) -> Artist:
    """Mean over trials in % with a band of one SEM; returns what stands for it in a legend."""
    mean = 100 * np.array([e.mean for e in estimates])
    sem = 100 * np.nan_to_num(np.array([e.sem for e in estimates]))
    colour = colour_of(result)
    (line,) = axes.plot(x, mean, line_of(result), color=colour, marker="o", ms=3, lw=1.3, label=label)
    axes.fill_between(x, mean - sem, mean + sem, color=colour, alpha=0.15, lw=0)
    return line


def estimates_of(values: Array) -> list[Estimate]:
    """Of each column of (trials, columns)."""
    return [metrics.estimate(column) for column in values.T]


def percent(estimate: Estimate) -> str:
    """For readers: the mean in %, with its SEM where there is one."""
    sem = "" if np.isnan(estimate.sem) else f" ± {number(100 * estimate.sem, 2)}"
    return f"{number(100 * estimate.mean, 2)}{sem}"
