"""The scripts of the guide to loops of one's own run and learn; SI's numbers in such loops are tested elsewhere."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = sorted(path.stem for path in EXAMPLES.glob("loop_*.py"))
GUIDE = EXAMPLES.parent / "docs" / "guides" / "own-loop.md"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("BACKEND", "aot_eager")  # inductor's compiler would take most of the time of all tests
    return importlib.import_module(name)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_learns_and_remembers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load("digits", monkeypatch)
    loop = load(name, monkeypatch)
    rows = digits.learn_digits(loop.learn, loop.optimizer, loop.STRENGTH, quick=True)
    assert [len(row) for row in rows] == [1, 2, 3]
    assert min(row[-1] for row in rows) > 0.25  # each task was learned, of ten classes and a thousand digits


def test_every_loop_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert len(LOOPS) >= 8
    assert [name for name in LOOPS if f"examples/{name}.py" not in text] == []


@pytest.mark.slow
def test_a_script_prints_a_table() -> None:
    command = [sys.executable, str(EXAMPLES / "loop_sgd_momentum.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "with SI" in done.stdout
    assert "without" in done.stdout
