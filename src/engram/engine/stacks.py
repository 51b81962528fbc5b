"""What trains together: stacks of learners, and the streams and models that they are made of, each built once."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from engram.common.errors import InputError
from engram.common.registry import PENALTIES
from engram.config.settings import SETTINGS, Config, names_of
from engram.data.batches import batches_of, move_streams
from engram.data.samples import Dataset, Stream
from engram.data.scenarios import arrange
from engram.engine.build import (
    Custom,
    build_model,
    build_penalty,
    build_rehearsal,
    build_streams,
    choose_device,
    dataset_names,
    learner_from,
    precision_of,
)
from engram.engine.learner import Key, Learner
from engram.engine.memory import largest_stack
from engram.engine.program import Batches
from engram.engine.rehearsal import check_inputs
from engram.nn.networks import Network
from engram.penalties.penalty import check_step

SAME_TASKS = names_of(agree="run")  # configs with the same values of these learn the same tasks in the same trials
SAME_STEPS = names_of(agree="stack")  # configs of one stack share the values of these too
# Numbers that may differ within a section; the size of a model does not depend on them.
NO_SIZE = {name: SETTINGS[name].default or 1.0 for name in names_of(agree="free") if SETTINGS[name].type is float}

SHOWN = 256  # samples of the first task, to a head whose size depends on the features


@dataclass(frozen=True)
class Source:
    """Where the tasks come from: datasets from which a config makes streams, or one stream that all trials learn."""

    datasets: tuple[Dataset, ...] = ()
    stream: Stream | None = None

    def streams(self, config: Config, trials: Sequence[int]) -> list[Stream]:
        if self.stream is None:
            names = dataset_names(config)
            given = self.datasets[: len(names)]
            if names != tuple(dataset.name for dataset in given):  # a result would have the wrong name of its data
                found = ", ".join(dataset.name for dataset in given) or "no dataset"
                raise InputError(f"the settings name {', '.join(names)}, but {found} was given")
            return build_streams(config, trials, given)
        return arrange([self.stream] * len(trials), config.scenario, config.mask_training)


class Builder:
    """Builds the streams and models of configs that learn the same tasks.

    What was built for a check is kept until the stack that trains it takes it, so that everything is built once.
    """

    def __init__(self, configs: Mapping[str, Config], source: Source, custom: Custom, device: str, precision: str):
        self.configs = dict(configs)
        self.config = next(iter(self.configs.values()))  # any of them: their settings of the tasks are all the same
        self.trials = range(self.config.first_trial, self.config.first_trial + self.config.trials)
        self.source = source
        self.custom = custom
        self.device_name = device
        self.precision = precision
        self._forget_built()

    def _forget_built(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._streams_there: dict[int, Stream] = {}  # on the device
        self._models: dict[Key, Network] = {}
        self._learners: dict[Key, Learner] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process: everything except what was built."""
        return {name: value for name, value in vars(self).items() if name not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_built()

    @property
    def kinds(self) -> list[str]:
        """The labels of configs whose models differ in size or structure, one of each kind."""
        alike = {
            config.replace(**{n: usual for n, usual in NO_SIZE.items() if getattr(config, n) is not None}): label
            for label, config in reversed(self.configs.items())
        }
        return [label for label in self.configs if label in alike.values()]

    def check(self) -> None:
        """Refuse what cannot be a stream, a model or a penalty, by building the streams and one model of each kind."""
        self.streams(self.trials)
        for label in self.kinds:
            config, model = self.configs[label], self.model(label, self.trials[0])
            rehearsal = build_rehearsal(config)
            if rehearsal is not None:
                check_inputs(config.method, rehearsal, self.streams(self.trials)[0])
            if config.penalty is None or PENALTIES[config.penalty].make.__module__.startswith("engram."):
                continue
            # Registered by another package, so on a copy: what it does to its model is not known.
            penalty = build_penalty(config, self.trials[0], copy.deepcopy(model))
            check_step(penalty, config.penalty_step)

    def streams(self, trials: Sequence[int]) -> list[Stream]:
        missing = [trial for trial in trials if trial not in self._streams]
        if missing:
            self._streams |= zip(missing, self.source.streams(self.config, missing), strict=True)
        return [self._streams[trial] for trial in trials]

    def model(self, label: str, trial: int) -> Network:
        if (label, trial) not in self._models:
            (stream,) = self.streams([trial])
            shape, num_classes = stream.input_shape, stream.num_classes
            model = build_model(self.configs[label], trial, shape, num_classes, self.custom)
            model.start(next(batches_of(stream[0].train, SHOWN, permutation=stream[0].permutation))[0])
            self._models[label, trial] = model
        return self._models[label, trial]

    def learner(self, label: str, trial: int, dtype: torch.dtype) -> Learner:
        """A model on its device, with its penalty."""
        if (label, trial) not in self._learners:
            config, model = self.configs[label], self.model(label, trial)
            del self._models[label, trial]
            device = choose_device(self.device_name)
            (stream,) = self.streams([trial])
            facts = (stream.input_shape, stream.num_classes)
            learner = learner_from(config, trial, model, device, dtype, self.custom, *facts)
            check_step(learner.penalty, config.penalty_step)
            self._learners[label, trial] = learner
        return self._learners[label, trial]

    def take(self, plan: StackPlan, dtype: torch.dtype) -> tuple[list[Learner], Batches]:
        """The learners of a stack, in its order, and what they learn. The learners are the stack's from now on."""
        self.streams(plan.trials)
        learners = [self.learner(label, trial, dtype) for label, trial in plan.keys]
        check_apart(learners)
        for key in plan.keys:
            del self._learners[key]
        return learners, self.batches(plan.trials, dtype)

    def batches(self, trials: Sequence[int], dtype: torch.dtype) -> Batches:
        if any(trial not in self._streams_there for trial in trials):
            self.streams(trials)
            moved = move_streams(list(self._streams.values()), choose_device(self.device_name))
            self._streams_there = dict(zip(self._streams, moved, strict=True))
        return Batches(trials, [self._streams_there[trial] for trial in trials], self.config.seed, dtype)

    def limit(self) -> int | None:
        """How many models fit into the memory of the device together; None for any number."""
        first, kinds = self.trials[0], self.kinds
        with precision_of(self.precision) as dtype:
            built = ((self.learner(label, first, dtype), self.batches([first], dtype)) for label in kinds)
            limit = largest_stack(built, choose_device(self.device_name))
        if limit is not None and limit < len(kinds):  # more than can be kept
            self._learners.clear()
        self.release()
        return limit

    def release(self) -> None:
        """Free the device's memory that the streams take."""
        self._streams_there = {}


_BUILT = ("_streams", "_streams_there", "_models", "_learners")


@dataclass(frozen=True)
class StackPlan:
    """Which learners train together: these configs in these trials."""

    labels: tuple[str, ...]
    trials: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels) * len(self.trials)

    @property
    def keys(self) -> list[Key]:
        """In the order of the stack: trial after trial."""
        return [(label, trial) for trial in self.trials for label in self.labels]

    @property
    def halves(self) -> tuple[StackPlan, StackPlan]:
        """Two plans with half of the trials each, or of the configs if there is one trial."""
        if len(self.trials) > 1:
            middle = len(self.trials) // 2
            return StackPlan(self.labels, self.trials[:middle]), StackPlan(self.labels, self.trials[middle:])
        middle = len(self.labels) // 2
        return StackPlan(self.labels[:middle], self.trials), StackPlan(self.labels[middle:], self.trials)


