"""Fixtures of the tests of the command line: a command, a finished run, a diverged run, a folder of data."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from command import QUICK, Command, Finished, Outcome, idx_images, idx_labels, run_process

from engram.cli.main import main


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data folder from outside, an empty working folder, and a terminal of ordinary width."""
    monkeypatch.delenv("ENGRAM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def engram(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of two methods and two trials, made by a real process."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["run", "split-mnist", *QUICK[:-1], "2", "--methods", "finetune,dhp+si", "--out", str(folder)]
    return folder, run_process(*arguments)


@pytest.fixture
def copy(finished: Finished, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


@pytest.fixture(scope="session")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run with a learning rate that overflows at once, without a trace and with one."""
    folder = tmp_path_factory.mktemp("diverged") / "run"
    arguments = ["run", "split-mnist", *QUICK, "--methods", "finetune,dhp", "--set", "learning_rate=1e30"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(folder)])
    return folder, Outcome(stopped.value.code, out.getvalue(), err.getvalue())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a MNIST of twenty images."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx_images(20))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx_labels(*range(10), *range(10)))
    return tmp_path / "data"
