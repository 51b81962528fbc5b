"""The trace at work: η, ‖Hebb‖ and ‖α‖ while each task is learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engram.report.figures.drawing import Cell, Drawing, new_figure
from engram.report.figures.style import WIDTH, colour_of, legend_below, rule, tidy
from engram.report.layout import Table
from engram.runs.metrics import Array
from engram.runs.result import Result

PANELS = {"eta": "η", "hebb_norm": "‖Hebb‖", "alpha_norm": "‖α‖"}


def has_dynamics(results: Sequence[Result]) -> bool:
    return any(result.config.plastic and result.dynamics for result in results)


def trace_dynamics(results: Sequence[Result]) -> Drawing:
    """Mean over trials of each; thin lines stand between tasks."""
    figure = new_figure(WIDTH, 6.6)
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    num_tasks = results[0].config.num_tasks
    handles = []
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        for result in results:
            if not result.config.plastic or not result.dynamics:
                continue
            when, values = over_time(result, name)
            (line,) = axes.plot(when, values, color=colour_of(result), lw=1.2, label=result.config.method)
            if name == "eta":
                handles.append(line)
            rows += [(result.config.method, name, *place) for place in zip(when.tolist(), values.tolist(), strict=True)]
            ends = {t: v for t, v in zip(when.tolist(), values.tolist(), strict=True) if t == round(t)}
            at_ends = (f"{ends[t]:.4g}" if t in ends else "–" for t in range(1, num_tasks + 1))
            numbers.append((f"{result.config.method}, {label}", *at_ends))
        for task in range(1, num_tasks):
            rule(axes, x=task)
        axes.set_xticks(range(num_tasks + 1))
        tidy(axes, "tasks learned" if axes is panels[-1] else "", label)
    legend_below(figure, handles)
    columns = ("method", *(f"end of task {n + 1}" for n in range(num_tasks)))
    return Drawing(
        "dynamics",
        "How the trace works",
        "The trace's learning rate η, and the norms of the trace and of its coefficients α. Means over trials.",
        figure,
        ("method", "quantity", "tasks learned", "mean"),
        rows,
        Table("At the end of each task (the CSV of this figure has every record)", columns, numbers),
    )


def over_time(result: Result, name: str) -> tuple[Array, Array]:
    """The mean over trials of one quantity, against how far through the tasks it was.

    Trials may take different numbers of steps for a task, but all make the same number of records of it.
    """
    values: dict[tuple[int, int], list[float]] = {}  # of (task, record) over trials
    num_seen: dict[tuple[int, int], int] = {}  # records so far of (trial, task)
    for row in result.dynamics:
        trial, task = int(row["trial"]), int(row["task"])
        index = num_seen[trial, task] = num_seen.get((trial, task), 0) + 1
        values.setdefault((task, index), []).append(row[name])
    num_records = {task: max(index for other, index in values if other == task) for task, _ in values}
    places = sorted(values)
    when = [task + index / num_records[task] for task, index in places]
    return np.array(when), np.array([np.mean(values[place]) for place in places])
