"""A search for the best settings that is the same for everybody: a lattice that has no edge, and a number of points.

A setting takes the values start · factor^k, for whole k first and for fractions of k later. The search starts
with a star: k = 0, and one step up and down on each axis. Each later round is around the best point so far. It has
*closed* when points on both sides of the best one, on every axis, were tried and are not better: then no optimum lies
at an edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, ...]  # k, for each axis
Scores = Mapping[Point, float]
DISTANCES = (1, 0.5, 0.25, 0.125)
DIVERGED = -math.inf  # the score of a point at which a trial diverged


@dataclass(frozen=True)
class Axis:
    """A setting that is searched.

    Args:
        name: of the setting.
        start: its value in the middle of the star, above 0.
        factor: the ratio of neighbours, above 1.
        whole: whether values are whole numbers.

    Example:
        >>> Axis("strength", start=100, factor=3).value(-1)
        33.0
    """

    name: str
    start: float
    factor: float
    whole: bool = False

    def value(self, k: float) -> float:
        """The value at k, to two digits, so that tables can show it."""
        value = float(f"{self.start * self.factor**k:.2g}")
        return max(1, round(value)) if self.whole else value


def settings_at(axes: Sequence[Axis], point: Point) -> dict[str, float]:
    """The settings at a point, by name.

    Example:
        >>> settings_at([Axis("learning_rate", 0.01, 3)], (1,))
        {'learning_rate': 0.03}
    """
    return {axis.name: axis.value(k) for axis, k in zip(axes, point, strict=True)}


def propose(num_axes: int, scores: Scores, number: int) -> list[Point]:
    """The points of the next round.

    Args:
        num_axes: how many settings are searched.
        scores: of the points tried so far, in the order in which they were tried.
        number: at most how many points.

    Example:
        >>> propose(1, {(0,): 0.5, (1,): 0.6, (-1,): 0.4}, 3)  # the best is at an end
        [(2,), (3,), (1.5,)]
    """
    if not scores:
        origin = (0,) * num_axes
        near = [_moved(origin, axis, side) for axis in range(num_axes) for side in (1, -1)]
        far = [_moved(origin, axis, 2 * side) for axis in range(num_axes) for side in (1, -1)]
        return [origin, *near, *far][:number]
    best = best_point(scores)
    directions = [(axis, side) for axis in range(num_axes) for side in (1, -1)]
    # One step away; two where the best is the last that was tried in a direction; then between what was tried.
    points = [_moved(best, axis, side) for axis, side in directions]
    points += [_moved(best, axis, 2 * side) for axis, side in directions if not _tried(scores, best, axis, side)]
    points += [_moved(best, axis, side * nearer) for nearer in DISTANCES[1:] for axis, side in directions]
    return [point for point in dict.fromkeys(points) if point not in scores][:number]


def best_point(scores: Scores) -> Point:
    """The point with the highest score; the first of those that have it.

    Example:
        >>> best_point({(0,): 0.5, (1,): 0.6})
        (1,)
    """
    return max(scores, key=lambda point: scores[point])


def is_closed(num_axes: int, scores: Scores) -> bool:
    """Whether points on both sides of the best one, on every axis and at most one step away, were tried.

    Example:
        >>> is_closed(1, {(0,): 0.5, (1,): 0.6})
        False
    """
    best = best_point(scores)
    return all(_tried(scores, best, axis, side) for axis in range(num_axes) for side in (1, -1))


def _moved(point: Point, axis: int, distance: float) -> Point:
    return (*point[:axis], point[axis] + distance, *point[axis + 1 :])


def _tried(scores: Scores, best: Point, axis: int, side: int) -> bool:
    return any(_moved(best, axis, side * step) in scores for step in DISTANCES)
