"""The page of a run: its tables, its figures, what it was made with, and what it lacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.config.presets import title_of
from engram.report.figures import draw
from engram.report.html.blocks import Html, Section, code, facts, figures, heading, notice, side_by_side, table
from engram.report.html.missing import missing_from
from engram.report.html.page import render
from engram.report.html.settings import data_table, settings_table, time_taken, versions_table
from engram.report.tables import gains, so_far, summary
from engram.runs import metrics
from engram.runs.result import Result


def run_page(folder: Path, about: Mapping[str, Any], results: Sequence[Result]) -> str:
    """One page of all methods of a run; `about` is its run.json."""
    missing = missing_from(results, [str(method) for method in about.get("methods", ())])
    if "finished" not in about:
        missing.insert(0, f"The run is not finished: `engram run --resume {folder}` goes on.")
    config = results[0].config
    sections = [
        Section("results", "Results", tables_of(results, missing)),
        Section("figures", "Figures", [figures(draw(results), "figure")]),
        Section("settings", "Settings and versions", _made_with(about, results)),
    ]
    return render(
        "Engram, report of a run",
        title_of(config.benchmark),
        f"How well each method still knows {_tasks(config.num_tasks)} of {config.dataset} after learning them in turn.",
        [facts(_facts(about, results)), notice("What is missing", missing)],
        sections,
    )


def tables_of(results: Sequence[Result], said: Sequence[str]) -> list[Html]:
    """The table of methods and the table of pairs; what was said already is not said again below them."""
    made = summary(results)
    blocks = [table(dataclasses.replace(made, notes=tuple(note for note in made.notes if note not in said)))]
    return blocks + [table(more) for more in (so_far(results), gains(results)) if more is not None]


def _made_with(about: Mapping[str, Any], results: Sequence[Result]) -> list[Html]:
    blocks = [heading("The command"), code(str(about["command"]))] if "command" in about else []
    made = (data_table(results), versions_table(about))
    beside = [table(content, "words") for content in made if content is not None]
    return [*blocks, side_by_side([table(settings_table(results), "words")], beside)]


def _facts(about: Mapping[str, Any], results: Sequence[Result]) -> dict[str, str]:
    finals = {r.config.method: metrics.estimate(r.average_accuracy[:, -1]).mean for r in results}
    measured = {method: mean for method, mean in finals.items() if not math.isnan(mean)}
    shown = {
        "methods": str(len(results)),
        "trials": str(max(len(result.accuracy) for result in results)),
        "tasks": str(results[0].config.num_tasks),
    }
    if measured:
        best = max(measured, key=lambda method: measured[method])
        shown[f"highest: {best}"] = f"{100 * measured[best]:.1f}%"
    surroundings = about.get("surroundings")
    gpu = surroundings.get("gpu") if isinstance(surroundings, dict) else None
    if device := gpu or about.get("device"):
        shown["device"] = str(device)
    if taken := time_taken(about):
        shown["time"] = taken
    return shown


def _tasks(num_tasks: int) -> str:
    return "one task" if num_tasks == 1 else f"{num_tasks} tasks"
