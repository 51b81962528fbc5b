"""One page that can be read anywhere: the runs of a folder as self-contained HTML."""

from __future__ import annotations

from pathlib import Path

from engram.common.errors import InputError
from engram.common.files import remove_unfinished, write_atomically
from engram.report.html.run_page import run_page, runs_page
from engram.runs.run import open_runs

__all__ = ["make_page", "run_page", "runs_page", "write_page"]


def make_page(path: str | Path, unreadable: dict[str, str] | None = None) -> str:
    """The page of whatever runs a folder holds, as text; `unreadable` is as in `open_runs`."""
    unreadable = {} if unreadable is None else unreadable
    runs = open_runs(path, unreadable=unreadable)
    if not any(run.results for run in runs.values()):
        problem = next((problem for run in runs.values() for problem in run.problems.values()), None)
        raise InputError(problem or f"there are no results in {path} yet")
    if len(runs) == 1 and not unreadable:
        return run_page(*runs.values())
    return runs_page(Path(path).resolve().name, runs, unreadable)


def write_page(page: str, path: str | Path) -> Path:
    """Write a page to a path, all of it or nothing."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        remove_unfinished(path.parent, path.name)
        write_atomically(path, page)
    except OSError as reason:
        raise InputError(f"cannot write {path}: {reason.strerror or reason}") from reason
    return path
