"""Optimizers: those of PyTorch to the last digit, in every program, with every penalty, and through a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from builders import assert_results_equal, assert_tensors_equal, custom_stream, run_on, small_digits
from engram import preset
from engram.common.errors import Stopped
from engram.config.effect import has_effect
from engram.config.settings import Config
from engram.data.batches import read_inputs
from engram.engine.build import build_learner
from engram.engine.choose import architectures, choose_program
from engram.engine.cpu.descent import descent_of
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.memory import bytes_of
from engram.engine.optimizer import Optimizer, check_state
from engram.engine.program import Batches

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # the latter only as a word: the tensors stay on the CPU
ADAM = {"optimizer": "adam", "learning_rate": 2e-3, "beta1": 0.8, "beta2": 0.99, "adam_eps": 1e-6}
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.02},
    "momentum and decay": {"momentum": 0.8, "weight_decay": 0.02},
    "adam": {"optimizer": "adam", "learning_rate": 2e-3},
    "adam and decay": {**ADAM, "weight_decay": 0.02},
    "adamw": {**ADAM, "optimizer": "adamw", "weight_decay": 0.1},
}


def of_torch(config: Config, parameters: Any) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        numbers = {"momentum": config.momentum, "weight_decay": config.weight_decay}
        return torch.optim.SGD(parameters, lr=config.learning_rate, **numbers)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    betas = (config.beta1, config.beta2)
    return kind(parameters, config.learning_rate, betas, config.adam_eps, config.weight_decay)


def config_of(method: str = "finetune", **changes: Any) -> Config:
    settings = {"epochs": 2, "batch_size": 7, "num_tasks": 2, "trials": 2, "hidden": [9], **changes}
    strength = {} if method in ("finetune", "dhp", "slda") else {"strength": 30.0}
    return preset("custom", method, **strength).replace(**settings)


def build(*configs: Config) -> tuple[list[Learner], Batches]:
    """Learners in the order of a stack, and what they learn, in float64."""
    trials = list(range(configs[0].trials))
    stream = custom_stream(num_train=21, more=7, shape=(1, 4, 4))
    learners = [build_learner(c, t, stream.input_shape, 3, CPU, torch.float64) for t in trials for c in configs]
    return learners, Batches(trials, [stream] * len(trials), configs[0].seed, torch.float64)


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    return {
        **{f"model.{name}": tensor.clone() for name, tensor in learner.model.state_dict().items()},
        **{f"penalty.{name}": tensor.clone() for name, tensor in learner.penalty.state_dict().items()},
        **{f"optimizer.{name}": tensor.clone() for name, tensor in learner.optimizer_state.items()},
    }


# --- against torch.optim


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_fifty_steps_are_those_of_pytorch(settings: dict[str, Any], dtype: torch.dtype) -> None:
    config, random = config_of(**settings), torch.Generator().manual_seed(0)
    ours = torch.randn(5, 3, generator=random, dtype=dtype)
    theirs = nn.Parameter(ours.clone())
    optimizer, reference = Optimizer.of(config), of_torch(config, [theirs])
    state = optimizer.state_for({"weight": ours})
    for _ in range(50):
        theirs.grad = torch.randn(5, 3, generator=random, dtype=dtype) + 0.1
        kept = theirs.grad.clone()
        optimizer.step(ours, theirs.grad, optimizer.slots_of("weight", state))
        assert torch.equal(theirs.grad, kept), "the gradient is not changed"
        reference.step()
        assert torch.equal(ours, theirs.detach())


def plain_loop(config: Config, learner: Learner, batches: Batches) -> Iterator[tuple[int, nn.Module]]:
    """A loop of one's own over the same batches, with torch.optim and the penalty's verbs; yields after each task."""
    model, penalty, optimizer = learner.model, learner.penalty, of_torch(config, learner.model.parameters())
    for n, task in enumerate(batches.tasks(0) + batches.tasks(1)):
        if config.reset_optimizer:
            optimizer = of_torch(config, model.parameters())
        for epoch in range(config.epochs):
            for chosen in batches.orders(n, epoch)[0].split(config.batch_size):
                inputs, targets = task.train.inputs[chosen].double(), task.train.targets[chosen]
                loss = F.cross_entropy(model(inputs, targets), targets)
                optimizer.zero_grad()
                (loss + penalty.loss() if config.penalty_step == "gradient" else loss).backward()
                optimizer.step()
                if config.penalty_step == "proximal":
                    penalty.proximal_step(optimizer)
                penalty.after_step()
        read = [(task.train.inputs.double(), task.train.targets)]
        penalty.consolidate(read)
        yield n, model


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("method", ["finetune", "si", "ewc"])
@pytest.mark.parametrize("settings", [SETTINGS["momentum and decay"], SETTINGS["adam and decay"], SETTINGS["adamw"]])
def test_a_run_is_a_plain_loop_with_torch_optim(
    method: str, settings: dict[str, Any], penalty_step: str, reset: bool
) -> None:
    """SI's path too: it is summed while the optimizer's step and the penalty's pull move the weights."""
    config = config_of(method, trials=1, penalty_step=penalty_step, reset_optimizer=reset, **settings)
    (alone,), batches = build(config)
    (learner,), _ = build(config)
    for _ in plain_loop(config, alone, batches):
        pass
    run_stream(OneByOne([learner], batches), batches, config)
    expected, found = tensors_of(alone), tensors_of(learner)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_weight_at_its_anchor_stays_there_with_adam() -> None:
    """Without a gradient of the loss, the penalty's is exactly 0 there: Adam would make a step of any other."""
    config = config_of("ewc", trials=1, penalty_step="gradient", optimizer="adam")
    (learner,), _ = build(config)
    learner.model.to(torch.float32)
    learner.penalty = engram.EWC(learner.model, strength=37.0)
    form = learner.penalty
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        form.remember({n: torch.rand(t.shape, generator=random) for n, t in form.parameters.items()})
    pull = Optimizer.of(config).pull_of(form, "gradient")
    assert pull is not None
    for name, theta in form.parameters.items():
        assert torch.equal(pull.gain[name] * (theta - pull.shift[name]), torch.zeros_like(theta))


