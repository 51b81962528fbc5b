"""Sheets of a reproduction: written small, read back as they were, and never mistaken for something else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram import Divergence, InputError, Result, preset
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import STEADY
from engram.runs.result import DYNAMICS
from engram.runs.sheets import (
    NOT_IN_THE_PAPER,
    PARTS,
    Sheet,
    holds_reproduction,
    mean_dynamics,
    read_reproduction,
    read_sheet,
    sheet_path,
    write_sheet,
)

ABOUT = {
    "command": "engram reproduce",
    "quick": False,
    "device": "cpu",
    "seconds": 1.5,
    "models": 6,
    "data": [{"name": "mnist", "origin": "published", "train": 60000, "test": 10000}],
}
TRIALS, TASKS = 3, 4


def rows_of(trial: int, steps: tuple[int, ...], task: int = 0) -> list[dict[str, float]]:
    return [
        dict(zip(DYNAMICS, (trial, task, 0, step, 0.5 + trial + step, 0.1 * trial, 10.0 * trial, 1 / 3), strict=True))
        for step in steps
    ]


def make_result(method: str, **changes: Any) -> Result:
    random = np.random.default_rng(len(method))
    accuracy = np.full((TRIALS, TASKS, TASKS), np.nan)
    for i in range(TASKS):
        accuracy[:, i, : i + 2] = random.random((TRIALS, min(i + 2, TASKS)))
    accuracy[1, 2:] = np.nan  # lost in the third task
    config = preset("split-mnist", method, trials=TRIALS, num_tasks=TASKS, **changes)
    dynamics = [row for trial in range(TRIALS) for task in range(2) for row in rows_of(trial, (3, 7), task)]
    return Result(
        config,
        tuple(range(TRIALS)),
        accuracy,
        random.random((TRIALS, TASKS)),
        dynamics,
        [Divergence(1, 2, 17)],
        ABOUT["data"],
    )


def make_sheet(part: str = "table", benchmark: str = "split-mnist") -> Sheet:
    entries = {"dhp": make_result("dhp", **STEADY), "si": make_result("si", hidden=[7, 5]), "η 0.1": make_result("dhp")}
    return Sheet(part, benchmark, entries, dict(ABOUT))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sheet_path(tmp_path, "split-mnist", "table")


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as error:
        read_sheet(path)
    sentence = str(error.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("part", PARTS)
def test_a_sheet_reads_back_as_it_was_written(part: str, path: Path) -> None:
    sheet = make_sheet(part)
    write_sheet(sheet, path)
    read = read_sheet(path)
    assert (read.part, read.benchmark, read.about) == (sheet.part, sheet.benchmark, sheet.about)
    assert list(read.entries) == list(sheet.entries), "in their order"
    for label, result in sheet.entries.items():
        found = read.entries[label]
        assert found.config == result.config
        assert {n: type(v) for n, v in vars(found.config).items()} == {
            n: type(v) for n, v in vars(result.config).items()
        }
        np.testing.assert_allclose(found.accuracy, result.accuracy, rtol=0, atol=0.5e-5 + 1e-12)  # NaN where it was
        assert np.array_equal(found.accuracy, np.round(result.accuracy, 5), equal_nan=True)
        assert np.isnan(found.accuracy).sum() > 0
        assert np.array_equal(found.untrained, np.round(result.untrained, 5))
        assert found.diverged == result.diverged
        assert found.data == ABOUT["data"]


def test_a_sheet_that_was_read_is_written_as_the_same_file(path: Path) -> None:
    write_sheet(make_sheet(), path)
    first = path.read_bytes()
    write_sheet(read_sheet(path), path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


def test_a_sheet_is_json_for_anybody_with_a_line_an_entry(path: Path) -> None:
    write_sheet(make_sheet(), path)
    text = path.read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert content["entries"][0]["accuracy"][1][3] == [None] * TASKS
    assert [line.startswith('{"label": ') for line in text.splitlines()].count(True) == 3
    assert content["common"]["benchmark"] == "split-mnist"
    assert not set(content["common"]) & set(content["entries"][0]["settings"])
    assert content["entries"][1]["settings"]["hidden"] == [7, 5]


def test_dynamics_are_means_over_the_trials_of_what_each_recorded_in_turn(path: Path) -> None:
    """Also where trials have tasks of different sizes, so that their records are at other steps."""
    rows = [*rows_of(0, (3, 7)), *rows_of(1, (4, 9)), *rows_of(2, (5,)), *rows_of(0, (2,), task=1)]
    result = Result(make_result("dhp").config, (0, 1, 2), np.zeros((3, 4, 4)), np.zeros((3, 4)), rows)
    mean = mean_dynamics(result)
    assert list(mean) == [name for name in DYNAMICS if name != "trial"]
    assert mean["task"] == [0, 0, 1]
    assert mean["step"] == [3, 7, 2], "as in the first trial"
    assert mean["loss"] == [pytest.approx(0.5 + 1 + 4), pytest.approx(0.5 + 0.5 + 8), 2.5]
    assert mean["eta"] == [pytest.approx(0.1), pytest.approx(0.05), 0]
    assert mean["alpha_norm"] == [0.33333] * 3, "five figures"
    write_sheet(Sheet("variant", "split-mnist", {"dhp": result}, dict(ABOUT)), path)
    read = read_sheet(path).entries["dhp"].dynamics
    assert [row["trial"] for row in read] == [0, 0, 0]
    assert [row["loss"] for row in read] == mean["loss"]


@pytest.mark.parametrize(("part", "kept"), [("table", True), ("variant", True), ("study", False), ("strengths", False)])
def test_dynamics_are_kept_of_plastic_methods_where_they_are_looked_at(part: str, kept: bool, path: Path) -> None:
    write_sheet(make_sheet(part), path)
    read = read_sheet(path)
    assert bool(read.entries["dhp"].dynamics) == kept
    assert read.entries["si"].dynamics == []


def test_a_sheet_says_which_trials_it_lacks() -> None:
    result = make_result("si")
    short = Result(result.config, (0, 1), result.accuracy[:2], result.untrained[:2])
    sheet = Sheet("study", "split-mnist", {"dhp": make_result("dhp"), "si": short}, dict(ABOUT))
    assert sheet.missing == [
        "split-mnist, study: si has 2 of 3 trials",
        "split-mnist, study: 2 of 4 tasks were learned",  # by a trial of si of which it is not known that it diverged
    ]
    assert make_sheet("study").missing == []
    assert make_sheet("variant").missing == ["split-mnist, variant: 3 of the paper's 10 trials were run"]
    quick = make_sheet("variant")
    quick.about["quick"] = True
    assert quick.missing == []


def test_a_table_says_which_methods_it_lacks() -> None:
    missing = make_sheet("table").missing
    assert [sentence for sentence in missing if sentence.endswith("was not run")] == [
        f"split-mnist, table: {method} was not run"
        for method in ("finetune", "dhp+si", "online-ewc", "dhp+online-ewc", "mas", "dhp+mas")
    ]


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (("entries", 0, "dynamics"), {"task": [0, 1], "foo": [1, 2]}, "other columns"),
        (("entries", 0, "dynamics", "task", 0), None, "not all numbers"),
        (("about", "data", 0), {"foo": 1}, "damaged"),
        (("entries", 0, "accuracy", 0, 0, 0), 7.0, "not all in [0, 1]"),
        (("entries", 0, "accuracy", 0, 0, 0), -0.5, "not all in [0, 1]"),
    ],
)
def test_numbers_that_cannot_be_are_refused(place: tuple, wrong: Any, words: str, path: Path) -> None:
    write_sheet(make_sheet(), path)
    content = json.loads(path.read_text())
    spot = content
    for key in place[:-1]:
        spot = spot[key]
    spot[place[-1]] = wrong
    path.write_text(json.dumps(content))
    assert words in refusal(path)


# --- what is no sheet


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot read"),
        (b"\x00\xff\xfe", "cannot read"),
        (b"{", "cannot read"),
        (b"[" * 100_000, "cannot read"),
        (b"[1, 2]", "is not a file of Engram, or is damaged"),
        (b"3", "is not a file of Engram, or is damaged"),
        (b"null", "is not a file of Engram, or is damaged"),
        (b'{"results": [1, 2]}', "is not a file of Engram, or is damaged"),
        (b'{"format": "one"}', "is not a file of Engram, or is damaged"),
        (b'{"format": 1, "methods": ["si"]}', "is not a sheet of Engram, or is damaged"),
        (b'{"format": 99}', "was written by a newer version of Engram"),
    ],
)
def test_a_foreign_file_is_refused_with_a_sentence(content: bytes, words: str, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_missing_sheet_is_refused_with_a_sentence(path: Path) -> None:
    assert "cannot read" in refusal(path)


def test_a_sheet_that_was_cut_off_is_refused_wherever(path: Path) -> None:
    write_sheet(make_sheet(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:length])
        assert "cannot read" in refusal(path)


def damages() -> Iterator[tuple[str, Any]]:
    """A place in a sheet, and what stands there instead; None in the place of a value takes it away."""
    for key in ("part", "benchmark", "about", "common", "entries"):
        for wrong in ("removed", None, 3, "x", [], {}, [[]], {"a": 1}):
            yield key, wrong
    for key in ("label", "settings", "accuracy", "untrained", "diverged", "dynamics"):
        for wrong in ("removed", None, 3, "x", [3], [[1, 2], [3]], {"a": 1}):
            yield f"entries.1.{key}", wrong
    for key, value in (("method", "sgd"), ("epochs", 0), ("trials", "3"), ("surprise", 1), ("num_tasks", 7)):
        yield f"common.{key}", value
        yield f"entries.1.settings.{key}", value
    yield "about.data", "removed"
    yield "entries.1.accuracy.0.0.0", "high"
    yield "entries.1.accuracy.0.0", [0.5]
    yield "entries.1.diverged.0.trial", "removed"


HARMLESS = {("entries.1.label", "x"), ("common.method", "sgd")}  # another name; and every entry has its own method


def test_a_damaged_sheet_is_refused_whatever_was_damaged(path: Path) -> None:
    write_sheet(make_sheet(), path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    taken = []
    for place, wrong in damages():
        if (place, str(wrong)) in HARMLESS:
            continue
        content = copy.deepcopy(whole)
        at: Any = content
        *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
        for step in way:
            at = at[step]
        if wrong == "removed":
            del at[last]
        else:
            at[last] = wrong
        path.write_text(json.dumps(content), encoding="utf-8")
        try:
            refusal(path)
        except pytest.fail.Exception:
            taken.append(f"{wrong!r} in the place of {place}")
    assert taken == []


# --- a folder of them


def test_a_folder_of_sheets_says_in_sentences_what_it_lacks(tmp_path: Path) -> None:
    short = make_sheet("variant")
    result = short.entries["si"]
    short.entries["si"] = Result(result.config, (0,), result.accuracy[:1], result.untrained[:1])
    write_sheet(make_sheet(), sheet_path(tmp_path, "split-mnist", "table"))
    write_sheet(short, sheet_path(tmp_path, "split-mnist", "variant"))
    (tmp_path / "split-mnist" / ".study").mkdir()  # begun
    assert holds_reproduction(tmp_path)
    found = read_reproduction(tmp_path)
    assert list(found.sheets) == [("split-mnist", "table"), ("split-mnist", "variant")]
    assert found.folder == tmp_path
    assert not found.quick
    expected = []
    for benchmark in PAPER_BENCHMARKS:
        for part, words in PARTS.items():
            if (benchmark, part) in found.sheets:
                expected += found.sheets[benchmark, part].missing
            elif (benchmark, part) not in NOT_IN_THE_PAPER:
                expected.append(f"{benchmark}: {words} was not run")
    assert found.missing == expected
    assert "split-mnist, variant: si has 1 of 3 trials" in found.missing
    assert "permuted-mnist: Table I: the paper's eight methods was not run" in found.missing
    assert not any("vision-mixture" in sentence and "η" in sentence for sentence in found.missing)


def test_only_the_parts_that_are_asked_for_can_be_missing(tmp_path: Path) -> None:
    write_sheet(make_sheet(), sheet_path(tmp_path, "split-mnist", "table"))
    found = read_reproduction(tmp_path, ["table"])
    others = [f"{b}: {PARTS['table']} was not run" for b in PAPER_BENCHMARKS if b != "split-mnist"]
    assert [sentence for sentence in found.missing if not sentence.startswith("split-mnist")] == others


def test_one_quick_sheet_makes_a_quick_reproduction(tmp_path: Path) -> None:
    write_sheet(make_sheet(), sheet_path(tmp_path, "split-mnist", "table"))
    quick = make_sheet("variant")
    quick.about["quick"] = True
    write_sheet(quick, sheet_path(tmp_path, "split-mnist", "variant"))
    assert read_reproduction(tmp_path).quick


def test_a_sheet_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    write_sheet(make_sheet("variant"), sheet_path(tmp_path, "permuted-mnist", "table"))
    with pytest.raises(InputError, match=r"table\.json is of another place: it holds the variant of split-mnist"):
        read_reproduction(tmp_path)


def test_a_damaged_sheet_is_named_by_the_reader_of_the_folder(tmp_path: Path, path: Path) -> None:
    write_sheet(make_sheet(), path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(InputError, match=r"cannot read .*split-mnist.table\.json"):
        read_reproduction(tmp_path)


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [("empty", "{} holds no reproduction: it has no sheet such as permuted-mnist/table.json"),
     ("none", "there is no folder {}"), ("file", "there is no folder {}")],
)  # fmt: skip
def test_a_folder_without_sheets_is_one_sentence(tmp_path: Path, folder: str, sentence: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as error:
        read_reproduction(tmp_path / folder)
    assert str(error.value) == sentence.format(tmp_path / folder)
