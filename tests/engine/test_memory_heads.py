"""Heads that remember sums, in experiments: no backward pass, settled before evaluation, the same in a stack."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from test_stack import build, compare, config_of, stacked, train

from builders import refusal, run_on, small_digits
from engram import InputError, NoPenalty, preset
from engram.engine.build import build_model
from engram.engine.cpu.program import OneByOne
from engram.engine.program import Program
from engram.engine.training import Runtime
from engram.nn.memory_heads import MemoryHead
from engram.penalties import SI

SUMS = ("ncm", "slda", "ridge")


@pytest.mark.parametrize("head", SUMS)
def test_a_stack_is_each_alone(head: str) -> None:
    own = {"random_features": 9, "epochs": 1}
    configs = [config_of("split", head, network="none", shrinkage=eps, **own) for eps in (0.1, 0.3)]
    learners, _ = compare(configs)
    assert all(learner.outcome.rows[-1][0] > 0.6 for learner in learners)


@pytest.mark.parametrize("method", ["slda+si", "ncm+mas", "ridge+online-ewc"])
def test_a_stack_is_each_alone_on_features_that_learn(method: str) -> None:
    compare([config_of("split", method, random_features=0), config_of("split", method, learning_rate=0.1)])


def test_nothing_is_trained_without_slow_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(*arguments: object, **options: object) -> None:
        raise AssertionError("there is nothing to differentiate")

    learners, batches = build([config_of("split", "slda", random_features=9)])
    monkeypatch.setattr(torch.autograd, "grad", backward)
    train(stacked(learners, batches), batches)
    run_on([config_of("split", "slda", random_features=9)], [small_digits(40, 30)], Runtime("cpu"))


@pytest.mark.parametrize("head", ["slda", "ridge"])
@pytest.mark.parametrize("make", [stacked, OneByOne], ids=["stacked", "one by one"])
def test_a_head_whose_sums_are_singular_fails_alone(head: str, make: Callable[..., Program]) -> None:
    """A task has fewer samples than random features, so that their second moment needs a shrinkage."""
    own = {"random_features": 30, "epochs": 1}
    singular, sound = (config_of("split", head, network="none", shrinkage=eps, **own) for eps in (0.0, 0.1))
    learners, batches = build([singular, sound])
    train(make(learners, batches), batches)
    expected, batches = build([sound])
    train(make(expected, batches), batches)
    for lost, kept, other in zip(learners[::2], learners[1::2], expected, strict=True):
        assert lost.outcome.diverged is not None
        assert lost.outcome.diverged.task == 0
        assert lost.outcome.diverged.step == lost.outcome.records[-1].step > 0
        assert str(lost.outcome.diverged.why).startswith("the second moment of the 30 features is singular")
        assert lost.outcome.rows == []
        assert repr(kept.outcome) == repr(other.outcome), "as if the other had not been there"
    copied = pickle.loads(pickle.dumps(learners[0].outcome.diverged))
    assert copied == learners[0].outcome.diverged, "as between processes"


@pytest.mark.parametrize("make", [stacked, OneByOne], ids=["stacked", "one by one"])
def test_sums_that_are_singular_within_a_task_are_found_at_that_step(make: Callable[..., Program]) -> None:
    settings = {"shrinkage": 0.0, "consolidate_every": 2, "random_features": 30}
    learners, batches = build([config_of("split", "slda+si", **settings)])
    train(make(learners, batches), batches)
    assert [(lost.task, lost.step) for lost in (learner.outcome.diverged for learner in learners)] == [(0, 1), (0, 1)]


def test_one_pass_over_small_digits_forgets_nothing() -> None:
    config = preset("split-mnist", "slda", dataset="mnist-small", trials=1, random_features=200)
    (found,) = run_on([config], [small_digits(1000, 500)], Runtime("cpu"))
    assert found.accuracy[0, -1].min() > 0.85


def test_presets_of_a_memory_head() -> None:
    alone = preset("split-mnist", "slda")
    assert (alone.network, alone.random_features, alone.epochs, alone.learn_features) == ("none", 2000, 1, False)
    model = build_model(alone.replace(random_features=7), 0, (1, 4, 4), 3)
    assert isinstance(model.head, MemoryHead)
    assert not list(model.parameters())
    learned = preset("split-mnist", "slda+si")
    assert (learned.network, learned.random_features, learned.learn_features) == ("mlp", 0, True)


def test_a_penalty_needs_something_to_protect() -> None:
    words = refusal(preset, "split-mnist", "slda+si", learn_features=False)
    assert words == "si has nothing to protect, as slda learns nothing: set learn_features"
    for rehearsal in ("replay", "joint"):
        words = refusal(preset, "split-mnist", f"slda+{rehearsal}", learn_features=False)
        assert words == f"{rehearsal} has nothing to rehearse, as slda learns nothing: set learn_features"
    head = MemoryHead(4, 3, read="lda")
    assert NoPenalty(head).parameters == {}
    with pytest.raises(InputError, match="no trainable slow weights"):
        SI(head, strength=1.0)
