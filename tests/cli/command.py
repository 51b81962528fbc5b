"""`engram ...` as tests give it, in this process or in another."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engram.cli.main import main

QUICK = ("--dataset", "mnist-small", "--epochs", "1", "--tasks", "2", "--trials", "1")
COMMANDS = ("run", "sweep", "reproduce", "table", "figures", "report", "data list", "data fetch", "data check")
COMMANDS += ("predict", "runs list", "runs show", "runs compare", "runs export")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Finished = tuple[Path, Outcome]  # a folder, and what the command printed that made it


class Command:
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


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "ENGRAM_DATA"}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"} | changes


def run_process(*arguments: str, **changes: str) -> Outcome:
    """`python -m engram ...` in a process."""
    command = [sys.executable, "-m", "engram", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(**changes), timeout=120)
    return Outcome(done.returncode, done.stdout, done.stderr)


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


def idx_images(count: int) -> bytes:
    return struct.pack(">4I", 2051, count, 28, 28) + bytes(range(256)) * (count * 784 // 256) + bytes(count * 784 % 256)
