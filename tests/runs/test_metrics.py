"""Metrics are worked out by hand, or by the slowest possible loop over the formula in the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engram.runs.metrics import (
    Estimate,
    average_accuracy,
    backward_transfer,
    estimate,
    first_task,
    forgetting,
    forward_transfer,
    latest_task,
    paired_difference,
)

NAN = math.nan

# R[i, j]: accuracy on task j after learning task i. The entry above the diagonal is the look ahead.
R = np.array(
    [
        [0.9, 0.2, NAN],
        [0.6, 0.8, 0.3],
        [0.4, 0.7, 1.0],
    ]
)

fractions = st.floats(0, 1, allow_nan=False)
stacks = st.tuples(st.integers(1, 4), st.integers(1, 5)).flatmap(
    lambda s: arrays(float, (s[0], s[1], s[1]), elements=fractions)
)


def test_average_accuracy_is_over_the_tasks_learned_so_far() -> None:
    assert average_accuracy(R) == pytest.approx([0.9, (0.6 + 0.8) / 2, (0.4 + 0.7 + 1.0) / 3])


def test_first_task_is_the_first_column() -> None:
    assert first_task(R).tolist() == [0.9, 0.6, 0.4]


def test_latest_task_is_the_diagonal() -> None:
    assert latest_task(R).tolist() == [0.9, 0.8, 1.0]


def test_backward_transfer_is_the_papers_formula() -> None:
    # 1/(T-1) * sum over i < T of R[T, i] - R[i, i], by hand: ((0.4 - 0.9) + (0.7 - 0.8)) / 2
    assert backward_transfer(R) == pytest.approx(-0.3)


def test_backward_transfer_of_a_transposed_matrix_is_another() -> None:
    # ((NaN - 0.9) + ...) with what was not measured; with a full matrix: ((0.1 - 0.9) + (0.3 - 0.8)) / 2
    full = np.where(np.isnan(R), 0.1, R)
    assert backward_transfer(full) == pytest.approx(-0.3)
    assert backward_transfer(full.T) == pytest.approx(-0.65)
    assert np.isnan(backward_transfer(R.T))


def test_average_accuracy_of_a_transposed_matrix_is_another() -> None:
    full = np.where(np.isnan(R), 0.1, R)
    assert average_accuracy(full.T)[-1] == pytest.approx((0.1 + 0.3 + 1.0) / 3)


def test_backward_transfer_above_zero_is_help_for_earlier_tasks() -> None:
    assert backward_transfer([[0.5, 0.5], [0.75, 0.5]]) == pytest.approx(0.25)


def test_forgetting_is_measured_from_the_best_there_was() -> None:
    # task 1 was best after task 2 (0.95), task 2 after itself (0.7): ((0.95 - 0.5) + (0.7 - 0.6)) / 2
    matrix = [[0.9, NAN, NAN], [0.95, 0.7, NAN], [0.5, 0.6, 0.8]]
    assert forgetting(matrix) == pytest.approx(0.275)
    assert backward_transfer(matrix) == pytest.approx(-0.25)


def test_forgetting_counts_a_gain_at_the_end_as_negative() -> None:
    assert forgetting([[0.5, NAN], [0.75, 1.0]]) == pytest.approx(-0.25)


def test_forward_transfer_is_the_look_ahead_less_the_untrained_network() -> None:
    # ((R[0, 1] - b[1]) + (R[1, 2] - b[2])) / 2; b[0] takes no part
    assert forward_transfer(R, [0.99, 0.1, 0.05]) == pytest.approx(((0.2 - 0.1) + (0.3 - 0.05)) / 2)


def test_a_single_task_has_an_accuracy_but_nothing_to_forget() -> None:
    assert average_accuracy([[0.5]]).tolist() == [0.5]
    for value in (backward_transfer([[0.5]]), forgetting([[0.5]]), forward_transfer([[0.5]], [0.1])):
        assert value.shape == ()
        assert np.isnan(value)


@settings(max_examples=60, deadline=None)
@given(stacks)
def test_leading_axes_equal_a_loop_over_trials(stack: np.ndarray) -> None:
    for function in (average_accuracy, first_task, latest_task, backward_transfer, forgetting):
        np.testing.assert_array_equal(function(stack), np.stack([function(matrix) for matrix in stack]))
    untrained = stack[:, 0]
    expected = np.stack([forward_transfer(m, b) for m, b in zip(stack, untrained, strict=True)])
    np.testing.assert_array_equal(forward_transfer(stack, untrained), expected)


@settings(max_examples=60, deadline=None)
@given(stacks)
def test_backward_transfer_equals_the_slowest_loop(stack: np.ndarray) -> None:
    num_tasks = stack.shape[-1]
    for matrix, value in zip(stack, backward_transfer(stack), strict=True):
        if num_tasks == 1:
            assert math.isnan(value)
            continue
        total = 0.0
        for i in range(num_tasks - 1):
            total += matrix[num_tasks - 1][i] - matrix[i][i]
        assert value == pytest.approx(total / (num_tasks - 1), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(stacks)
def test_forgetting_is_at_least_the_loss_that_bwt_sees(stack: np.ndarray) -> None:
    if stack.shape[-1] > 1:
        assert (forgetting(stack) >= -backward_transfer(stack) - 1e-12).all()


def test_two_leading_axes_keep_their_shape() -> None:
    stack = np.broadcast_to(np.where(np.isnan(R), 0, R), (2, 5, 3, 3))
    assert average_accuracy(stack).shape == (2, 5, 3)
    assert backward_transfer(stack).shape == (2, 5)


@pytest.mark.parametrize("matrix", [[0.5], [[0.5, 0.5]], [[]], np.zeros((0, 0)), 0.5])
def test_matrices_that_are_not_square_are_refused(matrix: object) -> None:
    with pytest.raises(ValueError, match="square"):
        average_accuracy(matrix)


def test_a_diverged_trial_is_left_out_of_the_estimate() -> None:
    whole = np.array([[0.9, 0.1], [0.7, 0.8]])
    diverged = np.array([[0.9, 0.1], [NAN, NAN]])
    stack = np.stack([whole, diverged, whole - 0.1])
    final = estimate(average_accuracy(stack)[:, -1])
    assert final.num_trials == 2
    assert final.mean == pytest.approx(0.7)
    assert estimate(backward_transfer(stack)).num_trials == 2
    assert estimate(first_task(stack)[:, 0]).num_trials == 3  # it had learned the first task


def test_an_estimate_is_numpys_mean_and_scipys_error_and_interval() -> None:
    values = [0.71, 0.74, 0.69, 0.80, 0.77]
    made = estimate(values)
    low, high = scipy.stats.t.interval(0.95, 4, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert made.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert made.sem == pytest.approx(scipy.stats.sem(values), rel=1e-12)
    assert (made.low, made.high) == pytest.approx((low, high), rel=1e-12)
    assert made.num_trials == 5


def test_the_interval_of_two_trials_is_by_hand() -> None:
    # mean 2, standard deviation sqrt(2), SEM 1; Student's t of one degree of freedom at 97.5% is 12.7062
    assert estimate([1.0, 3.0]) == Estimate(
        2.0, pytest.approx(1), pytest.approx(-10.7062, abs=1e-4), pytest.approx(14.7062, abs=1e-4), 2
    )


def test_a_single_trial_has_a_mean_but_no_error() -> None:
    made = estimate([0.5])
    assert (made.mean, made.num_trials) == (0.5, 1)
    assert all(math.isnan(value) for value in (made.sem, made.low, made.high))


@pytest.mark.parametrize("values", [[], [NAN], [NAN, math.inf]])
def test_no_finite_trial_is_no_estimate(values: list[float]) -> None:
    made = estimate(values)
    assert made.num_trials == 0
    assert all(math.isnan(value) for value in (made.mean, made.sem, made.low, made.high))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(fractions, fractions), min_size=2, max_size=8))
def test_a_paired_difference_is_the_estimate_of_the_differences(pairs: list[tuple[float, float]]) -> None:
    values, baseline = zip(*pairs, strict=True)
    assert paired_difference(values, baseline) == estimate([a - b for a, b in pairs])


def test_a_paired_difference_agrees_with_scipys_paired_test() -> None:
    values, baseline = [0.80, 0.70, 0.93, 0.66], [0.78, 0.69, 0.88, 0.65]
    made = paired_difference(values, baseline)
    interval = scipy.stats.ttest_rel(values, baseline).confidence_interval(0.95)
    assert (made.low, made.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_pairs_are_tighter_than_strangers_when_trials_share_their_noise() -> None:
    shared = np.array([0.00, 0.10, -0.08, 0.05, -0.12])
    baseline = 0.7 + shared
    values = 0.72 + shared + np.array([0.001, -0.001, 0.002, -0.002, 0.0])
    paired = paired_difference(values, baseline)
    unpaired_sem = math.hypot(estimate(values).sem, estimate(baseline).sem)
    assert paired.mean == pytest.approx(0.02)
    assert paired.low > 0  # a difference that is there
    assert paired.sem < unpaired_sem / 20  # and that strangers would not show
    assert estimate(values).low < estimate(baseline).mean


def test_a_pair_with_a_missing_side_is_left_out() -> None:
    made = paired_difference([0.5, NAN, 0.7, 0.9], [0.4, 0.1, NAN, 0.6])
    assert made.num_trials == 2
    assert made.mean == pytest.approx((0.1 + 0.3) / 2)


def test_trials_without_a_partner_are_left_out() -> None:
    assert paired_difference([0.5, 0.7, 0.9], [0.4, 0.4]).num_trials == 2
