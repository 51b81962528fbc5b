"""Results as pictures: accuracy against tasks, memory and flexibility, accuracy matrices, dynamics of the trace."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engram import metrics
from engram.metrics import Array
from engram.results import Result, write_atomically

if TYPE_CHECKING:
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
PANELS = {"eta": "η", "hebb_norm": "‖Hebb‖", "alpha_norm": "‖α‖"}


def draw_all(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every figure that the results have the numbers for, as PNG, and return their paths."""
    figures = {"accuracy": accuracy_curves(results), "first-and-latest": first_and_latest(results)}
    figures["matrices"] = accuracy_matrices(results)
    if any(result.config.plastic for result in results):
        figures["dynamics"] = trace_dynamics(results)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150)
        write_atomically(paths[-1], image.getvalue())
    return paths


def accuracy_curves(results: Sequence[Result]) -> Figure:
    """The paper's main figure: average accuracy over the tasks so far, with SEM, and the final value in the legend."""
    figure = _new_figure(7, 4.4)
    axes = figure.subplots()
    for result in results:
        final = metrics.estimate(result.average_accuracy[:, -1])
        _curve(axes, result, result.average_accuracy, f"{result.config.method} ({100 * final.mean:.1f})")
    _finish(axes, results, "average accuracy over the tasks so far, %")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title(f"{results[0].config.benchmark} ({results[0].config.dataset})", fontsize=10)
    return figure


def first_and_latest(results: Sequence[Result]) -> Figure:
    """Memory and flexibility: the accuracy on the first task, and on the latest, as tasks are learned."""
    figure = _new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for result in results:
        _curve(left, result, result.first_task, result.config.method)
        _curve(right, result, result.latest_task, result.config.method)
    _finish(left, results, "accuracy on the first task, %")
    _finish(right, results, "accuracy on the latest task, %")
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def accuracy_matrices(results: Sequence[Result]) -> Figure:
    """The mean accuracy matrix of each method: a row after each task, a column for each task examined."""
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = _new_figure(2.6 * columns + 0.8, 2.6 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    means = [100 * _mean(np.where(np.tri(len(r.accuracy[0])) > 0, r.accuracy, np.nan)) for r in results]
    low = min((float(np.nanmin(mean)) for mean in means if np.isfinite(mean).any()), default=0)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, result, mean in zip(grid.flat, results, means, strict=False):
        axes.set_axis_on()
        image = axes.imshow(mean, vmin=low, vmax=100, cmap="viridis")
        axes.set_title(result.config.method, fontsize=9)
        ticks = range(len(mean))
        axes.set_xticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
        axes.set_yticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
    grid[-1][0].set_xlabel("accuracy on task", fontsize=8)
    grid[-1][0].set_ylabel("after learning task", fontsize=8)
    figure.colorbar(image, ax=grid, shrink=0.8, label="accuracy, %")
    return figure


def trace_dynamics(results: Sequence[Result]) -> Figure:
    """η, ‖Hebb‖ and ‖α‖ while each task is learned, mean over trials; thin lines stand between tasks."""
    figure = _new_figure(11, 3.6)
    panels = figure.subplots(1, 3)
    for axes, (name, label) in zip(panels, PANELS.items(), strict=True):
        for result in results:
            if result.config.plastic and result.dynamics:
                when, values = _over_time(result, name)
                axes.plot(when, values, color=_colour(result), lw=1.2, label=result.config.method)
        for task in range(1, results[0].config.num_tasks):
            axes.axvline(task, color="0.85", lw=0.6, zorder=0)
        axes.set_xticks(range(results[0].config.num_tasks + 1))
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    if panels[-1].get_legend_handles_labels()[0]:
        panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _over_time(result: Result, name: str) -> tuple[Array, Array]:
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


def _colour(result: Result) -> str:
    return COLOURS.get(result.config.penalty, OTHER)


def _curve(axes: Axes, result: Result, values: Array, label: str) -> None:
    """Mean over trials with a band of one SEM; `values` is (trials, tasks)."""
    estimates = [metrics.estimate(column) for column in values.T]
    tasks = np.arange(1, len(estimates) + 1)
    mean = 100 * np.array([e.mean for e in estimates])
    sem = 100 * np.nan_to_num(np.array([e.sem for e in estimates]))
    colour = _colour(result)
    style = "-" if result.config.plastic else "--"
    axes.plot(tasks, mean, style, color=colour, marker="o", ms=3, lw=1.4, label=label)
    axes.fill_between(tasks, mean - sem, mean + sem, color=colour, alpha=0.12, lw=0)


def _finish(axes: Axes, results: Sequence[Result], label: str) -> None:
    axes.set_xticks(range(1, results[0].config.num_tasks + 1))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def _mean(values: Array) -> Array:
    """Over trials, of what was measured."""
    measured = np.isfinite(values).sum(axis=0)
    return np.where(measured > 0, np.nansum(values, axis=0) / np.maximum(measured, 1), np.nan)


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # late, and without pyplot, which looks for a screen

    return Figure(figsize=(width, height), layout="constrained")
