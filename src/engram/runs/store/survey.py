"""What lies below a folder: its runs, at any depth, and which of them are not as they were when they were read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engram.config.paper import PAPER_BENCHMARKS, PARTS

STATES = ("finished", "unfinished", "diverged", "damaged")
SHEETS = {f"{part}.json" for part in PARTS}


@dataclass(frozen=True)
class Known:
    """What was read of a run: its files, and what the system says of them."""

    kind: str
    files: tuple[str, ...]
    signature: str


@dataclass
class Survey:
    """Runs by their places below the folder, "" for the folder itself."""

    unchanged: list[str] = field(default_factory=list)
    stale: dict[str, str] = field(default_factory=dict)  # new or changed, with their kinds
    closed: list[str] = field(default_factory=list)  # folders that cannot be looked into


def survey(folder: str, known: Mapping[str, Known]) -> Survey:
    """Look into every folder below but those of runs: what lies there is the run's.

    A known run costs one question to the system for each of its small files. Links are followed last, and only to
    what is neither below the folder nor above it, so that nothing is found twice and nothing goes round in circles.
    """
    found = Survey()
    top = os.path.realpath(folder)
    seen: set[str] = set()
    waiting, links = [("", top)], list[tuple[str, str]]()
    while waiting or links:
        place, path = waiting.pop() if waiting else links.pop()
        if path in seen:
            continue
        seen.add(path)
        if place in known and is_as_read(path, known[place]):
            found.unchanged.append(place)
            continue
        try:
            with os.scandir(path) as listed:
                entries = {entry.name: entry for entry in listed}
        except OSError:
            found.closed.append(place)
            continue
        if "run.json" in entries or "accuracy.json" in entries:
            found.stale[place] = "run" if "run.json" in entries else "result"
            continue
        if os.path.basename(path) in PAPER_BENCHMARKS:
            for name in SHEETS & entries.keys():
                sheet = _join(place, name)
                if sheet in known and is_as_read(entries[name].path, known[sheet]):
                    found.unchanged.append(sheet)
                else:
                    found.stale[sheet] = "sheet"
        for name, entry in entries.items():
            if name.startswith("."):
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if os.path.isdir(target) and not _holds(top, target) and not _holds(target, top):
                    links.append((_join(place, name), target))
            elif entry.is_dir():
                waiting.append((_join(place, name), entry.path))
    return found


def is_as_read(path: str, known: Known) -> bool:
    return known.signature == signature(path, known.files)


def signature(path: str, files: Sequence[str]) -> str:
    """Sizes, times and numbers of the files: whatever is written to one of them, or put into its place, changes it.

    The time of the last change cannot be set as that of modification can, so an index that came from elsewhere
    together with its runs is not believed.
    """
    return repr([_stamp(path + file) for file in files])


def changed_between(path: str, files: Sequence[str], first: int, last: int) -> bool:
    """Whether any of the files was changed then, in nanoseconds, by its own account."""
    stamps = (_stamp(path + file) for file in files)
    return any(first < when < last for stamp in stamps if stamp for when in stamp[:2])


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a name that cannot be
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _join(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
