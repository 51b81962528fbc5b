"""Results as pictures: each figure is drawn once, with its numbers, and saved as PNG, PDF, CSV, or SVG for a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from engram.common.errors import InputError, check_choice
from engram.report.figures.curves import accuracy_curves, first_and_latest, has_dynamics, trace_dynamics
from engram.report.figures.differences import differences, paper_against_ours
from engram.report.figures.drawing import FORMATS, Drawing, check_no_run, parse_formats, save_drawings, to_svg
from engram.report.figures.matrices import accuracy_matrices
from engram.report.figures.settings import draw_sweep, sensitivity
from engram.report.pairs import has_paper_data, pairs
from engram.report.sweep_table import best_results, is_sweep, ranking, tried_in
from engram.report.tables import final
from engram.runs.result import Result
from engram.runs.run import Run, open_runs

__all__ = [
    "FORMATS",
    "Drawing",
    "accuracy_curves",
    "accuracy_matrices",
    "differences",
    "draw",
    "draw_one",
    "draw_run",
    "draw_sweep",
    "first_and_latest",
    "has_dynamics",
    "paper_against_ours",
    "parse_formats",
    "save_drawings",
    "sensitivity",
    "to_svg",
    "trace_dynamics",
    "write_figures",
]

BY_NAME: dict[str, Callable[[Mapping[str, Result]], Drawing]] = {
    "accuracy": accuracy_curves,
    "first-and-latest": first_and_latest,
    "matrices": accuracy_matrices,
    "dynamics": trace_dynamics,
}
MOST_SHOWN = 16  # labels in one figure: with more, lines cannot be told apart


def draw(results: Mapping[str, Result]) -> list[Drawing]:
    """Every figure that the results have the numbers for. Of more than 16 labels, the most accurate are drawn.

    Args:
        results: the Results of one run, by label.

    Example:
        for drawing in draw(read_run("runs/demo").results):
            print(drawing.title)
    """
    shown = _most_accurate(results)
    to_the_end = any(np.isfinite(result.average_accuracy[:, -1]).any() for result in shown.values())
    with_paper = any(map(has_paper_data, shown.values()))
    drawings = [paper_against_ours(shown)] if to_the_end and with_paper else []
    drawings += [accuracy_curves(shown), first_and_latest(shown), accuracy_matrices(shown)]
    if has_dynamics(shown):
        drawings.append(trace_dynamics(shown))
    if len(shown) < len(results):
        note = f" Of {len(results)} settings, the {len(shown)} with the highest accuracy."
        drawings = [dataclasses.replace(drawing, caption=drawing.caption + note) for drawing in drawings]
    if paired := [pair for pair in pairs(results) if pair.accuracy.num_trials]:
        after_curves = 1 + [drawing.name for drawing in drawings].index("accuracy")
        drawings.insert(after_curves, differences(paired))
    return drawings


def draw_one(results: Mapping[str, Result], name: str) -> Drawing:
    """One figure by its name, which is the name of the file that `engram figures` writes.

    Args:
        results: the Results of one benchmark, by label.
        name: "accuracy", "first-and-latest", "matrices" or "dynamics".

    Example:
        draw_one(read_run("runs/demo").results, "accuracy").figure.savefig("accuracy.png")
    """
    check_choice("figure", name, tuple(BY_NAME))
    if name == "dynamics" and not has_dynamics(results):
        raise InputError("none of these results has a trace whose dynamics were recorded")
    return BY_NAME[name](results)


def draw_run(run: Run) -> list[Drawing]:
    """Every figure of a run; of a sweep, what was tried, and the figures of the best point of each method.

    Args:
        run: a run that has results, finished or not.

    Example:
        save_drawings(draw_run(read_run("sweeps/split-mnist")), Path("figures"), ["png"])
    """
    if not is_sweep(run):
        return draw(run.results)
    tried = tried_in(run)
    every = [each for own in tried.values() for each in own if each.scores]
    best = {method: ranking(own)[0] for method, own in tried.items()}
    return [*([draw_sweep(every, best, run.finished)] if every else []), *draw(best_results(run))]


def write_figures(
    path: str | Path, out: str | Path, formats: Sequence[str] = FORMATS, unreadable: dict[str, str] | None = None
) -> list[Path]:
    """Draw every figure of a run, a sweep, or a folder of runs; of several runs, each into its own folder.

    Args:
        path: the folder.
        out: where the files go; it is made if it is not there.
        formats: some of "png", "pdf" and "csv".
        unreadable: as in `open_runs`.

    Returns the paths of the files.

    Example:
        write_figures("runs/demo", "figures", ["png"])
    """
    runs = {name: run for name, run in open_runs(path, unreadable=unreadable).items() if run.results}
    if not runs:
        raise InputError(f"there are no results in {path} yet")
    folders = {name: Path(out) if len(runs) == 1 else Path(out) / name for name in runs}
    for folder in folders.values():
        check_no_run(folder)
    return [file for name, run in runs.items() for file in save_drawings(draw_run(run), folders[name], formats)]


def _most_accurate(results: Mapping[str, Result]) -> Mapping[str, Result]:
    """At most MOST_SHOWN of them, in their order."""
    if len(results) <= MOST_SHOWN:
        return results
    means = {label: np.nan_to_num(final(result).mean, nan=-1.0) for label, result in results.items()}
    best = set(sorted(means, key=lambda label: -means[label])[:MOST_SHOWN])
    return {label: result for label, result in results.items() if label in best}
