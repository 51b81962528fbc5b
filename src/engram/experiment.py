"""`engram.run` and `engram.run_many`: methods, trials and points of a grid, trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram.build import Features, build_learner, build_streams, choose_device, load_datasets, precision_of
from engram.checkpoint import Checkpoints, read_header, restore
from engram.config import Config
from engram.data.samples import Dataset
from engram.data.streams import Stream, move_streams
from engram.errors import InputError
from engram.learner import Learner, TrialOutcome
from engram.results import Divergence, Result
from engram.stack.choose import choose_program, largest_stack
from engram.stack.program import Batches
from engram.train import Place, Watch, run_stream


@dataclass(frozen=True)
class Progress:
    """How far an experiment has come, told several times an epoch and after each task."""

    share: float  # of the whole, in [0, 1]
    task: int  # that is being learned, or that has been
    results: list[Result] | None = None  # after a task: what there is so far, a result for each config
    note: str | None = None  # something worth a line in a log


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Setting:
    """What a run depends on besides its configs: where it computes, how exactly, and on what."""

    device: str = "auto"
    precision: str = "tf32"
    max_stack: int | None = None  # models at a time; by default as many as fit into memory
    features: Features | None = None
    checkpoints: Checkpoints | None = None
    resume: bool = False


def run(config: Config, **options: Any) -> Result:
    """Run an experiment: `engram.run(engram.preset("split-mnist", "dhp+si", trials=3))`.

    Takes the options of `run_many`, of which it is the case of one config.
    """
    return run_many([config], **options)[0]


def run_many(
    configs: Sequence[Config],
    *,
    stream: Stream | None = None,
    features: Features | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    precision: str = "tf32",
    max_stack: int | None = None,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Run several methods, or points of a grid, on one benchmark, all their trials together.

    Args:
        configs: the settings; they must agree on the benchmark, its data, and the trials.
        stream: tasks of your own, for configs of the benchmark "own"; all trials then learn these tasks, with
            other initial weights and orders of samples.
        features: a function that makes a module of your own, from inputs to features (batch, width), for configs
            with network="own"; it is called once a trial and method, and the method's head comes on top.
        data: the folder with the datasets; by default $ENGRAM_DATA, else the user's cache folder.
        device: "auto", "cpu", "cuda", ...
        precision: "tf32" (on GPUs that have it, else as float32), "float32" or "float64".
        max_stack: at most so many models at a time; by default as many as fit into memory.
        report: called with a `Progress` now and then.
    """
    if not configs:
        return []
    if (stream is not None) != (configs[0].benchmark == "own"):
        raise InputError("a stream goes with the benchmark 'own', and only with that: engram.preset('own', 'dhp')")
    if any((features is not None) != (config.network == "own") for config in configs):
        raise InputError("features go with network='own', and only with that")
    setting = Setting(device, precision, max_stack, features)
    if stream is None:
        return run_on(configs, load_datasets(configs[0], data), setting, report)
    configs = [config.replace(num_tasks=len(stream)) for config in configs]
    return _run_stacks(configs, lambda trials: [stream] * len(trials), [stream.provenance()], setting, report)


def run_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    setting: Setting = Setting(),
    report: Report = lambda progress: None,
) -> list[Result]:
    """`run_many` on datasets that are loaded already."""
    data = [dataset.provenance() for dataset in datasets]
    return _run_stacks(configs, lambda trials: build_streams(configs[0], trials, datasets), data, setting, report)


SHARED = ("benchmark", "dataset", "num_tasks", "seed", "imbalance_seed", "trials", "first_trial")  # by all configs
TOGETHER = ("epochs", "batch_size")  # by the configs of one stack


@dataclass(frozen=True)
class Share:
    """The part of an experiment that one stack trains."""

    configs: tuple[int, ...]  # by their place
    trials: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.configs) * len(self.trials)


def plan_stacks(configs: Sequence[Config], limit: int | None) -> list[Share]:
    """Configs that take the same steps share a stack; where one is too large, trials are divided, then methods."""
    for name in SHARED:
        if len({getattr(config, name) for config in configs}) > 1:
            raise InputError(f"methods that are run together must have one {name}")
    trials = tuple(range(configs[0].first_trial, configs[0].first_trial + configs[0].trials))
    groups: dict[tuple, list[int]] = {}
    for i, config in enumerate(configs):
        groups.setdefault(tuple(getattr(config, name) for name in TOGETHER), []).append(i)
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


