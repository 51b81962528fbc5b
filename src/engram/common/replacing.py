"""Writing a file so that it is either the old or the new one, whole, whatever happens in between."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside this one, to be written to; it takes its place if all goes well and is gone if not.

    It is not forced onto the disk, which takes its time: what must outlive a power cut is for `write_atomically`.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.open("xb").close()
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file by one with this content, which is then on the disk."""
    with replacing(path) as beside, beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def keep_before(path: Path, before: Path) -> None:
    """Give a file a second name under which it stays when the first is replaced; it has the first at every moment."""
    if not path.exists():
        return
    with replacing(before) as beside:
        beside.unlink()
        try:
            os.link(path, beside)
        except OSError:  # a file system in which a file has one name
            shutil.copyfile(path, beside)


def remove_halves(folder: Path, name: str = "*.*") -> None:
    """Remove what was being written when its process was killed: in a folder, or in the place of one file."""
    for left in folder.glob(f".{name}.????????"):
        left.unlink(missing_ok=True)
