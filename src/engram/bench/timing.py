"""Times that can be compared: the contestants take turns, round after round, so that a slow moment hits them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engram.data.batches import LONGEST_PIECE

ROUNDS = 15
FEWEST_ROUNDS = 3  # for who takes long
FEWEST_STEPS = 8  # at a time: some work is done once for several
Take = Callable[[int], float]  # takes so many training steps and returns how many seconds they took


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
        """The lower quartile: what else a machine does can only make a step slower."""
        return self._quartiles()[0]

    @property
    def spread(self) -> float:
        """How far above that the median lies, as a share of it."""
        low, middle, _ = self._quartiles()
        return middle / low - 1

    def _quartiles(self) -> list[float]:
        return statistics.quantiles(self.rounds, n=4, method="inclusive")


def timed(work: Callable[[int], object], device: torch.device) -> Take:
    """The work with a clock, which waits for a GPU to be done."""

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


def measure(contestants: Sequence[Contestant], seconds: float, report: Callable[[float], None]) -> list[Timing]:
    """The time of a step of each, over several rounds; `report` is told the share of them that is done.

    `seconds` is what a contestant has for all its rounds. Who needs more plays in fewer.
    """
    steps = [_steps_within(contestant.take, seconds / ROUNDS) for contestant in contestants]
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


def _steps_within(take: Take, seconds: float) -> int:
    """How many steps to take at a time, at most as many as a piece of an epoch has."""
    take(2)  # warms up, and readies what is made only once
    return max(FEWEST_STEPS, min(LONGEST_PIECE, int(2 * seconds / take(2))))
