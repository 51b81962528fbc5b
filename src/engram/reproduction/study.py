"""Why the numbers are as they are, one thing changed at a time: the study, and ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engram.config.paper import PAPER_METHODS
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.report.layout import Table
from engram.report.pairs import accuracy_difference
from engram.report.tables import final_accuracy
from engram.reproduction.ladder import ENDINGS, LINEAR, Runs, as_published, final_configs
from engram.reproduction.verdicts import points

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
