"""Faults: whatever a machine or a person does, no finished result is lost, and a sentence says what to do."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from builders import assert_results_equal, files_in, small_digits, wait_for
from engram import InputError, preset
from engram.cli.main import main
from engram.cli.terminal import PATIENCE
from engram.common.errors import Stopped
from engram.config.settings import Config
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.learner import Progress, Report, no_report
from engram.engine.training import Runtime
from engram.report.layout import time_taken
from engram.runs.folder import RunFolder, claimed, default_folder
from engram.runs.result import Result
from engram.runs.run import Run, read_run
from engram.runs.start import resume_run, start_run

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = ["run", "split-mnist", "--dataset", "mnist-small", "--methods", "si,dhp+mas", "--trials", "2", "--epochs",
           "30", "--set", "hidden=[12]", "--set", "max_samples=1000", "--set", "batch_size=10"]  # fmt: skip

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


def configs() -> dict[str, Config]:
    small = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 10}
    return {method: preset("permuted-mnist", method, **small) for method in ("si", "dhp")}


def start(folder: Path, report: Report = no_report, **options: Any) -> Run:
    """A run that is saved at every position."""
    options = {"runtime": Runtime("cpu"), "seconds_between": 0} | options
    return start_run(configs(), [small_digits(300, 60)], folder, command="x", report=report, **options)


def resume(folder: Path, **options: Any) -> Run:
    return resume_run(folder, [small_digits(300, 60)], **{"seconds_between": 0} | options)


def results_in(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("results.json", "dynamics.csv")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder)
    return folder


class After:
    """Does something once, when a run has come so far; and records the notes."""

    def __init__(self, done: float, act: Callable[[], None]):
        self.done = done
        self.act = act
        self.acted = False
        self.notes: list[str] = []

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self.notes.append(progress.note)
        if progress.done > self.done and not self.acted:
            self.acted = True
            self.act()


# --- disks


def full_for(patch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on, the disk has no room for files of these names."""
    usual = os.fsync

    def fsync(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if any(name in path for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(file)

    patch.setattr(os, "fsync", fsync)


def test_full_disk_loses_no_result(tmp_path: Path, whole: Path) -> None:
    """Neither checkpoints nor results can be written for a while; the run continues and is complete in the end."""
    with pytest.MonkeyPatch.context() as patch:
        full = After(0.1, lambda: full_for(patch, "safetensors", "results.json"))
        room = After(0.8, patch.undo)
        start(tmp_path / "run", lambda progress: (full(progress), room(progress)))
    assert any(note.startswith("the checkpoint cannot be written: No space left") for note in full.notes)
    assert any(note.startswith("the results so far cannot be written") for note in full.notes)
    assert "No space left on device" in (tmp_path / "run" / "log.txt").read_text()
    assert results_in(tmp_path / "run") == results_in(whole)


def test_results_that_cannot_be_written_in_the_end_are_written_elsewhere(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        full = After(0.5, lambda: full_for(patch, str(tmp_path / "run")))
        with pytest.raises(InputError, match="No space left on device; they are in ") as error:
            start(tmp_path / "run", full)
    (rescued,) = (tmp_path / "elsewhere").iterdir()
    assert f"`engram table {rescued}` shows them" in str(error.value)
    assert results_in(rescued) == results_in(whole)
    assert read_run(rescued).finished
    resume(tmp_path / "run")  # there is room again
    assert results_in(tmp_path / "run") == results_in(whole)


@pytest.mark.parametrize("then", ["nothing is there", "another run is there"])
def test_folder_that_was_removed_is_not_made_again(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whoever removed it may have started something else in its place."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "run"

    def remove() -> None:
        while folder.exists():  # a checkpoint may be written into it at the same time
            shutil.rmtree(folder, ignore_errors=True)
        if then == "another run is there":
            folder.mkdir()
            for name in ("log.txt", "run.json", "results.json"):
                (folder / name).write_text("another's")

    with pytest.raises(InputError, match="the folder was removed; they are in"):
        start(folder, After(0.5, remove))
    (rescued,) = tmp_path.glob("engram-run-*")
    assert results_in(rescued) == results_in(whole)
    if then == "nothing is there":
        assert not folder.exists()
    else:
        assert files_in(folder) == dict.fromkeys(("log.txt", "results.json", "run.json"), b"another's")


@pytest.fixture
def obeying_permissions() -> Iterator[None]:
    """Give up root's right to write where nobody may; whoever is not root does not have it."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of the call; this thread, and threads that it starts
    capabilities = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, capabilities) == 0
    before = capabilities[0]
    capabilities[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE, of those in effect
    assert libc.capset(header, capabilities) == 0
    yield
    capabilities[0] = before
    assert libc.capset(header, capabilities) == 0


def test_read_only_folder_is_refused_in_a_sentence(tmp_path: Path, obeying_permissions: None) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match=r"cannot write to .*run: Permission denied"):
        start(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o755)


def test_folder_that_becomes_read_only_loses_no_result(
    tmp_path: Path, whole: Path, obeying_permissions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))

    def change_mode(mode: int) -> None:
        for each in (folder, folder / "checkpoints"):
            each.chmod(mode)

    after = After(0.5, lambda: change_mode(0o555))
    with pytest.raises(InputError, match=r"cannot be written to .*run: Permission denied; they are in"):
        start(folder, after)
    assert any("checkpoint cannot be written: " in note and "Permission denied" in note for note in after.notes)
    (rescued,) = elsewhere.iterdir()
    assert results_in(rescued) == results_in(whole)
    change_mode(0o755)
    resume(folder)
    assert results_in(folder) == results_in(whole)


def test_a_tenth_of_the_time_is_spent_on_writing_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a thousand tasks are large: a run with short tasks does not write them after each."""
    clock, written = 1000.0, []

    def write(folder: Path, results: object, *more: object) -> None:
        nonlocal clock
        written.append(clock)
        clock += 2.0

    monkeypatch.setattr("engram.runs.folder.time.monotonic", lambda: clock)
    monkeypatch.setattr("engram.runs.folder.write_results", write)
    with claimed(tmp_path / "run") as file:
        folder = RunFolder(tmp_path / "run", file, configs())
        for _ in range(600):
            clock += 0.1
            assert folder.save(dict) is None
    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    assert len(written) == 4
    assert all(20.0 <= gap < 20.2 for gap in gaps), gaps


def test_results_that_could_not_be_written_are_written_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = 1000.0, []

    def write(folder: Path, results: dict[str, Result], *more: object) -> None:
        tries.append(clock)
        if clock < 1003:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("engram.runs.folder.time.monotonic", lambda: clock)
    monkeypatch.setattr("engram.runs.folder.write_results", write)
    with claimed(tmp_path / "run") as file:
        folder = RunFolder(tmp_path / "run", file, configs())
        problems = [folder.save(dict, new=True)]
        while clock < 1010:
            clock += 0.25
            problems.append(folder.save(dict, new=False))
    assert tries == [1000, 1001, 1002, 1003]
    assert sum(problem is not None for problem in problems) == 3


# --- processes


def process(
    *arguments: object, limit: int | None = None, folders: dict[str, Path] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """The command, as a person starts it; `limit` is the size of the largest file that it may write."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment |= {name: str(path) for name, path in (folders or {}).items()}
    return subprocess.Popen(
        [sys.executable, "-m", "engram", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        preexec_fn=prepare,
        **options,
    )


def wait_until_started(folder: Path, running: subprocess.Popen[str]) -> None:
    plan = folder / "checkpoints" / "plan.json"
    wait_for(plan.exists, still_running=lambda: running.poll() is None)
    assert running.poll() is None, running.communicate()


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves if nothing happens."""
    folder = tmp_path_factory.mktemp("commanded") / "run"
    assert command(*COMMAND, "--out", folder) is None
    return folder


def command(*arguments: object) -> object:
    """Run a command in this process; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("again", [False, True])
def test_first_interrupt_saves_and_stops(
    commanded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], again: bool, number: int, code: int
) -> None:
    """Also if it comes again at once, as from `timeout`, which sends it to the process and to the process's group."""
    folder = tmp_path / "run"
    running = process(*COMMAND, "--out", folder)
    wait_until_started(folder, running)
    time.sleep(0.3)
    end = time.monotonic() + (0.8 * PATIENCE if again else 0)
    running.send_signal(number)
    while time.monotonic() < end and running.poll() is None:  # also while Python ends
        time.sleep(0.001)
        running.send_signal(number)
    _, err = running.communicate(timeout=30)
    first, last = err.splitlines()
    assert running.returncode == code
    assert first == "engram: stopping: finishing and saving the current steps; press Ctrl-C again to stop immediately"
    assert last == f"engram: stopped; `engram run --resume {folder}` resumes it"
    assert CheckpointFolder(folder / "checkpoints").any_saved
    assert command("run", "--resume", folder) is None
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "resumes at task" in captured.out
    assert results_in(folder) == results_in(commanded)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_command_that_is_stopped_when_nobody_reads_its_output_saves(
    commanded: Path, tmp_path: Path, number: int, code: int
) -> None:
    """As with `engram run … | tee log` where Ctrl-C ends `tee` first, and when a terminal is closed."""
    folder = tmp_path / "run"
    running = process(*COMMAND, "--out", folder)
    wait_until_started(folder, running)
    for stream in (running.stdout, running.stderr):
        assert stream is not None
        stream.close()
    time.sleep(0.3)
    running.send_signal(number)
    assert running.wait(timeout=30) == code
    assert CheckpointFolder(folder / "checkpoints").any_saved
    assert command("run", "--resume", folder) is None
    assert results_in(folder) == results_in(commanded)


@pytest.mark.slow
def test_a_command_whose_output_nobody_reads_comes_to_its_end(commanded: Path, tmp_path: Path) -> None:
    running = process(*COMMAND, "--out", tmp_path / "run")
    for stream in (running.stdout, running.stderr):
        assert stream is not None
        stream.close()
    assert running.wait(timeout=60) == 0
    assert results_in(tmp_path / "run") == results_in(commanded)


@pytest.mark.slow
def test_a_command_whose_time_is_over_saves_and_stops_and_is_resumed(commanded: Path, tmp_path: Path) -> None:
    """Each takes some steps, however short its time is, and starts where the one before stopped."""
    folder, starts = tmp_path / "run", []
    words: tuple[object, ...] = (*COMMAND, "--out", folder)
    for _ in range(3):
        running = process(*words, "--minutes", "0.001")
        _, err = running.communicate(timeout=60)
        assert running.returncode == 124
        assert err.splitlines() == [
            "engram: stopping after 0.001 minutes: finishing and saving the current steps",
            f"engram: stopped; `engram run --resume {folder}` resumes it",
        ]
        starts.append(CheckpointFolder(folder / "checkpoints").of_stack(0).path.read_bytes())
        words = ("run", "--resume", folder)
    assert len(set(starts)) == 3, "each is further than the one before"
    assert command("run", "--resume", folder) is None
    assert results_in(folder) == results_in(commanded)


SHORT = ("--trials", "2", "--set", "hidden=[12]", "--set", "max_samples=1000")
SWEEP = ("sweep", "split-mnist", "--dataset", "mnist-small", "--methods", "si", "--grid", "strength=0.1,1", *SHORT)
REPRODUCTION = ("reproduce", "--quick", "--benchmark", "split-mnist", "--part", "rung-1")


@pytest.mark.slow
@pytest.mark.parametrize("words", [SWEEP, REPRODUCTION], ids=["sweep", "reproduce"])
def test_a_resumed_command_has_no_limit_of_time_but_its_own(words: tuple[str, ...], tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert command(*words, "--out", whole) is None
    assert command(*words, "--out", folder, "--minutes", "1e-6") == 124
    assert command("run", "--resume", folder, "--minutes", "1e-6") == 124
    assert command("run", "--resume", folder) is None
    found, expected = ({p.relative_to(f): p.read_bytes() for p in f.rglob("results.json")} for f in (folder, whole))
    assert found == expected
    assert len(found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_time_is_over_changes_nothing(tmp_path: Path, number: int) -> None:
    running = process(*COMMAND, "--out", tmp_path / "run", "--minutes", "1e-6")
    assert running.stderr is not None
    assert running.stderr.readline().startswith("engram: stopping after")
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 124
    assert err == f"engram: stopped; `engram run --resume {tmp_path / 'run'}` resumes it\n"


@pytest.mark.slow
def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """The steps take minutes here, so that the first interrupt is still waiting for them."""
    folder = tmp_path / "run"
    larger = {"hidden=[12]": "hidden=[4000,4000]", "batch_size=10": "batch_size=1000"}
    running = process(*(larger.get(word, word) for word in COMMAND), "--out", folder)
    wait_until_started(folder, running)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    assert running.stderr.readline().startswith("engram: stopping")
    time.sleep(PATIENCE + 0.2)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert running.returncode == 130
    assert err == f"engram: stopped; `engram run --resume {folder}` resumes it\n"


@pytest.mark.slow
def test_command_on_a_full_disk(commanded: Path, tmp_path: Path) -> None:
    """No file may be larger than 4 kB, which results are and settings are not."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folders = {"TMPDIR": elsewhere, "HOME": elsewhere, "XDG_CACHE_HOME": tmp_path / "cache"}
    running = process(*COMMAND, "--out", folder, limit=4096, folders=folders)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.count("\n") == 1
    assert "File too large, nor anywhere else, so they are lost; `engram run --resume" in err
    assert list(elsewhere.iterdir()) == [], "no empty folder is left there"
    assert list(json.loads((folder / "run.json").read_text())["configs"]) == ["si", "dhp+mas"]
    assert not list(folder.rglob(".*")), "no half of a file is left"
    assert command("run", "--resume", folder) is None
    assert results_in(folder) == results_in(commanded)


@pytest.mark.slow
def test_second_process_on_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    first = process(*COMMAND, "--epochs", "100", "--out", folder)
    wait_until_started(folder, first)
    before = {path.name for path in folder.rglob("*")}
    for arguments in ([*COMMAND, "--out", folder], ["run", "--resume", folder]):
        assert command(*arguments) == 2
        err = capsys.readouterr().err
        assert "already holds a run" in err or "another process" in err
    assert before <= {path.name for path in folder.rglob("*")}
    assert first.poll() is None, "the first continues"
    first.kill()
    first.communicate()


# --- killed before the start


def test_run_that_was_killed_before_it_started_can_be_started_again(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(parents=True)
    for name in ("run.json", "log.txt"):
        (folder / name).touch()
    with pytest.raises(InputError, match="stopped before it started: start it again"):
        resume(folder)
    start(folder)
    assert results_in(folder) == results_in(whole)
    with pytest.raises(InputError, match="already holds a run"), claimed(folder):
        pass


def test_folder_that_another_process_has_claimed_is_refused(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"), pytest.raises(InputError, match="another process"):
        start(tmp_path / "run")


# --- stopped


def test_run_can_be_stopped_at_any_time_and_resumed(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stopped):  # before anything was learned
        start(folder, stop_asked=lambda: True)
    before = (-1, 0, 0, 0.0)
    for done in (0.05, 0.3, 0.5, 0.95):
        after = After(done, lambda: None)
        with pytest.raises(Stopped):  # no checkpoint is due: it is saved because the run stops
            resume(folder, seconds_between=1000, stop_asked=lambda after=after: after.acted, report=after)
        position = saved_position(folder)
        assert position > before
        before = position
    resume(folder)
    assert results_in(folder) == results_in(whole)


def saved_position(folder: Path) -> tuple[int, int, int, float]:
    from safetensors import safe_open

    with safe_open(folder / "checkpoints" / "stack-0.safetensors", framework="np") as file:
        return tuple(json.loads(file.metadata()["engram"])["position"])


# --- clocks


def test_clock_that_jumps_changes_nothing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two years back in the middle of a run, and as far ahead."""

    class Jumping(datetime):
        years = 0

        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            real = datetime.now()
            return real.replace(year=real.year + cls.years, day=1)

    wall = time.time
    monkeypatch.setattr("engram.runs.folder.datetime", Jumping)
    monkeypatch.setattr(time, "time", lambda: wall() + 3e7 * Jumping.years)

    def jump(years: int) -> None:
        Jumping.years = years

    back, ahead = After(0.3, lambda: jump(-2)), After(0.6, lambda: jump(2))
    start(tmp_path / "run", lambda progress: (back(progress), ahead(progress)))
    assert back.acted
    assert ahead.acted
    assert results_in(tmp_path / "run") == results_in(whole)
    jump(-2)
    later, reference = start(tmp_path / "later"), read_run(whole)
    assert later.about["started"] < reference.about["started"], "the clock was set back"
    assert_results_equal(later.results, reference.results)


def test_negative_duration_is_not_shown() -> None:
    assert time_taken({"started": "2026-01-01T00:00:10+00:00", "finished": "2026-01-01T00:00:00+00:00"}) == ""
    assert time_taken({"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:10+00:00"}) != ""


def test_runs_started_in_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = set()
    for _ in range(3):
        folder = default_folder("split-mnist")
        folder.mkdir(parents=True)
        names.add(folder)
    assert len(names) == 3
