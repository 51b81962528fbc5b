"""TensorBoard reads what the result files say, of a run in one piece or stopped, in one stack or several."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from builders import small_digits
from engram import InputError, Progress, preset, run_many, streams
from engram.cli.main import main
from engram.common.errors import Divergence
from engram.config.settings import Config
from engram.engine.checkpoint import Checkpoints
from engram.engine.learner import Outcome, Record
from engram.engine.training import Runtime
from engram.runs.log import TAGS, TensorBoard, check_log
from engram.runs.result import Result
from engram.runs.run import read_run
from engram.runs.start import resume_run, start_run

pytest.importorskip("tensorboard")
METHODS = ("dhp+si", "finetune")
Curves = dict[str, list[tuple[int, np.float32]]]


def configs(**changes: object) -> list[Config]:
    """Trials of unequal length, so that their steps differ."""
    usual = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 8}
    return [preset("imbalanced-permuted-mnist", method, **usual | changes) for method in METHODS]


def begin(folder: Path, max_stack: int | None = None, **options: object) -> dict[str, Result]:
    options = {"log": "tensorboard", "seconds_between": 0} | options
    by_method = {config.method: config for config in configs()}
    return start_run(
        by_method, [small_digits()], folder, runtime=Runtime("cpu", max_stack=max_stack), **options
    ).results


def read(folder: Path) -> Curves:
    """The scalars of one run of TensorBoard's, by their tags."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, np.float32(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def expected(result: Result, place: int) -> Curves:
    """The curves of one trial, from its result."""
    trial = place + result.config.first_trial
    rows = [row for row in result.dynamics if row["trial"] == trial]
    ends = {row["task"]: row["step"] + 1 for row in rows}  # the last one's
    before = {task: sum(ends[n] for n in range(int(task))) for task in ends}
    curves = {
        tag: [(before[row["task"]] + row["step"] + 1, np.float32(row[name])) for row in rows]
        for name, tag in TAGS.items()
        if not np.isnan(rows[0][name])
    }
    learned = [n for n in range(result.config.num_tasks) if not np.isnan(result.accuracy[place, n, n])]
    for j in learned:
        curves[f"accuracy/task_{j + 1}"] = [
            (before[n] + ends[n], np.float32(result.accuracy[place, n, j])) for n in learned if n >= j
        ]
    if learned:
        averages = result.average_accuracy[place]
        curves["accuracy/average"] = [(before[n] + ends[n], np.float32(averages[n])) for n in learned]
    matrix, untrained = result.accuracy[place], result.untrained[place]
    for n in learned[1:]:
        so_far = matrix[: n + 1, : n + 1]
        transfers = {
            "bwt": np.mean([so_far[n, j] - so_far[j, j] for j in range(n)]),
            "fwt": np.mean([so_far[j, j + 1] - untrained[j + 1] for j in range(n)]),
            "forgetting": np.mean([max(so_far[j:n, j]) - so_far[n, j] for j in range(n)]),
        }
        for name, value in transfers.items():
            curves.setdefault(f"transfer/{name}", []).append((before[n] + ends[n], np.float32(value)))
    return curves


def assert_equal(found: Curves, wanted: Curves) -> None:
    """To single precision, in which TensorBoard keeps numbers."""
    assert found.keys() == wanted.keys()
    for tag, curve in found.items():
        assert [step for step, _ in curve] == [step for step, _ in wanted[tag]], tag
        slack = 1e-6 if tag.startswith("transfer/") else 0  # here they are summed in another order
        np.testing.assert_allclose([v for _, v in curve], [v for _, v in wanted[tag]], rtol=slack, atol=slack / 10)


def assert_told(folder: Path, results: dict[str, Result]) -> None:
    """Every number of the results, once, and none besides; and the means of all trials."""
    for result in results.values():
        of_trials = [read(folder / result.config.method / f"trial-{k}") for k in range(result.config.trials)]
        for k, curves in enumerate(of_trials):
            assert_equal(curves, expected(result, k))
            assert curves["transfer/bwt"][-1][1] == np.float32(result.bwt[k])
            assert curves["transfer/fwt"][-1][1] == np.float32(result.forward_transfer[k])
            assert curves["transfer/forgetting"][-1][1] == np.float32(result.forgetting[k])
        mean = read(folder / result.config.method / "mean")
        assert mean.keys() == of_trials[0].keys()
        for tag, curve in mean.items():
            steps = np.mean([[step for step, _ in curves[tag]] for curves in of_trials], axis=0)
            values = np.mean([[float(value) for _, value in curves[tag]] for curves in of_trials], axis=0)
            assert [step for step, _ in curve] == [round(step) for step in steps]
            np.testing.assert_allclose([value for _, value in curve], values, rtol=1e-6, atol=1e-7)
        for n in range(result.config.num_tasks):
            written = [mean[f"accuracy/task_{j + 1}"][n - j][1] for j in range(n + 1)]
            assert written == list(result.accuracy.mean(axis=0)[n, : n + 1].astype(np.float32))


