"""docs/reproduction.md and the README's table, written from the results: every number in them is one of those."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import STEADY, title_of
from engram.report.layout import Table
from engram.report.pairs import baseline_of
from engram.report.tables import final_accuracy, so_far
from engram.reproduction.document_tables import (
    baseline_table,
    control_table,
    data_table,
    differences,
    diverged_table,
    grid_leads,
    read_selection,
    selection_tables,
    sensitivity_table,
    strength_tables,
    study_table,
    times_table,
    to_the_left,
    worst_table,
)
from engram.reproduction.overview import accuracy_table, claims_table, transfer_table
from engram.reproduction.study import PLASTIC
from engram.reproduction.verdicts import FEWEST_PAIRS, Sheets, positions, steady_pairs, table_pairs
from engram.reproduction.words import (
    ABOUT_DATA,
    ABOUT_STEADY,
    ABOUT_STRENGTHS,
    ABOUT_STUDY,
    ABOUT_VERDICTS,
    HOW_IT_WAS_FOUND,
    INTRODUCTION,
    WHAT_WAS_LOST,
)
from engram.runs import metrics
from engram.runs.sheets import read_reproduction


def write_document(results: Path) -> str:
    """The whole of docs/reproduction.md."""
    reproduction = read_reproduction(results)
    sheets = reproduction.sheets
    sections = [
        "# The paper, reproduced",
        INTRODUCTION,
        _in_short(sheets, results),
        "## Table I: ours and the paper's",
        accuracy_table(sheets).to_markdown(),
        transfer_table(sheets).to_markdown(),
        *_so_far(sheets),
        *_diverged(sheets),
        baseline_table(sheets).to_markdown(),
        _why_baselines_differ(sheets),
        "## What DHP adds: the sixteen comparisons",
        differences(table_pairs(sheets), "The DHP Softmax as in the paper").to_markdown(),
        ABOUT_VERDICTS,
        "![the sixteen differences with their intervals](images/reproduction-differences.png)",
        "## The paper's claims",
        to_the_left(claims_table(sheets)),
        "## The initial value of η",
        sensitivity_table(sheets).to_markdown(),
        "## The strengths",
        ABOUT_STRENGTHS,
        *(to_the_left(table) for table in strength_tables(sheets)),
        "## Why: one thing varied at a time",
        ABOUT_STUDY,
        *(study_table(sheets, name).to_markdown() for name in PAPER_BENCHMARKS if (name, "study") in sheets),
        "## The steady trace: a form in which DHP helps",
        ABOUT_STEADY,
        differences(steady_pairs(sheets), "The steady trace", against_paper=False).to_markdown(),
        worst_table(sheets).to_markdown(),
        *(control_table(sheets, name).to_markdown() for name in PAPER_BENCHMARKS if (name, "study") in sheets),
        "![the differences with the steady trace](images/reproduction-steady.png)",
        _steady_settings(),
        HOW_IT_WAS_FOUND,
        *(table.to_markdown() for table in selection_tables(results)),
        "## What it was made with",
        ABOUT_DATA,
        data_table(sheets).to_markdown(),
        times_table(sheets).to_markdown(),
        _time_of_the_table(sheets),
        WHAT_WAS_LOST,
        _missing(reproduction.missing),
    ]
    return "\n\n".join(section.strip() for section in sections if section.strip()) + "\n"


def readme_table(results: Path) -> str:
    """The README's: each benchmark that was learned to its end, with each way of consolidation."""
    sheets = read_reproduction(results).sheets
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        table, variant = (sheets.get((benchmark, part)) for part in ("table", "variant"))
        if table is None or variant is None or table.missing:
            continue
        for method in PLASTIC:
            name = baseline_of(method)
            ours = [table.entries[name], table.entries[method], variant.entries[method]]
            cells = [final_accuracy(result) for result in ours]
            theirs = [f"{PAPER_RESULTS[benchmark][m][0]:.2f}" for m in (name, method)]
            rows.append((f"{title_of(benchmark)}: {name}", *cells, *theirs))
    columns = ("", "without DHP", "with DHP", "with the steady trace", "paper without", "paper with")
    return Table("", columns, rows).to_markdown().partition("\n\n")[2]


def _so_far(sheets: Sheets) -> list[str]:
    tables = [so_far(list(sheet.entries.values())) for (_, part), sheet in sheets.items() if part == "table"]
    return [table.to_markdown() for table in tables if table is not None]


