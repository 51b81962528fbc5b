"""Engram's head and penalties as plugins of Avalanche's strategies, and Engram's streams as its benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engram.common.errors import InputError, check_choice
from engram.data.batches import read_inputs
from engram.data.samples import Samples
from engram.data.streams import Stream
from engram.nn.classes import mask_logits
from engram.nn.dhp import DHPSoftmax
from engram.nn.modules import slow_parameters
from engram.penalties import Penalty

try:
    from avalanche.benchmarks import OnlineCLExperience, benchmark_from_datasets
    from avalanche.benchmarks.scenarios.supervised import with_classes_timeline
    from avalanche.benchmarks.scenarios.task_aware import with_task_labels
    from avalanche.benchmarks.utils import DataAttribute, TaskAwareSupervisedClassificationDataset
    from avalanche.core import SupervisedPlugin
    from avalanche.models.utils import is_multi_task_module
except ModuleNotFoundError as reason:
    if reason.name != "avalanche":
        raise
    raise ModuleNotFoundError(
        "avalanche-lib is not installed: pip install 'engram-cl[avalanche]'", name=reason.name
    ) from None


class TracePlugin(SupervisedPlugin):
    """Tells the model's DHP Softmax heads the targets of each training batch, from which they write their trace.

        model = nn.Sequential(features, engram.DHPSoftmax(512, 10))
        strategy = Naive(model=model, optimizer=..., plugins=[TracePlugin()])

    The model may hold its heads anywhere. A trace is written once a step: by the first call of the head in the
    strategy's own forward pass, with `strategy.mb_y`. In every other call the head only reads its trace, also in
    training mode: in evaluation, in an importance pass, in A-GEM's or MIR's calls on samples of their memory, in the
    second of two calls of one forward pass (ER-ACE), in the copy that LwF keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompters: list[_Prompter] = []

    def before_training_exp(self, strategy: Any, **options: Any) -> None:
        self.leave()  # a model may have been adapted, and training may have been interrupted
        heads = [module for module in strategy.model.modules() if isinstance(module, DHPSoftmax)]
        if not heads:
            raise InputError("the model has no DHPSoftmax for a TracePlugin to tell the targets")
        self.prompters = [_Prompter(head) for head in heads]

    def before_forward(self, strategy: Any, **options: Any) -> None:
        for prompter in self.prompters:
            prompter.open(strategy.mb_y)

    def after_forward(self, strategy: Any, **options: Any) -> None:
        for prompter in self.prompters:
            prompter.close()

    def before_eval(self, strategy: Any, **options: Any) -> None:
        self.after_forward(strategy)

    def after_training(self, strategy: Any, **options: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """Take everything off the heads: in training mode they ask for targets again."""
        for prompter in self.prompters:
            prompter.leave()
        self.prompters = []


class _Prompter:
    """Stands before one head: hands it the targets of the batch at hand, once; without any, the head only reads."""

    def __init__(self, head: DHPSoftmax):
        self.head = head
        self.targets: Tensor | None = None
        self.handle = head.register_forward_pre_hook(self, with_kwargs=True)

    def open(self, targets: Tensor) -> None:
        self.targets = targets
        self.head.train()

    def close(self) -> None:
        self.targets = None

    def leave(self) -> None:
        self.close()
        self.handle.remove()

    def __call__(
        self, head: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the head is called with in place of `args` and `named`; None for the same."""
        given = args[1] if len(args) > 1 else named.get("target")
        if not head.training or given is not None:
            return None
        targets, self.targets = self.targets, None
        if targets is None:
            head.eval()  # until the strategy's next forward pass
            return None
        return args[:1], {**named, "target": targets}


class OwnClassesPlugin(SupervisedPlugin):
    """Task-incremental use of one head: only the outputs of an experience's own classes take part in it.

    The others are masked out in training and in evaluation, as in Engram's own streams; a `PenaltyPlugin` beside it
    takes its importances from the same outputs. It does not go with replay, whose batches have classes of several
    tasks.
    """

    def after_forward(self, strategy: Any, **options: Any) -> None:
        own = own_classes(strategy.experience)
        stray = set(strategy.mb_y.unique().tolist()) - set(own)
        if stray:
            others = ", ".join(map(str, own))
            raise InputError(f"a batch has the label {min(stray)}, which is not of the experience's classes {others}")
        strategy.mb_output = mask_logits(strategy.mb_output, own)

    def after_eval_forward(self, strategy: Any, **options: Any) -> None:
        strategy.mb_output = mask_logits(strategy.mb_output, own_classes(strategy.experience))


class PenaltyPlugin(SupervisedPlugin):
    """One of Engram's penalties in a strategy: `PenaltyPlugin(engram.OnlineEWC, strength=100)`.

    The penalty is made for the model as it is when the first experience begins, takes part in each step, and
    consolidates on the experience's own samples when it ends; `plugin.penalty` is the penalty itself. Of an experience
    that an online stream cuts into pieces, it consolidates once, after the last.

    Args:
        penalty: a class of penalties, or a function of a model that makes one.
        penalty_step: "proximal", after the optimizer's step, as in Engram's own runs; or "gradient", in the loss.
        settings: of the penalty, such as its strength.
    """

    penalty: Penalty | None

    def __init__(self, penalty: Callable[..., Penalty], *, penalty_step: str = "proximal", **settings: Any):
        super().__init__()
        check_choice("penalty_step", penalty_step, ("proximal", "gradient"))
        self.make = partial(penalty, **settings)
        self.penalty_step = penalty_step
        self.penalty = None

    def before_training_exp(self, strategy: Any, **options: Any) -> None:
        if is_multi_task_module(strategy.model):
            raise InputError(
                f"{type(strategy.model).__name__} takes task labels, which a penalty does not know: "
                "use one head of all classes, with an OwnClassesPlugin"
            )
        _check_boundaries(strategy.experience)
        if self.penalty is None:
            self.penalty = self.make(strategy.model)
        elif _changed_weights(self.penalty, strategy.model):
            self.penalty.grow()  # Avalanche's adaptation has given an `IncrementalClassifier` more outputs
        _check_same_weights(self.penalty, strategy.model)

    def before_backward(self, strategy: Any, **options: Any) -> None:
        if self.penalty is not None and self.penalty_step == "gradient":
            strategy.loss += self.penalty.loss()

    def after_backward(self, strategy: Any, **options: Any) -> None:
        if self.penalty is not None:
            self.penalty.after_backward()  # other plugins may clip the gradients

    def after_update(self, strategy: Any, **options: Any) -> None:
        if self.penalty is None:
            return
        if self.penalty_step == "proximal":
            self.penalty.proximal_step(strategy.optimizer)
        self.penalty.after_step()

    def after_training_exp(self, strategy: Any, **options: Any) -> None:
        if self.penalty is None or not getattr(strategy.experience, "is_last_subexp", True):
            return
        _check_same_weights(self.penalty, strategy.model)
        task = getattr(strategy.experience, "origin_experience", strategy.experience)
        masked = any(isinstance(plugin, OwnClassesPlugin) for plugin in strategy.plugins)
        loader = _loader_of(task.dataset, strategy.train_mb_size, options.get("num_workers", 0))
        self.penalty.consolidate(loader, own_classes(task) if masked else None)


def as_benchmark(stream: Stream, dtype: torch.dtype = torch.float32) -> Any:
    """An Avalanche benchmark with Engram's tasks as its experiences, in the streams `train_stream` and `test_stream`.

    Inputs are as Engram's networks see them: numbers of that type, with uint8 pixels scaled to [0, 1], in the order of
    the task's permutation. All have the task label 0, as in `nc_benchmark` without labels: one head is for all tasks.
    """
    train, test = (
        [_as_dataset(getattr(task, part), task.permutation, dtype) for task in stream] for part in ("train", "test")
    )
    return with_task_labels(with_classes_timeline(benchmark_from_datasets(train=train, test=test)))


def own_classes(experience: Any) -> tuple[int, ...]:
    """The classes of an experience's samples, in order."""
    found: Iterable[int] | None = getattr(experience, "classes_in_this_experience", None)
    return tuple(sorted(experience.dataset.targets.uniques if found is None else found))


def _as_dataset(samples: Samples, permutation: Tensor | None, dtype: torch.dtype) -> Any:
    whole = samples[slice(None)]
    dataset = TensorDataset(read_inputs(whole.inputs, permutation, dtype), whole.targets)
    targets = DataAttribute(whole.targets.tolist(), "targets")
    labels = DataAttribute([0] * len(dataset), "targets_task_labels", use_in_getitem=True)
    return TaskAwareSupervisedClassificationDataset([dataset], data_attributes=[targets, labels])


def _loader_of(dataset: Any, batch_size: int, num_workers: int) -> DataLoader[Any]:
    collate = getattr(dataset, "collate_fn", None)
    return DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=num_workers)


def _check_boundaries(experience: Any) -> None:
    if isinstance(experience, OnlineCLExperience) and not experience.access_task_boundaries:
        raise InputError(
            "a penalty consolidates when a task ends, and this online stream hides that: "
            "split it with access_task_boundaries=True"
        )


def _changed_weights(penalty: Penalty, model: nn.Module) -> list[str]:
    """The names of slow weights that are no longer, or not yet, tensors of the penalty's."""
    now: Mapping[str, Tensor] = dict(model.named_parameters())
    changed = [name for name, theta in penalty.parameters.items() if now.get(name) is not theta]
    return changed + [name for name in slow_parameters(model) if name not in penalty.parameters]


def _check_same_weights(penalty: Penalty, model: nn.Module) -> None:
    """Refuse a model that was exchanged for another while it was being learned."""
    changed = _changed_weights(penalty, model)
    if changed:
        raise InputError(f"the model's {changed[0]!r} is not a weight that {type(penalty).__name__} was made for")
