"""`benchmarks/partial_fit.py`: what is measured, and the record that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timing
from partial_fit import ADAM, FLOOR, MEMORY, MEMORY_FLOOR, SGD, Case, Plan, digits, drawn, main, named

from engram.common.errors import InputError


def test_a_call_has_as_many_steps_as_its_samples_need() -> None:
    assert Case("digits", (8,), 32, 70).batch_sizes == [32, 32, 6]
    assert Case("digits", (8,), 200, 70).batch_sizes == [70]


def test_no_case_is_measured_twice() -> None:
    plan = Plan(data=("digits",), hidden=((8,),), batch_sizes=(32, 64), samples=(10, 64))
    assert [(case.batch_size, case.samples) for case in plan.cases()] == [(32, 10), (32, 64), (64, 64)]


@pytest.mark.parametrize("wrong", [{"data": ("fish",)}, {"samples": ()}, {"samples": (0,)}, {"seconds": 0.0}])
def test_what_cannot_be_measured_is_refused(wrong: dict) -> None:
    with pytest.raises(InputError):
        Plan(**wrong)


def test_samples_may_be_more_than_a_dataset_has() -> None:
    X, y = drawn(digits(), 2000)
    assert X.shape == (2000, 64)
    assert set(y) == set(range(10))


def test_record_has_all_that_is_needed_to_repeat_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)
    out = tmp_path / "today"
    command = ["--data", "digits", "--hidden", "8,6x5", "--batch-sizes", "32", "--samples", "40"]
    command += ["--methods", "finetune,si", "--seconds", "0.001", "--out", str(out)]
    main(command)
    assert f"{named('si')}: time of a call" in capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    assert record["command"] == " ".join(["OMP_NUM_THREADS=1 python benchmarks/partial_fit.py", *command])
    assert {"torch", "python", "engram", "scikit-learn"} <= set(record["versions"])
    assert [call["hidden"] for call in record["calls"]] == [[8], [6, 5]]
    for call in record["calls"]:
        assert {FLOOR, MEMORY_FLOOR, SGD, ADAM, MEMORY, named("finetune")} < set(call["rounds_ms"])
        assert all(len(rounds) == 3 for rounds in call["rounds_ms"].values())
    assert record["command"] in (out / "README.md").read_text()
    with pytest.raises(SystemExit):
        main(command)
    assert "holds a record already" in capsys.readouterr().err
