"""Heads in a stack: faster ways to compute some, and plain and matched ones as plastic ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engram.engine.gpu.convolutions import once
from engram.nn.baselines import LinearSoftmax, MatchedSoftmax
from engram.nn.dhp import DHPSoftmax
from engram.nn.memory_heads import MemoryHead
from engram.nn.modules import mapped
from engram.nn.networks import Network

LARGEST_HEAD = 128  # classes that the kernels of heads can hold
WIDEST_HEAD = 4096  # features of a class that one program can hold
BATCHES_KEPT = 16  # that are added to a second moment at once


class LateMoment:
    """The second moments G of a head in all models of a section, to which several batches are added at once:

        G += Σ ψ ψᵀ

    They are the largest tensors of such a head: to read and write them at every step would take longer than all else
    that it does. So features are kept, and after some steps one product adds them all.

    Args:
        moment: G (N, k, k).
        slot: (1,), the number of the step in its piece.
        kernels: the Triton kernels.

    Example:
        >>> late = LateMoment(rows.buffers["head.moment"], torch.zeros(1, dtype=torch.int64), kernels)
    """

    def __init__(self, moment: Tensor, slot: Tensor, kernels: ModuleType):
        self.moment = moment
        self.slot = slot
        self.kernels = kernels
        self.begin_step(slice(None), 0)
        # (N, k, batches, samples), by the size of a batch and the number of the call in its step. Graphs refer to them.
        self.kept: dict[tuple[int, int], Tensor] = {}

    def begin_step(self, rows: slice, batch_size: int) -> None:
        """The models whose step is computed, and the size of their batch."""
        self.rows, self.batch_size, self.num_calls = rows, batch_size, 0

    def write(self, psi: Tensor, targets: Tensor, count: Tensor, total: Tensor, unread: Tensor) -> None:
        """Add a batch to the sums of the classes, and keep its features; arguments as of `write_sums`."""
        key = (self.batch_size, self.num_calls)
        self.num_calls += 1
        if key not in self.kept:
            self.kept[key] = self._room(key[1], (*self.moment.shape[:2], BATCHES_KEPT, psi.shape[1]), psi)
        self.kernels.write_sums(psi, targets, count, total, unread, self.kept[key][self.rows], self.slot)

    def _room(self, call: int, shape: tuple[int, ...], psi: Tensor) -> Tensor:
        """Where features are kept. Batches of several sizes share it: all of one size are added before the next."""
        needed = math.prod(shape)
        shared = next((own for (_, other), own in self.kept.items() if other == call and own.numel() >= needed), None)
        return (psi.new_empty(needed) if shared is None else shared.view(-1)[:needed]).view(shape)

    @torch.no_grad()
    def add(self, rows: slice, batch_size: int, num_batches: int) -> None:
        """Add the features of the last steps to G.

        Args:
            rows: whose.
            batch_size: that of the steps.
            num_batches: the number of these steps.
        """
        for (size, _), kept in self.kept.items():
            if size == batch_size:
                psi = kept[rows, :, :num_batches].flatten(2)  # (N, k, samples)
                self.moment[rows] += torch.bmm(psi, psi.mT)


def fuse_heads(model: nn.Module, kernels: ModuleType, moments: Mapping[str, LateMoment]) -> None:
    """Replace how heads that the kernels know write, and what they then read.

    Args:
        model: the skeleton of a section.
        kernels: the Triton kernels.
        moments: of the heads that have a second moment, by their names.

    Example:
        >>> fuse_heads(model, kernels, {})
    """
    for name, module in model.named_modules():
        if isinstance(module, DHPSoftmax) and _is_called_as_it_is(module):
            fits = module.alpha.ndim == 2 and module.out_features <= LARGEST_HEAD
            if fits and (module.literal or is_steady(module)):
                module._write_then_read = _plastic_of(module, kernels)  # type: ignore[method-assign]
                module.forward = module._learn  # type: ignore[method-assign, assignment]  # checks nothing
        if writes_sums(module):
            module._write = _sums_of(module, kernels, moments.get(name))


def _is_called_as_it_is(head: DHPSoftmax) -> bool:
    kind = type(head)
    return kind.forward is DHPSoftmax.forward and kind._write_then_read is DHPSoftmax._write_then_read


def is_steady(module: nn.Module) -> bool:
    """Whether a head has a trace of another form than the paper's that the kernels know: without a gradient through it.

    Args:
        module: a layer.

    Example:
        >>> is_steady(engram.DHPSoftmax(4, 2, trace_gradient=False, trace_scale=2.0))
        True
    """
    if not isinstance(module, DHPSoftmax) or type(module).read is not DHPSoftmax.read:
        return False
    known = not module.trace_gradient and module.trace_write == "before"
    return known and module.in_features <= WIDEST_HEAD


def is_movable(head: DHPSoftmax) -> bool:
    """Whether the kernels can move the anchors of this head's weight with its fast part, as a DHP Softmax has it.

    Args:
        head: any.

    Example:
        >>> is_movable(engram.DHPSoftmax(4, 2))
        True
    """
    own = type(head).read is DHPSoftmax.read and type(head).fast_part_of is DHPSoftmax.fast_part_of
    return own and head.alpha.ndim == 2 and head.in_features <= WIDEST_HEAD


def writes_sums(module: nn.Module) -> bool:
    """Whether a stack adds to the sums of this head by its kernels.

    A memory alone is not among them: its sums are exact, since nothing else is learned.

    Args:
        module: a layer.

    Example:
        >>> writes_sums(nn.Linear(2, 2))
        False
    """
    return type(module) is MemoryHead and module.weight is not None and module.out_features <= LARGEST_HEAD


def _plastic_of(head: DHPSoftmax, kernels: ModuleType) -> Callable[..., Tensor]:
    form = None if head.literal else (head.trace_centred, head.trace_scale)

    def write_then_read(hidden: Tensor, target: Tensor) -> Tensor:
        how = (head.eta_range == "unit", form, kernels)
        return mapped(StackedPlastic, hidden, target, head.weight, head.alpha, head.eta, head.hebb, *how)

    return write_then_read


def _sums_of(head: MemoryHead, kernels: ModuleType, moment: LateMoment | None) -> Callable[..., None]:
    write_batch = kernels.write_sums if moment is None else moment.write

    @torch.no_grad()
    def write(psi: Tensor, target: Tensor | None) -> None:
        rows, targets = head._checked_rows(psi.detach(), target)
        mapped(StackedSums, rows, targets, head.count, head.total, head.unread, write_batch)

    return write


class StackedPlastic(torch.autograd.Function):
    """`PlasticSoftmax` for every model of a stack, in few passes over memory; η and the trace change in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        target: Tensor,
        weight: Tensor,
        alpha: Tensor,
        eta: Tensor,
        hebb: Tensor,
        bounded: bool,
        form: tuple[bool, float | None] | None,
        kernels: ModuleType,
    ) -> Tensor:
        axes = weight.shape[:2]
        hidden, targets = hidden.flatten(0, 1), once(target)
        weight, alpha, eta, hebb = (tensor.flatten(0, 1) for tensor in (weight, alpha, eta, hebb))
        in_force, surprise = kernels.write_trace(hidden, targets, weight, alpha, eta, hebb, bounded, form)
        if form is not None:  # no gradient goes through the trace: as if nothing had been written, and this were read
            eta, hebb = torch.zeros_like(eta), surprise
        ctx.save_for_backward(hidden, targets, alpha, eta, hebb, in_force, surprise)
        ctx.axes, ctx.kernels, ctx.learns_eta = axes, kernels, form is None
        return torch.bmm(hidden, in_force.mT).unflatten(0, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        delta = gradients[0].flatten(0, 1).contiguous()
        by_weight, by_alpha, by_eta, by_hidden = ctx.kernels.read_back(delta, *ctx.saved_tensors)
        by_hidden, by_weight, by_alpha, by_eta = (
            tensor.unflatten(0, ctx.axes) for tensor in (by_hidden.mT, by_weight, by_alpha, by_eta)
        )
        return by_hidden, None, by_weight, by_alpha, by_eta if ctx.learns_eta else None, None, None, None, None


class StackedSums(torch.autograd.Function):
    """`MemoryHead._write` for every model of a stack: the sums change in place."""

    @staticmethod
    def forward(
        ctx: Any,
        psi: Tensor,
        target: Tensor,
        count: Tensor,
        total: Tensor,
        unread: Tensor,
        write: Callable[..., None],
    ) -> Tensor:
        sums = (tensor.flatten(0, 1) for tensor in (count, total, unread))
        write(psi.flatten(0, 1), once(target), *sums)
        return unread.clone()  # a function returns something


# --- heads of several kinds in one section


def are_mixed(models: Sequence[nn.Module]) -> bool:
    """Whether models have heads of several kinds, or matched heads with different constant traces.

    Args:
        models: any.

    Example:
        >>> are_mixed([Network(features, LinearSoftmax(8, 3)), Network(features, DHPSoftmax(8, 3))])
        True
    """
    return len({kind_of_head(model) for model in models}) > 1


def kind_of_head(model: nn.Module) -> tuple[type, float | None]:
    """What models whose heads are called as one must share: the class, and the constant trace of matched heads.

    Args:
        model: any.

    Example:
        >>> kind_of_head(Network(features, LinearSoftmax(8, 3)))
        (<class 'engram.nn.baselines.LinearSoftmax'>, None)
    """
    head = getattr(model, "head", None)
    return type(head), head.trace if isinstance(head, MatchedSoftmax) else None


def as_plastic(model: nn.Module) -> nn.Module:
    """A network with a plain or a matched head as one with a plastic head that computes the same.

    z = (θ + α Hebb) h  is  z = (θ + θ′ c) h  if α is θ′, and the trace is constant: Hebb = c and η = 0. It is  z = θ h
    if α and the trace stay zero. So all three train in one section. Parameters that the network has of its own are
    shared. Other models are returned as they are.

    Args:
        model: any.

    Example:
        >>> as_plastic(Network(features, MatchedSoftmax(8, 3))).head.hebb.unique()
        tensor([1.])
    """
    own = model.head if isinstance(model, Network) else None
    if type(own) is MatchedSoftmax:
        alpha, trace = own.extra, own.trace
    elif type(own) is LinearSoftmax and own.bias is None:
        alpha, trace = nn.Parameter(torch.zeros_like(own.weight), requires_grad=False), 0.0
    else:
        return model
    assert isinstance(model, Network)
    head = DHPSoftmax(own.in_features, own.out_features, eta=0, device="meta")  # draws no weights
    head.weight, head.alpha = own.weight, alpha
    head.eta = nn.Parameter(own.weight.new_zeros(()), requires_grad=False)
    head.hebb = torch.full_like(own.weight, trace, requires_grad=False)
    head.check_values = False
    return Network(model.features, head)
