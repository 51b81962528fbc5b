"""The figures of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engram.report.figures.against import differences, paper_against_ours
from engram.report.figures.curves import accuracy_curves, first_and_latest
from engram.report.figures.drawing import Drawing
from engram.report.figures.dynamics import has_dynamics, trace_dynamics
from engram.report.figures.matrices import accuracy_matrices
from engram.report.pairs import has_paper_data, pairs
from engram.runs.result import Result


def draw(results: Sequence[Result]) -> list[Drawing]:
    """Every figure that the results have the numbers for."""
    to_the_end = any(np.isfinite(result.average_accuracy[:, -1]).any() for result in results)
    drawings = [paper_against_ours(results)] if to_the_end and has_paper_data(results) else []
    drawings.append(accuracy_curves(results))
    if paired := [pair for pair in pairs(results) if pair.accuracy.num_trials]:
        drawings.append(differences(paired))
    drawings += [first_and_latest(results), accuracy_matrices(results)]
    if has_dynamics(results):
        drawings.append(trace_dynamics(results))
    return drawings
