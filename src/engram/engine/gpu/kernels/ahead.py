"""Kernels that are compiled ahead, side by side. Triton alone compiles each when it is first called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from torch import Tensor

_seen: list[tuple[Any, ...]] | None = None  # the launches so far, where none takes place


class Kernel:
    """A Triton kernel: `kernel[grid](...)` launches it.

    Example:
        >>> @Kernel
        ... def _double(x, BLOCK: tl.constexpr):
        ...     place = tl.arange(0, BLOCK)
        ...     tl.store(x + place, 2 * tl.load(x + place))
    """

    def __init__(self, function: Callable[..., None]):
        self.compiled = triton.jit(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _seen is None:
            return self.compiled[grid]
        launches = _seen
        return lambda *arguments, **options: launches.append((self.compiled, grid, arguments, options))


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within the `with` block kernels are not launched, so results are not computed. At its end they are compiled.

    Example:
        >>> with compiled_ahead():
        ...     section.step(inputs, targets, classes, rows)
    """
    global _seen
    launches: list[tuple[Any, ...]] = []
    _seen = launches
    try:
        yield
    finally:
        _seen = None
    distinct = {(id(launch[0]), *map(_kind, launch[2]), *launch[3].items()): launch for launch in launches}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_compile, distinct.values()))


def _kind(argument: Any) -> Any:
    """What Triton compiles for: of a tensor, its type and whether its address is a multiple of 16."""
    return (argument.dtype, argument.data_ptr() % 16 == 0) if isinstance(argument, Tensor) else argument


def _compile(launch: tuple[Any, ...]) -> None:
    compiled, grid, arguments, options = launch
    if not isinstance(compiled, triton.JITFunction):  # Triton's interpreter compiles nothing
        return
    with suppress(Exception):  # the launch itself will fail too, and say why
        torch.cuda.set_device(next(argument.device for argument in arguments if isinstance(argument, Tensor)))
        compiled.warmup(*arguments, grid=grid, **options).run  # noqa: B018 - asking for it compiles the launcher
