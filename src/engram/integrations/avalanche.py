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
from engram.data.samples import Samples, Stream
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
    """Gives the model's DHP Softmax heads the targets of each training batch, which they need to write their trace.

    The heads may be anywhere in the model. A trace is written once per step: in the first call of the head in the
    strategy's own forward pass, with `strategy.mb_y`. In every other call the head only reads its trace, even in
    training mode: in evaluation, in an importance pass, in A-GEM's or MIR's calls on samples of their memory, in the
    second of two calls in one forward pass (ER-ACE), in the copy that LwF keeps.

    Example:
        >>> model = nn.Sequential(features, engram.DHPSoftmax(512, 10))
        >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[TracePlugin()])
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[_TargetHook] = []

    def before_training_exp(self, strategy: Any, **options: Any) -> None:
        self.remove_hooks()  # the model may have been adapted, and training interrupted
        heads = [module for module in strategy.model.modules() if isinstance(module, DHPSoftmax)]
        if not heads:
            raise InputError("a TracePlugin needs a DHPSoftmax in the model, and there is none")
        self.hooks = [_TargetHook(head) for head in heads]

    def before_forward(self, strategy: Any, **options: Any) -> None:
        for hook in self.hooks:
            hook.set(strategy.mb_y)

    def after_forward(self, strategy: Any, **options: Any) -> None:
        for hook in self.hooks:
            hook.clear()

    def before_eval(self, strategy: Any, **options: Any) -> None:
        self.after_forward(strategy)

    def after_training(self, strategy: Any, **options: Any) -> None:
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks from the heads: in training mode they need targets again."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


class _TargetHook:
    """A hook on one head that gives it the targets of the current batch, once; without targets the head only reads."""

    def __init__(self, head: DHPSoftmax):
        self.head = head
        self.targets: Tensor | None = None
        self.handle = head.register_forward_pre_hook(self, with_kwargs=True)

    def set(self, targets: Tensor) -> None:
        self.targets = targets
        self.head.train()

    def clear(self) -> None:
        self.targets = None

    def remove(self) -> None:
        self.clear()
        self.handle.remove()

    def __call__(
        self, head: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments for the head in place of `args` and `named`; None to leave them."""
        given = args[1] if len(args) > 1 else named.get("target")
        if not head.training or given is not None:
            return None
        targets, self.targets = self.targets, None
        if targets is None:
            head.eval()  # until the strategy's next forward pass
            return None
        return args[:1], {**named, "target": targets}


class OwnClassesPlugin(SupervisedPlugin):
    """Task-incremental learning with one head: each experience uses only the outputs of its own classes.

    The others are masked in training and in evaluation, as in Engram's own streams; a `PenaltyPlugin` in the same
    strategy computes its importances from the same outputs. It cannot be used with replay, whose batches have classes
    of several tasks.

    Example:
        >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[OwnClassesPlugin()])
    """

    def after_forward(self, strategy: Any, **options: Any) -> None:
        own = own_classes(strategy.experience)
        others = set(strategy.mb_y.unique().tolist()) - set(own)
        if others:
            classes = ", ".join(map(str, own))
            raise InputError(f"a batch has the label {min(others)}, which is not a class of the experience: {classes}")
        strategy.mb_output = mask_logits(strategy.mb_output, own)

    def after_eval_forward(self, strategy: Any, **options: Any) -> None:
        strategy.mb_output = mask_logits(strategy.mb_output, own_classes(strategy.experience))


class PenaltyPlugin(SupervisedPlugin):
    """One of Engram's penalties in a strategy.

    The penalty is built when the first experience starts, acts in each step, and consolidates on the experience's own
    samples when it ends; `plugin.penalty` is the penalty itself. If an online stream splits an experience, it
    consolidates once, after the last part.

    Args:
        penalty: a penalty's class, or a function that makes a penalty for a model.
        penalty_step: "proximal", after the optimizer's step, as in Engram's own runs; or "gradient", in the loss.
        settings: settings of the penalty, such as its strength.

    Example:
        >>> plugin = PenaltyPlugin(engram.OnlineEWC, strength=100)
        >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[plugin])
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
                f"{type(strategy.model).__name__} takes task labels, which penalties do not support: "
                "use one head for all classes, with an OwnClassesPlugin"
            )
        _check_boundaries(strategy.experience)
        if self.penalty is None:
            self.penalty = self.make(strategy.model)
        elif _changed_weights(self.penalty, strategy.model):
            self.penalty.grow()  # Avalanche has added outputs to an `IncrementalClassifier`
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
        pairs = ((inputs, targets) for inputs, targets, *_ in loader)  # without Avalanche's labels of tasks
        self.penalty.consolidate(pairs, own_classes(task) if masked else None)


def as_benchmark(stream: Stream, dtype: torch.dtype = torch.float32) -> Any:
    """An Avalanche benchmark whose experiences are Engram's tasks, with the streams `train_stream` and `test_stream`.

    All experiences have the task label 0, as in `nc_benchmark` without labels: there is one head for all tasks.

    Args:
        stream: the tasks.
        dtype: the type of the inputs. They are as Engram's networks see them: uint8 pixels are scaled to [0, 1] and
            permuted by the task's permutation.

    Example:
        >>> benchmark = as_benchmark(engram.streams.split(dataset))
        >>> for experience in benchmark.train_stream:
        ...     strategy.train(experience)
    """
    train, test = (
        [_as_dataset(getattr(task, part), task.permutation, dtype) for task in stream] for part in ("train", "test")
    )
    return with_task_labels(with_classes_timeline(benchmark_from_datasets(train=train, test=test)))


def own_classes(experience: Any) -> tuple[int, ...]:
    """The classes of an experience's samples, sorted."""
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
            "a penalty consolidates when a task ends, which this online stream does not show: "
            "split it with access_task_boundaries=True"
        )


def _changed_weights(penalty: Penalty, model: nn.Module) -> list[str]:
    """The names of slow weights that the penalty does not protect, or that are no longer the model's."""
    now: Mapping[str, Tensor] = dict(model.named_parameters())
    changed = [name for name, theta in penalty.parameters.items() if now.get(name) is not theta]
    return changed + [name for name in slow_parameters(model) if name not in penalty.parameters]


def _check_same_weights(penalty: Penalty, model: nn.Module) -> None:
    """Refuse a model that was replaced during training."""
    changed = _changed_weights(penalty, model)
    if changed:
        raise InputError(f"the model's {changed[0]!r} is not a weight that {type(penalty).__name__} was built for")
