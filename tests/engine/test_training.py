"""`train`: the one function behind run, sweep and reproduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from builders import custom_stream, small_digits, train
from engram import InputError, preset
from engram.config.settings import Config
from engram.data import streams
from engram.data.batches import read_inputs
from engram.engine import stacks
from engram.engine.build import Custom
from engram.engine.in_process import InProcess
from engram.engine.learner import Learner, Progress
from engram.engine.memory import bytes_of
from engram.engine.program import Batches
from engram.engine.stacks import SAME_TASKS, Source, digest, group_by
from engram.engine.training import Runtime, Training
from engram.nn.networks import Network
from engram.penalties import Penalty

SMALL = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 1, "hidden": [8], "batch_size": 20}
CPU = Runtime("cpu")


def config(method: str = "dhp+si", benchmark: str = "permuted-mnist", **changes: object) -> Config:
    return preset(benchmark, method, **SMALL | changes)


def digits() -> Source:
    return Source((small_digits(200, 50),))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is built: streams, networks and penalties, wherever that happens."""
    count: Counter[str] = Counter()

    def counted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            count[what] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(streams, "permuted", counted("streams", streams.permuted))
    for what, kind in (("networks", Network), ("penalties", Penalty)):
        monkeypatch.setattr(kind, "__init__", counted(what, kind.__init__))
    return count


@pytest.mark.parametrize("max_stack", [None, 1, 2])
def test_streams_models_and_penalties_are_built_once(
    built: Counter[str], tmp_path: Path, max_stack: int | None
) -> None:
    configs = {"a": config(), "b": config("si"), "c": config("ewc", strength=1.0), "d": config(seed=7)}
    training = Training(configs, digits(), Runtime("cpu", max_stack=max_stack))
    # Checked before any folder is made: two streams for each seed, one network of each kind.
    assert built == {"streams": 4, "networks": 4}
    training.run(tmp_path / "checkpoints")
    assert built == {"streams": 4, "networks": 8, "penalties": 8}


def test_custom_modules_are_made_once_for_each_model() -> None:
    made: list[nn.Module] = []

    def features() -> nn.Module:
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(256, 8)))
        return made[-1]

    configs = {m: preset("custom", m, network="custom", trials=2, epochs=1, num_tasks=2) for m in ("dhp", "finetune")}
    train(configs, Source(stream=custom_stream()), CPU, custom=Custom(features))
    assert len(made) == 4


def test_models_of_equal_size_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[Config]] = []

    def largest_stack(built: Iterable[tuple[Learner, Batches]], device: object) -> int:
        measured.append([learner.config for learner, _ in built])
        return 7

    monkeypatch.setattr(stacks, "largest_stack", largest_stack)
    configs = {
        "one": config("si", strength=1.0),
        "two": config("si", strength=2.0),
        "wide": config("si", hidden=[9]),
        "mas": config("mas"),
    }
    train(configs, digits(), CPU)
    assert measured == [[configs["one"], configs["wide"], configs["mas"]]]


def test_models_that_do_not_all_fit_are_not_kept_after_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest_stack(built: Iterable[tuple[Learner, Batches]], device: object) -> int:
        assert len(list(built)) == 2
        return 1

    monkeypatch.setattr(stacks, "largest_stack", largest_stack)
    training = Training({"a": config(), "b": config("finetune")}, digits(), CPU)
    (builder,) = training.builders
    assert builder.limit() == 1
    assert not builder._learners
    assert not builder._models


def test_a_fifth_of_the_free_memory_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training({"a": config("ewc", strength=1.0)}, digits(), CPU)
    (builder,) = training.builders
    learner, batches = builder.learner("a", 0, torch.float32), builder.batches([0], torch.float32)
    one = bytes_of(learner, read_inputs(batches.tasks(0)[0].train[slice(2)].inputs, dtype=torch.float32))
    monkeypatch.setattr("engram.engine.memory.free_bytes", lambda device: 100 * one)
    limit = builder.limit()
    assert limit is not None
    assert 78 <= limit <= 80


# --- configs that learn different tasks


def test_configs_with_different_tasks_train_in_groups_with_the_outcomes_of_separate_runs() -> None:
    configs = {
        "plain": config(),
        "other seed": config(seed=5),
        "three tasks": config(num_tasks=3),
        "same tasks": config("finetune"),
        "later trials": config(first_trial=4, trials=1),
    }
    assert [list(group) for group in group_by(SAME_TASKS, configs)] == [
        ["plain", "same tasks"],
        ["other seed"],
        ["three tasks"],
        ["later trials"],
    ]
    seen: list[Progress] = []
    outcomes = train(configs, digits(), CPU, report=seen.append)
    assert len(outcomes) == 4 * 2 + 1
    for label, one in configs.items():
        alone = train({label: one}, digits(), CPU)
        assert alone.keys() == {key for key in outcomes if key[0] == label}
        assert all(repr(outcomes[key]) == repr(outcome) for key, outcome in alone.items())
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == 1
    assert {label for progress in seen for label in progress.configs} == set(configs)


