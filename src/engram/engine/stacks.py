"""How an experiment is divided into stacks, and its results put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.common.errors import InputError, shortened
from engram.config.settings import Config
from engram.engine.learner import TrialOutcome
from engram.runs.result import Divergence, Result

SHARED = (  # by all configs
    "benchmark",
    "dataset",
    "num_tasks",
    "max_samples",
    "seed",
    "imbalance_seed",
    "mask_training",
    "examine",
    "trials",
    "first_trial",
)
TOGETHER = ("epochs", "batch_size")  # by the configs of one stack

Key = tuple[int, int]  # a config by its place, and a trial
Outcomes = dict[Key, TrialOutcome]  # of all trials that have been begun


@dataclass(frozen=True)
class Share:
    """The part of an experiment that one stack trains."""

    configs: tuple[int, ...]  # by their place
    trials: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.configs) * len(self.trials)

    @property
    def keys(self) -> list[Key]:
        """In the order of the stack: trial after trial."""
        return [(place, trial) for trial in self.trials for place in self.configs]


def check_shared(configs: Sequence[Config]) -> None:
    """Refuse configs that do not learn the same tasks in the same trials."""
    for name in SHARED:
        values = {getattr(config, name): None for config in configs}
        if len(values) > 1:
            raise InputError(f"what is run together must have one {name}, not {' and '.join(map(str, values))}")


def plan_stacks(configs: Sequence[Config], limit: int | None) -> list[Share]:
    """Configs that take the same steps share a stack; where one is too large, trials are divided, then methods."""
    check_shared(configs)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InputError(f"a stack has at least one model, not {shortened(limit)}")
    trials = tuple(range(configs[0].first_trial, configs[0].first_trial + configs[0].trials))
    groups: dict[tuple, list[int]] = {}
    for place, config in enumerate(configs):
        groups.setdefault(tuple(getattr(config, name) for name in TOGETHER), []).append(place)
    shares = []
    for group in groups.values():
        most = len(group) * len(trials) if limit is None else limit
        num_trials = max(1, min(most // len(group), len(trials)))
        num_configs = min(most, len(group))
        shares += [
            Share(tuple(group[c : c + num_configs]), trials[t : t + num_trials])
            for t in range(0, len(trials), num_trials)
            for c in range(0, len(group), num_configs)
        ]
    return shares


def gather(configs: Sequence[Config], outcomes: Outcomes, data: list[dict[str, Any]]) -> list[Result]:
    """A result for each config, from all trials that have been begun."""
    return [
        _gather_one(
            config, {trial: outcomes[key] for key in sorted(outcomes) for c, trial in [key] if c == place}, data
        )
        for place, config in enumerate(configs)
    ]


def _gather_one(config: Config, outcomes: dict[int, TrialOutcome], data: list[dict[str, Any]]) -> Result:
    num_tasks = config.num_tasks
    accuracy = np.full((len(outcomes), num_tasks, num_tasks), np.nan)
    for k, outcome in enumerate(outcomes.values()):
        for i, row in enumerate(outcome.rows):
            accuracy[k, i, : len(row)] = row
    return Result(
        config=config,
        trials=tuple(outcomes),
        accuracy=accuracy,
        untrained=np.array([outcome.untrained for outcome in outcomes.values()]).reshape(-1, num_tasks),
        dynamics=[dict(vars(record)) for outcome in outcomes.values() for record in outcome.records],
        diverged=[
            Divergence(trial, outcome.diverged.task, outcome.diverged.step)
            for trial, outcome in outcomes.items()
            if outcome.diverged is not None
        ],
        data=data,
    )
