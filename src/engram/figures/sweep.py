"""A sweep as a picture: accuracy against each setting that was swept, a panel each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engram import metrics
from engram.config import Config
from engram.figures.drawing import Cell, Drawing, new_figure
from engram.figures.style import MEDIUM, WIDTH, colour_of_method, legend_below, percent, tidy
from engram.tables import Table


class Tried(Protocol):
    """A point of a sweep, as far as it can be drawn."""

    point: dict[str, Any]
    config: Config
    scores: list[float]

    @property
    def finished(self) -> bool: ...


def draw_sweep(tried: Sequence[Tried]) -> Drawing:
    """Final accuracy of every point against each of its settings; hollow are those that were given up."""
    names = list(tried[0].point)
    figure = new_figure(WIDTH, 3.2)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    rows: list[tuple[Cell, ...]] = []
    handles: dict[str, Any] = {}
    for axes, name in zip(panels, names, strict=True):
        places, labels = _places([each.point[name] for each in tried])
        for each, place in zip(tried, places, strict=True):
            accuracy = metrics.estimate(each.scores)
            colour = colour_of_method(each.config.method)
            drawn = axes.errorbar(
                place,
                100 * accuracy.mean,
                yerr=None if accuracy.num_trials < 2 else 100 * accuracy.sem,
                fmt="o" if each.config.plastic else "s",
                ms=4,
                lw=1,
                color=colour,
                mfc=colour if each.finished else "none",
                zorder=3 if each.finished else 2,
                label=each.config.method,
            )
            if each.finished:
                handles.setdefault(each.config.method, drawn)
            if name == names[0]:
                cells = [str(each.point[n]) for n in names]
                rows.append((each.config.method, *cells, 100 * accuracy.mean, 100 * accuracy.sem, len(each.scores)))
        if labels:
            axes.set_xticks(range(len(labels)), labels)
        elif min(places) > 0 and max(places) / min(places) > 20:
            axes.set_xscale("log")
        tidy(axes, name, "average accuracy, %" if axes is panels[0] else "")
    config = tried[0].config
    figure.suptitle(f"{config.benchmark} ({config.dataset})", fontsize=MEDIUM)
    legend_below(figure, list(handles.values()))
    numbers = [
        (each.config.method, *(str(each.point[n]) for n in names), percent(metrics.estimate(each.scores)))
        for each in tried
    ]
    return Drawing(
        "sweep",
        "What was tried",
        "Average accuracy after the last task, with one standard error over trials; hollow points were given up early.",
        figure,
        ("method", *names, "accuracy %", "SEM", "trials"),
        rows,
        Table("Final average accuracy in %", ("method", *names, "accuracy"), numbers),
    )


def _places(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Where values are drawn: numbers at their place, others side by side, with labels."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values], []
    kinds = list(dict.fromkeys(map(str, values)))
    return [float(kinds.index(str(value))) for value in values], kinds
