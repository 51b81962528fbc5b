"""The example with a pretrained backbone runs, on features made up here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from engram.common.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("pretrained_backbone")


def write_features(path: Path) -> Path:
    """A few samples of each of ten classes, which differ in one feature."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, size in (("train", 300), ("test", 100)):
        labels = np.arange(size) % 10
        features = np.eye(12)[labels] + 0.1 * random.standard_normal((size, 12))
        arrays |= {f"{part}_features": features.astype(np.float32), f"{part}_labels": labels}
    np.savez(path, **arrays)
    return path


def test_it_prints_a_row_for_each_method(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {label: {**row, "random_features": 50 if "random" in label else 0} for label, row in example.ROWS.items()}
    monkeypatch.setattr(example, "ROWS", small)
    example.main(write_features(tmp_path / "features.npz"), data=None, trials=2)
    rows = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [label.strip() for label, _ in rows] == [*small, "logistic regression, all at once"]
    accuracy = {label.strip(): float(text.split()[0]) for label, text in rows}
    assert min(accuracy[name] for name in ("ridge", "slda", "nearest mean")) > 95
    assert accuracy["finetuning"] < 60


def test_a_missing_backbone_is_said_before_anything_is_computed(
    tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(InputError, match="the backbone is missing: pip install"):
        example.computed(tmp_path / "features.npz", data=None, device="cpu")
    assert not list(tmp_path.iterdir())
