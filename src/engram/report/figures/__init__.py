"""Results as pictures: each figure is drawn once, with its numbers, and saved as PNG, PDF, CSV, or SVG for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.report.figures.against import differences, paper_against_ours
from engram.report.figures.curves import accuracy_curves, first_and_latest
from engram.report.figures.drawing import FORMATS, Drawing, parse_formats, save_drawings
from engram.report.figures.dynamics import trace_dynamics
from engram.report.figures.matrices import accuracy_matrices
from engram.report.figures.run import draw
from engram.report.figures.settings import sensitivity, strengths
from engram.report.figures.svg import to_svg
from engram.runs.result import Result

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


def draw_all(results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw every figure of a run into a folder, and return the paths."""
    return save_drawings(draw(results), folder, formats)
