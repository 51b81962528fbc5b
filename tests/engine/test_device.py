"""A GPU computes what the CPU does. `test_kernels.py` has the kernels by themselves."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engram
from builders import custom_stream, digits_for, interrupted, run_on, small_digits
from engram import Progress, Result, preset
from engram.config.methods import all_methods
from engram.config.presets import STEADY
from engram.config.settings import Config
from engram.data.batches import batches_of, move_streams, plan_epoch
from engram.engine.build import build_learner, build_streams, precision_of
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.choose import choose_program
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.loop import RECORDS_PER_EPOCH, run_stream
from engram.engine.program import Batches
from engram.engine.training import Runtime

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products in full float32, as a run computes them."""
    with precision_of("float32"):
        yield


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from engram.engine.gpu import kernels

    return kernels


# --- methods


@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("method", all_methods())
def test_every_method_trains_alike_on_the_gpu(method: str, penalty_step: str) -> None:
    config = preset("split-mnist", method, dataset="mnist-small", num_tasks=3, epochs=2, hidden=[32], trials=1)
    config = config.replace(penalty_step=penalty_step)
    on_cpu, on_gpu = (
        run_on([config], [small_digits(2000, 400)], Runtime(device, "float32"))[0] for device in ("cpu", "cuda")
    )
    losses = [[row["loss"] for row in result.dynamics] for result in (on_cpu, on_gpu)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    np.testing.assert_allclose(on_cpu.accuracy, on_gpu.accuracy, atol=0.02)


def test_the_cnn_trains_on_the_gpu() -> None:
    config = preset("vision-mixture", "dhp+mas", num_tasks=2, epochs=1, trials=1)
    data = digits_for(config, 640, 200)
    on_cpu, on_gpu = (run_on([config], data, Runtime(device, "float32"))[0] for device in ("cpu", "cuda"))
    losses = [[row["loss"] for row in result.dynamics] for result in (on_cpu, on_gpu)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)


KINDS = {
    "permuted": ("permuted-mnist", {"dataset": "mnist-small"}),
    "imbalanced": ("imbalanced-permuted-mnist", {"dataset": "mnist-small", "batch_size": 33}),
    "split": ("split-mnist", {"dataset": "mnist-small", "batch_size": 10}),
    "random order": ("split-mnist", {"class_order": "random", "dataset": "mnist-small", "batch_size": 10}),
    "mixture": ("vision-mixture", {}),
    "custom": ("custom", {}),
}


METHODS = (*all_methods(), "linear", "linear+si")  # plain heads share the section of matched and plastic ones


def configs_of(kind: str, methods: Sequence[str] = METHODS, **changes: object) -> list[Config]:
    benchmark, more = KINDS[kind]
    settings = {"num_tasks": 2, "trials": 2, "epochs": 1, "hidden": [37]} | more | changes
    configs = []
    for method in methods:
        penalized = method not in ("finetune", "dhp", "linear")
        configs.append(preset(benchmark, method, **({"strength": 1.0} if penalized else {})).replace(**settings))
    return configs


def run_kind(configs: Sequence[Config], runtime: Runtime, seen: list[Progress] | None = None) -> list[Result]:
    seen = [] if seen is None else seen
    if configs[0].benchmark == "custom":
        return engram.run_many(
            configs,
            stream=custom_stream(shape=(1, 17, 17), num_train=71, num_test=40, more=18),
            device=runtime.device,
            precision=runtime.precision,
            report=seen.append,
        )
    return run_on(configs, digits_for(configs[0], 320, 200), runtime, seen.append)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_methods_in_one_stack_train_as_on_the_cpu(kind: str, network: str) -> None:
    configs = configs_of(kind, network=network)
    on_cpu, on_gpu = (run_kind(configs, Runtime(device, "float32")) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        for name in ("loss", "eta", "hebb_norm", "alpha_norm"):
            values = [[row[name] for row in result.dynamics] for result in (one, other)]
            np.testing.assert_allclose(
                values[0], values[1], rtol=1e-3 if network == "mlp" else 1e-2, atol=1e-6, err_msg=one.config.method
            )
        np.testing.assert_allclose(one.accuracy, other.accuracy, atol=0.02)


@pytest.mark.parametrize("protect", ["slow", "in-force"])
@pytest.mark.parametrize("head", engram.heads.list())
def test_a_head_of_the_family_trains_in_a_stack_as_on_the_cpu(head: str, protect: str) -> None:
    memory = head in ("ncm", "slda", "ridge")
    configs = configs_of("split", (f"{head}+mas", f"{head}+si"), protect=protect, epochs=2)
    alone = preset("split-mnist", head, random_features=50) if memory else preset("split-mnist", head)
    configs.append(alone.replace(dataset="mnist-small", num_tasks=2, trials=2, epochs=2, hidden=[37], batch_size=10))
    seen: list[Progress] = []
    on_cpu = run_kind(configs, Runtime("cpu", "float32"))
    on_gpu = run_kind(configs, Runtime("cuda", "float32"), seen)
    assert not [progress.note for progress in seen if "one by one" in (progress.note or "")]
    for one, other in zip(on_cpu, on_gpu, strict=True):
        losses = [[row["loss"] for row in result.dynamics] for result in (one, other)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2, err_msg=one.config.method)
        np.testing.assert_allclose(one.accuracy, other.accuracy, atol=0.03)


@pytest.mark.parametrize("head", engram.heads.list())
def test_every_head_is_stacked_with_tensor_float_32(head: str) -> None:
    """The check before a run compares sums in double precision, to which rounded features were added."""
    configs = configs_of("permuted", (f"{head}+mas", f"{head}+si"), batch_size=64, hidden=[400, 400])
    learners, batches = build(configs)
    with precision_of("tf32"):
        _, notes = choose_program(learners, batches, GPU)
    assert notes == []


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline_head": "linear"},
        {"alpha": "uniform"},
        {"eta_range": "unbounded", "eta": 0.3},
        {"regularize_alpha": True},
        {"hidden": [7, 100], "leaky_slope": 0.3},
        {"fisher_labels": "exact"},
        {"fisher_labels": "sampled"},
        {"fisher_labels": "predicted"},
    ],
    ids=str,
)
def test_every_head_trains_in_a_stack_as_on_the_cpu(changes: dict[str, Any]) -> None:
    configs = configs_of("split", **changes)
    on_cpu, on_gpu = (run_kind(configs, Runtime(device, "float32")) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        losses = [[row["loss"] for row in result.dynamics] for result in (one, other)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2 if "sampled" in changes.values() else 1e-3)


@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("changes", [{}, {"alpha": "uniform"}, {"trace_gradient": True, "learn_eta": True}], ids=str)
def test_the_steady_trace_trains_in_a_stack_as_on_the_cpu(changes: dict[str, Any], penalty_step: str) -> None:
    """All classes are in every task, so that the anchors of weights in force move."""
    settings = {**STEADY, "penalty_step": penalty_step, "initialisation": "he", "input_mean": 0.13, "input_std": 0.3}
    configs = configs_of("permuted", **settings | changes)
    on_cpu, on_gpu = (run_kind(configs, Runtime(device, "float32")) for device in ("cpu", "cuda"))
    for one, other in zip(on_cpu, on_gpu, strict=True):
        losses = [[row["loss"] for row in result.dynamics] for result in (one, other)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_tensor_float_32_is_close_to_float32(network: str) -> None:
    configs = configs_of("permuted", network=network)
    full, fast = (run_kind(configs, Runtime("cuda", precision)) for precision in ("float32", "tf32"))
    for one, other in zip(full, fast, strict=True):
        losses = [[row["loss"] for row in result.dynamics] for result in (one, other)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)
        np.testing.assert_allclose(one.accuracy, other.accuracy, atol=0.05)


# --- a custom module


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 9))


