"""`benchmarks/mas_of_features.py`: MAS that measures the features."""

from __future__ import annotations

import mas_of_features
import torch
from torch import nn

from engram import LinearSoftmax, preset
from engram.nn.networks import Network
from engram.penalties import MAS


def test_importances_are_of_the_features_alone_and_those_of_their_own_norm() -> None:
    torch.manual_seed(0)
    model = Network(nn.Sequential(nn.Linear(6, 4), nn.LeakyReLU()), LinearSoftmax(4, 3))
    inputs, targets = torch.randn(20, 6), torch.randint(3, (20,))
    penalty = mas_of_features.MASOfFeatures(model, strength=1.0)
    penalty.consolidate([(inputs[:7], targets[:7]), (inputs[7:], targets[7:])], [0, 1])
    found = penalty.terms[-1].importance
    expected = MAS(model.features, strength=1.0)  # whose outputs are the features
    expected.consolidate([(inputs, targets)])
    for name, omega in expected.terms[-1].importance.items():
        torch.testing.assert_close(found[f"features.{name}"], omega)
        assert omega.any()
    assert not found["head.weight"].any()


def test_a_run_with_mas_itself_is_that_of_the_preset_and_one_with_the_features_is_another() -> None:
    small = {"dataset": "mnist-small", "trials": 1, "epochs": 5, "num_tasks": 2, "max_samples": 900}
    config = preset("split-mnist", "linear+mas", strength=1000, **small)
    own, other = (mas_of_features.run_with(kind, config, None) for kind in (MAS, mas_of_features.MASOfFeatures))
    (expected,) = mas_of_features.engram.run_many([config], device="cpu", precision="float32", progress=False)
    assert own.dynamics[-1]["loss"] == expected.dynamics[-1]["loss"]
    assert other.dynamics[-1]["loss"] != expected.dynamics[-1]["loss"]
