"""Engines: the same stacks give the same results wherever they are trained, and a worker may die."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from builders import assert_results_equal, small_digits
from engram import InputError, Progress, preset, run_many
from engram.cli.main import main
from engram.common.errors import Stopped
from engram.config.settings import Config
from engram.engine import Engine, InProcess, start_engine
from engram.engine.build import Own
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.learner import Record, Outcome
from engram.engine.letters import Letter, News, with_news
from engram.engine.stacks import Share
from engram.engine.unit import Source, Told, Unit, find_limit
from engram.runs.experiment import Setting, run_on

SMALL = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 20}


def configs(*methods: str, **changes: object) -> list[Config]:
    return [preset("permuted-mnist", method, **SMALL | changes) for method in methods or ("dhp+si", "finetune")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Engine]:
    """A Ray cluster of this machine's own, for all tests of this file."""
    pytest.importorskip("ray")
    with start_engine("ray") as engine:
        yield engine


# --- the default


def test_the_default_engine_trains_stack_after_stack() -> None:
    engine = InProcess()
    assert engine.at_once == 1
    assert engine.surroundings("cpu") == {"device": "cpu", "threads": torch.get_num_threads()}
    few_samples = configs(max_samples=100)
    assert_results_equal(run_many(few_samples, device="cpu", engine=engine), run_many(few_samples, device="cpu"))


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="there is no engine 'rai'"), start_engine("rai"):
        pass
    with pytest.raises(InputError, match="an address is that of a Ray cluster"), start_engine("in-process", "x:1"):
        pass


def test_without_ray_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "split-mnist", "--dataset", "mnist-small", "--engine", "ray", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "engram: Ray is not installed: pip install 'engram-cl[ray]'\n"
    assert not (tmp_path / "run").exists()


# --- letters


def learned(num_tasks: int) -> Outcome:
    rows = [[0.5 + task / 10] * (task + 1) for task in range(num_tasks)]
    return Outcome([0.1, 0.1], rows, [Record(0, task, 0, 0, 1.0) for task in range(num_tasks)])


def test_letters_hold_what_is_new_and_make_up_the_whole() -> None:
    news, known = News(), {}
    for num_tasks in (1, 1, 2, 4):
        since, whole = news.sent, {(0, 0): learned(num_tasks), (1, 0): learned(num_tasks)}
        told = Told(0.5, 0, news.of(whole))
        assert len(told.outcomes[0, 0].rows) == num_tasks - since.get((0, 0), (0, 0))[0]
        assert with_news(known, Letter(0, 0, told, since)) == whole


def test_a_letter_that_was_lost_shifts_nothing() -> None:
    news, known = News(), {}
    letters = []
    for num_tasks in (1, 2, 3):
        since = news.sent
        letters.append(Letter(0, 0, Told(0.5, 0, news.of({(0, 0): learned(num_tasks)})), since))
    for letter in (letters[0], letters[2]):
        with_news(known, letter)
    assert known == {(0, 0): learned(1)}, "as far as it is known for sure"


# --- how many models fit


def test_settings_that_take_no_memory_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Config]] = []
    monkeypatch.setattr("engram.engine.unit.largest_stack", lambda configs, *given: asked.append(list(configs)) or 7)
    many = [*configs("si", strength=1.0), *configs("si", strength=2.0), *configs("si", hidden=[9]), *configs("mas")]
    unit = Unit(0, many, Share((0,), (0,)), Source(many[0], (small_digits(400),)), "cpu", "float32")
    assert find_limit(unit) == 7
    assert [(config.method, config.hidden) for config in asked[0]] == [("si", (8,)), ("si", (9,)), ("mas", (8,))]


# --- Ray


