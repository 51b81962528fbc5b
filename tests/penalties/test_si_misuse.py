"""Loops with SI that would give wrong importances without a word: each is right, or refused in one sentence."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from engram import SI, InputError, LinearSoftmax, OnlineEWC


def batches(seed: int, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(12, 6, generator=random).double(), torch.randint(3, (12,), generator=random)) for _ in range(count)
    ]


def make(strength: float = 30.0) -> tuple[nn.Module, SI, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, SI(model, strength=strength), torch.optim.SGD(model.parameters(), lr=0.1)


def learn(model: nn.Module, penalty: SI, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for x, y in batches(seed):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty.loss()).backward()
        optimizer.step()
        penalty.after_step()


def in_second_task() -> tuple[nn.Module, SI, torch.optim.Optimizer]:
    model, penalty, optimizer = make()
    learn(model, penalty, optimizer, 0)
    penalty.consolidate()
    learn(model, penalty, optimizer, 1)
    return model, penalty, optimizer


class Reference:
    """What each weight adds to its path in one step: by autograd, from the weights around the optimizer's step."""

    def __init__(self, model: nn.Module, penalty: SI, x: Tensor, y: Tensor):
        self.model = model
        self.before = {name: theta.detach().clone() for name, theta in penalty.parameters.items()}
        self.path = copy.deepcopy(penalty.group("path"))
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(penalty.parameters.values()))
        self.slopes = dict(zip(self.before, slopes, strict=True))

    def check(self, penalty: SI) -> None:
        for name, theta in penalty.parameters.items():
            right = self.path[name] - self.slopes[name] * (theta.detach() - self.before[name])
            torch.testing.assert_close(penalty.state[f"path.{name}"], right, rtol=1e-7, atol=1e-12)


def test_a_task_of_which_no_step_was_followed_is_refused() -> None:
    model, penalty, optimizer = make()
    for task in range(2):
        for x, y in batches(task):
            optimizer.zero_grad(set_to_none=task == 0)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        with pytest.raises(InputError, match=r"followed no step .* call penalty\.after_step\(\) after every"):
            penalty.consolidate()
        learn(model, penalty, optimizer, task)
        penalty.consolidate()
        assert penalty.terms[0].importance["0.weight"].sum() > 0
    penalty.consolidate()  # nothing was learned since, so there is nothing to follow


@pytest.mark.parametrize("way", ["a copy", "through data"])
def test_it_is_refused_too_for_a_copy_and_for_steps_that_are_not_counted(way: str) -> None:
    penalty = make()[1]
    penalty = copy.deepcopy(penalty) if way == "a copy" else penalty
    model = penalty.model
    for x, y in batches(0):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for theta in model.parameters():
            (theta.data if way == "through data" else theta.detach()).sub_(theta.grad, alpha=0.1)
    with pytest.raises(InputError, match="followed no step"):
        penalty.consolidate()


@pytest.mark.parametrize("task", [0, 1])
def test_following_a_step_before_it_is_taken_is_refused(task: int) -> None:
    model, penalty, optimizer = make() if task == 0 else in_second_task()

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        penalty.after_step()
        optimizer.step()

    first, second, *_ = batches(3)
    step(*first)
    with pytest.raises(InputError, match=r"called before the step .* call it after optimizer\.step"):
        penalty.consolidate()
    with pytest.raises(InputError, match=r"called before the step .* call it after optimizer\.step"):
        step(*second)


def test_a_step_that_was_not_taken_is_no_mistake() -> None:
    """A step that a GradScaler skips, one of another optimizer, or one of several parts: each followed as it comes."""
    model, penalty, optimizer = in_second_task()
    (x, y), (x2, y2), (x3, y3), *_ = batches(3)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        other.step()
        penalty.after_step()
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * torch.inf).backward()
    penalty.after_backward(scale=2.0)
    penalty.after_step()
    with torch.no_grad():
        for theta in model.parameters():  # from outside, after a step that was skipped
            theta.mul_(0.9)
    optimizer.zero_grad()
    halves = torch.cat([x2, x3]), torch.cat([y2, y3])
    reference = Reference(model, penalty, *halves)
    (F.cross_entropy(model(x2), y2) / 2 + penalty.loss()).backward()
    penalty.after_step()  # the gradient stays where it is, the penalty's part too
    (F.cross_entropy(model(x3), y3) / 2).backward()
    optimizer.step()
    penalty.after_step()
    reference.check(penalty)


CASES = ["twice", "twice, apart", "thrown away", "thrown away, zeroed", "thrown away, then none", "another penalty"]


