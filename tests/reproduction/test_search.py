"""The search that is the same for every contestant."""

from __future__ import annotations

import math
from itertools import product

import pytest

from engram.reproduction.ladder import SEARCH_ROUNDS
from engram.reproduction.search import DIVERGED, Axis, Point, best_point, is_inside, propose, settings_at


def searched(peak: Point, sizes: tuple[int, ...], width: float = 1.0) -> dict[Point, float]:
    """The scores after some rounds on a hill with its top at a point."""
    scores: dict[Point, float] = {}
    for number in sizes:
        points = propose(len(peak), scores, number)
        scores |= {point: -math.dist(point, peak) / width for point in points}
    return scores


def test_values_are_powers_of_the_factor_with_two_digits() -> None:
    axis = Axis("strength", start=400, factor=3)
    assert [axis.value(k) for k in (-2, -1, -0.5, 0, 1)] == [44, 130, 230, 400, 1200]
    assert settings_at([axis, Axis("num_keys", 64, 2, whole=True)], (1, 0.5)) == {"strength": 1200, "num_keys": 91}
    assert Axis("num_keys", 2, 10, whole=True).value(-3) == 1
    part = Axis("head_dropout", 0.5, 3, fraction=True)
    assert [part.value(k) for k in (-3, -1, 0, 0.5, 1, 2, 8)] == [0.036, 0.25, 0.5, 0.63, 0.75, 0.9, 0.99985]


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_the_first_round_is_a_star_and_then_a_larger_one(num_axes: int) -> None:
    points = propose(num_axes, {}, 4 * num_axes + 1)
    assert points[0] == (0,) * num_axes
    assert sorted(map(math.hypot, *zip(*points, strict=True))) == [0, *[1] * 2 * num_axes, *[2] * 2 * num_axes]
    assert propose(num_axes, {}, 2 * num_axes + 1) == points[: 2 * num_axes + 1]


def test_later_rounds_go_beyond_an_end_and_between_points() -> None:
    assert propose(1, {(0,): 1, (1,): 2, (-1,): 0}, 3) == [(2,), (3,), (1.5,)]
    assert propose(1, {(0,): 2, (1,): 1, (-1,): 0}, 3) == [(0.5,), (-0.5,), (0.25,)]


@pytest.mark.parametrize("num_axes", [2, 3])
def test_no_point_is_tried_twice_and_every_round_has_its_number(num_axes: int) -> None:
    for peak in product(*((-3, 0, 1.3), (0, 2), (-1, 0))[:num_axes]):
        scores: dict[Point, float] = {}
        for number in SEARCH_ROUNDS:
            points = propose(num_axes, scores, number)
            assert len(points) == number
            assert len(set(points)) == number
            assert scores.keys().isdisjoint(points)
            scores |= {point: -math.dist(point, peak) for point in points}


@pytest.mark.parametrize("peak", [0, 0.4, 1, -1.6, 2.2, -3, 4])
def test_a_grid_of_eight_has_tried_both_sides_of_an_optimum_within_four_steps(peak: float) -> None:
    scores = searched((peak,), (5, 3))
    assert abs(best_point(scores)[0] - peak) <= 1
    assert is_inside(1, scores) == (abs(peak) < 4)


@pytest.mark.parametrize("peak", list(product((-1, 0, 1), repeat=3)))
def test_a_search_of_three_axes_finds_an_optimum_one_step_away_on_each(peak: Point) -> None:
    scores = searched(peak, (7, 5, 4, 4))
    assert math.dist(best_point(scores), peak) <= 1
    assert math.dist(best_point(scores), peak) <= math.dist((0, 0, 0), peak)


def test_a_best_point_is_inside_when_less_and_more_of_every_setting_were_tried() -> None:
    assert not is_inside(2, {(0, 0): 1, (1, 0): 0, (-1, 0): 0, (0, 1): 0})
    assert is_inside(2, {(0, 0): 1, (1, 0): 0, (-1, 0): 0, (0, 1): 0, (0, -0.5): 0})
    assert is_inside(2, {(0, 0): 1, (1, 1): 0, (-1, -1): 0}), "whatever the other settings were"


def test_a_small_round_first_goes_beyond_an_edge() -> None:
    scores = {(0, 0, 0): 1, (1, 0, 0): 0, (-1, 0, 0): 0, (0, 1, 0): 0, (0, -1, 0): 0, (0, 0, 1): 0, (0, 0, -1): 2}
    assert propose(3, scores, 1) == [(0, 0, -2)]


@pytest.mark.parametrize("peak", list(product((-1, 0, 1), repeat=3)))
def test_sixteen_settings_are_enough_to_have_an_optimum_one_step_away_inside(peak: Point) -> None:
    assert is_inside(3, searched(peak, (7, 5, 4)))


def test_a_point_that_diverged_is_never_the_best() -> None:
    scores = {(0,): DIVERGED, (1,): DIVERGED, (-1,): 0.1}
    assert best_point(scores) == (-1,)
    assert propose(1, scores, 1) == [(-2,)]
