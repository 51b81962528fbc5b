"""The stack that a GPU trains, here in plain PyTorch on a CPU: it computes what each of its models would alone."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders import custom_stream, interrupted, run_on, small_digits
from engram import DHPSoftmax, InputError, Progress, preset
from engram.common.errors import Divergence
from engram.config.methods import all_methods
from engram.config.presets import STEADY
from engram.config.settings import Config
from engram.data.batches import batches_of
from engram.data.samples import Stream
from engram.engine import choose, memory
from engram.engine.build import Custom, build_model, build_streams, learner_from
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.choose import architectures, choose_program, reason_against_mapping
from engram.engine.cpu.descent import ContractDescent, FactoredDescent
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu import program as stack_program
from engram.engine.gpu.convolutions import channels_last
from engram.engine.gpu.heads import is_steady
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.rehearsal import RehearsalSection
from engram.engine.gpu.rows import Rows, Step, steps_of, take_step
from engram.engine.gpu.section import Section
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.memory import Portion, bytes_of, bytes_of_data, bytes_of_step, largest_stack
from engram.engine.program import Batches, Program, SideBySide, consolidate_alone
from engram.engine.training import Runtime
from engram.penalties import EWC, MAS, Penalty
from engram.penalties.terms import terms_of

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # as a word only: the chooser goes by it, and the tensors stay where they are

RTOL, ATOL = 1e-9, 1e-13

QUICK = {"epochs": 2, "batch_size": 16, "num_tasks": 2, "trials": 2, "hidden": [12]}
KINDS = {
    "permuted": ("permuted-mnist", {"dataset": "mnist-small"}),
    "imbalanced": ("imbalanced-permuted-mnist", {"dataset": "mnist-small", "batch_size": 5}),
    "split": ("split-mnist", {"dataset": "mnist-small", "batch_size": 4}),
    "random order": ("split-mnist", {"class_order": "random", "dataset": "mnist-small", "batch_size": 4}),
    "mixture": ("vision-mixture", {}),
    "custom": ("custom", {}),
}


def config_of(kind: str, method: str, **changes: object) -> Config:
    benchmark, more = KINDS[kind]
    settings = QUICK | more | changes
    try:
        return preset(benchmark, method).replace(**settings)
    except InputError:  # no strength is known for it
        return preset(benchmark, method, strength=1.0).replace(**settings)


def streams_of(config: Config) -> list[Stream]:
    trials = list(range(config.first_trial, config.first_trial + config.trials))
    if config.benchmark == "custom":
        return [custom_stream(num_train=21)] * len(trials)
    data = (
        small_digits(40, 30) if config.examine == "test" else small_digits(240, 30)
    )  # of which the last sixth examine
    return build_streams(config, trials, [data] * (2 if config.benchmark == "vision-mixture" else 1))


def build(
    configs: Sequence[Config],
    features: Callable[[], nn.Module] | None = None,
    head: Callable[[int, int], nn.Module] | None = None,
) -> tuple[list[Learner], Batches]:
    """Learners in the order of a stack, and what they learn."""
    first = configs[0]
    trials = list(range(first.first_trial, first.first_trial + first.trials))
    found = streams_of(first)
    shape, num_classes = found[0].input_shape, found[0].num_classes
    custom = Custom(features, head)

    def learner(config: Config, trial: int, stream: Stream) -> Learner:
        model = build_model(config, trial, shape, num_classes, custom)
        model.start(next(batches_of(stream[0].train, 8, permutation=stream[0].permutation))[0])
        return learner_from(config, trial, model, CPU, torch.float64, custom, shape, num_classes)

    learners = [learner(c, t, stream) for t, stream in zip(trials, found, strict=True) for c in configs]
    return learners, Batches(trials, found, first.seed, torch.float64)


def example_of(batches: Batches) -> tuple[Tensor, Tensor]:
    first = batches.tasks(0)[0].train[slice(2)]
    scale = 255 if first.inputs.dtype == torch.uint8 else 1
    return first.inputs.double() / scale, first.targets


State = dict[str, Tensor]


def state_of(learner: Learner) -> State:
    """All that a learner consists of, as copies."""
    model = {f"model.{name}": tensor.clone() for name, tensor in learner.model.state_dict().items()}
    return model | {f"penalty.{name}": tensor.clone() for name, tensor in learner.penalty.state_dict().items()}


def train(
    program: Program, batches: Batches, disturb: Callable[[int], None] = lambda moves: None
) -> dict[tuple, list[State]]:
    """Learn it all; returns what each learner, by its trial and place in it, was in the midst of every epoch."""
    history: dict[int, list[State]] = {id(learner): [] for learner in program.learners}
    moves = iter(range(10**6))

    def record(task_ended: bool) -> None:
        disturb(next(moves))
        for learner in program.learners:
            history[id(learner)].append(state_of(learner))

    run_stream(program, batches, program.learners[0].config, on_position=record)
    return history


def stacked(learners: Sequence[Learner], batches: Batches) -> Mapped:
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped), notes
    return program


def alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.allclose(one, other, RTOL, ATOL)


def assert_close(one: Learner, other: Learner, histories: Sequence[dict] = ()) -> None:
    """The same numbers, to the rounding of float64."""
    method = one.config.method
    assert (one.config, one.trial) == (other.config, other.trial)
    assert one.outcome.diverged is other.outcome.diverged is None
    assert one.outcome.untrained == other.outcome.untrained, method
    assert one.outcome.rows == other.outcome.rows, method
    records = [np.array([list(vars(r).values()) for r in learner.outcome.records]) for learner in (one, other)]
    np.testing.assert_allclose(records[0], records[1], rtol=1e-10, err_msg=method)
    losses = [[record.loss for record in learner.outcome.records] for learner in (one, other)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12, err_msg=method)
    if histories:
        seen = [history[id(learner)] for history, learner in zip(histories, (one, other), strict=True)]
    else:
        seen = [[state_of(one)], [state_of(other)]]
    assert len(seen[0]) == len(seen[1]) > 0
    for a, b in zip(*seen, strict=True):
        assert list(a) == list(b), method
        for name in a:
            if alike(a[name], b[name]):  # which takes a tenth of the time
                continue
            torch.testing.assert_close(
                a[name], b[name], rtol=RTOL, atol=ATOL, msg=lambda text, name=name: f"{method} {name}: {text}"
            )


def compare(configs: Sequence[Config]) -> tuple[list[Learner], list[Learner]]:
    """Train the same learners as a stack and one by one, and find them the same."""
    found, histories = [], []
    for kind in ("stack", "one by one"):
        learners, batches = build(configs)
        program: Program = stacked(learners, batches) if kind == "stack" else OneByOne(learners, batches)
        histories.append(train(program, batches))
        found.append(learners)
    for one, other in zip(*found, strict=True):
        assert_close(one, other, histories)
    return found[0], found[1]


# --- a stack computes what each model does alone

FEW_METHODS = ("finetune", "dhp+si", "online-ewc", "dhp+mas", "linear+si")
PLAIN = ("linear", "linear+si", "linear+ewc", "linear+online-ewc", "linear+mas")


@pytest.mark.parametrize(
    ("kind", "network"), [(kind, "mlp") for kind in KINDS] + [("mixture", "cnn"), ("imbalanced", "cnn")]
)
def test_a_stack_of_all_methods_is_each_alone(kind: str, network: str) -> None:
    changes = {"network": network, "epochs": 2 if kind == "imbalanced" else 1, "trials": 2}
    if network == "cnn":
        changes |= {"epochs": 1, "trials": 1, "batch_size": 20}
    methods = (*all_methods(), *PLAIN) if network == "mlp" else FEW_METHODS  # convolutions take long on a CPU
    configs = [config_of(kind, method, **changes) for method in methods]
    assert len(architectures(build(configs)[0])) == 1, "plain, matched and plastic heads are one section"
    learners, _ = compare(configs)
    if kind == "imbalanced" and network == "mlp":
        lengths = {len(learner.outcome.records) for learner in learners}
        assert len({len(s[0].train) for s in streams_of(configs[0])}) == 2, lengths


@pytest.mark.parametrize("others", [(), ("finetune", "mas"), ("dhp", "dhp+mas")], ids=["alone", "matched", "dhp"])
def test_plain_heads_are_each_alone_whoever_trains_beside_them(others: tuple[str, ...]) -> None:
    changes = {"epochs": 1, "trials": 2, "learning_rate": 0.1, "head_init": "published"}
    configs = [config_of("permuted", method, **changes) for method in (*PLAIN, *others)]
    learners, _ = compare(configs)
    for learner in learners[: len(PLAIN)]:
        assert [*learner.model.head.state_dict()] == ["weight"], "it has got nothing of the plastic head"
        assert all(math.isnan(record.hebb_norm) for record in learner.outcome.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"baseline_head": "linear"},
        {"alpha": "uniform"},
        {"alpha": "uniform", "regularize_alpha": True, "penalty_step": "gradient"},
        {"penalty_step": "gradient", "strength": 0.5},
        {"regularize_alpha": True},
        {"baseline_trace": 2.0},
        {"eta_range": "unbounded", "eta": 0.3},
        {"fisher_labels": "exact"},
        {"fisher_labels": "sampled"},
        {"fisher_labels": "predicted"},
        {"hidden": [7, 5], "leaky_slope": 0.3},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_a_stack_is_each_alone_with_every_head_and_step(changes: dict[str, Any]) -> None:
    configs = []
    for method in all_methods():
        own = {n: v for n, v in changes.items() if n != "strength" or config_of("split", method).penalty}
        configs.append(config_of("split", method, epochs=1, **own))
    compare(configs)


GRID = {
    "dhp+si": [{"strength": 0.3}, {"strength": 30.0}, {"xi": 0.01}, {"eta": 0.5}, {"learning_rate": 0.03}],
    "ewc": [{"fisher_labels": "sampled", "strength": 10.0}, {"fisher_labels": "sampled", "strength": 90.0}],
    "dhp+online-ewc": [{"gamma": 0.1}, {"gamma": 0.9, "strength": 5.0}, {"penalty_step": "gradient", "strength": 0.1}],
    "mas": [{}, {"strength": 9.0, "learning_rate": 0.005}, {"baseline_trace": 3.0}],
}


def test_every_value_of_a_grid_is_a_model_s_own() -> None:
    configs = [
        config_of("permuted", method, num_tasks=3, trials=1, epochs=1, **values)
        for method, all_ in GRID.items()
        for values in all_
    ]
    together, _ = compare(configs)
    for config, learner in zip(configs, together, strict=True):
        (alone,), batches = build([config])
        train(stacked([alone], batches), batches)
        assert_close(learner, alone)
    assert len({repr(learner.outcome.records[-1]) for learner in together}) == len(configs), "each value tells"


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_stack_of_many_is_as_many_stacks_of_one(network: str) -> None:
    methods = ("finetune", "dhp+si", "ewc", "dhp+mas")[: 4 if network == "mlp" else 2]
    configs = [config_of("imbalanced", m, network=network, epochs=1, batch_size=16) for m in methods]
    together, batches = build(configs)
    train(stacked(together, batches), batches)
    for learner in together:
        (alone,), batches = build([learner.config.replace(trials=1, first_trial=learner.trial)])
        train(stacked([alone], batches), batches)
        assert alone.outcome.rows == learner.outcome.rows
        for name, tensor in state_of(alone).items():
            torch.testing.assert_close(state_of(learner)[name], tensor, rtol=1e-11, atol=1e-14)


# --- the steady trace and weights in force: three ways to take a step


def test_kernels_take_no_head_that_writes_after_reading() -> None:
    """They write first; such a head is mapped."""
    settings: dict[str, Any] = {"trace_gradient": False, "learn_eta": False}
    assert is_steady(DHPSoftmax(4, 3, **settings))
    assert not is_steady(DHPSoftmax(4, 3, **settings, trace_write="after"))
    assert DHPSoftmax(4, 3).literal
    assert not DHPSoftmax(4, 3, trace_write="after").literal


FORMS: dict[str, dict[str, Any]] = {
    "steady": STEADY,
    "steady, gradient": {**STEADY, "penalty_step": "gradient"},
    "steady, uniform": {**STEADY, "alpha": "uniform"},
    "steady, alpha held too": {**STEADY, "regularize_alpha": True},
    "steady, alpha held too, gradient": {**STEADY, "regularize_alpha": True, "penalty_step": "gradient"},
    "scaled and learned": {**STEADY, "trace_gradient": True, "learn_eta": True, "trace_centred": False},
    "in force, as in the paper": {"protect": "in-force", "alpha_init": 0.5},
    "published initial weights": {**STEADY, "head_init": "published"},
    "written after": {**STEADY, "trace_write": "after"},
    "written after, in force": {"protect": "in-force", "alpha_init": 0.5, "trace_write": "after"},
    "examined only": {**STEADY, "mask_training": False, "examine": "validation"},
    "he": {**STEADY, "initialisation": "he", "input_mean": 0.13, "input_std": 0.3},
}


def contracted(learners: Sequence[Learner], batches: Batches) -> OneByOne:
    """Steps by the penalties' own methods, as in anybody's loop."""
    program = OneByOne(learners, batches)
    program.descents = [ContractDescent(learner) for learner in learners]
    return program


def factored(learners: Sequence[Learner], batches: Batches) -> OneByOne:
    program = OneByOne(learners, batches)
    assert all(isinstance(descent, FactoredDescent) for descent in program.descents)
    return program


@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_same_by_verbs_in_factors_and_in_a_stack(form: str) -> None:
    """With a large η, and all classes in every task: where classes do not come back, no anchor ever moves."""
    changes = {"epochs": 1, "trials": 1, "num_tasks": 2, "hidden": [9, 8], "batch_size": 5, **FORMS[form], "eta": 0.2}
    kind = "split" if "mask_training" in changes else "permuted"
    configs = [config_of(kind, method, **changes) for method in ("dhp", "dhp+si", "dhp+online-ewc", "dhp+mas")]
    found, histories, moved = [], [], []
    for make in (contracted, factored, stacked):
        learners, batches = build(configs)
        fast = learners[1].penalty.fast["head.weight"]
        histories.append(train(make(learners, batches), batches, lambda moves, f=fast: moved.append(f().detach())))
        found.append(learners)
    assert len(architectures(found[0])) == 1
    for one, other in pairwise(moved):
        assert not torch.equal(one, other), "the fast part moves, and the anchors with it"
    for by_hand, *others in zip(*found, strict=True):
        method = by_hand.config.method
        assert by_hand.outcome.diverged is None
        assert by_hand.config.penalty is None or set(by_hand.penalty.fast) == {"head.weight"}
        expected = histories[0][id(by_hand)]
        for history, other in zip(histories[1:], others, strict=True):
            assert other.outcome.rows == by_hand.outcome.rows, method
            assert other.outcome.untrained == by_hand.outcome.untrained, method
            for a, b in zip(expected, history[id(other)], strict=True):
                for name in a:
                    if not name.startswith("penalty.before"):  # needed only by a hand-written loop
                        difference = (a[name] - b[name]).abs().max()
                        assert difference <= 1e-12 * max(1, a[name].abs().max()), f"{method} {name}: {difference}"
    states = [history[id(learners[1])] for history, learners in zip(histories, found, strict=True)]
    path = [abs(state["penalty.path.head.weight"]).max() for state in states[0][:-1]]
    assert max(path) > 1e-6, "and 1e-12 is small beside what SI follows"


def test_steady_methods_share_a_stack_with_baselines_and_each_keeps_its_own_eta_and_step() -> None:
    configs = [
        config_of("permuted", "dhp+si", epochs=1, **STEADY),
        config_of("permuted", "dhp+si", epochs=1, **{**STEADY, "learn_eta": True}),
        config_of("permuted", "dhp+mas", epochs=1, **{**STEADY, "protect": "slow"}),
        config_of("permuted", "dhp+mas", epochs=1, **{**STEADY, "penalty_step": "gradient"}),
        config_of("permuted", "dhp", epochs=1, learn_eta=False),
        config_of("permuted", "dhp", epochs=1),
        config_of("permuted", "si", epochs=1, protect="in-force"),
    ]
    sizes = [len(group) for group in architectures(build(configs)[0])]
    assert sum(sizes) == 2 * len(configs)
    assert len(sizes) > 1, "traces that are read otherwise, and anchors that move at another moment, are other sections"
    learners, _ = compare(configs)
    etas = [learner.outcome.records[-1].eta for learner in learners[: len(configs)]]
    assert etas[4] == np.float32(0.001), "as it was made"
    assert etas[5] != pytest.approx(0.001, rel=1e-6)
    assert etas[0] == np.float32(STEADY["eta"])


# --- models never mix


MIXED = ("finetune", "dhp", "si", "dhp+si", "ewc", "dhp+mas")


@pytest.fixture(scope="module")
def undisturbed() -> list[Learner]:
    learners, batches = build([config_of("imbalanced", method) for method in MIXED])
    train(stacked(learners, batches), batches)
    return learners


def assert_untouched(one: Learner, other: Learner) -> None:
    """The same, bit for bit."""
    assert repr(one.outcome) == repr(other.outcome)
    for (name, a), (_, b) in zip(state_of(one).items(), state_of(other).items(), strict=True):
        assert torch.equal(a, b), f"{one.config.method} {one.trial} {name}"


@pytest.mark.parametrize("which", [0, 3, 8, 11])
def test_another_model_in_a_stack_changes_nothing_for_its_neighbours(which: int, undisturbed: list[Learner]) -> None:
    learners, batches = build([config_of("imbalanced", method) for method in MIXED])
    with torch.no_grad():
        for theta in learners[which].model.parameters():
            theta.mul_(1.5)
    train(stacked(learners, batches), batches)
    for place, (one, other) in enumerate(zip(learners, undisturbed, strict=True)):
        if place != which:
            assert_untouched(one, other)
        else:
            assert one.outcome.records[-1].loss != other.outcome.records[-1].loss


@pytest.mark.parametrize("which", [0, 5, 8])
def test_a_model_that_diverges_does_not_affect_the_others(which: int, undisturbed: list[Learner]) -> None:
    learners, batches = build([config_of("imbalanced", method) for method in MIXED])
    program = stacked(learners, batches)

    def disturb(moves: int) -> None:
        if moves == 4:  # in the first epoch, after a few pieces
            with torch.no_grad():
                next(learners[which].model.parameters())[0].fill_(float("nan"))

    train(program, batches, disturb)
    for place, (one, other) in enumerate(zip(learners, undisturbed, strict=True)):
        if place != which:
            assert_untouched(one, other)
    lost = learners[which].outcome.diverged
    assert lost is not None
    assert lost.task == 0
    assert 0 < lost.step < 8
    assert learners[which].outcome.rows == []
    assert program.finite().tolist() == [place != which for place in range(len(learners))]


def test_the_order_of_models_does_not_matter() -> None:
    configs = [config_of("split", method, epochs=1) for method in MIXED]
    found = []
    for order in (configs, configs[::-1]):
        learners, batches = build(order)
        train(stacked(learners, batches), batches)
        found.append({(learner.config.method, learner.trial): learner for learner in learners})
    for key, learner in found[0].items():
        assert_close(learner, found[1][key])


# --- kept and continued


@pytest.mark.parametrize("stop_at", [(0, 0, 2), (1, 0, 3), (1, 0, 0), (1, 1, 1)])
def test_a_stack_resumes_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: tuple[int, int, int]
) -> None:
    monkeypatch.setattr("engram.engine.in_process.choose_program", lambda *given: choose_program(*given[:2], GPU))
    configs = [config_of("imbalanced", method, batch_size=8) for method in ("dhp+si", "ewc", "finetune")]

    def learn(checkpoints: CheckpointFolder | None) -> list:
        saved = {} if checkpoints is None else {"checkpoints": checkpoints.path, "seconds_between": 0}
        results = run_on(configs, [small_digits(60, 30)], Runtime("cpu", "float64"), **saved)
        return [(r.accuracy.tobytes(), r.untrained.tobytes(), repr(r.dynamics)) for r in results]

    straight = learn(None)
    with interrupted(lambda position: position == stop_at):
        learn(CheckpointFolder(tmp_path, seconds_between=0))
    assert learn(CheckpointFolder(tmp_path)) == straight


def test_a_model_in_a_stack_is_saved_and_loaded_like_any_other() -> None:
    learners, batches = build([config_of("split", method, epochs=1) for method in ("dhp+si", "finetune")])
    program = stacked(learners, batches)
    train(program, batches)
    (section,) = program.sections
    kept = {name: tensor.clone() for name, tensor in learners[2].model.state_dict().items()}
    assert all(torch.equal(kept[name], theta[2]) for name, theta in section.rows.parameters.items())
    accuracy = program.evaluate([0])[:, 0].tolist()
    learners[2].model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in kept.items()})
    assert not section.rows.parameters["head.weight"][2].any()
    assert section.rows.parameters["head.weight"][3].any()
    learners[2].model.load_state_dict(kept)
    assert program.evaluate([0])[:, 0].tolist() == accuracy
    fresh = build([config_of("split", "dhp+si")])[0][0].model
    fresh.load_state_dict(kept)
    inputs = example_of(batches)[0]
    assert torch.equal(fresh.eval()(inputs), learners[2].model.eval()(inputs))


def test_a_stack_follows_the_path_of_si_in_the_penalty_s_own_tensors() -> None:
    learners, batches = build([config_of("split", method, epochs=1) for method in ("si", "dhp+si", "mas")])
    program = stacked(learners, batches)
    program.begin_task(0)
    (section,) = program.sections
    step = section.steps["head.weight"]
    assert step.followed.tolist() == [0, 1, -1, 2, 3, -1]
    step.path[1].fill_(7.0)
    assert (learners[1].penalty.state["path.head.weight"] == 7).all()
    assert not learners[0].penalty.state["path.head.weight"].any()
    alpha = section.steps["head.alpha"]
    assert alpha.followed.tolist() == [0, -1, -1, 1, -1, -1], "a matched head's second weights are slow"


# --- what can be mapped, and what cannot


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 10)
        self.norm = nn.BatchNorm1d(10)
        self.second = nn.Linear(10, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(inputs.flatten(1)))))


class Tied(nn.Module):
    """One weight, used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(256, 9)
        self.again = nn.Linear(9, 9)
        self.more = nn.Linear(9, 9)
        self.more.weight = self.again.weight
        self.more.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.more(torch.relu(self.again(torch.relu(self.enter(inputs.flatten(1))))))


