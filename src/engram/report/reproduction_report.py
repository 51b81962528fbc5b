"""The page of a reproduction: the paper's Table I beside ours, then each benchmark, then what it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from engram import metrics
from engram.comparisons import pairs, paper_value
from engram.config import BENCHMARKS, METHODS
from engram.figures import differences, draw, sensitivity, strengths
from engram.report.blocks import Html, Section, code, figures, heading, notice, paragraph, side_by_side, table
from engram.report.missing import missing_from
from engram.report.page import render
from engram.report.run_report import TITLES, tables_of
from engram.report.settings import data_table, in_words, settings_table, versions_table
from engram.results import Result
from engram.tables import Table, number

QUICK = "QUICK: reduced data and epochs; these are not the paper's numbers"
SWEEPS = {"sensitivity": sensitivity, "strengths": strengths}
OTHER_PARTS = {"study": "A closer study", "variant": "Variants"}


class Sheet(Protocol):
    """The results of one part of a reproduction on one benchmark, by label."""

    @property
    def part(self) -> str: ...
    @property
    def benchmark(self) -> str: ...
    @property
    def entries(self) -> Mapping[str, Result]: ...
    @property
    def about(self) -> Mapping[str, Any]: ...


class Reproduction(Protocol):
    """All sheets of a reproduction, by benchmark and part, and what it lacks."""

    @property
    def folder(self) -> Path: ...
    @property
    def sheets(self) -> Mapping[tuple[str, str], Sheet]: ...
    @property
    def missing(self) -> Sequence[str]: ...
    @property
    def quick(self) -> bool: ...


def reproduction_page(reproduction: Reproduction) -> str:
    """One page of everything that was reproduced so far."""
    sheets = reproduction.sheets
    found = {benchmark for benchmark, _ in sheets}
    benchmarks = [name for name in (*BENCHMARKS, *sorted(found - set(BENCHMARKS))) if name in found]
    columns = {name: list(sheets[name, "table"].entries.values()) for name in benchmarks if (name, "table") in sheets}
    sections = [Section("overview", "Overview", _overview(columns))]
    for benchmark in benchmarks:
        blocks = _benchmark_blocks({part: sheet for (name, part), sheet in sheets.items() if name == benchmark})
        sections.append(Section(benchmark, TITLES.get(benchmark, benchmark), blocks))
    sections.append(Section("settings", "Settings, versions and times", _made_with(list(sheets.values()))))
    return render(
        "Engram, report of a reproduction",
        "Differentiable Hebbian Consolidation, reproduced",
        "The paper's Table I, over trials and with standard errors, beside the paper's own numbers.",
        [
            notice(QUICK, ["Made to see that everything runs; draw no conclusions from it."], "quick")
            if reproduction.quick
            else Html(""),
            notice("What is missing", list(reproduction.missing)),
        ],
        sections,
    )


def accuracy_table(columns: Mapping[str, Sequence[Result]]) -> Table:
    """The paper's Table I with ours before it: methods down, benchmarks across."""

    def cell(result: Result) -> str:
        ours, paper = metrics.estimate(result.average_accuracy[:, -1]), paper_value(result)
        sem = "" if ours.sem != ours.sem else f" ± {number(100 * ours.sem, 2)}"
        return f"{number(100 * ours.mean, 2)}{sem} / {'–' if paper is None else f'{paper[0]:.2f}'}"

    return _across("Average accuracy in % after all tasks: ours ± SEM / the paper's", columns, cell)


def transfer_table(columns: Mapping[str, Sequence[Result]]) -> Table:
    """BWT in the same shape."""

    def cell(result: Result) -> str:
        paper = paper_value(result)
        return f"{number(metrics.estimate(result.bwt).mean, 3)} / {'–' if paper is None else f'{paper[1]:.2f}'}"

    return _across("Backward transfer, below zero is forgetting: ours / the paper's", columns, cell)


def _across(title: str, columns: Mapping[str, Sequence[Result]], cell: Any) -> Table:
    by_benchmark = {name: {r.config.method: r for r in results} for name, results in columns.items()}
    methods = [method for method in METHODS if any(method in entries for entries in by_benchmark.values())]
    rows = [
        (method, *(cell(entries[method]) if method in entries else "not run" for entries in by_benchmark.values()))
        for method in methods
    ]
    return Table(title, ("method", *(TITLES.get(name, name) for name in columns)), rows)


def _overview(columns: Mapping[str, Sequence[Result]]) -> list[Html]:
    if not columns:
        return [paragraph("No benchmark has results of the paper's methods yet, so there is no table to show.")]
    blocks = [table(accuracy_table(columns)), table(transfer_table(columns))]
    paired = [pair for results in columns.values() for pair in pairs(results)]
    return [*blocks, figures([differences(paired)], "overview")] if paired else blocks


def _benchmark_blocks(sheets: Mapping[str, Sheet]) -> list[Html]:
    """The tables, what they lack, and all figures of one benchmark."""
    blocks: list[Html] = []
    benchmark = next(iter(sheets.values())).benchmark
    if "table" in sheets:
        results = list(sheets["table"].entries.values())
        missing = missing_from(results)
        blocks += [notice("What is missing", missing), *tables_of(results, missing)]
        blocks.append(figures(draw(results), benchmark))
    else:
        blocks.append(paragraph("The paper's methods were not run here, so there is no table and there are no curves."))
    sweeps = [make(list(sheets[part].entries.values())) for part, make in SWEEPS.items() if part in sheets]
    blocks.append(figures(sweeps, f"{benchmark}-by"))
    blocks += [table(_labelled(OTHER_PARTS[part], sheets[part])) for part in OTHER_PARTS if part in sheets]
    return blocks


def _labelled(title: str, sheet: Sheet) -> Table:
    """A row for each label of a sheet that has no figure of its own."""
    rows = []
    for label, result in sheet.entries.items():
        ours = metrics.estimate(result.average_accuracy[:, -1])
        transfer = number(metrics.estimate(result.bwt).mean, 3)
        rows.append((label, number(100 * ours.mean, 2), number(100 * ours.sem, 2), transfer, str(ours.num_trials)))
    return Table(title, ("entry", "ACC %", "± SEM", "BWT", "trials"), rows)


def _made_with(sheets: Sequence[Sheet]) -> list[Html]:
    if not sheets:
        return [paragraph("Nothing was run yet.")]
    rows = []
    for sheet in sheets:
        seconds = sheet.about.get("seconds")
        taken = in_words(float(seconds)) if isinstance(seconds, int | float) else "–"
        device = str(sheet.about.get("gpu") or sheet.about.get("device") or "–")
        models = sum(len(result.accuracy) for result in sheet.entries.values())
        rows.append((f"{sheet.benchmark}, {sheet.part}", str(models), taken, device))
    blocks = [table(Table("Times", ("sheet", "models", "time", "device"), rows))]
    commands = dict.fromkeys(str(sheet.about["command"]) for sheet in sheets if sheet.about.get("command"))
    if commands:
        blocks += [heading("Commands"), code("\n".join(commands))]
    for sheet in sheets:
        if sheet.part == "table":
            results = list(sheet.entries.values())
            name = TITLES.get(sheet.benchmark, sheet.benchmark)
            made = (data_table(results, f"Data of {name}"), versions_table(sheet.about, f"Versions of {name}"))
            beside = [table(content, "words") for content in made if content is not None]
            blocks.append(side_by_side([table(settings_table(results, f"Settings of {name}"), "words")], beside))
    return blocks
