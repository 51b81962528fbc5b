"""The page, the figures and the tables of a reproduction; for any other folder, those of its runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from engram.common.errors import InputError
from engram.config.methods import all_methods
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import title_of
from engram.report import figures as drawing
from engram.report.figures import FORMATS, Drawing, save_drawings
from engram.report.figures.drawing import check_no_run, percent
from engram.report.html import make_page as make_run_page
from engram.report.html import write_page
from engram.report.html.page import (
    Html,
    Section,
    code,
    figures,
    folded,
    heading,
    notice,
    paragraph,
    render,
    side_by_side,
    table,
)
from engram.report.html.run_page import (
    MISSING,
    method_blocks,
    missing_from,
    missing_section,
    settings_table,
    table_blocks,
)
from engram.report.layout import Table, data_table, device_of, in_words, versions_table
from engram.report.pairs import pairs
from engram.report.tables import final, tables_of
from engram.reproduction import form, rungs, stress
from engram.reproduction.claims import (
    accuracy_table,
    claims_table,
    claims_verdict,
    rung_claims_table,
    transfer_table,
)
from engram.reproduction.divergence import divergence_table, leak_table
from engram.reproduction.folder import Reproduction, holds_reproduction, read_reproduction
from engram.reproduction.ladder import Runs
from engram.reproduction.map import best_rates_table, draw_map, map_table
from engram.reproduction.study import relu_table
from engram.reproduction.verdicts import FEWEST_PAIRS, counted, steady_pairs, table_pairs, variant_results
from engram.runs.result import Result

QUICK = "QUICK: reduced data and epochs; these are not the paper's numbers"


def write_report(path: str | Path, out: str | Path | None = None, unreadable: dict[str, str] | None = None) -> Path:
    """Write one self-contained page of whatever a folder holds: a reproduction, a run, a sweep, a folder of runs.

    Args:
        path: the folder.
        out: where the page goes; by default `report.html` in the folder.
        unreadable: as in `open_runs`.

    Returns the path of the page.

    Example:
        write_report("results")
    """
    return write_page(make_page(path, unreadable), out if out is not None else Path(path) / "report.html")


def make_page(path: str | Path, unreadable: dict[str, str] | None = None) -> str:
    """The page of whatever a folder holds, as text; `unreadable` is as in `open_runs`."""
    if holds_reproduction(path):
        return reproduction_page(read_reproduction(path, unreadable))
    return make_run_page(path, unreadable)


def write_figures(
    path: str | Path, out: str | Path, formats: Sequence[str] = FORMATS, unreadable: dict[str, str] | None = None
) -> list[Path]:
    """Draw all figures of whatever a folder holds; those of a reproduction go into a folder for each benchmark.

    Args:
        path: the folder of a reproduction, a run, a sweep, or of several runs.
        out: where the figures go.
        formats: some of "png", "pdf" and "csv".
        unreadable: as in `open_runs`.

    Returns the paths of the files.

    Example:
        write_figures("results", "figures", ["png"])
    """
    check_no_run(Path(out))
    if not holds_reproduction(path):
        return drawing.write_figures(path, out, formats, unreadable)
    found = draw_reproduction(read_reproduction(path, unreadable).runs)
    if not any(found.values()):
        raise InputError(f"no part of the reproduction in {path} has figures: `engram report {path}` has its tables")
    return [file for name, some in found.items() for file in save_drawings(some, Path(out) / name, formats)]


def reproduction_tables(reproduction: Reproduction) -> list[Table]:
    """The ladder, Table I with our numbers next to the paper's, and the verdicts on the paper's claims.

    Example:
        for made in reproduction_tables(read_reproduction("results")):
            print(made.to_text())
    """
    runs = reproduction.runs
    ladder = [rungs.ladder_table(runs, opponent) for opponent in rungs.OPPONENTS]
    ladder += [rungs.verdicts_table(runs), *([] if reproduction.quick else [rung_claims_table(runs)])]
    ladder += [rungs.one_strength_table(runs)]
    ladder += [form.counts_table(runs), form.candidates_table(runs), form.by_rate_table(runs)]
    ladder += [stress.stress_table(runs), best_rates_table(runs), relu_table(runs)]
    ladder += [divergence_table(runs), leak_table(runs)]
    ladder = [made for made in ladder if made.rows]
    if not any(part == "table" for _, part in runs):
        return ladder
    claims = [] if reproduction.quick else [claims_table(runs)]
    return [*ladder, accuracy_table(runs), transfer_table(runs), *(made for made in claims if made.rows)]


def draw_reproduction(runs: Runs) -> dict[str, list[Drawing]]:
    """Every figure, by the folder that it belongs in: the overview's, then one per benchmark."""
    found = {"overview": draw_overview(runs)}
    for benchmark in dict.fromkeys(benchmark for benchmark, _ in runs):
        found[benchmark] = [each for some in draw_benchmark(runs, benchmark).values() for each in some]
    return found


