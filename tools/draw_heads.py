"""Draw the picture of docs/heads.md: what a head with a memory is put together from, and which head uses what."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

import engram
from engram.common.files import write_atomically
from engram.report.figures.drawing import COLOURS, INK, MEDIUM, SMALL, WIDTH, new_figure

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "heads-family.png"
ROW = 0.175  # inches
LEFT = -6.4  # of the names of choices, in columns

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
    **dict.fromkeys(("linear", "scaled", "matched"), ((0,), (), (), (), (), (1,))),
    **dict.fromkeys(("dhp", "dhp-uniform"), ((0,), (0,), (0,), (1,), (0,), (1,))),
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
    """A row for each choice under the name of its part, a column for each head, and a dot where a head uses it."""
    assert set(USED) == set(engram.heads.list()), set(USED) ^ set(engram.heads.list())
    rows = {(part, choice): 0.0 for part, choices in PARTS.items() for choice in range(len(choices))}
    figure = new_figure(WIDTH, ROW * (len(rows) + 1.6 * len(PARTS)) + 1.3)
    axes = figure.subplots()
    y = 0.0
    for part, choices in PARTS.items():
        axes.text(LEFT, y - 0.9, part, va="center", fontsize=MEDIUM, weight="bold")
        y -= 1.6
        for k, choice in enumerate(choices):
            rows[part, k] = y
            axes.text(LEFT + 0.3, y - 0.1, choice, va="center", fontsize=SMALL)
            axes.plot([-0.5, len(USED) - 0.5], [y, y], lw=0.3, color=INK, alpha=0.4, zorder=0)
            y -= 1
    for column, (head, used) in enumerate(USED.items()):
        axes.text(column, 0, head, rotation=90, ha="center", va="bottom", fontsize=SMALL)
        at = [rows[part, k] for part, own in zip(PARTS, used, strict=True) for k in own]
        axes.plot([column] * len(at), at, "o", ms=6, color=COLOURS["online-ewc"])
    axes.set(xlim=(LEFT, len(USED) - 0.4), ylim=(y + 0.4, 0))
    axes.axis("off")
    return figure


def main() -> None:
    kept = io.BytesIO()
    family().savefig(kept, format="png", dpi=200, metadata={"Software": None})
    write_atomically(IMAGE, kept.getvalue())


if __name__ == "__main__":
    main()
