"""A sweep has its own table, figure and page, whether it is finished or not."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import check_page

from builders import write_run
from engram.common.errors import Divergence
from engram.config.presets import CHOOSING, preset
from engram.report.figures import draw_run, write_figures
from engram.report.html import run_page
from engram.report.sweep_table import (
    MOST_ROWS,
    how_searched,
    is_sweep,
    points_csv,
    run_tables,
    sweep_table,
    sweep_tables,
    tried_in,
    verdict,
)
from engram.reproduction.page import write_report
from engram.runs.format import FORMAT
from engram.runs.result import Result
from engram.runs.run import Run, read_run
from engram.runs.sweep.axes import parse_axis, parse_choice
from engram.runs.sweep.points import Tried
from engram.runs.sweep.run import Plan

STRENGTHS = (0.1, 1.0, 10.0)
BASE = {"dataset": "mnist-small", "num_tasks": 2, "trials": 3, **CHOOSING}


def make_result(method: str, strength: float, final: float, first_trial: int, trials: int) -> Result:
    config = preset(
        "split-mnist", method, **BASE | {"strength": strength, "trials": trials, "first_trial": first_trial}
    )
    numbers = tuple(range(first_trial, first_trial + trials))
    accuracy = np.array([[[0.9, np.nan], [final + 0.01 * trial, 0.8]] for trial in numbers])
    return Result(config, numbers, accuracy, np.full((trials, 2), 0.5))


def write_sweep(folder: Path, finished: bool = True) -> Path:
    """Two methods with three strengths each: all had trial 0, and the better two of them trials 1 and 2."""
    finals = {0.1: 0.5, 1.0: 0.7, 10.0: 0.6}
    for name, strengths, first, trials in (("1-1", STRENGTHS, 0, 1), ("1-3", (1.0, 10.0), 1, 2)):
        results = {
            f"{method}: strength {strength:g}": make_result(method, strength, finals[strength], first, trials)
            for method in ("si", "dhp+si")
            for strength in strengths
        }
        write_run(folder / "runs" / name, results)
    bases = [preset("split-mnist", method, **BASE).to_dict() for method in ("si", "dhp+si")]
    content = {"format": FORMAT, "command": "engram sweep", "axes": ["strength=0.1,1,10"], "bases": bases}
    if finished:
        content["finished"] = "2026-01-31T12:05:00+00:00"
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def test_a_sweep_has_a_table_for_each_method_with_the_best_first(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    assert is_sweep(run)
    si, dhp = run_tables(run)
    assert si.title == "si on split-mnist (mnist-small), 3 points"
    assert dhp.title.startswith("dhp+si ")
    # the best has 0.75, 0.755 and 0.76, so 75.50 on average; the second is 5 points behind in each trial
    assert si.rows == [
        ("strength 1", "75.50 ± 0.29", "3", "+0.00", "[+0.00, +0.00]", "best"),
        ("strength 10", "70.50 ± 0.29", "3", "-5.00", "[-5.00, -5.00]", "finished"),
        ("strength 0.1", "65.00 ± –", "1", "-10.00", "[–, –]", "dropped"),
    ]


def test_points_of_an_unfinished_sweep_are_not_given_up(tmp_path: Path) -> None:
    si, _ = run_tables(read_run(write_sweep(tmp_path, finished=False)))
    assert [row[-1] for row in si.rows] == ["best", "finished", "so far"]


def test_every_point_is_in_the_csv(tmp_path: Path) -> None:
    tried = [each for own in tried_in(read_run(write_sweep(tmp_path))).values() for each in own]
    rows = list(csv.DictReader(points_csv(tried).splitlines()))
    assert [(row["method"], row["strength"], row["trials"], row["state"]) for row in rows][:3] == [
        ("si", "0.1", "1", "dropped"),
        ("si", "1", "3", "best"),
        ("si", "10", "3", "finished"),
    ]


def test_a_diverged_trial_counts_as_zero_and_is_noted(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    result = run.results["si: strength 10"]
    result.accuracy[0, 1] = np.nan
    result.diverged.append(Divergence(0, 1, 3))
    table = sweep_table(tried_in(run)["si"])
    assert "1 trial diverged, and counts as an accuracy of 0." in table.notes
    assert table.rows[1][:2] == ("strength 10", "47.17 ± 23.58")


def lose(run: Run, label: str, why: str | None, trials: Sequence[int] | None = None) -> None:
    """Let trials of a point fail."""
    result = run.results[label]
    for trial in result.trials if trials is None else trials:
        result.accuracy[trial, 1] = np.nan
        result.diverged.append(Divergence(trial, 1, 3, why))


def test_a_point_has_failed_if_all_its_trials_did(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    lose(run, "si: strength 10", "it is odd")
    lose(run, "si: strength 0.1", None)
    lose(run, "dhp+si: strength 10", None, [0, 2])
    si, dhp = run_tables(run)
    assert {row[0]: row[-1] for row in si.rows} == {
        "strength 1": "best",
        "strength 10": "failed",
        "strength 0.1": "failed",
    }
    assert [row[-1] for row in dhp.rows] == ["best", "finished", "dropped"]
    tried = [each for own in tried_in(run).values() for each in own]
    states = [row["state"] for row in csv.DictReader(points_csv(tried).splitlines())]
    assert states == ["failed", "best", "failed", "dropped", "best", "finished"]


def test_trials_are_compared_with_the_same_trials_where_a_file_is_damaged(tmp_path: Path) -> None:
    """A point without its first trial: its second and third are not compared with the first and second of another."""
    path = write_sweep(tmp_path) / "runs" / "1-1" / "results.json"
    content = json.loads(path.read_text())
    next(entry for entry in content["results"] if entry["label"] == "si: strength 10")["accuracy"] = "damaged"
    path.write_text(json.dumps(content))
    run = read_run(tmp_path)
    assert list(run.problems) == ["si: strength 10"]
    assert run.results["si: strength 10"].trials == (1, 2)
    scores = {each.label: len(each.scores) for each in tried_in(run)["si"]}
    assert scores == {"si: strength 0.1": 1, "si: strength 1": 3, "si: strength 10": 0}


def test_the_csv_compares_with_the_best_in_shared_trials(tmp_path: Path) -> None:
    tried = [each for own in tried_in(read_run(write_sweep(tmp_path))).values() for each in own]
    rows = list(csv.DictReader(points_csv(tried).splitlines()))
    minus = [float(row["minus_best"]) for row in rows if row["method"] == "si"]
    assert minus == pytest.approx([-0.1, 0, -0.05])
    assert (rows[0]["low"], float(rows[2]["high"])) == ("", pytest.approx(-0.05))


# --- what it says


def points(*scores: Sequence[float], trials: int = 3) -> list[Tried]:
    """Points of si with these scores, and the strengths 1, 2, 3, …"""
    config = preset("split-mnist", "si", **BASE | {"trials": trials})
    return [Tried({"strength": float(k)}, config, list(own)) for k, own in enumerate(scores, start=1)]


BEST = [0.8, 0.82, 0.84]


def test_the_verdict_is_the_best_point_with_its_interval_and_what_it_cannot_be_told_apart_from() -> None:
    # The mean is 82 and the SEM 2/√3 = 1.1547 points; t(2) is 4.3027, so the interval reaches 4.97 points.
    said = "si: `strength 1` is the best of 4 points, with 82.00% (95% interval 77.03 to 86.97, 3 trials)."
    other = [0.79, 0.83, 0.83]
    assert verdict(points(BEST, other, [0.5, 0.51, 0.52], [0.4, 0.4, 0.4])) == (
        f"{said} In the trials that both ran, `strength 2` cannot be told apart from it."
    )
    assert verdict(points(BEST, other, BEST, [0.8])).endswith(
        "In the trials that both ran, `strength 3`, `strength 2` and `strength 4` cannot be told apart from it."
    ), "nor can a tie, nor a point with one trial"
    assert verdict(points(BEST, *([[0.5, 0.51, 0.52]] * 3))) == (
        f"{said} All others are clearly worse in the trials that both ran."
    )
    assert "so far, with" in verdict(points(BEST, other), finished=False)
    assert verdict(points(BEST)) == (
        "si: `strength 1` is the only point, with 82.00% (95% interval 77.03 to 86.97, 3 trials)."
    )
    assert verdict(points([0.82], trials=1)) == "si: `strength 1` is the only point, with 82.00% (1 trial)."
    assert "both ran, `strength 2`, `strength 3`, `strength 4` and 6 others cannot be told apart" in verdict(
        points(*[BEST] * 10)
    )


def test_the_verdict_compares_in_shared_trials_and_not_by_means() -> None:
    """The dropped point has the higher mean, since its trials were the easy ones; in them the best was better."""
    best, dropped = [0.9, 0.91, 0.9, 0.5, 0.52, 0.5], [0.8, 0.81, 0.8]
    assert np.mean(dropped) > np.mean(best)
    said = verdict(points(best, dropped, trials=6))
    assert said.startswith("si: `strength 1` is the best of 2 points, with 70.50%")
    assert said.endswith("All others are clearly worse in the trials that both ran.")
    ahead = verdict(points(best, [0.95, 0.96, 0.95], trials=6))
    assert ahead.endswith("In the fewer trials that both ran, `strength 2` did better.")


def test_the_verdict_of_a_sweep_that_found_nothing_says_so() -> None:
    lost = [replace(each, num_diverged=3) for each in points([0.0] * 3, [0.0] * 3)]
    assert verdict(lost) == "si: all trials of all points failed."
    assert verdict(points([], []), finished=False) == "si: no trial has finished yet."


def plan(**changes: Any) -> dict[str, Any]:
    """What `sweep.json` says of a sweep."""
    bases = [preset("split-mnist", method, **BASE | {"trials": 10}) for method in ("si", "dhp+si")]
    options = {"axes": [parse_choice("strength=0.1,1,10")], "num_points": None, "prune": True} | changes
    return Plan(bases, **options).to_dict()


def test_it_is_said_how_points_were_chosen_and_dropped(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))

    def said(**changes: Any) -> str:
        return "\n".join(how_searched(replace(run, about=run.about | plan(**changes))))

    grid = said()
    assert "Every combination of `strength=0.1,1,10` was tried with each method." in grid
    assert "After 3 trials, points are dropped that are clearly worse than the best of their method in the" in grid
    assert "at 5% divided by the number of the other points. The others get 10 trials." in grid
    assert "a tie is never dropped. 6 points were dropped." in grid
    assert "on the last sixth of the training samples, which are held out of training, with seed 1000" in grid
    search = said(axes=[parse_axis("strength=0.1..10:log")], num_points=40)
    assert "Optuna searched `strength=0.1..10:log` with its tree of Parzen estimators: 40 points of each" in search
    assert "clearly worse than the best of the same 10 in the same trials" in search
    assert "No point is dropped: all get all trials." in said(prune=False)


def test_the_page_says_the_verdict_first_and_how_to_repeat_it(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "my sweep")
    (folder / "best-si.toml").write_text("")
    run = read_run(folder)
    lose(run, "si: strength 10", "it is odd")
    run = replace(run, about=run.about | plan() | {"command": "engram sweep split-mnist --out 'my sweep'"})
    page = run_page(run)
    text = check_page(page)
    assert text.index("si: strength 1 is the best of 3 points, with 75.50%") < text.index("Every combination of")
    assert text.count("is the best of 3 points") == 2, "one for each method"
    for words in (
        "strength 10: 3 trials failed, and count as an accuracy of 0: it is odd.",
        "engram sweep split-mnist",
    ):
        assert words in text
    assert f"engram run '{folder}/best-si.toml'" in text
    assert "best-dhp+si.toml" not in text, "which was not written"
    assert re.findall('<section id="(.*?)">', page) == ["points", "search", "best", "methods", "repeat"]
    assert page.count('id="figure-sweep"') == 1


def test_a_page_of_several_runs_has_the_verdict_of_a_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "one")
    write_sweep(tmp_path / "two")
    assert check_page(write_report(tmp_path).read_text(encoding="utf-8")).count("is the best of 3 points") == 4


def test_a_page_has_many_points_and_the_picture_has_the_rest(tmp_path: Path) -> None:
    tables = sweep_tables(read_run(write_sweep(tmp_path)), most_rows=2, others_in="the numbers of the picture")
    assert [len(table.rows) for table in tables] == [2, 2]
    assert "1 more point is in the numbers of the picture." in tables[0].notes


def test_a_failed_point_is_a_cross_at_the_bottom_and_does_not_stretch_the_scale(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    lose(run, "si: strength 10", None)
    drawing = next(drawing for drawing in draw_run(run) if drawing.name == "sweep")
    (axes,) = drawing.figure.axes
    assert axes.get_ylim()[0] > 50
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata()[0] == 10
    assert "×: failed" in drawing.figure.get_suptitle()
    assert len(drawing.rows) == 6


def test_many_settings_are_drawn_in_rows(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    for names, shape in ((["strength", "eta", "xi"], (1, 3)), (["strength", "eta", "xi", "hidden", "epochs"], (3, 2))):
        run.about["axes"] = [f"{name}=1" for name in names]
        drawing = next(drawing for drawing in draw_run(run) if drawing.name == "sweep")
        panels = [axes for axes in drawing.figure.axes if axes.axison]
        assert [axes.get_xlabel() for axes in panels] == names
        assert drawing.figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == shape
        assert drawing.columns[1 : 1 + len(names)] == tuple(names)
        assert [text.get_text() for text in panels[1].get_xticklabels()] == ["0.001"], "the only value"


def test_hollow_points_of_an_unfinished_sweep_are_not_called_dropped(tmp_path: Path) -> None:
    for finished, words in ((True, "dropped early"), (False, "fewer trials so far")):
        run = read_run(write_sweep(tmp_path / words, finished))
        drawing = next(drawing for drawing in draw_run(run) if drawing.name == "sweep")
        assert f"hollow: {words}" in drawing.figure.get_suptitle()
        assert f"Hollow points: {words}." in drawing.caption


def test_failed_trials_are_noted_once_for_each_reason(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    for label, why in (("si: strength 10", "it is odd"), ("si: strength 0.1", "it is odd"), ("si: strength 1", None)):
        run.results[label].accuracy[0, 1] = np.nan
        run.results[label].diverged.append(Divergence(0, 1, 3, why))
    notes = sweep_table(tried_in(run)["si"]).notes
    assert sorted(notes[2:]) == [
        "1 trial diverged, and counts as an accuracy of 0.",
        "strength 0.1 and 1 other: 2 trials failed, and count as an accuracy of 0: it is odd.",
    ]


def test_a_trial_that_is_not_finished_has_no_score_yet(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path, finished=False))
    run.results["si: strength 10"].accuracy[2, 1] = np.nan  # its last trial has learned one of two tasks
    run.results["si: strength 0.1"].accuracy[0, 1] = np.nan  # and this one's only
    tried = tried_in(run)["si"]
    table = sweep_table(tried, finished=False)
    assert table.rows == [
        ("strength 1", "75.50 ± 0.29", "3", "+0.00", "[+0.00, +0.00]", "best"),
        ("strength 10", "70.25 ± 0.25", "2", "-5.00", "[-5.00, -5.00]", "so far"),
        ("strength 0.1", "–", "0", "–", "[–, –]", "so far"),
    ]
    assert not any("diverged" in note for note in table.notes)
    rows = list(csv.DictReader(points_csv(tried).splitlines()))
    assert [(row["trials"], row["diverged"], row["accuracy"] == "") for row in rows] == [
        ("0", "0", True),
        ("3", "0", False),
        ("2", "0", False),
    ]
    assert [(row[0], row[1]) for row in draw_run(run)[0].rows if row[0] == "si"] == [("si", "1.0"), ("si", "10.0")]


def test_a_sweep_without_a_finished_trial_has_tables_figures_and_a_page(tmp_path: Path) -> None:
    write_sweep(tmp_path, finished=False)
    for name in ("1-1", "1-3"):
        path = tmp_path / "runs" / name / "results.json"
        content = json.loads(path.read_text())
        for entry in content["results"]:
            entry["accuracy"] = [[[0.9, None], [None, None]] for _ in entry["trials"]]
        path.write_text(json.dumps(content))
    run = read_run(tmp_path)
    assert {row[1:] for table in run_tables(run) for row in table.rows} == {("–", "0", "–", "[–, –]", "so far")}
    assert "sweep" not in [drawing.name for drawing in draw_run(run)]
    assert "strength 10" in check_page(write_report(tmp_path).read_text(encoding="utf-8"))


def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    tried = tried_in(read_run(write_sweep(tmp_path)))["si"] * 10
    table = sweep_table(tried)
    assert len(table.rows) == MOST_ROWS
    assert "10 more points are in points.csv." in table.notes


def test_a_sweep_has_its_own_figure_and_those_of_the_best_points(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path))
    drawn = {drawing.name: drawing for drawing in draw_run(run)}
    assert list(drawn) == ["sweep", "accuracy", "differences", "first-and-latest", "matrices"]
    assert len(drawn["sweep"].rows) == 6
    assert {row[0] for row in drawn["accuracy"].rows} == {"si: strength 1", "dhp+si: strength 1"}
    assert len(write_figures(tmp_path, tmp_path / "figures", ["csv"])) == 5


def test_the_picture_has_accuracies_that_were_compared_in_shared_trials(tmp_path: Path) -> None:
    drawing = next(drawing for drawing in draw_run(read_run(write_sweep(tmp_path))) if drawing.name == "sweep")
    assert drawing.columns == ("method", "strength", "accuracy %", "SEM", "minus best", "trials")
    si = {row[1]: [round(float(cell), 2) for cell in row[2:]] for row in drawing.rows if row[0] == "si"}
    # The point with one trial had 65.00 in it, where the best had 75.00; so it is 10 points below the best's 75.50.
    assert si["1.0"] == [75.5, 0.29, 0.0, 3]
    assert si["10.0"] == [70.5, 0.0, -5.0, 3]
    assert si["0.1"][0] == 65.5
    assert si["0.1"][2:] == [-10.0, 1]
    (axes,) = drawing.figure.axes
    assert axes.get_ylabel() == "average accuracy, %"
    heights = sorted({round(float(bar.lines[0].get_ydata()[0]), 2) for bar in axes.containers})
    assert heights == [65.5, 70.5, 75.5]


@pytest.mark.parametrize("finished", [True, False])
def test_a_sweep_has_a_page(tmp_path: Path, finished: bool) -> None:
    text = check_page(write_report(write_sweep(tmp_path, finished)).read_text(encoding="utf-8"))
    assert "report of a sweep" in text
    assert "strength 10" in text
    assert ("The run is not finished" in text) == (not finished)


LOOKING = """
import sys
from pathlib import Path
from engram.report.sweep_table import run_tables
from engram.reproduction.page import write_figures, write_report
from engram.runs.run import read_run

folder = Path(sys.argv[1])
print(len(run_tables(read_run(folder))), write_report(folder), len(write_figures(folder, folder / "figures", ["csv"])))
assert "torch" not in sys.modules
"""


def test_looking_at_results_does_not_import_torch(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOOKING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ")
