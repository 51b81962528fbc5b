"""Heads that remember sums, in experiments: no backward pass, settled before evaluation, the same in a stack."""

from __future__ import annotations

import pytest
import torch
from test_stack import build, compare, config_of, stacked, train

from builders import refusal, run_on, small_digits
from engram import InputError, NoPenalty, preset
from engram.engine.build import build_model
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
