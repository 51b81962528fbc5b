"""`engram table`, `figures` and `report`: what they print and write, and how they refuse damaged runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
import statistics
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command import Command, Finished

from builders import current, files_in
from engram.cli.main import main
from engram.report.tables import COLUMNS


def test_table_equals_the_one_that_the_run_printed(finished: Finished, engram: Command) -> None:
    folder, outcome = finished
    shown = outcome.out[outcome.out.index("split-mnist on") : outcome.out.index("Results are in")]
    again = engram("table", folder)
    assert (again.code, again.err) == (0, "")
    assert [line.rstrip() for line in again.out.splitlines()] == [line.rstrip() for line in shown.splitlines()]


def test_csv_table_equals_the_saved_accuracies(finished: Finished, engram: Command) -> None:
    folder, _ = finished
    rows = list(csv.DictReader(engram("table", folder, "--format", "csv").out.splitlines()))
    entries = {entry["label"]: entry for entry in json.loads((folder / "results.json").read_text())["results"]}
    for row in rows:
        matrices = entries[row["method"]]["accuracy"]
        accuracy = statistics.mean(sum(matrix[1]) / 2 for matrix in matrices)
        transfer = statistics.mean(matrix[1][0] - matrix[0][0] for matrix in matrices)
        assert float(row["ACC %"]) == pytest.approx(100 * accuracy, abs=0.00501)
        assert float(row["BWT"]) == pytest.approx(transfer, abs=0.000501)
    assert [row["method"] for row in rows] == ["finetune", "dhp+si"]


def test_markdown_table(finished: Finished, engram: Command) -> None:
    lines = engram("table", finished[0], "--format", "markdown").out.splitlines()
    assert lines[0] == "**split-mnist on mnist-small, 2 tasks, 2 trials**"
    assert lines[2] == " | ".join(["| method", *(heading for heading, _ in COLUMNS)]) + " |"
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
    elsewhere = tmp_path / "page.html"
    assert engram("report", copy, "--out", elsewhere).out == f"{elsewhere}\n"
    assert elsewhere.read_bytes() == (copy / "report.html").read_bytes()


def test_report_into_an_impossible_path_is_refused(copy: Path, tmp_path: Path, engram: Command) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in engram.refusal("report", copy, "--out", file / "page.html")
    assert "folder" in engram.refusal("report", copy, "--out", tmp_path)
    assert file.read_text() == "mine"
    nowhere = tmp_path / "nowhere"
    assert f"there is no folder {nowhere}" in engram.refusal("report", copy, "--out", nowhere / "page.html")
    assert not nowhere.exists()


def test_figures_into_a_file_are_refused(copy: Path, tmp_path: Path, engram: Command) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"cannot draw into {file}: it is not a folder" in engram.refusal("figures", copy, "--out", file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["run.json", "sweep.json", "reproduction.json"])
def test_figures_into_a_folder_that_holds_results_are_refused(
    copy: Path, tmp_path: Path, engram: Command, name: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / name).write_text("{}")
    assert "which holds results" in engram.refusal("figures", copy, "--out", other, "--format", "csv")
    assert [path.name for path in other.iterdir()] == [name]


def test_figures_never_overwrite_the_dynamics_of_their_run(copy: Path, engram: Command) -> None:
    before = files_in(copy.parent)
    assert "which holds results" in engram.refusal("figures", copy, "--out", copy, "--format", "csv")
    shutil.copytree(copy, copy.parent / "second")
    assert "which holds results" in engram.refusal("figures", copy.parent, "--out", copy.parent, "--format", "csv")
    assert {name: files_in(copy.parent)[name] for name in before} == before


def test_csv_table_of_several_runs_has_one_header(copy: Path, diverged: Finished, engram: Command) -> None:
    shutil.copytree(diverged[0], copy.parent / "diverged")
    text = engram("table", copy.parent, "--format", "csv").out
    rows = list(csv.DictReader(text.splitlines()))
    assert text.count("ACC %") == 1
    expected = [("copy", "finetune"), ("copy", "dhp+si"), ("diverged", "finetune"), ("diverged", "dhp")]
    assert [(row["run"], row["method"]) for row in rows] == expected


@pytest.mark.parametrize("command", ["table", "figures", "report"])
def test_one_unreadable_run_does_not_hide_the_others(copy: Path, tmp_path: Path, engram: Command, command: str) -> None:
    bad = Path(shutil.copytree(copy, tmp_path / "bad"))
    damage(bad, "run.json of format 1")
    outcome = engram(command, tmp_path)
    assert outcome.code == 0
    assert outcome.err.startswith("engram: bad is left out: ")
    assert outcome.err.count("\n") == 1
    if command == "report":
        assert "bad cannot be shown: " in (tmp_path / "report.html").read_text(encoding="utf-8")
    shutil.rmtree(copy)
    assert str(bad) in engram.refusal(command, tmp_path)


def test_unreadable_part_of_a_reproduction_does_not_hide_the_others(
    reproduction: Path, tmp_path: Path, engram: Command
) -> None:
    folder = Path(shutil.copytree(reproduction, tmp_path / "reproduction"))
    damage(folder / "split-mnist" / "variant", "run.json of format 1")
    for command in ("table", "figures", "report"):
        outcome = engram(command, folder)
        assert outcome.code == 0
        assert outcome.err.startswith("engram: split-mnist/variant is left out: ")
    assert "split-mnist, variant: " in (folder / "report.html").read_text(encoding="utf-8")


def damage(folder: Path, how: str) -> None:
    """One way in which nothing in a run's folder can be read."""
    content = json.loads((folder / "run.json").read_text())
    if how == "empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "run.json truncated":
        (folder / "run.json").write_text("{")
    elif how == "run.json of something else":
        (folder / "run.json").write_text('{"name": "npm"}')
    elif how == "run.json newer":
        (folder / "run.json").write_text(json.dumps(content | {"format": 99}))
    elif how == "run.json of format 1":
        (folder / "run.json").write_text(json.dumps(content | {"format": 1}))
    elif how == "run.json with an unknown setting":
        (folder / "run.json").write_text(json.dumps(content | {"common": {**content["common"], "shape": 3}}))
    elif how == "results.json truncated":
        (folder / "results.json").write_text((folder / "results.json").read_text()[:-20])
    elif how == "results.json missing":
        (folder / "results.json").unlink()
    elif how == "dynamics.csv damaged":
        (folder / "dynamics.csv").write_bytes(b"\xff\xfe\n1,2\n")


