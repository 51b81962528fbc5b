"""`benchmarks/heads.py`: what it refuses, and what a step costs with each head."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import heads
import pytest
import timing


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


def test_cost_is_shown_beside_the_plain_head_and_the_papers_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)
    rows = ["linear", "dhp", "steady", "dhp+online-ewc (slow)", "dhp+online-ewc (in-force)"]
    command = ["heads.py", "cost", "--device", "cpu", "--models", "1", "--seconds", "0.001", "--only", ",".join(rows)]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path)])
    heads.main()
    shown = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in shown] == rows
    assert (shown[0][2], shown[1][3], shown[3][4]) == ("1.000", "1.000", "–")
    assert float(shown[4][4]) == pytest.approx(float(shown[4][1]) / float(shown[3][1]), abs=0.01)
    record = json.loads((tmp_path / "cost.json").read_text())
    assert [len(record["rows"][name]["ms"]) for name in rows] == [3] * len(rows)
    assert {"date", "command", "hardware", "threads", "versions"} <= set(record)
