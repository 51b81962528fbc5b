"""Why the numbers are as they are, one thing changed at a time: the study, ReLU, and what happens on the mixture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.config.paper import PAPER_METHODS
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.report.layout import Table, number
from engram.report.pairs import accuracy_difference
from engram.report.tables import final_accuracy
from engram.reproduction.ladder import ENDINGS, LINEAR, PUBLISHED, Runs, as_published, final_configs
from engram.reproduction.verdicts import points
from engram.runs import metrics
from engram.runs.result import Result

STUDY_TRIALS = 5
BASE = "as in the table"
CONTROL = "baseline with a constant trace of 2"  # as large as the steady trace, but without information
PLASTIC = tuple(method for method in PAPER_METHODS if method.startswith("dhp"))
BASELINES = tuple(method for method in PAPER_METHODS if method not in PLASTIC)
WITH_PENALTY = tuple(method for method in PAPER_METHODS if method not in ("finetune", "dhp"))
WITH_FISHER = ("online-ewc", "dhp+online-ewc")


@dataclass(frozen=True)
class Change:
    """Settings that are changed, and the methods that they can affect."""

    settings: dict[str, Any]
    methods: tuple[str, ...] = PAPER_METHODS
    compared_with: str = BASE  # the change of the other methods, which these are compared with


CHANGES: dict[str, Change] = {
    BASE: Change({}),
    "inputs standardised": Change({"input_mean": 0.1307, "input_std": 0.3081}),
    "He's initialisation": Change({"initialisation": "he"}),
    "LeakyReLU slope 0.3": Change({"leaky_slope": 0.3}),
    "η unbounded": Change({"eta_range": "unbounded"}, PLASTIC),
    "η unbounded, inputs standardised": Change(
        {"eta_range": "unbounded", "input_mean": 0.1307, "input_std": 0.3081},
        PLASTIC,
        compared_with="inputs standardised",
    ),
    "no gradient through the trace": Change({"trace_gradient": False}, PLASTIC),
    "η fixed": Change({"learn_eta": False}, PLASTIC),
    "uniform plasticity": Change({"alpha": "uniform"}, PLASTIC),
    "ten times the initial α": Change({"alpha_init": 0.1}, PLASTIC),
    "α regularised too": Change({"regularize_alpha": True}, tuple(m for m in PLASTIC if m != "dhp")),
    "weights in force protected": Change({"protect": "in-force"}, tuple(m for m in PLASTIC if m != "dhp")),
    "penalty by its gradient": Change({"penalty_step": "gradient"}, WITH_PENALTY),
    "Fisher of sampled labels": Change({"fisher_labels": "sampled"}, WITH_FISHER),
    "exact Fisher": Change({"fisher_labels": "exact"}, WITH_FISHER),
    "γ = 0.9": Change({"gamma": 0.9}, WITH_FISHER),
    "γ = 0.5": Change({"gamma": 0.5}, WITH_FISHER),
    "plain baseline": Change({"baseline_head": "linear"}, BASELINES),
    CONTROL: Change({"baseline_trace": STEADY["trace_scale"]}, BASELINES),
    "trace read at scale 1": Change({"trace_scale": 1.0}, PLASTIC),
    "trace read at scale 2": Change({"trace_scale": 2.0}, PLASTIC),
    "trace centred": Change({"trace_centred": True}, PLASTIC),
    "steady trace": Change(STEADY, PLASTIC),
    "steady trace, not scaled": Change({**STEADY, "trace_scale": None}, PLASTIC),
    "steady trace, not centred": Change({**STEADY, "trace_centred": False}, PLASTIC),
    "steady trace, initial α of the paper": Change({**STEADY, "alpha_init": 0.01}, PLASTIC),
    "steady trace, slow weights protected": Change(
        {**STEADY, "protect": "slow"}, tuple(m for m in PLASTIC if m != "dhp")
    ),
    "steady trace, η learned": Change({**STEADY, "learn_eta": True, "trace_gradient": True, "eta": 0.001}, PLASTIC),
    "a quarter of the epochs": Change({"epochs": 0.25}),
    "twice the epochs": Change({"epochs": 2}),
}
# Only where each task has its own classes is there something to mask.
SPLIT_CHANGES = {"masks in evaluation only": Change({"mask_training": False})}
# Where classes return in every task, protection may matter more. At full length that would take twenty times as long
# as Split MNIST, so the stream is shorter, and only the changes that may matter there are run.
PERMUTED = {"num_tasks": 5, "max_samples": 6000, "epochs": 1, "batch_size": 10, "trials": 3}
PERMUTED_CHANGES = (
    BASE,
    "inputs standardised",
    "He's initialisation",
    "no gradient through the trace",
    "uniform plasticity",
    "α regularised too",
    "weights in force protected",
    "penalty by its gradient",
    "exact Fisher",
    "γ = 0.5",
    "plain baseline",
    CONTROL,
    "trace read at scale 2",
    "steady trace",
    "steady trace, not centred",
    "steady trace, slow weights protected",
)


def changes_of(benchmark: str) -> dict[str, Change]:
    """The changes that are tried on a benchmark, by name."""
    if benchmark == "split-mnist":
        return CHANGES | SPLIT_CHANGES
    return {name: CHANGES[name] for name in PERMUTED_CHANGES}


def study_configs(benchmark: str) -> dict[str, Config]:
    """The study's configs, by label "CHANGE: METHOD".

    Example:
        study_configs("split-mnist")["η fixed: dhp"].learn_eta
    """
    configs = {}
    for name, change in changes_of(benchmark).items():
        for method in change.methods:
            config = preset(benchmark, method, trials=STUDY_TRIALS, seed=1, **LINEAR)
            if benchmark != "split-mnist":
                config = config.replace(**PERMUTED)
            settings = dict(change.settings)
            if "epochs" in settings:
                settings["epochs"] = max(1, round(config.epochs * settings["epochs"]))
            configs[f"{name}: {method}"] = config.replace(**settings)
    return configs


def relu_configs(benchmark: str) -> dict[str, Config]:
    """DHP and the plain head of rung 1 with ReLU: the first author's post has it where the paper has LeakyReLU.

    Example:
        >>> relu_configs("split-mnist")["dhp+si"].leaky_slope
        0.0
    """
    rung_1 = final_configs(as_published(benchmark), (), ())
    heads = ("linear", "dhp")
    return {label: config.replace(leaky_slope=0.0) for label, config in rung_1.items() if config.head in heads}


# Why DHP diverges on the mixture. With any penalty it does so in its third or fourth task, while η is learned up to 1.
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


def relu_table(runs: Runs) -> Table:
    """Rung 1 on Split MNIST with LeakyReLU, as in the paper, and with ReLU, as in the first author's post.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(relu_table(read_reproduction("results").runs).to_text())
    """
    found = [runs["split-mnist", part].results if ("split-mnist", part) in runs else {} for part in ("rung-1", "relu")]
    rows = []
    for ending in ENDINGS:
        labels = [f"{head}{ending}" for head in ("linear", "dhp")]
        if all(label in results for results in found for label in labels):
            cells = []
            for plain, dhp in ([results[label] for label in labels] for results in found):
                cells += [final_accuracy(plain), points(accuracy_difference(dhp, plain))]
            rows.append((ending.removeprefix("+") or "alone", *cells))
    columns = [f"{name}{words}" for name in ("LeakyReLU: ", "ReLU: ") for words in ("plain, %", "DHP adds")]
    return Table("Split MNIST, rung 1 with either activation: accuracy ± SEM, points", ("", *columns), rows)


def when_diverged(result: Result) -> str:
    """How many trials diverged, and in which tasks: "3 of 10, 2 in task 3, 1 in task 4"; nothing if none did."""
    by_task = Counter(divergence.task + 1 for divergence in result.diverged)
    when = ", ".join(f"{by_task[task]} in task {task}" for task in sorted(by_task))
    return f"{len(result.diverged)} of {len(result.accuracy)}, {when}" if when else ""


COLUMNS = ("what is changed", "trials diverged", "η", "‖α‖", "loss in training", "accuracy on that task, %")


def divergence_table(runs: Runs) -> Table:
    """DHP on a short mixture with one thing changed at a time: which trials diverged, and what its trace was like.

    The numbers are of the end of the third task, over the trials that have learned it.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(divergence_table(read_reproduction("results").runs).to_text())
    """
    run = runs.get(("vision-mixture", "divergence"))
    rows = [
        (name, when_diverged(result) or "0", *_after_task(result, 2), final_accuracy(result))
        for name, result in ({} if run is None else run.results).items()
    ]
    return Table(
        "Why DHP diverges on the mixture: one thing changed at a time. Numbers are of the end of the third task",
        (*COLUMNS, "accuracy after all four tasks, %"),
        rows,
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
        (
            name,
            when_diverged(result) or "0",
            *_after_task(result, 3),
            _after_task(result, 4)[-1],
            final_accuracy(result),
        )
        for name, result in ({} if run is None else run.results).items()
    ]
    return Table(
        "DHP without a penalty on the mixture: one thing changed at a time. Numbers are of the end of the fourth task",
        (*COLUMNS, "accuracy on the fifth task, %", "accuracy after all five tasks, %"),
        rows,
    )


def _after_task(result: Result, task: int) -> list[str]:
    """η, ‖α‖, the loss in training and the accuracy on a task at its end, over the trials that have learned it."""
    accuracy = result.latest_task[:, task]
    at_end = {row["trial"]: row for row in result.dynamics if row["task"] == task}
    last = [at_end[trial] for trial in np.array(result.trials)[np.isfinite(accuracy)] if trial in at_end]
    digits = {"eta": 4, "alpha_norm": 1, "loss": 3}
    shown = [number(float(np.mean([row[key] for row in last])), digits[key]) if last else "–" for key in digits]
    learned = metrics.estimate(accuracy)
    num, of = learned.num_trials, len(result.accuracy)
    return [*shown, number(100 * learned.mean, 1) + ("" if num == of else f" ({num} of {of} trials)")]
