"""The guide for users of scikit-learn runs as it is printed, and its example tells what the guide says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from engram.data.sources import load

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guides" / "sklearn.md"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_guide_runs_from_top_to_bottom() -> None:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert names["classifier"].score(names["test_X"], names["test_y"]) > 0.5
    assert set(names["again"].tasks_) == {"as built", "rewired", "repaired"}


@pytest.mark.filterwarnings("ignore:Got `batch_size` less than 1")  # by the last samples of a pair
def test_digits_two_at_a_time_are_remembered_where_others_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("sklearn_stream", ROOT / "examples" / "sklearn_stream.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "load", lambda name: load(name).shortened(4000))
    accuracies = {name: all_ten for name, (all_ten, _) in example.main().items()}
    ours = accuracies["ContinualClassifier"]
    others = [accuracy for name, accuracy in accuracies.items() if name.startswith(("SGD", "MLP"))]
    assert len(others) == 2
    assert ours > 0.4
    assert ours > 1.5 * max(others), "with its last pair alone a classifier has a fifth"
