"""Giving up what is clearly worse: all points have a trial, the better third of them three, and so on to all trials.

Trials are the steps of this, not tasks: what a network knows after half of its tasks says little about what it will
have forgotten after all of them, while each trial is a whole measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

FACTOR = 3  # so many times as many trials for the best 1/3
FEWEST = 2  # points that are never given up, so that the best has one beside it

Name = TypeVar("Name")


def rungs(trials: int, prune: bool) -> list[int]:
    """After how many trials points are given up, up to all: 1, 3 and 10 for ten trials."""
    found = [trials]
    while prune and found[-1] >= FACTOR:
        found.append(found[-1] // FACTOR)
    return found[::-1]


def num_survivors(num_points: int) -> int:
    """How many points go on to the next rung."""
    return min(num_points, max(FEWEST, -(-num_points // FACTOR)))


def survivors(scores: Mapping[Name, float]) -> list[Name]:
    """The best points, in their own order; of equal ones the earlier."""
    names = list(scores)
    best = sorted(names, key=lambda name: -scores[name])[: num_survivors(len(names))]
    return [name for name in names if name in best]


def num_trials(num_points: int, trials: int, prune: bool) -> int:
    """Of so many points together, by the time that the last has all its trials."""
    total, done = 0, 0
    for rung in rungs(trials, prune):
        total += num_points * (rung - done)
        done, num_points = rung, num_survivors(num_points)
    return total
