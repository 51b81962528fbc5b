"""`engram.run`: all trials of one method on one benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engram.build import build_model, build_penalty, build_stream, choose_device, load_datasets
from engram.config import Config
from engram.data.batches import num_batches
from engram.data.samples import Dataset
from engram.data.streams import Stream
from engram.errors import InputError
from engram.results import Divergence, Result
from engram.train import Record, TrialOutcome, run_stream


@dataclass(frozen=True)
class Progress:
    """How far an experiment has come, told several times an epoch and after each task and trial."""

    config: Config
    trial: int
    task: int
    share: float  # of the whole experiment, in [0, 1]
    row: list[float] | None = None  # after a task: the accuracy on it and all before
    result: Result | None = None  # after a trial: the result so far


Report = Callable[[Progress], None]


def run(
    config: Config,
    *,
    stream: Stream | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    report: Report = lambda progress: None,
) -> Result:
    """Run an experiment: `engram.run(engram.preset("split-mnist", "dhp+si", trials=3))`.

    Args:
        config: the settings.
        stream: tasks of your own, for a config of the benchmark "own"; all trials then learn these tasks, with
            other initial weights and orders of samples.
        data: the folder with the datasets; by default $ENGRAM_DATA, else the user's cache folder.
        device: "auto", "cpu", "cuda", ...
        report: called with a `Progress` now and then.
    """
    if (stream is not None) != (config.benchmark == "own"):
        raise InputError("a stream goes with the benchmark 'own', and only with that: engram.preset('own', 'dhp')")
    if stream is None:
        return run_on(config, load_datasets(config, data), device=device, report=report)
    config = config.replace(num_tasks=len(stream))
    return _run_trials(config, lambda trial: stream, [stream.provenance()], device, report)


def run_on(
    config: Config,
    datasets: Sequence[Dataset],
    *,
    device: str = "auto",
    report: Report = lambda progress: None,
) -> Result:
    """`run` on datasets that are loaded already."""
    data = [dataset.provenance() for dataset in datasets]
    return _run_trials(config, lambda trial: build_stream(config, trial, datasets), data, device, report)


def _run_trials(
    config: Config, stream_of: Callable[[int], Stream], data: list[dict[str, Any]], device: str, report: Report
) -> Result:
    where = choose_device(device)
    outcomes: list[TrialOutcome] = []
    for trial in range(config.first_trial, config.first_trial + config.trials):
        stream = stream_of(trial).to(where)
        model = build_model(config, trial, stream.input_shape, stream.num_classes).to(where)
        penalty = build_penalty(config, trial, model)
        steps = [config.epochs * num_batches(len(task.train), config.batch_size) for task in stream.tasks]

        def watch(seen: Record | TrialOutcome, trial: int = trial, steps: list[int] = steps) -> None:
            if isinstance(seen, TrialOutcome):
                task = len(seen.rows) - 1
                done = sum(steps[: task + 1])
                row = seen.rows[-1][: task + 1]
            else:
                task = seen.task
                done = sum(steps[:task]) + seen.step + 1
                row = None
            report(Progress(config, trial, task, (len(outcomes) + done / sum(steps)) / config.trials, row))

        outcomes.append(run_stream(model, penalty, stream, config, trial, watch))
        result = gather(config, outcomes, data)
        report(Progress(config, trial, len(stream) - 1, len(outcomes) / config.trials, result=result))
    return result


def gather(config: Config, outcomes: Sequence[TrialOutcome], data: list[dict[str, Any]]) -> Result:
    """The result of the trials so far."""
    num_tasks = config.num_tasks
    accuracy = np.full((len(outcomes), num_tasks, num_tasks), np.nan)
    for k, outcome in enumerate(outcomes):
        for i, row in enumerate(outcome.rows):
            accuracy[k, i, : len(row)] = row
    return Result(
        config=config,
        accuracy=accuracy,
        untrained=np.array([outcome.untrained for outcome in outcomes]),
        dynamics=[asdict(record) for outcome in outcomes for record in outcome.records],
        diverged=[
            Divergence(config.first_trial + k, outcome.diverged.task, outcome.diverged.step)
            for k, outcome in enumerate(outcomes)
            if outcome.diverged is not None
        ],
        data=data,
    )
