"""Head and penalties in loops of people's own: all optimizers, half precision, compiled, clipped, accumulated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram import EWC, MAS, SI, DHPSoftmax, InputError, OnlineEWC

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "nesterov, foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


class Classifier(nn.Module):
    """Features and a plastic head, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = DHPSoftmax(8, 3, eta=0.1)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.features(inputs), targets)


def batches(seed: int, count: int = 6, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(12, 6, generator=random, dtype=dtype), torch.randint(3, (12,), generator=random))
        for _ in range(count)
    ]


def make(dtype: torch.dtype = torch.float64) -> tuple[Classifier, SI]:
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    return model, SI(model, strength=2.0, xi=0.05)


def slopes_of_the_task(model: Classifier, penalty: SI, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The gradient of the task's loss alone, by autograd on a copy: what SI must have seen."""
    twin = copy.deepcopy(model)
    loss = sum(F.cross_entropy(twin(x, y), y) for x, y in parts) / len(parts)
    names = list(penalty.parameters)
    own = dict(twin.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True))


Step = Callable[[Classifier, SI, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]], None]


def follow(make_optimizer: Callable[[Any], torch.optim.Optimizer], step: Step, accumulate: int = 1) -> None:
    """Learn three tasks, and compare each Ω with the one of the stored trajectory."""
    model, penalty = make()
    optimizer = make_optimizer(model.parameters())
    expected = {name: torch.zeros_like(theta) for name, theta in penalty.parameters.items()}
    for task in range(3):
        start = penalty.snapshot()
        path = {name: torch.zeros_like(theta) for name, theta in start.items()}
        data = batches(task)
        for k in range(0, len(data), accumulate):
            parts = data[k : k + accumulate]
            slopes, before = slopes_of_the_task(model, penalty, parts), penalty.snapshot()
            optimizer.zero_grad()
            step(model, penalty, optimizer, parts)
            for name, theta in penalty.parameters.items():
                path[name] -= slopes[name] * (theta.detach() - before[name])
        for name, theta in penalty.parameters.items():
            moved = theta.detach() - start[name]
            expected[name] += path[name].clamp(min=0) / (moved.square() + penalty.xi)
        penalty.consolidate()
        for name, omega in expected.items():
            assert omega.max() > 0
            torch.testing.assert_close(penalty.terms[0].importance[name], omega, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "proximal"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_si_is_right_with_every_optimizer(optimizer: str, with_loss: bool) -> None:
    def step(model, penalty, opt, parts) -> None:  # type: ignore[no-untyped-def]
        ((x, y),) = parts
        loss = F.cross_entropy(model(x, y), y)
        (loss + penalty.loss() if with_loss else loss).backward()
        penalty.after_backward()  # PyTorch's nesterov changes gradients in place where it steps through all at once
        opt.step()
        if not with_loss:
            penalty.proximal_step(0.02)
        penalty.after_step()

    follow(OPTIMIZERS[optimizer], step)


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "proximal"])
def test_si_is_right_under_clipping(clip: str, with_loss: bool) -> None:
    def step(model, penalty, opt, parts) -> None:  # type: ignore[no-untyped-def]
        ((x, y),) = parts
        loss = F.cross_entropy(model(x, y), y)
        (loss + penalty.loss() if with_loss else loss).backward()
        penalty.after_backward()
        if clip == "norm":
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()
        if not with_loss:
            penalty.proximal_step(0.05)
        penalty.after_step()

    follow(OPTIMIZERS["sgd"], step)


