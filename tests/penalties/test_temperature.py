"""Importances with a temperature, against a direct reading of their equations in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders import refusal, small_digits
from engram import EWC, MAS, SI, OnlineEWC, preset
from engram.config.settings import Config
from engram.engine.build import build_learner, build_streams
from engram.engine.choose import choose_program
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches

T = 7.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def samples(number: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(number, 5, generator=random, dtype=torch.float64), torch.arange(number) % 4


def fisher(model: nn.Module, labels: str, temperature: float, classes: Sequence[int] = range(4)) -> dict[str, Tensor]:
    """Ω = mean over samples of Σ_y w_y (∂ log softmax(z / T)_y / ∂θ)², w = 1 for the label or softmax(z / T)."""
    inputs, targets = samples()
    total = {name: torch.zeros_like(theta) for name, theta in model.named_parameters()}
    for x, target in zip(inputs, targets, strict=True):
        for y in classes if labels == "exact" else [int(target)]:
            log_p = (model(x[None])[0, list(classes)] / temperature).log_softmax(dim=0)[list(classes).index(y)]
            weight = log_p.exp().detach() if labels == "exact" else 1.0
            gradients = torch.autograd.grad(log_p, list(model.parameters()))
            for name, g in zip(total, gradients, strict=True):
                total[name] += weight * g**2 / len(inputs)
    return total


@pytest.mark.parametrize("kind", [EWC, OnlineEWC])
@pytest.mark.parametrize("labels", ["true", "exact"])
@pytest.mark.parametrize("temperature", [1.0, T, 0.5])
def test_the_fisher_information_is_that_of_the_tempered_likelihood(
    kind: type[EWC], labels: str, temperature: float
) -> None:
    model = network()
    penalty = kind(model, strength=1.0, labels=labels, temperature=temperature)
    penalty.consolidate([samples()])
    for name, omega in fisher(model, labels, temperature).items():
        torch.testing.assert_close(penalty.terms[0].importance[name], omega, rtol=1e-10, atol=1e-16)


def test_drawn_labels_are_those_of_the_tempered_likelihood() -> None:
    model = network()
    nn.init.constant_(model[2].bias, 0.0)
    with torch.no_grad():
        model[2].bias[0] = 50.0  # at T = 1 every draw is class 0
    cold, hot = (EWC(model, strength=1.0, labels="sampled", temperature=t) for t in (1.0, 1e6))
    for penalty in (cold, hot):
        penalty.consolidate([samples(200)])
    bias = [penalty.terms[0].importance["2.bias"] for penalty in (cold, hot)]
    assert bias[0].max() < 1e-12
    torch.testing.assert_close(bias[1] * 1e12, torch.full((4,), 3 / 16, dtype=torch.float64), rtol=0.3, atol=0)


def test_a_temperature_keeps_importances_from_fading() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(300)  # as if the task were fitted, though to other labels
    inputs, _ = samples()
    batch = (inputs, model(inputs).argmax(dim=1))
    sums = []
    for temperature in (1.0, 500.0):
        penalty = EWC(model, strength=1.0, temperature=temperature)
        penalty.consolidate([batch])
        importance = penalty.terms[0].importance
        sums.append(temperature**2 * sum(float(omega.sum()) for omega in importance.values()))
    assert sums[1] > 10 * sums[0]


def si_loop(penalty: SI, step: str, num_steps: int = 6) -> dict[str, Tensor]:
    """Train by the penalty's verbs; returns the path −Σ g Δθ, with g of the loss of z / T."""
    model, (inputs, targets) = penalty.model, samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    path = {name: torch.zeros_like(theta) for name, theta in model.named_parameters()}
    for _ in range(num_steps):
        before = {name: theta.detach().clone() for name, theta in model.named_parameters()}
        tempered = F.cross_entropy(model(inputs) / penalty.temperature, targets)
        g = torch.autograd.grad(tempered, list(model.parameters()))
        optimizer.zero_grad()
        logits = model(inputs)
        penalty.before_backward(logits, targets)
        loss = F.cross_entropy(logits, targets)
        (loss + penalty.loss() if step == "gradient" else loss).backward()
        penalty.after_backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step == "proximal":
            penalty.proximal_step(optimizer)
        penalty.after_step()
        for (name, theta), slope in zip(model.named_parameters(), g, strict=True):
            path[name] -= slope * (theta.detach() - before[name])
    return path


