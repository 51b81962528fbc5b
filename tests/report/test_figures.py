"""Figures are looked at through what was drawn on them, and as files."""

from __future__ import annotations

import csv
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.text import Text

from builders import labelled, write_run
from engram.common.errors import Divergence, InputError
from engram.config.paper import PAPER_RESULTS
from engram.config.presets import preset
from engram.report.figures import (
    Drawing,
    accuracy_curves,
    accuracy_matrices,
    differences,
    draw,
    first_and_latest,
    paper_against_ours,
    parse_formats,
    save_drawings,
    sensitivity,
    to_svg,
    trace_dynamics,
    write_figures,
)
from engram.report.figures.drawing import INK
from engram.report.figures.ladder import SIDES, Differences, ladder_figure
from engram.report.figures.matrices import Panel, difference_map
from engram.report.pairs import pairs
from engram.runs.metrics import Estimate
from engram.runs.result import Result

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
        "trials": tuple(range(trials)),
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


def test_every_figure_is_a_png_a_pdf_and_a_csv(tmp_path: Path) -> None:
    paths = save_drawings(draw(labelled([make_result("finetune"), make_result("dhp")])), tmp_path / "new" / "figures")
    names = ["accuracy", "differences", "first-and-latest", "matrices", "dynamics"]
    assert [path.name for path in paths] == [f"{name}.{format}" for name in names for format in ("png", "pdf", "csv")]
    assert sorted(paths) == sorted((tmp_path / "new" / "figures").iterdir())
    for path in paths:
        if path.suffix == ".png":
            assert_is_png(path)
        elif path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-")
            assert path.read_bytes().rstrip().endswith(b"%%EOF")
        else:
            head, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
            assert rows
            assert {len(row) for row in rows} == {len(head)}


def test_only_the_formats_that_are_wanted_are_written(tmp_path: Path) -> None:
    save_drawings(draw(labelled([make_result("si")])), tmp_path, ["csv"])
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv"}


def test_a_list_of_formats_is_read_as_a_person_types_it() -> None:
    assert parse_formats("png, csv") == ["png", "csv"]
    with pytest.raises(InputError, match="gif"):
        parse_formats("png,gif")


def test_methods_without_a_trace_have_no_dynamics() -> None:
    assert [drawing.name for drawing in draw(labelled([make_result("si")]))] == [
        "accuracy",
        "first-and-latest",
        "matrices",
    ]


@pytest.mark.slow
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
    for path in save_drawings(draw(labelled(results)), tmp_path, ("png", "csv")):
        assert path.stat().st_size > 0


@pytest.mark.slow
def test_a_figure_may_be_drawn_anew(tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in save_drawings(draw(labelled([make_result("dhp")])), tmp_path)}
    again = {path.name: path.read_bytes() for path in save_drawings(draw(labelled([make_result("dhp")])), tmp_path)}
    assert first == again
    assert {path.name for path in tmp_path.iterdir()} == set(first)


def test_a_curve_is_the_mean_over_trials_in_percent() -> None:
    axes, *_ = accuracy_curves(labelled([make_result("dhp"), make_result("si")])).figure.axes
    assert [line.get_label() for line in axes.lines] == ["dhp (62.5)", "si (62.5)"]
    assert axes.lines[0].get_xdata().tolist() == [1, 2]
    assert axes.lines[0].get_ydata() == pytest.approx([80, 62.5])  # (0.9 + 0.7) / 2; (0.65 + 0.6) / 2


def test_a_band_is_one_standard_error_wide() -> None:
    axes, *_ = accuracy_curves(labelled([make_result("dhp")])).figure.axes
    vertices = axes.collections[0].get_paths()[0].vertices
    at_first = vertices[vertices[:, 0] == 1][:, 1]
    assert (at_first.min(), at_first.max()) == pytest.approx((70, 90))  # trials 0.9 and 0.7: SEM 0.1


def test_a_diverged_trial_is_left_out_of_the_curve() -> None:
    axes, *_ = accuracy_curves(labelled([make_result("dhp", diverged=True)])).figure.axes
    assert axes.lines[0].get_ydata() == pytest.approx([80, 65])


def test_plastic_methods_are_solid_and_the_others_dashed() -> None:
    axes, *_ = accuracy_curves(labelled([make_result("dhp+si"), make_result("si")])).figure.axes
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--"]
    assert axes.lines[0].get_color() == axes.lines[1].get_color()


