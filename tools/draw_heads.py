"""Draw the picture of docs/heads.md: what a head with a memory is put together from, and which head uses what."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import engram
from engram.common.files import write_atomically
from engram.report.figures.drawing import COLOURS, INK, SMALL, new_figure

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "heads-family.png"
WIDTH, HEIGHT = 7.6, 4.3

# The parts in the order in which a batch meets them, and the choices for each.
PARTS = {
    "ψ: used": ("features", "normalised", "random ReLU", "keys f(h)", "a random part"),
    "written": ("before", "after the step"),
    "rate": ("η or r", "1/n", "gate m(h)"),
    "M: held": ("mean", "trace", "+ eligibility", "+ moment", "frequency"),
    "read": ("α M", "M", "nearest", "cosine", "LDA", "ridge", "log M"),
    "θ": ("none", "beside M", "is M"),
}
# What each head uses, by the numbers of the choices.
USED: dict[str, tuple[tuple[int, ...], ...]] = {
    "linear, scaled, matched": ((0,), (), (), (), (), (1,)),
    "dhp, dhp-uniform": ((0,), (0,), (0,), (1,), (0,), (1,)),
    "steady": ((0,), (0,), (0,), (1,), (0,), (1,)),
    "hebbian-softmax": ((0,), (1,), (1,), (0,), (1,), (2,)),
    "fast-weights": ((0, 3), (0,), (1,), (0,), (1,), (1,)),
    "neuromodulated": ((0,), (0,), (2,), (1,), (0,), (1,)),
    "retroactive": ((0,), (0,), (0, 2), (1, 2), (0,), (1,)),
    "balanced": ((4,), (0,), (0,), (4,), (6,), (1,)),
    "balanced-trace": ((4,), (0,), (0,), (1, 4), (0, 6), (1,)),
    "cope": ((1,), (1,), (0,), (0,), (3,), (0,)),
    "ncm": ((0, 1, 2), (0,), (1,), (0,), (2,), (0,)),
    "slda": ((0, 1, 2), (0,), (1,), (0, 3), (4,), (0,)),
    "ridge": ((0, 1, 2), (0,), (1,), (0, 3), (5,), (0,)),
}


def family() -> Figure:
    """A column for each choice under its part, a row for each head, and a dot where a head uses it."""
    named = {name for row in USED for name in row.split(", ")}
    assert named == set(engram.heads.list()), named ^ set(engram.heads.list())
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    columns, start = {}, 0.0
    for part, choices in PARTS.items():
        columns[part] = [start + place for place in range(len(choices))]
        start += len(choices) + 0.8
    _draw_parts(axes, columns)
    for row, (head, used) in enumerate(USED.items()):
        y = -row
        axes.text(-0.9, y, head, ha="right", va="center", fontsize=SMALL, color=INK)
        axes.plot([-0.5, start - 1.3], [y, y], lw=0.3, color=INK, alpha=0.3, zorder=0)
        for own, places in zip(used, columns.values(), strict=True):
            axes.plot([places[k] for k in own], [y] * len(own), "o", ms=6, color=COLOURS["online-ewc"])
    axes.set(xlim=(-5.2, start - 0.6), ylim=(-len(USED) + 0.4, 5.4))
    axes.axis("off")
    return figure


def _draw_parts(axes: Axes, columns: dict[str, list[float]]) -> None:
    """A box for each part, an arrow to the next, and the names of the choices between box and dots."""
    middle = 4.6
    last: float | None = None
    for part, places in columns.items():
        left, right = places[0] - 0.55, places[-1] + 0.55
        box = FancyBboxPatch((left, middle - 0.45), right - left, 0.9, boxstyle="round,pad=0.02", fc="none", ec=INK)
        axes.add_patch(box)
        axes.text((left + right) / 2, middle, part, ha="center", va="center", fontsize=SMALL, weight="bold")
        if last is not None:
            axes.add_patch(FancyArrowPatch((last, middle), (left, middle), arrowstyle="->", mutation_scale=6, lw=0.7))
        last = right
        for place, choice in zip(places, PARTS[part], strict=True):
            axes.text(place - 0.1, 0.6, choice, rotation=60, ha="left", va="bottom", fontsize=SMALL - 1)


def main() -> None:
    kept = io.BytesIO()
    family().savefig(kept, format="png", dpi=200, metadata={"Software": None})
    write_atomically(IMAGE, kept.getvalue())


if __name__ == "__main__":
    main()