@pytest.mark.parametrize("each_time", [True, False], ids=["penalty in each", "penalty once"])
def test_si_is_right_under_accumulation(each_time: bool) -> None:
    """Two batches a step, clipped too: only the last backward() is looked at, and it holds both."""

    def step(model, penalty, opt, parts) -> None:  # type: ignore[no-untyped-def]
        for k, (x, y) in enumerate(parts):
            # the trace is written by each part, so the reference's copy must write it in the same order
            loss = F.cross_entropy(model(x, y), y)
            if each_time:
                loss = (loss + penalty.loss()) / len(parts)
            else:
                loss = loss / len(parts) + (penalty.loss() if k == 0 else 0)
            loss.backward()
        penalty.after_backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        penalty.after_step()

    follow(OPTIMIZERS["momentum"], step, accumulate=2)


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "proximal"])
def test_si_is_right_with_a_scaler(clipped: bool, with_loss: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)

    def step(model, penalty, opt, parts) -> None:  # type: ignore[no-untyped-def]
        ((x, y),) = parts
        loss = F.cross_entropy(model(x, y), y)
        scaler.scale(loss + penalty.loss() if with_loss else loss).backward()
        penalty.after_backward(scale=scaler.get_scale())
        if clipped:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        if not with_loss:
            penalty.proximal_step(0.02)
        penalty.after_step()

    follow(OPTIMIZERS["adam"], step)
    assert scaler.get_scale() > 2.0**12  # it was another scale on the way


def test_a_step_that_the_scaler_skips_is_not_part_of_the_path() -> None:
    model, penalty = make(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ((x, y), (x2, y2)) = batches(0, 2, torch.float32)
    for inputs, targets, bad in ((x, y, False), (x2, y2, True), (x2, y2, False)):
        before = copy.deepcopy(penalty.group("path"))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs, targets), targets)
        scaler.scale((loss * 1e38 * 1e38 if bad else loss) + penalty.loss()).backward()
        penalty.after_backward(scale=scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        penalty.after_step()
        same = all(torch.equal(penalty.state[f"path.{name}"], before[name]) for name in before)
        assert same == bad
    penalty.consolidate()


def test_a_loop_that_clips_without_after_backward_is_refused() -> None:
    model, penalty = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (x, y), *_ = batches(0)
    (F.cross_entropy(model(x, y), y) + penalty.loss()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    with pytest.raises(InputError, match=r"changed after backward.*call penalty\.after_backward"):
        penalty.after_step()


def test_after_backward_that_comes_too_late_is_refused() -> None:
    model, penalty = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (x, y), *_ = batches(0)
    for late in (False, True):
        optimizer.zero_grad()
        F.cross_entropy(model(x, y), y).backward()
        if late:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with pytest.raises(InputError, match="directly after backward"):
                penalty.after_backward()
            break
        penalty.after_backward()
        optimizer.step()
        penalty.after_step()


def test_a_forgotten_scale_is_refused() -> None:
    model, penalty = make(torch.float32)
    (x, y), *_ = batches(0, dtype=torch.float32)
    ((F.cross_entropy(model(x, y), y) + penalty.loss()) * 65536).backward()
    with pytest.raises(InputError, match=r"multiplied by 65536 .*scale=scaler\.get_scale"):
        penalty.after_backward()
    for scale in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InputError, match="positive number"):
            penalty.after_backward(scale=scale)


def test_a_copy_of_a_penalty_watches_over_its_own_model() -> None:
    model, penalty = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (x, y), *_ = batches(0)
    F.cross_entropy(model(x, y), y).backward()
    optimizer.step()
    penalty.after_step()
    twin = copy.deepcopy(penalty)
    own = torch.optim.SGD(twin.model.parameters(), lr=0.05)
    for k in range(2):
        own.zero_grad()
        F.cross_entropy(twin.model(x, y), y).backward()
        if k:
            nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01)
            with pytest.raises(InputError, match="changed after backward"):
                twin.after_step()
        else:
            own.step()
            twin.after_step()


def test_weights_without_a_gradient_are_no_change() -> None:
    """zero_grad(set_to_none=False) touches the gradients of frozen weights too."""
    model, penalty = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for task in range(2):
        model.features.requires_grad_(task == 0)
        for x, y in batches(task):
            optimizer.zero_grad(set_to_none=False)
            (F.cross_entropy(model(x, y), y) + penalty.loss()).backward()
            penalty.after_backward()
            optimizer.step()
            penalty.after_step()
        penalty.consolidate()


