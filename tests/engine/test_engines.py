"""Engines: the same stacks give the same outcomes wherever they are trained, and a worker may die."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from builders import files_in, small_digits, train
from engram import InputError, preset
from engram.cli.main import main
from engram.common.errors import Stopped
from engram.config.settings import Config
from engram.engine import Engine, InProcess, start_engine
from engram.engine.build import Custom
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.in_process import Stack
from engram.engine.learner import Outcome, Outcomes, Progress
from engram.engine.ray import SECONDS_BETWEEN_MESSAGES, _ignoring_interrupts, _only_worker, _Sender, start_ray
from engram.engine.stacks import Source, StackPlan
from engram.engine.training import Runtime, Training

SMALL = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 20}
CPU = Runtime("cpu")


def configs(*methods: str, **changes: object) -> dict[str, Config]:
    chosen = methods or ("dhp+si", "finetune")
    return {method: preset("permuted-mnist", method, **SMALL | changes) for method in chosen}


def digits() -> Source:
    return Source((small_digits(400),))


def assert_outcomes_equal(found: Outcomes, expected: Outcomes) -> None:
    assert set(found) == set(expected)
    for key, outcome in expected.items():
        assert repr(found[key]) == repr(outcome)  # NaN is not equal to itself


@pytest.fixture(scope="module")
def cluster() -> Iterator[Engine]:
    """A Ray cluster of this machine, for all tests of this file."""
    pytest.importorskip("ray")
    with start_engine("ray") as engine:
        yield engine


# --- in process


def test_default_engine_trains_one_stack_after_another_in_this_process() -> None:
    engine = Runtime().engine
    assert isinstance(engine, InProcess)
    assert engine.at_once == 1
    assert engine.environment("cpu") == {"device": "cpu", "threads": torch.get_num_threads()}


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="there is no engine 'rai'"), start_engine("rai"):
        pass
    with pytest.raises(InputError, match="--address applies only to a Ray cluster"), start_engine("in-process", "x:1"):
        pass


def test_missing_ray_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "split-mnist", "--dataset", "mnist-small", "--engine", "ray", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "engram: Ray is not installed: pip install 'engram-cl[ray]'\n"
    assert not (tmp_path / "run").exists()


# --- messages of a worker


class FakeChannel:
    """Records the messages, each of which takes some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_per_message: float = 0.0):
        self.clock, self.seconds = 0.0, seconds_per_message
        self.sent: list[Progress] = []
        self.put = SimpleNamespace(remote=self._put)
        self.stopping = False
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda answer: answer))
        monkeypatch.setattr(time, "monotonic", lambda: self.clock)

    def _put(self, number: int, attempt: int, progress: Progress) -> bool:
        assert (number, attempt) == (3, 1)
        self.sent.append(progress)
        self.clock += self.seconds
        return self.stopping


def test_worker_sends_outcomes_only_after_a_task_and_notes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FakeChannel(monkeypatch)
    sender, outcomes = _Sender(3, 1, channel), {("si", 0): Outcome()}
    sender.report(Progress(0.1, 0, configs(), outcomes))
    sender.report(Progress(0.2, 0, configs(), outcomes))  # too soon
    sender.report(Progress(0.2, 0, configs(), outcomes, note="a note"))
    sender.report(Progress(0.3, 0, configs(), outcomes, task_ended=True))  # too soon
    channel.clock = SECONDS_BETWEEN_MESSAGES
    sender.report(Progress(0.4, 1, configs(), outcomes))
    channel.clock *= 2
    sender.report(Progress(0.5, 1, configs(), outcomes))
    assert [(p.done, p.note, bool(p.outcomes)) for p in channel.sent] == [
        (0.1, None, False),
        (0.2, "a note", False),
        (0.4, None, True),
        (0.5, None, False),
    ]
    assert not any(progress.configs for progress in channel.sent)


def test_worker_spends_a_tenth_of_its_time_on_messages_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FakeChannel(monkeypatch, seconds_per_message=2.0)
    sender = _Sender(3, 1, channel)
    for _ in range(1000):
        channel.clock += 0.2
        sender.report(Progress(0.5, 0, task_ended=True))
    assert 8 <= len(channel.sent) <= 11, "200 s of work allow 20 s of messages"


def test_worker_learns_from_the_answer_to_a_message_whether_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = FakeChannel(monkeypatch)
    sender = _Sender(3, 1, channel)
    sender.report(Progress(0, 0))
    assert not sender.stopping
    channel.stopping = True
    channel.clock = 1.0
    sender.report(Progress(0, 0))
    assert sender.stopping


# --- workers


def stack_in(folder: Path) -> Stack:
    training = Training(configs("finetune", trials=1), digits(), CPU)
    return Stack(0, StackPlan(("finetune",), (0,)), training.builders[0], CheckpointFolder(folder))


def test_folder_that_a_worker_does_not_see_is_refused(tmp_path: Path) -> None:
    stack = stack_in(tmp_path / "nowhere")
    with pytest.raises(InputError, match="results go into a folder that all machines share"), _only_worker(stack):
        pass


