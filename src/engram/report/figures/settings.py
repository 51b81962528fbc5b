"""Accuracy against a setting: how much depends on η, and on the strength of each penalty."""

from __future__ import annotations

from collections.abc import Sequence

from engram.config.methods import CUSTOM
from engram.config.presets import preset
from engram.report.figures.drawing import Cell, Drawing, new_figure
from engram.report.figures.style import MEDIUM, WIDTH, band, colour_of, legend_below, percent, tidy
from engram.report.layout import Table
from engram.runs import metrics
from engram.runs.result import Result


def sensitivity(results: Sequence[Result]) -> Drawing:
    """Final accuracy against the initial η of the trace."""
    return _against(
        results,
        "sensitivity",
        "eta",
        "initial η (the preset's: dotted)",
        "How much depends on η",
    )


def strengths(results: Sequence[Result]) -> Drawing:
    """Final accuracy against the strength λ, a line a method."""
    return _against(
        results,
        "strengths",
        "strength",
        "strength λ (the presets': dotted)",
        "How much depends on the strength of the penalty",
    )


def _against(results: Sequence[Result], name: str, setting: str, label: str, title: str) -> Drawing:
    figure = new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    handles = []
    for method in dict.fromkeys(result.config.method for result in results):
        some = sorted((r for r in results if r.config.method == method), key=lambda r: _value(r, setting))
        places = [_value(result, setting) for result in some]
        estimates = [metrics.estimate(result.average_accuracy[:, -1]) for result in some]
        handles.append(band(axes, places, estimates, some[0], method))
        usual = _usual(some[0], setting)
        if usual is not None:
            axes.axvline(usual, color=colour_of(some[0]), ls=":", lw=1, zorder=0)
        for place, e in zip(places, estimates, strict=True):
            rows.append((method, place, 100 * e.mean, 100 * e.sem, e.num_trials, "" if usual is None else usual))
            mark = " (preset)" if place == usual else ""
            numbers.append((method, f"{place:g}{mark}", percent(e), str(e.num_trials)))
    positive = [float(place) for _, place, *_ in rows if float(place) > 0]
    if len(positive) == len(rows):
        axes.set_xscale("log")
    else:  # logarithmic too, with a place for 0
        axes.set_xscale("symlog", linthresh=min(positive, default=1.0))
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axes, label, "average accuracy, %")
    axes.set_title(f"{results[0].config.benchmark} ({results[0].config.dataset})", fontsize=MEDIUM)
    legend_below(figure, handles)
    held_out = ", on held-out samples of the training set" * all(r.config.examine == "validation" for r in results)
    several = "; the band is one standard error over trials" * any(len(r.accuracy) > 1 for r in results)
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
