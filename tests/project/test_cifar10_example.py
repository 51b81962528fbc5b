"""The example on CIFAR-10 runs, on very small files."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "cifar10_features.py"


def write_cifar(folder: Path) -> None:
    """The files of CIFAR-10, with a few images a class; each class has its own shade."""
    random = np.random.default_rng(0)
    (folder / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = [bytes([c]) + random.integers(c * 20, c * 20 + 40, 3072, np.uint8).tobytes() for c in range(10)] * 3
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(b"".join(images))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """Run it as a command, in this process; returns its exit status: a number or a sentence."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return end.value.code


def test_example_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cifar(tmp_path)
    assert run(monkeypatch, "--quick", "--data", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.strip().startswith(("frozen", "slow"))]
    assert [row.split("  ")[1].strip() for row in rows] == [
        "frozen, Linear",
        "frozen, Linear, Online EWC",
        "frozen, DHP, Online EWC",
        "slow, Linear",
        "slow, DHP, Online EWC",
    ]
    assert "0/1/2/3" in shown
    assert "nan" not in shown


def test_missing_data_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(run(monkeypatch, "--data", str(tmp_path)))
    assert "data_batch_1.bin is missing; `engram data fetch cifar-10" in said
    assert "\n" not in said
