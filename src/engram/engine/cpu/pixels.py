"""The inputs of batches, read in one pass over memory where the machine has a C compiler.

PyTorch needs four passes for pixels that are bytes: choose the samples, make floats of them, scale, permute.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from engram.data.batches import read_inputs
from engram.engine.cpu.compiled import TYPES, Function, Unavailable, compiled, is_plain


def read_chosen(inputs: Tensor, chosen: Tensor, permutation: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Some samples' inputs as `read_inputs` reads them, to the last digit.

    Args:
        inputs: of all samples.
        chosen: which samples, by their rows.
        permutation: the order in which the pixels of each input are read.
        dtype: of what is returned.

    Example:
        >>> read_chosen(torch.full((9, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([3]), None, torch.float32)
        tensor([[[[1., 1.], [1., 1.]]]])
    """
    read = _compiled_read(dtype) if dtype in TYPES and _fits(inputs, chosen, permutation) else None
    if read is None:
        return read_inputs(inputs.index_select(0, chosen), permutation, dtype)
    out = torch.empty((len(chosen), *inputs.shape[1:]), dtype=dtype)
    order = None if permutation is None else permutation.data_ptr()
    # By a name, so that it lives until C has read it: of two threads that ask at once, the cache keeps but one answer.
    values = _values(dtype)
    pointers = (inputs.data_ptr(), chosen.data_ptr(), order, values.data_ptr(), out.data_ptr())
    read(len(chosen), inputs[:1].numel(), *pointers)
    return out


def _fits(inputs: Tensor, chosen: Tensor, permutation: Tensor | None) -> bool:
    """Whether C can read them, and every number is the place of something: C does not check it, and PyTorch does."""
    if not is_plain(inputs, torch.uint8) or not _are_places(chosen, len(inputs)):
        return False
    width = inputs[:1].numel()
    return permutation is None or (len(permutation) == width and _are_places(permutation, width))


def _are_places(numbers: Tensor, size: int) -> bool:
    if not is_plain(numbers, torch.int64) or not len(numbers):
        return False
    low, high = numbers.aminmax()
    return int(low) >= 0 and int(high) < size


@lru_cache(maxsize=8)
def _values(dtype: torch.dtype) -> Tensor:
    """What `read_inputs` makes of each byte."""
    return read_inputs(torch.arange(256, dtype=torch.uint8), dtype=dtype)


@lru_cache(maxsize=8)
def _compiled_read(dtype: torch.dtype) -> Function | None:
    try:
        return compiled("read", dtype, 2, 0, 5)
    except Unavailable:
        return None
