"""Accuracy against tasks learned: over all tasks so far, on the first, and on the latest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engram.report.figures.drawing import Cell, Drawing, new_figure
from engram.report.figures.style import (
    MEDIUM,
    PAPER,
    SMALL,
    WIDTH,
    band,
    colour_of,
    estimates_of,
    legend_below,
    paper_mark,
    percent,
    tidy,
)
from engram.report.layout import Table, number
from engram.report.pairs import paper_value
from engram.runs.metrics import Array
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def accuracy_curves(results: Sequence[Result]) -> Drawing:
    """The paper's main figure: average accuracy over the tasks so far, with SEM, and the final value in the legend."""
    figure = new_figure(WIDTH, 4.2)
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    num_tasks = results[0].config.num_tasks
    handles = []
    for result in results:
        estimates = estimates_of(result.average_accuracy)
        method, final = result.config.method, estimates[-1]
        label = f"{method} ({number(100 * final.mean, 1)})"
        handles.append(band(axes, _tasks(result), estimates, result, label))
        paper = paper_value(result)
        if paper is not None:
            # The two heads stand side by side, since a penalty's colour is the same for both.
            place = num_tasks + (0.06 if result.config.plastic else 0.03) * (num_tasks - 1)
            axes.plot([place], [paper[0]], color=colour_of(result), clip_on=False, **PAPER)
        for task, e in enumerate(estimates, start=1):
            theirs = paper[0] if paper is not None and task == num_tasks else ""
            rows.append((method, task, 100 * e.mean, 100 * e.sem, e.num_trials, theirs))
        numbers.append((method, *map(percent, estimates)))
    has_paper = any(paper_value(result) for result in results)
    if has_paper:
        axes.legend(handles=[paper_mark()], frameon=False, fontsize=SMALL, loc="lower left")
    _finish(axes, results, "average accuracy so far, %")
    axes.set_title(f"{results[0].config.benchmark} ({results[0].config.dataset})", fontsize=MEDIUM)
    legend_below(figure, handles)
    theirs_too = " Hollow diamonds: the paper's final values, those with DHP further right." if has_paper else ""
    return Drawing(
        "accuracy",
        "Average accuracy over the tasks so far",
        "Mean over trials; the band is one standard error. Dashed: without DHP. In brackets: after the last task."
        + theirs_too,
        figure,
        ("method", "tasks learned", "accuracy %", "SEM", "trials", "paper %"),
        rows,
        Table("Average accuracy in %, after each task", ("method", *_after(results)), numbers),
    )


def first_and_latest(results: Sequence[Result]) -> Drawing:
    """Memory and flexibility: the accuracy on the first task, and on the latest, as tasks are learned."""
    figure = new_figure(WIDTH, 5.6)
    panels = figure.subplots(2, 1, sharex=True)
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    handles = []
    for axes, which in zip(panels, ("first", "latest"), strict=True):
        for result in results:
            values: Array = result.first_task if which == "first" else result.latest_task
            estimates = estimates_of(values)
            line = band(axes, _tasks(result), estimates, result, result.config.method)
            if which == "first":
                handles.append(line)
            rows += [
                (result.config.method, which, task, 100 * e.mean, 100 * e.sem, e.num_trials)
                for task, e in enumerate(estimates, start=1)
            ]
            numbers.append((f"{result.config.method}, {which}", *map(percent, estimates)))
        _finish(axes, results, f"accuracy on the {which} task, %")
    panels[0].set_xlabel("")
    legend_below(figure, handles)
    return Drawing(
        "first-and-latest",
        "Memory and flexibility",
        "Above: what is left of the first task. Below: how well each new task is learned. Bands: one standard error.",
        figure,
        ("method", "task", "tasks learned", "accuracy %", "SEM", "trials"),
        rows,
        Table("Accuracy in % on the first and the latest task", ("method", *_after(results)), numbers),
    )


def _tasks(result: Result) -> list[float]:
    return [float(task) for task in range(1, result.config.num_tasks + 1)]


def _after(results: Sequence[Result]) -> list[str]:
    return [f"after {task}" for task in range(1, results[0].config.num_tasks + 1)]


def _finish(axes: Axes, results: Sequence[Result], label: str) -> None:
    axes.set_xticks(range(1, results[0].config.num_tasks + 1))
    tidy(axes, "tasks learned", label)
