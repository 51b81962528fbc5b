"""The figures of a reproduction: those of each benchmark's table, its settings, and all differences at a glance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from engram.report.figures.against import differences
from engram.report.figures.curves import accuracy_curves
from engram.report.figures.drawing import Drawing
from engram.report.figures.dynamics import has_dynamics, trace_dynamics
from engram.report.figures.run import draw
from engram.report.figures.settings import sensitivity, strengths
from engram.report.pairs import pairs
from engram.reproduction.verdicts import steady_pairs, table_pairs, variant_results
from engram.runs.sheets import Sheet


def draw_reproduction(sheets: Mapping[tuple[str, str], Sheet]) -> dict[str, list[Drawing]]:
    """Every figure, by the folder that it belongs in: the overview's, then one a benchmark."""
    drawn = {"overview": draw_overview(sheets)}
    for benchmark in dict.fromkeys(benchmark for benchmark, _ in sheets):
        parts = draw_benchmark(sheets, benchmark)
        drawn[benchmark] = [drawing for drawings in parts.values() for drawing in drawings]
    return drawn


def draw_overview(sheets: Mapping[tuple[str, str], Sheet]) -> list[Drawing]:
    """All differences of the table in one forest, and those with the steady trace in another."""
    tables, variants = table_pairs(sheets), steady_pairs(sheets)
    drawn = [differences(tables)] if tables else []
    if variants:
        drawn.append(_of_variant(differences(variants)))
    return drawn


def draw_benchmark(sheets: Mapping[tuple[str, str], Sheet], benchmark: str) -> dict[str, list[Drawing]]:
    """By part: the figures of a benchmark's sheets that have any."""
    drawn: dict[str, list[Drawing]] = {}
    if (benchmark, "table") in sheets:
        drawn["table"] = draw(list(sheets[benchmark, "table"].entries.values()))
    results = variant_results(sheets, benchmark)
    if results:
        paired = pairs(results)
        some = [accuracy_curves(results), *([differences(paired)] if paired else [])]
        some += [trace_dynamics(results)] if has_dynamics(results) else []
        drawn["variant"] = [_of_variant(drawing) for drawing in some]
    for part, make in (("sensitivity", sensitivity), ("strengths", strengths)):
        if (benchmark, part) in sheets:
            drawn[part] = [make(list(sheets[benchmark, part].entries.values()))]
    return drawn


def _of_variant(drawing: Drawing) -> Drawing:
    """With a name and a title of its own, since it stands beside the table's."""
    title = f"With the steady trace: {drawing.title[0].lower()}{drawing.title[1:]}"
    return dataclasses.replace(drawing, name=f"variant-{drawing.name}", title=title)