def test_memory_is_above_and_flexibility_below() -> None:
    left, right, *_ = first_and_latest(labelled([make_result("dhp")])).figure.axes
    assert left.lines[0].get_ydata() == pytest.approx([80, 55])
    assert right.lines[0].get_ydata() == pytest.approx([80, 70])
    assert "first task" in left.get_ylabel()
    assert "latest task" in right.get_ylabel()


def test_a_matrix_has_a_row_after_each_task_and_a_column_for_each() -> None:
    axes = accuracy_matrices(labelled([make_result("dhp")])).figure.axes[0]
    shown = np.ma.filled(axes.collections[0].get_array(), NAN)
    np.testing.assert_allclose(shown, [[80, NAN], [55, 70]])
    assert axes.get_title() == "dhp"
    assert axes.get_xlabel() == "accuracy on task"
    assert axes.get_ylabel() == "after learning task"


def test_the_look_ahead_above_the_diagonal_is_not_shown() -> None:
    result = make_result("dhp", accuracy=np.full((2, 2, 2), 0.5))
    shown = np.ma.filled(accuracy_matrices(labelled([result])).figure.axes[0].collections[0].get_array(), NAN)
    np.testing.assert_allclose(shown, [[50, NAN], [50, 50]])


def test_ten_methods_have_ten_matrices_on_one_scale() -> None:
    methods = ["finetune", "dhp", "si", "dhp+si", "ewc", "dhp+ewc", "online-ewc", "dhp+online-ewc", "mas", "dhp+mas"]
    figure = accuracy_matrices(labelled([make_result(method) for method in methods])).figure
    drawn = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in drawn] == methods
    for axes in drawn:
        assert axes.collections[0].get_clim() == pytest.approx((55, 100))


def test_dynamics_are_means_over_trials_against_tasks_learned() -> None:
    panels = trace_dynamics(labelled([make_result("dhp"), make_result("finetune")])).figure.axes[:3]
    assert [axes.get_ylabel() for axes in panels] == ["η", "‖Hebb‖", "‖α‖"]
    for axes, factor in zip(panels, (1, 2, 3), strict=True):
        (curve,) = [line for line in axes.lines if line.get_label() == "dhp"]
        assert curve.get_xdata() == pytest.approx([0.5, 1, 1.5, 2])
        assert curve.get_ydata() == pytest.approx([1.5 * factor] * 4)


def test_trials_of_different_length_still_meet_in_one_mean() -> None:
    """Tasks of Imbalanced Permuted MNIST have another number of steps in every trial."""
    rows = make_rows(0, 0, [7, 15, 23, 30], 1.0) + make_rows(1, 0, [8, 17, 26, 34], 3.0)
    curve = trace_dynamics(labelled([make_result("dhp", dynamics=rows)])).figure.axes[0].lines[0]
    assert curve.get_ydata() == pytest.approx([2.0] * len(curve.get_ydata()))


def test_a_trial_that_stopped_early_is_not_stretched_over_the_task() -> None:
    rows = make_rows(0, 0, [7, 15, 23, 31], 1.0) + make_rows(1, 0, [7], 3.0)
    curve = (
        trace_dynamics(labelled([make_result("dhp", dynamics=rows, diverged=[Divergence(1, 0, 9)])]))
        .figure.axes[0]
        .lines[0]
    )
    assert curve.get_xdata() == pytest.approx([0.25, 0.5, 0.75, 1])
    assert curve.get_ydata() == pytest.approx([2, 1, 1, 1])


# --- the numbers beside each figure


def rows_of(drawing: Drawing) -> list[dict[str, str]]:
    return list(csv.DictReader(drawing.to_csv().splitlines()))


def of_paper(method: str = "dhp", *, trials: int = 2, **changes: Any) -> Result:
    """A result on the paper's own tasks, five of them."""
    generator = np.random.default_rng(len(method))
    accuracy = np.where(np.tri(5) > 0, 0.9 + 0.05 * generator.random((trials, 5, 5)), NAN)
    config = preset("split-mnist", method, trials=trials, **changes)
    return Result(config, tuple(range(trials)), accuracy, np.full((trials, 5), 0.5))


