"""A search for the best settings that is the same for everybody: a lattice that has no edge, and a number of points.

A setting takes the values start · factor^k, for whole k first and for fractions of k later. The search starts
with a star: k = 0, and one step up and down on each axis. The second round is around the best of each axis together,
and each later one around the best point so far: first beyond it where nothing was tried yet. The best point lies
*inside* when smaller and larger values of every setting were tried: then no optimum is at an edge.
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
        fraction: whether values are fractions p: then p / (1 − p) has the ratio, and they end below 1.

    Example:
        >>> Axis("strength", start=100, factor=3).value(-1), Axis("head_dropout", 0.5, 3, fraction=True).value(2)
        (33.0, 0.9)
    """

    name: str
    start: float
    factor: float
    whole: bool = False
    fraction: bool = False

    def value(self, k: float) -> float:
        """The value at k, to two digits, so that tables can show it."""
        if self.fraction:
            odds = self.start / (1 - self.start) * self.factor**k
            part = float(f"{min(odds, 1) / (1 + odds):.2g}")  # the smaller of p and 1 − p
            return part if odds <= 1 else round(1 - part, 12)
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
    together = _best_of_each_axis(num_axes, scores)
    best = best_point(scores) if together in scores else together
    directions = [(axis, side) for axis in range(num_axes) for side in (1, -1)]
    # One step away, first where the best is at an edge; two steps where it is the last that was tried in a direction;
    # then between what was tried, on one axis, and at last on two.
    outwards = sorted(directions, key=lambda direction: _beyond(scores, best, *direction))
    points = [best, *(_moved(best, axis, side) for axis, side in outwards)]
    points += [_moved(best, axis, 2 * side) for axis, side in directions if not _tried(scores, best, axis, side)]
    points += [_moved(best, axis, side * nearer) for nearer in DISTANCES[1:] for axis, side in directions]
    points += [
        _moved(_moved(best, axis, side / 2), other, other_side / 2)
        for axis, side in directions
        for other, other_side in directions
        if axis < other
    ]
    return [point for point in dict.fromkeys(points) if point not in scores][:number]


def best_point(scores: Scores) -> Point:
    """The point with the highest score; the first of those that have it.

    Example:
        >>> best_point({(0,): 0.5, (1,): 0.6})
        (1,)
    """
    return max(scores, key=lambda point: scores[point])


def is_inside(num_axes: int, scores: Scores) -> bool:
    """Whether smaller and larger values than those of the best point were tried, on every axis.

    Example:
        >>> is_inside(1, {(0,): 0.5, (1,): 0.6})
        False
    """
    best = best_point(scores)
    return all(_beyond(scores, best, axis, side) for axis in range(num_axes) for side in (1, -1))


def _best_of_each_axis(num_axes: int, scores: Scores) -> Point:
    """On each axis the best value of the points that are 0 on all others."""

    def best_on(axis: int) -> float:
        on_axis = {point: score for point, score in scores.items() if not any((*point[:axis], *point[axis + 1 :]))}
        return best_point(on_axis)[axis]

    return tuple(best_on(axis) for axis in range(num_axes))


def _moved(point: Point, axis: int, distance: float) -> Point:
    return (*point[:axis], point[axis] + distance, *point[axis + 1 :])


def _tried(scores: Scores, best: Point, axis: int, side: int) -> bool:
    return any(_moved(best, axis, side * step) in scores for step in DISTANCES)


def _beyond(scores: Scores, best: Point, axis: int, side: int) -> bool:
    """Whether any point further on this side was tried."""
    return any(side * (point[axis] - best[axis]) > 0 for point in scores)