def _diverged(sheets: Sheets) -> list[str]:
    table = diverged_table(sheets)
    return [table.to_markdown()] if table.rows else []


def _missing(sentences: Sequence[str]) -> str:
    if not sentences:
        return "Nothing is missing from a whole reproduction."
    return "\n".join(["Missing from a whole reproduction:", "", *(f"- {sentence}" for sentence in sentences)])


def _in_short(sheets: Sheets, results: Path) -> str:
    found = [pair.accuracy for pair in table_pairs(sheets)]
    steady = [pair for pair in steady_pairs(sheets) if pair.accuracy.num_trials >= FEWEST_PAIRS]
    with_penalty = [pair.accuracy for pair in steady if pair.method != "dhp"]
    alone = [pair.accuracy for pair in steady if pair.method == "dhp"]
    models = sum(len(result.accuracy) for sheet in sheets.values() for result in sheet.entries.values())
    tried = sum(
        len(values)
        for found_there in read_selection(results).values()
        for candidate in found_there["candidates"].values()
        for values in candidate["accuracy"].values()
    )
    ahead = {
        benchmark: grid_leads(sheets, benchmark) for benchmark in PAPER_BENCHMARKS if (benchmark, "strengths") in sheets
    }
    leads = " and ".join(f"{won} of {of} on {title_of(name)}" for name, (won, of) in ahead.items())
    return "\n\n".join(
        [
            _paragraph(
                f"**In short.** The tables of this page are of {models:,} networks, and {tried} more were trained to "
                "make a choice. Most of the paper's baselines can be reproduced; its gains cannot, at its strengths. "
                f"Of its sixteen differences between a method with DHP and without, {positions(found)}. The strengths "
                "matter: with the best λ of a grid for each (one seed, so no proof), DHP is ahead in "
                f"{leads}. [The strengths](#the-strengths) says why."
            ),
            _paragraph(
                "With the *steady trace*, a form of the layer that differs in how the trace is written, read and "
                f"protected, DHP helps consolidation: of {len(with_penalty)} differences {positions(with_penalty)}. "
                f"Alone it does not: of {len(alone)}, {positions(alone)}."
            ),
        ]
    )


def _time_of_the_table(sheets: Sheets) -> str:
    """What Table I took in all: its networks are trained benchmark after benchmark."""
    tables = [sheets[name, "table"] for name in PAPER_BENCHMARKS if (name, "table") in sheets]
    seconds = sum(float(sheet.about["seconds"]) for sheet in tables)
    models = sum(len(result.accuracy) for sheet in tables for result in sheet.entries.values())
    return _paragraph(
        f"The {models} networks of Table I took {seconds:,.0f} s in all ({seconds / 60:.1f} minutes), each column "
        "with its own line above."
    )


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _why_baselines_differ(sheets: Sheets) -> str:
    """The measured reasons."""
    sheet = sheets.get(("permuted-mnist", "strengths"))
    study = sheets.get(("split-mnist", "study"))
    if sheet is None or study is None:
        return ""

    def accuracy(label: str) -> str:
        return f"{100 * float(sheet.entries[label].average_accuracy[0, -1]):.1f}"

    plain = metrics.estimate(study.entries["plain baseline: finetune"].average_accuracy[:, -1])
    return _paragraph(
        "Where they differ by more, mostly the strengths do it. *SI on Permuted MNIST* has "
        f"{accuracy('si 0.1')} in the grid below at the paper's strength of 0.1, and {accuracy('si 0.05')} at half of "
        "it, so that much depends on how a strength is counted; the paper has "
        f"{PAPER_RESULTS['permuted-mnist']['si'][0]}. "
        "*Online EWC and MAS on the imbalanced benchmark* seem held too tightly: their last tasks can hardly be "
        f"learned, and in the grid on Permuted MNIST Online EWC falls from {accuracy('online-ewc 100')} at 100 to "
        f"{accuracy('online-ewc 400')} at the 400 that the paper gives for that benchmark. *All three on the mixture* "
        "show the same: of its last task they learn far less than finetuning does. *Finetuning on Split MNIST* "
        f"forgets less here than in the paper; with the plain head it is at {100 * plain.mean:.1f}, so the extra set "
        "of weights is a part of that, and the rest is not explained."
    )


def _steady_settings() -> str:
    return f"Its settings: {', '.join(f'`{name}={json.dumps(value)}`' for name, value in STEADY.items())}."
