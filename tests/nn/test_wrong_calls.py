"""Heads refuse what they would remember wrongly, in one sentence, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import engram
from engram.common.errors import InputError

FAMILY = [name for name in engram.heads.list() if name not in ("linear", "matched")]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("shape", [(4, 10), (40,), (10, 4, 1)])
def test_targets_of_a_sequence_have_its_shape(name: str, shape: tuple[int, ...]) -> None:
    head = engram.heads.create(name, 5, 4)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    with pytest.raises(InputError, match="must have shape"):
        head(torch.randn(10, 4, 5), torch.zeros(shape, dtype=torch.int64))
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize("name", FAMILY)
def test_features_of_another_type_are_refused_before_they_are_written(name: str) -> None:
    head = engram.heads.create(name, 5, 4)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    with pytest.raises(InputError, match=r"must be torch\.float32 like the layer, not torch\.float64"):
        head(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 4)
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("slda", {"normalised": "no"}, "normalised must be True or False"),
        ("slda", {"learn_features": "no"}, "learn_features must be True or False"),
        ("slda", {"head_init": "bogus"}, "head_init"),
        ("linear", {"head_gain": float("nan")}, "head_gain must be a positive number"),
        ("linear", {"head_gain": 0.0}, "head_gain must be a positive number"),
        ("hebbian-softmax", {"rare_until": float("nan")}, "rare_until must be at least 0"),
        ("cope", {"temperature": float("inf")}, "temperature must be a finite number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        engram.heads.create(name, 5, 4, **settings)


def test_only_ratios_of_weights_matter_at_a_fixed_shrinkage() -> None:
    torch.manual_seed(0)
    y = torch.arange(40) % 4
    features = torch.randn(40, 5) + y[:, None]
    logits = []
    for weight in (1.0, 0.001):
        head = engram.heads.create("slda", 5, 4, shrinkage=0.1)
        head.write(features, y, torch.full((40,), weight))
        logits.append(head.eval()(features))
    torch.testing.assert_close(*logits)


def test_weights_of_samples_have_the_shape_of_the_targets() -> None:
    torch.manual_seed(0)
    features, y, weight = torch.randn(10, 4, 5), torch.randint(4, (10, 4)), torch.rand(10, 4)
    flat, whole = engram.heads.create("slda", 5, 4), engram.heads.create("slda", 5, 4)
    flat.write(features.flatten(0, 1), y.flatten(), weight.flatten())
    whole.write(features, y, weight)
    assert torch.equal(flat.moment, whole.moment)
    for wrong in (torch.ones(10), torch.ones(4, 10), [1.0] * 40):
        with pytest.raises(InputError, match="weights"):
            whole.write(features, y, wrong)
