"""The map, ReLU, the divergence and the leak: their tables say what the results say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_digits
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import preset
from engram.engine.training import Runtime
from engram.reproduction.divergence import AS_PUBLISHED, CURES, PLAIN, SHORT, divergence_table, leak_table
from engram.reproduction.map import EPOCHS, HEADS, PENALTIES, RATES, best_rates_table, draw_map, label_of, map_table
from engram.reproduction.page import make_page
from engram.reproduction.plan import plan
from engram.reproduction.run import run_reproduction
from engram.reproduction.study import relu_table
from engram.runs.result import Divergence, Result
from engram.runs.run import Run

Runs = dict[tuple[str, str], Run]
TINY: dict[str, Any] = {"dataset": "mnist-small", "num_tasks": 2, "max_samples": 60}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    folder = tmp_path_factory.mktemp("study") / "new"
    digits = small_digits(200, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engram.reproduction.plan.QUICK", dict.fromkeys(PAPER_BENCHMARKS, TINY))
        parts = plan(["split-mnist"], ["rung-1", "map", "relu"], quick=True)
        return folder, run_reproduction(parts, folder, lambda _: [digits], quick=True, runtime=Runtime("cpu"))


def last(run: Run, label: str) -> float:
    return 100 * float(run.results[label].average_accuracy[:, -1].mean())


def test_the_map_has_a_row_for_each_rate_and_number_of_epochs(small: tuple[Path, Runs]) -> None:
    _, runs = small
    run = runs["split-mnist", "map"]
    table = map_table(runs, "split-mnist")
    places = list(product(PENALTIES, EPOCHS, RATES))
    assert table.columns[2:] == ("linear", *HEADS)
    for row, (ending, epochs, rate) in zip(table.rows, places, strict=True):
        assert row[0].startswith("si, " if ending else "alone, ")
        assert row[1] == f"{rate:g}"
        for head, cell in zip(table.columns[2:], row[2:], strict=True):
            value = last(run, label_of(epochs, rate, head + ending))
            if head != "linear":
                value -= last(run, label_of(epochs, rate, "linear" + ending))
            assert float(cell.split()[0]) == pytest.approx(value, abs=0.006), head
    assert map_table(runs, "permuted-mnist").rows == []


def test_trials_that_diverged_or_were_not_run_are_said_to_be_so(small: tuple[Path, Runs]) -> None:
    _, runs = small
    run = runs["split-mnist", "map"]
    lost, gone = label_of(1, 0.01, "steady"), label_of(5, 0.03, "dhp")
    results = {k: replace(r, diverged=[Divergence(0, 0, 0)]) if k == lost else r for k, r in run.results.items()}
    del results[gone]
    changed = {("split-mnist", "map"): replace(run, results=results)}
    table = map_table(changed, "split-mnist")
    rows = {(row[0], row[1]): row for row in table.rows}
    assert "balanced" in table.columns
    assert rows["alone, 1 epoch", "0.01"][table.columns.index("steady")] == "1 of 1 diverged"
    assert rows["alone, 5 epochs", "0.03"][table.columns.index("dhp")] == "–"
    drawing = draw_map(changed)
    assert drawing is not None
    shown = {(row[0], *row[2:4]): row[4] for row in drawing.rows}
    assert np.isnan(float(shown["steady", "1", "0.01"]))
    assert ("dhp", "5", "0.03") not in shown
    of_dhp = [row[1] for row in best_rates_table(changed).rows]
    assert [cell == "–" for cell in of_dhp] == [False, True, *[False] * 4], "a rate of DHP alone with 5 epochs is gone"


def test_each_head_is_compared_at_its_best_rate(small: tuple[Path, Runs]) -> None:
    _, runs = small
    run = runs["split-mnist", "map"]
    table = best_rates_table(runs)
    for row, (ending, epochs) in zip(table.rows, product(PENALTIES, EPOCHS), strict=True):
        for head, cell in zip(table.columns[1:], row[1:], strict=True):
            methods = (head + ending, "linear" + ending)
            best = [max(last(run, label_of(epochs, rate, name)) for rate in RATES) for name in methods]
            assert float(cell) == pytest.approx(best[0] - best[1], abs=0.006)
    assert best_rates_table({}).rows == []


def test_a_map_of_fewer_heads_shows_those_that_it_has(small: tuple[Path, Runs]) -> None:
    _, runs = small
    run = runs["split-mnist", "map"]
    lost = [label_of(1, rate, "steady") for rate in RATES]
    results = {
        k: r for k, r in run.results.items() if k.partition(": ")[2].split("+")[0] in ("linear", "dhp", "steady")
    }
    results |= {label: replace(results[label], diverged=[Divergence(0, 0, 0)]) for label in lost}
    plain = label_of(5, 0.03, "linear+si")
    results[plain] = replace(results[plain], diverged=[Divergence(0, 0, 0)])
    older = {("split-mnist", "map"): replace(run, results=results)}
    table = best_rates_table(older)
    assert len(table.rows) == len(EPOCHS) * len(PENALTIES)
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert first["dhp"] != "–"
    assert first["balanced"] == "–", "it was not run"
    assert first["steady"] == "–", "it diverged at every rate"
    drawing = draw_map(older)
    assert drawing is not None
    assert [*dict.fromkeys(row[0] for row in drawing.rows)] == ["dhp", "dhp+si", "steady", "steady+si"]
    assert len(drawing.figure.axes) == 4 + 1, "no empty panels; and the scale"
    shown = {(row[0], *row[2:4]): row[4] for row in drawing.rows}
    assert np.isnan(float(shown["dhp+si", "5", "0.03"])), "the plain head diverged"


def test_the_map_is_drawn_and_in_the_report(small: tuple[Path, Runs]) -> None:
    folder, runs = small
    drawing = draw_map(runs)
    assert drawing is not None
    assert len(drawing.rows) == len(HEADS) * len(PENALTIES) * len(EPOCHS) * len(RATES)
    page = make_page(folder)
    assert "Where a head helps" in page
    assert map_table(runs, "split-mnist").title in page
    assert draw_map({}) is None


def test_relu_stands_next_to_leaky_relu(small: tuple[Path, Runs]) -> None:
    folder, runs = small
    table = relu_table(runs)
    assert [row[0] for row in table.rows] == ["alone", "si", "online-ewc", "mas"]
    for name, *cells in table.rows:
        ending = "" if name == "alone" else f"+{name}"
        for part, (plain, gain) in (("rung-1", cells[:2]), ("relu", cells[2:])):
            run = runs["split-mnist", part]
            assert float(plain.split()[0]) == pytest.approx(last(run, f"linear{ending}"), abs=0.006)
            expected = last(run, f"dhp{ending}") - last(run, f"linear{ending}")
            assert float(gain.split()[0]) == pytest.approx(expected, abs=0.006)
    assert table.title in make_page(folder)
    assert relu_table({key: run for key, run in runs.items() if key[1] != "relu"}).rows == []


def short_result(name: str, diverged: list[Divergence], loss: float) -> Result:
    """Three trials of four tasks, of which the third was learned to 0.7, 0.8 and 0.9."""
    method = "linear+online-ewc" if name == PLAIN else "dhp+online-ewc"
    accuracy = np.full((3, 4, 4), 0.5)
    accuracy[:, 2, 2] = 0.7, 0.8, 0.9
    for each in diverged:
        accuracy[each.trial, each.task :] = np.nan
    shown = {"epoch": 19, "eta": 0.25, "hebb_norm": 1.0, "alpha_norm": 2.0}
    rows = [
        {"trial": trial, "task": task, "step": step, "loss": loss + task + trial - step, **shown}
        for trial in range(3)
        for task in range(4)
        for step in (1, 2)
    ]
    config = preset("vision-mixture", method).replace(**{**SHORT, **CURES.get(name, {})})
    return Result(config, (0, 1, 2), accuracy, np.zeros((3, 4)), rows, diverged)


def test_the_divergence_table_says_which_trials_diverged_and_how_the_third_task_ended() -> None:
    results = {
        "as in the paper": short_result("as in the paper", [Divergence(k, 3, 7) for k in range(3)], 0.25),
        "written after reading": short_result("written after reading", [Divergence(1, 3, 7)], 0.5),
        PLAIN: short_result(PLAIN, [], 1.0),
    }
    about = {"part": "divergence"}
    run = Run(Path("divergence"), {k: r.config for k, r in results.items()}, results, about)
    rows = divergence_table({("vision-mixture", "divergence"): run}).rows
    assert [row[0] for row in rows] == list(results)
    assert [row[1] for row in rows] == ["3 of 3, 3 in task 4", "1 of 3, 1 in task 4", "0"]
    assert rows[0][2:6] == ("0.2500", "2.0", "1.250", "80.0"), "of the last step, the mean over the trials"
    assert rows[1][4] == "1.500"
    assert [row[-1] for row in rows] == ["diverged", "50.00 ± 0.00 (2 of 3 trials)", "50.00 ± 0.00"]
    assert divergence_table({}).rows == []


def test_the_leak_table_says_how_the_last_two_tasks_ended() -> None:
    def result(method: str, last: float, lost: int | None = None) -> Result:
        config = preset("vision-mixture", method).replace(**SHORT | {"num_tasks": 5})
        accuracy = np.full((3, 5, 5), 0.5)
        accuracy[:, 4, 4] = last
        diverged = []
        if lost is not None:
            accuracy[lost, 3:] = np.nan
            diverged = [Divergence(lost, 3, 7)]
        shown = {"epoch": 19, "eta": 0.25, "hebb_norm": 1.0, "alpha_norm": 2.0}
        rows = [{"trial": k, "task": task, "step": 1, "loss": task + k, **shown} for k in range(3) for task in range(5)]
        rows += [] if lost is None else [{"trial": lost, "task": 3, "step": 2, "loss": 99.0, **shown}]
        return Result(config, (0, 1, 2), accuracy, np.zeros((3, 5)), rows, diverged)

    results = {AS_PUBLISHED: result("dhp", 0.4), "η fixed at 1": result("dhp", 0.3, 1), PLAIN: result("linear", 0.6)}
    run = Run(Path("leak"), {k: r.config for k, r in results.items()}, results, {"part": "leak"})
    rows = leak_table({("vision-mixture", "leak"): run}).rows
    assert [row[0] for row in rows] == list(results)
    assert rows[0][1:7] == ("0", "0.2500", "2.0", "4.000", "50.0", "40.0"), "of the fourth task, and of the fifth"
    assert rows[1][1] == "1 of 3, 1 in task 4"
    assert rows[1][4:6] == ("4.000", "50.0 (2 of 3 trials)"), "without the trial that diverged"
    assert rows[1][6] == "30.0 (2 of 3 trials)"
    assert [row[7].split()[0] for row in rows] == ["48.00", "46.00", "52.00"]
    assert leak_table({}).rows == []