def test_the_csv_of_the_curves_is_the_results_own_numbers() -> None:
    result = make_result("dhp")
    rows = rows_of(accuracy_curves(labelled([result])))
    means = 100 * result.average_accuracy.mean(axis=0)
    sems = 100 * result.average_accuracy.std(axis=0, ddof=1) / math.sqrt(2)
    assert [float(row["accuracy %"]) for row in rows] == pytest.approx(means.tolist())
    assert [float(row["SEM"]) for row in rows] == pytest.approx(sems.tolist())
    assert [row["trials"] for row in rows] == ["2", "2"]


def test_the_csv_of_memory_and_flexibility_has_both() -> None:
    rows = rows_of(first_and_latest(labelled([make_result("dhp")])))
    values = {(row["task"], row["tasks learned"]): float(row["accuracy %"]) for row in rows}
    assert values == pytest.approx({("first", "1"): 80, ("first", "2"): 55, ("latest", "1"): 80, ("latest", "2"): 70})


def test_the_csv_of_the_matrices_is_their_lower_triangle() -> None:
    rows = rows_of(accuracy_matrices(labelled([make_result("dhp")])))
    found = {(row["after task"], row["on task"]): float(row["accuracy %"]) for row in rows}
    assert found == pytest.approx({("1", "1"): 80, ("2", "1"): 55, ("2", "2"): 70})


def test_the_csv_of_the_dynamics_has_every_record() -> None:
    rows = rows_of(trace_dynamics(labelled([make_result("dhp")])))
    assert len(rows) == 3 * 4
    assert {row["quantity"]: float(row["mean"]) for row in rows} == pytest.approx(
        {"eta": 1.5, "hebb_norm": 3, "alpha_norm": 4.5}
    )


def test_missing_values_are_empty_in_the_csv() -> None:
    (row, *_) = rows_of(accuracy_curves(labelled([make_result("dhp", trials=1)])))
    assert row["SEM"] == ""
    assert "nan" not in accuracy_curves(labelled([lost("dhp")])).to_csv()


def test_the_forest_shows_each_pair_with_its_interval_and_the_papers_difference() -> None:
    results = [of_paper("si"), of_paper("dhp+si")]
    (pair,) = pairs(labelled(results))
    drawing = differences([pair])
    (row,) = rows_of(drawing)
    expected = 100 * (results[1].average_accuracy[:, -1] - results[0].average_accuracy[:, -1]).mean()
    assert float(row["points"]) == pytest.approx(expected)
    assert float(row["low"]) < float(row["points"]) < float(row["high"])
    assert float(row["paper points"]) == pytest.approx(99.15 - 97.77)
    zero, interval, ours, paper = drawing.figure.axes[0].lines
    assert list(zero.get_xdata()) == [0, 0]
    assert list(interval.get_xdata()) == pytest.approx([float(row["low"]), float(row["high"])])
    assert ours.get_xdata()[0] == pytest.approx(expected)
    assert (paper.get_marker(), paper.get_markerfacecolor()) == ("D", "none")
    assert paper.get_xdata()[0] == pytest.approx(1.38)


def test_a_pair_on_other_data_has_no_difference_of_the_papers() -> None:
    (row,) = rows_of(differences(pairs(labelled([make_result("finetune"), make_result("dhp")]))))
    assert row["paper points"] == ""


def test_pairs_of_several_benchmarks_stand_under_their_names() -> None:
    split = pairs(labelled([make_result("finetune"), make_result("dhp"), make_result("si"), make_result("dhp+si")]))
    config = preset("permuted-mnist", "dhp", num_tasks=2, trials=2)
    permuted = [replace(pair, result=replace(pair.result, config=config)) for pair in split]
    axes = differences(split + permuted).figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["split-mnist", "permuted-mnist"]
    assert list(axes.get_yticks()) == [1, 2, 4, 5]


def test_long_names_of_a_pair_leave_room_for_the_axis() -> None:
    (pair,) = pairs(labelled([make_result("si"), make_result("dhp+si")]))
    long = replace(pair, label="dhp+si: strength 0.1, learning_rate 0.1", baseline_label="si: strength 0.1")
    figure = differences([long]).figure
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_position().width > 0.9
    assert [text.get_text() for text in axes.texts] == [f"{long.label}\n− {long.baseline_label}"]


