"""Checkpoints: a resumed stack equals an uninterrupted one, bit for bit, and damage never goes unnoticed."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from builders import interrupted, small_digits, train
from engram import InputError, preset
from engram.common.errors import Stopped
from engram.common.tensor_file import write_tensors
from engram.config.settings import Config
from engram.engine import checkpoint, in_process
from engram.engine.build import Custom
from engram.engine.checkpoint import CheckpointFolder, Checkpoints
from engram.engine.choose import choose_program
from engram.engine.learner import Outcome, Outcomes, Progress, Record
from engram.engine.loop import Position, run_stream
from engram.engine.stacks import Source, StackPlan, plan_stacks
from engram.engine.training import Runtime

METHODS = ("dhp+si", "ewc", "dhp+mas", "finetune")
Where = tuple[int, int, int]  # task, epoch, piece


def configs(methods: Sequence[str] = METHODS, **changes: object) -> dict[str, Config]:
    usual = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 2, "hidden": [12], "batch_size": 8}
    strengths = {"ewc": {"strength": 1.0}}
    return {m: preset("imbalanced-permuted-mnist", m, **strengths.get(m, {}) | usual | changes) for m in methods}


def learn(folder: Path | None = None, chosen: dict[str, Config] | None = None, **options: Any) -> Outcomes:
    """Train, with a checkpoint at every position."""
    runtime = Runtime("cpu", max_stack=options.pop("max_stack", None))
    options = {"checkpoints": folder, "seconds_between": 0} | options
    return train(chosen or configs(), Source((small_digits(160, 60),)), runtime, **options)


@pytest.fixture(scope="module")
def straight() -> str:
    """The outcomes of training that was never interrupted, as text: NaN is not equal to itself."""
    return in_order(learn())


def in_order(outcomes: Outcomes) -> str:
    return repr(sorted(outcomes.items()))


def interrupted_at(folder: Path, stop: Callable[[Where], bool], **options: Any) -> None:
    """Train until right after the checkpoint at some position."""
    with interrupted(stop):
        learn(folder, **options)


# --- resumed equals uninterrupted


@pytest.mark.parametrize("fitting", [1, 4])
def test_a_stack_that_no_longer_fits_trains_in_halves(
    tmp_path: Path, straight: str, monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    """As when another program takes some of the GPU's memory after the first task."""

    def run(program: Any, batches: Any, config: Any, position: Any, on_position: Callable[[bool], None]) -> None:
        def full(task_ended: bool) -> None:
            on_position(task_ended)
            if task_ended and len(program.learners) > fitting:
                raise torch.cuda.OutOfMemoryError("full")

        run_stream(program, batches, config, position, full)

    monkeypatch.setattr(in_process, "run_stream", run)
    seen: list[Progress] = []
    assert in_order(learn(tmp_path / "checkpoints", report=seen.append)) == straight
    said = [progress.note for progress in seen if progress.note and "in two halves" in progress.note]
    assert said[0].startswith("8 models no longer fit into the GPU's memory")
    assert len(said) == 8 // fitting - 1
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    monkeypatch.undo()
    assert in_order(learn(tmp_path / "checkpoints")) == straight, "finished"


