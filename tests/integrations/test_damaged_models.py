"""Damaged files of models and classifiers are refused in one sentence or loaded whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import engram
from builders import assert_tensors_equal, refusal
from damage import damaged_tensors, fuzz, read_or_refuse
from engram.common.tensor_file import read_tensors, write_tensors
from engram.integrations.model_file import FORMAT
from engram.nn.networks import Network
from engram.sklearn import ContinualClassifier

SAVED = Path(__file__).parent / "files"


def make_model() -> tuple[Network, engram.OnlineEWC]:
    torch.manual_seed(0)
    features = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    model = Network(features, engram.DHPSoftmax(4, 3))
    return model, engram.OnlineEWC(model, strength=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with what its penalty remembers of one task."""
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    model, penalty = make_model()
    penalty.consolidate([(torch.randn(6, 3), torch.arange(6) % 3)])
    engram.save_model(path, model, penalty, about={"classes": ["a", "b", "c"]})
    return path


@fuzz
@given(data=st.data())
def test_damaged_model_file(saved: Path, data: st.DataObject) -> None:
    model, penalty = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data.draw(damaged_tensors(saved, "model", FORMAT)))
        about = read_or_refuse(lambda: engram.load_model(path, model, penalty))
    if about is None:
        assert_tensors_equal(model.state_dict(), before)
        assert not penalty.state_dict()
    else:
        assert isinstance(about, dict)


@fuzz
@given(data=st.data())
def test_damaged_classifier_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classifier.safetensors"
        valid = shutil.copy(SAVED / "classifier-1.safetensors", folder)
        path.write_bytes(data.draw(damaged_tensors(Path(valid), "classifier", 1)))
        classifier = read_or_refuse(lambda: ContinualClassifier.load(path))
    if classifier is not None:
        shape = (2, len(classifier.classes_))
        assert classifier.predict_proba(np.zeros((2, classifier.n_features_in_))).shape == shape


# --- found by earlier searches


def forge(saved: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, tensors = read_tensors(saved, "model", FORMAT)
    change(header)
    write_tensors(path, "model", FORMAT, header, tensors)


@pytest.mark.parametrize("setting", ["x" * 100_000, [0] * 10_000, "\x1b[31m"])
def test_penalty_with_other_settings_is_refused_in_short(saved: Path, tmp_path: Path, setting: Any) -> None:
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda header: header["penalty"]["settings"].update(protect=setting))
    assert "protect=" in refusal(engram.load_model, path, *make_model())


@pytest.mark.parametrize(
    "modules",
    [
        {"head": {"\n": True}},
        {"head": {"x" * 100_000: 1}},
        {"head": {"eta_range": "y" * 100_000}},
        {"z" * 9999: {"a": 1}},
    ],
    ids=["newline", "long name", "long value", "long module"],
)
def test_modules_with_other_settings_are_refused_in_short(saved: Path, tmp_path: Path, modules: dict[str, Any]) -> None:
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda header: header["modules"].update(modules))
    assert "is of another model" in refusal(engram.load_model, path, *make_model())


@pytest.mark.parametrize(
    "change",
    [
        {"modules": {"head": [[None, None]]}},
        {"modules": []},
        {"tied": {"head.weight": [1]}},
        {"tied": [["head.weight", 0]]},
        {"penalty": {"kind": 3, "settings": {}}},
        {"about": None},
    ],
    ids=str,
)
def test_malformed_header_is_refused(saved: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "model.safetensors"
    forge(saved, path, lambda header: header.update(change))
    assert "is not a model of Engram, or is damaged" in refusal(engram.load_model, path, *make_model())