class Unused(nn.Module):
    """A parameter and layers that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 8)
        self.idle = nn.Linear(8, 8)
        self.vain = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(inputs.flatten(1)))
        self.vain(hidden)
        return hidden


class Choosy(nn.Module):
    """Looks at values to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs.flatten(1))
        return torch.relu(hidden) if inputs.sum() > 0 else torch.tanh(hidden)


class Replacing(nn.Module):
    """Counts its calls in a buffer that it replaces rather than writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        return torch.tanh(self.layer(inputs.flatten(1)))


@pytest.mark.parametrize("make", [BatchNormed, Tied, Unused])
def test_a_custom_module_is_mapped(make: type[nn.Module]) -> None:
    configs = [config_of("custom", method, network="custom") for method in ("finetune", "dhp+si", "dhp+mas", "ewc")]
    found = []
    for kind in ("one by one", "stack"):
        learners, batches = build(configs, make)
        program: Program = stacked(learners, batches) if kind == "stack" else OneByOne(learners, batches)
        train(program, batches)
        found.append(learners)
    for one, other in zip(*found, strict=True):
        assert_close(one, other)
    if make is BatchNormed:
        norm = found[0][0].model.features.norm
        assert int(norm.num_batches_tracked) == 2 * (2 + 2)
        assert norm.running_mean.any()


@pytest.mark.parametrize(
    ("make", "words"),
    [(Choosy, "data-dependent control flow"), (Replacing, "replaces its buffer 'features.calls'")],
)
def test_a_module_that_cannot_be_mapped_says_why_and_trains_one_by_one(make: type[nn.Module], words: str) -> None:
    configs = [config_of("custom", method, network="custom", epochs=1) for method in ("dhp+si", "finetune")]
    learners, batches = build(configs, make)
    before = [state_of(learner) for learner in learners]
    (group,) = architectures(learners)
    reason = reason_against_mapping(group, example_of(batches), None)
    assert reason is not None
    assert words in reason
    for learner, state in zip(learners, before, strict=True):  # it was found out on copies
        assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(learner).items())
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, OneByOne)
    assert [note for note in notes if note.startswith("dhp+si, finetune: cannot be stacked and train one by one")]
    train(program, batches)
    others, batches = build(configs, make)
    train(OneByOne(others, batches), batches)
    for one, other in zip(learners, others, strict=True):
        assert_untouched(one, other)


def test_kernels_that_fail_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is too small or too old for one of them; Triton's errors are of its own classes."""

    class CompilationError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise CompilationError("out of resource: shared memory")

    kernels = ModuleType("kernels")
    vars(kernels).update(take_step=fail, cross_entropy=fail, multiply=fail, activate=fail, compiled_ahead=nullcontext)
    monkeypatch.setattr(choose, "load_kernels", lambda dtype: kernels)
    configs = [config_of("custom", method, epochs=1) for method in ("dhp+si", "finetune")]
    learners, batches = build(configs)
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped)
    assert program.kernels is None
    assert notes == [
        "dhp+si, finetune: train without Triton's kernels, which takes longer, "
        "because PyTorch cannot map the model (out of resource: shared memory)"
    ]
    train(program, batches)
    others, batches = build(configs)
    train(OneByOne(others, batches), batches)
    for one, other in zip(learners, others, strict=True):
        assert_close(one, other)


