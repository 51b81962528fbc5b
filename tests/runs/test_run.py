"""Runs in folders: found, opened, joined by trial number; started, stopped, resumed and completed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import assert_results_equal, files_in, labelled, refusal, run_on, small_digits, write_run
from engram import MAS, Config, Divergence, InputError, Progress, Result, preset
from engram.common.errors import Stopped
from engram.common.registry import PENALTIES
from engram.engine.learner import Outcome
from engram.engine.training import Runtime
from engram.report.pairs import Pair
from engram.runs import folder as folders
from engram.runs.display import ProgressLines
from engram.runs.experiment import results_of
from engram.runs.format import FORMAT
from engram.runs.run import find_runs, join_results, open_runs, read_run, saved_arguments
from engram.runs.start import check_run, complete_run, resume_run, start_run
from engram.runs.store import list_runs

CPU = Runtime("cpu")


def config_of(method: str = "si", **changes: Any) -> Config:
    small = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 1, "hidden": [8], "batch_size": 20}
    return preset("split-mnist", method, **small | changes)


def result_of(config: Config, *trials: int) -> Result:
    """Every accuracy of trial k is k/100."""
    shape = (len(trials), config.num_tasks, config.num_tasks)
    accuracy = np.broadcast_to(np.array(trials)[:, None, None] / 100, shape).copy()
    return Result(config, trials, accuracy, accuracy[:, 0].copy())


def digits() -> list[Any]:
    return [small_digits(300, 60)]


class LossOnly(MAS):
    """A penalty of another package: it defines how it pulls, but only by a loss."""

    def loss(self) -> torch.Tensor:
        return self.strength * sum(theta.abs().sum() for theta in self.parameters.values())


@pytest.mark.parametrize("make", [LossOnly, lambda model, **settings: LossOnly(model, **settings)])
def test_a_penalty_that_cannot_take_the_step_is_refused_before_the_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.setattr(PENALTIES, "_registered", dict(PENALTIES._registered))
    PENALTIES.register("loss-only", strength=1.0)(make)
    config = config_of("loss-only")
    sentence = refusal(start_run, {"loss-only": config}, digits(), tmp_path / "run", runtime=CPU)
    assert "LossOnly defines its own `loss` but no `proximal_step`" in sentence
    assert not (tmp_path / "run").exists()
    if make is LossOnly:
        assert "LossOnly defines" in refusal(check_run, {"loss-only": config}, CPU), "before a sweep makes its folder"
    corrected = {"loss-only": config.replace(penalty_step="gradient")}
    assert start_run(corrected, digits(), tmp_path / "run", runtime=CPU).finished


# --- results know their trials


def outcome(accuracy: float, num_rows: int = 2) -> Outcome:
    return Outcome([0.1, 0.1], [[accuracy, accuracy]] * num_rows)


def test_results_are_paired_by_trial_number_and_not_by_row() -> None:
    """SI's trial 3 and dhp+si's trial 0 once made a pair, because trials that had not started had no row."""
    configs = {method: config_of(method, trials=4) for method in ("si", "dhp+si")}
    outcomes = {("si", 3): outcome(0.5), ("dhp+si", 0): outcome(0.9)}
    outcomes |= {("si", 0): Outcome(), ("dhp+si", 3): Outcome()}  # they exist, and nothing was measured of them
    results = results_of(configs, outcomes, [])
    assert (results["si"].trials, results["dhp+si"].trials) == ((3,), (0,))
    assert Pair("dhp+si", "si", results["dhp+si"], results["si"]).accuracy.num_trials == 0
    outcomes["dhp+si", 3] = outcome(0.7)
    results = results_of(configs, outcomes, [])
    made = Pair("dhp+si", "si", results["dhp+si"], results["si"])
    assert (made.accuracy.num_trials, made.accuracy.mean) == (1, pytest.approx(0.2))


def test_results_of_outcomes_are_in_the_order_of_trial_numbers() -> None:
    outcomes = {("si", 5): outcome(0.5), ("si", 3): outcome(0.3), ("si", 4): outcome(0.4, num_rows=1)}
    outcomes["si", 4].diverged = Divergence(4, 1, 9)
    result = results_of({"si": config_of(trials=4, first_trial=3)}, outcomes, [])["si"]
    assert result.trials == (3, 4, 5)
    assert result.accuracy[:, 0, 0].tolist() == [0.3, 0.4, 0.5]
    assert result.diverged == [Divergence(4, 1, 9)]
    assert result.tasks_learned == 2


def test_joined_results_are_sorted_by_trial_number() -> None:
    config = config_of(trials=6)
    joined = join_results(config, [result_of(config, 3, 5), result_of(config, 0, 1)])
    assert joined.trials == (0, 1, 3, 5)
    assert joined.accuracy[:, 0, 0].tolist() == [0, 0.01, 0.03, 0.05]
    with pytest.raises(InputError, match="the same trial is in two of the results"):
        join_results(config, [result_of(config, 3), result_of(config, 3)])


# --- found and opened


def test_runs_are_found_at_any_depth_and_links_are_not_followed_in_circles(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    result = {"si": result_of(config_of(), 0, 1)}
    for name in ("one", "deep/er/two", ".hidden/three", "one/inside"):
        write_run(folder / name, result)
    outside = write_run(tmp_path / "elsewhere" / "far", result).parent
    (folder / "latest").symlink_to(folder / "one")
    (folder / "deep" / "up").symlink_to("..")
    (folder / "itself").symlink_to("itself")
    (outside / "back").symlink_to(folder)
    (folder / "away").symlink_to(outside)
    assert [str(path.relative_to(folder)) for path in find_runs(folder)] == ["away/far", "deep/er/two", "one"]
    assert list(open_runs(folder)) == ["away/far", "deep/er/two", "one"]
    assert list(open_runs(folder / "one")) == ["one"]
    (folder / "claimed").mkdir()
    (folder / "claimed" / "run.json").touch()
    assert list(open_runs(folder)) == ["away/far", "deep/er/two", "one"], "one that never started is left out"


def test_folder_without_runs_is_refused(tmp_path: Path) -> None:
    assert "there is no run in" in refusal(open_runs, tmp_path)
    assert "there is no folder" in refusal(open_runs, tmp_path / "none")
    assert "does not hold a run: it has no run.json" in refusal(read_run, tmp_path)
    (tmp_path / "run.json").touch()
    assert "was stopped before it started: start it again" in refusal(read_run, tmp_path)


def write_sweep(folder: Path, **about: Any) -> Path:
    """Two points, of which one reached the second rung."""
    low, high = (config_of(trials=3, strength=strength) for strength in (1.0, 2.0))
    first = {label: result_of(config.replace(trials=1), 0) for label, config in (("low", low), ("high", high))}
    write_run(folder / "runs" / "1-1", first, seconds=10)
    write_run(folder / "runs" / "1-3", {"high": result_of(high.replace(first_trial=1, trials=2), 1, 2)}, seconds=5)
    content = {"format": FORMAT, "command": "engram sweep split-mnist", "arguments": ["sweep", "split-mnist"]}
    content |= {"axes": ["strength=1,2"], "bases": [low.to_dict()], **about}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def test_sweep_is_read_as_one_run_with_all_trials_of_each_label(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweeps" / "mine", finished="2026-01-01T00:00:00+00:00")
    (run,) = open_runs(tmp_path / "sweeps").values()
    assert {label: result.trials for label, result in run.results.items()} == {"low": (0,), "high": (0, 1, 2)}
    assert {label: (c.first_trial, c.trials) for label, c in run.configs.items()} == {"low": (0, 1), "high": (0, 3)}
    assert (run.state("low"), run.state("high")) == ("finished", "finished")
    assert (run.about["command"], run.about["seconds"]) == ("engram sweep split-mnist", 15)
    assert not read_run(write_sweep(tmp_path / "stopped")).finished
    assert saved_arguments(tmp_path / "stopped") == ["sweep", "split-mnist"]
    assert saved_arguments(tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"axes": None}, "not a sweep of Engram, or is damaged"),
        ({"axes": []}, "which settings of which methods"),
        ({"axes": ["colour=1"]}, "which settings of which methods"),
        ({"bases": [{}]}, "it has no 'method'"),
        ({"bases": [{"method": "mas", "trials": 3}]}, "it does not name si"),
    ],
)
def test_sweep_that_does_not_say_what_it_tried_is_damaged(tmp_path: Path, damage: dict[str, Any], why: str) -> None:
    sentence = refusal(read_run, write_sweep(tmp_path, **damage))
    assert str(tmp_path / "sweep.json") in sentence
    assert why in sentence


def test_sweep_without_any_of_its_keys_is_damaged(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"format": FORMAT}))
    assert "it has no 'axes'" in refusal(read_run, tmp_path)
    identity = {"bases": [], "axes": []}
    sentence = refusal(folders.claim_group, tmp_path / "sweep.json", identity, {"environment": {}})
    assert sentence == f"{tmp_path / 'sweep.json'} is damaged: it has no 'bases'"


def test_run_of_a_group_that_lost_its_description_is_to_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "sweep" / "runs" / "1-3"
    complete_run({"si": config_of()}, digits(), path, runtime=CPU)
    (path / "run.json").unlink()
    sentence = refusal(complete_run, {"si": config_of()}, digits(), path, runtime=CPU)
    assert sentence.endswith(f"remove {path} to run it again")


def test_run_of_a_package_that_is_not_installed_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", {"mas": result_of(config_of("mas"), 0, 1)})
    path = tmp_path / "runs" / "one" / "run.json"
    path.write_text(path.read_text().replace('"method": "mas"', '"method": "flat"'))
    why = "there is no method 'flat' here: the package that registers it may not be installed"
    assert refusal(read_run, path.parent) == f"cannot use {path}: {why}"
    (row,) = list_runs(tmp_path).rows
    assert row["problem"] == f"cannot use {path}: {why}"


@pytest.mark.parametrize("arguments", [None, [], "sweep", [3]])
def test_sweep_without_arguments_cannot_be_resumed(tmp_path: Path, arguments: Any) -> None:
    write_sweep(tmp_path, arguments=arguments)
    assert "with which arguments it was started" in refusal(saved_arguments, tmp_path)


def test_reading_runs_imports_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path, {"si": result_of(config_of(), 0, 1)})
    script = (
        "import sys; from engram.runs.run import read_run; from engram.runs.store import list_runs;"
        "read_run(sys.argv[1]); list_runs(sys.argv[1]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == 0


# --- started and resumed


def test_run_holds_configs_that_differ_in_everything_but_benchmark_and_dataset(tmp_path: Path) -> None:
    configs = {
        "short": config_of(num_tasks=1),
        "long": config_of("dhp", epochs=2),
        "later": config_of("dhp", first_trial=3, trials=1, seed=5),
    }
    run = start_run(configs, digits(), tmp_path / "run", command="engram run", runtime=CPU, about={"part": "study"})
    again = read_run(tmp_path / "run")
    assert_results_equal(run.results, again.results)
    assert again.configs == configs
    assert (again.finished, again.problems, again.about["part"]) == (True, {}, "study")
    assert again.results["later"].trials == (3,)
    for label, config in configs.items():
        assert_results_equal(run.results[label], run_on([config], digits(), CPU)[0])
    assert sorted(files_in(tmp_path / "run")) == ["dynamics.csv", "log.txt", "results.json", "run.json"]


class Stop:
    """Asks a run to stop when it has come so far, and keeps notes."""

    def __init__(self, done: float):
        self.done, self.reached, self.notes = done, 0.0, list[str]()

    def report(self, progress: Progress) -> None:
        self.reached = max(self.reached, progress.done)
        if progress.note:
            self.notes.append(progress.note)

    def asked(self) -> bool:
        return self.reached >= self.done


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    stop = Stop(0.5)
    with pytest.raises(Stopped):
        start_run(
            {"si": config_of()},
            digits(),
            tmp_path / "run",
            runtime=CPU,
            seconds_between=0,
            report=stop.report,
            stop_asked=stop.asked,
        )
    return tmp_path / "run"


def test_stopped_run_is_resumed_to_the_same_results_and_its_seconds_add_up(stopped: Path) -> None:
    before = read_run(stopped)
    assert (before.finished, before.results["si"].tasks_learned) == (False, 1)
    change_description(stopped, seconds=1000)
    resumed = resume_run(stopped, digits())
    assert_results_equal(resumed.results["si"], run_on([config_of()], digits(), CPU)[0])
    assert 1000 <= resumed.about["seconds"] < 1100  # the rest may take less than a tenth of a second
    assert read_run(stopped).about["seconds"] == resumed.about["seconds"]
    assert not (stopped / "checkpoints").exists()
    assert "is finished; `engram table" in refusal(resume_run, stopped, digits())


def change_description(folder: Path, **changes: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_resumed_run_warns_of_another_environment_and_keeps_what_was_recorded(stopped: Path) -> None:
    about = read_run(stopped).about
    then = {"environment": {"device": "cpu", "threads": 999}, "versions": {**about["versions"], "torch": "1.0"}}
    change_description(stopped, **then)
    watch = Stop(2)
    resumed = resume_run(stopped, digits(), report=watch.report)
    (warning,) = (note for note in watch.notes if "last digits" in note)
    assert f"threads 999 is now {torch.get_num_threads()}" in warning
    assert f"torch 1.0 is now {torch.__version__}" in warning
    assert warning in (stopped / "log.txt").read_text()
    for found in (resumed.about, read_run(stopped).about):
        assert {name: found[name] for name in then} == then


def test_unchanged_environment_is_no_warning(stopped: Path) -> None:
    watch = Stop(2)
    resume_run(stopped, digits(), report=watch.report)
    assert not [note for note in watch.notes if "digits" in note]


def test_run_is_resumed_only_with_its_own_data_and_settings(stopped: Path) -> None:
    assert "the data are not those" in refusal(resume_run, stopped, [small_digits(299, 60)])
    assert "the data are not those" in refusal(resume_run, stopped, [small_digits(300, 60, first=1)])
    content = json.loads((stopped / "run.json").read_text())
    change_description(stopped, common={**content["common"], "strength": 3.0})
    assert "were changed since the run started" in refusal(resume_run, stopped, digits())


@pytest.mark.parametrize("name", ["runtime", "environment", "versions"])
@pytest.mark.parametrize("value", [None, 3, []])
def test_run_without_its_runtime_cannot_be_resumed(stopped: Path, name: str, value: Any) -> None:
    change_description(stopped, **{name: value})
    assert "does not say enough to resume" in refusal(resume_run, stopped, digits())


def test_bad_input_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = {"a": config_of(), "b": preset("permuted-mnist", "si", dataset="mnist-small")}
    for configs, runtime, words in (
        (other, CPU, "must have one benchmark"),
        ({}, CPU, "nothing to train"),
        ({"a": config_of()}, Runtime("cpu", "float16"), "there is no precision 'float16'"),
        ({"a": config_of()}, Runtime("tpu"), "there is no device 'tpu' here"),
        ({"a": config_of(trials=10**6)}, CPU, "too large to be read again"),
    ):
        assert words in refusal(check_run, configs, runtime)
        assert words in refusal(start_run, configs, digits(), folder, runtime=runtime)
    assert not folder.exists()


def test_folder_that_holds_a_run_is_refused(stopped: Path) -> None:
    before = files_in(stopped)
    assert "already holds a run" in refusal(start_run, {"si": config_of()}, digits(), stopped, runtime=CPU)
    assert files_in(stopped) == before


# --- completed: started, resumed or read


def test_run_is_completed_from_any_state(tmp_path: Path, stopped: Path) -> None:
    configs = {"si": config_of()}
    expected = labelled(run_on([config_of()], digits(), CPU))
    claimed = tmp_path / "claimed"
    claimed.mkdir()
    (claimed / "run.json").touch()  # of a process that was killed before it started
    for folder in (tmp_path / "new", stopped, claimed):
        assert_results_equal(complete_run(configs, digits(), folder, runtime=CPU).results, expected)
        before = files_in(folder)
        (folder / "checkpoints").mkdir()  # left by a process that was killed at the very end
        assert_results_equal(complete_run(configs, [], folder, runtime=CPU).results, expected)
        assert files_in(folder) == before
        assert not (folder / "checkpoints").exists()


def test_run_of_other_settings_is_not_completed(stopped: Path) -> None:
    assert "holds a run of other settings" in refusal(
        complete_run, {"si": config_of(xi=0.5)}, digits(), stopped, runtime=CPU
    )
    exact = Runtime("cpu", "float64")
    assert "started with the precision tf32" in refusal(
        complete_run, {"si": config_of()}, digits(), stopped, runtime=exact
    )


def test_damaged_run_is_not_completed(tmp_path: Path) -> None:
    complete_run({"si": config_of()}, digits(), tmp_path, runtime=CPU)
    os.truncate(tmp_path / "results.json", 30)
    assert f"remove {tmp_path} to run it again" in refusal(
        complete_run, {"si": config_of()}, digits(), tmp_path, runtime=CPU
    )


# --- written while it trains


def make_folder(path: Path) -> folders.RunFolder:
    path.mkdir()
    return folders.RunFolder(path, (path / "log.txt").open("a"), {"si": config_of()}, {"data": []})


def test_writing_results_takes_at_most_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = [0.0], []

    def write(folder: Path, results: Any, dynamics: bool) -> None:
        written.append(clock[0])
        clock[0] += 2.0  # that is how long it takes

    monkeypatch.setattr(folders, "write_results", write)
    monkeypatch.setattr(folders.time, "monotonic", lambda: clock[0])
    folder = make_folder(tmp_path / "run")
    for _ in range(100):
        assert folder.save(dict) is None
        clock[0] += 1.0
    assert written == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert folder.save(dict, new=False) is None
    clock[0] = 200.0
    folder.save(dict, new=False)
    assert written[-1] == 200.0, "what was not due before is written when it is"
    clock[0] = 300.0
    folder.save(dict, new=False)
    assert written[-1] == 200.0, "nothing is new"


def test_seconds_are_saved_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(folders.time, "monotonic", lambda: clock[0])
    folder = make_folder(tmp_path / "run")
    folder.describe()
    for clock[0], saved in ((5.0, 0), (11.0, 11.0), (15.0, 11.0), (22.0, 22.0)):
        folder.save(dict, new=False)
        assert json.loads((tmp_path / "run" / "run.json").read_text())["seconds"] == saved


# --- lines


def test_each_line_of_progress_comes_once() -> None:
    configs = {"si": config_of(), "η 0.1": config_of("dhp")}
    outcomes = {("si", 0): outcome(0.5, 1), ("si", 1): outcome(0.75, 1), ("η 0.1", 0): outcome(0.25, 0)}
    lines = ProgressLines()
    progress = Progress(0.5, 0, configs, outcomes, task_ended=True, note="slow disk")
    assert lines.task_lines(progress) == ["si, task 1/2: 62.5 (mean of 2 trials)"]
    assert lines.warnings(progress) == ["slow disk"]
    outcomes["η 0.1", 0].rows.append([0.25])
    outcomes["si", 1].diverged = Divergence(1, 1, 4)
    assert lines.task_lines(progress) == ["η 0.1, task 1/2: 25.0 (one trial)"]
    assert lines.warnings(progress) == ["si, trial 2 diverged in task 2, step 5: its loss became NaN or infinite"]
    assert lines.task_lines(Progress(0.6, 1, configs, outcomes)) == []
