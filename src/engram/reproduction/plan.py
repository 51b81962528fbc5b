"""What a reproduction runs: the ladder of fairness, the paper's table and analyses, and our questions about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engram.common.errors import InputError, check_choice
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS, PARTS
from engram.config.presets import CHOOSING, STEADY, preset
from engram.config.settings import Config
from engram.reproduction.ladder import GRID, SEARCH, STEPS, Step
from engram.runs.run import Run

# The paper varies η on three benchmarks and describes two grids of strengths; our study is of two benchmarks.
NOT_RUN = {
    ("vision-mixture", "sensitivity"),
    ("imbalanced-permuted-mnist", "strengths"),
    ("vision-mixture", "strengths"),
    ("imbalanced-permuted-mnist", "study"),
    ("vision-mixture", "study"),
    ("vision-mixture", "search-3"),  # see `ladder.FEWER_ROUNDS`
}

ETAS = (0.1, 0.01, 0.001, 0.0005, 0.0001)  # the paper's own, over which it drew its Figure 4
ETA_TRIALS = 5

# "we performed a grid search using a task sequence determined by a single seed": the ends and some of the points of
# each grid stand in comments of the paper's source, with dots between them.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "permuted-mnist": {
        "online-ewc": (10, 20, 50, 100, 200, 400),
        "si": (0.01, 0.05, 0.1, 0.5, 1.0),
        "mas": (0.01, 0.1, 0.5, 1.0, 1.5, 2.0),
    },
    "split-mnist": {
        "online-ewc": (1, 25, 50, 100, 400, 1000, 2000),
        "si": (0.1, 0.5, 1.0, 2.0, 5.0),
        "mas": (0.01, 0.05, 1.0, 1.5, 3.0, 4.5, 5.0),
    },
}

# Enough to see every page of the report in minutes, on any computer. The numbers mean nothing.
SMALL = {"dataset": "mnist-small", "epochs": 1, "batch_size": 10}
QUICK: dict[str, dict[str, Any]] = {
    "permuted-mnist": {**SMALL, "num_tasks": 4, "max_samples": 600},
    "imbalanced-permuted-mnist": {**SMALL, "num_tasks": 4, "max_samples": 1200},
    "split-mnist": {**SMALL, "max_samples": 2000},
    "vision-mixture": {"max_samples": 60, "epochs": 1},
}
QUICK_TRIALS = 2
QUICK_ROUND: dict[str, Any] = {"hidden": [10], "max_samples": 30}  # of a grid or a search, which have many settings


@dataclass(frozen=True)
class Part:
    """One run of a reproduction: configs by label, all on one benchmark.

    Args:
        name: one of PARTS.
        benchmark: which one.
        example: a config of the part, as far as it says what is trained on.
        make: returns the configs, given the finished runs of the parts that it needs.
        needs: the names of the parts that it needs, of the same benchmark.
    """

    name: str
    benchmark: str
    example: Config
    make: Callable[[Sequence[Run]], dict[str, Config]]
    needs: tuple[str, ...] = ()

    @cached_property
    def configs(self) -> dict[str, Config]:
        """Those of a part that needs no other."""
        return self.make(())

    @property
    def num_models(self) -> int:
        return sum(config.trials for config in self.configs.values())


def plan(
    benchmarks: Sequence[str] = PAPER_BENCHMARKS,
    parts: Sequence[str] = tuple(PARTS),
    quick: bool = False,
    most_trials: int | None = None,
) -> list[Part]:
    """The parts of a reproduction, the paper's table first.

    Args:
        benchmarks: the benchmarks to run.
        parts: some of PARTS. A part that a benchmark does not have is left out.
        quick: whether to run so little that everything takes minutes; the numbers then mean nothing.
        most_trials: the most trials of any config; the first ones are run.

    Example:
        plan(["split-mnist"], ["table"], most_trials=3)
    """
    if most_trials is not None and most_trials < 1:
        raise InputError(f"the number of trials must be at least 1, not {most_trials}")
    if quick:
        most_trials = min(QUICK_TRIALS, most_trials or QUICK_TRIALS)
    for benchmark in benchmarks:
        check_choice("benchmark", benchmark, PAPER_BENCHMARKS)
    for part in parts:
        check_choice("part", part, tuple(PARTS))
    return [
        _part(part, benchmark, _quick_changes(part, benchmark) if quick else {}, most_trials)
        for part in PARTS
        for benchmark in PAPER_BENCHMARKS
        if part in parts and benchmark in benchmarks and (benchmark, part) not in NOT_RUN
    ]


def _quick_changes(part: str, benchmark: str) -> dict[str, Any]:
    return QUICK[benchmark] | (QUICK_ROUND if part in (*GRID, *SEARCH) else {})


def _part(name: str, benchmark: str, changes: dict[str, Any], most_trials: int | None) -> Part:
    step = STEPS.get(name) or Step(lambda benchmark, _: CONFIGS[name](benchmark))
    if changes and name in (*GRID, *SEARCH):
        most_trials = 1

    def make(runs: Sequence[Run]) -> dict[str, Config]:
        return _shortened(step.configs(benchmark, runs), changes, most_trials)

    example = preset(benchmark, "finetune", **changes)
    return Part(name, benchmark, example, make, tuple(need for need in step.needs if (benchmark, need) not in NOT_RUN))


def table_configs(benchmark: str) -> dict[str, Config]:
    """Table I: eight methods, ten trials."""
    return {method: preset(benchmark, method) for method in PAPER_METHODS}


def variant_configs(benchmark: str) -> dict[str, Config]:
    """The plastic methods of the table with the steady trace, in the same trials: so they share its baselines."""
    return {method: preset(benchmark, method, **STEADY) for method in PAPER_METHODS if method.startswith("dhp")}


def sensitivity_configs(benchmark: str) -> dict[str, Config]:
    """Figure 4: the initial value of η."""
    return {f"η {eta:g}": preset(benchmark, "dhp", eta=eta, trials=ETA_TRIALS) for eta in ETAS}


def strength_configs(benchmark: str) -> dict[str, Config]:
    """The grid of each penalty, with DHP and without: a single seed, and the validation samples."""
    return {
        f"{method} {strength:g}": preset(benchmark, method, strength=strength, trials=1, **CHOOSING)
        for penalty in ("si", "online-ewc", "mas")
        for method in (penalty, f"dhp+{penalty}")
        for strength in GRIDS[benchmark][penalty]
    }


# --- the study: why the numbers are as they are. Everything as in the table, except for one change at a time

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
            config = preset(benchmark, method, trials=STUDY_TRIALS, seed=1)
            if benchmark != "split-mnist":
                config = config.replace(**PERMUTED)
            settings = dict(change.settings)
            if "epochs" in settings:
                settings["epochs"] = max(1, round(config.epochs * settings["epochs"]))
            configs[f"{name}: {method}"] = config.replace(**settings)
    return configs


CONFIGS = {
    "table": table_configs,
    "variant": variant_configs,
    "sensitivity": sensitivity_configs,
    "strengths": strength_configs,
    "study": study_configs,
}


def _shortened(configs: dict[str, Config], changes: dict[str, Any], most_trials: int | None) -> dict[str, Config]:
    return {
        label: config.replace(**changes, trials=min(config.trials, most_trials or config.trials))
        for label, config in configs.items()
    }
