"""Other people's libraries are asked for only where they are used, and a missing one is named."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_engram_itself_imports_none_of_them() -> None:
    others = "{'avalanche', 'torchvision', 'sklearn', 'onnx', 'tensorboard'}"
    code = f"import engram, sys; assert not {others} & set(sys.modules), {others} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class NoAvalanche:
    """Stands before Python's own finders, as where it is not installed."""

    @staticmethod
    def find_spec(name: str, *where: object) -> None:
        if name == "avalanche":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_avalanche_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "avalanche" in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoAvalanche, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'engram-cl\[avalanche\]'"):
        import engram.integrations.avalanche  # noqa: F401
