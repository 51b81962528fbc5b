"""A test for each mistake that is known from other implementations, with real numbers on both sides of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engram import EWC, MAS, SI, Config, DHPSoftmax, OnlineEWC, Penalty, preset, streams
from engram.data.batches import batches_of
from engram.data.sources import load
from engram.engine.build import build_model, build_penalty
from engram.engine.cpu.program import OneByOne
from engram.engine.learner import Learner
from engram.engine.loop import Position, train_task
from engram.engine.program import Batches
from engram.nn.networks import Network
from engram.runs import metrics


def train(model: nn.Module, penalty: Penalty, stream: streams.Stream, task: int, config: Config) -> None:
    """The loop's own training, of one model on one task."""
    batches = Batches([0], [stream], config.seed, torch.float32)
    train_task(OneByOne([Learner(config, 0, model, penalty)], batches), batches, config, Position(task))


def importance_of(penalty: Penalty, batches: list) -> dict[str, torch.Tensor]:
    return penalty.importance(penalty.model, penalty.parameters, penalty.state, penalty.settings, batches)


def model_and_batch(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 3)).double()
    return model, torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))


def step(model, penalty, inputs, targets, with_penalty: bool = True, learning_rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loss = F.cross_entropy(model(inputs), targets)
    (loss + penalty.loss() if with_penalty else loss).backward()
    optimizer.step()
    penalty.after_step()
    optimizer.zero_grad()


def test_fisher_is_not_the_square_of_the_batch_s_mean_gradient() -> None:
    model, inputs, targets = model_and_batch()
    fisher = importance_of(EWC(model, strength=1), [(inputs, targets)])["0.weight"]
    (mean_gradient,) = torch.autograd.grad(F.cross_entropy(model(inputs), targets), [model[0].weight])
    assert fisher.sum() > 3 * mean_gradient.square().sum(), "the wrong one is several times smaller"


def test_fisher_is_a_mean_over_samples_and_not_over_batches() -> None:
    model, inputs, targets = model_and_batch()
    penalty = EWC(model, strength=1)
    even = importance_of(penalty, [(inputs, targets)])
    uneven = importance_of(penalty, [(inputs[:15], targets[:15]), (inputs[15:], targets[15:])])
    assert all(torch.allclose(even[name], uneven[name]) for name in even)


def test_the_penalty_has_no_hidden_half() -> None:
    """Eq. 1 is λ Σ Ω Δ², not λ/2 Σ Ω Δ²."""
    model, inputs, targets = model_and_batch()
    penalty = OnlineEWC(model, strength=5)
    penalty.consolidate([(inputs, targets)])
    with torch.no_grad():
        model[0].weight += 0.5
    torch.testing.assert_close(penalty.loss(), 5 * 0.25 * penalty.terms[0].importance["0.weight"].sum())


def test_gamma_is_in_the_importance_once_and_not_in_the_loss_again() -> None:
    model, inputs, targets = model_and_batch()
    once = OnlineEWC(model, strength=5, gamma=0.5)
    once.consolidate([(inputs, targets)])
    full = OnlineEWC(model, strength=5, gamma=1.0)
    full.consolidate([(inputs, targets)])
    with torch.no_grad():
        model[0].weight += 0.5
    assert torch.equal(once.loss(), full.loss()), "with a single task there is nothing to decay yet"


def test_true_labels_are_not_weighted_by_their_probability() -> None:
    model, inputs, targets = model_and_batch()
    fisher = importance_of(EWC(model, strength=1), [(inputs, targets)])["2.bias"]
    p = model(inputs).softmax(dim=1).detach()
    gradient = F.one_hot(targets, 3) - p  # of log p(y | x) by the last bias
    torch.testing.assert_close(fisher, gradient.square().mean(dim=0))


def test_si_s_path_does_not_see_the_penalty() -> None:
    """With the regularised gradient the path of a held weight would count the penalty's own pull."""
    model, inputs, targets = model_and_batch()
    penalty = SI(model, strength=50.0)
    for _ in range(3):
        step(model, penalty, inputs, targets)
    penalty.consolidate()
    step(model, penalty, inputs, targets)  # away from the anchor, so that the penalty pulls
    before, start = penalty.state["path.0.weight"].clone(), model[0].weight.detach().clone()
    (task_gradient,) = torch.autograd.grad(F.cross_entropy(model(inputs), targets), [model[0].weight])
    (penalty_gradient,) = torch.autograd.grad(penalty.loss(), [model[0].weight])
    step(model, penalty, inputs, targets)
    moved = model[0].weight.detach() - start
    torch.testing.assert_close(penalty.state["path.0.weight"] - before, -task_gradient * moved)
    wrong = -(task_gradient + penalty_gradient) * moved
    assert not torch.allclose(penalty.state["path.0.weight"] - before, wrong)


def test_si_never_gives_negative_importance() -> None:
    """Where the penalty pulls a weight up the task's loss, the path is negative: Ω < 0 would reward moving it."""
    model, inputs, targets = model_and_batch()
    penalty = SI(model, strength=20.0)
    for _ in range(3):
        step(model, penalty, inputs, targets)
    penalty.consolidate()
    for strength in (20.0, 20.0, 20.0, 1e4, 1e4):
        penalty.strength = strength
        step(model, penalty, inputs, (targets + 1) % 3)
    assert any((path < 0).any() for path in penalty.group("path").values()), "the trap is set"
    path = {name: value.clone() for name, value in penalty.group("path").items()}
    penalty.state = {key: tensor for key, tensor in penalty.state.items() if not key.startswith("terms.")}
    penalty.consolidate()
    for name, omega in penalty.terms[0].importance.items():
        assert torch.equal(omega > 0, path[name] > 0), (
            "important are the weights whose path lowered the loss, no others"
        )
        assert (omega >= 0).all()


def test_si_does_not_keep_a_view_of_the_live_weights() -> None:
    model, inputs, targets = model_and_batch()
    penalty = SI(model, strength=1.0)
    for _ in range(3):
        step(model, penalty, inputs, targets)
    penalty.consolidate()
    total = sum(omega.sum() for omega in penalty.terms[0].importance.values())
    assert total > 0, "with a view, start and end are the same and every importance is 0"
    anchor = penalty.terms[0].anchor["0.weight"].clone()
    step(model, penalty, inputs, targets)
    assert torch.equal(penalty.terms[0].anchor["0.weight"], anchor)
    assert penalty.loss() > 0


def test_mas_is_per_sample_of_the_squared_norm_summed_over_classes() -> None:
    model, inputs, _ = model_and_batch()
    penalty = MAS(model, strength=1)
    penalty.consolidate([inputs])
    omega = penalty.terms[0].importance["0.weight"]

    def importance(of_outputs, samples) -> torch.Tensor:
        gradients = [torch.autograd.grad(of_outputs(model(x)), [model[0].weight])[0] for x in samples]
        return torch.stack(gradients).abs().mean(dim=0)

    singly = inputs[:, None]
    torch.testing.assert_close(omega, importance(lambda z: z.square().sum(), singly))
    per_batch = importance(lambda z: z.square().sum() / len(z), [inputs])
    unsquared = importance(lambda z: z.norm(), singly)
    over_classes = importance(lambda z: z.square().mean(), singly)
    for wrong in (per_batch, unsquared, over_classes):
        assert not torch.allclose(omega, wrong, rtol=0.1)


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_the_importance_pass_does_not_move_batchnorm_statistics_nor_traces(kind) -> None:
    head = DHPSoftmax(6, 3, eta=0.3)
    model = Network(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)), head)
    inputs, targets = torch.randn(16, 4) + 3, torch.randint(3, (16,))
    model.train()(inputs, targets)
    before = copy.deepcopy(model.state_dict())
    kind(model, strength=1).consolidate([(inputs, targets)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(inputs, targets)
    assert not torch.equal(model.features[1].running_mean, before["features.1.running_mean"]), "a training pass does"
    assert not torch.equal(head.hebb, before["head.hebb"])


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_a_layer_that_is_used_twice_keeps_its_parameters(kind: type[Penalty]) -> None:
    """`torch.func.functional_call` would leave its replacements in such a layer."""
    torch.manual_seed(0)
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(5, 4), twice, nn.ReLU(), twice, nn.Linear(4, 3))
    before = dict(model.named_parameters())
    penalty = kind(model, strength=1.0)
    penalty.consolidate([(torch.randn(8, 5), torch.randint(3, (8,)))])
    assert all(theta is before[name] for name, theta in model.named_parameters())
    assert float(penalty.loss().detach()) == 0
    with torch.no_grad():
        twice.weight.add_(1)
    assert float(penalty.loss().detach()) > 0


def test_a_permutation_is_drawn_once_and_not_while_batches_are_loaded() -> None:
    task = streams.permuted(load("mnist-small"), num_tasks=1)[0]
    for _ in range(2):  # epochs, and readers
        torch.manual_seed(np.random.randint(1000))  # noqa: NPY002 - whatever the state of the world
        inputs, _ = next(batches_of(task.train, 3, permutation=task.permutation))
        expected = task.train.inputs[:3].flatten(1)[:, task.permutation].view_as(inputs).float() / 255
        assert torch.equal(inputs, expected)


def test_the_accuracy_matrix_is_not_transposed() -> None:
    """Row: after which task. Learning task 2 ruins task 1, and task 2 was at chance before."""
    matrix = np.array([[0.9, 0.5], [0.3, 0.8]])
    assert metrics.backward_transfer(matrix) == pytest.approx(0.3 - 0.9)
    assert metrics.forward_transfer(matrix, [0.5, 0.4]) == pytest.approx(0.1)


def test_no_optimizer_state_crosses_from_task_to_task() -> None:
    """A task trained after another equals the same task trained alone from the same weights."""
    config = preset("split-mnist", "finetune", dataset="mnist-small", hidden=[8], epochs=1)
    stream = streams.split(load("mnist-small"))
    model = build_model(config, 0, stream.input_shape, stream.num_classes)
    penalty = build_penalty(config, 0, model)
    train(model, penalty, stream, 0, config)
    fresh = copy.deepcopy(model)
    train(model, penalty, stream, 1, config)
    train(fresh, build_penalty(config, 0, fresh), stream, 1, config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_published_strengths_are_the_defaults() -> None:
    strengths = {m: preset("permuted-mnist", m).strength for m in ("online-ewc", "dhp+online-ewc", "si", "mas")}
    assert strengths == {"online-ewc": 100, "dhp+online-ewc": 100, "si": 0.1, "mas": 0.1}
    model = build_model(preset("permuted-mnist", "mas"), 0, (1, 28, 28), 10)
    assert build_penalty(preset("permuted-mnist", "mas"), 0, model).strength == 0.1


@pytest.mark.parametrize("method", ["dhp+si", "dhp+online-ewc", "dhp+ewc", "dhp+mas"])
def test_resuming_restores_more_than_the_weights(method: str) -> None:
    """Saved after task 1 and loaded elsewhere, task 2 continues exactly as if nothing had happened."""
    config = preset("split-mnist", method, dataset="mnist-small", hidden=[16], epochs=1)
    stream = streams.split(load("mnist-small"))

    def make(trial: int = 0):
        model = build_model(config, trial, stream.input_shape, stream.num_classes)
        return model, build_penalty(config, trial, model)

    model, penalty = make()
    train(model, penalty, stream, 0, config)
    penalty.consolidate(batches_of(stream[0].train, 500), stream[0].classes)
    saved = copy.deepcopy((model.state_dict(), penalty.state_dict()))

    resumed, its_penalty = make(trial=1)
    resumed.load_state_dict(saved[0])
    its_penalty.load_state_dict(saved[1])
    weights_only, its_own = make(trial=1)
    weights_only.load_state_dict(saved[0])
    for learner, own in ((model, penalty), (resumed, its_penalty), (weights_only, its_own)):
        train(learner, own, stream, 1, config)

    same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)]
    lost = [torch.equal(a, b) for a, b in zip(model.parameters(), weights_only.parameters(), strict=True)]
    assert all(same)
    assert not all(lost), "the weights alone are not enough"


@pytest.mark.parametrize("method", ["si", "ewc", "online-ewc", "mas"])
@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
def test_the_penalty_is_not_always_zero(method: str, penalty_step: str) -> None:
    """In the real loop, on the second task, a strong penalty keeps the weights nearer than none does."""
    stream = streams.split(load("mnist-small"))
    moved = {}
    for name in ("finetune", method):
        strength = {} if name == "finetune" else {"strength": {"si": 1.0, "mas": 10.0}.get(method, 400.0)}
        config = preset("split-mnist", name, dataset="mnist-small", hidden=[16], epochs=1, batch_size=10, **strength)
        config = config.replace(penalty_step=penalty_step)
        model = build_model(config, 0, stream.input_shape, stream.num_classes)
        penalty = build_penalty(config, 0, model)
        train(model, penalty, stream, 0, config)
        penalty.consolidate(batches_of(stream[0].train, 500), stream[0].classes)
        start = model.features[1].weight.detach().clone()
        train(model, penalty, stream, 1, config)
        moved[name] = (model.features[1].weight - start).norm().item()
    assert moved[method] < 0.9 * moved["finetune"]
