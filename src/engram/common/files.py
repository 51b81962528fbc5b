"""Files that are written whole or not at all, locked against other processes, and bounded when they are read.

write_atomically(path, text)                     # a reader sees the old file or the new one, never a half
with locked(folder / "log.txt") as file: ...     # one process at a time
settings = read_json(path)                       # refused in one sentence if it is too large or is not JSON
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from engram.common.errors import InputError, reason

try:
    import fcntl
except ImportError:  # Windows has no flock: two processes that use one folder are not detected there
    fcntl = None  # type: ignore[assignment]

SECONDS_BETWEEN_TRIES = 0.2

# A matrix of 1,000 tasks takes about 8 MB. In memory a number takes up to 10 times its text, a list or string up to 24.
MAX_JSON_BYTES = 48 * 2**20
MAX_JSON_ITEMS = 1_000_000  # lists, objects and strings


# --- Writing


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A new, empty file next to `path` to write to. It replaces `path` if the block succeeds and is deleted if not.

    The content is not flushed to the disk, which takes time. Use `write_atomically` for what must survive a power cut.

    Args:
        path: the file to replace; it need not exist.

    Example:
        >>> with replacement(Path("runs.csv")) as new:
        ...     _ = new.write_text("run,accuracy")
        >>> Path("runs.csv").read_text()
        'run,accuracy'
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        new.open("xb").close()
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file by one with this content and flush it to the disk.

    Example:
        >>> write_atomically(Path("run.json"), "{}")
    """
    with replacement(path) as new, new.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def write_or_refuse(path: Path, content: bytes) -> None:
    """`write_atomically` to a path that a user gave: if there can be no such file, that is an `InputError`."""
    try:
        write_atomically(path, content)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path} cannot be written: {reason(error)}") from error


def keep_previous(path: Path, previous: Path) -> None:
    """Give a file a second name, under which it stays when `path` is replaced. `path` exists at every moment."""
    if not path.exists():
        return
    with replacement(previous) as new:
        new.unlink()
        try:
            os.link(path, new)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, new)


def remove_unfinished(folder: Path, name: str = "*.*") -> None:
    """Remove what killed processes left half-written in a folder, or half-written versions of the one file `name`."""
    for unfinished in folder.glob(f".{name}.????????"):
        unfinished.unlink(missing_ok=True)


# --- Locking


@contextmanager
def locked(path: Path, timeout_s: float = 0.0) -> Iterator[IO[str]]:
    """Open a file for appending and lock it. The system releases the lock however the process ends.

    Args:
        path: the file, which is created if it does not exist.
        timeout_s: how long to wait for another process that has the lock, before an `InputError`.

    Example:
        >>> with locked(Path("log.txt")) as log:
        ...     _ = log.write("started")
    """
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        deadline = time.monotonic() + timeout_s
        while not _lock(file):
            if time.monotonic() >= deadline:
                raise InputError(f"another process is using the run in {path.parent}")
            time.sleep(SECONDS_BETWEEN_TRIES)
        yield file


def _lock(file: IO[str]) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def is_file_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at this path. It is not if its folder was removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


# --- Reading


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file of at most `max_bytes`. The caller's error message names the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # 0 for anything but a plain file
            # To read all of a small file is three times as fast as to read it up to a limit.
            content = file.read() if 0 < size <= max_bytes else file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: the path holds a null character
        raise InputError(reason(error)) from error
    if len(content) > max_bytes:
        raise InputError(f"it is larger than {max_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError("it is not text in UTF-8") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """What a JSON file holds; a file that is too large, damaged or ambiguous is an `InputError`."""
    try:
        text = read_text(path, max_bytes)
    except InputError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    try:
        return parse_json(text)
    except InputError as error:
        raise InputError(f"{path} is damaged ({error})") from error


def parse_json(text: str) -> Any:
    """What JSON text holds. An object that has the same name twice is refused, since it is ambiguous.

    Example:
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        engram.common.errors.InputError: an object has the same name twice
    """
    if text.count("[") + text.count("{") + text.count('"') // 2 > MAX_JSON_ITEMS:
        raise InputError(f"it has more than {MAX_JSON_ITEMS} lists, objects and strings")
    try:
        return _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise InputError("it is not valid JSON") from error
    except (ValueError, RecursionError) as error:
        raise InputError(reason(error)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has the same name twice")
    return made


_JSON = json.JSONDecoder(object_pairs_hook=_object)
