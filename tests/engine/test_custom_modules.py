"""Custom modules, heads and penalties train as in plain PyTorch, however they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from builders import assert_numbers_equal, custom_stream
from engram import EWC, MAS, SI, InputError, NoPenalty, OnlineEWC, Penalty, preset
from engram.engine.build import Custom, build_learner
from engram.engine.choose import reason_against_mapping
from engram.engine.cpu.descent import FactoredDescent, factored_layers
from engram.engine.gpu.layers import prepare
from engram.engine.inspection import chain_of
from engram.nn.networks import Network

CPU = torch.device("cpu")


class Residual(nn.Module):
    """Adds to what came out of its layer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x
        return y.tanh_()


class TwiceForLargeBatches(nn.Module):
    """A layer that is called once more where there are many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) if len(x) > 2 else self.layer(x)


def frozen_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    model[0].weight.requires_grad_(False)
    return model


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    return model


def forward_of_its_own() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    layer = model[0]
    layer.forward = lambda x: F.linear(x, layer.weight.abs(), layer.bias)
    return model


def with_gradient_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Hooked())
    model[0].weight.register_hook(lambda gradient: 0.1 * gradient)
    return model


class Hooked(nn.Module):
    """Halves the gradient of what enters it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return x.relu()


class Turned(nn.Sequential):
    """Goes through its layers in another order."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def shared_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    model[2].weight = model[0].weight
    return model


def shared_activation() -> nn.Module:
    activation = nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 8), activation)


FEATURES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8))),
    "in place": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "in place later": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(inplace=True)),
    "in place behind a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(inplace=True)
    ),
    "residual": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Residual()),
    "twice for large batches": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), TwiceForLargeBatches()),
    "frozen weight": frozen_weight,
    "hook": with_hook,
    "forward of its own": forward_of_its_own,
    "gradient hook": with_gradient_hook,
    "hook on what came out": lambda: nn.Sequential(nn.Linear(6, 8), Hooked(), nn.Linear(8, 8), Hooked()),
    "iterates otherwise": lambda: Turned(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(6, 8)),
    "shared weight": shared_weight,
    "shared activation": shared_activation,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU()),
    "sequence": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), nn.ReLU(), nn.Flatten()),
}


@pytest.mark.parametrize("method", ["finetune", "dhp"])
@pytest.mark.parametrize("name", FEATURES)
def test_steps_are_those_of_plain_sgd(name: str, method: str) -> None:
    torch.manual_seed(0)
    config = preset("custom", method, network="custom", learning_rate=0.1)
    learner = build_learner(config, 0, (6,), 3, CPU, torch.float64, Custom(FEATURES[name]))
    inputs, targets = torch.rand(16, 6, dtype=torch.float64), torch.randint(0, 3, (16,))
    # Made anew, since a copy of a `forward` of its own would still call the weights of the first.
    reference = build_learner(config, 0, (6,), 3, CPU, torch.float64, Custom(FEATURES[name])).model.train()
    reference.load_state_dict(learner.model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    trained = [theta.requires_grad for theta in learner.model.parameters()]
    descent = FactoredDescent(learner, learner.penalty, factored_layers(learner.model, inputs[:2], targets[:2]))
    learner.model.train()
    descent.begin_task((0, 1, 2))
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(inputs, targets), targets)
        loss.backward()
        optimizer.step()
        with descent.steps():
            torch.testing.assert_close(descent.step(inputs, targets), loss.detach(), rtol=1e-12, atol=0)
    for mine, theirs in zip(learner.model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert [theta.requires_grad for theta in learner.model.parameters()] == trained


def test_layers_are_replaced_only_where_their_use_is_certain() -> None:
    def sole(name: str) -> list[str]:
        chain = chain_of(Network(FEATURES[name](), engram.LinearSoftmax(8, 3)))
        return [link.name for link in chain if link.sole and isinstance(link.layer, nn.Linear)]

    assert sole("plain") == ["features.0", "features.2"]
    assert sole("nested") == ["features.0.0", "features.1.0"]
    assert sole("twice for large batches") == ["features.0"]
    assert sole("hook") == sole("shared weight") == sole("forward of its own") == sole("iterates otherwise") == []
    assert chain_of(Network(Residual(), engram.LinearSoftmax(8, 3))) == []
    assert chain_of(nn.Sequential(nn.Linear(3, 3))) == []


@pytest.mark.parametrize("name", ["plain leaky", "shared activation"])
def test_an_activation_is_fused_only_if_it_is_used_once(name: str) -> None:
    features = shared_activation() if name == "shared activation" else nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2))
    model = Network(features, engram.LinearSoftmax(8, 3))
    prepare(model, torch)  # any module serves, as long as nothing is called
    fused = ["forward" in vars(layer) for layer in model.features]
    assert fused == ([True, True] if name == "plain leaky" else [False] * 4)


def test_models_that_share_a_tensor_are_refused() -> None:
    shared = nn.Sequential(nn.Flatten(), nn.Linear(256, 8))
    config = preset("custom", "finetune", network="custom", trials=2, epochs=1)
    with pytest.raises(InputError, match="two models share a tensor"):
        engram.run(config, stream=custom_stream(), features=lambda: shared)
    pretrained = torch.randn(8, 256)

    def from_pretrained() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(256, 8))
        module[1].weight = nn.Parameter(pretrained)
        return module

    with pytest.raises(InputError, match="two models share a tensor"):
        engram.run(config, stream=custom_stream(), features=from_pretrained)
    with pytest.raises(InputError, match="makes a module, not a int"):
        engram.run(config, stream=custom_stream(), features=lambda: 3)


def test_a_batch_that_a_module_cannot_take_is_refused_in_a_sentence() -> None:
    config = preset("custom", "finetune", network="custom", trials=1, epochs=1, batch_size=30)  # and then one of 1
    with pytest.raises(InputError, match="cannot train in task 1 of trial 1, on a batch of 1"):
        engram.run(
            config,
            stream=custom_stream(),
            features=lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.BatchNorm1d(8)),
        )


def test_dropout_draws_depend_on_their_position_alone() -> None:
    def features() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 12), nn.Dropout(0.5))

    config = preset("custom", "finetune", network="custom", trials=3, epochs=2, batch_size=8)
    together = engram.run(config, stream=custom_stream(), features=features, device="cpu")
    assert_numbers_equal(engram.run(config, stream=custom_stream(), features=features, device="cpu"), together)
    alone = engram.run(config.replace(first_trial=1, trials=1), stream=custom_stream(), features=features, device="cpu")
    assert repr(alone.dynamics) == repr([row for row in together.dynamics if row["trial"] == 1])
    learner = build_learner(config, 0, (1, 16, 16), 3, CPU, torch.float32, Custom(features))
    example = (torch.rand(2, 1, 16, 16), torch.tensor([0, 1]))
    assert "draws random numbers" in str(reason_against_mapping([learner], example, None))


class Cosine(nn.Module):
    """A custom head."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return 5 * F.linear(F.normalize(hidden, dim=1), F.normalize(self.weight, dim=1))


