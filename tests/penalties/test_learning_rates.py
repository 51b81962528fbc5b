"""A penalty beside an optimizer whose groups learn at rates of their own: a slow backbone, a frozen one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engram import EWC, MAS, DHPSoftmax, InputError, OnlineEWC
from engram.nn.networks import Network


def make_model() -> Network:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    return Network(features, DHPSoftmax(5, 3, eta=0.2)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,)))]


def moved(model: nn.Module) -> None:
    """Away from the anchors."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def groups(model: Network, slow: float, fast: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model.features.parameters(), "lr": slow}, {"params": model.head.parameters()}], fast
    )


@pytest.mark.parametrize("protect", ["slow", "in-force"])
def test_each_group_is_pulled_at_its_own_rate(protect: str) -> None:
    model = make_model()
    penalty = EWC(model, strength=30.0, protect=protect)
    for _ in range(2):
        penalty.consolidate(batches())
        moved(model)
        penalty.loss()
    other = copy.deepcopy(model)
    rates = {"features": 0.01, "head": 0.3}
    expected = {}
    for part, rate in rates.items():
        alone = copy.deepcopy(other)
        one_rate = EWC(alone, strength=30.0, protect=protect)
        one_rate.load_state_dict(penalty.state_dict())
        one_rate.proximal_step(rate)
        expected |= {name: p for name, p in alone.named_parameters() if name.startswith(part)}
    penalty.proximal_step(groups(model, *rates.values()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name])
    assert not torch.equal(model.features[0].weight, other.features[0].weight)


def test_one_group_is_one_number() -> None:
    models = [make_model(), make_model()]
    for model, rate in zip(models, (0.1, torch.optim.Adam(models[1].parameters(), lr=0.1)), strict=True):
        penalty = MAS(model, strength=2.0)
        penalty.consolidate(batches())
        moved(model)
        penalty.proximal_step(rate)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_the_rate_is_the_optimizers_at_that_moment() -> None:
    model = make_model()
    optimizer = groups(model, 0.01, 0.3)
    penalty = OnlineEWC(model, strength=30.0)
    penalty.consolidate(batches())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    moved(model)
    penalty.proximal_step(optimizer)
    optimizer.step()
    schedule.step()
    before = copy.deepcopy(model.state_dict())
    penalty.proximal_step(optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "all rates are 0 now"
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)  # as compiled optimizers have it
    penalty.proximal_step(optimizer)
    after = model.state_dict()
    assert not torch.equal(after["features.0.weight"], before["features.0.weight"])
    assert torch.equal(after["head.weight"], before["head.weight"])


def test_what_the_optimizer_does_not_move_stays() -> None:
    model = make_model()
    penalty = OnlineEWC(model, strength=30.0)
    penalty.consolidate(batches())
    moved(model)
    before = copy.deepcopy(model.state_dict())
    penalty.proximal_step(torch.optim.SGD(model.head.parameters(), lr=0.3))
    assert torch.equal(model.features[0].weight, before["features.0.weight"])
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_a_frozen_backbone_is_not_protected_and_stays_as_it_was() -> None:
    model = make_model()
    model.features.requires_grad_(False)
    penalty = OnlineEWC(model, strength=30.0)
    assert list(penalty.parameters) == ["head.weight"]
    before = copy.deepcopy(model.features.state_dict())
    model.eval()
    model.head.train()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for inputs, targets in batches():
        nn.functional.cross_entropy(model(inputs, targets), targets).backward()
        optimizer.step()
        penalty.proximal_step(optimizer)
    penalty.consolidate(batches())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.features.state_dict().items())
    assert not model.features[1].training
    assert model.head.training
    assert model.head.hebb.abs().sum() > 0


def test_an_optimizer_of_another_model_is_refused() -> None:
    penalty = OnlineEWC(make_model(), strength=30.0)
    with pytest.raises(InputError, match="has none of the weights"):
        penalty.proximal_step(torch.optim.SGD(make_model().parameters(), lr=0.1))
