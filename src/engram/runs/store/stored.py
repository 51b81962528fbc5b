"""A run as it lies in its folder, read whatever state it is in: what cannot be read is named and costs nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError
from engram.config.methods import all_methods
from engram.config.settings import Config, load_config
from engram.runs.result import Result, check_format, read_accuracy, read_json
from engram.runs.sheets import read_sheet

RUN = ("/run.json",)  # the files of each kind, by their place below it; a run has two more for each of its methods
RESULT = ("/run.json", "/config.toml", "/accuracy.json")  # a folder that gets a run.json is no single result any more
SHEET = ("",)


@dataclass(frozen=True)
class Entry:
    """One method of a run (of a sheet: one of its settings), as far as it can be read. Dynamics are not."""

    label: str
    state: str  # one of `survey.STATES`
    config: Config | None = None
    result: Result | None = None
    problem: str = ""  # a sentence, where it is damaged


@dataclass(frozen=True)
class Stored:
    """A run, a single result that was saved from Python, or a sheet of a reproduction."""

    path: Path
    kind: str  # "run", "result" or "sheet"
    files: tuple[str, ...]  # on which all this depends
    entries: tuple[Entry, ...]
    about: dict[str, Any] = field(default_factory=dict)  # command, versions, times, as the run wrote them down


def read_stored(path: Path, kind: str) -> Stored:
    """Read what lies there; this never refuses."""
    return {"run": _read_run, "result": _read_single, "sheet": _read_sheet}[kind](path)


def open_stored(path: Path) -> Stored:
    """What a person has named: the folder of a run or of a result, or the file of a sheet."""
    if path.is_file():
        return read_stored(path, "sheet")
    for kind, sign in (("run", "run.json"), ("result", "accuracy.json")):
        if (path / sign).exists():
            return read_stored(path, kind)
    raise InputError(f"{path} does not hold a run: it has no run.json")


def _read_run(folder: Path) -> Stored:
    path = folder / "run.json"
    try:
        if path.stat().st_size == 0:
            begun = Entry("", "unfinished", problem="it was stopped before it began")
            return Stored(folder, "run", RUN, (begun,))
        about = read_json(path)
        check_format(about, path)
        methods = about.get("methods")
        if not isinstance(methods, list) or not methods or not set(map(str, methods)) <= set(all_methods()):
            raise InputError(f"{path} is not a run of Engram, or is damaged")
    except (OSError, InputError) as reason:
        return Stored(folder, "run", RUN, (_damaged("", reason),))
    files = (*RUN, *(f"/{method}/{name}" for method in methods for name in ("config.toml", "accuracy.json")))
    entries = tuple(_read_method(folder / method, method, "finished" in about) for method in methods)
    return Stored(folder, "run", files, entries, about)


def _read_method(folder: Path, method: str, finished: bool) -> Entry:
    try:
        config = load_config(folder / "config.toml")
        if config.method != method:
            raise InputError(f"{folder / 'config.toml'} is of another method, {config.method}")
        if not (folder / "accuracy.json").exists():
            if finished:
                raise InputError(f"{folder} has no accuracy.json, though its run is finished")
            return Entry(method, "unfinished", config)
        return _entry(method, read_accuracy(folder, config), finished)
    except InputError as reason:
        return _damaged(method, reason)


def _read_single(folder: Path) -> Stored:
    try:
        config = load_config(folder / "config.toml")
        entry = _entry(config.method, read_accuracy(folder, config), finished=True)
    except InputError as reason:
        entry = _damaged("", reason)
    return Stored(folder, "result", RESULT, (entry,))


def _read_sheet(path: Path) -> Stored:
    try:
        sheet = read_sheet(path)
    except InputError as reason:
        return Stored(path, "sheet", SHEET, (_damaged("", reason),))
    entries = tuple(_entry(label, result, finished=True) for label, result in sheet.entries.items())
    return Stored(path, "sheet", SHEET, entries, sheet.about)


def _entry(label: str, result: Result, finished: bool) -> Entry:
    measured = result.accuracy[np.isfinite(result.accuracy)]
    if measured.size and not 0 <= measured.min() <= measured.max() <= 1:
        return Entry(label, "damaged", result.config, problem="its accuracies are not all in [0, 1]")
    if not finished or len(result.accuracy) < result.config.trials:
        state = "unfinished"  # whatever has become of its trials so far: it can go on
    else:
        state = "diverged" if result.diverged else "finished"
    return Entry(label, state, result.config, result)


def _damaged(label: str, reason: Exception) -> Entry:
    return Entry(label, "damaged", problem=" ".join(str(reason).split()))