def in_second_task(freeze: bool = False) -> tuple[Classifier, SI, torch.optim.Optimizer]:
    model, penalty = make()
    penalty.strength = 100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for task in range(2):
        for x, y in batches(task):
            optimizer.zero_grad()
            (F.cross_entropy(model(x, y), y) + penalty.loss()).backward()
            optimizer.step()
            penalty.after_step()
        if task == 0:
            penalty.consolidate()
    if freeze:
        model.features.requires_grad_(False)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05)
    return model, penalty, optimizer


def path_of_one_step(
    model: Classifier, penalty: SI, optimizer: torch.optim.Optimizer, parts: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """What `head.weight` adds to its path in a step of several parts, by autograd."""
    twin = copy.deepcopy(model)
    loss = sum(F.cross_entropy(twin(x, y), y) for x, y in parts) / len(parts)
    (slope,) = torch.autograd.grad(loss, [twin.head.weight])
    before = model.head.weight.detach().clone()
    for x, y in parts:
        ((F.cross_entropy(model(x, y), y) + penalty.loss()) / len(parts)).backward()
    optimizer.step()
    return -slope * (model.head.weight.detach() - before)


@pytest.mark.parametrize("case", ["first weight frozen", "abandoned", "abandoned, zeroed", "looked at"])
def test_si_knows_what_is_in_the_gradients(case: str) -> None:
    model, penalty, optimizer = in_second_task(freeze=case == "first weight frozen")
    path = penalty.state["path.head.weight"].clone()
    data = batches(7, 3)
    optimizer.zero_grad()
    if case.startswith("abandoned"):
        x, y = data[0]
        (F.cross_entropy(model(x, y), y) + penalty.loss()).backward()
        optimizer.zero_grad(set_to_none="zeroed" not in case)
    if case == "looked at":
        torch.autograd.grad(penalty.loss(), [model.head.weight])
    added = path_of_one_step(model, penalty, optimizer, data[1:])
    if case == "looked at":
        torch.autograd.grad(penalty.loss(), [model.head.weight])
    penalty.after_step()
    torch.testing.assert_close(penalty.state["path.head.weight"], path + added, rtol=1e-7, atol=1e-12)


def test_lbfgs_is_refused() -> None:
    model, penalty = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    (x, y), *_ = batches(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, y), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    penalty.after_step()  # from the first step on it watches
    optimizer.step(closure)
    with pytest.raises(InputError, match="use neither LBFGS nor"):
        penalty.after_step()


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, SI, MAS])
@pytest.mark.filterwarnings("ignore:no weight has changed")
def test_a_penalty_refuses_a_head_that_grew_without_it(kind: type) -> None:
    model, _ = make()
    penalty = kind(model, strength=1.0)
    for x, y in batches(0):
        model.zero_grad()
        (F.cross_entropy(model(x, y), y) + penalty.loss()).backward()
        penalty.after_step()
    penalty.consolidate(batches(0))
    model.head.grow(5)
    with pytest.raises(InputError, match=r"'head\.weight' is no longer .* call penalty\.grow"):
        penalty.loss()
    with pytest.raises(InputError, match=r"call penalty\.grow"):
        penalty.consolidate(batches(0))
    penalty.grow()
    penalty.loss()
    penalty.consolidate(batches(0))


def test_a_scale_is_asked_for_again_after_growth() -> None:
    model, penalty, _ = in_second_task()
    model.head.grow(4)
    penalty.grow()
    (x, y), *_ = batches(0)
    model.zero_grad()
    ((F.cross_entropy(model(x, y), y) + penalty.loss()) * 65536).backward()
    with pytest.raises(InputError, match="multiplied by 65536"):
        penalty.after_backward()