def steps(paper: float | None = 1.5) -> list[Differences]:
    """A benchmark that was run on two rungs, and one that was run on the first."""
    above, around, below = (Estimate(mean, 0.01, mean - 0.02, mean + 0.02, 5) for mean in (0.05, 0.01, -0.05))
    first, second = "1: as published", "2: each its own strength"
    return [
        Differences("Split MNIST", "alone", {first: above, second: around}, paper),
        Differences("Split MNIST", "online-ewc", {first: below, second: around}, paper),
        Differences("Imbalanced Permuted MNIST", "alone", {first: above}, None),
    ]


def columns_of_the_ladder(found: list[Differences]) -> list[list[Axes]]:
    """The panels of each column, from top to bottom."""
    panels = ladder_figure(found, "linear").figure.axes
    columns = {panel.get_subplotspec().colspan.start for panel in panels}
    return [[panel for panel in panels if panel.get_subplotspec().colspan.start == k] for k in sorted(columns)]


def marks_of(panels: list[Axes], marker: str) -> list[Line2D]:
    return [line for axes in panels for line in axes.lines if line.get_marker() == marker]


def test_the_ladder_has_a_column_for_the_paper_and_for_each_rung() -> None:
    theirs, first, second = columns = columns_of_the_ladder(steps())
    titles = [panels[0].get_title().strip() for panels in columns]
    assert titles == ["the paper", "1: as\npublished", "2: each\nits own\nstrength"]
    names = [[tick.get_text() for tick in axes.get_yticklabels()] for axes in theirs]
    assert names == [["alone", "online-ewc"], ["alone"]], "a row of panels for each benchmark"
    assert [line.get_xdata()[0] for line in marks_of(theirs, "D")] == [1.5, 1.5]
    ours = marks_of(first, "o")
    assert [line.get_xdata()[0] for line in ours] == pytest.approx([5, -5, 5])
    assert [line.get_color() for line in ours] == [SIDES[side] for side in ("above zero", "below zero", "above zero")]
    assert {line.get_color() for line in marks_of(second, "o")} == {SIDES["around zero"]}
    assert len(columns_of_the_ladder(steps(paper=None))) == 2


def test_the_columns_of_a_benchmark_have_one_scale_with_room_for_their_numbers() -> None:
    for panels in zip(*columns_of_the_ladder(steps()), strict=True):
        limits = {axes.get_xlim() for axes in panels}
        assert len(limits) == 1
        ((left, right),) = limits
        ends = [
            x for axes in panels for line in axes.lines if line.get_color() in SIDES.values() for x in line.get_xdata()
        ]
        assert left <= min(ends)
        assert max(ends) < right - 0.4 * (right - left), "where numbers are"
        ticks = panels[0].get_xticks()
        assert 0 in ticks
        assert len(ticks) > 1, "zero alone says nothing about the size of a difference"


def two_sizes() -> list[Differences]:
    """A benchmark with differences ten times those of the other."""
    rung = "1: as published"
    large, small = Estimate(-0.1, 0.01, -0.12, -0.08, 5), Estimate(0.01, 0.001, 0.008, 0.012, 5)
    return [
        Differences("Vision datasets mixture", "alone", {rung: large}, 2.9),
        Differences("Vision datasets mixture", "si", {rung: small}, 0.5),
        Differences("Split MNIST", "alone", {rung: small}, 1.1),
    ]


def test_each_benchmark_has_its_own_scale_and_its_first_method_at_the_top() -> None:
    assert "Each benchmark has its own scale" in ladder_figure(two_sizes(), "linear").caption
    theirs, (wide, narrow) = columns_of_the_ladder(two_sizes())
    assert np.ptp(wide.get_xlim()) > 3 * np.ptp(narrow.get_xlim())
    assert wide.yaxis_inverted()
    assert [line.get_ydata()[0] for line in marks_of([wide], "o")] == [0, 1]
    heights = [axes.get_subplotspec().get_position(axes.figure).height for axes in (wide, narrow)]
    assert heights[0] == pytest.approx(2 * heights[1]), "as many rows as methods"
    assert "points of accuracy" in (narrow.get_xlabel(), theirs[-1].get_xlabel())


