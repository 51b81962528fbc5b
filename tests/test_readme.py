"""The README's Python runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import engram

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def block_with(word: str) -> str:
    (block,) = [block for block in BLOCKS if word in block]
    return block


def test_the_loop_runs_and_remembers() -> None:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(20, 512), nn.ReLU())
    task = DataLoader(TensorDataset(torch.randn(96, 20), torch.randint(10, (96,))), batch_size=32)
    names: dict = {"features": features, "task": task}
    exec(block_with("DHPSoftmax"), names)
    assert names["head"].hebb.abs().sum() > 0
    assert len(names["penalty"].terms) == 1
    assert names["penalty"].loss().item() == 0


def test_an_experiment_runs_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = {"epochs": 1, "hidden": [8], "num_tasks": 2}
    monkeypatch.setattr(engram, "preset", lambda *names, preset=engram.preset, **o: preset(*names, **{**o, **quick}))
    names: dict = {"engram": engram}
    exec(block_with("result.bwt"), names)
    assert names["result"].accuracy.shape == (3, 2, 2)
    assert engram.Result.load("results/mine").config == names["result"].config


def test_tasks_of_ones_own_run_from_python() -> None:
    torch.manual_seed(0)
    names: dict = {"engram": engram}
    for n in (1, 2):
        for part, count in (("", 30), ("test_", 10)):
            names[f"{part}x{n}"] = torch.randn(count, 4)
            names[f"{part}y{n}"] = torch.arange(count) % 3
    exec(block_with("from_arrays"), names)
    assert names["result"].accuracy.shape == (3, 2, 2)


def test_a_grid_and_features_of_ones_own_run_from_python() -> None:
    names: dict = {"engram": engram, "torch": torch}
    exec(block_with("run_many"), names)
    assert [result.config.strength for result in names["results"]] == [0.1, 1, 10]
    exec(block_with("def features"), names)
    assert names["result"].average_accuracy[0, -1] > 0.8
