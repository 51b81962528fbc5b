"""Ways to use a penalty that would give wrong numbers without a word: each is right, refused, or warned about once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram import EWC, MAS, SI, InputError, OnlineEWC, Penalty
from engram.nn.baselines import LinearSoftmax

# --- half precision -----------------------------------------------------------------------------------------------


def importances_of(kind: type[Penalty], dtype: torch.dtype, **options: object) -> dict[str, Tensor]:
    """Of a model whose weights and samples are those of bfloat16, computed in another type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 4)).bfloat16().to(dtype)
    batches = [(torch.randn(4, 6).bfloat16().to(dtype), torch.randint(4, (4,))) for _ in range(200)]
    penalty = kind(model, strength=1.0, **options)
    penalty.consolidate(batches)
    return penalty.terms[0].importance


@pytest.mark.parametrize("labels", ["true", "exact"])
def test_importances_of_a_model_in_half_precision_are_summed_in_single(labels: str) -> None:
    right = importances_of(EWC, torch.float64, labels=labels)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
        for name, omega in importances_of(EWC, dtype, labels=labels).items():
            assert omega.dtype == torch.float32
            assert omega.sum().item() == pytest.approx(right[name].sum().item(), rel=tolerance), "was 20% and more low"


def test_the_path_of_a_model_in_half_precision_is_summed_in_single() -> None:
    """Steps that each lower the loss by the same little: in bfloat16 their sum stops at 256 times the first."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    penalty = SI(model, strength=1.0)
    for _ in range(600):
        with torch.no_grad():
            model.weight.zero_()
        model.weight.grad = torch.ones_like(model.weight)
        penalty.state["before.weight"].zero_()
        with torch.no_grad():
            model.weight.sub_(2.0**-9)
        penalty.after_step()
    assert penalty.state["path.weight"].item() == pytest.approx(600 * 2.0**-9)


@pytest.mark.parametrize("kind", [EWC, MAS, SI])
def test_a_model_in_half_precision_is_protected_saved_and_loaded(kind: type[Penalty]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    x, y = torch.randn(8, 6).bfloat16(), torch.randint(4, (8,))
    penalty, twin = kind(model, strength=1e4), kind(model, strength=1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    penalty.after_step()
    penalty.consolidate([(x, y)])
    twin.load_state_dict(penalty.state_dict())
    anchor = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 0.5
    for each in (penalty, twin):
        weight = copy.deepcopy(model.state_dict())
        torch.testing.assert_close(each.loss(), penalty.loss())
        model.zero_grad()
        each.loss().backward()
        assert model.weight.grad.dtype == torch.bfloat16
        each.proximal_step(0.1)
        assert (model.weight - anchor).abs().sum() < 0.5 * 0.5 * anchor.numel(), "it was pulled back"
        model.load_state_dict(weight)


# --- models that change after the penalty was made -----------------------------------------------------------------


def consolidated(kind: type[Penalty] = OnlineEWC) -> tuple[nn.Module, Penalty, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), LinearSoftmax(5, 4))
    penalty, optimizer = kind(model, strength=1e3), torch.optim.SGD(model.parameters(), lr=0.1)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    return model, penalty, optimizer


CHANGES = {
    "grown": lambda model: model[2].grow(6),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "replaced": lambda model: setattr(model, "2", nn.Linear(5, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS, SI])
def test_no_verb_protects_tensors_that_the_model_has_replaced(kind: type[Penalty], change: str) -> None:
    model, penalty, optimizer = consolidated(kind)
    penalty.loss().backward()
    penalty.proximal_step(optimizer)
    CHANGES[change](model)
    verbs = [penalty.loss, lambda: penalty.proximal_step(optimizer), lambda: penalty.proximal_step(0.1)]
    verbs += [penalty.after_step] if kind is SI else [lambda: penalty.consolidate([(torch.ones(1, 6), torch.ones(1))])]
    for verb in verbs:
        with pytest.raises(InputError, match=r"no longer the tensor .* call penalty\.grow\(\)"):
            verb()
    if change != "replaced":
        penalty.grow()
        penalty.loss()
        penalty.proximal_step(0.1)


@pytest.mark.parametrize("kind", [OnlineEWC, SI])
def test_layers_that_are_unfrozen_later_are_warned_about_once(kind: type[Penalty]) -> None:
    model = nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4))
    penalty = kind(model, strength=1.0)
    penalty.loss()
    model[1].requires_grad_(False)  # freezing, and back, is no mistake
    penalty.loss()
    model[1].requires_grad_(True)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    penalty.loss()
    model[0].requires_grad_(True)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    with pytest.warns(UserWarning, match=r"now trains '0\.weight' and 1 more, frozen when this penalty was made"):
        penalty.proximal_step(0.1)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    penalty.loss()  # a second warning would be an error here


def test_an_optimizer_of_before_growth_is_warned_about_once() -> None:
    model, penalty, optimizer = consolidated()
    model[2].grow(6)
    penalty.grow()
    x, y = torch.randn(8, 6), torch.randint(6, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with pytest.warns(UserWarning, match=r"does not move the new ones: make a new optimizer after head\.grow\(\)"):
        step()
    step()
    step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step()


@pytest.mark.parametrize("way", ["new", "added", "another"])
def test_an_optimizer_that_knows_what_grew_is_no_mistake(way: str) -> None:
    model, _, optimizer = consolidated()
    before = model[2].weight
    model[2].grow(6)
    optimizers = [optimizer]
    if way == "new":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    elif way == "added":
        optimizer.add_param_group({"params": [model[2].weight]})
    else:
        optimizers.append(torch.optim.SGD(model[2].parameters(), lr=0.1))
    for _ in range(4):
        model.zero_grad()
        F.cross_entropy(model(torch.randn(8, 6)), torch.randint(6, (8,))).backward()
        for each in optimizers:
            each.step()
    assert before.shape == (4, 5)


def test_a_learning_rate_is_read_at_every_step() -> None:
    model, penalty, _ = consolidated()
    rate = torch.tensor(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for given in (rate, optimizer):
        with torch.no_grad():
            model[0].weight.add_(1)
        rate.fill_(0.0)
        before = model[0].weight.detach().clone()
        penalty.proximal_step(given)
        assert torch.equal(model[0].weight, before)
        rate.fill_(0.1)
        penalty.proximal_step(given)
        assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, torch.tensor(float("nan"))])
def test_a_learning_rate_that_is_none_is_refused(rate: float | Tensor) -> None:
    model, penalty, optimizer = consolidated()
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = rate
    for given in (rate, optimizer):
        with pytest.raises(InputError, match="a learning rate must be a number of at least 0"):
            penalty.proximal_step(given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
