"""What can be set beside what: a method with DHP beside the same without it, and our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engram.config.paper import PAPER_RESULTS
from engram.config.presets import changes_from_preset
from engram.config.settings import names_of
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result


@dataclass(frozen=True)
class Pair:
    """A method with the DHP Softmax less the same method without it, trial by trial."""

    benchmark: str
    method: str
    baseline: str
    accuracy: Estimate  # of differences in [-1, 1]
    transfer: Estimate  # of BWT
    paper: float | None  # the paper's own difference in accuracy, in points, where its data were used


def baseline_of(method: str) -> str:
    """The same method without the DHP Softmax."""
    return "finetune" if method == "dhp" else method.removeprefix("dhp+")


def pairs(results: Sequence[Result]) -> list[Pair]:
    """Every method that was run with the DHP Softmax and without."""
    by_method = {result.config.method: result for result in results}
    found = []
    for method, result in by_method.items():
        baseline = by_method.get(baseline_of(method))
        if not result.config.plastic or baseline is None:
            continue
        paper = None
        if (ours := paper_value(result)) and (theirs := paper_value(baseline)):
            paper = ours[0] - theirs[0]
        accuracy = metrics.paired_difference(result.average_accuracy[:, -1], baseline.average_accuracy[:, -1])
        transfer = metrics.paired_difference(result.bwt, baseline.bwt)
        found.append(Pair(result.config.benchmark, method, baseline_of(method), accuracy, transfer, paper))
    return found


def has_paper_data(results: Sequence[Result]) -> bool:
    """Whether these are the paper's tasks, made of the paper's datasets (which files they were is a note)."""
    config = results[0].config
    others = set(names_of(stage="stream")) & changes_from_preset(config).keys()
    return config.benchmark in PAPER_RESULTS and not others


def paper_value(result: Result) -> tuple[float, float] | None:
    """The paper's accuracy in % and BWT of this method on these tasks, if it has them."""
    return PAPER_RESULTS[result.config.benchmark].get(result.config.method) if has_paper_data([result]) else None
