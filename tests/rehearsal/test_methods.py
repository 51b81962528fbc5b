"""Each reference method does what its equation says, alone, resumed, and with any head."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from direct import STEPS, learn, learn_jointly

import engram
from engram import streams
from engram.config.settings import Config
from engram.data.samples import Stream
from engram.data.scenarios import masked_only_in_evaluation
from engram.engine.build import build_learner
from engram.engine.cpu.program import OneByOne
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches

CPU = torch.device("cpu")
WITHOUT_STATE = ["replay", "der++", "a-gem", "lwf", "pseudo-rehearsal", "generative-replay"]


def tiny_stream(kind: str) -> Stream:
    """Three tasks with two classes each, of 22 to 26 samples in [0, 1]."""
    random = np.random.default_rng(0)

    def samples(count: int, task: int) -> tuple[np.ndarray, np.ndarray]:
        labels = 2 * task + np.arange(count) % 2
        return np.clip(random.uniform(size=(count, 6)) * 0.5 + labels[:, None] / 12, 0, 1), labels

    arrays = [(*samples(22 + 2 * k, k), *samples(8, k)) for k in range(3)]
    own = [(2 * k, 2 * k + 1) for k in range(3)]
    if kind == "task":
        return streams.from_arrays(arrays, classes=own)
    if kind == "all":
        return masked_only_in_evaluation(streams.from_arrays(arrays, classes=own))
    return streams.from_arrays(arrays, classes=[tuple(range(2 * k + 2)) for k in range(3)])  # all classes so far


def config_of(method: str, **changes: Any) -> Config:
    settings = {
        "num_tasks": 3,
        "hidden": [5],
        "epochs": 2,
        "batch_size": 8,
        "memory_size": 9,
        "learning_rate": 0.3,
        "generator_hidden": [5, 4],
        "generator_latent": 3,
        **changes,
    }
    return engram.preset("custom", method).replace(**settings)


def trained(config: Config, stream: Stream) -> tuple[Learner, Learner]:
    """A learner after the stream, and a copy of it from before."""
    learner = build_learner(config, 0, stream.input_shape, stream.num_classes, CPU, torch.float64)
    before = copy.deepcopy(learner)
    batches = Batches([0], [stream], config.seed, torch.float64)
    run_stream(OneByOne([learner], batches), batches, config)
    return learner, before


def assert_near(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["task", "seen", "all"])
@pytest.mark.parametrize("method", WITHOUT_STATE)
def test_method_equals_a_plain_loop(method: str, kind: str) -> None:
    stream, config = tiny_stream(kind), config_of(method, rehearsal_batch=5)
    learner, before = trained(config, stream)
    learn(config, before.model, stream)
    assert_near(learner.model, before.model)


@pytest.mark.parametrize("kind", ["task", "seen"])
def test_generative_replay_with_distillation_equals_a_plain_loop(kind: str) -> None:
    stream, config = tiny_stream(kind), config_of("generative-replay", generator_labels="soft")
    learner, before = trained(config, stream)
    learn(config, before.model, stream)
    assert_near(learner.model, before.model)


@pytest.mark.parametrize("start", ["anew", "continue"])
@pytest.mark.parametrize("steps", ["epochs", "task"])
def test_joint_equals_a_plain_loop_over_all_tasks(start: str, steps: str) -> None:
    stream, config = tiny_stream("task"), config_of("joint", joint_start=start, joint_steps=steps)
    learner, before = trained(config, stream)
    learn_jointly(config, before.model, stream)
    assert_near(learner.model, before.model)


def test_every_method_has_a_plain_loop() -> None:
    from engram.common.registry import REHEARSALS

    assert {*STEPS, "joint"} == set(REHEARSALS.names())