def test_a_lack_of_memory_is_no_reason_against_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(choose.Section, "step", full)
    learners, batches = build([config_of("custom", "finetune")])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        choose_program(learners, batches, GPU)


def test_a_lack_of_memory_is_no_reason_against_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(RehearsalSection, "rehearse", full)
    learners, batches = build([config_of("split", "linear+replay", memory_size=6)])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        choose_program(learners, batches, GPU)


@pytest.mark.parametrize("methods", [("linear", "dhp", "linear+mas"), ("matched", "linear", "dhp", "matched+si")])
def test_one_head_of_each_kind_is_tried_before_a_stack_trains(
    monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...]
) -> None:
    tried: set[str] = set()
    made = choose._section_of_copies

    def section(learners: Sequence[Learner], kernels: ModuleType | None) -> Section:
        tried.update(learner.config.head for learner in learners)
        return made(learners, kernels)

    monkeypatch.setattr(choose, "_section_of_copies", section)
    stacked(*build([config_of("custom", method) for method in methods]))
    assert tried == {method.partition("+")[0] for method in methods}


@pytest.mark.parametrize("method", ["matched", "matched+replay"])
def test_matched_heads_with_constant_traces_of_their_own_are_each_alone(method: str) -> None:
    """The first and the last have the same, and another learning rate, as those have that are tried before."""
    more = {"memory_size": 6} if "replay" in method else {}
    traces, rates = (1.0, 3.0, 1.0), (0.01, 0.01, 0.02)
    compare(
        [
            config_of("split", method, epochs=1, trials=1, baseline_trace=trace, learning_rate=rate, **more)
            for trace, rate in zip(traces, rates, strict=True)
        ]
    )


