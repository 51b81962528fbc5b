"""`engram.run` and `engram.run_many`: train from Python, without a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from engram.common.errors import InputError, shortened
from engram.config.settings import Config
from engram.data.samples import Stream
from engram.engine import Engine, InProcess
from engram.engine.build import Custom, load_datasets
from engram.engine.learner import Key, Outcome, Report, no_report
from engram.engine.stacks import Source
from engram.engine.training import Runtime, Training, check_learned, check_together
from engram.penalties import Penalty
from engram.runs.display import shown
from engram.runs.result import Result, label_configs


def run(
    config: Config,
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
    progress: bool | None = None,
    report: Report = no_report,
) -> Result:
    """Train one config in all its trials and evaluate it after each task.

    Args:
        config: the settings, from `engram.preset`.
        stream: the tasks, for a config of the benchmark "custom". All trials learn these tasks, with different initial
            weights and orders of samples.
        features: a function that makes a module from inputs to features (batch, width), for a config with
            network="custom". It is called once for each trial, and the method's head is put on top.
        head: a function of (width, classes) that makes a head, in place of the method's. It is called as
            head(hidden, targets) in training and as head(hidden) otherwise.
        penalty: a function of a model that makes its penalty, for the methods finetune and dhp.
        data: the folder with the datasets; by default $ENGRAM_DATA, or the user's cache folder.
        device: "auto" (the GPU if there is one), "cpu", "cuda", ...
        precision: "tf32" (on GPUs that have it, otherwise as float32), "float32" or "float64".
        max_stack: the largest number of models that train together; by default as many as fit into memory.
        engine: what trains the stacks, from `engram.engine.start_engine`; by default this process.
        progress: whether to show a bar, which disappears at the end; None to do so where somebody watches: on a
            terminal, and in a notebook. Where there is neither, True prints a line to stderr after each task.
        report: called with a `Progress` several times an epoch and after each task.

    Returns:
        Accuracies and dynamics of all trials.

    Example:
        >>> result = engram.run(engram.preset("split-mnist", "dhp+si", trials=3, dataset="mnist-small"))
        >>> result.average_accuracy[:, -1].shape
        (3,)
    """
    (result,) = run_many(
        [config],
        stream=stream,
        features=features,
        head=head,
        penalty=penalty,
        data=data,
        device=device,
        precision=precision,
        max_stack=max_stack,
        engine=engine,
        progress=progress,
        report=report,
    )
    return result


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
    progress: bool | None = None,
    report: Report = no_report,
) -> list[Result]:
    """Train several configs on one benchmark, as many models together as fit into memory.

    Args:
        configs: the settings. They must agree on the benchmark and the dataset; those that also agree on the tasks and
            steps train together, which is much faster than one after another.
        stream: as for `engram.run`; and so are all further arguments.
        features: see `engram.run`.
        head: see `engram.run`.
        penalty: see `engram.run`.
        data: see `engram.run`.
        device: see `engram.run`.
        precision: see `engram.run`.
        max_stack: see `engram.run`.
        engine: see `engram.run`.
        progress: see `engram.run`.
        report: see `engram.run`.

    Returns:
        A result for each config, in the order of the configs.

    Example:
        >>> configs = [engram.preset("split-mnist", method, dataset="mnist-small") for method in ("si", "dhp+si")]
        >>> si, dhp_si = engram.run_many(configs)
    """
    if not configs:
        return []
    for config in configs:
        if not isinstance(config, Config):
            needed = "a Config, such as engram.preset(...) returns"
            raise InputError(f"config must be {needed}, not {shortened(config)}")
        if config.strength is not None and config.penalty is None and penalty is None:
            raise InputError(f"strength has no effect on {config.method}, which has no penalty: leave it out")
    runtime = Runtime(device, precision, max_stack, engine or InProcess())
    custom = Custom(features, head, penalty)
    labelled = label_configs(configs)
    runtime.check()
    check_together(labelled, custom)  # before any data are read
    if stream is None:
        _check_stream(configs, needed=False)
        datasets = load_datasets(max(configs, key=lambda config: config.num_tasks), data)
        source, provenance = Source(tuple(datasets)), [dataset.provenance() for dataset in datasets]
    else:
        _check_stream(configs, needed=True)
        labelled = {
            label: config.replace(num_tasks=len(stream), scenario=config.scenario or stream.scenario)
            for label, config in labelled.items()
        }
        source, provenance = Source(stream=stream), [stream.provenance()]
    with shown(labelled, progress, report) as watching:
        outcomes = Training(labelled, source, runtime, custom).run(report=watching)
    check_learned(outcomes)
    return list(results_of(labelled, outcomes, provenance).values())


def results_of(
    configs: Mapping[str, Config], outcomes: Mapping[Key, Outcome], data: list[dict[str, Any]]
) -> dict[str, Result]:
    """The result of each label, from the trials that have started, in the order of their numbers."""
    by_label: dict[str, dict[int, Outcome]] = {label: {} for label in configs}
    for label, trial in sorted(outcomes, key=lambda key: key[1]):
        if outcomes[label, trial].untrained:  # else it has not been evaluated even once
            by_label[label][trial] = outcomes[label, trial]
    return {label: _result_of(config, by_label[label], data) for label, config in configs.items()}


def _result_of(config: Config, outcomes: Mapping[int, Outcome], data: list[dict[str, Any]]) -> Result:
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
        diverged=[outcome.diverged for outcome in outcomes.values() if outcome.diverged is not None],
        data=data,
        kept=next((outcome.kept for outcome in outcomes.values()), None),
    )


def _check_stream(configs: Sequence[Config], needed: bool) -> None:
    """Refuse a stream without the benchmark "custom", that benchmark without a stream, and settings of datasets."""
    for config in configs:
        if needed != (config.benchmark == "custom"):
            raise InputError(
                "a stream goes with the benchmark 'custom', and that benchmark with a stream: "
                f"engram.run(engram.preset('custom', {config.method!r}), stream=…)"
            )
        for name, default in (("max_samples", None), ("examine", "test")):
            if needed and getattr(config, name) != default:
                raise InputError(f"{name} is a setting of datasets, which a custom stream does not have")
