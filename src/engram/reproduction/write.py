"""From a folder to its page and its figures: what the folder holds decides which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engram.common.errors import InputError
from engram.common.files import remove_unfinished, write_atomically
from engram.report.figures import FORMATS, draw_all, save_drawings
from engram.report.html.run_report import run_page
from engram.reproduction.figures import draw_reproduction
from engram.reproduction.page import reproduction_page
from engram.runs.result import read_run
from engram.runs.sheets import begun_parts, holds_reproduction, read_reproduction


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained page of what a folder holds, and return its path: `report.html` in it by default."""
    folder = Path(folder)
    page = make_page(folder)
    path = Path(out) if out is not None else folder / "report.html"
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent, path.name)
        write_atomically(path, page)
    except OSError as reason:
        raise InputError(f"cannot write {path}: {reason.strerror or reason}") from reason
    return path


def make_page(folder: Path) -> str:
    """The page of a run, or of a reproduction."""
    if holds_reproduction(folder):
        return reproduction_page(read_reproduction(folder))
    if folder.is_dir() and (begun := begun_parts(folder)):
        raise InputError(f"the reproduction in {folder} has no finished part yet; begun: {', '.join(begun)}")
    if folder.is_dir() and not any((folder / name).exists() for name in ("run.json", "accuracy.json")):
        raise InputError(f"{folder} holds neither a run (run.json) nor a reproduction (such as split-mnist/table.json)")
    about, results = read_run(folder)
    return run_page(folder, about, results)


def write_figures(source: Path, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw all figures of the run that a folder holds, or of the reproduction: then in a folder for each benchmark."""
    if not holds_reproduction(source):
        return draw_all(read_run(source)[1], folder, formats)
    drawn = draw_reproduction(read_reproduction(source).sheets)
    if not any(drawn.values()):
        raise InputError(f"the reproduction in {source} has no part that is drawn: a study is a table, for the report")
    return [path for place, drawings in drawn.items() for path in save_drawings(drawings, folder / place, formats)]
