"""A Result in a notebook: short in text, a table in HTML, figures that show themselves, and pandas."""

from __future__ import annotations

import builtins
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engram
from builders import custom_stream
from engram import InputError, Progress, Result, preset
from engram.common.errors import Divergence
from engram.report.layout import Table

NAN = np.nan
SMALL = {"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}
MATRICES = ([[0.9, 0.5], [0.5, 0.9]], [[0.9, 0.5], [0.6, 1.0]])


def make_result(method: str = "si", matrices: Any = MATRICES, trials: int = 2, **changes: Any) -> Result:
    accuracy = np.array(matrices).reshape(-1, 2, 2)
    rows = tuple(range(len(accuracy)))
    dynamics = [
        {"trial": k, "task": t, "epoch": 0, "step": s, "loss": 1.0, "eta": 0.1, "hebb_norm": 1.0, "alpha_norm": 1.0}
        for k in rows
        for t in range(2)
        for s in range(1000)
    ]
    config = preset("split-mnist", method, dataset="mnist-small", num_tasks=2, trials=trials, **changes)
    return Result(config, rows, accuracy, np.full((len(rows), 2), 0.5), dynamics, data=[SMALL])


# --- text and HTML


def test_a_repr_is_one_line_with_the_numbers_that_matter() -> None:
    # ACC 0.7 and 0.8: mean 0.75, SEM 0.05; BWT -0.4 and -0.3
    said = "<Result: si on split-mnist (mnist-small), 2 tasks, 2 of 2 trials, accuracy 75.00 ± 5.00 %, BWT -0.350>"
    assert repr(make_result()) == said
    assert str(make_result()) == said


def test_the_repr_of_an_unfinished_result_says_so() -> None:
    begin = "<Result: si on split-mnist (mnist-small), 2 tasks, "
    assert repr(make_result(matrices=[])) == f"{begin}0 of 2 trials>"
    one = make_result(matrices=[MATRICES[0], [[0.9, 0.5], [NAN, NAN]]])
    assert repr(one) == f"{begin}1 of 2 trials, accuracy 70.00 %, BWT -0.400>"


def test_a_progress_prints_no_outcomes() -> None:
    seen: list[str] = []
    stream = custom_stream()
    config = preset("custom", "dhp", epochs=1, trials=2, hidden=[4])
    engram.run(config, stream=stream, report=lambda progress: seen.append(repr(progress)))
    assert max(map(len, seen)) < 120
    assert repr(Progress(0.5, 1)) == "Progress(done=0.5, task=1, task_ended=False, note=None)"


def test_a_notebook_shows_the_summary_as_a_table_whose_text_is_escaped() -> None:
    result = make_result()
    html = result._repr_html_()
    assert html == result.summary()._repr_html_() == result.summary().to_html()
    assert html.count("<tr>") == 2
    assert "<td>75.00</td>" in html
    assert "&lt;b&gt;" in Table("<b>", ("a", "b"), [("c", "d")])._repr_html_()


def test_a_summary_is_the_table_of_the_command_line() -> None:
    made = make_result().summary(make_result("dhp+si"))
    assert [row[0] for row in made.rows] == ["si", "dhp+si"]
    assert f"{made}\n" == made.to_text()
    assert "75.00" in str(made)


def test_results_of_one_method_are_told_apart_by_their_position() -> None:
    made = make_result().summary(make_result(strength=2.0))
    assert [row[0] for row in made.rows] == ["0-si", "1-si"]


# --- figures


def test_a_figure_shows_itself_in_a_notebook_at_half_its_pixels() -> None:
    png, size = make_result().plot()._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == pytest.approx(2 * size["width"], abs=2)
    assert int.from_bytes(png[20:24], "big") == pytest.approx(2 * size["height"], abs=2)


@pytest.mark.parametrize("figure", ["accuracy", "first-and-latest", "matrices", "dynamics"])
def test_each_figure_can_be_saved(figure: str, tmp_path: Path) -> None:
    make_result("dhp+si").plot(make_result("dhp+mas"), figure=figure).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_figure_draws_every_result() -> None:
    (axes,) = make_result().plot(make_result("mas")).axes
    assert [line.get_label() for line in axes.get_lines()] == ["si (75.0)", "mas (75.0)"]


def test_a_figure_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(InputError, match=r"figure.*did you mean accuracy"):
        make_result().plot(figure="acuracy")
    with pytest.raises(InputError, match="none of these results has a trace"):
        make_result("si").plot(figure="dynamics")


# --- pairs


def test_a_comparison_is_by_trial_numbers() -> None:
    better = make_result("dhp+si", [[[0.9, 0.5], [0.7, 0.9]], [[0.9, 0.5], [0.9, 1.0]]])  # ACC 0.8 and 0.95
    ((label, points, interval, *_, pairs),) = better.compare(make_result()).rows
    # The differences are 10 and 15 points: mean 12.5, SEM 2.5, and t(1) = 12.706.
    assert (label, points, interval, pairs) == ("dhp+si − si", "+12.50", "[-19.27, +44.27]", "2")
    later = replace(make_result(), trials=(1, 2))
    ((_, points, *_, pairs),) = better.compare(later).rows
    assert (points, pairs) == ("+25.00", "1"), "trial 1 of both: 0.95 and 0.7"


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be paired: their seed differs \(0 and 3\)"):
        make_result().compare(make_result(seed=3))


def test_results_of_one_custom_stream_can_be_compared_if_they_were_run_together() -> None:
    configs = [preset("custom", method, epochs=1, trials=2, hidden=[4]) for method in ("finetune", "dhp")]
    finetune, dhp = engram.run_many(configs, stream=custom_stream())
    assert dhp.compare(finetune).rows[0][-1] == "2"
    with pytest.raises(InputError, match="whether two custom streams are the same"):
        dhp.compare(engram.run(configs[0], stream=custom_stream()))


# --- pandas


def test_without_pandas_a_frame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *given: Any, **options: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        return usual(name, *given, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'engram-cl\[pandas\]'"):
        make_result().to_frame()


def test_a_setting_that_does_not_exist_cannot_be_a_column() -> None:
    with pytest.raises(InputError, match="there is no setting"):
        make_result().to_frame(settings=("stength",))


def test_a_frame_has_a_row_for_each_trial() -> None:
    pytest.importorskip("pandas")
    frame = make_result(strength=2.0).to_frame(settings=("method", "strength"))
    assert list(frame.columns[:5]) == ["method", "strength", "trial", "diverged", "average_accuracy"]
    assert frame["average_accuracy"].tolist() == [0.7, 0.8]
    assert frame["strength"].tolist() == [2.0, 2.0]
    assert frame.groupby("method")["bwt"].mean().loc["si"] == pytest.approx(-0.35)


def test_the_frame_of_a_trial_that_diverged_has_numbers_where_they_are_missing() -> None:
    pytest.importorskip("pandas")
    result = make_result(matrices=[[[0.9, 0.5], [NAN, NAN]]], trials=1)
    frame = replace(result, diverged=[Divergence(0, 1, 5)]).to_frame()
    assert frame["diverged"].tolist() == [True]
    assert frame["average_accuracy"].dtype == float
    assert frame["average_accuracy"].isna().all()


def test_the_frame_of_matrices_has_a_row_for_each_accuracy() -> None:
    pytest.importorskip("pandas")
    frame = make_result().to_frame(matrix=True, settings=())
    assert list(frame.columns) == ["trial", "after", "task", "accuracy"]
    assert len(frame) == 2 * 3 * 2, "trials, rows from before the first task on, tasks"
    last = frame[(frame["after"] == 2) & (frame["task"] == 1)]
    assert last["accuracy"].tolist() == [0.5, 0.6]


@pytest.mark.parametrize("matrix", [False, True])
def test_columns_are_those_of_the_frame_even_without_trials(matrix: bool) -> None:
    pytest.importorskip("pandas")
    for result in (make_result(), make_result(matrices=[])):
        columns, frame = result.columns(matrix), result.to_frame(matrix=matrix, settings=())
        assert {name: column.tolist() for name, column in columns.items()} == frame.to_dict("list")
        assert {len(column) for column in columns.values()} == {len(frame)}
        assert all(frame[name].dtype == column.dtype for name, column in columns.items())


# --- nothing is imported before it is used


def test_a_result_imports_neither_matplotlib_nor_pandas_nor_the_report() -> None:
    program = (
        "import sys, engram; engram.Result; "
        "print([name for name in sys.modules if name.split('.')[0] in ('matplotlib', 'pandas', 'torch') "
        "or name.startswith('engram.report')])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
