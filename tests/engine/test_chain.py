"""Passes without autograd: equal to autograd's to the last digit, and only where a model is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from builders import assert_tensors_equal
from engram import preset
from engram.engine.build import build_learner
from engram.engine.cpu import descent as descents
from engram.engine.cpu.chain import known_chain
from engram.engine.cpu.descent import FactoredDescent, descent_of
from engram.nn.classes import mask_logits
from engram.nn.networks import Network

CPU = torch.device("cpu")
METHODS = ["finetune", "dhp", "dhp+online-ewc", "dhp+si", "si", "dhp+mas"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient": {"penalty_step": "gradient"},
    "adam": {"optimizer": "adam", "learning_rate": 1e-3},
    "one alpha": {"alpha": "uniform"},
    "one layer": {"hidden": [9]},
    "eta outside": {"eta_range": "unbounded", "eta": 1.5},
    "eta at the bound": {"eta": 1.0, "learning_rate": 0.5},
    "eta fixed": {"learn_eta": False},
    "bias": {"baseline_head": "linear", "head_bias": True},
    "in force": {"protect": "in-force"},
    "matched": {"baseline_head": "matched"},
    "matched by half": {"baseline_head": "matched", "baseline_trace": 0.5},
}


def trained(method: str, settings: dict[str, Any], dtype: torch.dtype, classes: tuple[int, ...]) -> dict[str, Tensor]:
    """Everything that a learner holds after a few steps of a second task, and their losses."""
    config = preset("permuted-mnist", method).replace(**{"hidden": [9, 7], **settings})
    learner = build_learner(config, 0, (1, 4, 4), 5, CPU, dtype)
    random = torch.Generator().manual_seed(0)
    if config.penalty is not None:
        weights = learner.penalty.parameters
        learner.penalty.remember({n: torch.rand(w.shape, generator=random, dtype=dtype) for n, w in weights.items()})
    inputs = torch.randn(11, 13, 1, 4, 4, generator=random, dtype=dtype)
    targets = torch.tensor(classes)[torch.randint(0, len(classes), (11, 13), generator=random)]
    descent = descent_of(learner, inputs[0, :2], targets[0, :2])
    learner.model.train()
    descent.begin_task(classes)
    with descent.steps():
        losses = torch.stack([descent.step(x, y) for x, y in zip(inputs, targets, strict=True)])
    assert isinstance(descent, FactoredDescent)
    of_penalty = {f"penalty.{name}": tensor for name, tensor in learner.penalty.state_dict().items()}
    return {
        "losses": losses,
        "known": torch.tensor(descent.chain is not None),
        **learner.model.state_dict(),
        **of_penalty,
    }


SOME, ALL = (1, 3), (0, 1, 2, 3, 4)  # classes of a task
SINGLE, DOUBLE = torch.float32, torch.float64
CASES = [(method, SOME, SINGLE) for method in METHODS]
OTHER_CASES = [(ALL, SINGLE), (SOME, DOUBLE), (ALL, DOUBLE)]
CASES += [(method, classes, dtype) for method in ("dhp+si", "finetune") for classes, dtype in OTHER_CASES]


@pytest.mark.parametrize(("method", "classes", "dtype"), CASES)
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_autograd_to_the_last_digit(
    name: str, method: str, classes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"baseline_head": "linear", **SETTINGS[name]}
    by_hand = trained(method, settings, dtype, classes)
    monkeypatch.setattr(descents, "known_chain", lambda *_: None)
    by_autograd = trained(method, settings, dtype, classes)
    assert [steps.pop("known").item() for steps in (by_hand, by_autograd)] == [True, False]
    assert_tensors_equal(by_hand, by_autograd)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("classes", [(0, 1, 2), (0, 2)], ids=["all classes", "some classes"])
def test_gradients_are_those_of_autograd_to_the_last_digit(classes: tuple[int, ...], weighted: bool) -> None:
    model, random = perceptron(engram.LinearSoftmax(8, 3, bias=True)), torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(13, 6, generator=random), torch.rand(13, generator=random)
    targets = torch.tensor(classes)[torch.randint(0, len(classes), (13,), generator=random)]
    each = F.cross_entropy(mask_logits(model(inputs), classes), targets, reduction="none")
    loss = (each * weight).mean() if weighted else F.cross_entropy(mask_logits(model(inputs), classes), targets)
    loss.backward()
    chain = known_chain(model)
    assert chain is not None
    with torch.no_grad():
        slopes = chain.slopes(inputs, targets, classes, weight if weighted else None)
        found = slopes.gradients({name: torch.empty_like(theta) for name, theta in model.named_parameters()})
    expected = {name: theta.grad for name, theta in model.named_parameters()}
    assert_tensors_equal({"loss": slopes.loss, **found}, {"loss": loss.detach(), **expected})


def hooked(model: Network) -> None:
    model.head.register_forward_hook(lambda *_: None)


def changed(model: Network) -> None:
    model.head.forward = lambda hidden, target: hidden[:, :3]  # type: ignore[method-assign]


def watched(model: Network) -> None:
    model.head.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[operator, union-attr]


class Doubled(Network):
    def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
        return 2 * super().forward(inputs, target)


CHANGES: list[Callable[[Network], None]] = [hooked, changed, watched]


def perceptron(head: nn.Module | None = None, kind: type[Network] = Network) -> Network:
    head = engram.DHPSoftmax(8, 3) if head is None else head
    if hasattr(head, "check_values"):
        head.check_values = False  # type: ignore[assignment]
    return kind(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.ReLU()), head)


def is_known(model: nn.Module, factored: tuple[str, ...] = ("features.0.", "features.2.")) -> bool:
    return known_chain(model, factored) is not None


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_someone_watches_or_changed_is_left_to_autograd(change: Callable[[Network], None]) -> None:
    model = perceptron()
    assert is_known(model)
    change(model)
    assert not is_known(model)


def test_models_that_are_not_known_are_left_to_autograd() -> None:
    assert is_known(perceptron(engram.LinearSoftmax(8, 3)))
    assert not is_known(perceptron(kind=Doubled))
    assert not is_known(perceptron(engram.DHPSoftmax(8, 3, trace_centred=True)))
    assert not is_known(perceptron(engram.DHPSoftmax(8, 3, trace_write="after")))
    assert not is_known(perceptron(nn.Linear(8, 3)))
    assert not is_known(perceptron(), factored=("features.0.",)), "a layer is frozen"
    assert not is_known(Network(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True)), engram.LinearSoftmax(8, 3)))
    assert not is_known(Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), engram.LinearSoftmax(8, 3)))
    assert not is_known(Network(nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(-0.1)), engram.LinearSoftmax(8, 3)))
    assert not is_known(Network(nn.Flatten(), engram.LinearSoftmax(8, 3)))
