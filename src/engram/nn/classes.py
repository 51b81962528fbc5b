"""The classes of an output layer: targets, the outputs of a task, initial weights, and layers that get more classes."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engram.common.errors import InputError, NotFiniteError, check_choice

CLASS_NUMBER_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_targets(targets: object, num_samples: int) -> Tensor:
    """Return the targets if they are a vector with one class number for each sample; refuse them otherwise.

    The range of the numbers is checked by callers, who know how many classes there are.

    Args:
        targets: what was given as targets.
        num_samples: the size of the batch.

    Example:
        >>> check_targets(torch.tensor([0, 2, 1]), num_samples=3)
        tensor([0, 2, 1])
    """
    if not isinstance(targets, Tensor):
        raise InputError(f"targets must be a tensor of class numbers, not a {type(targets).__name__}")
    if targets.dtype not in CLASS_NUMBER_TYPES:
        raise InputError(f"targets must be class numbers (int64), not {targets.dtype}")
    if targets.shape != (num_samples,):
        raise InputError(f"targets must have shape ({num_samples},), one for each sample, not {tuple(targets.shape)}")
    return targets


def check_range(targets: Tensor, num_classes: int) -> None:
    """Refuse class numbers outside 0..num_classes − 1.

    Args:
        targets: class numbers (B,).
        num_classes: how many classes there are.

    Example:
        >>> check_range(torch.tensor([0, 2, 1]), num_classes=3)
    """
    if len(targets):
        low, high = (int(bound) for bound in targets.aminmax())
        if low < 0 or high >= num_classes:
            raise InputError(f"targets must lie in 0..{num_classes - 1}, not {low}..{high}")


def check_values(hidden: Tensor, targets: Tensor, num_classes: int) -> None:
    """Refuse what must not be written into a memory: class numbers out of range, and features that are not finite.

    Only on a CPU: checking makes an accelerator wait, and cannot be traced. There the caller is responsible.

    Args:
        hidden: features (B, m).
        targets: class numbers (B,).
        num_classes: how many classes there are.

    Example:
        >>> check_values(torch.ones(3, 4), torch.tensor([0, 2, 1]), num_classes=3)
    """
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        check_range(targets, num_classes)
        if not torch.isfinite(hidden).all():
            raise NotFiniteError("the features hold NaN or infinity, which would stay in the memory")


HALF = (torch.bfloat16, torch.float16)


def check_writable(layer: nn.Module, memory: Iterable[Tensor]) -> None:
    """Refuse a training call that would leave a wrong memory without a sign of it.

    A memory in half precision stops moving: a small change is less than half of its last digit. And a call within a
    backward pass repeats one that has been written already, as activation checkpointing does: the batch would be
    written twice, and the gradients would be those of the second time.

    Args:
        layer: the layer that is called.
        memory: what it writes a batch into, in small changes.

    Example:
        >>> check_writable(head, [head.hebb])
    """
    for tensor in memory:
        if tensor.dtype in HALF:
            raise InputError(
                f"the memory of a {type(layer).__name__} would stop moving in {tensor.dtype}: train it in float32 "
                "(head.float(), given hidden.float()), with torch.autocast around the model for speed"
            )
    # PyTorch has no public name for this question: the number of the backward pass that is running, -1 for none
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise InputError(
            f"a {type(layer).__name__} is called a second time within the backward pass, as activation checkpointing "
            "does, and would write its batch twice: checkpoint the features only, and call the head outside"
        )


def mask_logits(logits: Tensor, classes: Sequence[int] | None) -> Tensor:
    """Set the logits of all classes but `classes` to −∞, so that softmax gives them no probability.

    So several heads live in one layer: each task uses the outputs of its own classes.

    Args:
        logits: (..., C).
        classes: the numbers of the classes that take part; None for all.

    Example:
        >>> mask_logits(torch.zeros(1, 3), classes=(0, 2))
        tensor([[0., -inf, 0.]])
    """
    if classes is None or len(classes) == logits.shape[-1]:
        return logits
    return logits.masked_fill(masked_classes(tuple(classes), logits.shape[-1], logits.device), float("-inf"))


@lru_cache(maxsize=64)
def masked_classes(classes: tuple[int, ...], num_classes: int, device: torch.device) -> Tensor:
    """Which outputs take no part (C,). It is cached, so that a GPU does not wait for it at every step.

    Args:
        classes: the numbers of the classes that take part.
        num_classes: C.
        device: where the mask is needed.

    Example:
        >>> masked_classes((0, 2), 3, torch.device("cpu"))
        tensor([False,  True, False])
    """
    with torch.inference_mode(False):  # the cached mask is used in training too
        others = torch.ones(num_classes, dtype=torch.bool)
        others[list(classes)] = False
        return others.to(device)


HEAD_INITS = ("linear", "published")


@torch.no_grad()
def draw_slow_weights(weight: Tensor, head_init: str, gain: float = 1.0) -> None:
    """Draw the initial slow weights of an output layer, U(±1/√m) or U(±1/√C), from the same random numbers.

    Args:
        weight: θ (C, m), which is overwritten.
        head_init: "linear" for ±1/√m, as `torch.nn.Linear` does; "published" for ±1/√C, as the paper's author
            published the layer: its weight has the shape (m, C), whose second axis PyTorch takes for the inputs.
        gain: a factor of the range.

    Example:
        >>> draw_slow_weights(head.weight, "published")
    """
    check_choice("head_init", head_init, HEAD_INITS)
    if not (math.isfinite(gain) and gain > 0):
        raise InputError(f"head_gain must be a positive number, not {gain}")
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    num_classes, num_features = weight.shape
    weight.mul_(gain * (math.sqrt(num_features / num_classes) if head_init == "published" else 1))


class Outgrown:
    """A parameter that another has replaced, as long as anything holds it: an optimizer would step for nothing."""

    every: ClassVar[list[Outgrown]] = []
    hook: ClassVar[Any] = None

    def __init__(self, old: Tensor, new: Tensor):
        self.old, self.new = weakref.ref(old), weakref.ref(new)
        self.was_stale = False  # whether an optimizer that has the old one alone has taken a step

    def is_alive(self) -> bool:
        """Whether both are still there: otherwise nothing can step for nothing."""
        return self.old() is not None and self.new() is not None

    @classmethod
    def note(cls, old: Tensor, new: Tensor) -> None:
        """From now on, look at every optimizer that takes a step, until nothing holds the old parameter."""
        for one in cls.every:
            if one.new() is old:  # it has been replaced twice
                one.new = weakref.ref(new)
        cls.every.append(cls(old, new))
        if cls.hook is None:
            cls.hook = register_optimizer_step_pre_hook(cls.look)

    @classmethod
    def look(cls, optimizer: Optimizer, *arguments: Any) -> None:
        """Warn, once, of an optimizer that steps a second time while no other has moved what replaced its weights.

        Whether the new weights changed does not tell: a penalty's proximal step may, and a head that writes into them.
        """
        held = {id(theta) for group in optimizer.param_groups for theta in group["params"]} if cls.every else set()
        known = [one for one in cls.every if id(one.new()) in held]
        cls.every[:] = [one for one in cls.every if one.is_alive() and one not in known]
        stale = [one for one in cls.every if id(one.old()) in held and getattr(one.new(), "grad", None) is not None]
        if any(one.was_stale for one in stale):
            cls.every[:] = [one for one in cls.every if one not in stale]
            warnings.warn(
                "an optimizer still has the weights of before head.grow(), and does not move the new ones: "
                "make a new optimizer after head.grow()",
                UserWarning,
                stacklevel=3,
            )
        for one in stale:
            one.was_stale = True
        if not cls.every and cls.hook is not None:
            cls.hook.remove()
            cls.hook = None


@torch.no_grad()
def grow_rows(layer: Any, out_features: int) -> None:
    """Give every tensor of a layer that has one row per class a row for each of `out_features` classes.

    Old rows, and tensors that all rows share, keep their values bit for bit. New rows are initialised by the layer's
    `reset_parameters`.

    Args:
        layer: a module with `out_features` and `reset_parameters`. If it has `class_rows`, only the tensors of these
            names have a row per class.
        out_features: the new number of classes, at least the old one.

    Example:
        >>> grow_rows(head, out_features=12)
    """
    num_before = layer.out_features
    if isinstance(out_features, bool) or not isinstance(out_features, Integral):
        raise InputError(f"a layer grows to a whole number of classes, not {out_features!r}")
    out_features = int(out_features)
    if out_features < num_before:
        raise InputError(f"a layer of {num_before} classes cannot shrink to {out_features}")
    if out_features == num_before:
        return
    before = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    rows = getattr(layer, "class_rows", [name for name, tensor in before.items() if tensor.ndim])
    for name, tensor in before.items():
        if name in rows:
            larger = tensor.new_empty(out_features, *tensor.shape[1:])
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(layer, name, nn.Parameter(larger, tensor.requires_grad) if is_parameter else larger)
            if is_parameter:
                Outgrown.note(tensor, getattr(layer, name))
    old = {name: tensor.clone() for name, tensor in before.items()}
    layer.out_features = out_features
    layer.reset_parameters()
    for name, tensor in old.items():
        now = getattr(layer, name)
        (now[:num_before] if name in rows else now).copy_(tensor)
