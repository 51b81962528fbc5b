"""Streams without task boundaries: consolidation after every N steps, on the samples seen since the last one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from builders import interrupted, refusal, run_on, small_digits
from engram import preset
from engram.config.effect import has_effect
from engram.config.settings import Config
from engram.data.batches import batches_of, plan_epoch, read_inputs
from engram.engine.build import build_learner, build_penalty, build_streams
from engram.engine.choose import choose_program
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches, Program
from engram.engine.training import Runtime, check_together
from engram.nn.classes import mask_logits

METHODS = ("online-ewc", "si", "mas", "dhp+si", "finetune")
QUICK = {"dataset": "mnist-small", "epochs": 2, "batch_size": 8, "num_tasks": 2, "trials": 2, "hidden": [7]}


def config_of(method: str, every: int | None, benchmark: str = "split-mnist", **changes: Any) -> Config:
    return preset(benchmark, method, **{**QUICK, **changes}).replace(consolidate_every=every)


def build(configs: list[Config]) -> tuple[list[Learner], Batches]:
    found = build_streams(configs[0], [0, 1], [small_digits(120, 40)])
    shape, num_classes, cpu = found[0].input_shape, found[0].num_classes, torch.device("cpu")
    learners = [build_learner(c, t, shape, num_classes, cpu, torch.float64) for t in (0, 1) for c in configs]
    return learners, Batches([0, 1], found, 0, torch.float64)


def trained(configs: list[Config], device: str) -> tuple[list[Learner], Program]:
    """The learners after training; the device is a word only, by which the program is chosen."""
    learners, batches = build(configs)
    program, _ = choose_program(learners, batches, torch.device(device))
    assert isinstance(program, Mapped) == (device == "cuda")
    run_stream(program, batches, configs[0])
    return learners, program


def by_hand(config: Config) -> tuple[Learner, list[int]]:
    """One learner trained by an explicit loop; also the number of samples in each consolidation."""
    (learner, *_), batches = build([config])
    model, penalty, stream = learner.model, learner.penalty, batches.streams[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    sizes = []
    for n, task in enumerate(stream):
        seen: list[tuple[Tensor, Tensor]] = []
        step = 0

        def consolidate(seen: list[tuple[Tensor, Tensor]], classes: tuple[int, ...]) -> None:
            penalty.consolidate(list(seen), classes)
            sizes.append(sum(len(targets) for _, targets in seen))
            seen.clear()

        for epoch in range(config.epochs):
            for rows in batches.orders(n, epoch)[0].split(config.batch_size):
                inputs = read_inputs(task.train.inputs[rows], task.permutation, torch.float64)
                targets = task.train.targets[rows]
                model.train()
                optimizer.zero_grad()
                F.cross_entropy(mask_logits(model(inputs, targets), task.taught), targets).backward()
                optimizer.step()
                penalty.proximal_step(config.learning_rate)
                penalty.after_step() if config.penalty == "si" else None
                seen.append((inputs, targets))
                step += 1
                if config.consolidate_every and step % config.consolidate_every == 0:
                    consolidate(seen, task.taught)
        if seen:
            consolidate(seen, task.taught)
    return learner, sizes


@pytest.mark.parametrize("method", METHODS[:4])
@pytest.mark.parametrize("every", [2, 3, 100])
def test_a_run_consolidates_as_an_explicit_loop_does(method: str, every: int) -> None:
    config = config_of(method, every)
    expected, sizes = by_hand(config)
    assert (len(sizes) == 2) == (every == 100)
    (learner, *_), _ = trained([config], "cpu")
    for name, theta in expected.model.state_dict().items():
        torch.testing.assert_close(learner.model.state_dict()[name], theta, rtol=1e-9, atol=1e-13)
    for key, tensor in expected.penalty.state.items():
        if not key.startswith("before."):  # needed only by a hand-written loop
            torch.testing.assert_close(learner.penalty.state[key], tensor, rtol=1e-7, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["split-mnist", "imbalanced-permuted-mnist"])
@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_stack_computes_what_each_model_does_alone(benchmark: str, every: int) -> None:
    """Also where trials differ in their number of samples, and so consolidate at different moments."""
    configs = [config_of(method, every, benchmark) for method in METHODS]
    alone, _ = trained(configs, "cpu")
    stacked, program = trained(configs, "cuda")
    assert not any("one model after another" in note for note in program.notes)
    for one, other in zip(alone, stacked, strict=True):
        assert one.outcome.diverged is other.outcome.diverged is None
        assert one.outcome.rows == other.outcome.rows
        assert [r.step for r in one.outcome.records] == [r.step for r in other.outcome.records]
        for name, theta in one.model.state_dict().items():
            torch.testing.assert_close(other.model.state_dict()[name], theta, rtol=1e-8, atol=1e-12)


def test_the_samples_seen_are_those_of_the_steps() -> None:
    _, batches = build([config_of("si", 3)])
    size = batches.sizes(1)[0]
    orders = [batches.orders(1, epoch)[0] for epoch in range(3)]
    per_epoch = -(-size // 8)
    within = batches.seen(1, 0, range(1, 2), 8)
    assert torch.equal(within.train.rows, orders[0][8:16])  # type: ignore[arg-type]
    across = batches.seen(1, 0, range(per_epoch - 1, 2 * per_epoch + 1), 8)
    expected = torch.cat([orders[0][8 * (per_epoch - 1) :], orders[1], orders[2][:8]])
    assert torch.equal(across.train.rows, expected)  # type: ignore[arg-type]
    assert across.taught == batches.tasks(1)[0].taught


def test_no_sample_is_consolidated_twice_where_the_last_steps_end_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("online-ewc", 4, trials=1, batch_size=10**6)  # one step an epoch
    seen: list[list[int]] = []

    def consolidate(self: Any, n: int, tasks: Any = None, consolidate: Any = None) -> Tensor:
        seen.append([len(task.train) for task in tasks.values()])
        return torch.ones(len(self.learners), dtype=torch.bool)

    monkeypatch.setattr("engram.engine.cpu.program.OneByOne.consolidate", consolidate)
    run_on([config.replace(epochs=8, num_tasks=1)], [small_digits(120, 40)], Runtime("cpu"))
    size = len(build([config])[1].tasks(0)[0].train)
    assert seen == [[4 * size], [4 * size], []]


def test_without_it_a_task_is_consolidated_once_on_all_its_samples() -> None:
    (plain, *_), _ = trained([config_of("online-ewc", None, epochs=1, num_tasks=1)], "cpu")
    (seen, *_), _ = trained([config_of("online-ewc", 10**6, epochs=1, num_tasks=1)], "cpu")
    fresh = build_penalty(plain.config, 0, copy.deepcopy(plain.model))
    task = build([plain.config])[1].tasks(0)[0]
    fresh.consolidate(batches_of(task.train, 500, dtype=torch.float64), task.taught)
    for key, tensor in fresh.state.items():
        torch.testing.assert_close(plain.penalty.state[key], tensor, rtol=1e-12, atol=0)
        torch.testing.assert_close(seen.penalty.state[key], tensor, rtol=1e-10, atol=1e-16)  # in another order


def test_pieces_end_where_a_consolidation_is_due() -> None:
    ends = [piece.end for piece in plan_epoch([64], 8, 1, [{2, 5}])]
    assert ends == [3, 6, 8]
    assert [piece.end for piece in plan_epoch([64], 8, 1)] == [8]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stop_at", [(0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 0)])
def test_a_resumed_run_is_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: tuple[int, int, int], device: str
) -> None:
    choose = lambda *given: choose_program(*given[:2], torch.device(device))  # noqa: E731
    monkeypatch.setattr("engram.engine.in_process.choose_program", choose)
    configs = [config_of(method, 3, "imbalanced-permuted-mnist") for method in ("si", "dhp+online-ewc")]

    def learn(**saved: Any) -> list[tuple[bytes, str]]:
        results = run_on(configs, [small_digits(60, 30)], Runtime("cpu", "float64"), **saved)
        return [(result.accuracy.tobytes(), repr(result.dynamics)) for result in results]

    straight = learn()
    with interrupted(lambda position: position == stop_at):
        learn(checkpoints=tmp_path, seconds_between=0)
    assert learn(checkpoints=tmp_path, seconds_between=0) == straight


def test_ewc_with_a_term_for_each_consolidation_is_refused() -> None:
    sentence = refusal(check_together, {"ewc": config_of("ewc", 3)})
    assert sentence.startswith("ewc keeps a term for every consolidation: set consolidate_every only for penalties")
    sentence = refusal(check_together, {"replay": config_of("replay", 3)})
    assert sentence == "replay has no penalty that could consolidate: leave consolidate_every out"
    check_together({"online-ewc": config_of("online-ewc", 3), "ewc": config_of("ewc", None)})


def test_it_is_a_number_of_steps_and_of_methods_with_a_penalty() -> None:
    assert refusal(config_of, "si", 0) == "consolidate_every must be at least 1, not 0"
    assert [has_effect("consolidate_every", config_of(method, 3)) for method in ("si", "finetune")] == [True, False]
