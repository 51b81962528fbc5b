"""Figures are looked at through what was drawn on them, and as files."""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram.figures import accuracy_curves, accuracy_matrices, draw_all, first_and_latest, trace_dynamics
from engram.presets import preset
from engram.results import Divergence, Result

NAN = math.nan


def make_rows(trial: int, task: int, steps: list[int], value: float) -> list[dict[str, float]]:
    place = {"trial": trial, "task": task, "epoch": 0}
    return [
        {**place, "step": s, "loss": 0.1, "eta": value, "hebb_norm": 2 * value, "alpha_norm": 3 * value} for s in steps
    ]


def make_result(method: str = "dhp", *, trials: int = 2, diverged: bool = False, **changes: Any) -> Result:
    accuracy = np.array([[[0.9, NAN], [0.5, 0.8]], [[0.7, NAN], [0.6, 0.6]]])[:trials]
    if diverged:
        accuracy[-1, 1] = NAN
    rows = [row for k in range(trials) for n in range(2) for row in make_rows(k, n, [4, 9], 1.0 + k)]
    content: dict[str, Any] = {
        "config": preset("split-mnist", method, num_tasks=2, trials=trials, dataset="mnist-small"),
        "accuracy": accuracy,
        "untrained": np.full((trials, 2), 0.5),
        "dynamics": rows,
        "diverged": [Divergence(trials - 1, 1, 3)] if diverged else [],
    }
    return Result(**(content | changes))


def lost(method: str) -> Result:
    """Every trial diverged before anything was learned or recorded."""
    return make_result(
        method, accuracy=np.full((2, 2, 2), NAN), dynamics=[], diverged=[Divergence(k, 0, 1) for k in (0, 1)]
    )


