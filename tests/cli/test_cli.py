"""The command line: a run's folder, every way to get it wrong, and what a person then reads."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import typer
from rich.console import Console

from engram import Divergence, Progress, Result, preset
from engram.cli.display import RunDisplay
from engram.cli.main import app, main
from engram.config.presets import STEADY
from engram.config.settings import PAPER_METHODS, load_config
from engram.engine import InProcess
from engram.engine.in_process import ReportOfStack, Stack
from engram.engine.progress import StopAsked
from engram.engine.stacks import Builder
from engram.reproduction import plan as planning
from engram.runs.sheets import read_sheet

REPOSITORY = Path(__file__).parents[2]
QUICK = ("--dataset", "mnist-small", "--epochs", "1", "--tasks", "2", "--trials", "1")
COMMANDS = ("run", "sweep", "reproduce", "table", "figures", "report", "data list", "data fetch", "data check")
COMMANDS += ("runs list", "runs show", "runs compare", "runs export")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Engram:
    """`engram ...` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> Outcome:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return Outcome(stopped.value.code or 0, captured.out, captured.err)

    def refusal(self, *arguments: str | Path) -> str:
        """The one line on stderr of a command that must be refused."""
        outcome = self(*arguments)
        assert_is_refusal(outcome)
        return outcome.err.removesuffix("\n")


