"""Layers that take up more classes, and penalties that follow: what was there stays as it was, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engram import EWC, MAS, SI, DHPSoftmax, InputError, LinearSoftmax, MatchedSoftmax, OnlineEWC
from engram.nn.networks import Network

HEADS = {
    "dhp": lambda m, c: DHPSoftmax(m, c, eta=0.2),
    "uniform": lambda m, c: DHPSoftmax(m, c, eta=0.2, alpha="uniform"),
    "steady": lambda m, c: DHPSoftmax(m, c, eta=0.2, trace_scale=2.0, trace_centred=True, learn_eta=False),
    "matched": lambda m, c: MatchedSoftmax(m, c, trace=2.0),
    "linear": LinearSoftmax,
}
PENALTIES = {
    "ewc": lambda model, **o: EWC(model, strength=3.0, **o),
    "online-ewc": lambda model, **o: OnlineEWC(model, strength=3.0, gamma=0.7, **o),
    "si": lambda model, **o: SI(model, strength=3.0, **o),
    "mas": lambda model, **o: MAS(model, strength=3.0, **o),
}
sizes = st.integers(1, 6)


def make_network(head: str, num_classes: int) -> Network:
    torch.manual_seed(3)
    return Network(nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU()), HEADS[head](5, num_classes))


def batches(num_classes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 4, generator=random), torch.randint(num_classes, (6,), generator=random)) for _ in range(3)]


def learn(model: nn.Module, penalty, num_classes: int, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(num_classes, seed):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, targets), targets).backward()
        optimizer.step()
        penalty.proximal_step(0.1)
        penalty.after_step()


@given(st.sampled_from(sorted(HEADS)), sizes, sizes, st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_old_classes_keep_their_rows_and_their_logits(head: str, width: int, old: int, more: int) -> None:
    layer = HEADS[head](width, old)
    for _ in range(3):
        layer(torch.randn(4, width), torch.randint(old, (4,)))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    hidden = torch.randn(3, width)
    logits = layer.eval()(hidden)
    layer.grow(old + more)
    assert layer.out_features == old + more
    after = layer.state_dict()
    for name, tensor in before.items():
        same = after[name][:old] if tensor.ndim else after[name]
        assert torch.equal(same, tensor), name
        assert not tensor.ndim or len(after[name]) == old + more
    grown = layer(hidden)
    assert grown.shape == (3, old + more)
    torch.testing.assert_close(grown[:, :old], logits)  # a product of another size may round otherwise


@pytest.mark.parametrize("head", HEADS)
def test_new_rows_are_as_in_a_new_layer(head: str) -> None:
    torch.manual_seed(0)
    layer = HEADS[head](400, 2)
    layer(torch.randn(4, 400), torch.tensor([0, 0, 1, 1]))
    layer.grow(300)
    new = layer.weight[2:]
    bound = 1 / math.sqrt(400)
    assert new.abs().max() <= bound
    assert new.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert len(new.unique()) > 100_000, "each its own"
    if isinstance(layer, MatchedSoftmax):
        assert layer.extra[2:].std().item() == pytest.approx(bound / 2 / math.sqrt(3), rel=0.05)
    elif isinstance(layer, DHPSoftmax):
        assert not layer.hebb[2:].any(), "a class never seen has no trace"
        assert layer.hebb[:2].any()
        if layer.alpha.ndim:
            assert 0 <= layer.alpha[2:].min() < layer.alpha[2:].max() <= 0.01


@pytest.mark.parametrize("head", HEADS)
def test_a_layer_refuses_fewer_classes_and_is_left_alone(head: str) -> None:
    layer = HEADS[head](3, 4)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(InputError, match="4 classes cannot shrink to 3"):
        layer.grow(3)
    weight = layer.weight
    layer.grow(4)
    assert layer.weight is weight, "growing by nothing keeps the parameters that an optimizer knows"
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("number", [4.5, "6", 6.0, True, None])
@pytest.mark.parametrize("head", ["dhp", "linear"])
def test_a_layer_grows_to_whole_numbers_only(head: str, number) -> None:
    layer = HEADS[head](3, 4)
    with pytest.raises(InputError, match=f"a layer grows to a whole number of classes, not {number!r}"):
        layer.grow(number)
    layer.grow(np.int64(6))
    assert type(layer.out_features) is int


def test_what_learns_still_learns_and_what_does_not_does_not() -> None:
    layer = DHPSoftmax(3, 2, learn_eta=False)
    layer.grow(4)
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == {
        "weight": True,
        "alpha": True,
        "eta": False,
    }
    frozen = DHPSoftmax(3, 2).requires_grad_(False)
    frozen.grow(4)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert frozen.double().weight.dtype == torch.float64
    frozen.grow(5)
    assert frozen.hebb.dtype == frozen.alpha.dtype == torch.float64


@given(
    st.sampled_from(sorted(PENALTIES)),
    st.sampled_from(["dhp", "steady", "matched", "linear"]),
    st.sampled_from(["slow", "in-force"]),
    st.booleans(),
    st.integers(2, 4),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_protection_of_old_classes_is_untouched(
    kind: str, head: str, protect: str, with_alpha: bool, old: int, more: int
) -> None:
    model = make_network(head, old)
    penalty = PENALTIES[kind](model, protect=protect, regularize_alpha=with_alpha)
    for task in range(2):
        learn(model, penalty, old, seed=task)
        penalty.consolidate(batches(old, seed=task))
    learn(model, penalty, old, seed=2)  # in the midst of a task
    before, cost = penalty.state_dict(), penalty.loss().item()
    model.head.grow(old + more)
    penalty.grow()
    after = penalty.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name][: len(tensor)], tensor), name
    named = dict(model.named_parameters())
    assert all(theta is named[name] for name, theta in penalty.parameters.items())
    for name, tensor in after.items():
        weight = "head.weight" in name
        new = tensor[old:] if weight else tensor[:0]
        if ".importance." in name or name.startswith("path."):
            assert not new.any(), "new rows are free, and have no path yet"
        elif weight and (protect == "slow" or not name.startswith("terms.")):
            assert torch.equal(new, model.head.weight[old:])
    assert penalty.loss().item() == pytest.approx(cost, rel=1e-5), "nothing is to pay for new rows"
    learn(model, penalty, old + more, seed=3)
    penalty.consolidate(batches(old + more, seed=3))
    assert all(omega.isfinite().all() for term in penalty.terms for omega in term.importance.values())


@pytest.mark.parametrize("kind", PENALTIES)
def test_the_penalty_that_grew_moves_old_weights_as_the_one_that_did_not(kind: str) -> None:
    """With the new class out of the softmax, a step is the same as without it."""
    stepped = []
    for grows in (False, True):
        model = make_network("dhp", 3)
        penalty = PENALTIES[kind](model)
        learn(model, penalty, 3)
        penalty.consolidate(batches(3))
        if grows:
            model.head.grow(4)
            penalty.grow()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches(3, seed=5):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs, targets)[:, :3], targets).backward()
            optimizer.step()
            penalty.proximal_step(0.1)
            penalty.after_step()
        penalty.consolidate(batches(3, seed=5), classes=[0, 1, 2])
        stepped.append({n: t[:3] if "head" in n else t for n, t in penalty.state_dict().items()})
    for name, tensor in stepped[0].items():
        torch.testing.assert_close(stepped[1][name], tensor, msg=name)


def test_a_model_that_changed_in_another_way_is_refused_and_the_penalty_left_alone() -> None:
    model = make_network("dhp", 3)
    penalty = SI(model, strength=1)
    learn(model, penalty, 3)
    before = penalty.state_dict()
    model.head = DHPSoftmax(5, 2)
    with pytest.raises(InputError, match=r"'head.weight' has shape \(2, 5\), and had \(3, 5\)"):
        penalty.grow()
    model.head = LinearSoftmax(6, 3)
    with pytest.raises(InputError, match=r"'head.weight' has shape \(3, 6\)"):
        penalty.grow()
    model.features.append(nn.Linear(5, 5))
    with pytest.raises(InputError, match=r"the model has different slow weights: 'features.2.bias'"):
        penalty.grow()
    assert all(torch.equal(tensor, before[name]) for name, tensor in penalty.state_dict().items())
