"""Optional libraries are imported only where they are used, and a missing one is named."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import engram
from engram.integrations import export, model_file

EXTRAS = ("avalanche", "torchvision", "sklearn", "onnx", "onnxruntime", "pyarrow", "ray", "optuna")
EXTRAS += ("tensorboard", "mlflow", "wandb")
USE = """
import sys
import engram

for name in engram.__all__:
    getattr(engram, name)
model = engram.DHPSoftmax(3, 2)
penalty = engram.OnlineEWC(model, strength=1.0)
engram.save_model(sys.argv[1], model, penalty)
engram.load_model(sys.argv[1], model, penalty)
engram.fold(model)
assert "torch" in sys.modules and "engram.integrations.export" in sys.modules
print(*sorted(set(sys.modules) & set(sys.argv[2:])))
"""


@pytest.mark.slow
def test_public_names_need_no_optional_library(tmp_path: Path) -> None:
    """`import engram` imports almost nothing, so every public name is used first."""
    arguments = [sys.executable, "-c", USE, f"{tmp_path}/model.safetensors", *EXTRAS]
    assert subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split() == []


def test_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), engram.DHPSoftmax(3, 2))

    model = make_model()
    names = {"engram": engram, "torch": torch, "model": model, "make_model": make_model, "inputs": torch.rand(5, 4)}
    names |= {"penalty": engram.OnlineEWC(model, strength=100), "onnxruntime": pytest.importorskip("onnxruntime")}
    engram.save_model("model.safetensors", model, names["penalty"])
    for module in (model_file, export):
        found = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
        assert found.attempted > 0
        assert found.failed == 0


class NoAvalanche:
    """A finder that comes before Python's own, as if avalanche-lib were not installed."""

    @staticmethod
    def find_spec(name: str, *where: object) -> None:
        if name == "avalanche":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_missing_avalanche_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "avalanche" in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoAvalanche, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'engram-cl\[avalanche\]'"):
        import engram.integrations.avalanche  # noqa: F401
