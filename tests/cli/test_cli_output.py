"""What a command prints when nobody reads it, and when it cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

import pytest
from command import environment, run_process

from engram.cli.output import Output, lost_output, prepare_output

FULL = Path("/dev/full")


@pytest.fixture
def broken() -> Iterator[Output]:
    """A pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="ascii") as stream:
        yield Output(stream)


def test_what_nobody_reads_is_dropped(broken: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    print("α" * 100_000, file=broken, flush=True)
    print("more", file=broken, flush=True)
    assert broken.error is not None
    assert broken.error.errno == errno.EPIPE
    monkeypatch.setattr(sys, "stdout", broken)
    assert lost_output() is None, "nobody wanted to read it"


def test_output_is_that_of_the_stream(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        output = Output(stream)
        assert output.write("η is 1\n") == 7
        output.flush()
        assert output.error is None
    assert (tmp_path / "out").read_bytes() == b"? is 1\n"


@pytest.mark.parametrize(("unbuffered", "written"), [("", b""), ("1", b"first\n")])
def test_an_unbuffered_stream_stays_so(unbuffered: str, written: bytes, tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as stream:
        code = (
            "import os; from pathlib import Path; from engram.cli.output import prepare_output; prepare_output()\n"
            f"print('first'); os.write(2, Path({str(tmp_path / 'out')!r}).read_bytes())"
        )
        own = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run([sys.executable, "-c", code], stdout=stream, stderr=subprocess.PIPE, env=own, check=True)
    assert done.stderr == written
    assert (tmp_path / "out").read_bytes() == b"first\n"


def test_streams_of_others_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    assert isinstance(before, TextIOWrapper)
    prepare_output()
    assert sys.stdout is before
    assert before.errors == "replace"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("--version",), ("data", "list"), ("run", "--help")])
def test_output_that_could_not_be_written_is_said_once(words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "engram", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=environment(),
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr == "engram: cannot use the output: No space left on device\n"


def test_a_reader_that_leaves_early_sees_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "engram", "data", "list"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, encoding="utf-8", env=environment())
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")
    assert run_process("data", "list").out.count("\n") > 5
