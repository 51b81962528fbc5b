"""Accuracy against settings: η, and any setting that a sweep tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engram.config.methods import CUSTOM
from engram.config.presets import preset, with_scenario
from engram.report.figures.curves import where_from
from engram.report.figures.drawing import (
    MEDIUM,
    WIDTH,
    Cell,
    Drawing,
    band,
    colour_of_method,
    legend_below,
    look_of,
    new_figure,
    percent,
    tidy,
)
from engram.report.layout import Table, number
from engram.report.tables import final
from engram.runs import metrics
from engram.runs.result import Result
from engram.runs.sweep.points import Tried

Results = Mapping[str, Result]
MOST_PANELS = 3  # in a row
LOGARITHMIC = 20  # an axis is logarithmic where the largest value is more than this times the smallest


def sensitivity(results: Results) -> Drawing:
    """Final accuracy against the initial η of the trace.

    Args:
        results: Results that differ in `eta`, by label.

    Example:
        sensitivity(read_run("results/split-mnist/sensitivity").results).to_bytes("png")
    """
    return _against(
        results,
        "sensitivity",
        "eta",
        "initial η (the preset's: dotted)",
        "How much depends on η",
    )


def _against(results: Results, name: str, setting: str, label: str, title: str) -> Drawing:
    figure = new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    handles = []
    for method in dict.fromkeys(result.config.method for result in results.values()):
        of_method = (result for result in results.values() if result.config.method == method)
        some = sorted(of_method, key=lambda result: _value(result, setting))
        positions = [_value(result, setting) for result in some]
        estimates = [final(result) for result in some]
        handles.append(band(axes, positions, estimates, look_of(method), method))
        usual = _usual(some[0], setting)
        if usual is not None:
            axes.axvline(usual, color=colour_of_method(method), ls=":", lw=1, zorder=0)
        for position, e in zip(positions, estimates, strict=True):
            rows.append((method, position, 100 * e.mean, 100 * e.sem, e.num_trials, "" if usual is None else usual))
            mark = " (preset)" if position == usual else ""
            numbers.append((method, f"{position:g}{mark}", percent(e), str(e.num_trials)))
    positive = [float(position) for _, position, *_ in rows if float(position) > 0]
    if len(positive) == len(rows):
        axes.set_xscale("log")
    else:  # logarithmic too, but with room for 0
        axes.set_xscale("symlog", linthresh=min(positive, default=1.0))
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axes, label, "average accuracy, %")
    axes.set_title(where_from(results), fontsize=MEDIUM)
    legend_below(figure, handles)
    held_out = ", on held-out samples of the training set" * all(
        r.config.examine == "validation" for r in results.values()
    )
    several = "; the band is one standard error over trials" * any(len(r.accuracy) > 1 for r in results.values())
    return Drawing(
        name,
        title,
        f"Average accuracy after the last task{held_out}{several}.",
        figure,
        ("method", setting, "accuracy %", "SEM", "trials", f"{setting} of the preset"),
        rows,
        Table(f"Final average accuracy in % by {setting}", ("method", setting, "ours", "trials"), numbers),
    )


def _value(result: Result, setting: str) -> float:
    return float(getattr(result.config, setting) or 0.0)


def _usual(result: Result, setting: str) -> float | None:
    """The preset's value, where the benchmark has a preset."""
    if result.config.benchmark == CUSTOM:
        return None
    usual: float | None = getattr(preset(result.config.benchmark, result.config.method), setting)
    return usual


