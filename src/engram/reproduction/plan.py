"""What a reproduction runs: the ladder of fairness, the paper's table and analyses, and our questions about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engram.common.errors import InputError, check_choice
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS, PARTS
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.reproduction import stress
from engram.reproduction.divergence import divergence_configs, leak_configs
from engram.reproduction.ladder import GRID, LINEAR, SEARCH, STEPS, Runs, Step, grid_rounds, search_rounds
from engram.reproduction.map import map_configs
from engram.reproduction.study import relu_configs, study_configs

# The paper varies η on three benchmarks; our study is of two.
NOT_RUN = {
    ("vision-mixture", "sensitivity"),
    ("imbalanced-permuted-mnist", "study"),
    ("vision-mixture", "study"),
    *((benchmark, part) for benchmark in PAPER_BENCHMARKS for part in GRID[len(grid_rounds(benchmark)) :]),
    *((benchmark, part) for benchmark in PAPER_BENCHMARKS for part in SEARCH[len(search_rounds(benchmark)) :]),
    *((name, part) for name in PAPER_BENCHMARKS if name != "vision-mixture" for part in ("divergence", "leak")),
    ("vision-mixture", "map"),
    *((benchmark, "relu") for benchmark in PAPER_BENCHMARKS if benchmark != "split-mnist"),
    *((benchmark, part) for benchmark in PAPER_BENCHMARKS if benchmark != stress.BENCHMARK for part in stress.STEPS),
}

ETAS = (0.1, 0.01, 0.001, 0.0005, 0.0001)  # the paper's own, over which it drew its Figure 4
ETA_TRIALS = 5

# Enough to see every page of the report in minutes, on any computer. The numbers mean nothing.
SMALL = {"dataset": "mnist-small", "epochs": 1, "batch_size": 10}
QUICK: dict[str, dict[str, Any]] = {
    "permuted-mnist": {**SMALL, "num_tasks": 4, "max_samples": 300},
    "imbalanced-permuted-mnist": {**SMALL, "num_tasks": 4, "max_samples": 600},
    "split-mnist": {**SMALL, "max_samples": 1000},
    "vision-mixture": {"max_samples": 60, "epochs": 1},
}
QUICK_TRIALS = 2
# Of parts with many settings.
MANY = (*GRID, *SEARCH, "rung-4", *stress.STEPS, "map", "study")
WITH_INTERVALS = ("rung-4", *stress.FINAL)  # which need two trials
QUICK_MANY: dict[str, dict[str, Any]] = {name: {"hidden": [10], "max_samples": 30} for name in QUICK}
QUICK_MANY["vision-mixture"]["max_samples"] = 15  # its networks take ten times as long


@dataclass(frozen=True)
class Part:
    """One run of a reproduction: configs by label, all on one benchmark.

    Args:
        name: one of PARTS.
        benchmark: which one.
        example: a config of the part, as far as it says what is trained on.
        make: returns the configs, given the finished runs of the parts that it needs.
        needs: the parts that it needs, by benchmark and name.
    """

    name: str
    benchmark: str
    example: Config
    make: Callable[[Runs], dict[str, Config]]
    needs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def configs(self) -> dict[str, Config]:
        """Those of a part that needs no other."""
        return self.make({})

    @property
    def num_models(self) -> int:
        return sum(config.trials for config in self.configs.values())


def plan(
    benchmarks: Sequence[str] = PAPER_BENCHMARKS,
    parts: Sequence[str] | None = None,
    quick: bool = False,
    most_trials: int | None = None,
) -> list[Part]:
    """The parts of a reproduction, the paper's table first.

    Args:
        benchmarks: the benchmarks to run.
        parts: some of PARTS; None for all that these benchmarks suffice for. A part that a benchmark does not have is
            left out.
        quick: whether to run so little that everything takes minutes; the numbers then mean nothing.
        most_trials: the most trials of any config; the first ones are run.

    Example:
        plan(["split-mnist"], ["table"], most_trials=3)
    """
    if most_trials is not None and most_trials < 1:
        raise InputError(f"the number of trials must be at least 1, not {most_trials}")
    for benchmark in benchmarks:
        check_choice("benchmark", benchmark, PAPER_BENCHMARKS)
    for part in parts or ():
        check_choice("part", part, tuple(PARTS))
    made = [
        _part(part, benchmark, quick, most_trials)
        for part in PARTS
        for benchmark in PAPER_BENCHMARKS
        if part in (parts or PARTS) and benchmark in benchmarks and (benchmark, part) not in NOT_RUN
    ]
    names = {(part.benchmark, part.name) for part in made}
    return made if parts else [part for part in made if names.issuperset(part.needs)]


def _quick(part: str, benchmark: str, most_trials: int | None) -> tuple[dict[str, Any], int]:
    """What a quick reproduction changes in a part, and the most trials that it has."""
    most = min(QUICK_TRIALS, most_trials or QUICK_TRIALS)
    if part not in MANY:
        return QUICK[benchmark], most
    return QUICK[benchmark] | QUICK_MANY[benchmark], most if part in WITH_INTERVALS else 1


def _part(name: str, benchmark: str, quick: bool, most_trials: int | None) -> Part:
    of_this = Step(lambda benchmark, _: CONFIGS[name](benchmark), NEEDS.get(name, ()))
    step = {**STEPS, **stress.STEPS}.get(name, of_this)
    changes, most = _quick(name, benchmark, most_trials) if quick else ({}, most_trials)

    def make(runs: Runs) -> dict[str, Config]:
        return _shortened(step.configs(benchmark, runs), changes, most)

    everywhere = (benchmark,) if quick else PAPER_BENCHMARKS  # so that a quick one needs no other benchmark's data
    needs = [(benchmark, need) for need in step.needs]
    needs += [(other, need) for other in everywhere for need in step.of_all]
    needs = [need for need in needs if need not in NOT_RUN]
    # A part that needs others is of the benchmark's own dataset.
    example = preset(benchmark, "finetune", **changes) if needs else next(iter(make({}).values()))
    return Part(name, benchmark, example, make, tuple(needs))


def table_configs(benchmark: str) -> dict[str, Config]:
    """Table I: eight methods, ten trials. As in the next three parts, all heads start as nn.Linear does."""
    return {method: preset(benchmark, method, **LINEAR) for method in PAPER_METHODS}


def variant_configs(benchmark: str) -> dict[str, Config]:
    """The plastic methods of the table with the steady trace, in the same trials: so they share its baselines."""
    return {method: preset(benchmark, method).replace(**STEADY) for method in PAPER_METHODS if method.startswith("dhp")}


def sensitivity_configs(benchmark: str) -> dict[str, Config]:
    """Figure 4: the initial value of η."""
    return {f"η {eta:g}": preset(benchmark, "dhp", eta=eta, trials=ETA_TRIALS, **LINEAR) for eta in ETAS}


CONFIGS = {
    "map": map_configs,
    "relu": relu_configs,
    "divergence": divergence_configs,
    "leak": leak_configs,
    "table": table_configs,
    "variant": variant_configs,
    "sensitivity": sensitivity_configs,
    "study": study_configs,
}
NEEDS = {"relu": ("rung-1",)}  # it is compared with it


def _shortened(configs: dict[str, Config], changes: dict[str, Any], most_trials: int | None) -> dict[str, Config]:
    return {
        label: config.replace(**changes, trials=min(config.trials, most_trials or config.trials))
        for label, config in configs.items()
    }
