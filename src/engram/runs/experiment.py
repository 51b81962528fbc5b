"""`engram.run` and `engram.run_many`: methods, trials and points of a grid, trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from engram.common.errors import InputError
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.data.streams import Stream
from engram.engine import Engine, InProcess
from engram.engine import progress as engine_progress
from engram.engine.build import NOTHING_CUSTOM, Custom, load_datasets
from engram.engine.checkpoint import SECONDS_BETWEEN, CheckpointFolder
from engram.engine.learner import Outcome
from engram.engine.progress import StopAsked, never_stop
from engram.engine.runtime import Runtime
from engram.engine.stacks import SAME_TASKS, Source
from engram.engine.training import train
from engram.penalties import Penalty
from engram.runs.result import Divergence, Result

Outcomes = dict[tuple[int, int], Outcome]  # by the index of a config, and trial


@dataclass(frozen=True)
class Progress:
    """How far an experiment has come, told several times an epoch and after each task."""

    share: float  # of the whole, in [0, 1]
    task: int  # that is being learned, or that has been
    results: list[Result] | None = None  # after a task: what there is so far, a result for each config
    note: str | None = None  # something worth a line in a log
    configs: Sequence[Config] = ()
    outcomes: Outcomes = field(default_factory=dict)  # of all trials so far, as they stand: they grow with the run


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Setting:
    """What a run depends on besides its configs: where it computes, how exactly, and on what."""

    device: str = "auto"
    precision: str = "tf32"
    max_stack: int | None = None  # models at a time; by default as many as fit into memory
    custom: Custom = NOTHING_CUSTOM
    checkpoints: CheckpointFolder | None = None  # goes on from the last, if there are any
    engine: Engine = field(default_factory=InProcess)
    stop_asked: StopAsked = never_stop  # whether the experiment is to be kept and to end, with `Stopped`


def run(config: Config, **options: Any) -> Result:
    """Run an experiment: `engram.run(engram.preset("split-mnist", "dhp+si", trials=3))`.

    Takes the options of `run_many`, of which it is the case of one config.
    """
    return run_many([config], **options)[0]


def run_many(
    configs: Sequence[Config],
    *,
    stream: Stream | None = None,
    features: Callable[[], nn.Module] | None = None,
    head: Callable[[int, int], nn.Module] | None = None,
    penalty: Callable[[nn.Module], Penalty] | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    precision: str = "tf32",
    max_stack: int | None = None,
    engine: Engine | None = None,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Run several methods, or points of a grid, on one benchmark, all their trials together.

    Args:
        configs: the settings; they must agree on the benchmark, its data, and the trials.
        stream: tasks of your own, for configs of the benchmark "custom"; all trials then learn these tasks, with
            other initial weights and orders of samples.
        features: a function that makes a module of your own, from inputs to features (batch, width), for configs
            with network="custom"; it is called once a trial and method, and the method's head comes on top.
        head: a function of (width, classes) that makes a head of your own, called as head(hidden, targets) in training
            and head(hidden) else, in place of the method's.
        penalty: a function of a model that makes a penalty of your own, for the methods finetune and dhp.
        data: the folder with the datasets; by default $ENGRAM_DATA, else the user's cache folder.
        device: "auto", "cpu", "cuda", ...
        precision: "tf32" (on GPUs that have it, else as float32), "float32" or "float64".
        max_stack: at most so many models at a time; by default as many as fit into memory.
        engine: who trains the stacks, from `engram.engines.start_engine`; by default this process.
        report: called with a `Progress` now and then.
    """
    if not configs:
        return []
    check_shared(configs)
    setting = Setting(device, precision, max_stack, Custom(features, head, penalty), engine=engine or InProcess())
    if (stream is not None) != (configs[0].benchmark == "custom"):
        raise InputError(
            "a stream goes with the benchmark 'custom', and only with that: engram.preset('custom', 'dhp')"
        )
    if stream is None:
        return run_on(configs, load_datasets(configs[0], data), setting, report)
    for name, usual in (("max_samples", None), ("examine", "test")):
        if getattr(configs[0], name) != usual:
            raise InputError(f"{name} is of the benchmarks' datasets, and a stream of one's own has none")
    configs = [config.replace(num_tasks=len(stream)) for config in configs]
    return _train(configs, Source(stream=stream), [stream.provenance()], setting, report)


def run_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    setting: Setting | None = None,
    report: Report = lambda progress: None,
) -> list[Result]:
    """`run_many` on datasets that are loaded already."""
    data = [dataset.provenance() for dataset in datasets]
    setting = Setting() if setting is None else setting
    return _train(configs, Source(tuple(datasets)), data, setting, report)


def check_shared(configs: Sequence[Config]) -> None:
    """Refuse configs that do not learn the same tasks in the same trials."""
    for name in SAME_TASKS:
        values = {getattr(config, name): None for config in configs}
        if len(values) > 1:
            raise InputError(f"what is run together must have one {name}, not {' and '.join(map(str, values))}")


def _train(
    configs: Sequence[Config], source: Source, data: list[dict[str, Any]], setting: Setting, report: Report
) -> list[Result]:
    check_shared(configs)

    def tell(progress: engine_progress.Progress) -> None:
        outcomes = {(int(label), trial): outcome for (label, trial), outcome in progress.outcomes.items()}
        results = gather(configs, outcomes, data) if progress.task_ended else None
        report(Progress(progress.done, progress.task, results, progress.note, configs, outcomes))

    folder = setting.checkpoints
    outcomes = train(
        {str(place): config for place, config in enumerate(configs)},
        source,
        Runtime(setting.device, setting.precision, setting.max_stack, setting.engine),
        custom=setting.custom,
        report=tell,
        stop_asked=setting.stop_asked,
        checkpoints=None if folder is None else folder.path,
        seconds_between=SECONDS_BETWEEN if folder is None else folder.seconds_between,
    )
    return gather(configs, {(int(label), trial): outcome for (label, trial), outcome in outcomes.items()}, data)


def gather(configs: Sequence[Config], outcomes: Outcomes, data: list[dict[str, Any]]) -> list[Result]:
    """A result for each config, from all trials that have started."""
    return [
        _gather_one(
            config, {trial: outcomes[key] for key in sorted(outcomes) for c, trial in [key] if c == place}, data
        )
        for place, config in enumerate(configs)
    ]


def _gather_one(config: Config, outcomes: dict[int, Outcome], data: list[dict[str, Any]]) -> Result:
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
