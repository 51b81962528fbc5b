"""The examples in docstrings of common, config and data run, and show what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch

import engram

MODULES = (
    *("common.errors", "common.files", "common.registry", "common.seeding", "common.tensor_file"),
    *("config.methods", "config.presets", "config.settings"),
    *("data.batches", "data.sources", "data.streams", "nn.heads"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"engram": engram, "head": engram.MatchedSoftmax(8, 3), "hidden": torch.rand(4, 8)}
    found = doctest.testmod(import_module(f"engram.{name}"), extraglobs=names)
    assert found.attempted > 0
    assert found.failed == 0
