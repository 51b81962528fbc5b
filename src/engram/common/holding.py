"""Holding a file for this process alone. The system lets go of it however the process ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from engram.common.errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where two processes on one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

SECONDS_BETWEEN_TRIES = 0.2


@contextmanager
def held(path: Path, patience: float = 0.0) -> Iterator[IO[str]]:
    """Hold a file, which is made if it is not there. Another's is waited for so many seconds, and then refused."""
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        give_up = time.monotonic() + patience
        while not _take(file):
            if time.monotonic() >= give_up:
                raise InputError(f"another process is at work on the run in {path.parent}")
            time.sleep(SECONDS_BETWEEN_TRIES)
        yield file


def _take(file: IO[str]) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system that has no locks
    return True


def is_still(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at its path, and not one of a folder that was removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