@pytest.mark.slow
def test_a_run_on_ray_leaves_the_same_files(
    cluster: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reuse(name: str, address: str | None = None) -> Any:
        return _open(cluster if name == "ray" else InProcess())

    monkeypatch.setattr("engram.engine.start_engine", reuse)
    files = {}
    for engine in ("in-process", "ray"):
        folder = tmp_path / engine
        with pytest.raises(SystemExit) as ended:
            main(["run", "split-mnist", "--dataset", "mnist-small", "--methods", "dhp+mas,si", "--tasks", "2",
                  "--trials", "2", "--epochs", "1", "--set", "hidden=[8]", "--set", "max_samples=200", "--stack", "2",
                  "--engine", engine, "--out", str(folder)])  # fmt: skip
        assert ended.value.code is None
        assert "dhp+mas, task 2/2: " in capsys.readouterr().out
        assert json.loads((folder / "run.json").read_text())["engine"] == engine
        assert not (folder / "checkpoints").exists()
        files[engine] = {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")}
    assert len(files["ray"]) == 6
    assert files["in-process"] == files["ray"]


class _open:
    """An engine that is already there, as a context."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *raised: object) -> None:
        pass


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
def test_a_worker_that_dies_is_replaced_and_goes_on_from_its_checkpoint(cluster: Engine, tmp_path: Path) -> None:
    (config,) = configs("si", network="own", trials=1)
    marker = tmp_path / "died"
    seen: list[Progress] = []
    own = Own(fragile(marker, 50))  # in the second epoch
    kept = CheckpointFolder(tmp_path / "run", seconds_between=0)
    kept.run.mkdir()
    (result,) = run_on(
        [config], [small_digits(400)], Setting("cpu", own=own, checkpoints=kept, engine=cluster), seen.append
    )
    assert marker.exists()
    notes = [progress.note for progress in seen if progress.note]
    assert "a worker of stack 1 died: it is tried again (1 of 3)" in notes
    assert any(note.startswith("goes on from task") for note in notes)
    assert_results_equal([result], run_on([config], [small_digits(400)], Setting("cpu", own=own)))


@pytest.mark.slow
def test_workers_that_always_die_are_given_up(cluster: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.engine.ray.RETRIES", 1)
    (config,) = configs("finetune", network="own", trials=1)
    here = os.getpid()

    def features() -> nn.Module:
        if os.getpid() != here:
            os.kill(os.getpid(), 9)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8))

    setting = Setting("cpu", max_stack=1, own=Own(features), engine=cluster)
    with pytest.raises(InputError, match="the workers of stack 1 died 2 times"):
        run_on([config], [small_digits(400)], setting)


@pytest.mark.slow
def test_what_a_worker_refuses_is_said_here(cluster: Engine) -> None:
    def features() -> nn.Module:
        return nn.Flatten(0)

    with pytest.raises(InputError, match="features must give one row a sample"):
        run_on(configs("si", network="own"), [small_digits(400)], Setting("cpu", own=Own(features), engine=cluster))
    with pytest.raises(InputError, match="the Ray cluster has 0 GPUs, and a stack needs 1"):
        cluster.surroundings("cuda")


@pytest.mark.slow
def test_a_run_on_ray_that_was_stopped_goes_on_anywhere(cluster: Engine, tmp_path: Path) -> None:
    seen: list[Progress] = []
    here = os.getpid()

    class Slow(nn.Module):
        """Slow in a worker, so that there is time to stop it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() != here:
                time.sleep(0.02)
            return self.linear(x.flatten(1)).relu()

    def stop() -> bool:
        """When all stacks that have room have learned a task."""
        return len(seen) > 0 and len(seen[-1].outcomes) >= min(2, cluster.at_once)

    kept = CheckpointFolder(tmp_path, seconds_between=1000)
    asked = configs(epochs=4, trials=1, network="own")
    setting = Setting("cpu", max_stack=1, own=Own(Slow), checkpoints=kept, engine=cluster, stop_asked=stop)
    with pytest.raises(Stopped):
        run_on(asked, [small_digits(400)], setting, seen.append)
    # of those at work each has kept where it stands, though the other ended first
    assert all(kept.of_stack(number).path.exists() for number in range(min(2, cluster.at_once)))
    resumed = run_on(asked, [small_digits(400)], Setting("cpu", own=Own(Slow), checkpoints=CheckpointFolder(tmp_path)))
    assert_results_equal(resumed, run_on(asked, [small_digits(400)], Setting("cpu", own=Own(Slow))))
