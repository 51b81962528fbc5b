"""What happens to DHP on the mixture, one thing changed at a time: why it diverges, and why it learns less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from engram.config.presets import preset
from engram.config.settings import Config
from engram.report.layout import Table, number
from engram.report.tables import final_accuracy
from engram.reproduction.ladder import LINEAR, PUBLISHED, Runs
from engram.runs import metrics
from engram.runs.result import Result

# With any penalty DHP diverges in its third or fourth task, while η is learned up to 1.
# Three things could be the reason. A batch reads what its own labels have just written, so they leak into its logits;
# the loss is differentiated through what is written; or what is read is merely large, and so are the head's gradients.
# Each change takes away some of these. Those with η = 1 from the start keep the trace as large as it gets.
DIVERGING, STABLE = "dhp+online-ewc", "linear+online-ewc"
# A stream that a CPU can train: fewer samples and epochs, at three times the learning rate. After four tasks, no other
# trial of the whole mixture diverged.
SHORT: dict[str, Any] = {"max_samples": 6000, "epochs": 20, "learning_rate": 0.03, "num_tasks": 4, "trials": 3}
FIXED: dict[str, Any] = {"learn_eta": False}
ONE: dict[str, Any] = {"learn_eta": False, "eta": 1.0}
CURES: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "published layer": PUBLISHED,
    "written after reading": {"trace_write": "after"},
    "no gradient through the trace": {"trace_gradient": False},
    "η fixed at 0.0001": FIXED,
    "η fixed at 0.1": {**FIXED, "eta": 0.1},
    "η fixed at 1": ONE,
    "η fixed at 1, no gradient through the trace": {**ONE, "trace_gradient": False},
    "η fixed at 1, written after reading": {**ONE, "trace_write": "after"},
    "α protected too": {"regularize_alpha": True},
}
PLAIN = "plain head"


def divergence_configs(benchmark: str) -> dict[str, Config]:
    """DHP with each change, and the plain head, by the name of the change.

    Args:
        benchmark: the mixture.

    Example:
        >>> divergence_configs("vision-mixture")["η fixed at 1"].eta
        1.0
    """
    # All but the published layer start as in the table, where DHP diverged.
    usual = preset(benchmark, DIVERGING).replace(**LINEAR, **SHORT)
    plain = preset(benchmark, STABLE).replace(**SHORT)
    return {**{name: usual.replace(**changes) for name, changes in CURES.items()}, PLAIN: plain}


# Without a penalty DHP learns less of each new task on the mixture than the plain head, as published too (rung 1). The
# same stream with its fifth task shows whether labels leak there as well.
TRIED_ALONE = "written after reading", "η fixed at 0.0001", "η fixed at 1", "η fixed at 1, written after reading"
LEAKS = {name: CURES[name] for name in TRIED_ALONE}
AS_PUBLISHED = "as published"


def leak_configs(benchmark: str) -> dict[str, Config]:
    """DHP as published, without a penalty, with each change, and the plain head, by the name of the change.

    Args:
        benchmark: the mixture.

    Example:
        >>> leak_configs("vision-mixture")["as published"].penalty is None
        True
    """
    usual, plain = (preset(benchmark, head).replace(**SHORT | {"num_tasks": 5}) for head in ("dhp", "linear"))
    return {AS_PUBLISHED: usual, **{name: usual.replace(**changes) for name, changes in LEAKS.items()}, PLAIN: plain}


# --- what came out


def when_diverged(result: Result) -> str:
    """How many trials diverged, and in which tasks: "3 of 10, 2 in task 3, 1 in task 4"; nothing if none did."""
    by_task = Counter(divergence.task + 1 for divergence in result.diverged)
    when = ", ".join(f"{by_task[task]} in task {task}" for task in sorted(by_task))
    return f"{len(result.diverged)} of {len(result.accuracy)}, {when}" if when else ""


COLUMNS = ("what is changed", "trials diverged", "η", "‖α‖", "loss in training", "accuracy on that task, %")


def divergence_table(runs: Runs) -> Table:
    """DHP on a short mixture with one thing changed at a time: which trials diverged, and what its trace was like.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(divergence_table(read_reproduction("results").runs).to_text())
    """
    run = runs.get(("vision-mixture", "divergence"))
    return table_of_changes({} if run is None else run.results)


def table_of_changes(results: Mapping[str, Result]) -> Table:
    """The same of any results on that mixture, by the name of what is changed.

    The numbers are of the end of the third task, over the trials that have learned it.

    Args:
        results: with dynamics.

    Example:
        >>> print(table_of_changes({"η at most 0.1": result}).to_markdown())
    """
    return Table(
        "Why DHP diverges on the mixture: one thing changed at a time. Numbers are of the end of the third task",
        (*COLUMNS, "accuracy after all four tasks, %"),
        [(name, *_after_task(result, 2), final_accuracy(result)) for name, result in results.items()],
    )


def leak_table(runs: Runs) -> Table:
    """DHP without a penalty on the same short mixture: what it has learned of the last two tasks, and of all.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(leak_table(read_reproduction("results").runs).to_text())
    """
    run = runs.get(("vision-mixture", "leak"))
    rows = [
        (name, *_after_task(result, 3), _after_task(result, 4)[-1], final_accuracy(result))
        for name, result in ({} if run is None else run.results).items()
    ]
    return Table(
        "DHP without a penalty on the mixture: one thing changed at a time. Numbers are of the end of the fourth task",
        (*COLUMNS, "accuracy on the fifth task, %", "accuracy after all five tasks, %"),
        rows,
    )


def _after_task(result: Result, task: int) -> list[str]:
    """What `COLUMNS` has of a result; numbers are of a task's end, over the trials that have learned it."""
    accuracy = result.latest_task[:, task]
    at_end = {row["trial"]: row for row in result.dynamics if row["task"] == task}
    last = [at_end[trial] for trial in np.array(result.trials)[np.isfinite(accuracy)] if trial in at_end]
    digits = {"eta": 4, "alpha_norm": 1, "loss": 3}
    shown = [number(float(np.mean([row[key] for row in last])), digits[key]) if last else "–" for key in digits]
    learned = metrics.estimate(accuracy)
    num, of = learned.num_trials, len(result.accuracy)
    of_some = "" if num == of else f" ({num} of {of} trials)"
    return [when_diverged(result) or "0", *shown, number(100 * learned.mean, 1) + of_some]