def _run_stacks(
    configs: Sequence[Config],
    streams_of: Callable[[Sequence[int]], list[Stream]],
    data: list[dict[str, Any]],
    setting: Setting,
    report: Report,
) -> list[Result]:
    device = choose_device(setting.device)
    checkpoints = setting.checkpoints
    header = read_header(checkpoints.path) if checkpoints and setting.resume and checkpoints.path.exists() else None
    outcomes: dict[tuple[int, int], TrialOutcome] = {}  # by config and trial
    with precision_of(setting.precision) as dtype:

        def build(share: Share) -> tuple[list[Learner], Batches]:
            """Learners in the order of a stack, trial after trial, and what they learn."""
            streams = move_streams(streams_of(share.trials), device)
            shape, num_classes = streams[0].input_shape, streams[0].num_classes
            learners = [
                build_learner(configs[c], trial, shape, num_classes, device, dtype, setting.features)
                for trial in share.trials
                for c in share.configs
            ]
            return learners, Batches(share.trials, streams, configs[0].seed, dtype)

        limit = setting.max_stack if header is None else header["limit"]
        if limit is None:
            limit = largest_stack(configs, lambda c: build(Share((c,), (configs[0].first_trial,))), device)
        shares = plan_stacks(configs, limit)
        if len(shares) > 1:
            sizes = " + ".join(str(len(share)) for share in shares)
            report(Progress(0, 0, note=f"{sum(map(len, shares))} models in {len(shares)} stacks, {sizes}"))
        for k, share in enumerate(shares):
            if header is not None and k < header["stack"]:
                continue
            learners, batches = build(share)
            keys = [(c, trial) for trial in share.trials for c in share.configs]
            place = Place()
            if header is not None and checkpoints is not None:
                finished, place = restore(checkpoints.path, header, learners)
                before = [(c, trial) for share in shares[:k] for trial in share.trials for c in share.configs]
                outcomes |= dict(zip(before, finished, strict=True))
                report(Progress(k / len(shares), place.task, note=f"goes on in task {place.task + 1}"))
                header = None
            outcomes |= dict(zip(keys, (learner.outcome for learner in learners), strict=True))
            program, notes = choose_program(learners, batches, device)
            for note in notes:
                report(Progress(k / len(shares), 0, note=note))
            watch = _watch(k, shares, learners, outcomes, configs, data, setting, limit, report, place)
            run_stream(program, batches, configs[share.configs[0]], place, watch)
    return gather(configs, outcomes, data)


def _watch(
    k: int,
    shares: list[Share],
    learners: list[Learner],
    outcomes: dict[tuple[int, int], TrialOutcome],
    configs: Sequence[Config],
    data: list[dict[str, Any]],
    setting: Setting,
    limit: int | None,
    report: Report,
    place: Place,
) -> Watch:
    """What the loop tells, told on: progress to `report`, and moments to keep to the checkpoints."""
    models = [len(share) for share in shares]
    finished = [outcome for outcome in outcomes.values()][: sum(models[:k])]

    def overall(share: float) -> float:
        return (sum(models[:k]) + share * models[k]) / sum(models)

    def task_learned(n: int) -> None:
        done = overall((n + 1) / configs[0].num_tasks)
        report(Progress(done, n, results=gather(configs, outcomes, data)))

    def keep(place: Place, task_ended: bool) -> None:
        if setting.checkpoints is not None and (task_ended or setting.checkpoints.is_due()):
            setting.checkpoints.save(k, limit, learners, finished, place)

    return Watch(lambda share: report(Progress(overall(share), place.task)), task_learned, keep)


def gather(
    configs: Sequence[Config], outcomes: dict[tuple[int, int], TrialOutcome], data: list[dict[str, Any]]
) -> list[Result]:
    """A result for each config, from all trials that have been begun."""
    return [
        _gather_one(config, {trial: outcomes[c, trial] for c, trial in sorted(outcomes) if c == place}, data)
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
        accuracy=accuracy,
        untrained=np.array([outcome.untrained for outcome in outcomes.values()]).reshape(-1, num_tasks),
        dynamics=[asdict(record) for outcome in outcomes.values() for record in outcome.records],
        diverged=[
            Divergence(trial, outcome.diverged.task, outcome.diverged.step)
            for trial, outcome in outcomes.items()
            if outcome.diverged is not None
        ],
        data=data,
    )