class Squared(MAS):
    """A custom importance."""

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        found = super().importance(model, parameters, state, settings, batches, classes)
        return {name: omega.square() for name, omega in found.items()}


class Absolute(MAS):
    """A custom loss, which is not quadratic."""

    def loss(self) -> Tensor:
        moved = [(theta - term.anchor[n]).abs().sum() for term in self.terms for n, theta in self.parameters.items()]
        return self.strength * torch.stack(moved).sum() if moved else torch.zeros(())


def test_a_custom_head_and_penalty_train() -> None:
    config = preset("custom", "finetune", hidden=[12], trials=2, epochs=6, batch_size=8, learning_rate=0.1)
    free = engram.run(config, stream=custom_stream(), head=Cosine, device="cpu")
    held = engram.run(
        config, stream=custom_stream(), head=Cosine, penalty=lambda model: Squared(model, strength=1e3), device="cpu"
    )
    assert free.latest_task[:, -1].min() > 0.8
    losses = [[row["loss"] for row in result.dynamics if row["task"] == 1] for result in (free, held)]
    assert sum(losses[1]) > sum(losses[0]), "what is held learns the second task more slowly"
    with pytest.raises(InputError, match="goes with the methods finetune and dhp"):
        engram.run(
            preset("custom", "mas", strength=1.0),
            stream=custom_stream(),
            penalty=lambda model: Squared(model, strength=1.0),
        )


