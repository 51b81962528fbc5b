"""A run that was stopped, however rudely, ends in the files of one that never was."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from builders import small_digits
from engram import InputError, Progress, preset
from engram.cli.main import main
from engram.config.settings import Config
from engram.engine import checkpoint
from engram.engine.build import Own
from engram.engine.checkpoint import Checkpoint, CheckpointFolder, Checkpoints
from engram.engine.learner import Outcome, Record
from engram.engine.loop import Place
from engram.engine.stacks import Share, plan_stacks
from engram.runs.experiment import Setting, run_on
from engram.runs.folder import opened
from engram.runs.result import Result
from engram.runs.start import resume_methods, run_methods

METHODS = ("dhp+si", "ewc", "dhp+mas", "finetune")


def configs(**changes: object) -> list[Config]:
    usual = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 3, "hidden": [12], "batch_size": 8}
    return [preset("imbalanced-permuted-mnist", m, **({"strength": 1.0} if m == "ewc" else {}) | usual | changes)
            for m in METHODS]  # fmt: skip


def begin(folder: Path, *, epochs: int = 3, max_stack: int | None = None, **options: object) -> list[Result]:
    """A run that is kept at every moment at which it can be."""
    return run_methods(
        configs(epochs=epochs),
        [small_digits(400)],
        folder,
        command="engram run",
        setting=Setting("cpu", max_stack=max_stack),
        seconds_between=0,
        **options,
    )


def go_on(folder: Path, **options: object) -> list[Result]:
    return resume_methods(folder, [small_digits(400)], seconds_between=0, **options)


def results_in(folder: Path) -> dict[str, bytes]:
    """Every file of every method."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin(folder)
    return folder


def path_of(folder: Path, stack: int = 0) -> Path:
    return CheckpointFolder(folder).of_stack(stack).path


def newest(folder: Path, **changes: object) -> Checkpoint | None:
    """The newest checkpoint of the first stack."""
    own = configs(**changes)
    found, warnings = CheckpointFolder(folder).of_stack(0).read(own, plan_stacks(own, None)[0])
    assert warnings == []
    return found


class Stop(Exception):
    """Stands for whatever ends a process."""


def assert_same(folder: Path, whole: Path) -> None:
    """The same results bit for bit, and nothing left behind."""
    assert results_in(folder) == results_in(whole)
    assert {path.name for path in folder.iterdir()} == {"run.json", "log.txt", *METHODS}
    assert "finished" in json.loads((folder / "run.json").read_text())


# --- killed


def in_a_process(folder: Path) -> None:
    """Begin the run, or go on with it."""
    torch.set_num_threads(1)
    go_on(folder) if (folder / "run.json").exists() else begin(folder, epochs=4)


def wait_for(condition: Callable[[], bool], process: multiprocessing.Process) -> None:
    for _ in range(6000):
        if condition() or not process.is_alive():
            return
        time.sleep(0.005)
    raise AssertionError("it took too long")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_at_ten_random_moments_a_run_ends_in_identical_files(tmp_path: Path) -> None:
    folder, reference = tmp_path / "run", tmp_path / "whole"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engram.runs.start", "torch._dynamo"])  # which torch.func imports, at length

    def start(folder: Path) -> multiprocessing.Process:
        process = context.Process(target=in_a_process, args=(folder,))
        process.start()
        log = folder / "log.txt"
        lines = log.read_text().count("\n") if log.exists() else 0
        wait_for(lambda: log.exists() and log.read_text().count("\n") > lines, process)
        return process

    process = start(reference)
    began = time.monotonic()
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - began

    chance = random.Random(0)
    kept = []
    for k in range(10):
        process = start(folder)
        time.sleep(seconds * chance.uniform(0, 0.1))  # ten of them are about half of the run
        assert process.is_alive(), f"the run ended before it was killed for the {k + 1}th time"
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        checkpoint = newest(folder, epochs=4)
        kept.append(None if checkpoint is None else tuple(checkpoint.header["place"][:3]))
    assert len(set(kept)) >= 3, f"it was always killed at the same place: {kept}"
    process = start(folder)
    process.join()
    assert process.exitcode == 0
    assert_same(folder, reference)


