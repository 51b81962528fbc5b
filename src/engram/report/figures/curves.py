"""Curves over the tasks: average accuracy so far, the first and the latest task, and the trace while it is learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engram.config.presets import with_scenario
from engram.report.figures.drawing import (
    MEDIUM,
    PAPER,
    SMALL,
    WIDTH,
    Cell,
    Drawing,
    are_by_method,
    band,
    estimates_of,
    legend_below,
    legend_height,
    looks,
    new_figure,
    paper_mark,
    percent,
    rule,
    tidy,
)
from engram.report.layout import Table, number
from engram.report.pairs import paper_value
from engram.report.tables import label_heading
from engram.runs.metrics import Array
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[str, Result]
PANELS = {"eta": "η", "hebb_norm": "‖Hebb‖", "alpha_norm": "‖α‖"}
LEAST_SPAN = 0.01  # of an axis of the trace, as a part of the values


def accuracy_curves(results: Results) -> Drawing:
    """The paper's main figure: average accuracy over the tasks so far, with SEM, and the final value in the legend.

    Args:
        results: the Results of one run, by label.

    Example:
        accuracy_curves(read_run("runs/demo").results).to_bytes("png")
    """
    figure = new_figure(WIDTH, 4.2 + legend_height(results))
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    most_tasks = num_tasks(results)
    look = looks(results)
    handles = []
    for label, result in results.items():
        estimates = estimates_of(result.average_accuracy)
        text = f"{label} ({number(100 * estimates[-1].mean, 1)})"
        handles.append(band(axes, _tasks(result), estimates, look[label], text))
        paper = paper_value(result)
        if paper is not None:
            # The two heads stand side by side, since both have the colour of their penalty.
            position = most_tasks + (0.06 if result.config.plastic else 0.03) * (most_tasks - 1)
            axes.plot([position], [paper[0]], color=look[label].colour, clip_on=False, **PAPER)
        for task, e in enumerate(estimates, start=1):
            theirs = paper[0] if paper is not None and task == result.config.num_tasks else ""
            rows.append((label, task, 100 * e.mean, 100 * e.sem, e.num_trials, theirs))
        numbers.append(_padded((label, *map(percent, estimates)), 1 + most_tasks))
    has_paper = any(paper_value(result) for result in results.values())
    if has_paper:
        axes.legend(handles=[paper_mark()], frameon=False, fontsize=SMALL, loc="lower left")
    _finish(axes, results, "average accuracy so far, %")
    axes.set_title(where_from(results), fontsize=MEDIUM)
    legend_below(figure, handles)
    dashed = " Dashed: methods that name no head." if are_by_method(results) else ""
    theirs_too = " Hollow diamonds: the paper's final values, those with DHP further right." if has_paper else ""
    return Drawing(
        "accuracy",
        "Average accuracy over the tasks so far",
        f"Mean over trials; the band is one standard error.{dashed} In parentheses: after the last task.{theirs_too}",
        figure,
        (label_heading(results), "tasks learned", "accuracy %", "SEM", "trials", "paper %"),
        rows,
        Table("Average accuracy in %, after each task", (label_heading(results), *_after(results)), numbers),
    )


def first_and_latest(results: Results) -> Drawing:
    """Memory and flexibility: accuracy on the first task, and on the latest, as tasks are learned.

    Args:
        results: the Results of one run, by label.

    Example:
        first_and_latest(read_run("runs/demo").results).to_csv()
    """
    figure = new_figure(WIDTH, 5.6 + legend_height(results))
    panels = figure.subplots(2, 1, sharex=True)
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    look = looks(results)
    handles = []
    for axes, which in zip(panels, ("first", "latest"), strict=True):
        for label, result in results.items():
            values: Array = result.first_task if which == "first" else result.latest_task
            estimates = estimates_of(values)
            line = band(axes, _tasks(result), estimates, look[label], label)
            if which == "first":
                handles.append(line)
            rows += [
                (label, which, task, 100 * e.mean, 100 * e.sem, e.num_trials)
                for task, e in enumerate(estimates, start=1)
            ]
            numbers.append(_padded((f"{label}, {which}", *map(percent, estimates)), 1 + num_tasks(results)))
        _finish(axes, results, f"accuracy on the {which} task, %")
    panels[0].set_xlabel("")
    legend_below(figure, handles)
    return Drawing(
        "first-and-latest",
        "Memory and flexibility",
        "Above: what is left of the first task. Below: how well each new task is learned. Bands: one standard error.",
        figure,
        (label_heading(results), "task", "tasks learned", "accuracy %", "SEM", "trials"),
        rows,
        Table("Accuracy in % on the first and the latest task", (label_heading(results), *_after(results)), numbers),
    )


def trace_dynamics(results: Results) -> Drawing:
    """η, ‖Hebb‖ and ‖α‖ while each task is learned: means over trials, with thin lines between tasks.

    Args:
        results: the Results of one run, by label; those without a trace are left out.

    Example:
        trace_dynamics(read_run("runs/demo").results).to_bytes("pdf")
    """
    figure = new_figure(WIDTH, 6.6 + legend_height(results))
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    most_tasks = num_tasks(results)
    look = looks(results)
    handles = []
    for axes, (name, symbol) in zip(panels, PANELS.items(), strict=True):
        for label, result in results.items():
            if not has_trace(result):
                continue
            when, values = over_time(result, name)
            (line,) = axes.plot(when, values, color=look[label].colour, ls=_line(results, label), lw=1.2, label=label)
            if name == "eta":
                handles.append(line)
            rows += [(label, name, *point) for point in zip(when.tolist(), values.tolist(), strict=True)]
            ends = {t: v for t, v in zip(when.tolist(), values.tolist(), strict=True) if t == round(t)}
            at_ends = (f"{ends[t]:.4g}" if t in ends else "–" for t in range(1, most_tasks + 1))
            numbers.append((f"{label}, {symbol}", *at_ends))
        for task in range(1, most_tasks):
            rule(axes, x=task)
        axes.set_xticks(range(most_tasks + 1))
        _without_offset(axes)
        tidy(axes, "tasks learned" if axes is panels[-1] else "", symbol)
    legend_below(figure, handles)
    columns = (label_heading(results), *(f"end of task {n + 1}" for n in range(most_tasks)))
    return Drawing(
        "dynamics",
        "How the trace works",
        "The trace's learning rate η, and the norms of the trace and of its coefficients α. Means over trials.",
        figure,
        (label_heading(results), "quantity", "tasks learned", "mean"),
        rows,
        Table("At the end of each task (the CSV of this figure has every record)", columns, numbers),
    )


def _without_offset(axes: Axes) -> None:
    """Show at least a hundredth of what is drawn: a change of less would have ticks that nobody can read."""
    low, high = axes.get_ylim()
    middle, least = (low + high) / 2, abs(low + high) / 2 * LEAST_SPAN
    if high - low < least:
        axes.set_ylim(middle - least / 2, middle + least / 2)
    axes.ticklabel_format(axis="y", useOffset=False)


def has_dynamics(results: Results) -> bool:
    """Whether any Result has a trace whose dynamics were saved."""
    return any(map(has_trace, results.values()))


def has_trace(result: Result) -> bool:
    """Whether dynamics of a trace were saved: a head with another memory has none."""
    return bool(result.config.plastic and result.dynamics and not math.isnan(result.dynamics[0]["hebb_norm"]))


def over_time(result: Result, name: str) -> tuple[Array, Array]:
    """The mean over trials of one quantity, against how many tasks (and fractions of one) were learned.

    Trials may take different numbers of steps for a task, but all make the same number of records of it.
    """
    values: dict[tuple[int, int], list[float]] = {}  # by (task, record), over trials
    num_seen: dict[tuple[object, int], int] = {}  # records so far of (trial, task)
    for row in result.dynamics:
        trial, task = row["trial"], int(row["task"])
        index = num_seen[trial, task] = num_seen.get((trial, task), 0) + 1
        values.setdefault((task, index), []).append(row[name])
    num_records = {task: max(index for other, index in values if other == task) for task, _ in values}
    records = sorted(values)
    when = [task + index / num_records[task] for task, index in records]
    return np.array(when), np.array([np.mean(values[record]) for record in records])


def num_tasks(results: Results) -> int:
    """The most tasks that any Result has."""
    return max(result.config.num_tasks for result in results.values())


def where_from(results: Results) -> str:
    """Benchmark and dataset, for the title of a figure."""
    config = next(iter(results.values())).config
    return f"{with_scenario(config.benchmark, config)} ({config.dataset})"


def _line(results: Results, label: str) -> str:
    return "-" if are_by_method(results) else looks(results)[label].line


def _tasks(result: Result) -> list[float]:
    return [float(task) for task in range(1, result.config.num_tasks + 1)]


def _after(results: Results) -> list[str]:
    return [f"after {task}" for task in range(1, num_tasks(results) + 1)]


def _padded(row: Sequence[str], length: int) -> tuple[str, ...]:
    return (*row, *[""] * (length - len(row)))


def _finish(axes: Axes, results: Results, label: str) -> None:
    axes.set_xticks(range(1, num_tasks(results) + 1))
    tidy(axes, "tasks learned", label)