class FromAnchors(Penalty):
    """The same cost by the plain contract: its memory is the anchors of the last task, and nothing else."""

    @classmethod
    def initial_state(cls, parameters) -> dict[str, Tensor]:
        return {f"anchor.{name}": theta.detach().clone() for name, theta in parameters.items()}

    def loss(self) -> Tensor:
        anchors = self.group("anchor")
        return self.strength * sum((theta - anchors[name]).abs().sum() for name, theta in self.parameters.items())

    def consolidate(self, batches=(), classes=None) -> None:
        self.state = self.initial_state(self.parameters)


def test_a_penalty_of_the_plain_contract_trains_and_remembers() -> None:
    config = preset("custom", "finetune", hidden=[6], trials=1, epochs=2, batch_size=8).replace(penalty_step="gradient")
    made: list[FromAnchors] = []

    def penalty(model: nn.Module) -> FromAnchors:
        made.append(FromAnchors(model, strength=0.01))
        return made[-1]

    held = engram.run(config, stream=custom_stream(), penalty=penalty, device="cpu")
    free = engram.run(config, stream=custom_stream(), device="cpu")
    assert held.dynamics[-1]["loss"] != free.dynamics[-1]["loss"]
    kept = made[0].state_dict()
    assert kept.keys() == {f"anchor.{name}" for name in made[0].parameters}
    other = FromAnchors(made[0].model, strength=1.0)
    other.load_state_dict({key: 2 * tensor for key, tensor in kept.items()})
    assert all(torch.equal(other.state[key], 2 * tensor) for key, tensor in kept.items())
    with pytest.raises(InputError, match="FromAnchors has no proximal step"):
        other.proximal_step(0.1)
    with pytest.raises(InputError, match="FromAnchors defines its own `loss` but no `proximal_step`"):
        engram.run(config.replace(penalty_step="proximal"), stream=custom_stream(), penalty=penalty, device="cpu")


def test_a_penalty_declares_the_verbs_that_an_engine_must_call() -> None:
    model = nn.Linear(3, 2)
    for kind in (EWC, OnlineEWC, SI, MAS, Squared):
        assert kind(model, strength=1.0).custom_verbs == ()
    assert NoPenalty(model).custom_verbs == ()
    assert Absolute(model, strength=1.0).custom_verbs == ("loss",)
    assert Freezing(model, strength=1.0).custom_verbs == ("consolidate",)
    assert FromAnchors(model, strength=1.0).custom_verbs == ("loss", "consolidate")

    class Inherited(Absolute):
        def after_step(self) -> None:
            pass

    assert Inherited(model, strength=1.0).custom_verbs == ("loss", "after_step")
    one = MAS(model, strength=1.0)
    one.after_step = lambda: None  # set on this one alone
    assert one.custom_verbs == ("after_step",)


def test_importance_is_a_function_of_what_it_is_given() -> None:
    """Of another model, state and settings than the penalty's own; and nothing changes."""
    torch.manual_seed(0)
    own, other = nn.Linear(3, 2), nn.Linear(3, 2)
    penalty = SI(own, strength=1.0, xi=0.1)
    before = penalty.state_dict()
    parameters = dict(other.named_parameters())
    state = {f"path.{name}": torch.full_like(theta, 3.0) for name, theta in parameters.items()}
    state |= {f"start.{name}": theta.detach() - 1 for name, theta in parameters.items()}
    found = penalty.importance(other, parameters, state, {"xi": 0.5}, [])
    for name in parameters:
        torch.testing.assert_close(found[name], torch.full_like(found[name], 2.0))  # 3 / (1² + ½)
        assert torch.equal(penalty.state[f"path.{name}"], before[f"path.{name}"])