def test_resumed_groups_equal_uninterrupted_ones(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.done > 0.7:
            raise Stop

    configs = {"one": config(epochs=2), "two": config("ewc", strength=1.0, seed=3, epochs=2)}
    straight = train(configs, digits(), CPU)
    with pytest.raises(Stop):
        train(configs, digits(), CPU, checkpoints=tmp_path / "checkpoints", seconds_between=0, report=stop)
    seen: list[Progress] = []
    resumed = train(configs, digits(), CPU, checkpoints=tmp_path / "checkpoints", report=seen.append)
    assert repr(resumed) == repr(straight)
    assert any((progress.note or "").startswith("resumes at task") for progress in seen)


def test_shorter_mixture_uses_only_its_own_datasets() -> None:
    """The number of outputs is that of the datasets of a config, not of all that were loaded."""
    first = replace(small_digits(40, 20), name="mnist")
    second = replace(small_digits(40, 20, first=100), name="notmnist")
    short = preset("vision-mixture", "finetune", num_tasks=1, network="mlp", hidden=[8], trials=1, epochs=1)
    both = Source((first, second))
    (stream,) = both.streams(short, [0])
    assert stream.num_classes == 10
    (longer,) = both.streams(short.replace(num_tasks=2), [0])
    assert longer.num_classes == 20


# --- refused


def test_data_that_the_settings_do_not_name_are_refused() -> None:
    """A result says which dataset it is of, so the two must agree."""
    on_mnist = preset("permuted-mnist", "finetune")
    for datasets, given in (((small_digits(40, 20),), "mnist-small was given"), ((), "no dataset was given")):
        with pytest.raises(InputError, match=f"the settings name mnist, but {given}"):
            train({"a": on_mnist}, Source(datasets), CPU)


@pytest.mark.parametrize(("name", "value"), [("benchmark", "split-mnist"), ("dataset", "notmnist")])
def test_configs_of_different_benchmarks_are_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match=f"must have one {name}, not "):
        train({"a": config(), "b": config().replace(**{name: value})}, digits(), CPU)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Config], Runtime, Custom, str]] = [
        ({}, CPU, Custom(), "no config was given"),
        ({"a": config()}, Runtime("cpu", precision="half"), Custom(), "there is no precision 'half'"),
        ({"a": config()}, Runtime("cpu", max_stack=0), Custom(), "at least one model, not 0"),
        ({"a": config()}, CPU, Custom(features=nn.Flatten), "features go with network="),
        ({"a": config(network="custom")}, CPU, Custom(), "features go with network="),
        ({"a": config("si")}, CPU, Custom(penalty=lambda model: None), "a custom penalty goes with"),  # type: ignore[arg-type,return-value]
        ({"a": config(network="cnn"), "b": config(hidden=[2**20, 2**20])}, CPU, Custom(), "more than"),
    ]
    for configs, runtime, custom, words in cases:
        with pytest.raises(InputError, match=words):
            train(configs, digits(), runtime, custom=custom, checkpoints=tmp_path / "checkpoints")
        assert list(tmp_path.iterdir()) == []


def test_models_that_share_a_tensor_are_refused() -> None:
    shared = nn.Linear(784, 8)
    with pytest.raises(InputError, match="two models share a tensor"):
        train(
            {"a": config("finetune", network="custom")},
            digits(),
            CPU,
            custom=Custom(features=lambda: nn.Sequential(nn.Flatten(), shared)),
        )


def test_digest_changes_with_any_label_or_setting() -> None:
    configs = {"a": config(), "b": config("finetune")}
    others = [
        {"a": config(), "c": config("finetune")},
        {"a": config(seed=1), "b": config("finetune")},
        {"b": config("finetune"), "a": config()},
    ]
    assert digest(dict(configs)) == digest(configs)
    assert len({digest(each) for each in (configs, *others)}) == 4


# --- progress


def test_progress_is_reported_several_times_an_epoch_and_after_each_task() -> None:
    seen: list[Progress] = []
    train({"mine": config(trials=1)}, digits(), CPU, report=seen.append)
    assert [progress.task for progress in seen if progress.task_ended] == [0, 1]
    for task in (0, 1):
        assert sum(progress.task == task and not progress.task_ended for progress in seen) >= 2
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == 1
    assert list(seen[-1].outcomes) == [("mine", 0)]
    assert len(seen[-1].outcomes["mine", 0].rows) == 2


def test_memory_of_the_device_is_freed_between_groups() -> None:
    held: list[list[bool]] = []

    class Watching(InProcess):
        def train(self, given: Any, report: Any, stop_asked: Any) -> None:
            def report_and_look(number: int, progress: Progress) -> None:
                held.append([bool(stack.builder._streams_there) for stack in given])
                report(number, progress)

            super().train(given, report_and_look, stop_asked)

    train({"a": config(), "b": config(seed=5)}, digits(), Runtime("cpu", engine=Watching()))
    assert [True, False] in held
    assert [False, True] in held
    assert [True, True] not in held
