"""Scenarios in training: the outputs that learn and compete, the same in both programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import custom_stream, run_on, small_digits
from engram import preset, run, streams
from engram.config.settings import Config
from engram.data.batches import read_inputs
from engram.data.scenarios import SCENARIOS, candidates
from engram.engine.build import build_learner, build_streams
from engram.engine.choose import choose_program
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches, Program

QUICK = {"dataset": "mnist-small", "epochs": 1, "batch_size": 8, "num_tasks": 3, "trials": 2, "hidden": [12]}
OWN = {"split-mnist": "task", "permuted-mnist": "domain", "imbalanced-permuted-mnist": "domain"}


def build(configs: list[Config]) -> tuple[list[Learner], Batches]:
    found = build_streams(configs[0], [0, 1], [small_digits(120, 60)])
    shape, num_classes = found[0].input_shape, found[0].num_classes
    cpu = torch.device("cpu")
    learners = [build_learner(c, t, shape, num_classes, cpu, torch.float64) for t in (0, 1) for c in configs]
    return learners, Batches([0, 1], found, 0, torch.float64)


@pytest.mark.parametrize("benchmark", OWN)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_stack_computes_what_each_model_does_alone(benchmark: str, scenario: str) -> None:
    configs = [preset(benchmark, m, scenario=scenario, **QUICK) for m in ("dhp+si", "online-ewc", "mas")]
    found = []
    for device in ("cpu", "cuda"):  # the latter as a word only: the chooser goes by it
        learners, batches = build(configs)
        program, _ = choose_program(learners, batches, torch.device(device))
        assert isinstance(program, OneByOne if device == "cpu" else Mapped)
        run_stream(program, batches, configs[0])
        found.append(learners)
    for alone, stacked in zip(*found, strict=True):
        assert alone.outcome.untrained == stacked.outcome.untrained
        assert alone.outcome.rows == stacked.outcome.rows
        for name, theta in alone.model.state_dict().items():
            torch.testing.assert_close(stacked.model.state_dict()[name], theta, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("benchmark", OWN)
def test_the_benchmarks_own_scenario_changes_nothing(benchmark: str) -> None:
    config = preset(benchmark, "dhp+si", **QUICK)
    plain, named = run_on([config, config.replace(scenario=OWN[benchmark])], [small_digits(120, 60)])
    assert plain.accuracy.tobytes() == named.accuracy.tobytes()
    assert plain.untrained.tobytes() == named.untrained.tobytes()
    assert repr(plain.dynamics) == repr(named.dynamics)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_class_scenario_evaluates_among_the_classes_so_far(device: str) -> None:
    config = preset("split-mnist", "finetune", scenario="class", **QUICK)
    learners, batches = build([config])
    program: Program = choose_program(learners, batches, torch.device(device))[0]
    stream = batches.streams[0]
    for learned in range(4):
        found = program.evaluate(range(3), learned)[0]
        for n in range(3):
            among = candidates(stream, n, learned)
            assert len(among) == 2 * max(n + 1, learned)
            logits = learners[0].model.eval()(read_inputs(stream[n].test.inputs, dtype=torch.float64))
            guess = torch.tensor(among)[logits[:, list(among)].argmax(dim=1)]
            assert found[n] == (guess == stream[n].test.targets).double().mean()


def test_outputs_of_classes_to_come_do_not_learn() -> None:
    config = preset("split-mnist", "finetune", baseline_head="linear", scenario="class", **QUICK)
    learners, batches = build([config])
    before = learners[0].model.head.weight.detach().clone()
    program = OneByOne(learners, batches)
    run_stream(program, batches, config)
    moved = (learners[0].model.head.weight != before).any(dim=1)
    assert moved.tolist() == [True] * 6 + [False] * 4


def test_a_custom_stream_is_run_in_a_scenario_of_the_config_or_of_its_own() -> None:
    stream = custom_stream()
    config = preset("custom", "si", epochs=1, trials=1, hidden=[8], strength=1.0, network="mlp")
    by_config = run(config.replace(scenario="class"), stream=stream, device="cpu")
    by_stream = run(config, stream=streams.in_scenario(stream, "class"), device="cpu")
    assert by_config.config.scenario == by_stream.config.scenario == "class"
    np.testing.assert_array_equal(by_config.accuracy, by_stream.accuracy)