def draw_overview(runs: Runs) -> list[Drawing]:
    """The ladder, where a head helps, and all differences of the table: as in the paper, and with the steady trace."""
    tables, variants = table_pairs(runs), steady_pairs(runs)
    compared = [opponent for opponent in rungs.OPPONENTS if rungs.ladder_table(runs, opponent).rows]
    found = [rungs.draw_ladder(runs, opponent) for opponent in compared]
    found += [made for made in [draw_map(runs)] if made is not None]
    found += [drawing.differences(tables)] if tables else []
    if variants:
        found.append(_of_variant(drawing.differences(variants)))
    return found


def draw_benchmark(runs: Runs, benchmark: str) -> dict[str, list[Drawing]]:
    """The figures of a benchmark, by part; a study has none."""
    found: dict[str, list[Drawing]] = {}
    if (benchmark, "table") in runs:
        found["table"] = drawing.draw(runs[benchmark, "table"].results)
    results = variant_results(runs, benchmark)
    if results:
        paired = pairs(results)
        some = [drawing.accuracy_curves(results), *([drawing.differences(paired)] if paired else [])]
        some += [drawing.trace_dynamics(results)] if drawing.has_dynamics(results) else []
        found["variant"] = [_of_variant(each) for each in some]
    if (benchmark, "sensitivity") in runs:
        found["sensitivity"] = [drawing.sensitivity(runs[benchmark, "sensitivity"].results)]
    return found


def reproduction_page(reproduction: Reproduction) -> str:
    """One page of everything that was reproduced so far, as text.

    Example:
        reproduction_page(read_reproduction("results"))
    """
    runs = reproduction.runs
    overview = [
        table(made, "words" if made.columns[0] in ("claim", "the paper says") else "")
        for made in reproduction_tables(reproduction)
    ]
    if not overview:
        overview = [paragraph("No benchmark has results of the paper's methods yet, so there is no table to show.")]
    overview.insert(0, figures(draw_overview(runs), "overview"))
    sections = [Section("overview", "Overview", overview)]
    for benchmark in dict.fromkeys(benchmark for benchmark, _ in runs):
        sections.append(Section(benchmark, title_of(benchmark), _benchmark_blocks(runs, benchmark)))
    sections += [
        Section("methods", "The methods", _methods(runs)),
        Section("settings", "Settings, versions and times", _made_with(runs)),
        *missing_section([f"{sentence}." for sentence in reproduction.missing]),
    ]
    return render(
        "Engram, report of a reproduction",
        "Differentiable Hebbian Consolidation, reproduced",
        "What the paper's layer adds, in comparisons that become fairer; and its Table I next to ours.",
        [
            notice(QUICK, ["Made to see that everything runs; draw no conclusions from it."], "quick")
            if reproduction.quick
            else paragraph(" ".join(ladder_verdict(runs) or claims_verdict(runs)), "verdict"),
        ],
        sections,
    )


def ladder_verdict(runs: Runs) -> list[str]:
    """Whether DHP is better than a plain layer, rung by rung; nothing without a ladder.

    Example:
        >>> print(*ladder_verdict(read_reproduction("results").runs))
    """
    said = []
    for rung, words in rungs.RUNGS.items():
        on = [name for name in PAPER_BENCHMARKS if rungs.rung_pairs(runs, name, rung, "linear")]
        if on:
            where = f"{title_of(on[0])} alone" if len(on) == 1 else f"{len(on)} benchmarks"
            said.append(f"Rung {rung}, {words}, on {where}: {counted(rungs.rung_differences(runs, rung, 'linear'))}.")
    opening = "The paper's layer (DHP) against a plain one, in comparisons that become fairer."
    return [opening, *said] if said else []