def test_halves_that_are_stopped_again_and_again_come_to_their_end(
    tmp_path: Path, straight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `--minutes`: each half has checkpoints of its own."""

    def run(program: Any, batches: Any, config: Any, position: Any, on_position: Callable[[bool], None]) -> None:
        if len(program.learners) > 4:
            raise torch.cuda.OutOfMemoryError("full")
        run_stream(program, batches, config, position, on_position)

    monkeypatch.setattr(in_process, "run_stream", run)
    stopped, found = 0, None
    while found is None and stopped < 50:
        asked = iter([False] * 12)
        try:
            found = learn(tmp_path / "checkpoints", stop_asked=lambda asked=asked: next(asked, True))
        except Stopped:
            stopped += 1
    assert found is not None
    assert in_order(found) == straight
    assert stopped > 2


def on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Programs are chosen as on this device, wherever the tensors are."""
    monkeypatch.setattr(in_process, "choose_program", lambda *given: choose_program(*given[:2], torch.device(device)))


def test_losses_of_half_an_epoch_stay_their_model_s_where_the_order_of_models_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU section follows section; on a CPU models are in the order of the stack."""
    runs = []
    for device in ("cpu", "cuda"):
        on_device(monkeypatch, device)
        interrupted_at(
            tmp_path / device, lambda position: position == (1, 1, 3), chosen=configs(("dhp", "fast-weights"))
        )
        on_device(monkeypatch, "cpu")
        runs.append(learn(tmp_path / device, configs(("dhp", "fast-weights"))))
    for key, outcome in runs[0].items():
        for one, other in zip(outcome.records, runs[1][key].records, strict=True):
            assert list(vars(one).values()) == pytest.approx(list(vars(other).values()), rel=1e-3, nan_ok=True), key


def test_a_model_that_overflowed_takes_nobody_with_it_on_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has noticed it before the end of the epoch, and its numbers do not say whether it can be mapped."""
    on_device(monkeypatch, "cuda")
    chosen = configs(("dhp", "steady"))
    chosen["dhp"] = chosen["dhp"].replace(learning_rate=3e38)
    straight = learn(chosen=chosen)
    assert [outcome.diverged is None for outcome in straight.values()] == [False, True] * 2
    interrupted_at(tmp_path / "checkpoints", lambda position: position == (0, 0, 2), chosen=chosen)
    assert in_order(learn(tmp_path / "checkpoints", chosen)) == in_order(straight)


def test_one_model_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(in_process, "run_stream", run)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        learn()


@pytest.mark.parametrize(
    "where", [(0, 0, 1), (1, 1, 3), (1, 1, 0), (2, 0, 0)], ids=["first piece", "mid epoch", "epoch end", "task end"]
)
@pytest.mark.parametrize("max_stack", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, straight: str, where: Where, max_stack: int | None
) -> None:
    folder = tmp_path / "checkpoints"
    interrupted_at(folder, lambda position: position == where, max_stack=max_stack)
    seen: list[Progress] = []
    assert in_order(learn(folder, max_stack=max_stack, report=seen.append)) == straight
    task, epoch, _ = where
    assert f"resumes at task {task + 1}, epoch {epoch + 1}" in [progress.note for progress in seen]


def test_finished_stacks_are_not_trained_again(tmp_path: Path, straight: str) -> None:
    count = iter(range(1000))
    folder = tmp_path / "checkpoints"
    interrupted_at(folder, lambda position: position == (1, 0, 0) and next(count) == 3, max_stack=2)
    seen: list[Progress] = []
    assert in_order(learn(folder, report=seen.append)) == straight
    done = [progress.done for progress in seen if not progress.note]
    assert done[:3] == [1 / 4, 2 / 4, 3 / 4]
    assert done == sorted(done)


def test_resumed_run_uses_the_same_stacks_though_free_memory_has_changed(
    tmp_path: Path, straight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    monkeypatch.setattr("engram.engine.stacks.largest_stack", lambda *given: 2)
    interrupted_at(folder, lambda position: position == (1, 1, 0))
    monkeypatch.setattr("engram.engine.stacks.largest_stack", lambda *given: 8)
    seen: list[Progress] = []
    assert in_order(learn(folder, report=seen.append)) == straight
    assert seen[0].note == "8 models in 4 stacks of 2"


def test_diverged_trial_stays_diverged_when_resumed(tmp_path: Path) -> None:
    chosen = configs()
    chosen["ewc"] = chosen["ewc"].replace(learning_rate=1e18)
    whole = learn(chosen=chosen)
    assert {label for (label, _), outcome in whole.items() if outcome.diverged} == {"ewc"}
    folder = tmp_path / "checkpoints"
    interrupted_at(folder, lambda position: position[0] == 1, chosen=chosen)
    assert in_order(learn(folder, chosen)) == in_order(whole)


def test_a_failed_trial_is_resumed_with_its_reason(tmp_path: Path) -> None:
    base = configs(epochs=1, network="none")["finetune"].replace(method="slda", random_features=500)
    chosen = {"lost": base.replace(shrinkage=0.0), "kept": base}
    whole = learn(chosen=chosen)
    assert {label for (label, _), outcome in whole.items() if outcome.diverged} == {"lost"}
    assert "the second moment of the 500 features is singular" in str(whole["lost", 1].diverged.why)
    folder = tmp_path / "checkpoints"
    interrupted_at(folder, lambda position: position[0] == 1, chosen=chosen)
    assert in_order(learn(folder, chosen)) == in_order(whole)


def test_modules_that_draw_random_numbers_resume_their_draws(tmp_path: Path) -> None:
    def features() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Dropout(0.5))

    options: dict[str, Any] = {"chosen": {"mine": configs(network="custom", trials=1)["dhp+si"]}}
    options["custom"] = Custom(features)
    folder = tmp_path / "checkpoints"

    torch.manual_seed(3)
    whole = in_order(learn(**options))
    torch.manual_seed(3)
    interrupted_at(folder, lambda position: position[0] == 1, **options)
    torch.manual_seed(4)
    assert in_order(learn(folder, **options)) == whole
    torch.manual_seed(4)
    assert in_order(learn(**options)) == whole, "draws depend on the step, not on what was drawn before"
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    learn(**options)
    assert torch.equal(torch.rand(3), expected), "and what is drawn afterwards does not depend on them"


def test_stopping_saves_the_position_though_no_checkpoint_is_due(tmp_path: Path, straight: str) -> None:
    folder = tmp_path / "checkpoints"
    seen: list[Progress] = []
    with pytest.raises(Stopped):  # before anything is learned
        learn(folder, seconds_between=1000, stop_asked=lambda: True)
    assert not CheckpointFolder(folder).any_saved
    for done in (0.2, 0.5, 0.9):
        with pytest.raises(Stopped):
            learn(
                folder,
                seconds_between=1000,
                report=seen.append,
                stop_asked=lambda done=done: bool(seen) and seen[-1].done > done,
            )
        assert done < seen[-1].done < done + 0.1
    assert in_order(learn(folder)) == straight


def test_checkpoint_holds_the_state_at_the_moment_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues while it is written, and may have learned another task by then."""
    gate = threading.Event()
    write = checkpoint.write_tensors

    def late(*given: Any) -> None:
        gate.wait(10)
        write(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", late)
    chosen = {"mine": configs(trials=1)["dhp+si"]}
    outcome = Outcome([0.1, 0.2, 0.3], [[0.5, 0.5]], [Record(0, 0, 0, 0, 1.0)])
    checkpoints = Checkpoints(tmp_path / "stack-0.safetensors")
    checkpoints.save(chosen, [], {("mine", 0): outcome}, Position(task=1))
    outcome.rows.append([0.6, 0.6, 0.6])
    outcome.rows[0][0] = outcome.untrained[0] = 0.9
    outcome.records.append(Record(0, 1, 0, 0, 1.0))
    gate.set()
    checkpoints.wait()
    saved, _ = checkpoints.read(chosen, StackPlan(("mine",), (0,)))
    assert saved is not None
    found = saved.outcomes["mine", 0]
    assert (found.untrained, found.rows, len(found.records)) == ([0.1, 0.2, 0.3], [[0.5, 0.5]], 1)


# --- when, and in which files


def test_checkpoints_are_due_every_three_minutes_and_at_the_end_of_a_task_every_thirty_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints = CheckpointFolder(tmp_path).of_stack(0)
    due = {}
    for seconds in (1, 29.9, 30, 179.9, 180):
        now = 1000.0 + seconds
        due[seconds] = (checkpoints.is_due(False), checkpoints.is_due(True))
    no, yes = False, True
    assert due == {1: (no, no), 29.9: (no, no), 30: (no, yes), 179.9: (no, yes), 180: (yes, yes)}
    checkpoints.save(configs(), [], {}, Position())
    checkpoints.wait()
    assert not checkpoints.is_due(True), "the time counts from the last checkpoint"


def test_checkpoints_are_written_only_when_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Where] = []
    save = Checkpoints.save

    def counted(self: Checkpoints, *given: Any) -> None:
        saved.append((given[-1].task, given[-1].epoch, given[-1].piece))
        save(self, *given)

    monkeypatch.setattr(Checkpoints, "save", counted)
    learn(tmp_path / "a", seconds_between=1000)
    assert saved == [(3, 0, 0)], "the end alone"
    saved.clear()
    monkeypatch.setattr(Checkpoints, "is_due", lambda self, task_ended: task_ended)
    learn(tmp_path / "b")
    assert saved == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]


def test_a_whole_checkpoint_exists_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between any two steps of writing, the newest or the previous one is there."""
    checkpoints = Checkpoints(tmp_path / "stack-0.safetensors")
    written: list[list[str]] = []
    for name in ("replace", "unlink"):
        usual = getattr(Path, name)

        def moved(self: Path, *given: Any, usual: Callable = usual, **named: Any) -> object:
            done = usual(self, *given, **named)
            written.append(sorted(path.name for path in tmp_path.iterdir()))
            return done

        monkeypatch.setattr(Path, name, moved)
    for n in range(3):
        checkpoints.save(configs(), [], {}, Position(task=n))
        checkpoints.wait()
        if n == 0:
            written.clear()
    assert written
    assert all("stack-0.safetensors" in names for names in written)


def test_half_written_files_are_removed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.make()
    half = folder.path / ".stack-0.next.safetensors.abcd_123"
    half.write_bytes(b"half of one")
    assert not folder.any_saved
    folder.make()
    assert not half.exists()


# --- damaged


@pytest.fixture(scope="module")
def interrupted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run that was interrupted in the middle."""
    folder = tmp_path_factory.mktemp("once") / "checkpoints"
    interrupted_at(folder, lambda position: position == (1, 1, 2))
    return folder


@pytest.fixture
def saved(interrupted_once: Path, tmp_path: Path) -> CheckpointFolder:
    """A copy of them, to be damaged."""
    return CheckpointFolder(Path(shutil.copytree(interrupted_once, tmp_path / "checkpoints")))


def damaged(content: bytes, how: str) -> bytes:
    if how == "a bit":
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return {
        "truncated": content[:-100],
        "half": content[: len(content) // 2],
        "header only": content[:8],
        "empty": b"",
        "other": b"\x89PNG" + bytes(100),
        "another header": content.replace(b'\\"finished\\": false', b'\\"finished\\": true '),
    }[how]


KINDS_OF_DAMAGE = ["a bit", "truncated", "half", "header only", "empty", "other", "another header"]


@pytest.mark.parametrize("how", KINDS_OF_DAMAGE)
def test_previous_checkpoint_is_used_if_the_newest_is_damaged(saved: CheckpointFolder, how: str) -> None:
    checkpoints = saved.of_stack(0)
    checkpoints.path.write_bytes(damaged(checkpoints.path.read_bytes(), how))
    previous = checkpoints.before.read_bytes()
    found, (warning,) = checkpoints.read(configs(), plan_stacks(configs(), None)[0])
    assert found is not None
    assert found.path == checkpoints.before
    assert found.path.read_bytes() == previous
    assert str(checkpoints.path) in warning
    assert warning.endswith("the previous checkpoint is used")


@pytest.mark.parametrize("how", ["half", "missing"])
def test_training_resumed_from_the_previous_checkpoint_equals_uninterrupted_training(
    saved: CheckpointFolder, straight: str, how: str
) -> None:
    path = saved.of_stack(0).path
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged(path.read_bytes(), how))
    seen: list[Progress] = []
    assert in_order(learn(saved.path, report=seen.append)) == straight
    notes = [progress.note for progress in seen if progress.note]
    assert str(path) in notes[0]
    assert notes[0].endswith("the previous checkpoint is used")
    assert notes[1] == "resumes at task 2, epoch 2"


def test_nothing_is_overwritten_if_both_checkpoints_are_damaged(saved: CheckpointFolder, straight: str) -> None:
    both = [saved.of_stack(0).path, saved.of_stack(0).before]
    for path in both:
        path.write_bytes(damaged(path.read_bytes(), "half"))
    before = [path.read_bytes() for path in both]
    with pytest.raises(InputError, match="is damaged") as refused:
        learn(saved.path)
    assert f"remove {saved.path / 'stack-0'}.*" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.read_bytes() for path in both] == before
    for path in saved.path.glob("stack-0.*"):  # as the sentence says
        path.unlink()
    assert in_order(learn(saved.path)) == straight


def test_changed_settings_are_refused(saved: CheckpointFolder) -> None:
    chosen = configs()
    chosen["ewc"] = chosen["ewc"].replace(strength=2.0)
    with pytest.raises(InputError, match="the settings were changed since the run"):
        learn(saved.path, chosen)
    (saved.path / "plan.json").unlink()
    with pytest.raises(InputError, match="the settings were changed since the run"):
        learn(saved.path, chosen)


@pytest.mark.parametrize("content", ["", "[]", '{"limit": 8}', '{"limits": [0]}', '{"limits": 3}'])
def test_damaged_plan_of_stacks_is_refused_and_can_be_removed(
    saved: CheckpointFolder, straight: str, content: str
) -> None:
    path = saved.path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match="remove it to resume"):
        learn(saved.path)
    path.unlink()
    if content == "":
        assert in_order(learn(saved.path)) == straight


def test_checkpoints_of_older_versions_are_refused_in_a_sentence(saved: CheckpointFolder) -> None:
    for path in (saved.of_stack(0).path, saved.of_stack(0).before):
        write_tensors(path, checkpoint.KIND, checkpoint.FORMAT - 1, {"configs": ""}, {"x": torch.zeros(1)})
    with pytest.raises(InputError, match="older version") as refused:
        learn(saved.path)
    assert "\n" not in str(refused.value)


def test_a_position_that_cannot_be_reached_is_refused(saved: CheckpointFolder) -> None:
    checkpoints = saved.of_stack(0)
    (plan,) = plan_stacks(configs(), None)
    found, _ = checkpoints.read(configs(), plan)
    assert found is not None
    header = json.loads(json.dumps(found.header))
    task, epoch, piece, part = header["position"]
    for position, words in [
        ([task, epoch, piece + 1, part], "does not belong to this run"),
        ([task, 99, piece, part], "is not a whole number from 0 to 2"),
        ([-1, epoch, piece, part], "is not a whole number from 0 to 3"),
        ([task, epoch, piece, 1.5], "is not the fraction of an epoch"),
    ]:
        for path in (checkpoints.path, checkpoints.before):
            write_tensors(path, checkpoint.KIND, checkpoint.FORMAT, {**header, "position": position}, found.tensors)
        with pytest.raises(InputError, match=words):
            learn(saved.path)
