"""Find, verify and load a dataset.

Files are in torchvision's folder layout. A file is *published* if its md5 sum, or that of its decompressed content,
is that of the authors' file. With other bytes it is still used if its *structure* is right (magic number, shapes, label
range), because people crop and subset these datasets. A result records which of the two it was, so that nobody compares
numbers from different data by mistake.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from engram.common.errors import InputError, check_choice
from engram.data import formats
from engram.data.catalogue import SOURCES, File, Source
from engram.data.formats import Part, gunzip, read_file
from engram.data.samples import Dataset, Origin


@dataclass(frozen=True)
class FileCheck:
    """One file as it was found. `state` is "published", "structure", "missing", or one sentence on what is wrong."""

    path: Path
    bytes: int
    state: str


def source_named(name: str | Source) -> Source:
    """The source of this name. A `Source` that you made yourself is returned as it is."""
    if isinstance(name, Source):
        return name
    check_choice("dataset", name, SOURCES)
    return SOURCES[name]


def named_folder(folder: str | Path | None = None) -> str | Path | None:
    """The data folder that the user named, in the call or as $ENGRAM_DATA; None for Engram's cache folder."""
    return folder or os.environ.get("ENGRAM_DATA") or None


def chosen_folder(folder: str | Path | None = None) -> Path:
    """Where the data are, or will be: the folder that was named, or Engram's cache folder."""
    if named := named_folder(folder):
        return Path(os.path.expanduser(named))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "engram"


def existing_folder(folder: str | Path | None = None) -> Path:
    """`chosen_folder`, which must exist if the user named it, so that a mistyped path is not an empty folder."""
    path = chosen_folder(folder)
    if named_folder(folder) and not path.is_dir():
        named_by = "" if folder else " that $ENGRAM_DATA names"
        problem = "is not a folder" if path.exists() else "does not exist"
        raise InputError(f"the data folder{named_by}, {path}, {problem}")
    return path


def load(name: str | Source, folder: str | Path | None = None) -> Dataset:
    """Read and verify a dataset.

    Args:
        name: as `engram data list` shows it, or a `Source`.
        folder: where its files are; by default $ENGRAM_DATA or Engram's cache folder.

    Example:
        >>> len(load("mnist-small").train) > 0
        True
    """
    source = source_named(name)
    root = _root(source, folder)
    found = [(file, locate(file, root)) for file in source.files]
    for file, path in found:
        if path is None:
            raise InputError(f"{root.joinpath(file.path)} is missing; {_remedy(source, folder)}")
    read = [_read(file, path) for file, path in found if path is not None]
    parts = [part for part, _ in read]
    origin: Origin = "published" if all(published for _, published in read) else "structure"
    num_train = len(source.train)
    return Dataset(source.name, formats.join(parts[:num_train]), formats.join(parts[num_train:]), origin)


def check(name: str | Source, folder: str | Path | None = None) -> list[FileCheck]:
    """Look at every file of a dataset, and report for each what it is or what is wrong with it."""
    source = source_named(name)
    root = _root(source, folder)
    return _check_split(source.train, root) + _check_split(source.test, root)


def is_present(name: str | Source, folder: str | Path | None = None) -> bool:
    """Whether every file of a dataset is there. `check` tells whether they can be used."""
    source = source_named(name)
    root = _root(source, folder)
    return all(locate(file, root) is not None for file in source.files)


def is_usable(file: File, root: Traversable) -> bool:
    """Whether the folder holds this file, compressed or not, with the right structure."""
    try:
        path = locate(file, root)
        if path is None:
            return False
        _read(file, path)
        return True
    except InputError:
        return False


def locate(file: File, root: Traversable) -> Traversable | None:
    """The file under `root`, compressed or not. The compressed one comes first, because a download replaces it."""
    for path in dict.fromkeys((file.path, file.path.removesuffix(".gz"))):
        candidate = root.joinpath(path)
        try:
            if candidate.is_file() or candidate.is_dir():
                return candidate
        except OSError as error:
            raise InputError(f"{candidate} cannot be read: {error.strerror or error}") from error
    return None


def _root(source: Source, folder: str | Path | None) -> Traversable:
    return resources.files("engram.data") if source.embedded else existing_folder(folder)


def _remedy(source: Source, folder: str | Path | None) -> str:
    if source.embedded:
        return "it is part of Engram, which needs to be reinstalled"
    where = f" --data {shlex.quote(str(folder))}" if folder else ""
    return f"`engram data fetch {source.name}{where}` downloads it"


def _read(file: File, path: Traversable) -> tuple[Part, bool]:
    """The parsed file, and whether it is the published one."""
    forms = [read_file(path)]  # as it is on the disk and, where that is compressed, its content
    if path.name.endswith(".gz"):
        forms.append(gunzip(forms[0], str(path)))
    part = file.parse(forms[-1], str(path))
    sums = (hashlib.md5(form, usedforsecurity=False).hexdigest() for form in forms)
    return part, any(found in (file.md5, file.content_md5) for found in sums)


def _check_split(files: tuple[File, ...], root: Traversable) -> list[FileCheck]:
    checks, parts = [], []
    for file in files:
        place, size, state = Path(str(root.joinpath(file.path))), 0, "missing"
        try:
            if (path := locate(file, root)) is not None:
                place = Path(str(path))
                size = place.stat().st_size
                part, published = _read(file, path)
                parts.append(part)
                state = "published" if published else "structure"
        except InputError as error:
            state = str(error)
        checks.append(FileCheck(place, size, state))
    if len(parts) == len(files):
        try:
            formats.join(parts)
        except InputError as error:
            checks[-1] = FileCheck(checks[-1].path, checks[-1].bytes, str(error))
    return checks
