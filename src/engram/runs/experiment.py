"""`engram.run` and `engram.run_many`: methods, trials and points of a grid, trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from engram.common.errors import InputError
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.data.streams import Stream
from engram.engine import Engine, InProcess
from engram.engine.build import NOTHING_OWN, Own, load_datasets
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.stacks import Outcomes, Share, check_shared, gather, plan_stacks
from engram.engine.unit import Asked, Source, Told, Unit, nobody_asks
from engram.penalties import Penalty
from engram.runs.result import Result


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
    own: Own = NOTHING_OWN
    checkpoints: CheckpointFolder | None = None  # goes on from the last, if there are any
    engine: Engine = field(default_factory=InProcess)
    stop_asked: Asked = nobody_asks  # whether the experiment is to be kept and to end, with `Stopped`


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
        stream: tasks of your own, for configs of the benchmark "own"; all trials then learn these tasks, with
            other initial weights and orders of samples.
        features: a function that makes a module of your own, from inputs to features (batch, width), for configs
            with network="own"; it is called once a trial and method, and the method's head comes on top.
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
    setting = Setting(device, precision, max_stack, Own(features, head, penalty), engine=engine or InProcess())
    if (stream is not None) != (configs[0].benchmark == "own"):
        raise InputError("a stream goes with the benchmark 'own', and only with that: engram.preset('own', 'dhp')")
    if stream is None:
        return run_on(configs, load_datasets(configs[0], data), setting, report)
    for name, usual in (("max_samples", None), ("examine", "test")):
        if getattr(configs[0], name) != usual:
            raise InputError(f"{name} is of the benchmarks' datasets, and a stream of one's own has none")
    configs = [config.replace(num_tasks=len(stream)) for config in configs]
    return _Experiment(configs, Source(configs[0], stream=stream), [stream.provenance()], setting, report).run()


def run_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    setting: Setting | None = None,
    report: Report = lambda progress: None,
) -> list[Result]:
    """`run_many` on datasets that are loaded already."""
    data = [dataset.provenance() for dataset in datasets]
    setting = Setting() if setting is None else setting
    return _Experiment(configs, Source(configs[0], tuple(datasets)), data, setting, report).run()


def check_own(configs: Sequence[Config], own: Own) -> None:
    """Refuse features without a network of one's own, and the reverse; and two penalties for one model."""
    if any((own.features is not None) != (config.network == "own") for config in configs):
        raise InputError("features go with network='own', and only with that: engram.run(config, features=...)")
    if own.penalty is not None and any(config.penalty is not None for config in configs):
        raise InputError("a penalty of one's own goes with the methods finetune and dhp, which have none")


class _Experiment:
    """An experiment on its way: its stacks, and what has come of every trial so far."""

    def __init__(
        self, configs: Sequence[Config], source: Source, data: list[dict[str, Any]], setting: Setting, report: Report
    ):
        check_shared(configs)
        check_own(configs, setting.own)
        self.configs = configs
        self.source = source
        self.data = data
        self.setting = setting
        self.report = report
        self.outcomes: Outcomes = {}

    def run(self) -> list[Result]:
        if self.setting.checkpoints is not None:
            self.setting.checkpoints.make()
        self.shares = plan_stacks(self.configs, self._limit())
        self.done = [0.0] * len(self.shares)
        if len(self.shares) > 1:
            sizes = [len(share) for share in self.shares]
            self._tell(0, note=f"{sum(sizes)} models in {len(sizes)} stacks: {' + '.join(map(str, sizes))}")
        units = [self._unit(number, share) for number, share in enumerate(self.shares)]
        self.setting.engine.train(units, self._told, self.setting.stop_asked)
        return gather(self.configs, self.outcomes, self.data)

    def _unit(self, number: int, share: Share) -> Unit:
        setting = self.setting
        return Unit(
            number,
            self.configs,
            share,
            self.source,
            setting.device,
            setting.precision,
            setting.own,
            setting.checkpoints,
        )

    def _limit(self) -> int | None:
        """How many models a stack may have; the same when the run goes on, though memory may have changed."""
        checkpoints = self.setting.checkpoints
        kept = None if checkpoints is None else checkpoints.limit(self.configs)
        if kept is not None:
            return kept[0]
        limit = self.setting.max_stack
        if limit is None:
            first = self.configs[0].first_trial
            limit = self.setting.engine.limit(self._unit(0, Share((0,), (first,))))
        if checkpoints is not None:
            checkpoints.keep_limit(self.configs, limit)
        return limit

    def _told(self, number: int, told: Told) -> None:
        """Of one stack: put it together with what is known of the others."""
        self.done[number] = max(self.done[number], told.done)
        self.outcomes |= told.outcomes
        results = gather(self.configs, self.outcomes, self.data) if told.learned else None
        self._tell(told.task, results, told.note)

    def _tell(self, task: int, results: list[Result] | None = None, note: str | None = None) -> None:
        sizes = [len(share) for share in self.shares]
        share = sum(done * size for done, size in zip(self.done, sizes, strict=True)) / sum(sizes)
        self.report(Progress(share, task, results, note, self.configs, self.outcomes))