def test_custom_verbs_get_the_same_steps() -> None:
    """A penalty with steps of its own trains with the same optimizer."""

    class Own(engram.MAS):
        def proximal_step(self, learning_rate: Any) -> None:
            super().proximal_step(learning_rate)

    config = config_of(trials=1, **SETTINGS["adamw"])
    ends = []
    for kind in (engram.MAS, Own):
        (learner,), batches = build(config)
        learner.penalty = kind(learner.model, strength=30.0)
        run_stream(OneByOne([learner], batches), batches, config)
        ends.append(tensors_of(learner))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-9, atol=1e-12)


# --- in a stack


@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_in_a_stack_each_is_as_alone(settings: dict[str, Any], penalty_step: str) -> None:
    configs = [
        config_of(method, penalty_step=penalty_step, reset_optimizer=False, **{**settings, **own})
        for method, own in (
            ("finetune", {}),
            ("dhp", {}),
            ("si", {"learning_rate": 3e-3}),
            ("dhp+si", {"protect": "in-force"}),
            ("ewc", {"weight_decay": 0.03}),
        )
    ]
    together, batches = build(*configs)
    program, notes = choose_program(together, batches, GPU)
    assert isinstance(program, Mapped), notes
    run_stream(program, batches, configs[0])
    alone, _ = build(*configs)
    run_stream(OneByOne(alone, batches), batches, configs[0])
    ends = {(learner.config, learner.trial): tensors_of(learner) for learner in program.learners}
    for learner in alone:
        found = ends[learner.config, learner.trial]
        for name, tensor in tensors_of(learner).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_which_models_are_one_section() -> None:
    def sections(*changes: dict[str, Any]) -> int:
        return len(architectures(build(*(config_of(trials=1, **change) for change in changes))[0]))

    assert sections({"optimizer": "adam"}, {"optimizer": "adamw"}) == 2
    assert sections({}, {"momentum": 0.9}) == 2
    assert sections({}, {"weight_decay": 0.1}) == 2, "plain SGD has its own kernel"
    assert sections({"weight_decay": 0.2}, {"weight_decay": 0.1}) == 1
    free = ({"beta1": 0.8}, {"beta2": 0.9}, {"adam_eps": 1e-3}, {"learning_rate": 1.0}, {"momentum": 0.5})
    assert sections(*({"optimizer": "adam", **change} for change in free)) == 1
    assert sections({"reset_optimizer": False}, {"reset_optimizer": True}) == 1
    still = {"method": "slda", "network": "mlp", "random_features": 0}  # there are weights, and none is trained
    kinds = ({"optimizer": "adam"}, {"optimizer": "adamw"}, {"momentum": 0.9}, {"weight_decay": 0.1})
    assert sections(*({**still, **kind} for kind in kinds)) == 4, "each has room for what its optimizer remembers"


