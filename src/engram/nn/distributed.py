"""Data parallel training: which ranks share a model, and sums over all of them.

A module does not know the DistributedDataParallel around it. So each wrapper is noted when it is made: PyTorch calls a
hook whenever a module gets a submodule. Two hooks on the wrapper itself tell whether it is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from engram.common.errors import InputError
from engram.nn.modules import constant_for_compiler

Ranks = Any  # a ProcessGroup of at least two; a PyTorch without torch.distributed has no such name

_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
_running: WeakSet[DistributedDataParallel] = WeakSet()  # those whose forward pass is running
_around: WeakKeyDictionary[nn.Module, WeakSet[DistributedDataParallel]] = WeakKeyDictionary()  # until one more is noted


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without torch.compile and DistributedDataParallel around it: its weights have their own names.

    Args:
        model: any module, wrapped or not.

    Example:
        >>> bare(torch.compile(model)) is model
        True
    """
    while True:
        within = getattr(model, "_orig_mod", model)
        if isinstance(within, DistributedDataParallel):
            _note(within)
            within = within.module
        if within is model:
            return model
        model = within


def several_processes() -> bool:
    """Whether torch.distributed runs, with more processes than this one.

    Example:
        >>> several_processes()
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_of_call(module: nn.Module) -> Ranks | None:
    """The ranks that share the current call of a module; None if this process trains the module alone.

    A call that bypasses the DistributedDataParallel around the module is refused.

    Args:
        module: the module that is being called.

    Example:
        >>> ranks_of_call(head) is None  # in a single process
        True
    """
    if not several_processes():
        return None
    if torch.compiler.is_compiling():
        return _ranks_for_compiler(module)
    around = _wrappers_around(module)
    if around and not any(wrapper in _running for wrapper in around):
        raise InputError(
            f"this {type(module).__name__} is called past the DistributedDataParallel around it, so that its "
            "trace would be of this rank's samples alone: call what DistributedDataParallel(model) returned"
        )
    return _if_several(around)


@constant_for_compiler
def _ranks_for_compiler(module: nn.Module) -> Ranks | None:
    return _if_several(_wrappers_around(module))


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that train a model together: those of the DistributedDataParallel around it; None without one.

    Args:
        model: a model, or a part of one.

    Example:
        >>> ranks_of(model) is None  # in a single process
        True
    """
    return _if_several(_wrappers_around(model)) if several_processes() else None


def _if_several(wrappers: list[DistributedDataParallel]) -> Ranks | None:
    group = wrappers[0].process_group if wrappers else None
    return group if group is not None and group.size() > 1 else None


def _wrappers_around(model: nn.Module) -> list[DistributedDataParallel]:
    if model not in _around:  # the search goes through all modules, which is too long for every step
        _around[model] = WeakSet(found for found in _wrappers if any(part is model for part in found.modules()))
    return list(_around[model])


def _note_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, DistributedDataParallel):
        _note(parent)


def _note(wrapper: DistributedDataParallel) -> None:
    if wrapper not in _wrappers:
        _wrappers.add(wrapper)
        _around.clear()
        # Not decorators: they would import the compiler, which takes a second, together with this module.
        wrapper.register_forward_pre_hook(torch.compiler.disable(_start_forward))
        wrapper.register_forward_hook(torch.compiler.disable(_end_forward))


def _start_forward(wrapper: nn.Module, inputs: Any) -> None:
    if isinstance(wrapper, DistributedDataParallel):
        _running.add(wrapper)


def _end_forward(wrapper: nn.Module, inputs: Any, outputs: Any) -> None:
    if isinstance(wrapper, DistributedDataParallel):
        _running.discard(wrapper)


register_module_module_registration_hook(_note_registration)


def rank_of(ranks: Ranks | None) -> int:
    """The number of this process among the ranks; 0 where it is alone.

    Args:
        ranks: what `ranks_of` returned.

    Example:
        >>> rank_of(None)
        0
    """
    return 0 if ranks is None else int(ranks.rank())


def add_over_ranks(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Replace each tensor, in place, by its sum over all ranks.

    Args:
        tensors: on every rank the same shapes, in the same order.
        ranks: what `ranks_of` returned.

    Example:
        >>> add_over_ranks([total, count], ranks)
    """
    for tensor in tensors:
        dist.all_reduce(tensor, group=ranks)


def take_from_first_rank(tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Replace each tensor, in place, by that of the first rank.

    Args:
        tensors: on every rank the same shapes, in the same order.
        ranks: what `ranks_of` returned.

    Example:
        >>> take_from_first_rank([weight], ranks)
    """
    for tensor in tensors:
        dist.broadcast(tensor, dist.get_global_rank(ranks, 0), group=ranks)


class SumOverRanks(torch.autograd.Function):
    """Sums (C, m) and counts (C, 1), each over all ranks, in one message of C (m + 1) numbers.

    Every rank's loss depends on the sums of every rank. So the derivative of all losses with respect to a rank's own
    part is the sum of the derivatives that the ranks computed for the whole: one message of C m numbers in the
    backward pass.
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
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_sums = gradients[0].clone(memory_format=torch.contiguous_format)
        add_over_ranks([by_sums], ctx.ranks)
        return by_sums, None, None


def after_averaging(call: Callable[[], None]) -> None:
    """From within a backward pass: call something at its very end, when gradients have been averaged over the ranks.

    DistributedDataParallel queues the end of its averaging while the pass runs; what a queued call queues comes later.
    PyTorch has no public name for that queue.

    Args:
        call: what to call.

    Example:
        >>> weight.register_post_accumulate_grad_hook(lambda theta: after_averaging(check_gradients))
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(call))