@pytest.mark.parametrize("case", CASES)
def test_the_path_does_not_see_what_penalties_add_to_the_gradient(case: str) -> None:
    model, penalty, optimizer = in_second_task()
    (x, y), (x2, y2), *_ = batches(3)
    other = OnlineEWC(model, strength=50.0)
    other.consolidate(batches(1))
    with torch.no_grad():
        for theta in model.parameters():
            theta.add_(0.05)
    optimizer.zero_grad()
    if case.startswith("thrown away"):
        (F.cross_entropy(model(x2), y2) + penalty.loss() + other.loss()).backward()
        optimizer.zero_grad(set_to_none="zeroed" not in case)
    reference = Reference(model, penalty, x, y)
    loss = F.cross_entropy(model(x), y)
    if case != "thrown away, then none":
        loss = loss + penalty.loss()
    if case == "twice":
        loss = loss + 2 * penalty.loss()
    if case == "another penalty":
        loss = loss + other.loss()
    loss.backward()
    if case == "twice, apart":
        penalty.loss().backward()
    optimizer.step()
    penalty.after_step()
    reference.check(penalty)


def test_two_si_of_one_model_do_not_see_each_other() -> None:
    model, penalty, optimizer = in_second_task()
    twin = SI(model, strength=80.0)
    twin.load_state_dict(penalty.state_dict())
    (x, y), *_ = batches(3)
    optimizer.zero_grad()
    reference = Reference(model, penalty, x, y)
    (F.cross_entropy(model(x), y) + penalty.loss() + twin.loss()).backward()
    optimizer.step()
    for each in (penalty, twin):
        each.after_step()
        reference.check(each)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize("with_backward", [True, False])
def test_a_gradient_that_is_changed_through_data_is_refused(step: int, with_backward: bool) -> None:
    """PyTorch does not count such changes, so values are compared, in the steps 1, 2, 4, 8 and so on of a task."""
    model, penalty, optimizer = make()
    for number, (x, y) in enumerate(batches(0), start=1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number >= step:
            for theta in model.parameters():
                theta.grad.data.clamp_(-0.001, 0.001)
            expected = {1: 1, 2: 2, 3: 4, 4: 4}[step]
            if number == expected:
                with pytest.raises(InputError, match=r"directly after|changed after backward"):
                    (penalty.after_backward if with_backward else penalty.after_step)()
                return
        elif with_backward:
            penalty.after_backward()
        optimizer.step()
        penalty.after_step()
    raise AssertionError("it was not refused")


def test_a_gradient_that_is_changed_between_two_passes_is_refused() -> None:
    model, penalty, optimizer = in_second_task()
    (x, y), (x2, y2), *_ = batches(3)
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + penalty.loss()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    F.cross_entropy(model(x2), y2).backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"between two backward passes .* clip after the last pass"):
        penalty.after_step()


def test_a_head_that_writes_into_its_weights_between_two_passes_is_refused() -> None:
    torch.manual_seed(0)
    head = engram.heads.create("hebbian-softmax", 6, 3).double()
    penalty = SI(head, strength=1.0)
    for x, y in batches(0, count=2):
        F.cross_entropy(head(x, y), y).backward()
    with pytest.raises(InputError, match=r"moved between two .* with a head that writes into its weights, several"):
        penalty.after_step()


@pytest.mark.parametrize("when", ["first task", "second task", "within a task"])
def test_weights_that_are_changed_from_outside_start_the_next_step_there(when: str) -> None:
    model, penalty, optimizer = make()
    if when != "first task":
        learn(model, penalty, optimizer, 0)
    if when == "second task":
        penalty.consolidate()
    other, _, _ = make()
    with torch.no_grad():
        for theta in other.parameters():
            theta.normal_()
    model.load_state_dict(other.state_dict())
    loaded = copy.deepcopy(dict(model.named_parameters()))
    (x, y), *_ = batches(3)
    optimizer.zero_grad()
    reference = Reference(model, penalty, x, y)
    (F.cross_entropy(model(x), y) + penalty.loss()).backward()
    optimizer.step()
    penalty.after_step()
    reference.check(penalty)
    for name, theta in loaded.items():
        assert torch.equal(penalty.state[f"start.{name}"], theta.detach()) == (when != "within a task")


