"""Fetch the published datasets: every mirror, a few times, and nothing kept that is not the published file.

A download lands in a hidden folder beside its target and is moved into place only once its md5 sum is right,
so an interrupted or damaged one leaves nothing behind. Of an archive only the expected members are taken, as
regular files, under names that the source gives: no path and no link inside an archive is followed.
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
from engram.data.bounded import MAX_BYTES
from engram.data.catalogue import Archive, File, Source
from engram.data.sources import chosen_folder, is_usable, locate, source_named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_CHUNK_BYTES = 2**16
MAX_MEMBERS = 1000  # of an archive that are looked at: CIFAR-10's has nine


class Bar(Protocol):
    """What pooch drives while it downloads one file: the few names of tqdm's bar that it uses."""

    total: Any

    def update(self, count: int) -> object: ...
    def reset(self) -> object: ...
    def close(self) -> object: ...


@dataclass(frozen=True)
class Patience:
    """How long to insist: all mirrors once, then `retries` times more after pauses growing by `pause_s`."""

    retries: int = 2
    pause_s: float = 1.0
    timeout_s: float = 30.0


PATIENCE = Patience()


def fetch(
    name: str | Source,
    folder: str | Path | None = None,
    *,
    progress: Callable[[str], Bar] | None = None,
    patience: Patience = PATIENCE,
) -> list[Path]:
    """Download what is missing of a dataset and return the paths of all its files.

    A file that is already there and can be read stays as it is, the published one or not: it may be a selection
    of somebody's own. A damaged one is replaced. `progress` makes the bar of one file from its name: `progress_bars`.
    """
    source = source_named(name)
    if source.embedded:
        raise InputError(f"{source.name} is inside the engram package, so there is nothing to download")
    root = chosen_folder(folder)
    wanted = [file for file in source.files if not is_usable(file, root)]
    try:
        if source.archive is None:
            for file in wanted:
                with _staging(root / file.path) as staging:
                    _place(_download(file, source.mirrors, staging, progress, patience), root / file.path)
        elif wanted:
            with _staging(root / wanted[0].path) as staging:
                archive = _download(source.archive, source.mirrors, staging, progress, patience)
                for file, member in _extract(archive, wanted, staging).items():
                    _place(member, root / file.path)
    except OSError as error:
        raise InputError(f"{source.name} cannot be written to {root}: {error.strerror or error}") from error
    return [Path(str(locate(file, root))) for file in source.files]


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Callable[[str], Bar]]:
    """Bars of bytes, speed and time left: `with progress_bars() as bars: fetch(name, progress=bars)`."""
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
    """One line of a rich progress display, under the names that pooch expects of tqdm."""

    def __init__(self, progress: Progress, name: str):
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._progress.task_ids.index(self._task)].total

    @total.setter
    def total(self, count: int) -> None:
        """Pooch sets this as an attempt begins: a retry fills the same bar again; 0 means an unknown size."""
        self._progress.reset(self._task, total=count or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        """Pooch sets the bar back only to fill it, which must not restart the clock of the speed."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def _download(
    file: File | Archive,
    mirrors: tuple[str, ...],
    staging: Path,
    progress: Callable[[str], Bar] | None,
    patience: Patience,
) -> Path:
    """One verified download in the staging folder, from the first mirror that gives it."""
    try:
        import pooch
    except ImportError as error:
        raise InputError("downloads need pooch, which `pip install pooch` installs") from error
    name = PurePosixPath(file.path).name
    downloader = pooch.HTTPDownloader(
        progressbar=progress(name) if progress else False, chunk_size=_CHUNK_BYTES, timeout=patience.timeout_s
    )
    reason = "it has no mirrors"
    for attempt in range(patience.retries + 1):
        time.sleep(attempt * patience.pause_s)
        for mirror in mirrors:
            try:
                with _quiet(pooch.get_logger()):
                    pooch.retrieve(mirror + name, f"md5:{file.md5}", name, staging, downloader=downloader)
                return staging / name
            except (ValueError, OSError) as error:  # a wrong md5 sum; anything of the network or the disk
                reason = f"{mirror} failed with {_reason(error)}"
    raise InputError(f"{name} could not be downloaded: {reason}")


def _reason(error: BaseException) -> str:
    """The first sentence of what lies at the bottom of a network error, itself a page of wrappers."""
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
    """A passing folder on the target's own disk, so that the move into place is one atomic step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        yield Path(folder)


def _place(staged: Path, target: Path) -> None:
    staged.chmod(0o644)  # temporary files are private to their owner, data folders are often shared
    os.replace(staged, target)


def _extract(archive: Path, files: list[File], staging: Path) -> dict[File, Path]:
    """Each file's verified copy in the staging folder, all of them or none."""
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
