"""Damaged and forged checkpoints are refused in one sentence, or a run resumes at a position that it can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from builders import refusal, small_digits, train
from damage import damaged_tensors, fuzz, read_or_refuse
from engram import preset
from engram.common.tensor_file import read_tensors, write_tensors
from engram.engine.build import build_learner, build_model, build_streams
from engram.engine.checkpoint import FORMAT, Checkpoints
from engram.engine.learner import Progress
from engram.engine.loop import Position, check_position
from engram.engine.program import Batches
from engram.engine.stacks import Source, plan_stacks
from engram.engine.training import Runtime

CONFIG = preset(
    *("split-mnist", "dhp+si"), dataset="mnist-small", num_tasks=2, trials=2, epochs=1, hidden=[4], batch_size=4
)
CONFIGS = {"0": CONFIG}
DATASETS = [small_digits(60, 30)]


class Stop(Exception):
    """Raised in the middle of an epoch."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run that was stopped in the middle of an epoch."""

    def stop(progress: Progress) -> None:
        if progress.done > 0.3:
            raise Stop

    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with pytest.raises(Stop):
        train(CONFIGS, Source(tuple(DATASETS)), Runtime("cpu"), checkpoints=folder, seconds_between=0, report=stop)
    return folder / "stack-0.safetensors"


def resume(path: Path) -> Position:
    """Read a checkpoint and restore the learners from it."""
    (plan,) = plan_stacks(CONFIGS, None)
    found, _ = Checkpoints(path).read(CONFIGS, plan)
    assert found is not None
    learners = [build_learner(CONFIG, t, (1, 28, 28), 10, torch.device("cpu"), torch.float32) for t in (0, 1)]
    position = found.restore(learners, plan.keys)
    batches = Batches((0, 1), build_streams(CONFIG, (0, 1), DATASETS), CONFIG.seed, torch.float32)
    check_position(position, learners, batches, CONFIG)
    return position


def test_valid_checkpoint_is_read(saved: Path) -> None:
    assert resume(saved).piece > 0


@fuzz
@given(data=st.data())
def test_damaged_checkpoint(saved: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack-0.safetensors"
        path.write_bytes(data.draw(damaged_tensors(saved, "checkpoint", FORMAT)))
        position = read_or_refuse(lambda: resume(path))
    if position is not None:
        assert all(type(n) is int and n >= 0 for n in (position.task, position.epoch, position.piece))
        assert 0 <= position.part <= 1
        assert position.task <= CONFIG.num_tasks


VALID = ["0", 1, [0.1, 0.1], [], None]  # the outcome of trial 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position": [0, "x", 0, 0.0]}, "'x'"),
        ({"position": [99, 0, 0, 0.0]}, "99"),
        ({"position": [0, 0, 0, 1e300]}, "1e+300"),
        ({"position": [0, 1, 0, 0.0]}, "no run reaches epoch 2"),
        ({"position": [0, 0, 999, 0.0]}, "piece 999"),
        ({"position": [0, 0, 0, 0.0], "counts": [1, 0]}, "with such losses"),
        ({"counts": [0, 99]}, "dynamics."),
        ({"counts": ["x", 0]}, "'x'"),
        ({"finished": 1}, "1 does not say"),
        ({"outcomes": [["0", 0, [0.1], [], None], VALID]}, "trial 0"),
        ({"outcomes": [["0", 0, [0.1, 0.1], [["0.5"]], None], VALID]}, "trial 0"),
        ({"outcomes": [["0", 0, [0.1, 7.0], [], None], VALID]}, "accuracies of trial 0"),
        ({"outcomes": [["0", 0, [0.1, 0.1], [[0.5] * 3], None], VALID]}, "trial 0"),
        ({"outcomes": [["0", 0, [0.1, 0.1], [], ["x", 0]], VALID]}, "diverged"),
        ({"outcomes": [["0", 0, [0.1, 0.1], [], [0, 0, 3]], VALID]}, "diverged"),
        ({"outcomes": [["0", 0, [0.1, 0.1], [], [0, 0, "\x1b[2J"]], VALID]}, "diverged"),
        ({"outcomes": [["0", 9, [0.1, 0.1], [], None], VALID]}, "another stack"),
        ({"outcomes": []}, "another stack"),
    ],
)
def test_forged_checkpoint_is_refused(saved: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Its checksum is right, since anybody can compute it."""
    header, tensors = read_tensors(saved, "checkpoint", FORMAT)
    path = tmp_path / "stack-0.safetensors"
    write_tensors(path, "checkpoint", FORMAT, header | change, tensors)
    assert words in refusal(resume, path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("losses.0", torch.zeros(2, 999)), ("losses.0", torch.zeros(3)), ("records", torch.zeros(4)), ("0.model.x", None)],
)
def test_checkpoint_with_forged_tensors_is_refused(
    saved: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None
) -> None:
    header, tensors = read_tensors(saved, "checkpoint", FORMAT)
    assert name in tensors or tensor is None
    forged = tensors | {name: torch.zeros(1) if tensor is None else tensor}
    path = tmp_path / "stack-0.safetensors"
    write_tensors(path, "checkpoint", FORMAT, header, forged)
    refusal(resume, path)


def test_network_too_large_for_memory_is_refused_before_it_is_built() -> None:
    wide = preset("split-mnist", "dhp", hidden=[2**20, 2**20])
    assert "1048576" in refusal(build_model, wide, 0, (1, 28, 28), 10)
