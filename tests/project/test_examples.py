"""The examples run and learn. What SI computes in such loops is tested in tests/penalties."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loop_learns_every_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load("digits", monkeypatch)
    loop = load(name, monkeypatch)
    rows = digits.learn_digits(loop.learn, loop.optimizer, loop.STRENGTH, quick=True)
    assert [len(row) for row in rows] == [1, 2, 3]
    assert min(row[-1] for row in rows) > 0.25  # of ten classes, from a few hundred digits


def test_every_loop_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert len(LOOPS) >= 8
    assert [name for name in LOOPS if f"examples/{name}.py" not in text] == []


@pytest.mark.slow
def test_loop_prints_a_table() -> None:
    command = [sys.executable, str(EXAMPLES / "loop_sgd_momentum.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "with SI" in done.stdout
    assert "without" in done.stdout


@pytest.mark.slow
def test_continual_classifier_remembers_more_than_scikit_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    found = load("sklearn_stream", monkeypatch).main()
    others = [accuracies for name, accuracies in found.items() if name.startswith(("SGD", "MLP"))]
    assert len(others) == 2
    everything, first_pair = found["ContinualClassifier"]
    assert everything > max(accuracy for accuracy, _ in others) + 0.1
    assert first_pair > max(accuracy for _, accuracy in others) + 0.1
