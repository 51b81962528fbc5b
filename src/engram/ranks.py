"""Data parallel training: the ranks that share a batch, found without being told, and sums over all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engram.errors import InputError

Ranks = Any  # a ProcessGroup of at least two; a PyTorch without torch.distributed has no such name

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()  # those that were found so far
_alone: WeakSet[nn.Module] = WeakSet()  # modules around which there was none


def several_processes() -> bool:
    """Whether torch.distributed runs, with more than this process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_of_call(module: nn.Module) -> Ranks | None:
    """The ranks that this very call of a module is shared by: those of the DistributedDataParallel that makes it.

    Processes that train models of their own are no such ranks, whether or not torch.distributed runs.
    """
    if not several_processes():
        return None
    wrapper = DistributedDataParallel._active_ddp_module  # what torch.compile asks, too
    if wrapper is not None:
        return _if_several(wrapper.process_group)
    if module not in _alone:
        if ranks_of(module) is not None:
            raise InputError(
                f"this {type(module).__name__} is called past the DistributedDataParallel around it, so that its "
                "trace would be of this rank's samples alone: call what DistributedDataParallel(model) returned"
            )
        _alone.add(module)  # the search takes longer than a step
    return None


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that train a model together: those of the DistributedDataParallel around it, or around a larger one.

    A model does not know what is around it, so all that there is in memory is looked at, once, for a tenth of a second.
    """
    if not several_processes():
        return None
    wrapper = _around(model)
    if wrapper is None:
        # by the type: some objects answer isinstance() with work
        _wrappers.update(found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))
        wrapper = _around(model)
    return None if wrapper is None else _if_several(wrapper.process_group)


def _around(model: nn.Module) -> DistributedDataParallel | None:
    return next((wrapper for wrapper in _wrappers if any(part is model for part in wrapper.modules())), None)


def _if_several(group: Any) -> Ranks | None:
    return group if group.size() > 1 else None


def rank_of(ranks: Ranks | None) -> int:
    """The place of this process among the ranks; 0 where it is alone."""
    return 0 if ranks is None else int(ranks.rank())


def add_over_ranks(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Each tensor becomes the sum of what it is on every rank, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=ranks)


class SumOverRanks(torch.autograd.Function):
    """Sums (C, m) and counts (C, 1), each over all ranks, by one message of C (m + 1) numbers.

    Every rank's loss depends on the sums of every rank. So the derivative of all losses by a rank's own part is the sum
    of the derivatives that the ranks have found for the whole: one message of C m numbers in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, counts: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        both = torch.cat([sums, counts], dim=-1)
        add_over_ranks([both], ranks)
        total, count = both[:, :-1].contiguous(), both[:, -1:].contiguous()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_sums = gradients[0].clone(memory_format=torch.contiguous_format)
        add_over_ranks([by_sums], ctx.ranks)
        return by_sums, None, None


def after_averaging(call: Callable[[], None]) -> None:
    """From within a backward pass: call something when it is over, gradients averaged over the ranks included.

    DistributedDataParallel queues the end of its averaging while the pass runs, so this goes to the queue's end from there.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