@pytest.mark.parametrize("command", ["table", "figures", "report"])
@pytest.mark.parametrize(
    "how",
    [
        "empty folder",
        "run.json truncated",
        "run.json of something else",
        "run.json newer",
        "run.json of format 1",
        "run.json with an unknown setting",
        "results.json truncated",
        "results.json missing",
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


def test_one_damaged_entry_loses_only_its_own_label(copy: Path, engram: Command) -> None:
    text = (
        (copy / "results.json")
        .read_text()
        .replace('"label": "finetune", "trials": [0, 1]', '"label": "finetune", "trials": [0]')
    )
    (copy / "results.json").write_text(text)
    outcome = engram("table", copy)
    assert (outcome.code, outcome.err) == (0, "")
    assert "dhp+si" in outcome.out
    assert f"finetune: its entry in {copy / 'results.json'} is damaged" in " ".join(outcome.out.split())


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


# --- a sweep and a reproduction


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two strengths."""
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    options = ["--dataset", "mnist-small", "--epochs", "1", "--tasks", "2", "--trials", "2", "--set", "hidden=[4]"]
    words = ["sweep", "split-mnist", "--methods", "si", "--grid", "strength=0.1,1", *options, "--out", str(folder)]
    with redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code in (0, None)
    return folder


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory: pytest.TempPathFactory, finished: Finished) -> Path:
    """The table of a reproduction of two methods: a finished run in the place of the paper's."""
    folder = tmp_path_factory.mktemp("reproduction") / "reproduction"
    path = Path(shutil.copytree(finished[0], folder / "split-mnist" / "table"))
    content = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(content | {"part": "table", "quick": True}))
    shutil.copytree(path, folder / "split-mnist" / "variant")
    (folder / "split-mnist" / "variant" / "run.json").write_text(
        json.dumps(content | {"part": "variant", "quick": True})
    )
    (folder / "reproduction.json").write_text(current(quick=True, arguments=["reproduce", "--quick"]))
    return folder


def test_table_of_a_sweep_has_a_row_per_point(sweep: Path, engram: Command) -> None:
    rows = list(csv.DictReader(engram("table", sweep, "--format", "csv").out.splitlines()))
    assert [row["settings"] for row in rows] == ["si: strength 0.1", "si: strength 1"]


def test_table_of_a_reproduction_has_every_run(reproduction: Path, engram: Command) -> None:
    outcome = engram("table", reproduction)
    assert (outcome.code, outcome.err) == (0, "")
    for name in ("table", "variant"):
        assert f"split-mnist/{name}: split-mnist on mnist-small, 2 tasks, 2 trials" in outcome.out
    rows = engram("table", reproduction, "--format", "csv").out.splitlines()
    assert rows[0].startswith("run,method,ACC %")
    assert [row.split(",")[:2] for row in rows if row.startswith("split-mnist/table")] == [
        ["split-mnist/table", "finetune"],
        ["split-mnist/table", "dhp+si"],
    ]


@pytest.mark.parametrize("kind", ["sweep", "reproduction"])
def test_figures_report_and_show_work_on_every_kind(
    kind: str, engram: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    assert engram("figures", folder, "--out", tmp_path / "figures", "--format", "csv").code == 0
    assert list((tmp_path / "figures").rglob("*.csv"))
    assert engram("report", folder, "--out", tmp_path / "page.html").code == 0
    assert engram("runs", "show", folder).code == 0
    listed = engram("runs", "list", folder, "--format", "csv").out.splitlines()[1:]
    assert len(listed) == {"sweep": 2, "reproduction": 4}[kind]
    assert engram("runs", "export", folder, "--out", tmp_path / "trials.csv").code == 0


def test_finished_sweep_can_be_resumed_and_prints_its_table(sweep: Path, engram: Command) -> None:
    before = {name: text for name, text in files_in(sweep).items() if name.endswith("results.json")}
    outcome = engram("run", "--resume", sweep)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"The sweep in {sweep} was finished already.")
    assert "si on split-mnist (mnist-small), 2 points" in outcome.out
    assert {name: text for name, text in files_in(sweep).items() if name.endswith("results.json")} == before
