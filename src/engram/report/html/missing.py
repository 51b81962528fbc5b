"""What a set of results does not have, in sentences: a report says it rather than leaving a hole."""

from __future__ import annotations

from collections.abc import Sequence

from engram.config.methods import CUSTOM
from engram.report.pairs import baseline_of, has_paper_data
from engram.report.tables import diverged, unfinished
from engram.runs.result import Result


def missing_from(results: Sequence[Result], methods: Sequence[str] = ()) -> list[str]:
    """Everything a reader might look for and not find; `methods` are those that were to be run."""
    config = results[0].config
    run = {result.config.method for result in results}
    sentences = [f"{method}: no trials so far." for method in methods if method not in run]
    sentences += unfinished(results)
    sentences += [
        f"{result.config.method}: {result.tasks_learned} of {config.num_tasks} tasks learned so far."
        for result in results
        if result.tasks_learned < config.num_tasks
    ]
    sentences += diverged(results)
    plastic = [result for result in results if result.config.plastic]
    sentences += [
        f"{baseline_of(result.config.method)} was not run, so {result.config.method} has no pair."
        for result in plastic
        if baseline_of(result.config.method) not in run
    ]
    sentences += [f"{result.config.method}: no dynamics were kept." for result in plastic if not result.dynamics]
    if not plastic:
        sentences.append("No method with DHP was run, so there are no differences and no dynamics of the trace.")
    if all(len(result.accuracy) == 1 for result in results):
        sentences.append("There is one trial only, so there are no standard errors and no intervals.")
    if config.num_tasks == 1:
        sentences.append("There is one task only, so there is no forgetting to measure, and BWT is empty.")
    if config.benchmark != CUSTOM and not has_paper_data(results):
        tasks = f"{config.benchmark} with {config.num_tasks} tasks of {config.dataset}"
        sentences.append(f"The paper has no numbers for {tasks}, so none stand beside ours.")
    return sentences
