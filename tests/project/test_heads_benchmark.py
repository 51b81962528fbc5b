"""`benchmarks/heads.py`: what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import heads
import pytest


@pytest.mark.parametrize("out", [(), ("--out", "empty")], ids=["no folder", "an empty folder"])
def test_a_figure_of_nothing_is_refused(
    out: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["heads.py", "draw", *out])
    with pytest.raises(SystemExit) as ended:
        heads.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "heads.py: error: draw needs --out DIR, a folder in which growth left its growth.json"
    )