def test_models_of_which_all_diverged_are_not_called_as_one() -> None:
    """Whether they could be is not known: a custom model among them may not be mapped at all."""
    learners, batches = build([config_of("custom", method) for method in ("dhp", "steady")])
    for learner in learners:
        if learner.config.head == "steady":
            learner.outcome.diverged = Divergence(learner.trial, 0, 0)
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, SideBySide)
    assert [type(part) for part in program.programs] == [Mapped, OneByOne]
    assert notes[-1] == "steady: cannot be stacked and train one by one, because all of its trials have diverged"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_parameter_that_is_not_trained_stays_though_its_gradient_is_infinite(optimizer: str) -> None:
    """As the α that a plain head has in a stack: a step of 0 times infinity would not be none."""
    learners, _ = build([config_of("custom", method, optimizer=optimizer, trials=1) for method in ("linear", "dhp")])
    rows = Rows([learner.model for learner in learners])
    alpha = rows.parameters["head.alpha"]
    take_step(alpha, torch.full_like(alpha, math.inf), steps_of(learners, rows)["head.alpha"])
    assert not alpha[0].any()
    assert not alpha[1].isfinite().all()


def test_a_batch_that_a_stack_cannot_train_on_is_one_sentence() -> None:
    def features() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.01))

    config = config_of("split", "linear", network="custom", batch_size=4, trials=1)
    learners, batches = build([config, config.replace(learning_rate=0.02)], features)
    sizes = {len(task.train) % 4 for task in batches.streams[0]}
    assert 1 in sizes
    with pytest.raises(InputError, match=r"the model of linear cannot train in task \d, on a batch of 1: Expected"):
        train(stacked(learners, batches), batches)


