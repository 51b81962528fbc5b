"""`benchmarks/scaling.py`: what it leaves behind, and that the exact numbers in it grow as they must."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timing
from typer import Typer
from typer.testing import CliRunner

pytestmark = pytest.mark.slow
PARTS = ("stack", "tasks", "classes")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def scaling() -> Iterator[Run]:
    """The command, in this process, with as few steps as can be timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "FEWEST_STEPS", 1)
        patch.setattr(timing, "FEWEST_ROUNDS", 2)
        from scaling import measure_growth

        app = Typer()
        app.command()(measure_growth)

        def run(*arguments: object) -> str:
            done = CliRunner().invoke(app, [str(argument) for argument in arguments])
            return done.output if done.exit_code == 0 else f"failed: {done.output} {done.exception}"

        yield run


@pytest.fixture(scope="module")
def folder(scaling: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scaling")
    said = scaling("--quick", "--device", "cpu", "--out", made)
    assert not said.startswith("failed"), said
    return made


def rows(folder: Path, part: str) -> list[dict[str, str]]:
    with open(folder / f"scaling-{part}.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_leaves_numbers_curves_a_table_and_a_record(folder: Path, part: str) -> None:
    assert (folder / f"scaling-{part}.png").read_bytes().startswith(b"\x89PNG")
    shown = (folder / f"scaling-{part}.md").read_text().splitlines()[2:]
    assert len(shown) == 2 + {"stack": 5, "tasks": 8, "classes": 6}[part]
    record = json.loads((folder / f"scaling-{part}.json").read_text())
    assert {"date", "command", "hardware", "threads", "versions", "seconds", "notes", "data"} <= set(record)
    assert {"python", "torch", "engram"} <= set(record["versions"])


def test_times_are_above_zero_and_a_share_is_the_time_over_the_models(folder: Path) -> None:
    for row in rows(folder, "stack"):
        assert float(row["us_per_model"]) == pytest.approx(1e3 * float(row["ms"]) / int(row["models"]), rel=1e-4)
        assert float(row["to_smallest"]) > 0
        assert row["peak_bytes"] == ""  # there is no GPU
    for row in rows(folder, "tasks"):
        assert min(float(row["train_ms"]), float(row["consolidate_ms"])) > 0
    for row in rows(folder, "classes"):
        assert float(row["ms"]) > 0
        assert row["head"] != "plain" or float(row["to_plain"]) == 1


def test_a_stack_holds_as_much_as_its_models(folder: Path) -> None:
    held = {(row["method"], int(row["models"])): int(row["held_bytes"]) for row in rows(folder, "stack")}
    for method in ("finetune", "dhp+online-ewc"):
        assert held[method, 2] == 2 * held[method, 1]
    assert held["finetune", 1] == 4 * (784 * 400 + 400 + 400 * 400 + 400 + 2 * 10 * 400)  # θ and θ′ of the matched head
    assert 8 * held["finetune", 1] < held["the paper's eight", 8] < 8 * 2 * held["dhp+online-ewc", 1]


def test_only_a_term_a_task_grows_with_the_tasks(folder: Path) -> None:
    seen = [row for row in rows(folder, "tasks") if row["penalty_bytes"]]
    by_method = {row["method"]: {} for row in seen}
    for row in seen:
        by_method[row["method"]][int(row["task"])] = int(row["penalty_bytes"])
    ewc = by_method.pop("ewc")
    assert set(ewc) == {1, 2, 5, 10}
    assert ewc == {task: task * ewc[1] for task in ewc}
    assert len(by_method) == 7
    for method, held in by_method.items():
        assert set(held) == {1, 2, 5, 10, 16}
        assert len(set(held.values())) == 1, method
        assert (held[1] == 0) == (method == "dhp")
    assert by_method["online-ewc"][1] == ewc[1]
    assert by_method["si"][1] > ewc[1]  # its paths


def test_a_newcomer_learns_beside_the_last_tasks_only(folder: Path) -> None:
    beside = {row["task"] for row in rows(folder, "tasks") if row["newcomer_ms"] and row["method"] == "si"}
    assert beside == {str(task) for task in range(11, 17)}
    assert {row["task"] for row in rows(folder, "tasks") if row["newcomer_ms"] and row["method"] == "ewc"} == {
        str(task) for task in range(5, 11)
    }


def test_streams_share_their_pixels(folder: Path) -> None:
    streams = json.loads((folder / "scaling-tasks.json").read_text())["streams"]
    few, many = streams[0], streams[-1]
    assert many["bytes"] - few["bytes"] == (many["tasks"] - few["tasks"]) * 784 * 8  # a permutation a task


def test_a_head_holds_more_with_more_classes(folder: Path) -> None:
    held = {(row["head"], int(row["classes"])): row for row in rows(folder, "classes")}
    for size in (10, 100):
        weights = 4 * 32 * size
        assert int(held["plain", size]["held_bytes"]) == 2 * weights  # θ and its gradient
        assert int(held["dhp", size]["held_bytes"]) == 5 * weights + 8  # α and its gradient, Hebb; η and its gradient
        assert int(held["dhp", size]["kept_bytes"]) > int(held["plain", size]["kept_bytes"])


def test_one_part_alone_and_a_device_that_is_not_there(scaling: Run, tmp_path: Path) -> None:
    said = scaling("--quick", "--device", "cpu", "--part", "classes", "--out", tmp_path)
    assert "| dhp | 100 |" in said
    assert {path.stem for path in tmp_path.iterdir()} == {"scaling-classes"}
    assert "there is no device" in scaling("--device", "nowhere", "--out", tmp_path)


def test_growth_is_measured_against_the_newcomer(scaling: Run) -> None:
    from growth_of_tasks import Row, marks, span_ms, to_newcomer

    nan = math.nan
    alone = [Row("si", n, 1.0, 1.0, nan, nan, nan) for n in (1, 2)]
    beside = [Row("si", 3, 90.0, 9.0, 1.0, nan, nan)] + [Row("si", n, 2.0, 1.0, 2.0, nan, nan) for n in (4, 5, 6)]
    assert to_newcomer([*alone, *beside], skipped=1) == 1.5
    assert (span_ms([*alone, *beside], 1, 2), span_ms(alone, 1, 3)) == ("2.00", "—")
    assert marks(20) == [1, 2, 5, 10, 20]
