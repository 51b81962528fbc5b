"""What the parts of `scaling.py` share: how far each goes, what it leaves, and how peak memory is measured."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from types import TracebackType
from typing import Any

import torch
from timing import Timing

from engram.report.figures.drawing import Drawing

NOT_MEASURED = float("nan")
MB = 1e6
MLPS, CNNS = (1, 2, 5, 8, 10, 20, 40, 80, 160, 320, 640), (1, 8, 10, 40, 80, 160)


@dataclass(frozen=True)
class Scale:
    """How far each part goes."""

    stacks: dict[str, tuple[int, ...]]  # sizes, by network
    seconds: float = 0.3  # for each stack
    seconds_of_heads: float = 0.3
    tasks: int = 1000
    ewc_tasks: int = 200  # it has a term per task, and stops early
    samples: int = 200  # of a task
    turns: int = 105  # tasks at the end, in which a newcomer takes turns with each method
    skipped: int = 5  # of these turns: they warm up
    classes: tuple[int, ...] = (10, 100, 1_000, 10_000)
    features: int = 512


ON_GPU = Scale({"mlp": MLPS, "cnn": CNNS})
ON_CPU = Scale({"mlp": MLPS[:8]}, seconds=1.0, seconds_of_heads=8.0)  # to 80: there models go one by one
QUICK = Scale({"mlp": (1, 2, 8)}, 0.01, 0.01, 16, 10, samples=20, turns=6, skipped=2, classes=(10, 100), features=32)


@dataclass(frozen=True)
class Setting:
    """Where and how far to measure; `report` is called with the fraction that is done."""

    device: torch.device
    dtype: torch.dtype
    scale: Scale
    report: Callable[[float, str], None]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Found:
    """What a part leaves: its curves with their numbers, and what its record holds besides."""

    drawing: Drawing
    about: dict[str, Any]


def ratio_in_turns(timing: Timing, other: Timing) -> float:
    """The median of the ratios of rounds that both took part in; a slow one takes part in fewer."""
    return statistics.median(a / b for a, b in zip(timing.rounds, other.rounds, strict=False))


def columns_of(row: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(row))


def cells_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """With six digits: no clock is more exact."""
    return [tuple(float(f"{c:.6g}") if isinstance(c, float) else c for c in astuple(row)) for row in rows]


def in_mb(num_bytes: float) -> str:
    return "—" if num_bytes != num_bytes else f"{num_bytes / MB:,.2f}"


class Peak:
    """The most memory of a GPU that was in use within it, beyond what was in use before."""

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes = NOT_MEASURED

    def __enter__(self) -> Peak:
        gc.collect()  # stacks are large
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