def test_kernels_are_compiled_for_one_batch_of_each_kind() -> None:
    stream = custom_stream(num_train=21, more=7, shape=(1, 4, 4))  # tasks of 21 samples and more
    batches = Batches([0], [stream], 0, torch.float32)
    samples = [len(task.train) for task in stream]
    assert len(set(samples)) > 1
    for largest in (5, 8, 16, 20):
        kinds = {(size, size % 16 == 0) for size in choose._sizes(batches, largest)}
        assert (largest, largest % 16 == 0) in kinds
        assert {size for size, _ in kinds} <= {largest, *(number % largest for number in samples)} - {0}
    same = Batches([0], [custom_stream(num_train=21, more=0, shape=(1, 4, 4))], 0, torch.float32)
    assert choose._sizes(same, 16) == [5, 16]


class Watching(MAS):
    """Steps as MAS does, and counts the steps."""

    seen = 0

    def after_step(self) -> None:
        self.seen += 1


class Scaled(MAS):
    """An importance of its own, with a number and a word of its own for each model."""

    def __init__(self, model: nn.Module, *, strength: float, scale: float, kind: str = "up"):
        super().__init__(model, strength=strength)
        self.scale = scale
        self.kind = kind

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        factor = settings["scale"] if settings["kind"] == "up" else 1 / settings["scale"]
        return {
            name: factor * omega
            for name, omega in super().importance(model, parameters, state, settings, batches, classes).items()
        }


class Looking(MAS):
    """An importance that looks at values."""

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        found = super().importance(model, parameters, state, settings, batches, classes)
        return {name: omega / float(omega.max() + 1) for name, omega in found.items()}


class Growing(MAS):
    """An importance that depends on what was remembered before."""

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        found = super().importance(model, parameters, state, settings, batches, classes)
        for term in terms_of(state):
            found = {name: omega + 0.5 * term.importance[name] for name, omega in found.items()}
        return found


class Held(MAS):
    """An importance by a tensor of the state, another one for each model."""

    def __init__(self, model: nn.Module, *, strength: float, factor: float):
        super().__init__(model, strength=strength)
        self.state = {"factor": torch.tensor(factor, dtype=torch.float64)}

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        return {
            name: state["factor"] * omega
            for name, omega in super().importance(model, parameters, state, settings, batches, classes).items()
        }


class Halving(MAS):
    """A consolidation of its own."""

    def consolidate(self, batches: Iterable[Any], classes: Sequence[int] | None = None) -> None:
        found = self.importance(self.model, self.parameters, self.state, self.settings, batches, classes)
        self.remember({name: omega / 2 for name, omega in found.items()})


