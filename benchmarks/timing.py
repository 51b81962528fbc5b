"""Times that can be compared: contestants take turns, round after round, so that a slow moment affects them all."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engram.data.batches import LONGEST_PIECE

ROUNDS = 15
FEWEST_ROUNDS = 3  # for slow contestants
FEWEST_STEPS = 8  # at a time: some work is done once for several steps
Take = Callable[[int], float]  # takes so many training steps and returns the seconds they took


@dataclass(frozen=True)
class Contestant:
    """Something that takes training steps, of one model or of several at once."""

    name: str
    size: int  # models
    take: Take


@dataclass(frozen=True)
class Timing:
    """Seconds per step in each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The lower quartile: whatever else the machine does can only make a step slower."""
        return self._quartiles()[0]

    @property
    def spread(self) -> float:
        """How far above it the median lies, as a fraction of it."""
        low, middle, _ = self._quartiles()
        return middle / low - 1

    def _quartiles(self) -> list[float]:
        return statistics.quantiles(self.rounds, n=4, method="inclusive")


def timed(work: Callable[[int], object], device: torch.device) -> Take:
    """The work with a clock that waits until a GPU has finished."""

    def take(num_steps: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        work(num_steps)
        synchronize(device)
        return time.perf_counter() - start

    return take


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    contestants: Sequence[Contestant],
    seconds: float,
    report: Callable[[float], None] = lambda done: None,
    fewest_steps: int = FEWEST_STEPS,
) -> list[Timing]:
    """The time of a step of each contestant, over several rounds.

    Args:
        contestants: who takes turns.
        seconds: how long each contestant is measured in all. A slow one takes part in fewer rounds.
        report: called with the fraction of the turns that are done.
        fewest_steps: at a time.
    """
    steps = [_steps_within(contestant.take, seconds / ROUNDS, fewest_steps) for contestant in contestants]
    rounds: list[list[float]] = [[] for _ in contestants]
    spent = [0.0] * len(contestants)
    for number in range(ROUNDS):
        for i, contestant in enumerate(contestants):
            if number < FEWEST_ROUNDS or spent[i] < seconds:
                took = contestant.take(steps[i])
                rounds[i].append(took / steps[i])
                spent[i] += took
            report((number + (i + 1) / len(contestants)) / ROUNDS)
    return [Timing(tuple(times)) for times in rounds]


def _steps_within(take: Take, seconds: float, fewest_steps: int) -> int:
    """How many steps to take at a time, at most as many as a piece of an epoch has."""
    take(2)  # warms up
    return max(fewest_steps, min(LONGEST_PIECE, int(2 * seconds / take(2))))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The memory of tensors, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def busy_notes() -> list[str]:
    """A warning where other programs keep this machine busy."""
    load, num_cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= num_cores / 2:
        return []
    return [f"The machine was busy (a load of {load:.1f} on {num_cores} cores), so even ratios are rough"]


def hardware(device: str) -> str:
    """The name of the GPU that was measured, or of the processor."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