class Stop(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("max_stack", [None, pytest.param(1, marks=pytest.mark.slow)], ids=["one stack", "four stacks"])
def test_tensorboard_reads_what_the_results_say(tmp_path: Path, max_stack: int | None) -> None:
    results = begin(tmp_path / "run", max_stack=max_stack)
    rows = results["dhp+si"].dynamics
    assert rows[-1]["step"] != rows[len(rows) // 2 - 1]["step"]
    assert_told(tmp_path / "run" / "tensorboard", results)
    assert_told(tmp_path / "run" / "tensorboard", read_run(tmp_path / "run").results)


@pytest.mark.parametrize("max_stack", [None, pytest.param(1, marks=pytest.mark.slow)], ids=["one stack", "four stacks"])
def test_a_run_that_was_stopped_tells_nothing_twice(
    tmp_path: Path, max_stack: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    written: list[int] = []

    def stop(progress: Progress) -> None:
        """Well after the last checkpoint, so that some of what was written is learned again."""
        if progress.done > 0.7:
            monkeypatch.setattr(Checkpoints, "is_due", lambda *given: False)
            trials = (folder / "tensorboard").glob("*/trial-*")
            written.append(sum(len(read(trial)["training/loss"]) for trial in trials))
        if progress.done > 0.95:
            raise Stop

    with pytest.raises(Stop):
        begin(folder, max_stack=max_stack, report=stop)
    assert written[-1] > written[0], "it is written during training"
    monkeypatch.undo()
    results = resume_run(folder, [small_digits()]).results
    assert_told(folder / "tensorboard", results)
    assert json.loads((folder / "run.json").read_text())["log"] == "tensorboard"


def test_a_trial_that_diverges_leaves_the_mean_to_the_others(tmp_path: Path) -> None:
    (config, _) = configs(num_tasks=2)
    board = TensorBoard(tmp_path)
    sound, lost = Outcome(), Outcome()

    def update() -> Curves:
        board(Progress(0.5, 0, {config.method: config}, {(config.method, 0): sound, (config.method, 1): lost}))
        return read(tmp_path / config.method / "mean") if (tmp_path / config.method / "mean").exists() else {}

    sound.records.append(Record(0, 0, 0, 4, 2.0))
    assert update() == {}, "it waits for the other trial"
    lost.records.append(Record(1, 0, 0, 6, 4.0))
    assert update() == {"training/loss": [(6, 3.0)]}
    lost.diverged = Divergence(1, 0, 8)
    sound.records.append(Record(0, 0, 1, 9, 1.0))
    sound.rows.append([0.5, 0.25])
    after = {"training/loss": [(6, 3.0), (10, 1.0)], "accuracy/average": [(10, 0.5)], "accuracy/task_1": [(10, 0.5)]}
    assert update() == after
    assert update() == after, "what is not new is not written again"
    assert read(tmp_path / config.method / "trial-1") == {"training/loss": [(7, 4.0)]}


def test_points_of_a_grid_have_folders_of_their_own(tmp_path: Path) -> None:
    arrays = (np.eye(6, 4), np.arange(6) % 2)
    grid = [preset("custom", "dhp", trials=1, epochs=1, batch_size=2, hidden=[4], eta=eta) for eta in (0.1, 0.2)]
    run_many(grid, stream=streams.from_arrays([arrays * 2]), device="cpu", report=TensorBoard(tmp_path / "log"))
    assert {path.name for path in (tmp_path / "log").iterdir()} == {"0-dhp", "1-dhp"}
    first = [read(tmp_path / "log" / name / "trial-0")["trace/eta"][0][1] for name in ("0-dhp", "1-dhp")]
    assert first == pytest.approx([0.1, 0.2], abs=0.05)
    with pytest.raises(InputError, match="log is not an empty folder"):
        TensorBoard(tmp_path / "log")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_logged_to_is_said_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("run", "split-mnist", "--dataset", "mnist-small", "--out", tmp_path / "run", "--log")
    unknown = refused(capsys, *command, "tensorbord")
    meant = "(did you mean tensorboard?), only tensorboard, mlflow, wandb"
    assert unknown == f"engram: there is no log 'tensorbord' {meant}\n"
    for name in ("tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        missing = refused(capsys, *command, name)
        assert missing == f"engram: {name} is not installed: pip install 'engram-cl[{name}]'\n"
    assert not (tmp_path / "run").exists()


def test_a_folder_that_wandb_made_is_not_taken_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(InputError, match="wandb is not installed"):
        check_log("wandb")


def test_without_a_log_there_are_no_event_files(tmp_path: Path) -> None:
    begin(tmp_path / "run", log=None)
    assert not (tmp_path / "run" / "tensorboard").exists()