def test_where_nothing_is_trained_no_optimizer_changes_anything() -> None:
    changes = [{}, {"optimizer": "adam"}, {"momentum": 0.9}, {"weight_decay": 0.5}, {"learning_rate": 1.0}]
    for device in (CPU, GPU):
        still = {"method": "slda", "network": "mlp", "random_features": 0, "trials": 1}
        learners, batches = build(*(config_of(**still, **change) for change in changes))
        program, _ = choose_program(learners, batches, device)
        run_stream(program, batches, learners[0].config)
        first, *others = [learner.model.state_dict() for learner in program.learners]
        assert first["head.count"].sum() > 0
        for other in others:
            assert_tensors_equal(other, first)


def test_memory_counts_what_the_optimizer_remembers() -> None:
    def size(**settings: Any) -> int:
        learners, batches = build(config_of(trials=1, **settings))
        return bytes_of(learners[0], read_inputs(batches.tasks(0)[0].train[slice(2)].inputs, dtype=batches.dtype))

    weights = sum(theta.nbytes for theta in build(config_of(trials=1))[0][0].model.parameters())
    assert size() == size(weight_decay=0.1)
    assert size(momentum=0.9) == size() + weights
    assert size(optimizer="adam") == size(optimizer="adamw", momentum=0.9) == size() + 2 * weights
    assert size(method="si", optimizer="adam") == size(method="si") + 2 * weights


# --- states


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_new_state_at_each_task_unless_it_is_kept(settings: dict[str, Any]) -> None:
    ends = {}
    for reset in (True, False):
        config = config_of(trials=1, reset_optimizer=reset, **settings)
        (learner,), batches = build(config)
        run_stream(OneByOne([learner], batches), batches, config)
        ends[reset] = learner
    slots = Optimizer.of(config).slots
    if "steps" in slots:  # 21 samples, then 28, in batches of 7, two epochs
        steps = {
            reset: {float(taken) for name, taken in end.optimizer_state.items() if name.startswith("steps.")}
            for reset, end in ends.items()
        }
        assert steps == {True: {8.0}, False: {14.0}}
    weights = [end.model.state_dict()["head.weight"] for end in ends.values()]
    assert torch.equal(*weights) == (not slots), "without a state there is nothing to reset"


class Stop(Exception):
    pass


@pytest.mark.parametrize("program", ["alone", "stacked"])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("settings", [SETTINGS["momentum"], SETTINGS["adamw"]], ids=["momentum", "adamw"])
def test_stopped_and_resumed_is_uninterrupted(
    settings: dict[str, Any], reset: bool, program: str, tmp_path: Path
) -> None:
    from engram.engine.checkpoint import Checkpoints
    from engram.engine.loop import Position
    from engram.engine.stacks import StackPlan

    config = config_of("si", trials=1, reset_optimizer=reset, **settings)
    make: Callable[[list[Learner], Batches], Any] = (
        OneByOne if program == "alone" else lambda learners, batches: choose_program(learners, batches, GPU)[0]
    )
    learners, batches = build(config)
    run_stream(make(learners, batches), batches, config)
    uninterrupted, configs, plan = tensors_of(learners[0]), {"a": config}, StackPlan(("a",), (0,))
    for stop in range(1, 4):
        learners, batches = build(config)
        path, position, seen = tmp_path / f"stack-{stop}.safetensors", Position(), iter(range(1, 10**6))

        def save(task_ended: bool, learners=learners, path=path, position=position, seen=seen, stop=stop) -> None:
            if next(seen) == stop:
                saved = Checkpoints(path)
                saved.save(configs, learners, {("a", 0): learners[0].outcome}, position)
                saved.wait()
                raise Stop

        with pytest.raises(Stop):
            run_stream(make(learners, batches), batches, config, position, save)
        again, batches = build(config)
        found, _ = Checkpoints(path).read(configs, plan)
        assert found is not None
        resumed = found.restore(again, plan.keys)
        run_stream(make(again, batches), batches, config, resumed)
        assert_tensors_equal(tensors_of(again[0]), uninterrupted)


