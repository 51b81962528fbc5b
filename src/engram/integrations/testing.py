"""Checks for authors of new methods: what training loops, files and engines expect of a penalty and of a head.

Each check trains a small model in double precision, takes less than a second, and fails with a sentence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engram.common.errors import InputError
from engram.nn.baselines import LinearSoftmax
from engram.nn.dhp import DHPSoftmax
from engram.nn.networks import Network
from engram.penalties import Penalty

Batch = tuple[Tensor, Tensor]
INPUTS, HIDDEN, CLASSES, LEARNING_RATE = 7, 5, 3, 0.05


# --- penalties


def check_penalty(make: Callable[..., Penalty], *, strength: float = 3.0, **settings: Any) -> None:
    """Check that a penalty keeps the contract of `engram.Penalty`.

    Before the first task and at the anchor its loss is 0, away from it positive, with the gradient that it says;
    `consolidate` changes nothing of the model; its state can be saved and loaded, bit for bit; an unknown state is
    refused; only slow weights that train are protected; a proximal step, if it has one, minimises what it should.

    Args:
        make: the class of the penalty, or a function that makes one: called with a model, the strength and `settings`.
        strength: λ.
        settings: settings of the penalty.

    Raises:
        AssertionError: with a sentence on what is wrong.

    Example:
        >>> engram.testing.check_penalty(engram.OnlineEWC, gamma=0.9)
    """

    def made(model: nn.Module) -> Penalty:
        penalty = make(model, strength=strength, **settings)
        assert isinstance(penalty, Penalty), f"it must be a Penalty, not a {type(penalty).__name__}"
        return penalty

    for head in (LinearSoftmax, DHPSoftmax):
        _check_loss(_model(head), made)
        _check_consolidation(_model(head), made)
        _check_state(_model(head), made)
        _check_proximal_step(_model(head), made)
    _check_protected(made)
    for wrong in (-1.0, float("nan")):
        try:
            penalty = make(_model(LinearSoftmax), strength=wrong, **settings)
        except InputError:
            continue
        assert not penalty.remembers, f"a strength of {wrong} must be refused: pass it on to Penalty.__init__"


def _check_loss(model: Network, make: Callable[[nn.Module], Penalty]) -> None:
    penalty = make(model)
    loss = penalty.loss()
    assert loss.shape == (), f"the loss must be a scalar, not of shape {tuple(loss.shape)}"
    assert loss.item() == 0, f"before the first task the loss must be 0, not {loss.item()}"
    if not penalty.remembers:
        return
    _learn(model, penalty, 0)
    penalty.consolidate(_batches(0))
    assert penalty.loss().item() == 0, "after consolidate the loss must be 0, since no weight has moved"
    start = {name: theta.detach().clone() for name, theta in penalty.parameters.items()}
    random = torch.Generator().manual_seed(1)
    way = {name: torch.randn(theta.shape, generator=random, dtype=theta.dtype) for name, theta in start.items()}

    def moved(by: float) -> Tensor:
        with torch.no_grad():
            for name, theta in penalty.parameters.items():
                theta.copy_(start[name] + by * way[name])
        return penalty.loss()

    assert moved(0.1).item() > 0, "the loss must be positive once weights have moved"
    slope = sum(
        float((gradient * way[name]).sum())
        for name, gradient in zip(way, _gradients(moved(0.1), penalty.parameters), strict=True)
    )
    by_differences = (moved(0.1 + 1e-6) - moved(0.1 - 1e-6)).item() / 2e-6
    right = abs(slope - by_differences) <= 1e-4 * max(abs(by_differences), 1e-8)
    assert right, f"the gradient of the loss is {slope:.6g} in a direction in which it rises by {by_differences:.6g}"


def _check_consolidation(model: Network, make: Callable[[nn.Module], Penalty]) -> None:
    penalty = make(model)
    _learn(model, penalty, 0)
    model.train()
    before, modes, random = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    gradients = {name: theta.grad.clone() for name, theta in model.named_parameters() if theta.grad is not None}
    penalty.consolidate(_batches(0))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"consolidate must leave the model as it was, and changes {name!r}"
    for name, theta in model.named_parameters():
        kept = name not in gradients or (theta.grad is not None and torch.equal(theta.grad, gradients[name]))
        assert kept, f"consolidate must leave the gradient of {name!r} as it was"
    assert [m.training for m in model.modules()] == modes, "consolidate must leave modules in the mode that they had"
    assert torch.equal(torch.get_rng_state(), random), "consolidate must leave the state of PyTorch's random numbers"


def _check_state(model: Network, make: Callable[[nn.Module], Penalty]) -> None:
    penalty = make(model)
    for seed in (0, 1):
        _learn(model, penalty, seed)
        penalty.consolidate(_batches(seed))
    state = penalty.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for theta in twin.parameters():
            theta.add_(1.0)  # the new penalty must take everything from the state
    restored = make(twin)
    twin.load_state_dict(model.state_dict())
    restored.load_state_dict(state)
    for each, own in ((model, penalty), (twin, restored)):
        _learn(each, own, 2)
        own.consolidate(_batches(2))
        _learn(each, own, 3)
    for name, tensor in state.items():
        assert torch.equal(tensor, kept[name]), f"state_dict must return copies, and {name!r} changed with the penalty"
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert same, "a penalty whose state was loaded must continue as the one that was saved, and does not"
    strange = {**penalty.state_dict(), "surprise": torch.zeros(1)}
    before = penalty.state_dict()
    try:
        penalty.load_state_dict(strange)
    except InputError:
        pass
    else:
        raise AssertionError("load_state_dict must refuse a state with a tensor that it does not know")
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in penalty.state_dict().items())
    assert unchanged, "a state that was refused must change nothing"


def _check_protected(make: Callable[[nn.Module], Penalty]) -> None:
    model = _model(DHPSoftmax)
    dict(model.named_parameters())["features.0.bias"].requires_grad_(False)
    penalty = make(model)
    if not penalty.remembers:
        return
    found, expected = set(penalty.parameters), {"features.0.weight", "head.weight"}
    assert found == expected, f"it must protect the slow weights that train, {sorted(expected)}, not {sorted(found)}"


def _check_proximal_step(model: Network, make: Callable[[nn.Module], Penalty]) -> None:
    penalty = make(model)
    _learn(model, penalty, 0)
    penalty.consolidate(_batches(0))
    _learn(model, penalty, 1, with_loss=False)
    start = {name: theta.detach().clone() for name, theta in penalty.parameters.items()}
    try:
        penalty.proximal_step(0.5)
    except InputError:
        return  # it has none, and says so
    # at the minimiser of |θ′ − θ|² / (2 lr) + loss(θ′) the gradient, (θ′ − θ) / lr + loss′(θ′), is zero
    pulls = _gradients(penalty.loss(), penalty.parameters)
    for (name, theta), pull in zip(penalty.parameters.items(), pulls, strict=True):
        rest = ((theta.detach() - start[name]) / 0.5 + pull).abs().max().item() if theta.numel() else 0.0
        size = max(pull.abs().max().item(), 1e-3)
        assert rest <= 1e-6 * size, f"the proximal step must minimise |θ′ − θ|² / (2 lr) + loss, and {name!r} is off"


# --- heads


def check_head(make: Callable[..., nn.Module], **settings: Any) -> None:
    """Check that a head does what networks, files and exports expect of one.

    It is called as `head(hidden, targets)` in training and `head(hidden)` in evaluation, where it only reads. All that
    it remembers is in its `state_dict()`. `grow` keeps what old classes have learned, and `fold` gives a layer that
    computes the same, if it has them.

    Args:
        make: the class of the head, or a function that makes one: called with the number of features, the number of
            classes and `settings`.
        settings: settings of the head.

    Raises:
        AssertionError: with a sentence on what is wrong.

    Example:
        >>> engram.testing.check_head(engram.DHPSoftmax, eta=0.1)
    """

    def made() -> Network:
        return _model(lambda *sizes: make(*sizes, **settings))

    model = made()
    _steps(model, 0)
    first = _read(model)
    kept = copy.deepcopy(model.state_dict())
    assert torch.equal(_read(model), first), "evaluation must give the same logits every time"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name]), f"evaluation must only read, and changes {name!r}"
    _check_loaded(model, made())
    model = made()
    _steps(model, 0)
    before = _read(model)
    if callable(getattr(model.head, "fold", None)):
        folded = model.head.fold()  # type: ignore[operator]
        with torch.no_grad():
            same = torch.allclose(folded(model.features(_batches(9)[0][0])), before, rtol=1e-9, atol=1e-11)
        assert same, "fold must return a layer that computes what the head does"
    if callable(getattr(model.head, "grow", None)):
        model.head.grow(CLASSES + 2)  # type: ignore[operator]
        grown = _read(model)
        assert grown.shape == (8, CLASSES + 2), f"after grow there must be {CLASSES + 2} logits, not {grown.shape[1]}"
        same = torch.allclose(grown[:, :CLASSES], before, rtol=1e-9, atol=1e-11)
        assert same, "grow must keep the logits of the old classes"


def _check_loaded(model: Network, fresh: Network) -> None:
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    straight, again = _steps(model, 1), _steps(fresh, 1)
    same = all(torch.equal(a, b) for a, b in zip(straight, again, strict=True)) and torch.equal(
        _read(model), _read(fresh)
    )
    assert same, "a head whose state_dict was loaded must continue as the one that was saved: keep tensors in buffers"


# --- a small model that learns


def _model(head: Callable[..., nn.Module]) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh())
        return Network(features, head(HIDDEN, CLASSES)).double()


def _batches(seed: int) -> list[Batch]:
    random, targets = torch.Generator().manual_seed(seed), torch.arange(8) % CLASSES
    return [(torch.randn(8, INPUTS, generator=random, dtype=torch.float64), targets) for _ in range(3)]


def _learn(model: Network, penalty: Penalty, seed: int, with_loss: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for inputs, targets in _batches(seed):
        loss = cross_entropy(model(inputs, targets), targets)
        optimizer.zero_grad()
        (loss + penalty.loss() if with_loss else loss).backward()
        optimizer.step()
        penalty.after_step()


def _steps(model: Network, seed: int) -> list[Tensor]:
    """Some steps of SGD, for heads that learn by it; returns the logits before each."""
    model.train()
    seen = []
    for inputs, targets in _batches(seed):
        logits = model(inputs, targets)
        assert logits.shape == (8, CLASSES), f"logits must have shape (batch, classes), not {tuple(logits.shape)}"
        assert bool(logits.isfinite().all()), "logits must be finite"
        model.zero_grad()
        if logits.requires_grad:
            cross_entropy(logits, targets).backward()
        with torch.no_grad():
            for theta in model.parameters():
                if theta.grad is not None:
                    theta.sub_(LEARNING_RATE * theta.grad)
        seen.append(logits.detach())
    return seen


@torch.no_grad()
def _read(model: Network) -> Tensor:
    model.eval()
    return model.head(model.features(_batches(9)[0][0]))


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradient of the loss for each weight; zeros where it does not depend on one."""
    if not loss.requires_grad:
        return [torch.zeros_like(theta) for theta in parameters.values()]
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(parameters.values(), found, strict=True)]
