"""Download the published datasets, from every mirror, with retries, and keep only what is the published file.

A download goes to a hidden folder next to its target and is moved to its path only if its md5 sum is right, so an
interrupted or damaged one leaves nothing behind. From an archive only the expected members are taken, as regular files,
under the names that the source gives: no path and no link inside an archive is followed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import logging
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from engram.common.errors import InputError, reason
from engram.data.catalogue import Archive, File, Source
from engram.data.formats import MAX_BYTES
from engram.data.sources import chosen_folder, is_usable, locate, source_named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_CHUNK_BYTES = 2**16
MAX_MEMBERS = 1000  # read from an archive; CIFAR-10's has nine


class Bar(Protocol):
    """The progress bar of one file: the methods of tqdm's bar that pooch calls."""

    total: Any

    def update(self, count: int) -> object: ...
    def reset(self) -> object: ...
    def close(self) -> object: ...


@dataclass(frozen=True)
class Retry:
    """How often to retry: all mirrors once, then `retries` times more, after pauses that grow by `pause_s`."""

    retries: int = 2
    pause_s: float = 1.0
    timeout_s: float = 30.0


RETRY = Retry()


def fetch(
    name: str | Source,
    folder: str | Path | None = None,
    *,
    progress: Callable[[str], Bar] | None = None,
    retry: Retry = RETRY,
) -> list[Path]:
    """Download what is missing of a dataset and return the paths of all its files.

    A file that is there and can be read is kept, whether it is the published one or not: it may be the user's own
    selection. A damaged one is replaced.

    Args:
        name: as `engram data list` shows it, or a `Source`.
        folder: where to put the files; by default $ENGRAM_DATA or Engram's cache folder.
        progress: makes the bar of one file from its name; `progress_bars` gives one.
        retry: how often to retry.

    Example:
        paths = fetch("mnist", "data")
    """
    source = source_named(name)
    if source.embedded:
        raise InputError(f"{source.name} is part of Engram, so there is nothing to download")
    root = chosen_folder(folder)
    wanted = [file for file in source.files if not is_usable(file, root)]
    try:
        if source.archive is None:
            for file in wanted:
                with _staging(root / file.path) as staging:
                    _place(_download(file, source.mirrors, staging, progress, retry), root / file.path)
        elif wanted:
            with _staging(root / wanted[0].path) as staging:
                archive = _download(source.archive, source.mirrors, staging, progress, retry)
                for file, member in _extract(archive, wanted, staging).items():
                    _place(member, root / file.path)
    except OSError as error:
        raise InputError(f"{source.name} cannot be written to {root}: {error.strerror or error}") from error
    return [Path(str(locate(file, root))) for file in source.files]


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Callable[[str], Bar]]:
    """Bars of bytes, speed and remaining time: `with progress_bars() as bars: fetch(name, progress=bars)`."""
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console) as progress:
        yield lambda name: _RichBar(progress, name)


class _RichBar:
    """One line of a rich progress display, with the methods that pooch expects of tqdm."""

    def __init__(self, progress: Progress, name: str):
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._progress.task_ids.index(self._task)].total

    @total.setter
    def total(self, count: int) -> None:
        """Pooch sets this when an attempt starts; a retry fills the same bar again. 0 means an unknown size."""
        self._progress.reset(self._task, total=count or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        """Pooch resets the bar only to fill it, which must not restart the measurement of the speed."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def _download(
    file: File | Archive,
    mirrors: tuple[str, ...],
    staging: Path,
    progress: Callable[[str], Bar] | None,
    retry: Retry,
) -> Path:
    """One verified download in the staging folder, from the first mirror that has it."""
    try:
        import pooch
    except ImportError as error:
        raise InputError("downloads need the package pooch, which `pip install engram-cl` installs too") from error
    name = PurePosixPath(file.path).name
    downloader = pooch.HTTPDownloader(
        progressbar=progress(name) if progress else False, chunk_size=_CHUNK_BYTES, timeout=retry.timeout_s
    )
    why = "it has no mirrors"
    for attempt in range(retry.retries + 1):
        time.sleep(attempt * retry.pause_s)
        for mirror in mirrors:
            try:
                with _quiet(pooch.get_logger()):
                    pooch.retrieve(mirror + name, f"md5:{file.md5}", name, staging, downloader=downloader)
                return staging / name
            except (ValueError, OSError) as error:  # a wrong md5 sum, or an error of the network or the disk
                why = f"{mirror} failed with {_root_cause(error)}"
    raise InputError(f"{name} could not be downloaded: {why}")


def _root_cause(error: BaseException) -> str:
    """The first sentence of the error at the bottom of a chain of wrapped network errors."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    sentence, *_ = " ".join(str(error).split()).split(". ")
    return sentence or type(error).__name__


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep pooch from printing lines through the progress bars."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's disk, so that the move to its path is atomic."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        yield Path(folder)


def _place(staged: Path, target: Path) -> None:
    staged.chmod(0o644)  # temporary files are private to their owner, but data folders are often shared
    os.replace(staged, target)


def _extract(archive: Path, files: list[File], staging: Path) -> dict[File, Path]:
    """A verified copy of each file in the staging folder, of all of them or none."""
    extracted = {file: staging / f"member-{number}" for number, file in enumerate(files)}
    try:
        with gzip.open(archive) as packed:
            content = packed.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{archive.name} decompresses to more than {MAX_BYTES} bytes, as no dataset does")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = {member.name: member for member in itertools.islice(tar, MAX_MEMBERS)}
            for file, path in extracted.items():
                _extract_member(tar, members.get(file.path), file, path, archive.name)
    except InputError:
        raise
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, IndexError) as error:
        raise InputError(f"{archive.name} is not a tar archive that can be read: {reason(error)}") from error
    return extracted


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo | None, file: File, path: Path, archive: str) -> None:
    content = tar.extractfile(member) if member is not None and member.isreg() else None
    if member is None or content is None or member.size > MAX_BYTES:
        raise InputError(f"{archive} does not hold {file.path} as a regular file of a usual size")
    with path.open("wb") as stream:
        shutil.copyfileobj(content, stream)
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() != file.md5:
            raise InputError(f"{archive} holds a {file.path} whose md5 sum is not the published one")
