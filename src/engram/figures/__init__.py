"""Results as pictures: each figure is drawn once, with its numbers, and saved as PNG, PDF, CSV, or SVG for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.comparisons import has_paper_data, pairs
from engram.figures.against import differences, paper_against_ours
from engram.figures.curves import accuracy_curves, first_and_latest
from engram.figures.drawing import FORMATS, Drawing, parse_formats, save_drawings
from engram.figures.dynamics import has_dynamics, trace_dynamics
from engram.figures.matrices import accuracy_matrices
from engram.figures.settings import sensitivity, strengths
from engram.figures.svg import to_svg
from engram.results import Result

__all__ = [
    "FORMATS",
    "Drawing",
    "accuracy_curves",
    "accuracy_matrices",
    "differences",
    "draw",
    "draw_all",
    "first_and_latest",
    "paper_against_ours",
    "parse_formats",
    "save_drawings",
    "sensitivity",
    "strengths",
    "to_svg",
    "trace_dynamics",
]


def draw(results: Sequence[Result]) -> list[Drawing]:
    """Every figure that the results have the numbers for."""
    drawings = [paper_against_ours(results)] if has_paper_data(results) else []
    drawings.append(accuracy_curves(results))
    if paired := pairs(results):
        drawings.append(differences(paired))
    drawings += [first_and_latest(results), accuracy_matrices(results)]
    if has_dynamics(results):
        drawings.append(trace_dynamics(results))
    return drawings


def draw_all(results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw every figure into a folder, and return the paths."""
    return save_drawings(draw(results), folder, formats)