def study_table(results: Mapping[str, Result]) -> Table:
    """One thing varied at a time: changes down, methods across. A label is "CHANGE: METHOD"."""
    methods = [m for m in all_methods() if any(result.config.method == m for result in results.values())]
    cells: dict[str, dict[str, str]] = {}
    for label, result in results.items():
        change = label.removesuffix(f": {result.config.method}")
        cells.setdefault(change, {})[result.config.method] = percent(final(result))
    rows = [(change, *(found.get(method, "") for method in methods)) for change, found in cells.items()]
    return Table("One thing varied at a time: average accuracy in % after all tasks", ("change", *methods), rows)


def _benchmark_blocks(runs: Runs, benchmark: str) -> list[Html]:
    """The tables, what they lack, and all figures of one benchmark."""
    blocks: list[Html] = []
    found = draw_benchmark(runs, benchmark)
    if (benchmark, "table") in runs:
        results = runs[benchmark, "table"].results
        missing = missing_from(results)
        blocks += [*table_blocks(tables_of(results), missing), figures(found["table"], benchmark)]
    else:
        missing = []
        blocks.append(paragraph("The paper's methods were not run here, so there is no table and there are no curves."))
    if variant := variant_results(runs, benchmark):
        blocks += [heading("With the steady trace, next to the table's baselines"), *table_blocks(tables_of(variant))]
        blocks.append(figures(found["variant"], benchmark))
    blocks.append(figures(found.get("sensitivity", []), benchmark))
    blocks += [table(m) for m in (form.crossed_table(runs, benchmark), map_table(runs, benchmark)) if m.rows]
    if (benchmark, "study") in runs:
        blocks.append(table(study_table(runs[benchmark, "study"].results)))
    tried = [made for made in (rungs.settings_table(runs, benchmark, rung) for rung in rungs.SEARCHED) if made.rows]
    tried += [made for made in [stress.rates_table(runs)] if made.rows and benchmark == stress.BENCHMARK]
    blocks += [folded(made.title, [table(made, "words")]) for made in tried]
    return [*blocks, notice(MISSING, missing)]


def _methods(runs: Runs) -> list[Html]:
    """What each method of the tables is, how it was measured, and by which rule a claim is judged."""
    results = {label: r for (_, part), run in runs.items() if part == "table" for label, r in run.results.items()}
    rule = (
        "A difference that the paper reports is reproduced where our 95% interval excludes zero on the paper's side, "
        "contradicted where it excludes zero on the other side, and not reproduced where it includes zero. With fewer "
        f"than {FEWEST_PAIRS} pairs of trials it is not tested."
    )
    return [*(method_blocks(results) if results else []), paragraph(rule)]


def _made_with(runs: Runs) -> list[Html]:
    rows = []
    for (benchmark, part), run in runs.items():
        seconds = run.about.get("seconds")
        taken = in_words(float(seconds)) if isinstance(seconds, int | float) else "–"
        rows.append((f"{benchmark}, {part}", str(run.num_models), taken, device_of(run.about) or "–"))
    blocks = [table(Table("Times", ("run", "models", "time", "device"), rows))]
    commands = dict.fromkeys(str(run.about["command"]) for run in runs.values() if run.about.get("command"))
    if commands:
        blocks += [heading("Commands"), code("\n".join(commands))]
    shown: set[str] = set()
    for (benchmark, part), run in runs.items():
        if part in ("table", "variant") or benchmark not in shown:
            shown.add(benchmark)
            name = title_of(benchmark) + ("" if part == "table" else f", {part}")
            made = (data_table(run.about, f"Data of {name}"), versions_table(run.about, f"Versions of {name}"))
            facts = [table(content, "words") for content in made if content is not None]
            settings = table(settings_table(run.results, f"Settings of {name}"), "words")
            blocks.append(folded(f"Settings, data and versions of {name}", [side_by_side([settings], facts)]))
    return blocks


def _of_variant(made: Drawing) -> Drawing:
    """With its own name and title, since it appears next to the table's."""
    title = f"With the steady trace: {made.title[0].lower()}{made.title[1:]}"
    return dataclasses.replace(made, name=f"variant-{made.name}", title=title)