@pytest.mark.parametrize("size", [1e-6, 0.00099999, 0.0199, 0.1, 0.99])
@pytest.mark.parametrize("ratio", [0, 0.5, 1, 3])
def test_the_ticks_of_the_ladder_are_round_numbers_that_do_not_touch(size: float, ratio: float) -> None:
    """The differences reach so far below zero, and that many times as far above."""
    difference = Estimate(0, 1, -size, ratio * size, 5)
    found = [Differences("Split MNIST", "si", {f"{rung}": difference for rung in range(4)}, 100 * ratio * size)]
    figure = ladder_figure(found, "linear").figure
    figure.canvas.draw()
    for axes in figure.axes:
        left, right = axes.get_xlim()
        low, high = axes.get_xticks()
        assert 0 in (low, high), "and another, since zero alone says nothing about the size of a difference"
        assert left <= low < high <= right
        assert re.fullmatch("[1234568]0*", f"{high - low:.1e}".partition("e")[0].replace(".0", ""))
        one, other = (label.get_window_extent() for label in axes.get_xticklabels())
        if size >= 0.01:  # smaller ones are printed with more digits
            assert one.x1 < other.x0, (left, right, low, high)


def test_the_ladder_says_what_was_not_run_yet() -> None:
    columns = columns_of_the_ladder(steps())
    words = [[text.get_text() for axes in panels for text in axes.texts] for panels in columns]
    words = [[text for text in column if not text.strip("-").replace(".", "").isdigit()] for column in words]
    assert words == [["Split MNIST", "Imbalanced Permuted MNIST"], [], ["not\nrun yet"]]


def test_the_ladder_has_each_difference_as_a_number() -> None:
    texts = [[text for axes in panels for text in axes.texts] for panels in columns_of_the_ladder(steps())]
    numbers = [[text.get_text() for text in column if text.get_ha() == "right"] for column in texts]
    assert numbers == [["1.5", "1.5"], ["5.0", "-5.0", "5.0"], ["1.0", "1.0"]]


def test_the_ladder_shows_small_differences_with_one_more_digit_and_a_dash_where_one_method_was_not_run() -> None:
    rung = "1: as published"
    small = Estimate(0.0004, 0.0001, 0.0001, 0.0007, 5)
    found = [Differences("Split MNIST", "alone", {rung: small}, None), Differences("Split MNIST", "si", {}, None)]
    (axes,) = ladder_figure(found, "linear").figure.axes
    assert [text.get_text() for text in axes.texts if text.get_ha() == "right"] == ["0.04", "–"]


def test_the_ladder_marks_where_trials_diverged() -> None:
    first, second = "1: as published", "2: each its own strength"
    some, none = Estimate(-0.05, 0.01, -0.07, -0.03, 4), Estimate(math.nan, math.nan, math.nan, math.nan, 0)
    found = [Differences("Split MNIST", "si", {first: none, second: some}, None, {first, second})]
    drawing = ladder_figure(found, "linear")
    texts = [[text for text in axes.texts if text.get_ha() == "right"] for axes in drawing.figure.axes]
    assert [[text.get_text() for text in column] for column in texts] == [["diverged"], ["-5.0*"]]
    assert [text.get_color() for column in texts for text in column] == [INK, SIDES["below zero"]]
    assert "asterisk" in drawing.caption


def panels() -> list[Panel]:
    """Two heads at two rates and lengths: surely better, neither, surely worse; the last diverged, or was not run."""
    better, worse = Estimate(0.02, 0.001, 0.01, 0.03, 5), Estimate(-0.01, 0.001, -0.02, -0.001, 5)
    neither = Estimate(0.001, 0.01, -0.02, 0.02, 5)
    cells = {("1", "0.01"): better, ("1", "0.1"): neither, ("5", "0.01"): worse, ("5", "0.1"): None}
    return [Panel("dhp", "Split MNIST", cells), Panel("dhp", "Permuted MNIST", dict(list(cells.items())[:3]))]


