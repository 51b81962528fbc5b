"""Every head in a stack is each alone; and heads with state of their own under in-force protection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_stack import GPU, assert_close, build, compare, config_of, example_of, stacked, train
from torch import Tensor, nn

import engram
from builders import interrupted, run_on, small_digits
from engram.common.errors import Divergence
from engram.common.registry import HEADS, REHEARSALS, Registration
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.choose import architectures, choose_program, reason_against_mapping
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.section import Section
from engram.engine.training import Runtime
from engram.rehearsal.replay import Replay

QUICK = {"num_tasks": 2, "trials": 2}


def methods_of(head: str) -> list[str]:
    return [head, f"{head}+si", f"{head}+online-ewc"]


@pytest.mark.parametrize("head", engram.heads.list())
@pytest.mark.parametrize("protect", ["slow", "in-force"])
def test_a_stack_is_each_alone(head: str, protect: str) -> None:
    configs = [config_of("split", method, protect=protect, epochs=1, **QUICK) for method in methods_of(head)]
    slow = [config for config in configs if config.network != "none"]
    for group in (slow, [config.replace(random_features=9) for config in configs if config not in slow]):
        if group:
            compare(group)


@pytest.mark.parametrize(
    ("head", "setting", "values"),
    [
        ("dhp-uniform", "alpha_init", (0.01, 0.5)),
        ("steady", "alpha_init", (0.01, 0.5)),
        ("neuromodulated", "alpha_init", (0.01, 0.5)),
        ("retroactive", "eta", (0.01, 0.5)),
        ("hebbian-softmax", "head_init", ("linear", "published")),
        ("hebbian-softmax", "rare_until", (3.0, 30.0)),
        ("balanced", "head_gain", (0.3, 3.0)),
        ("balanced", "head_dropout", (0.2, 0.8)),
        ("balanced-trace", "head_dropout", (0.2, 0.8)),
    ],
)
def test_models_of_a_section_may_start_in_different_ways(head: str, setting: str, values: tuple) -> None:
    configs = [config_of("split", head, **QUICK, **{setting: value}) for value in values]
    assert len(architectures(build(configs)[0])) == 1
    compare(configs)


def test_heads_of_another_package_share_all_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do with one is not known: it may be a constant of their forward pass."""

    def make(in_features: int, out_features: int, alpha_init: float) -> engram.DHPSoftmax:
        return engram.DHPSoftmax(in_features, out_features, alpha_init=alpha_init)

    facts = {"settings": {"alpha_init": "alpha_init"}, "listed": False}
    monkeypatch.setitem(HEADS._registered, "foreign", Registration("foreign", make, facts))
    configs = [config_of("split", "foreign", **QUICK, alpha_init=value) for value in (0.01, 0.5)]
    assert len(architectures(build(configs)[0])) == 2


def test_rehearsals_of_another_package_share_all_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = type("Foreign", (Replay,), {"__module__": "another.package"})
    facts = {"settings": {"memory_size": "memory_size", "weight": "gamma"}}
    monkeypatch.setitem(REHEARSALS._registered, "foreign", Registration("foreign", foreign, facts))
    configs = [config_of("split", "linear+foreign", **QUICK).replace(gamma=value) for value in (0.1, 0.9)]
    assert len(architectures(build(configs)[0])) == 2


@pytest.mark.parametrize("settings", [{"shrinkage": 0.1}, {"top_k": 3}])
def test_what_a_head_computes_with_is_the_same_in_a_section(settings: dict[str, float]) -> None:
    configs = [config_of("split", "slda+mas", **QUICK), config_of("split", "slda+mas", **QUICK, **settings)]
    assert len(architectures(build(configs)[0])) == 2


