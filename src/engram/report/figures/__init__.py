"""Results as pictures: each figure is drawn once, with its numbers, and saved as PNG, PDF, CSV, or SVG for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.common.errors import InputError
from engram.report.figures.against import differences, paper_against_ours
from engram.report.figures.curves import accuracy_curves, first_and_latest
from engram.report.figures.drawing import FORMATS, Drawing, parse_formats, save_drawings
from engram.report.figures.dynamics import trace_dynamics
from engram.report.figures.matrices import accuracy_matrices
from engram.report.figures.run import draw
from engram.report.figures.settings import sensitivity, strengths
from engram.report.figures.svg import to_svg
from engram.reproduction.figures import draw_reproduction
from engram.runs.result import Result, read_run
from engram.runs.sheets import holds_reproduction, read_reproduction

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
    "write_figures",
]


def draw_all(results: Sequence[Result], folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw every figure of a run into a folder, and return the paths."""
    return save_drawings(draw(results), folder, formats)


def write_figures(source: Path, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw all figures of the run that a folder holds, or of the reproduction: then in a folder for each benchmark."""
    if not holds_reproduction(source):
        return draw_all(read_run(source)[1], folder, formats)
    drawn = draw_reproduction(read_reproduction(source).sheets)
    if not any(drawn.values()):
        raise InputError(f"the reproduction in {source} has no part that is drawn: a study is a table, for the report")
    return [path for place, drawings in drawn.items() for path in save_drawings(drawings, folder / place, formats)]
