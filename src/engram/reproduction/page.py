"""The page of a reproduction: the paper's Table I beside ours, then each benchmark, then what it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engram.config.methods import all_methods
from engram.config.presets import title_of
from engram.report.figures.style import percent
from engram.report.html.blocks import Html, Section, code, figures, heading, notice, paragraph, side_by_side, table
from engram.report.html.missing import missing_from
from engram.report.html.page import render
from engram.report.html.run_report import tables_of
from engram.report.html.settings import data_table, in_words, settings_table, versions_table
from engram.report.layout import Table
from engram.reproduction.figures import draw_benchmark, draw_overview
from engram.reproduction.overview import accuracy_table, claims_table, transfer_table
from engram.reproduction.verdicts import variant_results
from engram.runs import metrics
from engram.runs.result import Result
from engram.runs.sheets import Reproduction, Sheet

QUICK = "QUICK: reduced data and epochs; these are not the paper's numbers"


def reproduction_page(reproduction: Reproduction) -> str:
    """One page of everything that was reproduced so far."""
    sheets = reproduction.sheets
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in sheets))
    has_table = any(part == "table" for _, part in sheets)
    overview = [*_overview(sheets, has_table), figures(draw_overview(sheets), "overview")]
    if has_table and not reproduction.quick:
        overview.append(table(claims_table(sheets), "words"))
    sections = [Section("overview", "Overview", overview)]
    for benchmark in benchmarks:
        sections.append(Section(benchmark, title_of(benchmark), _benchmark_blocks(sheets, benchmark)))
    sections.append(Section("settings", "Settings, versions and times", _made_with(list(sheets.values()))))
    return render(
        "Engram, report of a reproduction",
        "Differentiable Hebbian Consolidation, reproduced",
        "The paper's Table I, over trials and with standard errors, beside the paper's own numbers.",
        [
            notice(QUICK, ["Made to see that everything runs; draw no conclusions from it."], "quick")
            if reproduction.quick
            else Html(""),
            notice("What is missing", [f"{sentence}." for sentence in reproduction.missing]),
        ],
        sections,
    )


def _overview(sheets: Mapping[tuple[str, str], Sheet], has_table: bool) -> list[Html]:
    if not has_table:
        return [paragraph("No benchmark has results of the paper's methods yet, so there is no table to show.")]
    return [table(accuracy_table(sheets)), table(transfer_table(sheets))]


def _benchmark_blocks(sheets: Mapping[tuple[str, str], Sheet], benchmark: str) -> list[Html]:
    """The tables, what they lack, and all figures of one benchmark."""
    blocks: list[Html] = []
    drawn = draw_benchmark(sheets, benchmark)
    if (benchmark, "table") in sheets:
        results = list(sheets[benchmark, "table"].entries.values())
        missing = missing_from(results)
        blocks += [notice("What is missing", missing), *tables_of(results, missing)]
        blocks.append(figures(drawn["table"], benchmark))
    else:
        blocks.append(paragraph("The paper's methods were not run here, so there is no table and there are no curves."))
    if variant := variant_results(sheets, benchmark):
        blocks += [heading("With the steady trace, beside the table's baselines"), *tables_of(variant, [])]
        blocks.append(figures(drawn["variant"], benchmark))
    sweeps = [drawing for part in ("sensitivity", "strengths") for drawing in drawn.get(part, [])]
    blocks.append(figures(sweeps, benchmark))
    if (benchmark, "study") in sheets:
        blocks.append(table(study_table(sheets[benchmark, "study"].entries)))
    return blocks


def study_table(entries: Mapping[str, Result]) -> Table:
    """One thing varied at a time: changes down, methods across. A label is "CHANGE: METHOD"."""
    methods = [m for m in all_methods() if any(result.config.method == m for result in entries.values())]
    cells: dict[str, dict[str, str]] = {}
    for label, result in entries.items():
        change = label.removesuffix(f": {result.config.method}")
        cells.setdefault(change, {})[result.config.method] = percent(metrics.estimate(result.average_accuracy[:, -1]))
    rows = [(change, *(found.get(method, "") for method in methods)) for change, found in cells.items()]
    return Table("One thing varied at a time: average accuracy in % after all tasks", ("change", *methods), rows)


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
    shown: set[str] = set()
    blocks = [table(Table("Times", ("sheet", "models", "time", "device"), rows))]
    commands = dict.fromkeys(str(sheet.about["command"]) for sheet in sheets if sheet.about.get("command"))
    if commands:
        blocks += [heading("Commands"), code("\n".join(commands))]
    for sheet in sheets:
        if sheet.part in ("table", "variant") or sheet.benchmark not in shown:
            shown.add(sheet.benchmark)
            results = list(sheet.entries.values())
            name = title_of(sheet.benchmark) + ("" if sheet.part == "table" else f", {sheet.part}")
            made = (data_table(results, f"Data of {name}"), versions_table(sheet.about, f"Versions of {name}"))
            beside = [table(content, "words") for content in made if content is not None]
            blocks.append(side_by_side([table(settings_table(results, f"Settings of {name}"), "words")], beside))
    return blocks