def plan_stacks(configs: Mapping[str, Config], limit: int | None) -> list[StackPlan]:
    """Divide configs that learn the same tasks into stacks of at most `limit` models.

    Configs that take the same steps share a stack. Where one is too large its trials are divided, then its configs.
    """
    plans = []
    for group in group_by(SAME_STEPS, configs):
        labels, config = tuple(group), next(iter(group.values()))
        trials = tuple(range(config.first_trial, config.first_trial + config.trials))
        most = len(labels) * len(trials) if limit is None else limit
        num_trials = max(1, min(most // len(labels), len(trials)))
        num_configs = min(most, len(labels))
        plans += [
            StackPlan(labels[c : c + num_configs], trials[t : t + num_trials])
            for t in range(0, len(trials), num_trials)
            for c in range(0, len(labels), num_configs)
        ]
    return plans


def group_by(names: Sequence[str], configs: Mapping[str, Config]) -> list[dict[str, Config]]:
    """Configs with the same values of these settings, such as SAME_TASKS, in the order in which they come."""
    groups: dict[tuple, dict[str, Config]] = {}
    for label, config in configs.items():
        groups.setdefault(tuple(getattr(config, name) for name in names), {})[label] = config
    return list(groups.values())


def check_apart(learners: Sequence[Learner]) -> None:
    """Refuse models that share a tensor: each would train the others."""
    seen: set[int] = set()
    for learner in learners:
        owned = chain(learner.model.parameters(), learner.model.buffers())
        tensors = {tensor.untyped_storage().data_ptr() for tensor in owned if tensor.numel()}
        if tensors & seen:
            raise InputError("two models share a tensor: features and head must make a new module at each call")
        seen |= tensors


def digest(configs: Mapping[str, Config]) -> str:
    """A fingerprint of settings, which changes if any of them does."""
    text = "\n".join(f"[{label}]\n{config.to_toml()}" for label, config in configs.items())
    return hashlib.sha256(text.encode()).hexdigest()