def test_a_custom_loss_is_not_ignored() -> None:
    config = preset("custom", "finetune", hidden=[6], trials=1, epochs=2, batch_size=8)
    with pytest.raises(InputError, match="Absolute defines its own `loss` but no `proximal_step`"):
        engram.run(config, stream=custom_stream(), penalty=lambda model: Absolute(model, strength=1.0))
    by_gradient = config.replace(penalty_step="gradient")
    free, held = (
        engram.run(by_gradient, stream=custom_stream(), penalty=penalty, device="cpu")
        for penalty in (None, lambda model: Absolute(model, strength=1.0))
    )
    assert free.dynamics[-1]["loss"] != held.dynamics[-1]["loss"]


def test_a_forward_that_was_set_on_one_layer_is_not_mapped() -> None:
    config = preset("custom", "finetune", network="custom")
    learner = build_learner(config, 0, (6,), 3, CPU, torch.float64, Custom(forward_of_its_own))
    example = (torch.rand(2, 6, dtype=torch.float64), torch.tensor([0, 1]))
    assert "set on it alone" in str(reason_against_mapping([learner], example, None))


class ChangesLargeBatches(nn.Module):
    """Works in place where there are many samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3) if len(x) > 2 else 3 * x


def test_a_change_in_place_that_a_small_batch_did_not_show_is_refused() -> None:
    features = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(256), nn.Linear(256, 8), ChangesLargeBatches())
    config = preset("custom", "finetune", network="custom", trials=1, epochs=1, batch_size=8)
    with pytest.raises(InputError, match="was changed in place"):
        engram.run(config, stream=custom_stream(), features=lambda: features, device="cpu")


class Freezing(MAS):
    """Freezes the first layer once a task has been learned."""

    def consolidate(self, batches, classes=None) -> None:
        super().consolidate(batches, classes)
        self.model.features[1].requires_grad_(False)


def test_a_layer_frozen_between_tasks_stays_the_same() -> None:
    seen = []

    def penalty(model: nn.Module) -> Freezing:
        seen.append(model)
        return Freezing(model, strength=1.0)

    kept: list[Tensor] = []

    def watch(progress: engram.Progress) -> None:
        if progress.task_ended:
            kept.append(seen[-1].features[1].weight.detach().clone())

    config = preset("custom", "finetune", hidden=[6], trials=1, epochs=1, batch_size=8)
    engram.run(config, stream=custom_stream(), penalty=penalty, report=watch, device="cpu")
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("penalty_step", ["proximal", "gradient"])
def test_a_penalty_pulls_weights_that_a_step_does_not_use(penalty_step: str) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    config = preset("custom", "mas", network="custom", strength=1.0, penalty_step=penalty_step, learning_rate=0.1)
    learner = build_learner(config, 0, (6,), 3, CPU, torch.float64, Custom(Idle))
    learner.penalty.remember({name: torch.ones_like(theta) for name, theta in learner.penalty.parameters.items()})
    idle = learner.model.features.idle
    with torch.no_grad():
        idle.weight.add_(1)
    moved = idle.weight.detach().clone()
    descent = FactoredDescent(learner, learner.penalty, [])
    descent.begin_task((0, 1, 2))
    learner.model.train()
    with descent.steps():
        descent.step(torch.rand(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
    factor = 1 / 1.2 if penalty_step == "proximal" else 0.8  # 2 lr λ Ω = 0.2
    torch.testing.assert_close(idle.weight.detach() - (moved - 1), torch.full_like(moved, factor))


class Infinite(MAS):
    """Importances that overflow, of weights that do not."""

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        return {name: torch.full_like(theta, float("inf")) for name, theta in parameters.items()}


def test_importances_that_are_not_finite_end_a_trial() -> None:
    config = preset("custom", "finetune", hidden=[6], trials=2, epochs=1, batch_size=8)
    result = engram.run(
        config, stream=custom_stream(), penalty=lambda model: Infinite(model, strength=1.0), device="cpu"
    )
    assert [(lost.trial, lost.task) for lost in result.diverged] == [(0, 0), (1, 0)]