# --- stopped at each kind of place


def stopped_at(folder: Path, stop: Callable[[int, int, int], bool], **options: object) -> tuple[int, int, int]:
    """Stop the run right after a checkpoint at a place (task, epoch, piece); returns the place."""
    found: list[tuple[int, int, int]] = []
    save = Checkpoints.save

    def save_and_stop(self: Checkpoints, *given: object) -> None:
        save(self, *given)
        place = given[-1]
        if stop(place.task, place.epoch, place.piece):
            found.append((place.task, place.epoch, place.piece))
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_stop)
        with pytest.raises(Stop):
            begin(folder, **options)
    return found[0]


@pytest.mark.parametrize(
    "stop",
    [
        lambda task, epoch, piece: (task, epoch, piece) == (0, 0, 1),
        lambda task, epoch, piece: (task, epoch) == (1, 1) and piece == 3,
        lambda task, epoch, piece: (task, epoch, piece) == (1, 2, 0),
        lambda task, epoch, piece: (task, epoch, piece) == (2, 0, 0),
    ],
    ids=["first piece", "mid epoch", "epoch end", "task end"],
)
@pytest.mark.parametrize("max_stack", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_every_kind_of_place(
    tmp_path: Path, whole: Path, stop: Callable[[int, int, int], bool], max_stack: int | None
) -> None:
    stopped_at(tmp_path / "run", stop, max_stack=max_stack)
    assert path_of(tmp_path / "run").exists()
    seen: list[Progress] = []
    go_on(tmp_path / "run", report=seen.append)
    assert_same(tmp_path / "run", whole)
    assert any((progress.note or "").startswith("goes on from task") for progress in seen)


def test_a_run_goes_on_in_a_later_stack(tmp_path: Path, whole: Path) -> None:
    count = iter(range(1000))
    stopped_at(tmp_path / "run", lambda task, epoch, piece: (task, epoch, piece) == (1, 0, 0) and next(count) == 3,
               max_stack=2)  # fmt: skip
    assert path_of(tmp_path / "run", 3).exists()
    shares: list[float] = []
    go_on(tmp_path / "run", report=lambda progress: shares.append(progress.share) if not progress.note else None)
    assert_same(tmp_path / "run", whole)
    assert shares[:3] == [1 / 4, 2 / 4, 3 / 4]
    assert shares == sorted(shares)


def test_a_run_is_divided_as_it_was_though_memory_has_changed(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (2, 8):  # models that fit into memory, before and after
        monkeypatch.setattr("engram.engine.unit.largest_stack", lambda *given, limit=limit: limit)
        if limit == 2:
            stopped_at(tmp_path / "run", lambda task, epoch, piece: (task, epoch, piece) == (1, 1, 0))
    go_on(tmp_path / "run")
    assert_same(tmp_path / "run", whole)
    assert (tmp_path / "run" / "log.txt").read_text().count("8 models in 4 stacks: 2 + 2 + 2 + 2") == 2


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, whole: Path) -> None:
    def stop(progress: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        begin(tmp_path / "run", report=stop)
    folder = CheckpointFolder(tmp_path / "run")
    assert not folder.kept_any
    folder.make()
    half = folder.folder / ".stack-0.next.safetensors.abcd_123"
    half.write_bytes(b"half of one")
    folder.make()
    assert not half.exists()
    (tmp_path / "run" / "ewc" / ".accuracy.json.abcd_123").write_bytes(b"half of one")
    go_on(tmp_path / "run")
    assert_same(tmp_path / "run", whole)


def test_a_diverged_trial_stays_diverged_when_the_run_goes_on(tmp_path: Path) -> None:
    wild = [config.replace(learning_rate=1e18) if config.method == "ewc" else config for config in configs()]
    straight = run_on(wild, [small_digits(400)], Setting("cpu"))
    checkpoints = CheckpointFolder(tmp_path, seconds_between=0)

    def stop(progress: Progress) -> None:
        if progress.task == 1 and progress.results is None:
            raise Stop

    with pytest.raises(Stop):
        run_on(wild, [small_digits(400)], Setting("cpu", checkpoints=checkpoints), stop)
    resumed = run_on(wild, [small_digits(400)], Setting("cpu", checkpoints=CheckpointFolder(tmp_path)))
    assert [result.diverged for result in resumed] == [result.diverged for result in straight]
    assert [len(result.diverged) for result in straight] == [0, 2, 0, 0]
    for one, other in zip(resumed, straight, strict=True):
        assert np.array_equal(one.accuracy, other.accuracy, equal_nan=True)
        assert repr(one.dynamics) == repr(other.dynamics)  # NaN is not equal to itself


def test_modules_that_draw_go_on_drawing_where_they_stopped(tmp_path: Path) -> None:
    def features() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Dropout(0.5))

    (config, *_) = configs(network="custom", trials=1)

    def learn(
        checkpoints: CheckpointFolder | None, seed: int, report: Callable[[Progress], None]
    ) -> list[dict[str, float]]:
        torch.manual_seed(seed)
        setting = Setting("cpu", own=Own(features), checkpoints=checkpoints)
        return run_on([config], [small_digits(400)], setting, report)[0].dynamics

    def stop(progress: Progress) -> None:
        if progress.task == 1:
            raise Stop

    straight = learn(None, 3, lambda progress: None)
    kept = CheckpointFolder(tmp_path, seconds_between=0)
    with pytest.raises(Stop):
        learn(kept, 3, stop)
    assert learn(CheckpointFolder(tmp_path), 4, lambda progress: None) == straight
    assert learn(None, 4, lambda progress: None) == straight, "draws have an address, whatever was drawn before"
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    run_on([config], [small_digits(400)], Setting("cpu", own=Own(features)))
    assert torch.equal(torch.rand(3), expected), "and what is drawn after does not depend on them"


def test_a_checkpoint_is_of_the_moment_at_which_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on while it is written, and may have learned a task more by then."""
    gate = threading.Event()
    write = checkpoint.write_tensors

    def late(*given: object) -> None:
        gate.wait(10)
        write(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", late)
    (config,) = configs(trials=1)[:1]
    outcome = Outcome([0.1, 0.2, 0.3], [[0.5, 0.5]], [Record(0, 0, 0, 0, 1.0)])
    checkpoints = Checkpoints(tmp_path / "stack-0.safetensors")
    checkpoints.save([config], [], {(0, 0): outcome}, Place(task=1))
    outcome.rows.append([0.6, 0.6, 0.6])
    outcome.rows[0][0] = outcome.untrained[0] = 0.9
    outcome.records.append(Record(0, 1, 0, 0, 1.0))
    gate.set()
    checkpoints.wait()
    kept, _ = checkpoints.read([config], Share((0,), (0,)))
    found = kept.outcomes[0, 0]
    assert (found.untrained, found.rows, len(found.records)) == ([0.1, 0.2, 0.3], [[0.5, 0.5]], 1)


# --- refused


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in the middle."""
    folder = tmp_path_factory.mktemp("once") / "stopped"
    stopped_at(folder, lambda task, epoch, piece: (task, epoch, piece) == (1, 1, 2))
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(stopped_once, tmp_path / "stopped"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a command that must be refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["run", *map(str, arguments)])
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("engram: ")
    assert line.count("\n") == 1
    return line


def test_a_run_killed_in_its_last_moment_leaves_no_checkpoints(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    CheckpointFolder(folder).make()
    assert "is finished" in refusal(capsys, "--resume", folder)
    assert_same(folder, whole)


def test_a_finished_run_is_refused(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = results_in(whole), (whole / "log.txt").read_text()
    assert f"is finished; `engram table {whole}` shows it" in refusal(capsys, "--resume", whole)
    assert before == (results_in(whole), (whole / "log.txt").read_text())


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no folder" in refusal(capsys, "--resume", tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    assert "does not hold a run" in refusal(capsys, "--resume", tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == [], "it is not even touched"
    for content, words in [
        ("", "stopped before it began"),
        ("{", "cannot read"),
        ('{"name": "npm"}', "not a file of Engram"),
        ('{"format": 99}', "newer version"),
        ('{"format": 1, "methods": ["x"]}', "not a run of Engram"),
        ('{"format": 1, "methods": []}', "not a run of Engram"),
        ('{"format": 1, "methods": ["dhp"]}', "cannot use the settings"),
    ]:
        (tmp_path / "run" / "run.json").write_text(content)
        assert words in refusal(capsys, "--resume", tmp_path / "run")


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (["split-mnist"], "a BENCHMARK"),
        (["--methods", "dhp"], "--methods"),
        (["--trials", "3"], "--trials"),
        (["--set", "epochs=3"], "--set"),
        (["--device", "cpu"], "--device"),
        (["--precision", "float64"], "--precision"),
        (["--stack", "3"], "--stack"),
        (["--out", "elsewhere"], "--out"),
    ],
)
def test_nothing_about_a_run_can_be_chosen_again(
    stopped: Path, capsys: pytest.CaptureFixture[str], beside: list[str], said: str
) -> None:
    assert f"so {said} has no place beside it" in refusal(capsys, *beside, "--resume", stopped)


def test_a_run_that_is_at_work_is_refused_and_goes_on(stopped: Path, whole: Path) -> None:
    before = (stopped / "log.txt").read_text()
    with opened(stopped), pytest.raises(InputError, match="another process is at work"):
        go_on(stopped)
    assert (stopped / "log.txt").read_text() == before

    def intrude(progress: Progress) -> None:
        with pytest.raises(InputError, match="another process is at work"):
            go_on(stopped)

    go_on(stopped, report=intrude)
    assert_same(stopped, whole)


def test_other_data_are_refused(stopped: Path) -> None:
    for other in (small_digits(399), small_digits(400, first=1)):  # another number of samples; as many, but others
        with pytest.raises(InputError, match="the data are not those"):
            resume_methods(stopped, [other])
    assert path_of(stopped).exists()


def test_other_settings_are_refused(stopped: Path) -> None:
    path = stopped / "ewc" / "config.toml"
    path.write_text(path.read_text().replace("strength = 1.0", "strength = 2.0"))
    with pytest.raises(InputError, match="were changed since the run began"):
        go_on(stopped)


def test_other_settings_are_refused_though_nothing_was_kept_yet(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    path = next(stopped.glob("*/config.toml"))
    path.write_text(path.read_text().replace("epochs = 3", "epochs = 2"))
    with pytest.raises(InputError, match="were changed since the run began"):
        go_on(stopped)


def test_other_versions_are_noted_and_go_on(stopped: Path, whole: Path) -> None:
    description = json.loads((stopped / "run.json").read_text())
    description["versions"]["torch"] = "1.0"
    (stopped / "run.json").write_text(json.dumps(description))
    seen: list[Progress] = []
    go_on(stopped, report=seen.append)
    assert f"torch 1.0 is now {torch.__version__}" in seen[0].note
    assert f"torch 1.0 is now {torch.__version__}" in (stopped / "log.txt").read_text()
    assert results_in(stopped) == results_in(whole)


def damaged(content: bytes, how: str) -> bytes:
    if how == "a byte":
        place = len(content) // 2
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    return {
        "truncated": content[:-100],
        "half": content[: len(content) // 2],
        "header only": content[:8],
        "empty": b"",
        "other": b"\x89PNG" + bytes(100),
        "another header": content.replace(b'\\"finished\\": false', b'\\"finished\\": true '),
    }[how]


HOWS = ["a byte", "truncated", "half", "header only", "empty", "other", "another header"]


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(stopped: Path, how: str) -> None:
    path = path_of(stopped)
    path.write_bytes(damaged(path.read_bytes(), how))
    before = Checkpoints(path).before.read_bytes()
    found, (warning,) = CheckpointFolder(stopped).of_stack(0).read(configs(), plan_stacks(configs(), None)[0])
    assert found.path == Checkpoints(path).before
    assert found.path.read_bytes() == before
    assert str(path) in warning
    assert warning.endswith("the checkpoint before it is taken")


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(stopped: Path, whole: Path) -> None:
    path_of(stopped).write_bytes(damaged(path_of(stopped).read_bytes(), "half"))
    seen: list[Progress] = []
    go_on(stopped, report=seen.append)
    notes = [progress.note for progress in seen if progress.note]
    assert notes[0].endswith("the checkpoint before it is taken")
    assert notes[1] == "goes on from task 2, epoch 2"
    assert "the checkpoint before it is taken" in (stopped / "log.txt").read_text()
    assert_same(stopped, whole)


def test_a_missing_checkpoint_gives_way_to_the_one_before(stopped: Path, whole: Path) -> None:
    path_of(stopped).unlink()
    seen: list[Progress] = []
    go_on(stopped, report=seen.append)
    assert f"{path_of(stopped)} is missing: the checkpoint before it is taken" in [progress.note for progress in seen]
    assert_same(stopped, whole)


def test_where_both_checkpoints_are_damaged_nothing_is_overwritten(stopped: Path, whole: Path) -> None:
    both = [path_of(stopped), Checkpoints(path_of(stopped)).before]
    for path in both:
        path.write_bytes(damaged(path.read_bytes(), "half"))
    before = results_in(stopped)
    with pytest.raises(InputError, match="is damaged") as refused:
        go_on(stopped)
    assert str(both[0]) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert results_in(stopped) == before
    for path in stopped.glob("checkpoints/stack-0.*"):  # as the sentence says
        path.unlink()
    go_on(stopped)
    assert_same(stopped, whole)


def test_a_checkpoint_is_at_its_place_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between any two steps of writing, the newest or the one before is whole."""
    checkpoints = Checkpoints(tmp_path / "stack-0.safetensors")
    written: list[list[str]] = []
    for name in ("replace", "unlink"):
        usual = getattr(Path, name)

        def moved(self: Path, *given: object, usual: Callable = usual, **named: object) -> object:
            done = usual(self, *given, **named)
            written.append(sorted(path.name for path in tmp_path.iterdir()))
            return done

        monkeypatch.setattr(Path, name, moved)
    for n in range(3):
        checkpoints.save(configs(), [], {}, Place(task=n))
        checkpoints.wait()
        if n == 0:
            written.clear()
    assert written
    assert all("stack-0.safetensors" in names for names in written)


# --- the command


def test_the_command_goes_on_where_it_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("straight", "stopped")]
    command = ["run", "split-mnist", "--methods", "dhp+si,ewc", "--dataset", "mnist-small", "--trials", "2",
               "--epochs", "1", "--tasks", "3", "--set", "hidden=[12]", "--precision", "float64"]  # fmt: skip
    for folder in folders:
        with monkeypatch.context() as patch:
            if folder.name == "stopped":
                stop_at_checkpoint(patch, 2)
            with pytest.raises(SystemExit) as ended:
                main([*command, "--out", str(folder)])
        assert ended.value.code == (130 if folder.name == "stopped" else None)
    assert capsys.readouterr().err == f"engram: stopped; `engram run --resume {folders[1]}` resumes it\n"
    with pytest.raises(SystemExit) as ended:
        main(["run", "--resume", str(folders[1])])
    assert ended.value.code is None
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "goes on from task 3, epoch 1" in captured.out
    assert "dhp+si, task 3/3: " in captured.out
    assert "dhp+si, task 1/3: " not in captured.out
    assert "split-mnist on mnist-small, 3 tasks, 2 trials" in captured.out
    assert results_in(folders[0]) == results_in(folders[1])


def stop_at_checkpoint(patch: pytest.MonkeyPatch, task: int) -> None:
    """Ctrl-C after the checkpoint at the end of a task."""
    save = Checkpoints.save
    patch.setattr(Checkpoints, "is_due", lambda self, task_ended: task_ended)

    def interrupted(self: Checkpoints, *given: object) -> None:
        save(self, *given)
        if given[-1].task == task:
            raise KeyboardInterrupt

    patch.setattr(Checkpoints, "save", interrupted)


def test_checkpoints_are_due_after_a_while_and_sooner_at_a_task_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path / "x")
    due = {}
    for seconds in (1, 29.9, 30, 179.9, 180):
        now = 1000.0 + seconds
        due[seconds] = (checkpoints.is_due(False), checkpoints.is_due(True))
    no, yes = False, True
    assert due == {1: (no, no), 29.9: (no, no), 30: (no, yes), 179.9: (no, yes), 180: (yes, yes)}