def draw_sweep(tried: Sequence[Tried], best: Mapping[str, Tried], finished: bool = True) -> Drawing:
    """The accuracy of every point against each of its settings.

    Trials differ more than settings do, and not all points ran all trials. So the best point of a method is drawn at
    its mean over all its trials, and every other one as far from it as it was in the trials that both ran. A point that
    failed is a cross at the bottom, since a scale that goes down to 0 would hide the differences of the others.

    Args:
        tried: every point of a sweep, of all methods.
        best: the best point of each method.
        finished: whether the sweep is; if not, points with fewer trials may still get more.

    Example:
        draw_sweep(tried, {"si": best_of(tried)}).to_bytes("png")
    """
    names = list(tried[0].point)
    methods = list(dict.fromkeys(each.config.method for each in tried))
    columns = len(names) if len(names) <= MOST_PANELS else 2
    lines = -(-len(names) // columns)
    figure = new_figure(WIDTH, 0.9 + 2.3 * lines)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    panels = list(grid.flat)[: len(names)]
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    rows: list[tuple[Cell, ...]] = []
    handles: dict[str, Any] = {}
    for axes, name in zip(panels, names, strict=True):
        positions, labels = _positions([each.point[name] for each in tried])
        positions = _side_by_side(positions, [methods.index(each.config.method) for each in tried], bool(labels))
        for each, position in zip(tried, positions, strict=True):
            leader = best[each.config.method]
            behind = metrics.paired_difference(each.scores, leader.scores)
            error = metrics.estimate(each.scores) if each is leader else behind
            colour = colour_of_method(each.config.method)
            at, line = 100 * (leader.mean + behind.mean), {"color": colour, "label": each.config.method}
            if each.failed:
                axes.plot(position, 0.03, "x", ms=5, mew=1.2, transform=axes.get_xaxis_transform(), **line)
            else:
                drawn = axes.errorbar(
                    position,
                    at,
                    yerr=None if error.num_trials < 2 else 100 * error.sem,
                    fmt="o" if each.config.plastic else "s",
                    ms=4,
                    lw=1,
                    mfc=colour if each.finished else "none",
                    zorder=3 if each.finished else 2,
                    **line,
                )
                if each.finished:
                    handles.setdefault(each.config.method, drawn)
            if name == names[0]:
                cells = [str(each.point[n]) for n in names]
                rows.append((each.config.method, *cells, at, 100 * error.sem, 100 * behind.mean, behind.num_trials))
        if labels:
            axes.set_xticks(range(len(labels)), labels)
            axes.set_xlim(-0.5, len(labels) - 0.5)
        elif min(positions) > 0 and max(positions) / min(positions) > LOGARITHMIC:
            axes.set_xscale("log")
        tidy(axes, name, "average accuracy, %" if axes in grid[:, 0] else "")
    config = tried[0].config
    hollow = "dropped early" if finished else "fewer trials so far"
    marks = [f"hollow: {hollow}"] * any(not each.finished for each in tried)
    marks += ["×: failed"] * any(each.failed for each in tried)
    title = f"{with_scenario(config.benchmark, config)} ({config.dataset})"
    figure.suptitle("; ".join([title, *marks]), fontsize=MEDIUM)
    legend_below(figure, list(handles.values()))
    numbers = [
        (
            *(str(cell) for cell in row[: 1 + len(names)]),
            *(number(float(cell), 2) for cell in row[1 + len(names) : -1]),
            str(row[-1]),
        )
        for row in rows
    ]
    return Drawing(
        "sweep",
        "What was tried",
        "Average accuracy after the last task. The best point of each method is at its mean over all trials, with one "
        "standard error; the others are as far from it as in the trials that both ran, with the standard error of that "
        f"difference. Hollow points: {hollow}. Crosses at the bottom: all trials failed.",
        figure,
        ("method", *names, "accuracy %", "SEM", "minus best", "trials"),
        rows,
        Table("Final average accuracy in %", ("method", *names, "accuracy %", "SEM", "minus best", "trials"), numbers),
    )


def _positions(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Where values are drawn: numbers at their position, others, or a single number, side by side, with labels."""
    if len(set(values)) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values], []
    texts = [str(list(value)) if isinstance(value, tuple) else str(value) for value in values]
    kinds = list(dict.fromkeys(texts))
    return [float(kinds.index(text)) for text in texts], kinds


def _side_by_side(positions: list[float], methods: list[int], labelled: bool) -> list[float]:
    """A little apart where several methods have the same value, so that none covers another."""
    if labelled:
        return [position + 0.08 * method for position, method in zip(positions, methods, strict=True)]
    if min(positions) > 0 and max(positions) / min(positions) > LOGARITHMIC:
        apart = (max(positions) / min(positions)) ** 0.015
        return [position * apart**method for position, method in zip(positions, methods, strict=True)]
    apart = 0.015 * ((max(positions) - min(positions)) or 1.0)
    return [position + apart * method for position, method in zip(positions, methods, strict=True)]