@pytest.mark.parametrize("way", ["copied", "copied by pickle", "grown", "state loaded"])
def test_a_penalty_that_has_followed_nothing_yet_starts_where_the_first_step_does(way: str) -> None:
    """However the penalty came to be, weights that are loaded before the first step are where the task starts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), LinearSoftmax(5, 3)).double()
    penalty = SI(model, strength=30.0)
    if way == "copied":
        penalty = copy.deepcopy(penalty)
    elif way == "copied by pickle":
        penalty = pickle.loads(pickle.dumps(penalty))
    elif way == "grown":
        model[2].grow(4)
        penalty.grow()
    else:
        penalty.load_state_dict(SI(model, strength=1.0).state_dict())
    model = penalty.model
    with torch.no_grad():
        for theta in model.parameters():
            theta.normal_()
    loaded = penalty.snapshot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(3):
        optimizer.zero_grad()
        reference = Reference(model, penalty, x, y)
        (F.cross_entropy(model(x), y) + penalty.loss()).backward()
        optimizer.step()
        penalty.after_step()
        reference.check(penalty)
    for name, theta in loaded.items():
        assert torch.equal(penalty.state[f"start.{name}"], theta)


def test_weights_that_are_changed_through_data_are_found_at_the_start_and_refused_later() -> None:
    model, penalty, optimizer = make()
    for theta in model.parameters():
        theta.data.normal_()
    (x, y), *_ = batches(0)
    reference = Reference(model, penalty, x, y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    penalty.after_step()
    reference.check(penalty)
    model[0].weight.data.mul_(2)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"'0.weight' was changed through \.data .* torch\.no_grad"):
        penalty.after_step()


def test_an_optimizer_that_writes_through_data_is_followed() -> None:
    model, penalty, _ = make()
    for x, y in batches(0):
        model.zero_grad()
        reference = Reference(model, penalty, x, y)
        F.cross_entropy(model(x), y).backward()
        for theta in model.parameters():
            theta.data.add_(theta.grad, alpha=-0.1)
        penalty.after_step()
        reference.check(penalty)
    penalty.consolidate()


def test_a_loop_before_the_followed_one_is_none_of_its_path() -> None:
    """A search for a learning rate, or training without the penalty, after it was made."""
    model, penalty, optimizer = make()
    for k, (x, y) in enumerate(batches(5)):
        optimizer.zero_grad(set_to_none=k % 2 == 0)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    start = penalty.snapshot()
    (x, y), *_ = batches(0)
    optimizer.zero_grad()
    reference = Reference(model, penalty, x, y)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    penalty.after_step()
    reference.check(penalty)
    assert all(torch.equal(penalty.state[f"start.{name}"], theta) for name, theta in start.items())


def test_a_loop_resumed_within_a_task_continues_the_same_path() -> None:
    model, penalty, optimizer = in_second_task()
    saved = copy.deepcopy((model.state_dict(), penalty.state_dict()))
    learn(model, penalty, optimizer, 2)
    for order in ("model first", "penalty first"):
        torch.manual_seed(1)
        again = copy.deepcopy(model)
        own, sgd = SI(again, strength=30.0), torch.optim.SGD(again.parameters(), lr=0.1)
        loads = [lambda m=again: m.load_state_dict(saved[0]), lambda p=own: p.load_state_dict(saved[1])]
        for load in loads if order == "model first" else reversed(loads):
            load()
        learn(again, own, sgd, 2)
        assert all(torch.equal(own.state[key], tensor) for key, tensor in penalty.state.items())


def test_a_penalty_that_is_gone_leaves_no_hooks_behind() -> None:
    model, penalty, optimizer = make()
    learn(model, penalty, optimizer, 0)
    assert model[0].weight._post_accumulate_grad_hooks
    del penalty
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


def test_checkpointed_features_have_the_same_path() -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for reentrant in (None, True, False):
        model, penalty, optimizer = make()
        for task in range(2):
            for x, y in batches(task):
                optimizer.zero_grad()
                x.requires_grad_()
                hidden = model[:2](x) if reentrant is None else checkpoint(model[:2], x, use_reentrant=reentrant)
                (F.cross_entropy(model[2](hidden), y) + penalty.loss()).backward()
                optimizer.step()
                penalty.after_step()
            penalty.consolidate()
        found.append(penalty.terms[0].importance)
    for other in found[1:]:
        for name, omega in found[0].items():
            torch.testing.assert_close(other[name], omega, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("what", ["rate", "inputs"])
def test_training_that_diverges_is_called_so(what: str) -> None:
    model, penalty, optimizer = make()
    optimizer.param_groups[0]["lr"] = 1e308 if what == "rate" else 0.1

    def train() -> None:
        for n, (x, y) in enumerate(batches(0, 20)):
            optimizer.zero_grad()
            F.cross_entropy(model(x * float("nan") if what == "inputs" and n == 1 else x), y).backward()
            optimizer.step()
            penalty.after_step()

    with pytest.raises(engram.NotFiniteError, match="is NaN or infinite: the training has diverged"):
        train()


@pytest.mark.parametrize(
    ("model", "strength", "sentence"),
    [
        (nn.Linear(2, 2), "1", "a penalty's strength must be a positive number, not '1'"),
        ([nn.Linear(2, 2)], 1.0, "a penalty protects a torch.nn.Module, not list"),
    ],
)
def test_a_penalty_needs_a_module_and_a_number(model: nn.Module, strength: float, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SI(model, strength=strength)
