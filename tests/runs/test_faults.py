"""Faults: whatever a machine or a person does, nothing that was complete is lost, and a sentence says what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from builders import small_digits
from engram import InputError, Progress, preset
from engram.cli.main import main
from engram.common.errors import Stopped
from engram.config.settings import Config
from engram.engine.checkpoint import CheckpointFolder
from engram.report.html.run_page import time_taken
from engram.runs.experiment import Setting
from engram.runs.folder import claimed
from engram.runs.result import Result, read_run
from engram.runs.start import default_folder, resume_methods, run_methods

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = ["run", "split-mnist", "--dataset", "mnist-small", "--methods", "si,dhp+mas", "--trials", "2", "--epochs",
           "3", "--set", "hidden=[12]", "--set", "max_samples=1000", "--set", "batch_size=10"]  # fmt: skip


def configs() -> list[Config]:
    small = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 10}
    return [preset("permuted-mnist", method, **small) for method in ("si", "dhp")]


def begin(folder: Path, report: Callable[[Progress], None] = lambda progress: None, **options: object) -> list[Result]:
    setting = Setting("cpu", **options)
    return run_methods(
        configs(), [small_digits(300, 60)], folder, command="x", setting=setting, seconds_between=0, report=report
    )


def go_on(folder: Path, **options: object) -> list[Result]:
    return resume_methods(folder, [small_digits(300, 60)], seconds_between=0, **options)


def results_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happened."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin(folder)
    return folder


class After:
    """Does something when a run has come so far, once; and keeps what was noted."""

    def __init__(self, share: float, act: Callable[[], None]):
        self.share = share
        self.act = act
        self.acted = False
        self.notes: list[str] = []

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self.notes.append(progress.note)
        if progress.share > self.share and not self.acted:
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


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


def test_a_full_disk_costs_no_result(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither checkpoints nor results can be written for a while; the run goes on and is whole in the end."""
    with pytest.MonkeyPatch.context() as patch:
        after = After(0.1, lambda: full_for(patch, "safetensors", "accuracy.json"))
        room = After(0.8, patch.undo)
        begin(tmp_path / "run", lambda progress: (after(progress), room(progress)))
    assert any(note.startswith("where the run stands could not be kept: No space left") for note in after.notes)
    assert any(note.endswith("No space left on device; the run goes on") for note in after.notes)
    assert "No space left on device" in (tmp_path / "run" / "log.txt").read_text()
    assert results_in(tmp_path / "run") == results_in(whole)


def test_what_cannot_be_written_in_the_end_is_put_elsewhere(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        after = After(0.5, lambda: full_for(patch, str(tmp_path / "run")))
        with pytest.raises(InputError, match="No space left on device; they are in ") as told:
            begin(tmp_path / "run", after)
    (rescued,) = (tmp_path / "elsewhere").iterdir()
    assert f"`engram table {rescued}` shows them" in str(told.value)
    assert results_in(rescued) == results_in(whole)
    assert "finished" in read_run(rescued)[0]
    go_on(tmp_path / "run")  # there is room again
    assert results_in(tmp_path / "run") == results_in(whole)


@pytest.mark.parametrize("then", ["nothing is there", "another run is there"])
def test_a_folder_that_vanished_is_not_made_again(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whoever removed it may have begun something else in its place."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "run"

    def vanish() -> None:
        shutil.rmtree(folder)
        if then == "another run is there":
            (folder / "si").mkdir(parents=True)
            for name in ("log.txt", "run.json", "si/config.toml"):
                (folder / name).write_text("another's")

    after = After(0.5, vanish)
    with pytest.raises(InputError, match="the folder was removed; they are in"):
        begin(folder, after)
    (rescued,) = tmp_path.glob("engram-run-*")
    assert results_in(rescued) == results_in(whole)
    if then == "nothing is there":
        assert not folder.exists()
    else:
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
            "log.txt",
            "run.json",
            "si/config.toml",
        ]
        assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"another's"}


