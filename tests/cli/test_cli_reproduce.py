"""`engram reproduce`: what it runs, prints and writes, and how it is resumed."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
from command import Command
from rich.console import Console

from builders import files_in
from engram.cli.terminal import PeriodicLines
from engram.config.paper import PAPER_METHODS
from engram.engine import InProcess
from engram.engine.in_process import ReportOfStack, Stack
from engram.engine.learner import StopAsked
from engram.engine.stacks import Builder
from engram.reproduction import plan as planning
from engram.runs.run import read_run

REPRODUCE = ("reproduce", "--quick", "--device", "cpu")
TABLE = (*REPRODUCE, "--benchmark", "split-mnist", "--part", "table")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick reproduction that is quicker still."""
    for benchmark, settings in planning.QUICK.items():
        less = {"max_samples": 40, "hidden": [4], "num_tasks": 2, "batch_size": 20}
        monkeypatch.setitem(planning.QUICK, benchmark, settings | less)
    monkeypatch.setattr(planning, "QUICK_TRIALS", 1)


@pytest.fixture
def pageless(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of which a page would have been written, which takes longer than all else."""
    asked: list[Path] = []
    monkeypatch.setattr("engram.reproduction.page.write_report", lambda folder: asked.append(folder) or "a page")
    return asked


def test_quick_reproduction_writes_results_and_a_page(engram: Command, out: Path, tiny: None) -> None:
    outcome = engram(*TABLE, "--out", out)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert re.fullmatch(r"split-mnist: table, 8 models in \d+ s", lines[0])
    assert lines[1] == f"Results are in {out}; the page about them is {out / 'report.html'}"
    assert len(lines) == 2
    files = ["dynamics.csv", "log.txt", "results.json", "run.json"]
    assert without_log(out) == {"report.html", "reproduction.json", *(f"split-mnist/table/{name}" for name in files)}
    assert "quick" in (out / "report.html").read_text(encoding="utf-8")
    run = read_run(out / "split-mnist" / "table")
    assert run.about["quick"]
    assert run.about["command"] == f"engram {' '.join(TABLE)} --out {out}"
    assert list(run.results) == list(PAPER_METHODS)


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    engram: Command, out: Path, tiny: None, pageless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.cli.terminal.SECONDS_BETWEEN_LINES", 0)
    lines = engram(*TABLE, "--out", out).out.splitlines()
    shown = [
        re.fullmatch(r"1/1 split-mnist: table: (\d+)%, \d+:\d\d elapsed(, \d+:\d\d left)?", line) for line in lines
    ]
    percents = [int(match[1]) for match in shown if match]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert len(percents) > 2


def test_the_time_that_is_left_is_that_at_the_speed_since_a_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("engram.cli.terminal.time.monotonic", lambda: now[0])
    lines = PeriodicLines(Console(), "a part")
    for seconds, done in ((105, 0.5), (120, 0.55), (135, 0.6), (150, 0.65), (165, 0.7)):
        now[0] = seconds
        lines.show(done)
    assert capsys.readouterr().out.splitlines() == [
        "a part: 60%, 0:35 elapsed, 2:00 left",
        "a part: 70%, 1:05 elapsed, 1:30 left",
    ]


def without_log(folder: Path) -> set[str]:
    """The files of a folder, without the log of the folder itself."""
    return set(files_in(folder)) - {"log.txt"}


def results_in(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_in(folder).items() if name.endswith("results.json")}


def test_reproduction_runs_nothing_twice_and_mixes_nothing(
    engram: Command, out: Path, tiny: None, pageless: list[Path]
) -> None:
    assert engram(*TABLE, "--out", out).code == 0
    before = results_in(out)
    again = engram(*TABLE, "--out", out)
    assert again.out.splitlines()[0] == "split-mnist: table, was finished already"
    more = engram(*TABLE, "--part", "variant", "--out", out)
    first, second, _ = more.out.splitlines()
    assert first == "split-mnist: table, was finished already"
    assert second.startswith("split-mnist: variant, 4 models in ")
    assert before.items() <= results_in(out).items()
    whole = [argument for argument in TABLE if argument != "--quick"]
    assert "quick" in engram.refusal(*whole, "--out", out)
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


def test_parts_that_run_at_the_same_time_give_the_same_results(
    engram: Command, tmp_path: Path, tiny: None, pageless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (*TABLE, "--part", "sensitivity", "--part", "rung-1")
    assert engram(*parts, "--out", tmp_path / "one").code == 0
    monkeypatch.setattr("engram.engine.start_engine", lambda name, address: nullcontext(Threads()))
    outcome = engram(*parts, "--out", tmp_path / "other")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) == 4
    assert len(Threads.at_work) > 1
    assert len(results_in(tmp_path / "one")) == 3
    assert results_in(tmp_path / "one") == results_in(tmp_path / "other")


def test_quick_reproduction_has_its_own_default_folder(engram: Command, tiny: None, pageless: list[Path]) -> None:
    assert engram(*TABLE).code == 0
    assert pageless == [Path("reproduction-quick")]
    assert Path("reproduction-quick/split-mnist/table/run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark", "splitmnist"], "there is no benchmark 'splitmnist' (did you mean split-mnist?), only"),
        (["--part", "tabel"], "there is no part 'tabel' (did you mean table?), only rung-1, grid-1, grid-2"),
        (["--benchmark", "vision-mixture", "--part", "study"], "nothing to run: vision-mixture has no part study"),
        (["--device", "abacus"], "there is no device 'abacus' here"),
        (["--precision", "float8"], "there is no precision 'float8'"),
        (["--stack", "0"], "a stack has at least one model, not 0"),
        (["split-mnist"], "unexpected extra argument"),
    ],
)
def test_reproduce_refuses_bad_arguments(engram: Command, out: Path, arguments: list[str], words: str) -> None:
    assert words in engram.refusal("reproduce", "--quick", "--out", out, *arguments)
    assert not out.exists()


def test_benchmark_without_data_is_left_out_unless_asked_for(
    engram: Command, out: Path, data: Path, tiny: None, pageless: list[Path]
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


def test_stopped_reproduction_says_how_to_resume(
    engram: Command, out: Path, tiny: None, pageless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("engram.reproduction.run.complete_run", stop)
        outcome = engram(*TABLE, "--out", out)
    assert outcome.code == 130
    assert outcome.err == f"engram: stopped; `engram run --resume {out}` resumes it\n"
    assert results_in(out) == {}
    resumed = engram("run", "--resume", out)
    assert (resumed.code, resumed.err) == (0, "")
    assert resumed.out.startswith("split-mnist: table, 8 models in ")
    assert list(results_in(out)) == ["split-mnist/table/results.json"]
    assert read_run(out / "split-mnist" / "table").about["command"] == f"engram {' '.join(TABLE)} --out {out}"


def test_reproduction_that_is_stopped_while_it_writes_its_page_says_how_to_resume(
    engram: Command, out: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path) -> Path:
        signal.raise_signal(signal.SIGINT)
        return folder

    monkeypatch.setattr("engram.reproduction.page.write_report", interrupt)
    outcome = engram(*TABLE, "--out", out)
    assert (outcome.code, outcome.err) == (130, f"engram: stopped; `engram run --resume {out}` resumes it\n")


def test_reproduction_that_was_stopped_before_it_started_leaves_nothing(
    engram: Command, out: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engram.engine.build.load_datasets", stop)
    outcome = engram(*TABLE, "--out", out)
    assert (outcome.code, outcome.err) == (130, "engram: stopped\n")
    assert not out.exists()


def test_resumed_reproduction_may_have_moved(
    engram: Command, out: Path, tmp_path: Path, tiny: None, pageless: list[Path]
) -> None:
    assert engram(*TABLE, "--out", out).code == 0
    moved = out.rename(tmp_path / "moved")
    assert engram("run", "--resume", moved).out.startswith("split-mnist: table, was finished already")
    assert not out.exists()


def test_reproduction_into_a_file_is_refused(engram: Command, tmp_path: Path, tiny: None) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in engram.refusal(*TABLE, "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