def assert_is_refusal(outcome: Outcome) -> None:
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("engram: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert len(outcome.err) > 20
    assert "Traceback" not in outcome.err + outcome.out


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder from outside, an empty working folder, and a terminal of ordinary width."""
    monkeypatch.delenv("ENGRAM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def engram(capsys: pytest.CaptureFixture[str]) -> Engram:
    return Engram(capsys)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """One real run, of two methods and two trials, through a real process."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["run", "split-mnist", *QUICK[:-1], "2", "--methods", "finetune,dhp+si", "--out", str(folder)]
    return folder, run_process(*arguments)


@pytest.fixture
def copy(finished: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "ENGRAM_DATA"}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"} | changes


def run_process(*arguments: str, **changes: str) -> Outcome:
    command = [sys.executable, "-m", "engram", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(**changes), timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- a run and what it leaves behind


def test_a_run_succeeds_without_a_word_on_stderr(finished: tuple[Path, Outcome]) -> None:
    folder, outcome = finished
    assert (outcome.code, outcome.err) == (0, "")
    assert "split-mnist on mnist-small, 2 tasks, 2 trials" in outcome.out
    assert f"engram figures {folder}" in " ".join(outcome.out.split())


def test_a_run_that_is_no_terminal_prints_a_line_a_method_after_each_task(finished: tuple[Path, Outcome]) -> None:
    lines = [line for line in finished[1].out.splitlines() if ", task " in line]
    patterns = [
        rf"{re.escape(m)}, task {n}/2: (\d+\.\d ){{{n}}}\(mean of 2 trials\)"
        for n in (1, 2)
        for m in ("finetune", "dhp+si")
    ]
    assert len(lines) == 4
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_a_run_holds_exactly_its_files(finished: tuple[Path, Outcome]) -> None:
    names = [f"{m}/{f}" for m in ("dhp+si", "finetune") for f in ("accuracy.json", "config.toml", "dynamics.csv")]
    assert sorted(files_in(finished[0])) == [*names, "log.txt", "run.json"]


def test_a_run_describes_itself(finished: tuple[Path, Outcome]) -> None:
    folder, _ = finished
    description = json.loads((folder / "run.json").read_text())
    assert set(description) >= {
        "format", "benchmark", "methods", "command", "started", "finished", "device", "precision", "max_stack",
        "versions", "data",
    }  # fmt: skip
    assert description["format"] == 1
    assert description["benchmark"] == "split-mnist"
    assert description["methods"] == ["finetune", "dhp+si"]
    assert description["command"].startswith("engram run split-mnist --dataset mnist-small")
    assert description["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (description["precision"], description["max_stack"]) == ("tf32", None)
    assert description["versions"]["torch"] == torch.__version__
    assert set(description["versions"]) >= {"python", "platform", "engram", "torch", "numpy", "scipy"}
    assert description["data"] == [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}]
    assert description["started"] <= description["finished"]


def test_a_run_knows_its_own_version(finished: tuple[Path, Outcome]) -> None:
    from engram import __version__

    assert json.loads((finished[0] / "run.json").read_text())["versions"]["engram"] == __version__


def test_the_log_tells_the_run(finished: tuple[Path, Outcome]) -> None:
    lines = (finished[0] / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines)
    told = [line.split("  ", 1)[1] for line in lines]
    assert told[0].startswith("engram run split-mnist")
    assert re.fullmatch(r"finetune, task 1/2: \d+\.\d \(mean of 2 trials\)", told[1])
    assert re.fullmatch(r"dhp\+si, task 1/2: \d+\.\d \(mean of 2 trials\)", told[2])
    assert re.fullmatch(r"finetune, task 2/2: \d+\.\d \d+\.\d \(mean of 2 trials\)", told[3])
    assert re.fullmatch(r"done in \d+\.\d s", told[5])
    assert len(told) == 6


def test_the_kept_settings_are_those_that_were_asked_for(finished: tuple[Path, Outcome]) -> None:
    config = load_config(finished[0] / "dhp+si" / "config.toml")
    assert (config.method, config.trials, config.epochs, config.num_tasks) == ("dhp+si", 2, 1, 2)
    assert (config.dataset, config.strength, config.hidden) == ("mnist-small", 1.0, (256, 256))


def test_the_kept_accuracies_are_those_in_the_log(finished: tuple[Path, Outcome]) -> None:
    folder, _ = finished
    for method in ("finetune", "dhp+si"):
        content = json.loads((folder / method / "accuracy.json").read_text())
        assert content["diverged"] == []
        rows = [
            [float(v) for v in line.rsplit(": ", 1)[1].split(" (")[0].split()]
            for line in (folder / "log.txt").read_text().splitlines()
            if f"  {method}, task" in line
        ]
        trials = content["accuracy"]
        kept = [[statistics.mean(trial[task][j] for trial in trials) for j in range(task + 1)] for task in range(2)]
        assert [[round(100 * v, 1) for v in row] for row in kept] == rows
        assert all(0.3 < v <= 1 for row in kept for v in row)
        assert len(content["untrained"]) == 2


def test_dynamics_of_the_trace_are_finite_where_there_is_one(finished: tuple[Path, Outcome]) -> None:
    folder, _ = finished
    for method, plastic in (("finetune", False), ("dhp+si", True)):
        with (folder / method / "dynamics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == ["trial", "task", "epoch", "step", "loss", "eta", "hebb_norm", "alpha_norm"]
        assert {(row["trial"], row["task"]) for row in rows} == {(k, n) for k in "01" for n in "01"}
        for row in rows:
            assert math.isfinite(float(row["loss"]))
            for name in ("eta", "hebb_norm", "alpha_norm"):
                assert math.isfinite(float(row[name])) is plastic
        if plastic:
            assert 0 < float(rows[0]["eta"]) < 0.1
            assert float(rows[-1]["hebb_norm"]) > float(rows[0]["hebb_norm"]) > 0


# --- table and figures of a run


def test_the_table_is_the_one_that_the_run_showed(finished: tuple[Path, Outcome], engram: Engram) -> None:
    folder, outcome = finished
    shown = outcome.out[outcome.out.index("split-mnist on") : outcome.out.index("Results are in")]
    again = engram("table", folder)
    assert (again.code, again.err) == (0, "")
    assert [line.rstrip() for line in again.out.splitlines()] == [line.rstrip() for line in shown.splitlines()]


def test_the_table_as_csv_agrees_with_the_kept_accuracies(finished: tuple[Path, Outcome], engram: Engram) -> None:
    folder, _ = finished
    rows = list(csv.DictReader(engram("table", folder, "--format", "csv").out.splitlines()))
    for row in rows:
        matrices = json.loads((folder / row["method"] / "accuracy.json").read_text())["accuracy"]
        accuracy = statistics.mean(sum(matrix[1]) / 2 for matrix in matrices)
        transfer = statistics.mean(matrix[1][0] - matrix[0][0] for matrix in matrices)
        assert float(row["ACC %"]) == pytest.approx(100 * accuracy, abs=0.00501)
        assert float(row["BWT"]) == pytest.approx(transfer, abs=0.000501)
    assert [row["method"] for row in rows] == ["finetune", "dhp+si"]


def test_the_table_as_markdown_is_a_table(finished: tuple[Path, Outcome], engram: Engram) -> None:
    lines = engram("table", finished[0], "--format", "markdown").out.splitlines()
    assert lines[0] == "**split-mnist on mnist-small, 2 tasks, 2 trials**"
    assert lines[2] == "| method | ACC % | ± SEM | BWT | first % | last % |"
    assert lines[4].startswith("| finetune | ")


def test_figures_are_drawn_beside_the_run_and_named(copy: Path, engram: Engram) -> None:
    outcome = engram("figures", copy)
    assert (outcome.code, outcome.err) == (0, "")
    paths = [Path(line) for line in outcome.out.splitlines()]
    names = {"accuracy", "first-and-latest", "matrices", "dynamics"}
    assert {path.name for path in paths} == {f"{name}.{end}" for name in names for end in ("png", "pdf", "csv")}
    for path in paths:
        assert path.parent == copy / "figures"
        start = {".png": b"\x89PNG", ".pdf": b"%PDF", ".csv": b"method"}[path.suffix]
        assert path.read_bytes().startswith(start)


def test_figures_are_drawn_where_they_are_wanted(copy: Path, tmp_path: Path, engram: Engram) -> None:
    before = files_in(copy)
    engram("figures", copy, "--out", tmp_path / "else" / "where", "--format", "png")
    assert len(list((tmp_path / "else" / "where").iterdir())) == 4
    assert files_in(copy) == before


def test_a_report_is_written_beside_the_run_or_where_it_is_wanted(copy: Path, tmp_path: Path, engram: Engram) -> None:
    outcome = engram("report", copy)
    assert (outcome.code, outcome.err, outcome.out) == (0, "", f"{copy / 'report.html'}\n")
    elsewhere = tmp_path / "new" / "page.html"
    assert engram("report", copy, "--out", elsewhere).out == f"{elsewhere}\n"
    assert elsewhere.read_bytes() == (copy / "report.html").read_bytes()


def test_a_report_cannot_be_written_below_a_file(copy: Path, tmp_path: Path, engram: Engram) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert str(file) in engram.refusal("report", copy, "--out", file / "page.html")
    assert "folder" in engram.refusal("report", copy, "--out", tmp_path)
    assert file.read_text() == "mine"


# --- bad input: exit code 2, one line, nothing half-written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["permuted-mnst"], ["no benchmark 'permuted-mnst'", "permuted-mnist"]),
        (["mnist"], ["no benchmark 'mnist'"]),
        ([""], ["no benchmark ''"]),
        (["split-mnist", "--methods", "ewcc"], ["no method 'ewcc'", "ewc"]),
        (["split-mnist", "--methods", "si,,mas"], ["no method ''"]),
        (["split-mnist", "--methods", ""], ["no method ''"]),
        (["split-mnist", "--methods", "si,mas,si"], ["twice"]),
        (["split-mnist", "--device", "gpu"], ["no device 'gpu'", "auto"]),
        (["split-mnist", "--device", "cuda:99"], ["no device 'cuda:99'"]),
        (["split-mnist", "--device", "meta"], ["no device 'meta'"]),
        (["split-mnist", "--dataset", "mnist-smal"], ["no dataset 'mnist-smal'", "mnist-small"]),
        (["split-mnist", "--dataset", "five-datasets"], ["split-mnist", "five-datasets"]),
        (["vision-mixture", "--dataset", "mnist-small"], ["vision-mixture", "mnist-small"]),
        (["split-mnist", "--set", "epoch=3"], ["no setting 'epoch'", "epochs"]),
        (["split-mnist", "--set", "epochs"], ["name=value", "'epochs'"]),
        (["split-mnist", "--set", "epochs=many"], ["epochs", "'many'"]),
        (["split-mnist", "--set", "hidden=[]"], ["hidden"]),
        (["split-mnist", "--set", "hidden=12"], ["hidden", "12"]),
        (["split-mnist", "--set", "alpha=none"], ["no alpha 'none'"]),
        (["split-mnist", "--set", "method=dhp"], ["method"]),
        (["split-mnist", "--set", "benchmark=permuted-mnist"], ["benchmark"]),
        (["split-mnist", "--trials", "0"], ["trials must be at least 1, not 0"]),
        (["split-mnist", "--trials", "-3"], ["trials must be at least 1, not -3"]),
        (["split-mnist", "--trials", "two"], ["--trials"]),
        (["split-mnist", "--trials", "1.5"], ["--trials"]),
        (["split-mnist", "--epochs", "0"], ["epochs must be at least 1, not 0"]),
        (["split-mnist", "--epochs", "-1"], ["epochs must be at least 1, not -1"]),
        (["split-mnist", "--tasks", "0"], ["num_tasks must be at least 1, not 0"]),
        (["split-mnist", "--tasks", "6"], ["1 to 5 tasks", "6"]),
        (["split-mnist", "--seed", "-1"], ["seed must be at least 0, not -1"]),
        (["split-mnist", "--strength", "0"], ["strength must be above 0, not 0.0"]),
        (["split-mnist", "--strength", "-1"], ["strength must be above 0, not -1.0"]),
        (["split-mnist", "--strength", "nan"], ["strength must be above 0, not nan"]),
        (["split-mnist", "--strength", "-1", "--methods", "finetune"], ["strength must be above 0, not -1.0"]),
        (["split-mnist", "--eta", "1.5"], ["eta must be in [0, 1], not 1.5"]),
        (["split-mnist", "--eta", "-0.1"], ["eta must be in [0, 1], not -0.1"]),
        (["split-mnist", "--eta", "nan"], ["eta must be"]),
        (["split-mnist", "--eta", "inf", "--set", "eta_range=unbounded"], ["eta must be"]),
        (["split-mnist", "--eta", "1e39", "--set", "eta_range=unbounded"], ["eta"]),
        (["split-mnist", "--set", "learning_rate=0"], ["learning_rate must be above 0, not 0.0"]),
        (["split-mnist", "--set", "learning_rate=1e39"], ["learning_rate"]),
        (["split-mnist", "--set", "learning_rate=" + "9" * 400], ["learning_rate"]),
        (["split-mnist", "--set", "gamma=2"], ["gamma must be in [0, 1], not 2.0"]),
        (["split-mnist", "--set", "batch_size=0"], ["batch_size must be at least 1, not 0"]),
        (["split-mnist", "--bogus"], ["--bogus"]),
        (["split-mnist", "extra"], ["extra"]),
        (["split-mnist", "--precision", "bfloat16"], ["no precision 'bfloat16'", "float32"]),
        (["split-mnist", "--stack", "0"], ["at least one model, not 0"]),
        (["split-mnist", "--stack", "-2"], ["at least one model, not -2"]),
        (["split-mnist", "--set", "network=own"], ["network='own'", "engram.run"]),
        ([], ["BENCHMARK"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_run_with_bad_arguments_is_refused(engram: Engram, out: Path, arguments: list[str], words: list[str]) -> None:
    quick = ["--methods", "si", "--epochs", "1", "--trials", "1", "--tasks", "2", "--out", str(out)]
    if arguments[:1] != ["vision-mixture"]:
        quick += ["--dataset", "mnist-small"]
    line = engram.refusal("run", *quick, *arguments)
    for word in words:
        assert word in line
    assert not out.exists()
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["data", "nonsense"], "nonsense"),
        (["data", "check", "mnits"], "mnits"),
        (["data", "fetch", "mnits"], "mnits"),
        (["data", "fetch"], "NAME"),
        (["data", "list", "--data", "no/such"], "no/such"),
        (["data", "check", "--data", "no/such"], "no/such"),
        (["table"], "DIR"),
        (["table", "no/such"], "no/such"),
        (["figures", "no/such"], "no/such"),
        (["report", "no/such"], "no/such"),
        (["table", ".", "--format", "latex"], "latex"),
        (["figures", ".", "--format", "png,gif"], "gif"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_bad_arguments_are_refused(engram: Engram, arguments: list[str], word: str) -> None:
    assert word in engram.refusal(*arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("data",)])
def test_a_bare_command_shows_its_help_and_no_empty_complaint(engram: Engram, arguments: tuple[str, ...]) -> None:
    outcome = engram(*arguments)
    assert "Usage" in outcome.out + outcome.err
    assert outcome.err.strip() != "engram:"


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


def idx_images(count: int) -> bytes:
    return struct.pack(">4I", 2051, count, 28, 28) + bytes(range(256)) * (count * 784 // 256) + bytes(count * 784 % 256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a MNIST of twenty images."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx_images(20))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx_labels(*range(10), *range(10)))
    return tmp_path / "data"


MNIST = ("run", "split-mnist", "--methods", "finetune", "--epochs", "1", "--trials", "1", "--tasks", "2")


def test_a_folder_of_other_files_is_used_and_noted(engram: Engram, data: Path, out: Path) -> None:
    outcome = engram(*MNIST, "--data", data, "--out", out)
    assert outcome.code == 0
    assert "20 + 20 samples" in outcome.out.replace("\n", " ")
    assert json.loads((out / "run.json").read_text())["data"][0]["origin"] == "structure"


def test_the_environment_may_name_the_data(
    engram: Engram, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_DATA", str(data))
    assert engram(*MNIST, "--out", out).code == 0


def test_a_missing_data_folder_is_named(engram: Engram, tmp_path: Path, out: Path) -> None:
    assert str(tmp_path / "nowhere") in engram.refusal(*MNIST, "--data", tmp_path / "nowhere", "--out", out)
    assert not out.exists()
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_data_folder_in_the_environment_is_named(
    engram: Engram, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "nowhere"))
    assert "ENGRAM_DATA" in engram.refusal(*MNIST, "--out", out)
    assert not out.exists()


def test_a_data_folder_that_is_a_file_is_refused(engram: Engram, tmp_path: Path, out: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in engram.refusal(*MNIST, "--data", tmp_path / "file", "--out", out)
    assert not out.exists()


def test_a_dataset_missing_from_the_folder_is_named_with_its_remedy(engram: Engram, data: Path, out: Path) -> None:
    line = engram.refusal(*MNIST, "--dataset", "fashion-mnist", "--data", data, "--out", out)
    assert "FashionMNIST" in line
    assert "engram data fetch fashion-mnist" in line
    assert not out.exists()


def test_a_dataset_of_the_mixture_missing_from_the_folder_is_named(engram: Engram, data: Path, out: Path) -> None:
    line = engram.refusal("run", "vision-mixture", "--data", data, "--out", out)
    assert "engram data fetch notmnist" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train-images-idx3-ubyte", idx_images(20)[:-1], ["truncated"]),
        ("train-images-idx3-ubyte", b"\x00\x00", ["truncated"]),
        ("train-images-idx3-ubyte", b"", ["truncated"]),
        ("t10k-images-idx3-ubyte", idx_labels(*range(10)) * 3, ["magic number", "2049", "2051"]),
        ("t10k-labels-idx1-ubyte", idx_images(1), ["magic number", "2051", "2049"]),
        ("train-labels-idx1-ubyte", idx_labels(*range(10), *range(9), 10), ["label 10", "position 19"]),
        ("train-labels-idx1-ubyte", idx_labels(*range(9)), ["20 images but 9 labels"]),
        ("t10k-labels-idx1-ubyte", idx_labels(*[0] * 20), ["empty"]),
        ("train-labels-idx1-ubyte.gz", b"not gzip at all", ["gzip"]),
    ],
    ids=[
        "one byte short",
        "no header",
        "nothing",
        "labels as images",
        "images as labels",
        "label 10",
        "too few",
        "no 1 to 9",
        "no gzip",
    ],
)
def test_damaged_data_are_refused_by_name(
    engram: Engram, data: Path, out: Path, name: str, content: bytes, words: list[str]
) -> None:
    (data / "MNIST" / "raw" / name).write_bytes(content)
    line = engram.refusal(*MNIST, "--data", data, "--out", out)
    for word in words:
        assert word in line
    if words != ["empty"]:  # that is no fault of the file, but of a task that gets nothing from it
        assert name in line
    assert not out.exists()


def test_check_counts_the_files_that_cannot_be_used(engram: Engram, data: Path) -> None:
    assert engram("data", "check", "mnist", "--data", data).code == 0
    (data / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"damaged!")
    outcome = engram("data", "check", "mnist", "--data", data)
    assert_is_refusal(outcome)
    assert "1 file" in outcome.err
    assert "train-labels-idx1-ubyte" in outcome.err
    assert outcome.out.count(": usable, but not the published file") == 3


def test_the_list_says_which_datasets_are_there(engram: Engram, data: Path) -> None:
    lines = engram("data", "list", "--data", data).out.splitlines()
    assert lines[0] == f"in {data}"
    states = dict(line.split() for line in lines[1:])
    assert states == {
        "mnist": "there",
        "fashion-mnist": "missing",
        "notmnist": "missing",
        "svhn": "missing",
        "cifar-10": "missing",
        "mnist-small": "there",
    }


def test_another_run_is_never_overwritten(copy: Path, engram: Engram) -> None:
    before = files_in(copy)
    line = engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", copy)
    assert "already holds a run" in line
    assert files_in(copy) == before


def test_other_files_are_never_mixed_with_a_run(out: Path, engram: Engram) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    assert "thesis.tex" in engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", out)
    assert files_in(out) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("below", ["", "below", "far/below"])
def test_a_file_cannot_hold_a_run(tmp_path: Path, engram: Engram, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    line = engram.refusal("run", "split-mnist", *QUICK, "--methods", "dhp", "--out", file / below)
    assert "cannot write to" in line
    assert str(file) in line
    assert file.read_text() == "mine"


def test_figures_cannot_be_drawn_into_a_file(copy: Path, tmp_path: Path, engram: Engram) -> None:
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
def test_a_damaged_run_is_refused_and_left_alone(copy: Path, engram: Engram, command: str, how: str) -> None:
    damage(copy, how)
    before = files_in(copy)
    line = engram.refusal(command, copy)
    assert str(copy) in line
    assert files_in(copy) == before
    assert not (copy / "figures").exists()
    assert not (copy / "report.html").exists()


@pytest.mark.parametrize("command", ["table", "figures", "report"])
def test_a_file_is_no_run(tmp_path: Path, engram: Engram, command: str) -> None:
    (tmp_path / "file").touch()
    assert "file" in engram.refusal(command, tmp_path / "file")


# --- a loss that stops being a number


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A learning rate that overflows at once without a trace, and with one."""
    folder = tmp_path_factory.mktemp("diverged") / "run"
    arguments = ["run", "split-mnist", *QUICK, "--methods", "finetune,dhp", "--set", "learning_rate=1e30"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(folder)])
    return folder, Outcome(stopped.value.code, out.getvalue(), err.getvalue())


def test_a_run_that_diverged_says_where(diverged: tuple[Path, Outcome]) -> None:
    _, outcome = diverged
    assert_is_refusal(outcome)
    assert "trial 1" in outcome.err
    assert "task 1" in outcome.err
    assert "step 2" in outcome.err  # the first step is from a sound network, the second is not


def test_a_run_that_diverged_keeps_every_method(diverged: tuple[Path, Outcome]) -> None:
    folder, outcome = diverged
    for method in ("finetune", "dhp"):
        content = json.loads((folder / method / "accuracy.json").read_text())
        assert content["diverged"] == [{"trial": 0, "task": 0, "step": 1}]
        assert content["accuracy"] == [[[None, None], [None, None]]]
        assert all(0 <= value <= 1 for value in content["untrained"][0])
        assert f"{method}, trial 1 diverged in task 1, step 2" in (folder / "log.txt").read_text()
        assert (folder / "log.txt").read_text().count(f"{method}, trial 1 diverged") == 1
        assert outcome.out.count(f"{method}, trial 1 diverged") == 1
        assert f"{method}: trial 1 diverged" in outcome.out, "in the notes of the table"
    assert "finished" in json.loads((folder / "run.json").read_text())


def test_the_table_of_a_run_that_diverged_can_be_printed(diverged: tuple[Path, Outcome], engram: Engram) -> None:
    outcome = engram("table", diverged[0], "--format", "csv")
    assert (outcome.code, outcome.err) == (0, "")
    assert "finetune,–,–,–,–,–" in outcome.out


def test_the_figures_of_a_run_that_diverged_can_be_drawn(
    diverged: tuple[Path, Outcome], engram: Engram, tmp_path: Path
) -> None:
    outcome = engram("figures", diverged[0], "--out", tmp_path / "figures")
    assert (outcome.code, outcome.err) == (0, "")


def test_methods_after_one_that_diverged_still_complete(engram: Engram, out: Path) -> None:
    # At this strength the plain gradient step on the penalty overflows in task 2; finetune has no penalty.
    unstable = ("--strength", "1e12", "--set", "penalty_step=gradient")
    outcome = engram("run", "split-mnist", *QUICK, "--methods", "mas,finetune", *unstable, "--out", out)
    assert_is_refusal(outcome)
    assert re.match(r"engram: mas, trial 1 diverged in task 2, step \d+", outcome.err)
    mas = json.loads((out / "mas" / "accuracy.json").read_text())
    assert mas["diverged"][0]["task"] == 1
    assert mas["accuracy"][0][0][0] > 0.5  # what was learned before is kept
    assert mas["accuracy"][0][1] == [None, None]
    finetune = json.loads((out / "finetune" / "accuracy.json").read_text())
    assert finetune["diverged"] == []
    assert all(value > 0.5 for value in finetune["accuracy"][0][1])


# --- a real process


@pytest.mark.slow
def test_a_refusal_of_a_real_process_is_one_line_too(tmp_path: Path) -> None:
    outcome = run_process("run", "split-mnist", "--trials", "0", "--out", str(tmp_path / "out"))
    assert_is_refusal(outcome)
    assert outcome.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_was_learned_and_says_how_to_go_on(out: Path, engram: Engram) -> None:
    arguments = ["run", "split-mnist", *QUICK, "--epochs", "1000", "--methods", "finetune", "--out", str(out)]
    command = [sys.executable, "-m", "engram", *arguments]
    pipe = subprocess.PIPE
    # Tests that run in the background of a shell are told to ignore the signal, and what they start would be too.
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, encoding="utf-8", env=environment(), preexec_fn=listen
    ) as process:
        for _ in range(600):
            if ((out / "log.txt").exists() and (out / "log.txt").read_text()) or process.poll() is not None:
                break
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5, "it ends promptly"
    assert process.returncode == 130
    first, last = err.splitlines()
    assert first.startswith("engram: stopping: the steps that are being taken are ended and kept")
    assert last == f"engram: stopped; `engram run --resume {out}` goes on"
    assert len(list((out / "checkpoints").glob("stack-0.safetensors"))) == 1
    assert "finished" not in json.loads((out / "run.json").read_text())
    assert "no results yet" in engram.refusal("table", out)


def test_a_run_interrupted_after_a_task_can_be_looked_at(
    out: Path, engram: Engram, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_a_task(display: RunDisplay, seen: Progress) -> None:
        if seen.results is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDisplay, "show", stop_after_a_task)
        outcome = engram("run", "split-mnist", *QUICK, "--methods", "finetune,dhp", "--out", out)
    assert outcome.code == 130
    assert outcome.err == f"engram: stopped; `engram run --resume {out}` goes on\n"
    table = engram("table", out)
    assert table.code == 0
    assert f"`engram run --resume {out}` goes on" in table.out.replace("\n", " ")
    assert engram("figures", out).code == 0


def test_a_terminal_gets_one_bar_and_a_live_line_a_method() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=90, _environ={"TERM": "xterm"})
    config = preset("split-mnist", "dhp+si", num_tasks=3, trials=2)
    accuracy = np.full((2, 3, 3), np.nan)
    accuracy[:, 0, :2] = [[0.9, 0.5], [1.0, 0.6]]
    result = Result(config, (0, 1), accuracy, np.zeros((2, 3)), diverged=[Divergence(1, 1, 7)])
    with RunDisplay([config, config.replace(method="si")], console) as display:
        display.show(Progress(0.1, 0, note="a note"))
        display.show(Progress(0.4, 0, [result]))
        display.show(Progress(0.4, 0, [result]))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "task 1/3" in last
    assert " 40%" in last
    assert "95.0 (mean of 2 trials)" in last
    assert last.count("a note") == 1
    assert last.count("dhp+si, trial 2 diverged in task 2, step 8") == 1
    assert "dhp+si, task 1/3" not in last


# --- reproductions


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick reproduction that is quicker still."""
    for benchmark, settings in planning.QUICK.items():
        less = {"max_samples": 40, "hidden": [4], "num_tasks": 2, "batch_size": 20}
        monkeypatch.setitem(planning.QUICK, benchmark, settings | less)
    monkeypatch.setattr(planning, "QUICK_TRIALS", 1)


REPRODUCE = ("reproduce", "--quick", "--device", "cpu")
TABLE = (*REPRODUCE, "--benchmark", "split-mnist", "--part", "table")


@pytest.fixture
def pageless(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of which a page would have been written, which takes longer than all else."""
    asked: list[Path] = []
    monkeypatch.setattr("engram.cli.reproduce.write_report", lambda folder: asked.append(folder) or "a page")
    return asked


def test_a_quick_reproduction_leaves_a_sheet_and_a_page(engram: Engram, out: Path, tiny: None) -> None:
    outcome = engram(*TABLE, "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert re.fullmatch(r"split-mnist: table, 8 models in \d+ s", lines[0])
    assert lines[1] == f"Results are in {out}; the page about them is {out / 'report.html'}"
    assert len(lines) == 2
    assert sorted(files_in(out)) == ["report.html", "split-mnist/table.json"]
    assert "quick" in (out / "report.html").read_text(encoding="utf-8")
    sheet = read_sheet(out / "split-mnist" / "table.json")
    assert sheet.quick
    assert sheet.about["command"] == f"engram {' '.join(TABLE)} --out {out}"
    assert list(sheet.entries) == list(PAPER_METHODS)


def test_a_reproduction_runs_nothing_twice_and_mixes_nothing(
    engram: Engram, out: Path, tiny: None, pageless: list[Path]
) -> None:
    assert engram(*TABLE, "--out", out).code == 0
    before = files_in(out)
    again = engram(*TABLE, "--out", out)
    assert again.out.splitlines()[0] == "split-mnist: table, was there already"
    more = engram(*TABLE, "--part", "variant", "--out", out)
    first, second, _ = more.out.splitlines()
    assert first == "split-mnist: table, was there already"
    assert second.startswith("split-mnist: variant, 4 models in ")
    assert files_in(out)["split-mnist/table.json"] == before["split-mnist/table.json"]
    whole = [argument for argument in TABLE if argument != "--quick"]
    assert "there is a quick reproduction in this folder already" in engram.refusal(*whole, "--out", out)
    assert pageless == [out] * 3


class Threads(InProcess):
    """An engine that has room for several stacks, as a cluster does; but this process trains one at a time."""

    at_once = 3
    turn = threading.Lock()
    at_work: ClassVar[set[str]] = set()  # by name

    def train(self, stacks: Sequence[Stack], report: ReportOfStack, stop_asked: StopAsked) -> None:
        self.at_work.add(threading.current_thread().name)
        for stack in stacks:
            with self.turn:
                super().train([stack], report, stop_asked)

    def limit(self, builder: Builder) -> int | None:
        with self.turn:
            return super().limit(builder)


def test_parts_that_run_at_the_same_time_leave_the_same_sheets(
    engram: Engram, tmp_path: Path, tiny: None, pageless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (*TABLE, "--part", "sensitivity", "--part", "strengths")
    assert engram(*parts, "--out", tmp_path / "one").code == 0
    monkeypatch.setattr("engram.cli.reproduce.start_engine", lambda name, address: nullcontext(Threads()))
    outcome = engram(*parts, "--out", tmp_path / "other")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) == 4
    assert len(Threads.at_work) > 1
    for name in ("table", "sensitivity", "strengths"):
        one, other = (read_sheet(tmp_path / folder / "split-mnist" / f"{name}.json") for folder in ("one", "other"))
        assert list(one.entries) == list(other.entries)
        for label, result in one.entries.items():
            assert np.array_equal(result.accuracy, other.entries[label].accuracy, equal_nan=True)


def test_a_quick_reproduction_has_a_folder_of_its_own(engram: Engram, tiny: None, pageless: list[Path]) -> None:
    assert engram(*TABLE).code == 0
    assert pageless == [Path("reproduction-quick")]
    assert Path("reproduction-quick/split-mnist/table.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark", "splitmnist"], "there is no benchmark 'splitmnist' (did you mean split-mnist?), only"),
        (["--part", "tabel"], "there is no part 'tabel' (did you mean table?), only table, variant, sensitivity"),
        (["--benchmark", "vision-mixture", "--part", "study"], "there is no study of vision-mixture"),
        (["--device", "abacus"], "there is no device 'abacus' here"),
        (["--precision", "float8"], "there is no precision 'float8'"),
        (["--stack", "0"], "a stack has at least one model, not 0"),
        (["split-mnist"], "unexpected extra argument"),
    ],
)
def test_a_reproduction_with_bad_arguments_is_refused(
    engram: Engram, out: Path, arguments: list[str], words: str
) -> None:
    assert words in engram.refusal("reproduce", "--quick", "--out", out, *arguments)
    assert not out.exists()


def test_a_benchmark_without_data_is_left_out_unless_it_was_asked_for(
    engram: Engram, out: Path, data: Path, tiny: None, pageless: list[Path]
) -> None:
    everything = (*REPRODUCE, "--part", "table", "--data", data, "--out", out)
    outcome = engram(*everything)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    left_out = [line for line in lines if line.startswith("vision-mixture is left out: ")]
    assert len(left_out) == 1
    assert "notmnist" in left_out[0]
    assert sum(": table, 8 models in " in line for line in lines) == 3
    assert not (out / "vision-mixture").exists()
    assert "notmnist" in engram.refusal(*everything, "--benchmark", "vision-mixture")
    assert not (out / "vision-mixture").exists()


def test_a_reproduction_that_was_stopped_says_how_it_goes_on(
    engram: Engram, out: Path, tiny: None, pageless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("engram.cli.reproduce.run_part", stop)
        outcome = engram(*TABLE, "--out", out)
    assert outcome.code == 130
    assert outcome.err == f"engram: stopped; `engram {' '.join(TABLE)} --out {out}` goes on\n"
    assert engram(*TABLE, "--out", out).code == 0
    assert sorted(files_in(out)) == ["split-mnist/table.json"]


def test_a_reproduction_cannot_be_written_below_a_file(engram: Engram, tmp_path: Path, tiny: None) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in engram.refusal(*TABLE, "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- help, version, documentation


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_shows_its_example(engram: Engram, command: str) -> None:
    outcome = engram(*command.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example: engram {command}" in " ".join(outcome.out.split())


def test_every_command_is_known_to_these_tests() -> None:
    found = set()
    for name, command in typer.main.get_command(app).commands.items():
        found |= {f"{name} {inner}".strip() for inner in getattr(command, "commands", {"": command})}
    assert found == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    readme = REPOSITORY / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if not any(f"engram {name}" in text for name in COMMANDS):
        pytest.skip("README.md does not mention any command yet")
    assert f"engram {command}" in text


def test_the_version_is_the_packages(engram: Engram) -> None:
    from engram import __version__

    outcome = engram("--version")
    assert (outcome.code, outcome.out) == (0, f"{__version__}\n")


# --- the price of `import engram`


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(), check=True).stdout


# torch is imported once; each of five children, one after another, then imports engram for the first time.
TIME_IMPORT = """
import os, time, torch
for _ in range(5):
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        start = time.perf_counter()
        import engram
        print(time.perf_counter() - start, flush=True)
        os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_importing_engram_is_cheap_once_torch_is_there() -> None:
    seconds = [float(line) for line in python(TIME_IMPORT).split()]
    assert len(seconds) == 5
    assert statistics.median(seconds) < 0.3


def test_importing_engram_imports_nothing_that_only_some_need() -> None:
    heavy = {"scipy", "matplotlib", "rich", "typer", "pooch", "triton", "sklearn", "onnx", "tensorboard", "avalanche"}
    loaded = set(python("import sys, engram; print(*{name.split('.')[0] for name in sys.modules})").split())
    assert loaded & heavy == set()
    assert "engram" in loaded


def test_a_kept_config_can_be_run_again(finished: tuple[Path, Outcome], engram: Engram, out: Path) -> None:
    first = finished[0] / "dhp+si"
    outcome = engram("run", first / "config.toml", "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    for name in ("config.toml", "accuracy.json", "dynamics.csv"):
        assert (out / "dhp+si" / name).read_bytes() == (first / name).read_bytes()


def test_a_kept_config_has_its_own_method_and_benchmark(
    finished: tuple[Path, Outcome], engram: Engram, tmp_path: Path, out: Path
) -> None:
    config = finished[0] / "dhp+si" / "config.toml"
    assert "names its own method" in engram.refusal("run", config, "--methods", "dhp", "--out", out)
    own = tmp_path / "own.toml"
    own.write_text('benchmark = "own"\nmethod = "dhp"\ndataset = "own"\n')
    assert "runs from Python" in engram.refusal("run", own, "--out", out)
    assert "no benchmark 'own'" in engram.refusal("run", "own", "--out", out)
    assert not out.exists()


def test_a_folder_with_brackets_in_its_name_is_just_a_folder(engram: Engram, tmp_path: Path) -> None:
    out = tmp_path / "a[/b]c"
    outcome = engram("run", "split-mnist", *QUICK, "--methods", "finetune", "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Results are in {out}" in outcome.out


def test_the_steady_trace_is_of_the_plastic_methods_alone(engram: Engram, out: Path) -> None:
    quick = ["--dataset", "mnist-small", "--trials", "1", "--epochs", "1", "--tasks", "1", "--set", "max_samples=20"]
    engram("run", "split-mnist", "--methods", "si,dhp+si", "--steady", "--set", "eta=0.5", *quick, "--out", str(out))
    kept = {method: load_config(out / method / "config.toml").to_dict() for method in ("si", "dhp+si")}
    assert {name: kept["dhp+si"][name] for name in STEADY} == {**STEADY, "eta": 0.5}, "what is set goes before"
    usual = preset("split-mnist", "si").to_dict()
    assert {name: kept["si"][name] for name in STEADY if name != "eta"} == {n: usual[n] for n in STEADY if n != "eta"}


def test_the_steady_trace_without_a_plastic_method_is_refused(engram: Engram, out: Path) -> None:
    line = engram.refusal("run", "split-mnist", "--methods", "finetune,si", "--steady", "--out", out)
    assert "--steady is a form of DHP" in line
    assert not out.exists()
