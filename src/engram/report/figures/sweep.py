"""A sweep as a picture: accuracy against each setting that was swept, a panel each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engram.config.settings import Config
from engram.report.figures.drawing import Cell, Drawing, new_figure
from engram.report.figures.style import MEDIUM, WIDTH, colour_of_method, legend_below, rule, tidy
from engram.report.tables import Table, number
from engram.runs import metrics

LOGARITHMIC = 20  # times the smallest value is the largest, from which on an axis is


class Tried(Protocol):
    """A point of a sweep, as far as it can be drawn."""

    point: dict[str, Any]
    config: Config
    scores: list[float]

    @property
    def finished(self) -> bool: ...


def draw_sweep(tried: Sequence[Tried], best: Mapping[str, Tried]) -> Drawing:
    """How far every point is behind the best of its method, against each of its settings.

    Trials differ more than settings do, and not all points had all of them: so the difference is taken trial by trial.
    """
    names = list(tried[0].point)
    methods = list(dict.fromkeys(each.config.method for each in tried))
    figure = new_figure(WIDTH, 3.2)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    rows: list[tuple[Cell, ...]] = []
    handles: dict[str, Any] = {}
    for axes, name in zip(panels, names, strict=True):
        places, labels = _places([each.point[name] for each in tried])
        places = _side_by_side(places, [methods.index(each.config.method) for each in tried], bool(labels))
        for each, place in zip(tried, places, strict=True):
            less = metrics.paired_difference(each.scores, best[each.config.method].scores)
            colour = colour_of_method(each.config.method)
            drawn = axes.errorbar(
                place,
                100 * less.mean,
                yerr=None if less.num_trials < 2 else 100 * less.sem,
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
                rows.append((each.config.method, *cells, 100 * less.mean, 100 * less.sem, less.num_trials))
        if labels:
            axes.set_xticks(range(len(labels)), labels)
        elif min(places) > 0 and max(places) / min(places) > LOGARITHMIC:
            axes.set_xscale("log")
        rule(axes, y=0)
        tidy(axes, name, "accuracy less the best's, points" if axes is panels[0] else "")
    config = tried[0].config
    figure.suptitle(f"{config.benchmark} ({config.dataset}); hollow: given up early", fontsize=MEDIUM)
    legend_below(figure, list(handles.values()))
    numbers = [
        (*(str(cell) for cell in row[: 1 + len(names)]), *(number(float(cell), 2) for cell in row[1 + len(names) : -1]))
        for row in rows
    ]
    return Drawing(
        "sweep",
        "What was tried",
        "Average accuracy after the last task, less that of the best in the same trials, with one standard error; "
        "hollow points were given up early.",
        figure,
        ("method", *names, "less the best", "SEM", "trials"),
        rows,
        Table("Final average accuracy less the best's, in points", ("method", *names, "less the best", "SEM"), numbers),
    )


def _places(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Where values are drawn: numbers at their place, others side by side, with labels."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values], []
    texts = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
    kinds = list(dict.fromkeys(texts))
    return [float(kinds.index(text)) for text in texts], kinds


def _side_by_side(places: list[float], methods: list[int], labelled: bool) -> list[float]:
    """A little apart where several methods have the same value, so that none covers another."""
    if labelled:
        return [place + 0.08 * method for place, method in zip(places, methods, strict=True)]
    if min(places) > 0 and max(places) / min(places) > LOGARITHMIC:
        apart = (max(places) / min(places)) ** 0.015
        return [place * apart**method for place, method in zip(places, methods, strict=True)]
    apart = 0.015 * ((max(places) - min(places)) or 1.0)
    return [place + apart * method for place, method in zip(places, methods, strict=True)]