def test_stack_has_one_worker_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a killed driver may still be writing checkpoints."""
    monkeypatch.setattr("engram.engine.ray.SECONDS_FOR_ORPHANS", 0.1)
    stack = stack_in(tmp_path)
    with _only_worker(stack):
        with pytest.raises(InputError, match="another process"), _only_worker(stack):
            pass
        with _only_worker(replace(stack, number=1)):
            pass
    with _only_worker(stack):
        pass


def test_builder_is_sent_to_workers_without_what_it_has_built() -> None:
    training = Training(configs("finetune", trials=1), digits(), CPU)
    (builder,) = training.builders
    assert builder._models
    assert builder._streams
    copied = copy.copy(builder)
    assert (copied.configs, copied._models, copied._streams) == (builder.configs, {}, {})
    assert builder._models, "and keeps it"


def test_processes_of_the_cluster_ignore_interrupts() -> None:
    usual = signal.getsignal(signal.SIGINT)
    with _ignoring_interrupts():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) == usual


def test_unreachable_cluster_is_refused_in_a_sentence() -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(InputError, match=r"cannot reach a Ray cluster at 127\.0\.0\.1:1: Connection refused") as refused,
        start_ray("127.0.0.1:1"),
    ):
        pass
    assert "\n" not in str(refused.value)


# --- Ray


@pytest.mark.slow
def test_run_on_ray_leaves_the_same_files(
    cluster: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reuse(name: str, address: str | None = None) -> Any:
        return nullcontext(cluster if name == "ray" else InProcess())

    monkeypatch.setattr("engram.engine.start_engine", reuse)
    files = {}
    for engine in ("in-process", "ray"):
        folder = tmp_path / engine
        with pytest.raises(SystemExit) as ended:
            main(["run", "split-mnist", "--dataset", "mnist-small", "--methods", "dhp+mas,si", "--tasks", "2",
                  "--trials", "2", "--epochs", "1", "--set", "hidden=[8]", "--set", "max_samples=200", "--stack", "2",
                  "--engine", engine, "--out", str(folder)])  # fmt: skip
        assert ended.value.code is None
        printed = capsys.readouterr().out
        assert "dhp+mas, task 1/2: " in printed
        assert "dhp+mas, task 2/2: " in printed
        assert engine in json.dumps(json.loads((folder / "run.json").read_text()))
        assert not (folder / "checkpoints").exists()
        files[engine] = {n: content for n, content in files_in(folder).items() if n not in ("run.json", "log.txt")}
    assert files["ray"]
    assert files["in-process"] == files["ray"]


def fragile(marker: Path, calls: int) -> Callable[[], nn.Module]:
    """Features whose process is killed at a call, once."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, 8)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == calls and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), 9)
            return self.linear(x.flatten(1)).relu()

    return Fragile


@pytest.mark.slow
def test_worker_that_dies_is_replaced_and_resumes_from_its_checkpoint(cluster: Engine, tmp_path: Path) -> None:
    chosen = configs("si", network="custom", trials=1)
    marker = tmp_path / "died"
    seen: list[Progress] = []
    custom = Custom(fragile(marker, 50))  # in the second epoch
    on_ray = train(
        chosen,
        digits(),
        Runtime("cpu", engine=cluster),
        custom=custom,
        checkpoints=tmp_path / "checkpoints",
        seconds_between=0,
        report=seen.append,
    )
    assert marker.exists()
    notes = [progress.note for progress in seen if progress.note]
    assert "a worker of stack 1 died: retrying (1 of 3)" in notes
    assert any(note.startswith("resumes at task") for note in notes)
    assert [progress.task for progress in seen if progress.task_ended][:2] == [0, 1]
    assert seen[-1].done == 1
    assert_outcomes_equal(on_ray, train(chosen, digits(), CPU, custom=custom))


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(cluster: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.engine.ray.RETRIES", 1)
    driver = os.getpid()

    def features() -> nn.Module:
        if os.getpid() != driver:
            os.kill(os.getpid(), 9)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8))

    with pytest.raises(InputError, match="the workers of stack 1 died 2 times"):
        train(
            configs("finetune", network="custom", trials=1),
            digits(),
            Runtime("cpu", max_stack=1, engine=cluster),
            custom=Custom(features),
        )


@pytest.mark.slow
def test_errors_of_a_worker_are_raised_by_the_driver(cluster: Engine, tmp_path: Path) -> None:
    driver = os.getpid()

    def features() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8)) if os.getpid() == driver else nn.Flatten(0)

    with pytest.raises(InputError, match="features must return one row per sample"):
        train(configs("si", network="custom"), digits(), Runtime("cpu", engine=cluster), custom=Custom(features))
    with pytest.raises(InputError, match="the Ray cluster has 0 GPUs, and a stack needs 1"):
        cluster.environment("cuda")


@pytest.mark.slow
def test_run_stopped_on_ray_resumes_in_any_engine(cluster: Engine, tmp_path: Path) -> None:
    seen: list[Progress] = []
    driver = os.getpid()

    class Slow(nn.Module):
        """Slow in a worker, so that there is time to stop it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != driver:
                time.sleep(0.02)
            return self.linear(x.flatten(1)).relu()

    def stop() -> bool:
        """When as many stacks as have room have ended a task."""
        return len(seen) > 0 and len(seen[-1].outcomes) >= min(2, cluster.at_once)

    chosen, custom, folder = configs(epochs=4, trials=1, network="custom"), Custom(Slow), tmp_path / "checkpoints"
    runtime = Runtime("cpu", max_stack=1, engine=cluster)
    options = {"custom": custom, "checkpoints": folder, "seconds_between": 1000}
    with pytest.raises(Stopped):
        train(chosen, digits(), runtime, **options, report=seen.append, stop_asked=stop)
    # each of those at work has saved its stack, though the other ended first
    saved = CheckpointFolder(folder)
    assert all(saved.of_stack(number).path.exists() for number in range(min(2, cluster.at_once)))
    resumed = train(chosen, digits(), CPU, **options)
    assert_outcomes_equal(resumed, train(chosen, digits(), CPU, custom=custom))