@pytest.mark.parametrize("temperature", [1.0, T])
@pytest.mark.parametrize("step", ["gradient", "proximal"])
def test_the_path_of_si_is_along_the_tempered_gradient(temperature: float, step: str) -> None:
    penalty = SI(network(), strength=0.5, temperature=temperature)
    for _ in range(2):  # the second time with a penalty
        path = si_loop(penalty, step)
        for name, expected in path.items():
            torch.testing.assert_close(penalty.group("path")[name], expected, rtol=1e-9, atol=1e-14)
        penalty.consolidate()


def test_batches_of_one_step_add_up() -> None:
    whole, parts = (SI(network(), strength=1.0, temperature=T) for _ in range(2))
    inputs, targets = samples(8)
    whole.before_backward(whole.model(inputs), targets)
    for half in (slice(0, 4), slice(4, 8)):
        parts.before_backward(parts.model(inputs[half]), targets[half], scale=0.5)
    for name, g in whole.task_gradient.items():
        torch.testing.assert_close(parts.task_gradient[name], g, rtol=1e-12, atol=1e-16)


def test_si_with_a_temperature_refuses_a_loop_that_forgets_the_logits() -> None:
    penalty = SI(network(), strength=1.0, temperature=T)
    inputs, targets = samples()
    F.cross_entropy(penalty.model(inputs), targets).backward()
    penalty.after_backward()
    sentence = "SI with a temperature needs logits: call before_backward(logits, targets) at each step"
    assert refusal(penalty.after_step) == sentence


def build(configs: list[Config]) -> tuple[list[Learner], Batches]:
    found = build_streams(configs[0], [0, 1], [small_digits(80, 20)])
    shape, cpu = found[0].input_shape, torch.device("cpu")
    learners = [build_learner(c, t, shape, 10, cpu, torch.float64) for t in (0, 1) for c in configs]
    return learners, Batches([0, 1], found, 0, torch.float64)


def test_models_of_a_stack_have_their_own_temperatures() -> None:
    quick = {"dataset": "mnist-small", "epochs": 1, "batch_size": 8, "num_tasks": 2, "trials": 2, "hidden": [7]}
    base = [preset("split-mnist", method, **quick) for method in ("ewc", "online-ewc", "dhp+online-ewc")]
    configs = [config.replace(temperature=t) for config in base for t in (1.0, 3.0, 200.0)]
    found = []
    for device in ("cpu", "cuda"):  # the latter as a word only: the chooser goes by it
        learners, batches = build(configs)
        program, _ = choose_program(learners, batches, torch.device(device))
        assert isinstance(program, Mapped) == (device == "cuda")
        run_stream(program, batches, configs[0])
        assert not any("one model after another" in note for note in program.notes)
        found.append(learners)
    for alone, stacked in zip(*found, strict=True):
        for key, tensor in alone.penalty.state.items():
            torch.testing.assert_close(stacked.penalty.state[key], tensor, rtol=1e-8, atol=1e-18)
    sums = [sum(float(omega.sum()) for omega in found[0][i].penalty.terms[0].importance.values()) for i in range(3)]
    assert sums[0] > sums[1] > sums[2] > 0


def test_si_with_a_temperature_trains_alone_in_a_run() -> None:
    quick = {"dataset": "mnist-small", "epochs": 1, "batch_size": 8, "num_tasks": 2, "trials": 2, "hidden": [7]}
    configs = [preset("split-mnist", "si", temperature=t, **quick) for t in (1.0, T)]
    learners, batches = build(configs)
    program, notes = choose_program(learners, batches, torch.device("cuda"))
    assert len(program.programs) == 2  # type: ignore[attr-defined]
    assert any("SI" in note for note in notes)
    run_stream(program, batches, configs[0])
    assert [len(learner.outcome.rows) for learner in learners] == [2] * 4
    omegas = [learner.penalty.terms[0].importance["head.weight"] for learner in learners[:2]]  # type: ignore[attr-defined]
    assert not torch.equal(*omegas)


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, SI])
@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_a_positive_number(kind: type[EWC], temperature: float) -> None:
    sentence = refusal(kind, network(), strength=1.0, temperature=temperature)
    assert sentence == f"temperature must be a positive number, not {temperature}"


def test_mas_has_no_likelihood_and_so_no_temperature() -> None:
    with pytest.raises(TypeError):
        MAS(network(), strength=1.0, temperature=2.0)  # type: ignore[call-arg]
