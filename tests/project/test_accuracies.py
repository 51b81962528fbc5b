"""`benchmarks/accuracies.py`: two engines' accuracies, paired by method and trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import accuracies
import numpy as np
import pytest

from builders import write_run
from engram import preset
from engram.common.errors import Divergence
from engram.runs.run import read_run

TABLE = read_run(Path(__file__).parents[2] / "results" / "split-mnist" / "table").results
RUNG = read_run(Path(__file__).parents[2] / "results" / "split-mnist" / "rung-1").results


def test_each_method_is_paired_with_its_own_settings_and_a_change_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`finetune` of the table is `matched` of rung 1; DHP starts otherwise there, so it has no partner."""
    worse = replace(RUNG["matched"], accuracy=RUNG["matched"].accuracy - 0.01)
    old = write_run(tmp_path / "old", {"finetune": TABLE["finetune"], "si": TABLE["si"], "dhp": TABLE["dhp"]})
    same = {"matched": replace(TABLE["finetune"], config=worse.config), "dhp": RUNG["dhp"], "si": TABLE["si"]}
    for new, expected in (({**same, "matched": worse}, -1.0), (same, 0.0)):
        new_folder = write_run(tmp_path / f"new {expected}", new)
        accuracies.main(["--old", str(old), "--new", str(new_folder), "--out", str(tmp_path / "out")])
        cells = json.loads((tmp_path / "out" / "record.json").read_text())
        assert [cell["method"] for cell in cells] == ["finetune", "si"]
        assert abs(100 * accuracies.difference(cells[0]).mean - expected) < 0.1
        assert accuracies.difference(cells[1]).mean == 0
        shown = capsys.readouterr().out
        assert f"Zero lies in {1 + (expected == 0)} of 2 intervals" in shown
        assert all(line.split()[3] == "10" for line in shown.splitlines() if line.startswith("split-mnist")), "pairs"


def test_another_penalty_is_another_method() -> None:
    """SI and MAS of the same strength differ in nothing but their names and the penalty."""
    si = replace(TABLE["si"], config=preset("split-mnist", "si", strength=1.0, xi=0.001))
    mas = replace(si, config=replace(si.config, method="mas"))
    assert si.config.penalty != mas.config.penalty
    assert accuracies.facts_of(si) != accuracies.facts_of(mas)


@pytest.mark.parametrize(("folder", "words"), [("nowhere", "there is no folder nowhere"), ("docs", "not hold a run")])
def test_a_folder_without_a_run_is_refused_in_a_sentence(
    folder: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        accuracies.main(["--old", folder, "--new", folder])
    assert words in capsys.readouterr().err


def test_an_unfinished_run_is_compared_after_the_tasks_that_both_have_learned() -> None:
    whole = TABLE["si"]
    accuracy = whole.accuracy.copy()
    accuracy[:, 3:] = np.nan
    accuracy[2, 2:] = np.nan
    short = replace(whole, accuracy=accuracy, diverged=[Divergence(2, 2, 5)])
    later = replace(whole, diverged=[Divergence(5, 3, 9)])  # after what both have learned
    assert accuracies.compare(later, short)["diverged"] == [[], [2]]
    found = accuracies.compare(whole, short)
    assert found["num_tasks"] == 3
    assert found["diverged"] == [[], [2]]
    assert found["new"][2] is None
    assert found["old"][0] == pytest.approx(whole.accuracy[0, 2, :3].mean())
    assert accuracies.difference(found).num_trials == len(whole.trials) - 1
    assert accuracies.difference(found).mean == 0


def test_methods_that_diverge_are_compared_after_the_last_task_that_half_of_the_trials_have_learned() -> None:
    whole = TABLE["si"]
    num_trials, num_tasks = whole.accuracy.shape[:2]
    half = num_trials // 2
    for lost, expected in ((half, num_tasks), (half + 1, num_tasks - 2)):  # trials that diverge in the last but one
        accuracy = whole.accuracy.copy()
        accuracy[:lost, num_tasks - 2 :] = np.nan
        some = replace(whole, accuracy=accuracy, diverged=[Divergence(k, num_tasks - 2, 5) for k in range(lost)])
        found = accuracies.compare(some, whole)
        assert found["num_tasks"] == expected
        assert [len(trials) for trials in found["diverged"]] == [lost, 0]
    never = replace(whole, accuracy=np.full_like(whole.accuracy, np.nan), diverged=[])
    assert accuracies.compare(never, whole)["num_tasks"] == 1
    assert set(accuracies.compare(never, whole)["old"]) == {None}
    of_all = replace(whole, accuracy=whole.accuracy.copy(), diverged=[Divergence(k, 3, 5) for k in range(num_trials)])
    of_all.accuracy[:, 3:] = np.nan
    assert accuracies.compare(of_all, whole)["num_tasks"] == 3
    assert accuracies.difference(accuracies.compare(of_all, whole)).num_trials == num_trials
