"""Results as tables: methods with accuracy, BWT, first and last task, and what DHP adds to each, in pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engram.config.presets import changes_from_preset, title_of
from engram.report.layout import Table, count, number, rounded
from engram.report.pairs import has_paper_data, pairs, paper_value
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result


def summary(results: Sequence[Result]) -> Table:
    """A row a method, after all tasks; the paper's value beside it where the data are the paper's."""
    with_paper = has_paper_data(results)
    columns = ["method", "ACC %", "± SEM", "BWT", "first %", "last %"]
    if with_paper:
        columns += ["paper %", "paper BWT"]
    rows = [_summary_row(result, with_paper) for result in results]
    config = results[0].config
    trials = max(len(result.accuracy) for result in results)
    title = f"{config.benchmark} on {config.dataset}, {count(config.num_tasks, 'task')}, {count(trials, 'trial')}"
    notes = [
        "ACC: mean accuracy over all tasks, after the last. BWT: below zero is forgetting. "
        "first, last: the accuracy then on the first and on the last task."
    ]
    changed: dict[str, dict[str, None]] = {}  # each setting with its values here (and in the preset), once each
    for result in results:
        for name, (here, usual) in changes_from_preset(result.config).items():
            changed.setdefault(name, {})[f"{here} ({usual})"] = None
    if changed:
        settings = (f"{name} {', '.join(values)}" for name, values in changed.items())
        notes.append(f"Changed from the preset (in brackets): {'; '.join(settings)}.")
    notes += [
        f"{record['name']}: of the published form, but other files; {record['train']:,} + {record['test']:,} samples."
        for record in results[0].data
        if record["origin"] == "structure"
    ]
    notes += [*unfinished(results), *diverged(results)]
    return Table(title, tuple(columns), rows, tuple(notes))


def unfinished(results: Sequence[Result]) -> list[str]:
    """A sentence for each method that has fewer trials than it is to have."""
    return [
        f"{result.config.method}: {len(result.accuracy)} of {result.config.trials} trials so far."
        for result in results
        if len(result.accuracy) < result.config.trials
    ]


def diverged(results: Sequence[Result]) -> list[str]:
    """A sentence for each trial that was lost."""
    return [
        f"{result.config.method}: {divergence}; it is left out of the row."
        for result in results
        for divergence in result.diverged
    ]


def so_far(results: Sequence[Result]) -> Table | None:
    """Of methods that have not learned all tasks yet, what they have; None if all have."""
    learned = min(result.tasks_learned for result in results)
    config = results[0].config
    if learned in (0, config.num_tasks):
        return None
    rows = []
    for result in results:
        accuracy = metrics.estimate(result.average_accuracy[:, learned - 1])
        lost = ", ".join(f"task {d.task + 1}" for d in sorted(result.diverged, key=lambda d: d.task))
        rows.append((result.config.method, with_error(accuracy), str(accuracy.num_trials), lost or "none"))
    title = f"{title_of(config.benchmark)} after {learned} of {config.num_tasks} tasks, as far as all have come"
    return Table(title, ("method", "accuracy %", "trials", "diverged in"), rows)


def with_error(accuracy: Estimate) -> str:
    """In %, with its standard error."""
    return "–" if accuracy.num_trials == 0 else f"{number(100 * accuracy.mean, 2)} ± {number(100 * accuracy.sem, 2)}"


def final_accuracy(result: Result) -> str:
    """After the last task, over the trials that were learned to their end; of how many, where some diverged."""
    accuracy = metrics.estimate(result.average_accuracy[:, -1])
    if not result.diverged:
        return with_error(accuracy)
    if accuracy.num_trials == 0:
        return "diverged"
    return f"{with_error(accuracy)} ({accuracy.num_trials} of {len(result.accuracy)} trials)"


def gains(results: Sequence[Result]) -> Table | None:
    """What the DHP Softmax adds to each method that was run with it and without; None if there is none."""
    rows = [
        (
            p.method,
            *difference_cells(p.accuracy, 100, 2),
            *difference_cells(p.transfer, 1, 3),
            str(p.accuracy.num_trials),
        )
        for p in pairs(results)
    ]
    if not rows:
        return None
    columns = ("method", "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    title = "What the DHP Softmax adds to the same method without it"
    return Table(title, columns, rows, ("Trials are paired: the same initial weights, tasks and order of samples.",))


def _summary_row(result: Result, with_paper: bool) -> tuple[str, ...]:
    accuracy = metrics.estimate(result.average_accuracy[:, -1])
    row = [
        result.config.method,
        number(100 * accuracy.mean, 2),
        number(100 * accuracy.sem, 2),
        number(metrics.estimate(result.bwt).mean, 3),
        number(100 * metrics.estimate(result.first_task[:, -1]).mean, 2),
        number(100 * metrics.estimate(result.latest_task[:, -1]).mean, 2),
    ]
    if with_paper:
        paper = paper_value(result)
        row += ["–", "–"] if paper is None else [f"{paper[0]:.2f}", f"{paper[1]:.2f}"]
    return tuple(row)


def difference_cells(difference: Estimate, scale: float, digits: int) -> tuple[str, str]:
    """A difference and its 95% interval, with their signs."""

    def signed(value: float) -> str:
        return "–" if math.isnan(value) else f"{rounded(scale * value, digits):+.{digits}f}"

    return signed(difference.mean), f"[{signed(difference.low)}, {signed(difference.high)}]"
