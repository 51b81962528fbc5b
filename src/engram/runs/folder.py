"""The folder of a run, held by one process: what is written there stays whole, and what cannot be is not lost."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from engram.common.errors import InputError, reason
from engram.common.files import is_file_at, locked, write_atomically
from engram.runs.result import Result, claim_folder, write_result

LOG = "log.txt"
SECONDS_TO_RETRY = 1.0  # after results could not be written
SHARE_OF_TIME = 0.1  # that is spent on writing results while a run goes on: those of a thousand tasks are large


class RunFolder:
    """A folder whose log this process holds."""

    def __init__(self, path: Path, file: IO[str]):
        self.path = path
        self.file = file
        self.unwritten: Sequence[Result] = ()
        self.next_write = 0.0

    def log(self, line: str) -> None:
        """Add a line, with the time, to the log. A run does not end because its log cannot be written."""
        try:
            self.file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")
            self.file.flush()
        except OSError:
            pass

    def describe(self, description: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", json.dumps(description, indent=2) + "\n")

    def keep(self, results: Sequence[Result] | None) -> str | None:
        """Write results on the way, soon if not at once; returns a sentence if that fails, and then tries again."""
        self.unwritten = results or self.unwritten
        began = time.monotonic()
        if not self.unwritten or began < self.next_write:
            return None
        trouble = None
        try:
            self._write(self.unwritten)
            self.unwritten = ()
        except OSError as error:
            trouble = f"the results so far cannot be written to {self.path}: {reason(error)}; the run goes on"
        took = time.monotonic() - began
        self.next_write = began + max(took / SHARE_OF_TIME, 0.0 if trouble is None else SECONDS_TO_RETRY)
        return trouble

    def finish(self, results: Sequence[Result], description: dict[str, Any]) -> None:
        """Write all that a finished run leaves; where that cannot be, in a folder of its own among temporary files."""
        try:
            self._write(results)
            self.describe(description)
        except OSError as error:
            trouble = f"the results cannot be written to {self.path}: {reason(error)}"
            rescued = _rescue(self.path.name, results, description)
            if rescued is None:
                how = f"`engram run --resume {self.path}` goes on from the last checkpoint"
                raise InputError(f"{trouble}; nor elsewhere, so that they are lost; {how}") from error
            raise InputError(f"{trouble}; they are in {rescued}, and `engram table {rescued}` shows them") from error

    def _write(self, results: Sequence[Result]) -> None:
        self.check()
        for result in results:
            write_result(result, self.path / result.config.method)

    def check(self) -> None:
        """Refuse to write into a folder that is no longer this one: what is there now is another's."""
        if not is_file_at(self.file, self.path / LOG):
            raise FileNotFoundError(errno.ENOENT, "the folder was removed", str(self.path))


def _rescue(name: str, results: Sequence[Result], description: dict[str, Any]) -> Path | None:
    """Among temporary files, or at home; None where there is no room either."""
    for place in (Path(tempfile.gettempdir()), Path.home()):
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"engram-{name}-", dir=place))
        except OSError:
            continue
        try:
            for result in results:
                write_result(result, folder / result.config.method)
            write_atomically(folder / "run.json", json.dumps(description, indent=2) + "\n")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        return folder
    return None


@contextmanager
def opened(path: Path) -> Iterator[RunFolder]:
    """A folder that is there, held by this process alone."""
    with locked(path / LOG) as file:
        yield RunFolder(path, file)


@contextmanager
def claimed(path: str | Path) -> Iterator[RunFolder]:
    """A new folder, an empty one, or one whose run was killed before it began."""
    path = Path(path)
    if not _never_began(path):
        claim_folder(path, "run.json")
    with opened(path) as folder:
        if not _never_began(path):
            raise InputError(f"{path} already holds a run, and results are never overwritten: name another folder")
        yield folder


def _never_began(path: Path) -> bool:
    """Whether there is a claim of a run, and nothing that it has learned."""
    first = path / "run.json"
    return first.is_file() and first.stat().st_size == 0 and not any(path.glob("*/accuracy.json"))


def now() -> str:
    """By the clock on the wall, for people; what is reckoned with is never taken from it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
