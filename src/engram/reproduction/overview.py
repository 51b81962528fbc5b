"""Table I in our numbers beside the paper's, and the verdicts: tables with which a page and a document both begin."""

from __future__ import annotations

from collections.abc import Callable

from engram.config.methods import all_methods
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import title_of
from engram.report.layout import Table, number
from engram.report.pairs import paper_value
from engram.report.tables import final_accuracy
from engram.reproduction.claims import claims
from engram.reproduction.verdicts import Sheets
from engram.runs import metrics
from engram.runs.result import Result


def accuracy_table(sheets: Sheets) -> Table:
    """The paper's Table I with ours before it: methods down, benchmarks across."""

    def cell(result: Result) -> str:
        paper = paper_value(result)
        return f"{final_accuracy(result)} / {'–' if paper is None else f'{paper[0]:.2f}'}"

    return _across(sheets, "Average accuracy in % after all tasks: ours ± SEM / the paper's", cell)


def transfer_table(sheets: Sheets) -> Table:
    """BWT in the same shape."""

    def cell(result: Result) -> str:
        paper = paper_value(result)
        return f"{number(metrics.estimate(result.bwt).mean, 3)} / {'–' if paper is None else f'{paper[1]:.2f}'}"

    return _across(sheets, "Backward transfer, below zero is forgetting: ours / the paper's", cell)


def claims_table(sheets: Sheets) -> Table:
    """What the paper says, and what these numbers say to it."""
    rows = [(made.claim, made.verdict, made.sure, made.evidence) for made in claims(sheets)]
    return Table("The paper's claims", ("claim", "verdict", "how sure", "evidence"), rows)


def _across(sheets: Sheets, title: str, cell: Callable[[Result], str]) -> Table:
    columns = {name: sheets[name, "table"].entries for name in PAPER_BENCHMARKS if (name, "table") in sheets}
    methods = [method for method in all_methods() if any(method in entries for entries in columns.values())]
    rows = [
        (method, *(cell(entries[method]) if method in entries else "not run" for entries in columns.values()))
        for method in methods
    ]
    trials = (str(max(len(result.accuracy) for result in entries.values())) for entries in columns.values())
    return Table(title, ("method", *(title_of(name) for name in columns)), [*rows, ("trials", *trials)])
