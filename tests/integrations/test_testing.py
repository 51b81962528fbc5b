"""`engram.testing`: all of Engram's penalties and heads pass, and each kind of mistake is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engram
from engram.common.registry import PENALTIES
from engram.integrations.testing import check_head, check_penalty
from engram.penalties import Quadratic


@pytest.mark.parametrize("name", PENALTIES.names())
def test_every_penalty_keeps_the_contract(name: str) -> None:
    check_penalty(PENALTIES[name].make)


@pytest.mark.parametrize("settings", [{"labels": "exact"}, {"labels": "sampled"}, {"protect": "in-force"}])
def test_penalties_keep_the_contract_with_settings(settings: dict[str, str]) -> None:
    check_penalty(engram.EWC, **settings)


def test_no_penalty_keeps_the_contract() -> None:
    check_penalty(lambda model, strength, **settings: engram.NoPenalty(model))


@pytest.mark.parametrize("name", engram.heads.list())
def test_every_head_keeps_the_contract(name: str) -> None:
    check_head(lambda *sizes: engram.heads.create(name, *sizes))


class Uniform(Quadratic):
    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None):  # type: ignore[no-untyped-def]
        return {name: torch.ones_like(theta) for name, theta in parameters.items()}


class Absolute(engram.Penalty):
    """One without a proximal step."""

    def loss(self) -> Tensor:
        anchors = self.group("anchor")
        moved = [((theta - anchors[name]) ** 4).sum() for name, theta in self.parameters.items()]
        return self.strength * torch.stack(moved).sum()

    @classmethod
    def initial_state(cls, parameters):  # type: ignore[no-untyped-def]
        return {f"anchor.{name}": theta.detach().clone() for name, theta in parameters.items()}

    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        self.state = self.initial_state(self.parameters)


@pytest.mark.parametrize("kind", [Uniform, Absolute])
def test_penalties_of_other_people_pass(kind: type[engram.Penalty]) -> None:
    check_penalty(kind)


class Vector(Absolute):
    def loss(self) -> Tensor:
        return super().loss().reshape(1)


class Offset(Absolute):
    def loss(self) -> Tensor:
        return super().loss() + 1


class Careless(Absolute):
    def loss(self) -> Tensor:
        return 0 * super().loss()


class Detached(Absolute):
    def loss(self) -> Tensor:
        found = super().loss()
        return found.detach() + 0 * found


class Moving(Absolute):
    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.5)
        super().consolidate()


class Switching(Absolute):
    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        self.model.eval()
        super().consolidate()


class Clearing(Absolute):
    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        self.model.zero_grad()
        super().consolidate()


class Drawing(Absolute):
    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        torch.rand(1)
        super().consolidate()


class Sharing(Absolute):
    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def consolidate(self, batches: Any = (), classes: Any = None) -> None:
        for name, theta in self.parameters.items():
            self.state[f"anchor.{name}"].copy_(theta.detach())


class Forgetful(Absolute):
    def state_dict(self) -> dict[str, Tensor]:
        return self.initial_state(self.parameters)

    def load_state_dict(self, state: Any) -> None:
        if "surprise" in state:
            raise engram.InputError("unknown")


class Trusting(Absolute):
    def load_state_dict(self, state: Any) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items()}


class Short(Uniform):
    def proximal_step(self, learning_rate: Any) -> None:
        super().proximal_step(learning_rate / 2)


class Lenient(Absolute):
    def __init__(self, model: nn.Module, *, strength: float):
        super().__init__(model, strength=1.0)


class Greedy(Absolute):
    def __init__(self, model: nn.Module, *, strength: float):
        super().__init__(model, strength=strength, regularize_alpha=True)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Vector, r"a scalar, not of shape \(1,\)"),
        (Offset, "before the first task the loss must be 0, not 1"),
        (Careless, "positive once weights have moved"),
        (Detached, "the gradient of the loss is 0"),
        (Moving, "changes 'features.0.weight'"),
        (Switching, "in the mode that they had"),
        (Clearing, "leave the gradient"),
        (Drawing, "random numbers"),
        (Sharing, "must return copies"),
        (Forgetful, "must continue as the one that was saved"),
        (Trusting, "must refuse a state with a tensor that it does not know"),
        (Short, "the proximal step must minimise"),
        (Lenient, "a strength of -1.0 must be refused"),
        (Greedy, "must protect the slow weights that train"),
        (lambda model, strength: model, "must be a Penalty, not a Network"),
    ],
)
def test_a_mistake_in_a_penalty_is_found(kind: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_penalty(kind)


class Plain(nn.Linear):
    """z = θ h + c Hebb h, where each training batch is added to a buffer."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.register_buffer("seen", torch.zeros(out_features, in_features))

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        if self.writes(target):
            with torch.no_grad():
                self.seen = self.seen + torch.nn.functional.one_hot(target, len(self.seen)).to(hidden).T @ hidden
        return super().forward(hidden) + 0.01 * hidden @ self.seen.T

    def writes(self, target: Tensor | None) -> bool:
        return self.training and target is not None


class Restless(Plain):
    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        self.seen = self.seen + 0  # a new tensor, with the same values
        return super().forward(hidden, target) + (0 if self.training else torch.rand(1))


class Writing(Plain):
    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        logits = super().forward(hidden, target)
        if not self.training:
            self.bias.data.add_(0.0)
            self.count = self.count + 1
        return logits

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))


class Hiding(Plain):
    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.seen = nn.Buffer(self.seen, persistent=False)


class Flat(Plain):
    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return super().forward(hidden, target).sum(dim=1)


class Infinite(Plain):
    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return super().forward(hidden, target) * torch.inf


class Misfolded(Plain):
    def fold(self) -> nn.Module:
        folded = nn.Linear(self.in_features, self.out_features).to(self.weight)
        folded.weight.data, folded.bias.data = self.weight.data, self.bias.data
        return folded


class Misgrown(Plain):
    def grow(self, out_features: int) -> None:
        self.__init__(self.in_features, out_features)  # type: ignore[misc]
        self.double()


class Ungrown(Plain):
    def grow(self, out_features: int) -> None:
        pass


def test_heads_of_other_people_pass() -> None:
    check_head(Plain)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Flat, r"shape \(batch, classes\), not \(8,\)"),
        (Infinite, "logits must be finite"),
        (Restless, "the same logits every time"),
        (Writing, "must only read, and changes 'head.count'"),
        (Hiding, "keep tensors in buffers"),
        (Misfolded, "fold must return a layer"),
        (Misgrown, "must keep the logits of the old classes"),
        (Ungrown, "there must be 5 logits, not 3"),
    ],
)
def test_a_mistake_in_a_head_is_found(kind: Any, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_head(kind)
