"""A run that was stopped or killed, at any moment, ends with the files of an uninterrupted one."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from builders import command_refusal, current, files_in, refusal, small_digits, wait_for
from engram import InputError, preset
from engram.cli.main import main
from engram.common.files import locked
from engram.config.settings import Config
from engram.data import streams
from engram.engine.checkpoint import CheckpointFolder, Checkpoints
from engram.engine.learner import Progress
from engram.engine.stacks import plan_stacks
from engram.engine.training import Runtime
from engram.nn.networks import Network
from engram.runs.display import RunDisplay
from engram.runs.folder import LOG, logged_lines
from engram.runs.run import Run, read_run
from engram.runs.start import resume_run, start_run

METHODS = ("dhp+si", "ewc", "dhp+mas", "finetune")
RESULTS = ("results.json", "dynamics.csv")


def configs(**changes: object) -> dict[str, Config]:
    usual = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 3, "hidden": [12], "batch_size": 8}
    strengths = {"ewc": {"strength": 1.0}}
    return {m: preset("imbalanced-permuted-mnist", m, **strengths.get(m, {}) | usual | changes) for m in METHODS}


def start(folder: Path, *, epochs: int = 3, max_stack: int | None = None, **options: Any) -> Run:
    """A run that is saved at every position."""
    runtime = Runtime("cpu", max_stack=max_stack)
    options = {"command": "engram run", "runtime": runtime, "seconds_between": 0} | options
    return start_run(configs(epochs=epochs), [small_digits(400)], folder, **options)


def resume(folder: Path, **options: Any) -> Run:
    return resume_run(folder, [small_digits(400)], **{"seconds_between": 0} | options)


def checkpoints_of(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "checkpoints")


def results_in(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def assert_finished(folder: Path, whole: Path) -> None:
    """The same results, bit for bit, and nothing else left behind."""
    assert results_in(folder) == results_in(whole)
    assert {path.name for path in folder.iterdir()} == {"run.json", "log.txt", *RESULTS}
    assert json.loads((folder / "run.json").read_text())["finished"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A model that trains alone gets all threads, one of many gets one: sums differ in last digits between the two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder)
    return folder


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def interrupted_at(folder: Path, where: tuple[int, int, int], **options: Any) -> None:
    """Interrupt the run right after the checkpoint at a position (task, epoch, piece)."""
    save = Checkpoints.save

    def save_and_stop(self: Checkpoints, *given: Any) -> None:
        save(self, *given)
        position = given[-1]
        if (position.task, position.epoch, position.piece) == where:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_stop)
        with pytest.raises(Interrupted):
            start(folder, **options)


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("once") / "stopped"
    interrupted_at(folder, (1, 1, 2))
    return folder


@pytest.fixture
def stopped(interrupted_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(interrupted_once, tmp_path / "stopped"))


# --- killed


def start_or_resume(folder: Path) -> None:
    torch.set_num_threads(1)
    resume(folder) if (folder / "run.json").exists() else start(folder, epochs=4)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_run_killed_at_ten_random_moments_leaves_identical_files(tmp_path: Path) -> None:
    folder, reference = tmp_path / "run", tmp_path / "whole"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engram.runs.start", "torch._dynamo"])  # which torch.func imports, slowly

    def in_a_process(folder: Path) -> multiprocessing.Process:
        process = context.Process(target=start_or_resume, args=(folder,))
        process.start()
        log = folder / "log.txt"
        lines = log.read_text().count("\n") if log.exists() else 0
        wait_for(lambda: log.exists() and log.read_text().count("\n") > lines, still_running=process.is_alive)
        return process

    process = in_a_process(reference)
    started = time.monotonic()
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - started

    chance = random.Random(0)
    (plan,) = plan_stacks(configs(epochs=4), None)
    positions = []
    for k in range(10):
        process = in_a_process(folder)
        time.sleep(seconds * chance.uniform(0, 0.1))  # ten of them are about half of the run
        assert process.is_alive(), f"the run ended before it was killed for the {k + 1}th time"
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        saved, warnings = checkpoints_of(folder).of_stack(0).read(configs(epochs=4), plan)
        assert warnings == []
        positions.append(None if saved is None else tuple(saved.header["position"][:3]))
    assert len(set(positions)) >= 3, f"it was always killed at the same position: {positions}"
    process = in_a_process(folder)
    process.join()
    assert process.exitcode == 0
    assert_finished(folder, reference)


def test_interrupted_run_keeps_the_results_of_finished_tasks(stopped: Path) -> None:
    for result in read_run(stopped).results.values():
        assert result.trials == (0, 1)
        assert np.isfinite(result.accuracy[:, 0, 0]).all()
        assert result.tasks_learned == 1


# --- resumed


@pytest.mark.parametrize("max_stack", [None, 3])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, whole: Path, max_stack: int | None) -> None:
    folder = tmp_path / "run"
    interrupted_at(folder, (1, 1, 3), max_stack=max_stack)
    seen: list[Progress] = []
    resume(folder, report=seen.append)
    assert_finished(folder, whole)
    assert "resumes at task 2, epoch 2" in [progress.note for progress in seen]
    assert "resumes at task 2, epoch 2" in (folder / "log.txt").read_text()


def test_resumed_run_repeats_no_line_about_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(progress: Progress) -> None:
        if progress.done > 0.6:  # in the second of three stacks
            raise Interrupted

    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        start(folder, max_stack=3, report=stop)
    before = logged_lines(folder)
    display = RunDisplay(configs(), Console(), before)
    resume(folder, report=display.show)
    lines = [line.partition("  ")[2] for line in (folder / "log.txt").read_text().splitlines()]
    of_tasks = [line for line in lines if ", task " in line]
    assert len(of_tasks) == len(set(of_tasks))
    printed = capsys.readouterr().out.splitlines()
    assert any(", task " in line for line in printed)
    assert not any(", task " in line for line in before & set(printed))


def test_run_without_a_checkpoint_starts_again(tmp_path: Path, whole: Path) -> None:
    def stop(progress: Progress) -> None:
        raise Interrupted

    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        start(folder, report=stop)
    assert not checkpoints_of(folder).any_saved
    (folder / ".results.json.abcd_123").write_bytes(b"half of one")
    resume(folder)
    assert_finished(folder, whole)
    assert "nothing was saved yet" in (folder / "log.txt").read_text()


def test_run_resumes_from_the_previous_checkpoint_if_the_newest_is_damaged(stopped: Path, whole: Path) -> None:
    path = checkpoints_of(stopped).of_stack(0).path
    path.write_bytes(path.read_bytes()[:1000])
    resume(stopped)
    assert "the previous checkpoint is used" in (stopped / "log.txt").read_text()
    assert_finished(stopped, whole)


def test_streams_and_models_of_a_run_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: Counter[str] = Counter()

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            built[what] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(streams, "imbalanced", counted("streams", streams.imbalanced))
    monkeypatch.setattr(Network, "__init__", counted("models", Network.__init__))
    start(tmp_path / "run", epochs=1)
    assert built == {"streams": 2, "models": 4 * 2}


# --- refused


def printed_again(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What `engram run --resume` prints of a run that is finished."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "--resume", str(folder)])
    assert not ended.value.code
    return capsys.readouterr().out


def test_finished_run_is_printed_again(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_in(whole)
    printed = printed_again(capsys, whole)
    assert printed.startswith(f"The run in {whole} was finished already.\n")
    assert "imbalanced-permuted-mnist on mnist-small, 3 tasks, 2 trials" in printed
    assert files_in(whole) == before
    assert "is finished; `engram table" in refusal(resume_run, whole, [small_digits(400)])


def test_checkpoints_of_a_run_that_was_killed_at_the_very_end_are_removed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    checkpoints_of(folder).make()
    assert "was finished already" in printed_again(capsys, folder)
    assert_finished(folder, whole)


def test_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert "there is no folder" in command_refusal(capsys, "run", "--resume", folder)
    folder.mkdir()
    assert "does not hold a run" in command_refusal(capsys, "run", "--resume", folder)
    assert list(folder.iterdir()) == [], "it is not even touched"
    for content, words in [
        ("", "stopped before it started"),
        ("{", "is damaged (it is not valid JSON)"),
        ('{"name": "npm"}', "not a file of Engram"),
        ('{"format": 99}', "newer version"),
        ('{"format": 1}', "old format"),
        (current(configs={}), "run.json"),
    ]:
        (folder / "run.json").write_text(content)
        assert words in command_refusal(capsys, "run", "--resume", folder)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["split-mnist"], "BENCHMARK"),
        (["--methods", "dhp"], "--methods"),
        (["--trials", "3"], "--trials"),
        (["--set", "epochs=3"], "--set"),
        (["--device", "cpu"], "--device"),
        (["--precision", "float64"], "--precision"),
        (["--stack", "3"], "--stack"),
        (["--out", "elsewhere"], "--out"),
    ],
)
def test_settings_cannot_be_given_when_a_run_is_resumed(
    stopped: Path, capsys: pytest.CaptureFixture[str], given: list[str], named: str
) -> None:
    assert f"so {named} cannot be given with it" in command_refusal(capsys, "run", *given, "--resume", stopped)


def test_run_of_another_process_is_refused_and_not_disturbed(stopped: Path, whole: Path) -> None:
    before = (stopped / "log.txt").read_text()
    with locked(stopped / LOG), pytest.raises(InputError, match="another process"):
        resume(stopped)
    assert (stopped / "log.txt").read_text() == before

    def intrude(progress: Progress) -> None:
        with pytest.raises(InputError, match="another process"):
            resume(stopped)

    resume(stopped, report=intrude)
    assert_finished(stopped, whole)


def test_changed_data_are_refused(stopped: Path) -> None:
    for other in (small_digits(399), small_digits(400, first=1)):  # another number of samples; as many, but others
        with pytest.raises(InputError, match="the data are not those"):
            resume_run(stopped, [other])
    assert checkpoints_of(stopped).any_saved


@pytest.mark.parametrize("any_saved", [True, False])
def test_changed_settings_are_refused(stopped: Path, any_saved: bool) -> None:
    if not any_saved:
        checkpoints_of(stopped).remove()
    text = (stopped / "run.json").read_text()
    assert '"strength": 1.0' in text
    (stopped / "run.json").write_text(text.replace('"strength": 1.0', '"strength": 2.0'))
    with pytest.raises(InputError, match="were changed since the run started"):
        resume(stopped)


def test_changed_versions_and_threads_are_reported_and_the_first_ones_stay_recorded(stopped: Path, whole: Path) -> None:
    about = json.loads((stopped / "run.json").read_text())
    about["versions"]["torch"] = "1.0"
    about["environment"]["threads"] = 64
    (stopped / "run.json").write_text(json.dumps(about))
    seen: list[Progress] = []
    resume(stopped, report=seen.append)
    for change in (f"torch 1.0 is now {torch.__version__}", f"threads 64 is now {torch.get_num_threads()}"):
        assert any(change in (progress.note or "") for progress in seen)
        assert change in (stopped / "log.txt").read_text()
    assert results_in(stopped) == results_in(whole)
    after = json.loads((stopped / "run.json").read_text())
    assert (after["versions"], after["environment"]) == (about["versions"], about["environment"])


# --- the command


def test_command_resumes_a_run_that_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("straight", "stopped")]
    command = ["run", "split-mnist", "--methods", "dhp+si,ewc", "--dataset", "mnist-small", "--trials", "2",
               "--epochs", "1", "--tasks", "3", "--set", "hidden=[12]", "--precision", "float64"]  # fmt: skip
    for folder in folders:
        with monkeypatch.context() as patch:
            if folder.name == "stopped":
                interrupt_after_task(patch, 2)
            with pytest.raises(SystemExit) as ended:
                main([*command, "--out", str(folder)])
        assert ended.value.code == (130 if folder.name == "stopped" else None)
    assert capsys.readouterr().err == f"engram: stopped; `engram run --resume {folders[1]}` resumes it\n"
    with pytest.raises(SystemExit) as ended:
        main(["run", "--resume", str(folders[1])])
    assert ended.value.code is None
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "resumes at task 3, epoch 1" in captured.out
    assert "dhp+si, task 3/3: " in captured.out
    assert "dhp+si, task 1/3: " not in captured.out
    assert "split-mnist on mnist-small, 3 tasks, 2 trials" in captured.out
    assert results_in(folders[0]) == results_in(folders[1])


def interrupt_after_task(patch: pytest.MonkeyPatch, task: int) -> None:
    """Ctrl-C after the checkpoint at the end of a task."""
    save = Checkpoints.save
    patch.setattr(Checkpoints, "is_due", lambda self, task_ended: task_ended)

    def interrupted(self: Checkpoints, *given: Any) -> None:
        save(self, *given)
        if given[-1].task == task:
            raise KeyboardInterrupt

    patch.setattr(Checkpoints, "save", interrupted)
