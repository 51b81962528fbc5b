"""Other people's libraries are asked for only where they are used, and a missing one is named."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_engram_itself_imports_none_of_them() -> None:
    others = "{'avalanche', 'torchvision', 'sklearn', 'onnx', 'tensorboard'}"
    code = f"import engram, sys; assert not {others} & set(sys.modules), {others} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_avalanche_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "avalanche", None)
    monkeypatch.delitem(sys.modules, "avalanche.benchmarks", raising=False)
    monkeypatch.delitem(sys.modules, "engram.integrations.avalanche", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install engram\[avalanche\]"):
        import engram.integrations.avalanche  # noqa: F401
