"""`engram.run` and `engram.run_many`: methods, trials and points of a grid, trained together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engram.build import NOTHING_OWN, Own, build_learner, build_streams, choose_device, load_datasets, precision_of
from engram.checkpoint import Checkpoint, Checkpoints
from engram.config import Config
from engram.data.samples import Dataset
from engram.data.streams import Stream, masked_only_when_examined, move_streams
from engram.errors import InputError
from engram.learner import Learner
from engram.penalties import Penalty
from engram.results import Result
from engram.shares import Outcomes, Share, check_shared, gather, plan_stacks
from engram.stack.choose import choose_program, largest_stack
from engram.stack.descent import check_step
from engram.stack.program import Batches
from engram.train import Place, Watch, run_stream


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
    checkpoints: Checkpoints | None = None  # goes on from the last, if there is one


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
        report: called with a `Progress` now and then.
    """
    if not configs:
        return []
    check_shared(configs)
    setting = Setting(device, precision, max_stack, Own(features, head, penalty))
    if (stream is not None) != (configs[0].benchmark == "own"):
        raise InputError("a stream goes with the benchmark 'own', and only with that: engram.preset('own', 'dhp')")
    if stream is None:
        return run_on(configs, load_datasets(configs[0], data), setting, report)
    for name, usual in (("max_samples", None), ("examine", "test")):
        if getattr(configs[0], name) != usual:
            raise InputError(f"{name} is of the benchmarks' datasets, and a stream of one's own has none")
    configs = [config.replace(num_tasks=len(stream)) for config in configs]
    learned = stream if configs[0].mask_training else masked_only_when_examined(stream)
    return _Experiment(configs, lambda trials: [learned] * len(trials), [stream.provenance()], setting, report).run()


def run_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    setting: Setting | None = None,
    report: Report = lambda progress: None,
) -> list[Result]:
    """`run_many` on datasets that are loaded already."""
    data = [dataset.provenance() for dataset in datasets]
    setting = Setting() if setting is None else setting
    return _Experiment(configs, lambda trials: build_streams(configs[0], trials, datasets), data, setting, report).run()


def check_own(configs: Sequence[Config], own: Own) -> None:
    """Refuse features without a network of one's own, and the reverse; and two penalties for one model."""
    if any((own.features is not None) != (config.network == "own") for config in configs):
        raise InputError("features go with network='own', and only with that: engram.run(config, features=...)")
    if own.penalty is not None and any(config.penalty is not None for config in configs):
        raise InputError("a penalty of one's own goes with the methods finetune and dhp, which have none")


def check_apart(learners: Sequence[Learner]) -> None:
    """Refuse models that share a tensor: each would train the others."""
    seen: set[int] = set()
    for learner in learners:
        own = [*learner.model.parameters(), *learner.model.buffers()]
        tensors = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}
        if tensors & seen:
            raise InputError("two models share a tensor: features and head must make a new module at each call")
        seen |= tensors


class _Experiment:
    """An experiment on its way: stack after stack, and what has come of every trial so far."""

    def __init__(
        self,
        configs: Sequence[Config],
        streams_of: Callable[[Sequence[int]], list[Stream]],
        data: list[dict[str, Any]],
        setting: Setting,
        report: Report,
    ):
        check_shared(configs)
        check_own(configs, setting.own)
        self.configs = configs
        self.streams_of = streams_of
        self.data = data
        self.setting = setting
        self.report = report
        self.device = choose_device(setting.device)
        self.outcomes: Outcomes = {}

    def run(self) -> list[Result]:
        checkpoints = self.setting.checkpoints
        kept = None if checkpoints is None else checkpoints.read(self.configs)
        with precision_of(self.setting.precision) as self.dtype, torch.inference_mode(False), torch.enable_grad():
            self.limit = self._limit() if kept is None else kept.limit
            self.shares = plan_stacks(self.configs, self.limit)
            if len(self.shares) > 1:
                sizes = [len(share) for share in self.shares]
                self._note(0, f"{sum(sizes)} models in {len(sizes)} stacks: {' + '.join(map(str, sizes))}")
            for k in range(len(self.shares)):
                if kept is not None and k < kept.stack:
                    continue
                self._train(k, kept if kept is not None and k == kept.stack else None)
        return gather(self.configs, self.outcomes, self.data)

    def _limit(self) -> int | None:
        """How many models a stack may have."""
        if self.setting.max_stack is not None:
            return self.setting.max_stack
        first = self.configs[0].first_trial
        return largest_stack(self.configs, lambda place: self._build(Share((place,), (first,))), self.device)

    def _build(self, share: Share) -> tuple[list[Learner], Batches]:
        """Learners in the order of a stack, and what they learn."""
        streams = move_streams(self.streams_of(share.trials), self.device)
        shape, num_classes = streams[0].input_shape, streams[0].num_classes
        learners = [
            build_learner(self.configs[c], trial, shape, num_classes, self.device, self.dtype, self.setting.own)
            for c, trial in share.keys
        ]
        check_apart(learners)
        for learner in learners:
            check_step(learner.penalty, learner.config.penalty_step)
        return learners, Batches(share.trials, streams, self.configs[0].seed, self.dtype)

    def _train(self, k: int, kept: Checkpoint | None) -> None:
        """Take one stack to the end of its stream; from where it stood, if something was kept of it."""
        learners, batches = self._build(self.shares[k])
        place = Place()
        if kept is not None:
            self.outcomes, place = kept.restore(learners, self.shares[k].keys)
            finished = place.task == len(batches.streams[0])
            where = "with the next stack" if finished else f"from task {place.task + 1}, epoch {place.epoch + 1}"
            self._note(self._share_of_whole(k, place), f"goes on {where}")
        self.outcomes |= dict(zip(self.shares[k].keys, (learner.outcome for learner in learners), strict=True))
        program, notes = choose_program(learners, batches, self.device)
        checkpoints = self.setting.checkpoints
        said: set[str] = set()

        def say(notes: Sequence[str]) -> None:
            for note in [note for note in notes if note not in said]:
                self._note(self._share_of_whole(k, place), note)
                said.add(note)

        def moved() -> None:
            say(program.notes)
            self._tell(self._share_of_whole(k, place), place.task)

        def learned(n: int) -> None:
            results = gather(self.configs, self.outcomes, self.data)
            self._tell(self._share_of_whole(k, place), n, results)

        def keep(task_ended: bool) -> None:
            at_the_end = place.task == len(batches.streams[0]) and k + 1 == len(self.shares)
            if checkpoints is not None and checkpoints.is_due(task_ended) and not at_the_end:
                checkpoints.save(self.configs, k, self.limit, learners, self.outcomes, place)

        say(notes)
        run_stream(program, batches, self.configs[self.shares[k].configs[0]], place, Watch(moved, learned, keep))

    def _share_of_whole(self, k: int, place: Place) -> float:
        """How much of the experiment is done when stack k stands at a place."""
        sizes = [len(share) for share in self.shares]
        config = self.configs[self.shares[k].configs[0]]
        done = (place.task + (place.epoch + place.part) / config.epochs) / config.num_tasks
        return (sum(sizes[:k]) + done * sizes[k]) / sum(sizes)

    def _note(self, share: float, note: str) -> None:
        self._tell(share, 0, note=note)

    def _tell(self, share: float, task: int, results: list[Result] | None = None, note: str | None = None) -> None:
        self.report(Progress(share, task, results, note, self.configs, self.outcomes))