def test_a_map_has_a_dot_where_an_interval_excludes_zero() -> None:
    drawing = difference_map(panels(), "Where", "epochs", "rate")
    left, right, _ = drawing.figure.axes
    assert [axes.get_title().strip() for axes in (left, right)] == ["Split MNIST", "Permuted\nMNIST"]
    assert left.get_title(loc="left") == "dhp"
    marks = [
        [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines] for axes in (left, right)
    ]
    assert marks[0] == [[(0.5, 0.5), (0.5, 1.5)], [(1.5, 1.5)]], "a cross where trials diverged"
    assert marks[1] == [[(0.5, 0.5), (0.5, 1.5)], []], "and none where nothing was run"
    (mesh,) = left.collections
    values = mesh.get_array().reshape(2, 2)
    assert values[0].tolist() == pytest.approx([2, 0.1])
    assert values[1, 0] == pytest.approx(-1)
    assert values.mask.tolist() == [[False, False], [False, True]]
    better, worse = (to_hex(mesh.cmap(mesh.norm(value))) for value in (9, -9))
    assert (better, worse) == ("#0072b2", "#d55e00"), "blue and orange"
    assert mesh.norm.vmax == pytest.approx(2), "nearly the largest"
    assert left.yaxis_inverted()
    assert [label.get_text() for label in left.get_yticklabels()] == ["1", "5"], "the first row is at the top"
    rows = rows_of(drawing)
    assert len(rows) == 7
    assert rows[3]["points"] == ""
    assert rows[0] == {
        "benchmark": "Split MNIST", "head": "dhp", "epochs": "1", "rate": "0.01",
        "points": "2.0", "low": "1.0", "high": "3.0", "pairs": "5",
    }  # fmt: skip


def test_the_words_of_figures_can_be_read_on_a_phone() -> None:
    """At least nine pixels high where a figure is as wide as a phone's screen without its margins."""
    results = labelled([make_result("si"), make_result("dhp+si")])
    for drawing in [ladder_figure(steps(), "linear"), difference_map(panels(), "", "epochs", "rate"), *draw(results)]:
        pixels = 358 / (72 * drawing.figure.get_figwidth())  # in a point
        texts = [text for text in drawing.figure.findobj(Text) if text.get_text() and text.get_visible()]
        smallest = min(text.get_fontsize() for text in texts)
        assert smallest * pixels >= (8 if drawing.name == "matrices" else 9), drawing.name


def test_the_papers_numbers_are_hollow_and_ours_filled() -> None:
    drawing = paper_against_ours(labelled([of_paper("mas"), of_paper("dhp+mas")]))
    rows = rows_of(drawing)
    assert [float(row["paper %"]) for row in rows] == [98.24, 98.43]
    hollow = [line for line in drawing.figure.axes[0].lines if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in hollow] == [98.24, 98.43]
    assert {line.get_markerfacecolor() for line in hollow} == {"none"}


def test_the_curves_end_in_the_papers_values_where_the_data_are_the_papers() -> None:
    def hollow(drawing: Drawing) -> list[float]:
        return [line.get_ydata()[0] for line in drawing.figure.axes[0].lines if line.get_marker() == "D"]

    assert hollow(accuracy_curves(labelled([of_paper("mas")]))) == [PAPER_RESULTS["split-mnist"]["mas"][0]]
    assert hollow(accuracy_curves(labelled([make_result("mas")]))) == []


def test_the_sensitivity_is_sorted_means_against_the_setting() -> None:
    by_eta = [of_paper("dhp", eta=eta) for eta in (0.1, 1e-4, 1e-3)]
    rows = rows_of(sensitivity(labelled(by_eta)))
    assert [float(row["eta"]) for row in rows] == [1e-4, 1e-3, 0.1]
    assert {row["eta of the preset"] for row in rows} == {"0.001"}


def test_an_eta_of_zero_has_its_place() -> None:
    axes = sensitivity(labelled([of_paper("dhp", eta=eta) for eta in (0.0, 1e-3, 0.1)])).figure.axes[0]
    assert axes.get_xlim()[0] == 0


@pytest.mark.parametrize("trials", [1, 2])
def test_figures_of_the_papers_tasks_are_drawn_without_a_standard_error_too(trials: int) -> None:
    results = [of_paper(method, trials=trials) for method in ("finetune", "dhp", "mas", "dhp+mas")]
    results[2].accuracy[:] = NAN
    for drawing in draw(labelled(results)):
        assert drawing.to_bytes("svg")
        assert "nan" not in drawing.to_csv()
        assert all("nan" not in cell for row in drawing.numbers.rows for cell in row)


# --- as SVG inside a page

DRAWN: list[Callable[[Mapping[str, Result]], Drawing]] = [
    accuracy_curves,
    accuracy_matrices,
    first_and_latest,
    trace_dynamics,
]


@pytest.mark.parametrize("make", DRAWN)
def test_an_svg_is_drawn_in_the_ink_of_its_page(make: Callable[[Mapping[str, Result]], Drawing]) -> None:
    svg = to_svg(make(labelled([make_result("dhp"), make_result("finetune")])), "one")
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#000000" not in svg
    assert "http" not in svg  # no namespaces, no metadata, nothing to fetch
    assert 'role="img"' in svg
    assert "<title>" in svg


