"""`engram table`, `figures` and `report`: what they print and write, and how they refuse damaged runs."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from pathlib import Path

import pytest
from command import Command, Finished

from builders import files_in


def test_table_equals_the_one_that_the_run_printed(finished: Finished, engram: Command) -> None:
    folder, outcome = finished
    shown = outcome.out[outcome.out.index("split-mnist on") : outcome.out.index("Results are in")]
    again = engram("table", folder)
    assert (again.code, again.err) == (0, "")
    assert [line.rstrip() for line in again.out.splitlines()] == [line.rstrip() for line in shown.splitlines()]


def test_csv_table_equals_the_saved_accuracies(finished: Finished, engram: Command) -> None:
    folder, _ = finished
    rows = list(csv.DictReader(engram("table", folder, "--format", "csv").out.splitlines()))
    for row in rows:
        matrices = json.loads((folder / row["method"] / "accuracy.json").read_text())["accuracy"]
        accuracy = statistics.mean(sum(matrix[1]) / 2 for matrix in matrices)
        transfer = statistics.mean(matrix[1][0] - matrix[0][0] for matrix in matrices)
        assert float(row["ACC %"]) == pytest.approx(100 * accuracy, abs=0.00501)
        assert float(row["BWT"]) == pytest.approx(transfer, abs=0.000501)
    assert [row["method"] for row in rows] == ["finetune", "dhp+si"]


def test_markdown_table(finished: Finished, engram: Command) -> None:
    lines = engram("table", finished[0], "--format", "markdown").out.splitlines()
    assert lines[0] == "**split-mnist on mnist-small, 2 tasks, 2 trials**"
    assert lines[2] == "| method | ACC % | ± SEM | BWT | first % | last % |"
    assert lines[4].startswith("| finetune | ")


def test_figures_are_drawn_into_the_run_folder_and_listed(copy: Path, engram: Command) -> None:
    outcome = engram("figures", copy)
    assert (outcome.code, outcome.err) == (0, "")
    paths = [Path(line) for line in outcome.out.splitlines()]
    names = {"accuracy", "first-and-latest", "matrices", "dynamics"}
    assert {path.name for path in paths} == {f"{name}.{end}" for name in names for end in ("png", "pdf", "csv")}
    for path in paths:
        assert path.parent == copy / "figures"
        start = {".png": b"\x89PNG", ".pdf": b"%PDF", ".csv": b"method"}[path.suffix]
        assert path.read_bytes().startswith(start)


def test_figures_are_drawn_into_the_given_folder(copy: Path, tmp_path: Path, engram: Command) -> None:
    before = files_in(copy)
    engram("figures", copy, "--out", tmp_path / "else" / "where", "--format", "png")
    assert len(list((tmp_path / "else" / "where").iterdir())) == 4
    assert files_in(copy) == before


def test_report_is_written_into_the_run_folder_or_the_given_file(copy: Path, tmp_path: Path, engram: Command) -> None:
    outcome = engram("report", copy)
    assert (outcome.code, outcome.err, outcome.out) == (0, "", f"{copy / 'report.html'}\n")
    elsewhere = tmp_path / "new" / "page.html"
    assert engram("report", copy, "--out", elsewhere).out == f"{elsewhere}\n"
    assert elsewhere.read_bytes() == (copy / "report.html").read_bytes()


def test_report_into_an_impossible_path_is_refused(copy: Path, tmp_path: Path, engram: Command) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in engram.refusal("report", copy, "--out", file / "page.html")
    assert "folder" in engram.refusal("report", copy, "--out", tmp_path)
    assert file.read_text() == "mine"


def test_figures_into_a_file_are_refused(copy: Path, tmp_path: Path, engram: Command) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in engram.refusal("figures", copy, "--out", file)
    assert file.read_text() == "mine"


def damage(folder: Path, how: str) -> None:
    """One way in which a run's folder can be wrong."""
    accuracy = folder / "finetune" / "accuracy.json"
    content = accuracy.read_text()
    if how == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "no results":
        shutil.rmtree(folder / "finetune")
        shutil.rmtree(folder / "dhp+si")
    elif how == "run.json truncated":
        (folder / "run.json").write_text("{")
    elif how == "run.json of something else":
        (folder / "run.json").write_text('{"name": "npm"}')
    elif how == "run.json with strange methods":
        (folder / "run.json").write_text('{"methods": [1, 2]}')
    elif how == "accuracy.json truncated":
        accuracy.write_text(content[:-20])
    elif how == "accuracy.json without trials":
        accuracy.write_text(json.dumps(json.loads(content) | {"accuracy": [[0.5, 0.5], [0.5, 0.5]]}))
    elif how == "accuracy.json without data":
        accuracy.write_text(json.dumps(json.loads(content) | {"data": [{}]}))
    elif how == "accuracy.json newer":
        accuracy.write_text(content.replace('"format": 1', '"format": 99'))
    elif how == "config.toml damaged":
        (folder / "finetune" / "config.toml").write_text("epochs = = 3")
    elif how == "config.toml missing":
        (folder / "finetune" / "config.toml").unlink()
    elif how == "config.toml of a newer version":
        (folder / "finetune" / "config.toml").write_text('benchmark = "split-mnist"\nmethod = "dhp"\nshape = 3\n')
    elif how == "dynamics.csv damaged":
        (folder / "finetune" / "dynamics.csv").write_bytes(b"\xff\xfe\n1,2\n")


@pytest.mark.parametrize("command", ["table", "figures", "report"])
@pytest.mark.parametrize(
    "how",
    [
        "empty folder",
        "no results",
        "run.json truncated",
        "run.json of something else",
        "run.json with strange methods",
        "accuracy.json truncated",
        "accuracy.json without trials",
        "accuracy.json without data",
        "accuracy.json newer",
        "config.toml damaged",
        "config.toml missing",
        "config.toml of a newer version",
        "dynamics.csv damaged",
    ],
)
def test_damaged_run_is_refused_and_left_alone(copy: Path, engram: Command, command: str, how: str) -> None:
    damage(copy, how)
    before = files_in(copy)
    line = engram.refusal(command, copy)
    assert str(copy) in line
    assert files_in(copy) == before
    assert not (copy / "figures").exists()
    assert not (copy / "report.html").exists()


@pytest.mark.parametrize("command", ["table", "figures", "report"])
def test_file_is_not_a_run(tmp_path: Path, engram: Command, command: str) -> None:
    (tmp_path / "file").touch()
    assert "file" in engram.refusal(command, tmp_path / "file")


def test_table_of_a_diverged_run(diverged: Finished, engram: Command) -> None:
    outcome = engram("table", diverged[0], "--format", "csv")
    assert (outcome.code, outcome.err) == (0, "")
    assert "finetune,–,–,–,–,–" in outcome.out


def test_figures_of_a_diverged_run(diverged: Finished, engram: Command, tmp_path: Path) -> None:
    outcome = engram("figures", diverged[0], "--out", tmp_path / "figures")
    assert (outcome.code, outcome.err) == (0, "")