def with_penalties(make: Sequence[Callable[[nn.Module], Penalty]]) -> tuple[list[Learner], Batches]:
    """A learner of each trial for each of the penalties, beside one with its own."""
    configs = [config_of("custom", "dhp+mas", strength=0.5 + i) for i in range(len(make) + 1)]
    learners, batches = build(configs)
    for place, learner in enumerate(learners):
        kind = place % len(configs)
        if kind < len(make):
            learner.penalty = make[kind](learner.model)
    return learners, batches


def test_a_penalty_that_looks_at_each_step_trains_one_by_one_beside_a_stack() -> None:
    make = [lambda model: Watching(model, strength=0.5)]
    learners, batches = with_penalties(make)
    assert [len(group) for group in architectures(learners)] == [2, 2]
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, SideBySide)
    assert [type(part) for part in program.programs] == [Mapped, OneByOne]
    assert "Watching defines its own `after_step`" in notes[-1]
    train(program, batches)
    others, batches = with_penalties(make)
    train(OneByOne(others, batches), batches)
    for one, other in zip(learners, others, strict=True):
        assert_close(one, other)
    assert [learner.penalty.seen for learner in learners if isinstance(learner.penalty, Watching)] == [8, 8]


@pytest.mark.parametrize(
    "make",
    [
        [lambda m: Scaled(m, strength=0.5, scale=3.0), lambda m: Scaled(m, strength=0.5, scale=9.0)],
        [lambda m: Scaled(m, strength=1, scale=3.0), lambda m: Scaled(m, strength=1, scale=3.0, kind="down")],
        [lambda m: Looking(m, strength=0.5)],
        [lambda m: Growing(m, strength=0.5), lambda m: Growing(m, strength=3.0)],
        [lambda m: Held(m, strength=0.5, factor=2.0), lambda m: Held(m, strength=0.5, factor=8.0)],
        [lambda m: EWC(m, strength=5.0, labels="sampled", seed=3)],
        [lambda m: EWC(m, strength=5.0, labels="exact")],
        [lambda m: Halving(m, strength=0.5)],
    ],
    ids=["number", "word", "values", "terms", "tensor", "sampled", "exact", "consolidate"],
)
def test_a_penalty_s_own_importance_is_right_in_a_stack(make: list[Callable[[nn.Module], Penalty]]) -> None:
    learners, batches = with_penalties(make)
    program, notes = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped)
    train(program, batches)
    others, batches = with_penalties(make)
    train(OneByOne(others, batches), batches)
    for one, other in zip(learners, others, strict=True):
        assert_close(one, other)
    assert [*notes[1:], *program.notes] == []  # the first is about Triton


class Overflowing(MAS):
    """Importances that are not finite, though the weights are."""

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None) -> dict[str, Tensor]:
        return {name: torch.full_like(theta, float("inf")) for name, theta in parameters.items()}


def test_a_model_of_a_stack_diverges_if_its_importances_are_not_finite() -> None:
    learners, batches = with_penalties([lambda m: Overflowing(m, strength=0.5)])
    program, _ = choose_program(learners, batches, GPU)
    assert isinstance(program, Mapped)
    train(program, batches)
    overflowing = [isinstance(learner.penalty, Overflowing) for learner in learners]
    assert [not learner.learning for learner in learners] == overflowing


def test_learners_are_grouped_by_what_can_be_called_as_one() -> None:
    base = config_of("split", "finetune", trials=1)
    configs = [
        base,
        config_of("split", "linear", trials=1),
        config_of("split", "linear", trials=1, head_bias=True),
        config_of("split", "dhp+si", trials=1, strength=3.0, eta=0.5, learning_rate=0.5, xi=1.0),
        config_of("split", "dhp", trials=1, alpha="uniform"),
        config_of("split", "dhp", trials=1, eta_range="unbounded"),
        base.replace(hidden=[7]),
        base.replace(leaky_slope=0.5),
        config_of("split", "ewc", trials=1, penalty_step="gradient"),
    ]
    learners, _ = build(configs)
    place = {id(learner): i for i, learner in enumerate(learners)}
    groups = [[place[id(learner)] for learner in group] for group in architectures(learners)]
    assert sorted(groups) == [[0, 1, 3, 8], [2], [4], [5], [6], [7]]


# --- parts


def models(num: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(num)]


def test_rows_and_models_are_views_of_each_other() -> None:
    own = models()
    before = copy.deepcopy(own)
    rows = Rows(own)
    assert list(rows.parameters) == [name for name, _ in own[0].named_parameters()]
    assert list(rows.buffers) == [name for name, _ in own[0].named_buffers()]
    for row, (model, twin) in enumerate(zip(own, before, strict=True)):
        for name, theta in twin.named_parameters():
            assert torch.equal(rows.parameters[name][row], theta)
        with torch.no_grad():
            model[0].weight.fill_(row)
    assert rows.parameters["0.weight"][:, 0, 0].tolist() == [0, 1, 2]
    rows.parameters["2.bias"][1].fill_(5.0)
    assert (own[1][2].bias == 5).all()
    assert not (own[0][2].bias == 5).any()
    own[2].train()(torch.rand(6, 3))
    assert rows.buffers["1.num_batches_tracked"].tolist() == [0, 0, 1]
    assert all(isinstance(theta, nn.Parameter) and theta.requires_grad for theta in own[0].parameters())
    rows.buffers["1.running_mean"][1, 0] = float("inf")
    assert rows.finite().tolist() == [True, False, True]
    with torch.no_grad():
        own[0][0].weight[0, 0] = float("nan")
    assert rows.finite().tolist() == [False, False, True]


def test_a_tied_weight_stays_tied_in_rows() -> None:
    own = [Tied() for _ in range(2)]
    rows = Rows(own)
    assert "again.weight" in rows.parameters
    assert "more.weight" not in rows.parameters
    rows.parameters["again.weight"][1].zero_()
    assert own[1].more.weight is own[1].again.weight
    assert not own[1].more.weight.any()
    assert own[0].more.weight.any()


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(),
    ],
)
def test_rows_refuse_unlike_models(other: nn.Module) -> None:
    with pytest.raises(InputError, match="differ in the names or shapes"):
        Rows([*models(1), other])