@pytest.mark.parametrize("make", DRAWN)
def test_ids_of_two_svgs_do_not_meet(make: Callable[[Mapping[str, Result]], Drawing]) -> None:
    drawing = make(labelled([make_result("dhp")]))
    one, two = to_svg(drawing, "one"), to_svg(drawing, "two")
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (one, two)]
    assert not ids[0] & ids[1]
    wanted = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', one))
    assert wanted == ids[0]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["png", "pdf", "svg", "csv"])
def test_the_same_results_give_the_same_bytes(format: str) -> None:
    results = [make_result("dhp"), make_result("finetune")]
    first, again = ([drawing.to_bytes(format) for drawing in draw(labelled(results))] for _ in range(2))
    assert first == again


def unfinished(method: str) -> Result:
    """The first task of two learned, by the paper's own settings but for the number of trials."""
    config = preset("split-mnist", method, trials=2)
    accuracy = np.full((2, 5, 5), NAN)
    accuracy[:, 0, 0] = 0.9
    return make_result(method, config=config, accuracy=accuracy, untrained=np.full((2, 5), 0.5))


def test_nothing_is_drawn_of_an_end_that_was_not_reached() -> None:
    results = [unfinished("finetune"), unfinished("dhp")]
    drawn = {drawing.name: drawing for drawing in draw(labelled(results))}
    assert "paper" not in drawn
    assert "differences" not in drawn
    labels = [text.get_text() for text in drawn["accuracy"].figure.legends[0].get_texts()]
    assert labels == ["finetune (–)", "dhp (–)"]


# --- whatever a folder holds


def test_a_folder_of_runs_has_a_folder_of_figures_for_each(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, {"si": make_result("si", data=[])})
    paths = write_figures(tmp_path / "runs", tmp_path / "figures", ["csv"])
    assert {str(path.relative_to(tmp_path / "figures")) for path in paths} == {
        f"{run}/{name}.csv" for run in ("one", "two") for name in ("accuracy", "first-and-latest", "matrices")
    }


def test_a_run_without_results_has_no_figures(tmp_path: Path) -> None:
    write_run(tmp_path, {"si": make_result("si", data=[])}, finished=None)
    (tmp_path / "results.json").unlink()
    with pytest.raises(InputError, match=r"there are no results in .* yet"):
        write_figures(tmp_path, tmp_path / "figures")


def test_labels_of_one_method_are_distinguishable() -> None:
    results = {f"dhp: eta={eta:g}": of_paper("dhp", eta=eta) for eta in (0.1, 0.01, 0.001)}
    drawing = accuracy_curves(results)
    lines = [line for line in drawing.figure.axes[0].lines if line.get_marker() == "o"]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 3
    assert "Dashed" not in drawing.caption
    assert drawing.columns[0] == "settings"


def test_of_many_labels_the_most_accurate_are_drawn() -> None:
    results = {}
    for k in range(20):
        results[f"si: strength={k + 1}"] = of_paper("si", strength=k + 1.0)
        results[f"si: strength={k + 1}"].accuracy[:] = 0.5 + 0.01 * k
    drawn = {drawing.name: drawing for drawing in draw(results)}
    assert "Of 20 settings, the 16 with the highest accuracy." in drawn["accuracy"].caption
    labels = {row[0] for row in drawn["accuracy"].rows}
    assert labels == {f"si: strength={k}" for k in range(5, 21)}


def test_labels_with_different_numbers_of_tasks_are_drawn_together() -> None:
    for drawing in draw({"two": make_result("dhp"), "five": of_paper("dhp")}):
        assert drawing.to_bytes("svg")
        assert {len(row) for row in drawing.numbers.rows} == {len(drawing.numbers.columns)}


def test_the_axis_of_a_trace_that_hardly_changes_has_ticks_that_can_be_read() -> None:
    result = make_result("dhp")
    for k, row in enumerate(result.dynamics):
        row["alpha_norm"] = 0.36215 + 1e-7 * k
    axes = trace_dynamics({"dhp": result}).figure.axes[-1]
    low, high = axes.get_ylim()
    assert high - low >= 0.003
    axes.figure.draw_without_rendering()
    assert axes.yaxis.get_offset_text().get_text() == ""
    assert max(len(label.get_text()) for label in axes.get_yticklabels()) <= 6