@pytest.fixture
def nobody(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Becomes nobody, who may write only where all may, and at last root again."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o055)
    try:
        yield lambda: os.seteuid(65534)
    finally:
        os.seteuid(0)


def test_a_folder_that_is_read_only_is_told_in_a_sentence(
    tmp_path: Path, whole: Path, nobody: Callable[[], None]
) -> None:
    nobody()
    with pytest.raises(InputError, match=r"cannot write to .*run: Permission denied"):
        begin(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_becomes_read_only_costs_no_result(
    tmp_path: Path, whole: Path, nobody: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    after = After(0.5, nobody)
    with pytest.raises(InputError, match=r"cannot be written to .*run: Permission denied; they are in"):
        begin(tmp_path / "run", after)
    assert any("could not be kept: " in note and "Permission denied" in note for note in after.notes)
    os.seteuid(0)
    (rescued,) = elsewhere.iterdir()
    assert results_in(rescued) == results_in(whole)
    go_on(tmp_path / "run")
    assert results_in(tmp_path / "run") == results_in(whole)


# --- processes


def process(
    *arguments: object, limit: int | None = None, places: dict[str, Path] | None = None, **options: object
) -> subprocess.Popen[str]:
    """The command, as a person starts it; `limit` is the largest file that the system lets it write."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment |= {name: str(place) for name, place in (places or {}).items()}
    return subprocess.Popen(
        [sys.executable, "-m", "engram", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        preexec_fn=prepare,
        **options,
    )


def wait_until(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    for _ in range(2400):
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.025)
    raise AssertionError("it took too long")


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves, to which nothing happened."""
    folder = tmp_path_factory.mktemp("commanded") / "run"
    assert command(*COMMAND, "--out", folder) is None
    return folder


def command(*arguments: object) -> object:
    """The same in this process; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_once_is_to_stop_and_keep(
    commanded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    folder = tmp_path / "run"
    running = process(*COMMAND, "--out", folder)
    wait_until(lambda: (folder / "checkpoints" / "plan.json").exists(), running)
    time.sleep(0.3)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    first, last = err.splitlines()
    assert running.returncode == code
    assert first == ("engram: stopping: finishing and saving the current steps; press Ctrl-C again to stop at once")
    assert last == f"engram: stopped; `engram run --resume {folder}` resumes it"
    assert CheckpointFolder(folder).kept_any
    assert command("run", "--resume", folder) is None
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "goes on from task" in captured.out
    assert results_in(folder) == results_in(commanded)


@pytest.mark.slow
def test_twice_is_to_stop_at_once(tmp_path: Path) -> None:
    """Here the steps take minutes, so that the first is still being waited for."""
    folder = tmp_path / "run"
    large = ["--set", "hidden=[4000,4000]", "--set", "batch_size=1000", "--epochs", "1000"]
    running = process(*COMMAND, *large, "--out", folder)
    wait_until(lambda: (folder / "checkpoints" / "plan.json").exists(), running)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    assert running.stderr.readline().startswith("engram: stopping")
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert time.monotonic() - began < 3
    assert running.returncode == 130
    assert err == f"engram: stopped; `engram run --resume {folder}` resumes it\n"


@pytest.mark.slow
def test_a_disk_that_the_system_says_is_full(commanded: Path, tmp_path: Path) -> None:
    """No file may be larger than 4 kB, which results are and settings are not."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    running = process(*COMMAND, "--out", folder, limit=4096, places={"TMPDIR": elsewhere, "HOME": elsewhere})
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.count("\n") == 1
    assert "File too large; nor elsewhere, so that they are lost; `engram run --resume" in err
    assert list(elsewhere.iterdir()) == [], "no empty folder is left there"
    assert json.loads((folder / "run.json").read_text())["methods"] == ["si", "dhp+mas"]
    assert not list(folder.rglob(".*")), "no half of a file is left"
    assert command("run", "--resume", folder) is None
    assert results_in(folder) == results_in(commanded)


@pytest.mark.slow
def test_two_processes_on_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    first = process(*COMMAND, "--epochs", "100", "--out", folder)
    wait_until(lambda: (folder / "checkpoints" / "plan.json").exists(), first)
    before = {path.name for path in folder.rglob("*")}
    for arguments in ([*COMMAND, "--out", folder], ["run", "--resume", folder]):
        assert command(*arguments) == 2
        err = capsys.readouterr().err
        assert "already holds a run" in err or "another process is using the run in" in err
    assert before <= {path.name for path in folder.rglob("*")}
    assert first.poll() is None, "the first goes on"
    first.kill()
    first.communicate()


# --- the moment before a run begins


def test_a_run_that_was_killed_before_it_began_is_begun_again(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    (folder / "si").mkdir(parents=True)
    for name in ("run.json", "log.txt"):
        (folder / name).touch()
    (folder / "si" / "config.toml").write_text("half of o")
    with pytest.raises(InputError, match="stopped before it began: start it again"):
        go_on(folder)
    begin(folder)
    assert results_in(folder) == results_in(whole)
    with pytest.raises(InputError, match="already holds a run"), claimed(folder):
        pass


def test_a_claim_of_another_process_is_not_taken_over(tmp_path: Path) -> None:
    with claimed(tmp_path / "run"), pytest.raises(InputError, match="another process is at work"):
        begin(tmp_path / "run")


# --- stopping


def test_a_run_can_be_stopped_at_any_time_and_goes_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    last = -1.0
    with pytest.raises(Stopped):  # before anything was learned
        begin(folder, stop_asked=lambda: True)
    for share in (0.05, 0.3, 0.5, 0.95):
        after = After(share, lambda: None)

        def asked(after: After = after) -> bool:
            return after.acted

        with pytest.raises(Stopped):  # no checkpoint is due: what is kept is kept because it stops
            resume_methods(folder, [small_digits(300, 60)], seconds_between=1000, stop_asked=asked, report=after)
        ((place, *_),) = [_places(folder)]
        assert place > last
        last = place
    go_on(folder)
    assert results_in(folder) == results_in(whole)


def _places(folder: Path) -> list[float]:
    from safetensors import safe_open

    with safe_open(folder / "checkpoints" / "stack-0.safetensors", framework="np") as file:
        task, epoch, _, part, *_ = json.loads(file.metadata()["engram"])["place"]
    return [task + epoch / 10 + part / 100]


# --- clocks


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    begin(tmp_path / "run", lambda progress: (back(progress), ahead(progress)))
    assert back.acted
    assert ahead.acted
    assert results_in(tmp_path / "run") == results_in(whole)
    jump(-2)
    begin(tmp_path / "later")
    about, results = read_run(tmp_path / "later")
    assert about["started"] < read_run(whole)[0]["started"], "the clock was set back"
    assert np.array_equal(results[0].accuracy, read_run(whole)[1][0].accuracy, equal_nan=True)


def test_a_time_that_a_clock_made_negative_is_not_shown() -> None:
    assert time_taken({"started": "2026-01-01T00:00:10+00:00", "finished": "2026-01-01T00:00:00+00:00"}) == ""
    assert time_taken({"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:10+00:00"}) != ""


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = set()
    for _ in range(3):
        folder = default_folder("split-mnist")
        folder.mkdir(parents=True)
        names.add(folder)
    assert len(names) == 3
