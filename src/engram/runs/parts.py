"""A part: settings by label, run together into one sheet, and going on from where they stood when they were stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, reason
from engram.common.files import remove_unfinished, write_atomically
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.engine.checkpoint import CheckpointFolder
from engram.engine.stacks import SAME_TASKS
from engram.runs.experiment import Progress, Report, Setting, run_on
from engram.runs.folder import RunFolder, now, opened
from engram.runs.result import versions
from engram.runs.sheets import Sheet, read_sheet, write_sheet

Load = Callable[[Config], Sequence[Dataset]]


@dataclass(frozen=True)
class Part:
    """One sheet to be: configs by label, all on one benchmark."""

    name: str
    benchmark: str
    entries: dict[str, Config]

    @property
    def num_models(self) -> int:
        return sum(config.trials for config in self.entries.values())


def run_part(
    part: Part,
    path: Path,
    load: Load,
    *,
    command: str,
    quick: bool = False,
    setting: Setting | None = None,
    report: Report = lambda progress: None,
) -> Sheet:
    """Run a part and write its sheet to a path. One that is there already is read; one that was begun goes on."""
    hidden = path.parent / f".{path.stem}"  # what is not yet finished
    if path.exists():
        sheet = check_same(_read_kept(path), part, quick, path)
        shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed in its last moment
        return sheet
    setting = Setting() if setting is None else setting
    hidden.mkdir(parents=True, exist_ok=True)
    with opened(hidden) as run_folder:
        remove_unfinished(path.parent, path.name)
        log = run_folder.log
        about = _about(command, quick, setting)
        log(f"{command} on {about['device']}")
        sheets: list[Sheet] = []
        for k, group in enumerate(groups_of(part)):
            done = sum(own.num_models for own in groups_of(part)[:k]) / part.num_models

            def tell(progress: Progress, group: Part = group, done: float = done) -> None:
                if progress.note:
                    log(progress.note)
                share = done + progress.share * group.num_models / part.num_models
                report(Progress(share, progress.task, None, progress.note))

            kept = hidden / f"{k}.json"
            if not kept.exists():
                sheet = _run_group(group, about, load, setting, hidden / str(k), tell)
                _keep_sheet(sheet, kept, run_folder)
            shutil.rmtree(hidden / str(k), ignore_errors=True)
            sheets.append(check_same(_read_kept(kept), group, quick, hidden))
        _keep_sheet(_together(part, sheets), path, run_folder)
    shutil.rmtree(hidden)
    return read_sheet(path)


def _read_kept(path: Path) -> Sheet:
    try:
        return read_sheet(path)
    except InputError as error:
        raise InputError(f"{error}; remove it, and it is run again") from error


def _keep_sheet(sheet: Sheet, path: Path, folder: RunFolder) -> None:
    try:
        folder.check()
        write_sheet(sheet, path)
    except OSError as error:
        how = "the same command goes on, from what could be kept"
        raise InputError(f"the results cannot be written to {path}: {reason(error)}; {how}") from error


def groups_of(part: Part) -> list[Part]:
    """Entries that can be run together: those that learn the same tasks."""
    groups: dict[tuple, dict[str, Config]] = {}
    for label, config in part.entries.items():
        groups.setdefault(tuple(getattr(config, name) for name in SAME_TASKS), {})[label] = config
    return [Part(part.name, part.benchmark, entries) for entries in groups.values()]


def _about(command: str, quick: bool, setting: Setting) -> dict[str, Any]:
    return {
        "command": command,
        "quick": quick,
        "started": now(),
        "precision": setting.precision,
        "versions": versions(),
        **setting.engine.environment(setting.device),
    }


def _together(part: Part, sheets: Sequence[Sheet]) -> Sheet:
    """The sheets of all groups as one, in the order of the part."""
    entries = {label: result for sheet in sheets for label, result in sheet.entries.items()}
    seconds = round(sum(float(sheet.about["seconds"]) for sheet in sheets), 1)
    about = {**sheets[-1].about, "seconds": seconds, "models": part.num_models}
    return Sheet(part.name, part.benchmark, {label: entries[label] for label in part.entries}, about)


def _run_group(group: Part, about: dict[str, Any], load: Load, setting: Setting, folder: Path, report: Report) -> Sheet:
    configs = list(group.entries.values())
    datasets = load(configs[0])
    folder.mkdir(exist_ok=True)
    _check_data(folder / "data.txt", datasets)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    clock = _Clock(folder / "seconds.txt")

    def tell(progress: Progress) -> None:
        clock.keep()
        report(progress)

    results = run_on(configs, datasets, replace(setting, checkpoints=checkpoints), tell)
    data = [dataset.provenance() for dataset in datasets]
    entries = dict(zip(group.entries, results, strict=True))
    return Sheet(group.name, group.benchmark, entries, {**about, "seconds": round(clock.seconds, 1), "data": data})


def _check_data(path: Path, datasets: Sequence[Dataset]) -> None:
    """Refuse to go on with other samples than those that it began with."""
    now = "".join(f"{dataset.fingerprint()}\n" for dataset in datasets)
    if path.exists() and path.read_text() != now:
        raise InputError(f"the data are not those that the run in {path.parent} began with: remove it, or use --out")
    write_atomically(path, now)


class _Clock:
    """How long a group has taken, over all times that it went on."""

    def __init__(self, path: Path):
        self.path = path
        self.before = _seconds_in(path)
        self.started = self.kept = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def keep(self) -> None:
        if time.monotonic() - self.kept > 10:
            self.kept = time.monotonic()
            with suppress(OSError):  # a full disk costs no result, and no figure
                write_atomically(self.path, f"{self.seconds:.1f}")


def _seconds_in(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


def check_same(sheet: Sheet, part: Part, quick: bool, path: Path) -> Sheet:
    """Refuse to take results of other settings for those of this part, or of a group of it."""
    if sheet.quick != quick:
        kind = "quick" if sheet.quick else "whole"
        raise InputError(f"there is a {kind} reproduction in this folder already: name another with --out")
    if {label: result.config for label, result in sheet.entries.items()} != part.entries:
        raise InputError(f"{path} is of other settings: remove it, or name another folder with --out")
    return sheet