def test_a_step_is_what_its_formula_says() -> None:
    torch.manual_seed(0)
    theta, gradient = torch.rand(4, 2, 3, dtype=torch.float64), torch.rand(4, 2, 3, dtype=torch.float64)
    gain, shift, path = (torch.rand(2, 2, 3, dtype=torch.float64) for _ in range(3))
    step = Step(
        rate=torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float64),
        proximal=torch.tensor([1, 1, 0, 0], dtype=torch.int32),
        gain=gain,
        shift=shift,
        held=torch.tensor([-1, 0, 1, -1], dtype=torch.int32),
        path=path.clone(),
        followed=torch.tensor([-1, 1, 0, -1], dtype=torch.int32),
    )
    taken = theta.clone()
    take_step(taken, gradient, step)
    expected = [
        theta[0] - 0.1 * gradient[0],
        gain[0] * (theta[1] - 0.2 * gradient[1]) + shift[0],
        gain[1] * theta[2] + shift[1] - 0.3 * gradient[2],
        theta[3],
    ]
    torch.testing.assert_close(taken, torch.stack(expected))
    torch.testing.assert_close(step.path[1], path[1] - gradient[1] * (expected[1] - theta[1]))
    torch.testing.assert_close(step.path[0], path[0] - gradient[2] * (expected[2] - theta[2]))
    some = theta[1:3].clone()
    take_step(some, gradient[1:3], step[1:3])
    torch.testing.assert_close(some, torch.stack(expected[1:3]))


def test_a_weight_that_was_frozen_since_is_not_pulled() -> None:
    learners, _ = build([config_of("split", "mas", epochs=1)])
    for learner in learners:
        penalty = learner.penalty
        penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    learners[0].model.features[1].requires_grad_(False)
    rows = Rows([learner.model for learner in learners])
    step = steps_of(learners, rows)["features.1.weight"]
    assert step.held.tolist() == [-1, 0]
    assert step.rate.tolist() == [0, learners[1].config.learning_rate]


def test_steps_have_rows_only_for_models_that_need_them() -> None:
    learners, batches = build([config_of("custom", m, trials=1) for m in ("finetune", "mas", "dhp+si", "ewc", "dhp")])
    program = stacked(learners, batches)
    (section,) = program.sections
    steps = steps_of(learners, section.rows)
    assert steps["features.1.weight"].held.tolist() == [-1] * 5
    assert steps["head.eta"].rate.tolist() == [0.0, 0.0, 0.01, 0.0, 0.01], "a matched head has no η to train"
    program.begin_task(0)
    program.consolidate(0)
    steps = steps_of(learners, section.rows)
    assert steps["features.1.weight"].held.tolist() == [-1, 0, 1, 2, -1]
    assert steps["features.1.weight"].gain.shape == (3, 12, 256)
    assert steps["features.1.weight"].followed.tolist() == [-1, -1, 0, -1, -1]
    assert steps["head.alpha"].held.tolist() == [-1, 0, -1, 1, -1], "a trace's coefficients are left free"
    assert steps["head.alpha"].path.numel() == 0
    pull = learners[3].penalty.pull(0.01, "proximal")
    assert torch.equal(steps["head.alpha"].gain[1], pull.gain["head.extra"])
    assert torch.equal(steps["head.alpha"].shift[1], pull.shift["head.extra"])


def test_a_portion_is_halved_until_it_fits_and_stays_so() -> None:
    notes: list[str] = []
    portion = Portion(100, "an evaluation", notes)
    tried = []

    def work(at_once: int) -> str:
        tried.append(at_once)
        if at_once > 6:
            raise torch.cuda.OutOfMemoryError("no more")
        return "done"

    assert portion.fitting(work, 4) == "done"
    assert tried == [25, 12, 6]
    assert notes == [
        f"an evaluation takes {count} samples at a time, as more do not fit into memory" for count in (12, 6)
    ]
    tried.clear()
    assert portion.fitting(work, 4) == "done"
    assert tried == [6]
    assert len(notes) == 2
    tried.clear()
    assert portion.fitting(work, 1000) == "done"
    assert tried == [1], "never less than one"

    def hopeless(at_once: int) -> None:
        raise torch.cuda.OutOfMemoryError("never")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        portion.fitting(hopeless, 4)


def test_importances_that_do_not_fit_take_fewer_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [config_of("permuted", method, epochs=1) for method in ("dhp+mas", "ewc", "si")]
    whole, batches = build(configs)
    train(stacked(whole, batches), batches)

    def consolidate(learner: Learner, task: Any, dtype: torch.dtype, samples_at_once: int) -> bool:
        if samples_at_once > 20:
            raise torch.cuda.OutOfMemoryError("too large")
        return consolidate_alone(learner, task, dtype, samples_at_once)

    monkeypatch.setattr(stack_program, "consolidate_alone", consolidate)
    parts, batches = build(configs)
    program = stacked(parts, batches)
    train(program, batches)
    for one, other in zip(whole, parts, strict=True):
        assert_close(one, other)
    assert program.weighed.samples == 16
    assert program.notes[-1] == "an importance takes 16 samples at a time, as more do not fit into memory"


def test_a_stack_does_not_import_pytorch_s_compiler() -> None:
    """It takes seconds to import, which `torch.func.grad` does."""
    code = """
import sys
import torch
import engram
from builders import custom_stream
from engram.data.batches import move_streams
from engram.engine.build import build_learner
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.rehearsal import RehearsalSection
from engram.engine.loop import run_stream
from engram.engine.program import Batches

stream = custom_stream(num_train=21, more=7, shape=(1, 4, 4))
quick = {"epochs": 1, "batch_size": 7, "num_tasks": 2, "trials": 1, "hidden": [9]}
configs = [engram.preset("custom", m, strength=1.0).replace(**quick) for m in ("dhp+si", "online-ewc", "mas")]
learners = [build_learner(c, 0, stream.input_shape, 3, torch.device("cpu"), torch.float32) for c in configs]
batches = Batches([0], move_streams([stream], torch.device("cpu")), 0, torch.float32)
program = Mapped([learners[:1], learners[1:]], batches, None)
run_stream(program, batches, configs[0])
print("torch._dynamo" in sys.modules)
"""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_an_evaluation_and_importances_in_small_portions_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [config_of("permuted", method, epochs=1) for method in ("dhp+mas", "ewc", "dhp")]
    whole, batches = build(configs)
    train(stacked(whole, batches), batches)
    parts, batches = build(configs)
    program = stacked(parts, batches)
    evaluate = type(program.sections[0]).logits

    def logits(self: Any, inputs: Tensor, *more: Any) -> Tensor:
        if inputs.shape[-4] > 13:
            raise torch.cuda.OutOfMemoryError("too large")
        return evaluate(self, inputs, *more)

    monkeypatch.setattr(type(program.sections[0]), "logits", logits)
    program.weighed.samples = 7
    train(program, batches)
    for one, other in zip(whole, parts, strict=True):
        assert_close(one, other)
    assert program.notes
    assert all(note.startswith("an evaluation takes") for note in program.notes)


