"""Damaged files of a run are refused in one sentence or read right; a damaged entry costs only its own label."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from builders import assert_one_sentence, files_in, refusal, short_run, small_digits
from damage import damaged_csv, damaged_json, fuzz, read_or_refuse
from engram import preset
from engram.common import files
from engram.common.errors import Stopped
from engram.common.files import parse_json, read_json
from engram.engine.training import Runtime
from engram.runs import format as run_format
from engram.runs import start
from engram.runs.format import read_description
from engram.runs.run import Run, open_runs, read_run
from engram.runs.start import resume_run, start_run

DAMAGED = {"run.json": damaged_json, "results.json": damaged_json, "dynamics.csv": damaged_csv}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("valid"))


def check(run: Run) -> None:
    """Its results are complete; what could not be read is named in a sentence."""
    assert set(run.results) | set(run.problems) <= set(run.configs)
    for sentence in run.problems.values():
        assert_one_sentence(sentence)
    for label, result in run.results.items():
        tasks = run.configs[label].num_tasks
        assert result.accuracy.shape == (len(result.trials), tasks, tasks)
        assert result.untrained.shape == (len(result.trials), tasks)
        for measured in (result.accuracy, result.untrained):
            assert ((measured >= 0) & (measured <= 1) | np.isnan(measured)).all()


def test_valid_run_is_read(valid: Path) -> None:
    run = read_run(valid)
    check(run)
    assert list(run.results) == ["si", "dhp+si"]
    assert not run.problems
    assert run.results["dhp+si"].dynamics


@pytest.mark.parametrize("name", DAMAGED)
@fuzz
@given(data=st.data())
def test_damaged_run(valid: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(DAMAGED[name]((valid / name).read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        shutil.copytree(valid, path)
        (path / name).write_bytes(content)
        for run in (read_or_refuse(lambda: open_runs(path)) or {}).values():
            check(run)


@fuzz
@given(data=st.data())
def test_damaged_sweep(valid: Path, data: st.DataObject) -> None:
    """A sweep is a folder of runs with a description of its own."""
    bases = [{"method": method, "trials": 2} for method in ("si", "dhp+si")]
    intact = {"format": run_format.FORMAT, "command": "engram sweep", "axes": ["xi=1"], "bases": bases}
    content = data.draw(damaged_json(json.dumps(intact).encode()))
    about = data.draw(damaged_json((valid / "run.json").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(valid, Path(folder) / "runs" / "0-1")
        (Path(folder) / "sweep.json").write_bytes(content)
        (Path(folder) / "runs" / "0-1" / "run.json").write_bytes(about)
        run = read_or_refuse(lambda: read_run(folder))
    if run is not None:
        check(run)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first report."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    config = preset("split-mnist", "dhp", dataset="mnist-small", num_tasks=2, trials=1, epochs=1, hidden=[4])
    with pytest.raises(Stopped):
        start_run({"dhp": config}, [small_digits(60, 30)], path, runtime=Runtime("cpu"), stop_asked=lambda: True)
    return path


@fuzz
@given(data=st.data())
def test_damaged_run_is_refused_or_resumed(stopped: Path, data: st.DataObject) -> None:
    """Up to where it would train again."""
    content = data.draw(damaged_json((stopped / "run.json").read_bytes()))
    with tempfile.TemporaryDirectory() as folder, patch.object(start, "_train", lambda *given: "trained"):
        path = Path(folder) / "run"
        shutil.copytree(stopped, path)
        (path / "run.json").write_bytes(content)
        assert read_or_refuse(lambda: resume_run(path, [small_digits(60, 30)])) in (None, "trained")


# --- found by earlier searches


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_ITEMS", 100)
    assert parse_json("[" + "[]," * 98 + "[]]") == [[]] * 99
    for text in ("[" + "[]," * 100 + "[]]", "[" + "{}," * 100 + "{}]", "[" + '"ab",' * 100 + '"ab"]'):
        assert "more than 100" in refusal(parse_json, text)
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)
    assert "larger than" in refusal(read_json, path)


def test_a_label_of_any_length_is_missed_in_one_sentence(valid: Path, tmp_path: Path) -> None:
    def rename(about: dict[str, Any]) -> None:
        about["configs"]["x" * 10_000] = about["configs"].pop("si")

    run = read_run(changed(valid, tmp_path, "run.json", rename))
    assert list(run.problems) == ["x" * 10_000]
    check(run)


def test_dynamics_are_bounded_before_they_are_parsed(
    valid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(valid, tmp_path / "run")
    monkeypatch.setattr(run_format, "MAX_CSV_ROWS", 1000)
    with (path / "dynamics.csv").open("a") as file:
        file.write("\n" * 1001)
    assert "more than 1000 rows" in read_run(path).problems["si"]
    monkeypatch.setattr(run_format, "MAX_CSV_BYTES", 1000)
    assert "larger than 1000 bytes" in read_run(path).problems["si"]


def changed(valid: Path, folder: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A copy of the run with one of its JSON files changed."""
    path = shutil.copytree(valid, folder / "run")
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e["accuracy"][0][0].__setitem__(0, 7.5), "[0, 1]"),
        (lambda e: e["accuracy"][0][0].__setitem__(0, 10**400), "damaged"),
        (lambda e: e["accuracy"][0].__setitem__(0, [0]), "damaged"),
        (lambda e: e["untrained"][0].__setitem__(0, -1), "[0, 1]"),
        (lambda e: e.update(trials=[0, 0]), "twice"),
        (lambda e: e.update(trials=[0, 99]), "from 0 to 1"),
        (lambda e: e.update(diverged=[{"trial": "0", "task": 0, "step": 0}]), "diverge"),
        (lambda e: e.update(diverged=[{"trial": 0, "task": 0, "x" * 5000: 0}]), "diverge"),
        (lambda e: e.update(diverged=[{"trial": 0, "task": 0, "step": 0, "why": "x" * 5000}]), "diverge"),
        (lambda e: e.update(diverged=[{"trial": 0, "task": 0, "step": 0, "why": "\x1b[2J"}]), "diverge"),
    ],
)
def test_impossible_results_lose_only_their_label(
    valid: Path, tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    run = read_run(changed(valid, tmp_path, "results.json", lambda content: change(content["results"][0])))
    assert words in run.problems["si"]
    assert_one_sentence(run.problems["si"])
    assert list(run.results) == ["dhp+si"]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(configs={}),
        lambda c: c.update(configs=["si"]),
        lambda c: c["configs"].update({"\x1b[2J": c["configs"]["si"]}),
        lambda c: c["configs"]["si"].update(method="../si"),
        lambda c: c["data"][0].update(train="60"),
        lambda c: c["data"][0].update(name="\x1b[2J"),
        lambda c: c.update(format=99),
        lambda c: c.update(format="2"),
        lambda c: c.update(seconds="long"),
        lambda c: c.update(seconds=10**400),
    ],
)
def test_impossible_descriptions_are_refused(valid: Path, tmp_path: Path, change: Callable[[Any], object]) -> None:
    path = changed(valid, tmp_path, "run.json", change)
    before = files_in(path)
    refusal(read_run, path)
    refusal(read_description, path)
    assert files_in(path) == before


def test_huge_cell_is_a_problem(valid: Path, tmp_path: Path) -> None:
    path = shutil.copytree(valid, tmp_path / "run")
    with (path / "dynamics.csv").open("a") as file:
        file.write("si,0,0,0,0," + "1" * 200_000 + ",1,1,1\n")
    assert "field" in read_run(path).problems["si"]


def test_truncated_row_is_a_problem(valid: Path, tmp_path: Path) -> None:
    path = shutil.copytree(valid, tmp_path / "run")
    with (path / "dynamics.csv").open("a") as file:
        file.write("si")
    run = read_run(path)
    assert_one_sentence(run.problems["si"])
    assert not run.results["si"].dynamics
