"""Data parallel training: the ranks that share a batch, found without being told, and sums over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engram.common.errors import InputError
from engram.nn.wrapping import note, parallel_around

Ranks = Any  # a ProcessGroup of at least two; a PyTorch without torch.distributed has no such name

_alone: WeakSet[nn.Module] = WeakSet()  # modules around which there was no DistributedDataParallel


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
        if not torch.compiler.is_compiling():
            note(wrapper)
            _alone.discard(module)
        return _if_several(wrapper.process_group)
    if _is_shared(module):
        raise InputError(
            f"this {type(module).__name__} is called past the DistributedDataParallel around it, so that its "
            "trace would be of this rank's samples alone: call what DistributedDataParallel(model) returned"
        )
    return None


@torch.compiler.assume_constant_result  # a compiler asks once, and does not look into it
def _is_shared(module: nn.Module) -> bool:
    if module not in _alone and ranks_of(module) is None:
        _alone.add(module)  # the search takes longer than a step
    return module not in _alone


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that train a model together: those of the DistributedDataParallel around it."""
    if not several_processes():
        return None
    wrapper = parallel_around(model)
    return None if wrapper is None else _if_several(wrapper.process_group)


def _if_several(group: Any) -> Ranks | None:
    return group if group.size() > 1 else None


def rank_of(ranks: Ranks | None) -> int:
    """The place of this process among the ranks; 0 where it is alone."""
    return 0 if ranks is None else int(ranks.rank())


def add_over_ranks(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Each tensor becomes the sum of what it is on every rank, in place."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=ranks)


def take_from_first_rank(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Each tensor becomes what it is on the first rank, in place."""
    for tensor in tensors:
        dist.broadcast(tensor, dist.get_global_rank(ranks, 0), group=ranks)


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

    DistributedDataParallel queues the end of its averaging while the pass runs; what the queue itself queues is later.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