def test_an_evaluation_calls_each_section_as_seldom_as_its_size_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has a price of its own, so how many samples it gets depends on its section, not on the whole stack."""
    learners, batches = build([config_of("custom", m) for m in ("dhp", "dhp+si", "matched", "steady", "fast-weights")])
    program = stacked(learners, batches)
    sizes = [len(section) for section in program.sections]
    assert sorted(sizes) == [2, 2, 6]
    number = len(batches.tasks(0)[0].test)
    program.evaluated.samples = max(sizes) * -(-number // 3)
    calls = []
    call = type(program.sections[0]).logits

    def logits(self: Any, inputs: Tensor, *more: Any) -> Tensor:
        calls.append(len(self))
        return call(self, inputs, *more)

    monkeypatch.setattr(type(program.sections[0]), "logits", logits)
    program.evaluate([0], 1)
    assert sorted(calls) == sorted(3 * sizes)


# --- memory


def test_what_a_learner_takes_grows_with_all_it_consists_of() -> None:
    def size(kind: str, method: str, **changes: object) -> int:
        learners, batches = build([config_of(kind, method, trials=1, **changes)])
        return bytes_of(learners[0], example_of(batches)[0])

    assert (
        size("custom", "finetune")
        < size("custom", "finetune", hidden=[24])
        < size("custom", "finetune", hidden=[24, 24])
    )
    assert size("custom", "finetune") < size("custom", "mas") < size("custom", "si")
    assert size("permuted", "ewc", num_tasks=2) < size("permuted", "ewc", num_tasks=9)
    assert size("custom", "dhp", batch_size=16) < size("custom", "dhp", batch_size=64)
    assert size("custom", "dhp") < size("custom", "dhp", network="cnn")
    (free,), batches = build([config_of("custom", "dhp", trials=1)])
    weights, trace = (sum(tensor.nbytes for tensor in own()) for own in (free.model.parameters, free.model.buffers))
    largest = max(theta.nbytes for theta in free.model.parameters())
    of_step = bytes_of_step(free, example_of(batches)[0])
    assert size("custom", "dhp") == 2 * weights + trace + largest + of_step, "two tensors the size of the weights"


def test_data_that_trials_share_count_once() -> None:
    sizes = [bytes_of_data(build([config_of("permuted", "dhp", trials=trials)])[1]) for trials in (1, 3)]
    assert sizes[0] == sizes[1] == (40 + 30) * (784 + 8)


def test_a_stack_is_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [config_of("permuted", method, trials=1) for method in ("finetune", "si")]

    def limit(free: int | None) -> int | None:
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        built = (build([config]) for config in configs)
        return largest_stack(((learners[0], batches) for learners, batches in built), CPU)

    learners, batches = build([configs[1]])
    one = bytes_of(learners[0], example_of(batches)[0])
    assert limit(None) is None
    assert limit(0) == 1
    assert limit(bytes_of_data(batches) + int(10.1 * one / memory.SHARE_OF_MEMORY)) == 10
    limits = [limit(free) for free in range(0, 10**8, 10**7)]
    assert limits == sorted(limits)
    free = bytes_of_data(batches) + 1000 * one
    most = limit(free)
    assert most is not None
    assert 500 * one <= most * one < 0.95 * free, "a stack leaves room for what else takes memory"


def test_an_experiment_that_does_not_fit_is_divided_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [config_of("permuted", method, epochs=1, trials=3) for method in ("finetune", "dhp+si")]
    seen: list[Progress] = []
    whole = run_on(configs, [small_digits(40, 30)], Runtime("cpu", "float64"))
    learners, batches = build([configs[1].replace(trials=1)])
    room = bytes_of_data(batches) + int(2.5 * bytes_of(learners[0], example_of(batches)[0]) / memory.SHARE_OF_MEMORY)
    monkeypatch.setattr(memory, "free_bytes", lambda device: room)
    divided = run_on(configs, [small_digits(40, 30)], Runtime("cpu", "float64"), seen.append)
    assert [progress.note for progress in seen if progress.note] == ["6 models in 3 stacks of 2"]
    for one, other in zip(whole, divided, strict=True):
        assert np.array_equal(one.accuracy, other.accuracy, equal_nan=True)
        assert repr(one.dynamics) == repr(other.dynamics)


def test_free_memory_is_known_where_it_can_be() -> None:
    free = memory.free_bytes(CPU)
    assert free is None or free > 0
    assert memory.free_bytes(torch.device("meta")) is None
    assert choose.load_kernels(torch.float64) is None


def test_without_kernels_the_loss_is_pytorch_s_own() -> None:
    from engram.engine.gpu.layers import cross_entropy

    logits, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([1, 2, 1, 2, 2])
    expected = F.cross_entropy(logits[:, 1:3], targets - 1)
    torch.testing.assert_close(cross_entropy(logits, targets, (1, 2), None), expected)


def test_images_with_three_channels_get_a_fourth() -> None:
    maps = torch.rand(2, 5, 3, 4, 6)
    wider = channels_last(maps, torch.float32, padded=True)
    torch.testing.assert_close(wider[..., :3], maps.movedim(2, -1), rtol=0, atol=0)
    assert wider.is_contiguous()
    assert wider.shape == (2, 5, 4, 6, 4)
    assert not wider[..., 3].any()
    assert channels_last(maps[:, :, :2], torch.float32, padded=True).shape == (2, 5, 4, 6, 2)


def test_a_capture_minds_its_own_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others draw the next order into pinned memory meanwhile, which would else spoil the capture."""
    asked: list[dict[str, Any]] = []
    taken: list[tuple[int, ...]] = []

    @contextmanager
    def graph(captured: object, **options: Any) -> Iterator[None]:
        asked.append(options)
        assert taken == []
        yield
        assert taken == [(0, 2, 16)], "the step is within the capture"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    learners, batches = build([config_of("permuted", "dhp")])
    program = stacked(learners, batches)
    monkeypatch.setattr(program, "_step", lambda *key: taken.append(key))
    program._captured(0, 2, 16)
    assert asked == [{"capture_error_mode": "thread_local"}]
