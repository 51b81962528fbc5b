"""In a stack, every rehearsal computes what it computes alone; a resumed run is the run that was never stopped."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_methods import CPU, config_of, tiny_stream

import engram
from builders import train
from engram import streams
from engram.common.errors import Stopped
from engram.config.settings import Config
from engram.data.batches import batches_of
from engram.data.samples import Dataset, Stream
from engram.data.scenarios import arrange
from engram.data.sources import load
from engram.engine.build import build_learner
from engram.engine.choose import choose_program
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner, Progress
from engram.engine.loop import run_stream
from engram.engine.program import Batches
from engram.engine.stacks import Source
from engram.engine.training import Runtime

GPU = torch.device("cuda")  # as a word only: the chooser goes by it, and the tensors stay where they are
STACKED = ["replay", "der++", "a-gem", "lwf", "pseudo-rehearsal", "generative-replay"]


def learners_of(config: Config, stream: Stream, trials: int = 2) -> tuple[list[Learner], Batches]:
    facts = (stream.input_shape, stream.num_classes, CPU, torch.float64)
    learners = [build_learner(config, trial, *facts) for trial in range(trials)]
    for learner in learners:
        learner.model.start(next(batches_of(stream[0].train, 8, dtype=torch.float64))[0])
    return learners, Batches(range(trials), [stream] * trials, config.seed, torch.float64)


def assert_same(found: Learner, expected: Learner) -> None:
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
    for name, tensor in expected.remembered.items():
        kept = slice(None, -1) if expected.config.rehearsal in ("replay", "der++", "a-gem") and tensor.ndim else ...
        torch.testing.assert_close(found.remembered[name][kept], tensor[kept], rtol=1e-9, atol=1e-9)
    assert found.outcome.rows == expected.outcome.rows


@pytest.mark.parametrize("head", ["matched", "dhp"])
@pytest.mark.parametrize("method", STACKED)
def test_stack_equals_each_alone(method: str, head: str) -> None:
    config, stream = config_of(f"{head}+{method}", learning_rate=0.1), tiny_stream("seen")
    learners, batches = learners_of(config, stream)
    assert_stack_equals_each_alone(learners, batches, config)


@pytest.mark.parametrize("method", STACKED)
def test_stack_of_trials_with_other_classes_equals_each_alone(method: str) -> None:
    images = load("mnist-small")
    data = Dataset(images.name, images.train[slice(120)], images.test[slice(60)], "published")
    config = config_of(method, batch_size=7, learning_rate=0.1, epochs=1, scenario="class", num_tasks=2)
    orders = [list(range(10)), [5, 1, 8, 0, 9, 2, 4, 7, 3, 6]]
    trials = arrange([streams.split(data, num_tasks=2, order=order, shared=True) for order in orders], "class", True)
    facts = (trials[0].input_shape, trials[0].num_classes, CPU, torch.float64)
    learners = [build_learner(config, trial, *facts) for trial in range(2)]
    assert_stack_equals_each_alone(learners, Batches(range(2), trials, 0, torch.float64), config)


def test_trials_with_inputs_of_their_own_train_one_by_one() -> None:
    config = config_of("replay")
    trials = [tiny_stream("seen"), copy.deepcopy(tiny_stream("seen"))]
    learners = [
        build_learner(config, t, trials[0].input_shape, trials[0].num_classes, CPU, torch.float64) for t in (0, 1)
    ]
    program, notes = choose_program(learners, Batches(range(2), trials, 0, torch.float64), GPU)
    assert isinstance(program, OneByOne)
    assert "its trials do not share one tensor of inputs" in notes[-1]


def test_stack_with_adam_equals_each_alone() -> None:
    config, stream = config_of("replay", optimizer="adam", learning_rate=0.01), tiny_stream("task")
    learners, batches = learners_of(config, stream)
    assert_stack_equals_each_alone(learners, batches, config)


@pytest.mark.parametrize("start", ["anew", "continue"])
@pytest.mark.parametrize("steps", ["epochs", "task"])
def test_joint_in_a_stack_equals_each_alone(start: str, steps: str) -> None:
    changes = {"joint_start": start, "joint_steps": steps, "optimizer": "adam", "learning_rate": 0.01}
    config, stream = config_of("dhp+joint", **changes), tiny_stream("seen")
    learners, batches = learners_of(config, stream)
    assert_stack_equals_each_alone(learners, batches, config)


def test_joint_of_permuted_tasks_in_a_stack_equals_each_alone() -> None:
    images = load("mnist-small")
    data = Dataset(images.name, images.train[slice(30)], images.test[slice(20)], "published")
    config = config_of("joint", batch_size=7, learning_rate=0.1)
    trials = [streams.permuted(data, num_tasks=3, trial=trial) for trial in range(2)]
    facts = (trials[0].input_shape, trials[0].num_classes, CPU, torch.float64)
    learners = [build_learner(config, trial, *facts) for trial in range(2)]
    assert_stack_equals_each_alone(learners, Batches(range(2), trials, 0, torch.float64), config)


def assert_stack_equals_each_alone(learners: list[Learner], batches: Batches, config: Config) -> None:
    alone = copy.deepcopy(learners)
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped), notes
    run_stream(program, batches, config)
    run_stream(OneByOne(alone, batches), batches, config)
    for found, expected in zip(learners, alone, strict=True):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("head", engram.heads.list())
def test_any_head_can_rehearse_in_a_stack(head: str) -> None:
    for method in ("replay", "lwf"):
        config, stream = config_of(f"{head}+{method}", learning_rate=0.05, epochs=1), tiny_stream("seen")
        learners, batches = learners_of(config, stream)
        assert_stack_equals_each_alone(learners, batches, config)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [7, 30])
def test_trials_of_several_sizes_in_a_stack_equal_each_alone(batch_size: int) -> None:
    images = load("mnist-small")
    data = Dataset(images.name, images.train[slice(40)], images.test[slice(20)], "published")
    trials = [streams.imbalanced(data, num_tasks=2, trial=trial) for trial in range(3)]
    assert len({len(stream[0].train) for stream in trials}) == 3
    facts = (trials[0].input_shape, trials[0].num_classes, CPU, torch.float64)
    for method in STACKED:
        config = config_of(method, num_tasks=2, batch_size=batch_size, learning_rate=0.1)
        learners = [build_learner(config, trial, *facts) for trial in range(3)]
        assert_stack_equals_each_alone(learners, Batches(range(3), trials, 0, torch.float64), config)


def test_joint_of_trials_of_several_sizes_trains_one_by_one_and_the_log_says_so() -> None:
    images = load("mnist-small")
    data = Dataset(images.name, images.train[slice(40)], images.test[slice(20)], "published")
    trials = [streams.imbalanced(data, num_tasks=2, trial=trial) for trial in range(2)]
    config = config_of("joint", num_tasks=2)
    facts = (trials[0].input_shape, trials[0].num_classes, CPU, torch.float64)
    learners = [build_learner(config, trial, *facts) for trial in range(2)]
    program, notes = choose_program(learners, Batches(range(2), trials, 0, torch.float64), GPU)
    assert isinstance(program, OneByOne)
    assert (
        "joint: cannot be stacked and train one by one, because its trials have different numbers of samples" in notes
    )
    run_stream(program, program.batches, config)
    assert any("of training in task 2 (mean of 2 trials)" in note for note in program.notes)


def interrupted(folder: Path, configs: dict[str, Config], source: Source, after: int) -> None:
    """Train with a checkpoint at every position, and stop when so many have been reached."""
    asked = iter(range(10**6))
    with pytest.raises(Stopped):
        train(
            configs,
            source,
            Runtime("cpu"),
            checkpoints=folder,
            seconds_between=0,
            stop_asked=lambda: next(asked) >= after,
        )


@pytest.mark.parametrize("after", [2, 8, 15])
def test_resumed_run_equals_uninterrupted_one(tmp_path: Path, after: int) -> None:
    methods = [*STACKED, "joint", "dhp+replay"]
    configs = {method: config_of(method, trials=2, learning_rate=0.1) for method in methods}
    source = Source(stream=tiny_stream("seen"))
    straight = train(configs, source, Runtime("cpu"))
    interrupted(tmp_path / "checkpoints", configs, source, after)
    resumed = train(configs, source, Runtime("cpu"), checkpoints=tmp_path / "checkpoints", seconds_between=0)
    assert repr(sorted(resumed.items())) == repr(sorted(straight.items()))


def test_resumed_mapped_stack_is_exact() -> None:
    """What a learner remembers in a stack is its own: a checkpoint of it continues one by one."""
    config, stream = config_of("der++", learning_rate=0.1), tiny_stream("seen")
    learners, batches = learners_of(config, stream)
    program, _ = choose_program(learners, batches, GPU)
    run_stream(program, batches, config)
    for learner in learners:
        section = program.sections[0]  # type: ignore[attr-defined]
        for name, tensor in learner.remembered.items():
            assert tensor.data_ptr() == section.remembered[name][learner.trial].data_ptr()
        assert int(learner.remembered["offered"]) == config.epochs * sum(len(task.train) for task in stream)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", [*STACKED, "joint"])
def test_gpu_computes_what_the_cpu_does(method: str) -> None:
    config, stream = config_of(method, trials=3, learning_rate=0.1), tiny_stream("seen")
    notes: list[str] = []

    def report(progress: Progress) -> None:
        notes.extend([progress.note] if progress.note else [])

    source = Source(stream=stream)
    on_gpu = train({method: config}, source, Runtime("cuda", "float32"), report=report)
    on_cpu = train({method: config}, source, Runtime("cpu", "float32"))
    for key, outcome in on_cpu.items():
        losses = [[record.loss for record in each.records] for each in (on_gpu[key], outcome)]
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)
    assert not any("not captured" in note for note in notes), notes