@pytest.mark.parametrize("head", ["hebbian-softmax", "neuromodulated", "cope"])
def test_a_stack_is_each_alone_on_streams_of_unequal_length(head: str) -> None:
    compare([config_of("imbalanced", method) for method in (head, f"{head}+mas")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", ["hebbian-softmax", "fast-weights", "neuromodulated", "retroactive", "balanced", "balanced-trace", "cope"]
)
@pytest.mark.parametrize("kind", ["permuted", "imbalanced", "split", "mixture"])
def test_a_relative_learns_on_the_paper_s_benchmarks(head: str, kind: str) -> None:
    network = {"network": "cnn", "batch_size": 20, "epochs": 1, "trials": 1} if kind == "mixture" else {"epochs": 3}
    learners, batches = build([config_of(kind, method, **network) for method in (head, f"{head}+online-ewc")])
    train(OneByOne(learners, batches), batches)
    assert all(learner.outcome.diverged is None for learner in learners)


class RunningSize(engram.DHPSoftmax):
    """A trace that is read relative to a running root mean square of the activations: state of its own."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, alpha_init=0.5, trace_gradient=False, learn_eta=False, eta=0.1)
        self.register_buffer("size", torch.ones(()))

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        if self.training:
            with torch.no_grad():
                now = hidden.detach().square().mean().sqrt()
                self.size.copy_(0.9 * self.size + 0.1 * now)
        return super().forward(hidden, target)

    def read(self, hebb: Tensor) -> Tensor:
        return hebb / self.size


@pytest.mark.parametrize("step", ["proximal", "gradient"])
def test_a_custom_head_with_state_of_its_own_is_protected_in_force(step: str) -> None:
    configs = [
        config_of("split", method, protect="in-force", penalty_step=step, strength=strength, learning_rate=rate)
        for method, strength, rate in (("dhp+mas", 0.5, 0.05), ("dhp+online-ewc", 2.0, 0.2))
    ]
    found = []
    for kind in ("stack", "one by one"):
        learners, batches = build(configs, head=RunningSize)
        program = stacked(learners, batches) if kind == "stack" else OneByOne(learners, batches)
        train(program, batches)
        found.append(learners)
    for one, other in zip(*found, strict=True):
        assert_close(one, other)
    sizes = {float(learner.model.head.size) for learner in found[0]}
    assert len(sizes) == len(found[0]), "each has its own"


@pytest.mark.parametrize("head", ["dhp", "balanced-trace", RunningSize])
@pytest.mark.parametrize("which", [0, -1])
def test_models_can_be_stacked_although_one_of_them_diverged_before_a_resume(head: Any, which: int) -> None:
    method, custom = (head, {}) if isinstance(head, str) else ("dhp", {"head": head})
    learners, batches = build([config_of("split", method)], **custom)
    for theta in learners[which].model.parameters():
        nn.init.constant_(theta, float("nan"))
    example = example_of(batches)
    assert reason_against_mapping(learners, example, None) is None, "nobody has noticed yet"
    learners[which].outcome.diverged = Divergence(learners[which].trial, task=0, step=3)
    assert reason_against_mapping(learners, example, None) is None


@pytest.mark.parametrize(("factor", "reason"), [(1 + 1e-4, None), (1.1, "something else into its buffer 'head.total'")])
def test_sums_in_double_precision_are_as_exact_as_the_features(
    factor: float, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models in float32 whose sums are in float64: a stack rounds features in another way."""
    learners, batches = build([config_of("split", "fast-weights", network="mlp")])
    models = [learner.model for learner in learners]
    for model in models:
        sums = model.head.total, model.head.count
        model.float()
        model.head.total, model.head.count = sums
    step = Section.step

    def rounded(section: Section, *given: object) -> Tensor:
        losses = step(section, *given)
        section.rows.buffers["head.total"].mul_(factor)
        return losses

    monkeypatch.setattr(Section, "step", rounded)
    inputs, targets = example_of(batches)
    found = reason_against_mapping(learners, (inputs.float(), targets), None)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("head", engram.heads.list())
@pytest.mark.parametrize("program", ["one by one", "stack"])
def test_a_run_resumes_bit_for_bit(head: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program == "stack":
        monkeypatch.setattr("engram.engine.in_process.choose_program", lambda *given: choose_program(*given[:2], GPU))
    small = {"random_features": 9} if config_of("split", head).network == "none" else {}
    configs = [config_of("split", head, trials=1, epochs=2, num_tasks=2, batch_size=4, **small)]
    configs += [] if small else [config_of("split", f"{head}+si", trials=1, epochs=2, num_tasks=2, batch_size=4)]

    def learn(checkpoints: CheckpointFolder | None) -> list:
        saved = {} if checkpoints is None else {"checkpoints": checkpoints.path, "seconds_between": 0}
        results = run_on(configs, [small_digits(40, 30)], Runtime("cpu", "float64"), **saved)
        return [(r.accuracy.tobytes(), repr(r.dynamics)) for r in results]

    straight = learn(None)
    with interrupted(lambda position: position == (1, 0, 1)):
        learn(CheckpointFolder(tmp_path, seconds_between=0))
    assert learn(CheckpointFolder(tmp_path)) == straight
