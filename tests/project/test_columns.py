"""`benchmarks/columns.py`: whole commands are timed, cold and again, and the record that it leaves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import columns
import pytest
import timing
from columns import MIX, PART, PLAIN, TABLE, Column, Round, Steps, command_of, main, measure_steps, parser_of, table_of
from draw import drawing_of, plain_times_of
from draw import main as draw

from engram.config.paper import PAPER_BENCHMARKS

ROOT = Path(__file__).parents[2]
TINY = ["--set", "dataset=mnist-small", "--set", "max_samples=40", "--set", "epochs=1", "--set", "trials=1"]


@pytest.mark.slow
def test_record_has_all_that_is_needed_to_repeat_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "today"
    command = ["--benchmarks", "split-mnist", "--device", "cpu", *TINY, "--set", "hidden=[4]"]
    command += ["--seconds", "0", "--out", str(out)]
    main(command)
    assert "| Split MNIST |" in capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    assert record["command"] == f"python benchmarks/columns.py {' '.join(command)}".replace(
        "hidden=[4]", "'hidden=[4]'"
    )
    assert {"date", "hardware", "threads", "versions", "notes"} < set(record)
    (column,) = record["columns"]
    assert column["command"].startswith("engram run split-mnist --set dataset=mnist-small")
    assert len(column["rounds"]) == 2
    for one in column["rounds"]:
        assert len(one["tasks"]) == 5
        assert 0 < one["tasks"][0] < one["tasks"][-1] < one["seconds"]
    assert record["command"] in (out / "README.md").read_text()
    with pytest.raises(SystemExit):
        main(command)
    assert "holds a record already" in capsys.readouterr().err


def test_caches_are_empty_in_the_first_round_and_kept_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_once(words: list[str], out: Path, caches: Path) -> Round:
        seen.append((out.name, caches.exists()))
        caches.mkdir(exist_ok=True)
        return Round(1.0, [], {})

    monkeypatch.setattr(columns, "run_once", run_once)
    columns.measure_column("split-mnist", parser_of().parse_args([]), lambda what: None)
    assert seen == [("split-mnist-1", False), ("split-mnist-2", True)]


def test_steps_are_counted_and_timed_with_floor_and_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 3)
    options = parser_of().parse_args(["--device", "cpu", "--seconds", "0.001", "--no-compile"])
    changes = {"dataset": "mnist-small", "epochs": 2, "trials": 1, "max_samples": 100, "batch_size": 40, "num_tasks": 2}
    steps, _ = measure_steps("permuted-mnist", changes, options)
    assert (steps.steps, steps.models) == (2 * 2 * 3, 8)
    plain = steps.seconds(PLAIN)
    assert plain is not None
    assert min(steps.rounds_ms[PLAIN]) <= 1e3 * plain / (12 * 8) <= max(steps.rounds_ms[PLAIN])
    assert min(steps.floor_ms, steps.stack_ms) > 0
    assert MIX in steps.rounds_ms


def test_times_of_tasks_tell_the_start() -> None:
    one = Round(30.0, [12.0, 14.0, 16.0, 19.0], {})
    assert (one.task, one.start) == (2.0, 10.0)
    assert Round(3.0, [2.0], {}).start is None


def test_table_sums_what_its_columns_would_take() -> None:
    steps = [Steps(name, 1000, 80, 0.5, 0.25, {PLAIN: [1.0] * 3}) for name in ("split-mnist", "vision-mixture")]
    table = Column(TABLE, "engram reproduce", [Round(40.0, [], {}), Round(30.0, [], {})], steps)
    (row,) = table_of([table], []).rows
    assert row == (TABLE, "40.0", "30.0", "–", "–", "–", "1.0", "0.5", "160.0", "–")


def test_commands_are_those_that_a_user_types() -> None:
    options = parser_of().parse_args(["--data", "d", "--device", "cuda", "--set", "epochs=1", "--quick"])
    assert " ".join(command_of("split-mnist", options)) == "run split-mnist --set epochs=1 --data d --device cuda"
    assert " ".join(command_of(TABLE, options)) == "reproduce --part table --quick --data d --device cuda"


@pytest.mark.parametrize(
    "wrong", [("--benchmarks", "mnist"), ("--rounds", "-1"), ("--set", "epochs=no", "--rounds", "1")]
)
def test_what_cannot_be_measured_is_refused(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*wrong, "--device", "cpu"])
    assert ended.value.code == 2
    assert "columns.py: error: " in capsys.readouterr().err


def test_picture_shows_now_before_and_the_plain_loop() -> None:
    def record(date: str, seconds: float) -> dict:
        steps = asdict(Steps("split-mnist", 1000, 80, 0.5, 0.25, {PLAIN: [1.0, 1.0, 4.0]}))
        rounds = [Round(seconds, [], {"split-mnist": 0.4 * seconds}), Round(seconds / 2, [], {})]
        table = {"name": TABLE, "rounds": [asdict(one) for one in rounds], "steps": [steps]}
        return {"date": date, "hardware": "a GPU", "columns": [table]}

    drawing = drawing_of(record("2025-02-01", 10.0), record("2025-01-31", 50.0))
    assert drawing.rows == [
        ("split-mnist", "Engram, 2025-02-01", 4.0),
        (TABLE, "Engram, 2025-02-01", 10.0),
        ("split-mnist", "before, 2025-01-31", 20.0),
        (TABLE, "before, 2025-01-31", 50.0),
        ("split-mnist", "plain loop, steps alone", 80.0),
        (TABLE, "plain loop, steps alone", 80.0),
    ]
    assert drawing.to_bytes("png").startswith(b"\x89PNG")


def test_columns_of_several_records_are_drawn_as_one(tmp_path: Path) -> None:
    def column(name: str, *seconds: float) -> dict:
        steps = asdict(Steps(name, 1000, 80, 0.5, 0.25, {PLAIN: [1.0, 1.0]}))
        return {"name": name, "rounds": [asdict(Round(each, [], {})) for each in seconds], "steps": [steps]}

    records = [[column("split-mnist", 9.0)], [column(name) for name in PAPER_BENCHMARKS if name != "split-mnist"]]
    paths = [tmp_path / f"{k}.json" for k in range(2)]
    for path, own in zip(paths, records, strict=True):
        path.write_text(json.dumps({"date": "2025-02-01", "hardware": "a GPU", "columns": own}))
    draw([*map(str, paths), "--out", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    merged = {"date": "", "hardware": "", "columns": records[0] + records[1]}
    assert drawing_of(merged).rows == [
        ("split-mnist", "Engram, ", 9.0),
        ("split-mnist", "plain loop, steps alone", 80.0),
    ]
    assert plain_times_of(merged)[TABLE] == 4 * 80.0


def test_steps_can_be_measured_without_the_command() -> None:
    steps = Steps("split-mnist", 1000, 80, 0.5, 0.25, {PLAIN: [1.0] * 3})
    (row,) = table_of([Column("split-mnist", "engram run split-mnist", [], [steps])], []).rows
    assert row == ("Split MNIST", "–", "–", "–", "–", "–", "0.5", "0.2", "80.0", "–")


@pytest.mark.parametrize("ending", ["", "; 31 diverged"])
def test_end_of_a_column_is_seen_in_what_reproduce_says(ending: str) -> None:
    found = PART.match(f"vision-mixture: table, 80 models in 490 s{ending}")
    assert found is not None
    assert found[1] == "vision-mixture"


def test_records_of_columns_can_be_drawn() -> None:
    for path in (ROOT / "benchmarks" / "records").glob("*/columns.json"):
        assert drawing_of(json.loads(path.read_text())).rows, path
