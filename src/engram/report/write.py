"""From a folder to its page: what the folder holds decides which."""

from __future__ import annotations

from pathlib import Path

from engram.errors import InputError
from engram.report.reproduction_report import reproduction_page
from engram.report.run_report import run_page
from engram.results import read_run, write_atomically
from engram.sheets import holds_reproduction, read_reproduction


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained page of what a folder holds, and return its path: `report.html` in it by default."""
    folder = Path(folder)
    page = make_page(folder)
    path = Path(out) if out is not None else folder / "report.html"
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as reason:
        raise InputError(f"cannot write {path}: {reason.strerror or reason}") from reason
    return path


def make_page(folder: Path) -> str:
    """The page of a run, or of a reproduction."""
    if holds_reproduction(folder):
        return reproduction_page(read_reproduction(folder))
    about, results = read_run(folder)
    return run_page(folder, about, results)