def test_a_run_resumes_from_its_folder(tmp_path: Path) -> None:
    config = preset("split-mnist", "si", dataset="mnist-small", num_tasks=2, epochs=2, hidden=[8], trials=1)
    config = config.replace(**SETTINGS["adamw"], batch_size=10)
    data = [small_digits(120, 60)]
    (expected,) = run_on([config], data)
    asked = iter([False, False, False, *[True] * 1000])
    with pytest.raises(Stopped):
        run_on([config], data, checkpoints=tmp_path / "c", seconds_between=0, stop_asked=lambda: next(asked))
    (found,) = run_on([config], data, checkpoints=tmp_path / "c", seconds_between=0)
    assert_results_equal(found, expected)


# --- settings


def test_settings_without_effect() -> None:
    settings = ("optimizer", "momentum", "weight_decay", "beta1", "beta2", "adam_eps", "reset_optimizer")

    def used(**changes: Any) -> set[str]:
        return {name for name in settings if has_effect(name, config_of(**changes))}

    always = {"optimizer", "weight_decay"}
    assert used() == always | {"momentum"}
    assert used(momentum=0.9) == always | {"momentum", "reset_optimizer"}
    assert used(optimizer="adam") == always | {"beta1", "beta2", "adam_eps", "reset_optimizer"}
    assert used(optimizer="adamw") == used(optimizer="adam")


def test_plain_sgd_is_what_it_was() -> None:
    """The class that takes its steps is the one of before, with its fused products."""
    (learner,), batches = build(config_of("si", trials=1))
    example = batches.tasks(0)[0].train[slice(2)]
    descent = descent_of(learner, example.inputs.double(), example.targets)
    descent.begin_task((0, 1, 2))
    assert {type(step).__name__ for step in descent.direct_steps.values()} <= {"WeightStep", "FusedStep"}  # type: ignore[attr-defined]
    assert learner.optimizer_state == {}


def test_the_command_line_knows_optimizers(tmp_path: Path) -> None:
    from engram.cli.main import main
    from engram.runs.run import read_run

    quick = ["--dataset", "mnist-small", "--epochs", "1", "--tasks", "2", "--trials", "1", "--methods", "finetune,si"]
    settings = ["optimizer=adam", "learning_rate=0.001", "beta2=0.99", "max_samples=200"]
    chosen = [word for text in settings for word in ("--set", text)]
    with pytest.raises(SystemExit) as ended:
        main(["run", "split-mnist", *quick, *chosen, "--out", str(tmp_path / "run")])
    assert not ended.value.code
    for result in read_run(tmp_path / "run").results.values():
        assert (result.config.optimizer, result.config.beta2) == ("adam", 0.99)


@pytest.mark.parametrize("change", ["another shape", "one missing", "another slot"])
def test_states_of_other_optimizers_are_refused(change: str) -> None:
    (learner,), _ = build(config_of(trials=1, optimizer="adam"))
    state = Optimizer.of(learner.config).state_for(dict(learner.model.named_parameters()))
    assert check_state(learner, state).keys() == state.keys()
    assert check_state(learner, {}) == {}
    if change == "another shape":
        state["mean.head.weight"] = torch.zeros(2, 2)
    elif change == "one missing":
        del state["square.head.weight"]
    else:
        state["velocity.head.weight"] = state.pop("mean.head.weight")
    with pytest.raises(ValueError, match="its optimizers have different tensors"):
        check_state(learner, state)