def assert_is_png(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">2I", content[16:24])
    assert min(width, height) > 200
    assert len(content) > 5000  # more than an empty sheet


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Any:
    """A warning would land on the terminal of whoever asked for a figure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_every_figure_is_a_png(tmp_path: Path) -> None:
    paths = draw_all([make_result("finetune"), make_result("dhp")], tmp_path / "new" / "figures")
    assert [path.name for path in paths] == ["accuracy.png", "first-and-latest.png", "matrices.png", "dynamics.png"]
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    for path in paths:
        assert_is_png(path)


def test_methods_without_a_trace_have_no_dynamics(tmp_path: Path) -> None:
    assert [path.name for path in draw_all([make_result("si")], tmp_path)] == [
        "accuracy.png",
        "first-and-latest.png",
        "matrices.png",
    ]


@pytest.mark.parametrize(
    "results",
    [
        [make_result("dhp", diverged=True), make_result("finetune")],
        [make_result("dhp", trials=1)],
        [make_result("dhp", trials=1, diverged=True)],
        [lost("finetune"), make_result("dhp")],
        [lost("dhp"), make_result("finetune")],
        [lost("finetune"), lost("dhp")],
        [lost("dhp")],
    ],
    ids=["one diverged", "one trial", "that one diverged", "baseline lost", "dhp lost", "all lost", "alone and lost"],
)
def test_figures_are_drawn_whatever_became_of_the_trials(tmp_path: Path, results: list[Result]) -> None:
    for path in draw_all(results, tmp_path):
        assert path.stat().st_size > 0


def test_a_figure_may_be_drawn_anew(tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in draw_all([make_result("dhp")], tmp_path)}
    again = {path.name: path.read_bytes() for path in draw_all([make_result("dhp")], tmp_path)}
    assert first == again
    assert {path.name for path in tmp_path.iterdir()} == set(first)


def test_a_curve_is_the_mean_over_trials_in_percent() -> None:
    (axes,) = accuracy_curves([make_result("dhp"), make_result("si")]).axes
    assert [line.get_label() for line in axes.lines] == ["dhp (62.5)", "si (62.5)"]
    assert axes.lines[0].get_xdata().tolist() == [1, 2]
    assert axes.lines[0].get_ydata() == pytest.approx([80, 62.5])  # (0.9 + 0.7) / 2; (0.65 + 0.6) / 2


def test_a_band_is_one_standard_error_wide() -> None:
    (axes,) = accuracy_curves([make_result("dhp")]).axes
    vertices = axes.collections[0].get_paths()[0].vertices
    at_first = vertices[vertices[:, 0] == 1][:, 1]
    assert (at_first.min(), at_first.max()) == pytest.approx((70, 90))  # trials 0.9 and 0.7: SEM 0.1


def test_a_diverged_trial_is_left_out_of_the_curve() -> None:
    (axes,) = accuracy_curves([make_result("dhp", diverged=True)]).axes
    assert axes.lines[0].get_ydata() == pytest.approx([80, 65])


def test_plastic_methods_are_solid_and_the_others_dashed() -> None:
    (axes,) = accuracy_curves([make_result("dhp+si"), make_result("si")]).axes
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--"]
    assert axes.lines[0].get_color() == axes.lines[1].get_color()


def test_memory_is_on_the_left_and_flexibility_on_the_right() -> None:
    left, right = first_and_latest([make_result("dhp")]).axes
    assert left.lines[0].get_ydata() == pytest.approx([80, 55])
    assert right.lines[0].get_ydata() == pytest.approx([80, 70])
    assert "first task" in left.get_ylabel()
    assert "latest task" in right.get_ylabel()


def test_a_matrix_has_a_row_after_each_task_and_a_column_for_each() -> None:
    axes = accuracy_matrices([make_result("dhp")]).axes[0]
    shown = np.ma.filled(axes.images[0].get_array(), NAN)
    np.testing.assert_allclose(shown, [[80, NAN], [55, 70]])
    assert axes.get_title() == "dhp"
    assert axes.get_xlabel() == "accuracy on task"
    assert axes.get_ylabel() == "after learning task"


def test_the_look_ahead_above_the_diagonal_is_not_shown() -> None:
    result = make_result("dhp", accuracy=np.full((2, 2, 2), 0.5))
    shown = np.ma.filled(accuracy_matrices([result]).axes[0].images[0].get_array(), NAN)
    np.testing.assert_allclose(shown, [[50, NAN], [50, 50]])


def test_ten_methods_have_ten_matrices_on_one_scale() -> None:
    methods = ["finetune", "dhp", "si", "dhp+si", "ewc", "dhp+ewc", "online-ewc", "dhp+online-ewc", "mas", "dhp+mas"]
    figure = accuracy_matrices([make_result(method) for method in methods])
    drawn = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in drawn] == methods
    for axes in drawn:
        assert axes.images[0].get_clim() == pytest.approx((55, 100))


def test_dynamics_are_means_over_trials_against_tasks_learned() -> None:
    panels = trace_dynamics([make_result("dhp"), make_result("finetune")]).axes
    assert [axes.get_ylabel() for axes in panels] == ["η", "‖Hebb‖", "‖α‖"]
    for axes, factor in zip(panels, (1, 2, 3), strict=True):
        (curve,) = [line for line in axes.lines if line.get_label() == "dhp"]
        assert curve.get_xdata() == pytest.approx([0.5, 1, 1.5, 2])
        assert curve.get_ydata() == pytest.approx([1.5 * factor] * 4)


def test_trials_of_different_length_still_meet_in_one_mean() -> None:
    """Tasks of Imbalanced Permuted MNIST have another number of steps in every trial."""
    rows = make_rows(0, 0, [7, 15, 23, 30], 1.0) + make_rows(1, 0, [8, 17, 26, 34], 3.0)
    curve = trace_dynamics([make_result("dhp", dynamics=rows)]).axes[0].lines[0]
    assert curve.get_ydata() == pytest.approx([2.0] * len(curve.get_ydata()))


def test_a_trial_that_stopped_early_is_not_stretched_over_the_task() -> None:
    rows = make_rows(0, 0, [7, 15, 23, 31], 1.0) + make_rows(1, 0, [7], 3.0)
    curve = trace_dynamics([make_result("dhp", dynamics=rows, diverged=[Divergence(1, 0, 9)])]).axes[0].lines[0]
    assert curve.get_xdata() == pytest.approx([0.25, 0.5, 0.75, 1])
    assert curve.get_ydata() == pytest.approx([2, 1, 1, 1])