class Choosy(nn.Module):
    """Looks at values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(289, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs.flatten(1))
        return torch.relu(hidden) if inputs.sum() > 0 else torch.tanh(hidden)


@pytest.mark.parametrize(("features", "words"), [(normed, None), (Choosy, "cannot be stacked and train one by one")])
def test_a_custom_module_trains_as_on_the_cpu(features: Callable[[], nn.Module], words: str | None) -> None:
    configs = configs_of("custom", ("finetune", "dhp+si", "ewc"), network="custom")
    found, seen = [], []
    for device in ("cpu", "cuda"):
        found.append(
            engram.run_many(
                configs,
                stream=custom_stream(shape=(1, 17, 17), num_train=71, num_test=40, more=18),
                features=features,
                device=device,
                precision="float32",
                report=seen.append,
            )
        )
    for one, other in zip(*found, strict=True):
        losses = [[row["loss"] for row in result.dynamics] for result in (one, other)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-2)
    notes = [progress.note for progress in seen if progress.note and "cannot be stacked" in progress.note]
    assert (len(notes) > 0) == (words is not None)


# --- a stack


def build(configs: Sequence[Config], num_train: int = 320) -> tuple[list[Learner], Batches]:
    """Learners in the order of a stack, and what they learn, on the GPU."""
    first = configs[0]
    trials = list(range(first.trials))
    found = move_streams(build_streams(first, trials, [small_digits(num_train, 100)]), GPU)
    shape, num_classes = found[0].input_shape, found[0].num_classes
    learners = [build_learner(c, t, shape, num_classes, GPU, torch.float32) for t in trials for c in configs]
    for learner in learners:
        learner.model.start(next(batches_of(found[learner.trial][0].train, 64))[0])
    return learners, Batches(trials, found, first.seed, torch.float32)


def stacked(learners: Sequence[Learner], batches: Batches) -> Mapped:
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped), notes
    return program


def state_of(learner: Learner) -> dict[str, Tensor]:
    return {**learner.model.state_dict(), **learner.penalty.state_dict()}


def assert_untouched(one: Learner, other: Learner) -> None:
    """The same, bit for bit."""
    assert repr(one.outcome) == repr(other.outcome)
    for (name, a), (_, b) in zip(state_of(one).items(), state_of(other).items(), strict=True):
        assert torch.equal(a, b), f"{one.config.method} {one.trial} {name}"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("permuted", {}), ("imbalanced", {}), ("split", {"baseline_head": "linear"}), ("permuted", {"network": "cnn"})],
    ids=str,
)
def test_a_captured_step_is_the_step_itself(
    kernels: ModuleType, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for captures in (True, False):
        learners, batches = build(configs_of(kind, **changes))
        program = stacked(learners, batches)
        assert program.captures
        program.captures = captures
        captured = Mock(wraps=program._captured)
        monkeypatch.setattr(program, "_captured", captured)
        run_stream(program, batches, learners[0].config)
        assert captured.called == captures
        found.append(learners)
    for one, other in zip(*found, strict=True):
        assert_untouched(one, other)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_models_of_a_stack_never_mix(network: str) -> None:
    configs = configs_of("imbalanced", ("finetune", "dhp", "dhp+si", "ewc"), network=network)
    expected, batches = build(configs)
    run_stream(stacked(expected, batches), batches, configs[0])
    for which, factor in ((0, 1.5), (5, float("nan")), (7, 1.5)):
        learners, batches = build(configs)
        with torch.no_grad():
            for theta in learners[which].model.parameters():
                theta.mul_(factor)
        run_stream(stacked(learners, batches), batches, configs[0])
        for place, (one, other) in enumerate(zip(learners, expected, strict=True)):
            if place != which:
                assert_untouched(one, other)
        assert repr(learners[which].outcome) != repr(expected[which].outcome)
        assert (learners[which].outcome.diverged is not None) == (factor != factor)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_the_host_never_waits_within_an_epoch(kernels: ModuleType, network: str) -> None:
    configs = configs_of("imbalanced", epochs=3, network=network)
    learners, batches = build(configs)
    program = stacked(learners, batches)
    pieces = plan_epoch(batches.sizes(0), configs[0].batch_size, RECORDS_PER_EPOCH)
    program.begin_task(0)
    program.begin_epoch(0, 0)
    for piece in pieces:  # each kind of step is captured when it comes first
        program.train(piece)
        program.dynamics()
    program.begin_epoch(0, 1)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        losses = [program.train(piece) for piece in pieces]
        seen = program.dynamics()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(loss.isfinite().all() for loss in losses)
    assert seen.shape == (len(learners), 3)


def test_pinned_memory_may_be_drawn_in_another_thread_while_steps_are_captured(kernels: ModuleType) -> None:
    """As the next epoch's order is: in the way of a capture that minds all threads, each new block ends it."""
    configs = configs_of("permuted", ("finetune", "dhp+si", "dhp+mas"))
    expected, batches = build(configs)
    run_stream(stacked(expected, batches), batches, configs[0])
    learners, batches = build(configs)
    program = stacked(learners, batches)
    drawn: list[Tensor] = []  # kept, so that each is new memory
    meanwhile: list[int] = []  # how many, for each capture
    capturing, ended = threading.Event(), threading.Event()
    usual = program._captured

    def draw() -> None:
        while not ended.is_set():
            if capturing.wait(0.1):
                drawn.append(torch.zeros(1024, dtype=torch.int64, pin_memory=True))

    def captured(*key: int) -> torch.cuda.CUDAGraph:
        before = len(drawn)
        capturing.set()
        try:
            return usual(*key)
        finally:
            capturing.clear()
            meanwhile.append(len(drawn) - before)

    program._captured = captured  # type: ignore[method-assign]
    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        run_stream(program, batches, configs[0])
    finally:
        ended.set()
        drawing.join()
    assert len(meanwhile) >= 2, "a capture a task at least"
    assert sum(meanwhile) > 0, "and something was drawn in the midst of them"
    for one, other in zip(learners, expected, strict=True):
        assert_untouched(one, other)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("stop_at", [(0, 0, 2), (1, 0, 0), (1, 1, 3)])
def test_a_run_on_the_gpu_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: tuple[int, int, int], network: str
) -> None:
    configs = configs_of("imbalanced", ("dhp+si", "ewc", "dhp+mas", "finetune"), epochs=2, network=network)

    def learn(checkpoints: CheckpointFolder | None) -> list[tuple[bytes, bytes, str]]:
        saved = {} if checkpoints is None else {"checkpoints": checkpoints.path, "seconds_between": 0}
        results = run_on(configs, [small_digits(320, 100)], Runtime("cuda", "tf32"), **saved)
        return [(r.accuracy.tobytes(), r.untrained.tobytes(), repr(r.dynamics)) for r in results]

    straight = learn(None)
    with interrupted(lambda position: position == stop_at):
        learn(CheckpointFolder(tmp_path, seconds_between=0))
    assert learn(CheckpointFolder(tmp_path)) == straight