def test_the_proximal_step_leaves_frozen_weights_alone() -> None:
    model, _, optimizer = in_second_task()
    penalty = OnlineEWC(model, strength=100.0)
    penalty.consolidate(batches(0))
    with torch.no_grad():
        model.features[0].weight.add_(0.1)
        model.head.weight.add_(0.1)
    model.features.requires_grad_(False)
    still, moved = model.features[0].weight.clone(), model.head.weight.clone()
    penalty.proximal_step(optimizer)
    assert torch.equal(model.features[0].weight, still)
    assert not torch.equal(model.head.weight, moved)


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_the_other_penalties_do_not_need_gradients(kind: type) -> None:
    model, _ = make()
    penalty = kind(model, strength=1.0)
    penalty.consolidate(batches(0))
    before, weights = penalty.state_dict(), copy.deepcopy(model.state_dict())
    penalty.after_backward(scale=4.0)
    penalty.after_step()
    after = penalty.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


# --- mixed precision and compiled models ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_trace_and_penalties_stay_in_full_precision(dtype: torch.dtype) -> None:
    model, penalty = make(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches(0, dtype=torch.float32)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            logits = model(x, y)
        assert logits.dtype == torch.float32  # the head's own, though the features are rounded
        (F.cross_entropy(logits, y) + penalty.loss()).backward()
        optimizer.step()
        penalty.after_step()
    assert model.head.hebb.dtype == torch.float32
    assert model.head.hebb.abs().sum() > 0
    with torch.autocast("cpu", dtype=dtype):
        penalty.consolidate()
        for kind in (EWC, OnlineEWC, MAS):
            other = kind(model, strength=1.0)
            other.consolidate(data)
            for name, omega in other.terms[0].importance.items():
                assert omega.dtype == torch.float32
                assert omega.max() > 0, name


def test_importances_do_not_depend_on_the_autocast_around_them() -> None:
    model, _ = make(torch.float32)
    data = batches(0, dtype=torch.float32)
    found = []
    for dtype in (None, torch.bfloat16):
        penalty = OnlineEWC(model, strength=1.0)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            penalty.consolidate(data)
        found.append(penalty.terms[0].importance)
    for name, omega in found[0].items():
        assert torch.equal(omega, found[1][name])


HEADS: dict[str, dict[str, Any]] = {
    "literal": {"eta": 0.1},
    "η at its bound": {"eta": 1.0},
    "one α": {"eta": 0.1, "alpha": "uniform"},
    "steady": {"eta": 0.1, "trace_scale": 2.0, "trace_centred": True, "trace_gradient": False, "learn_eta": False},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_compiled_model_takes_the_same_steps_as_one_that_is_not(head: str) -> None:
    torch._dynamo.reset()
    runs = []
    for compiled in (False, True):
        model, _ = make()
        torch.manual_seed(1)
        model.head = DHPSoftmax(8, 3, **HEADS[head]).double()
        penalty = SI(model, strength=2.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for task in range(2):
            for x, y in batches(task):
                optimizer.zero_grad()
                (F.cross_entropy(call(x, y), y) + penalty.loss()).backward()
                optimizer.step()
                penalty.after_step()
            penalty.consolidate()
        runs.append((model.state_dict(), penalty.state_dict(), call.eval()(batches(0)[0][0])))
    for plain, fast in zip(runs[0][:2], runs[1][:2], strict=True):
        assert plain.keys() == fast.keys()
        for name in plain:
            torch.testing.assert_close(plain[name], fast[name])
    torch.testing.assert_close(runs[0][2], runs[1][2])


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, SI, MAS])
def test_a_penalty_of_a_compiled_model_is_that_of_the_model(kind: type) -> None:
    """People hand over what torch.compile returned, whose parameters have other names."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model, _ = make()
        whole = torch.compile(model, backend="aot_eager") if compiled else model
        penalty = kind(whole, strength=1.0)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
        for x, y in batches(0):
            optimizer.zero_grad()
            (F.cross_entropy(whole(x, y), y) + penalty.loss()).backward()
            optimizer.step()
            penalty.after_step()
        penalty.consolidate(batches(0))
        found.append(penalty.terms[0].importance)
    assert found[0].keys() == found[1].keys(), "so that what one remembers can be loaded into the other"
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])
