"""Running a reproduction: part after part into one folder, from which it can go on when it was stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from engram.build import choose_device
from engram.checkpoint import Checkpoints
from engram.config import Config
from engram.data.samples import Dataset
from engram.errors import InputError
from engram.experiment import Progress, Report, Setting, run_on
from engram.reproduction.plan import Part
from engram.results import Result, versions
from engram.runs import sole_writer, start_log, surroundings
from engram.shares import SHARED
from engram.sheets import Sheet, read_sheet, sheet_path, write_sheet

Load = Callable[[Config], Sequence[Dataset]]


def run_part(
    part: Part,
    folder: Path,
    load: Load,
    *,
    command: str,
    quick: bool = False,
    device: str = "auto",
    precision: str = "tf32",
    max_stack: int | None = None,
    report: Report = lambda progress: None,
) -> Sheet:
    """Run one part and write its sheet. One that is there already is read; one that was begun goes on."""
    path = sheet_path(folder, part.benchmark, part.name)
    if path.exists():
        return check_same(read_sheet(path), part, quick, path)
    where = choose_device(device)
    hidden = path.parent / f".{part.name}"  # what is not yet finished
    hidden.mkdir(parents=True, exist_ok=True)
    with sole_writer(hidden):
        log = start_log(hidden)
        log(f"{command} on {where}")
        about: dict[str, Any] = {
            "command": command,
            "quick": quick,
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "device": str(where),
            "precision": precision,
            "versions": versions(),
            **surroundings(where),
        }
        entries: dict[str, Result] = {}
        seconds = 0.0
        done = 0
        for k, group in enumerate(groups_of(part)):
            portion = sum(config.trials for config in group.values()) / part.num_models

            def tell(progress: Progress, done: int = done, portion: float = portion) -> None:
                if progress.note:
                    log(progress.note)
                report(Progress(done / part.num_models + portion * progress.share, progress.task, None, progress.note))

            kept = hidden / f"{k}.json"
            if not kept.exists():
                sheet = _run_group(
                    part, group, about, load, Setting(device, precision, max_stack), hidden / str(k), tell
                )
                write_sheet(sheet, kept)
            sheet = check_same(read_sheet(kept), Part(part.name, part.benchmark, group), quick, hidden)
            entries |= sheet.entries
            seconds += float(sheet.about["seconds"])
            about["data"] = sheet.about["data"]
            done += sum(config.trials for config in group.values())
        whole = {label: entries[label] for label in part.entries}
        made = Sheet(
            part.name, part.benchmark, whole, {**about, "seconds": round(seconds, 1), "models": part.num_models}
        )
        write_sheet(made, path)
    shutil.rmtree(hidden)
    return read_sheet(path)


def groups_of(part: Part) -> list[dict[str, Config]]:
    """Entries that can be run together: those that learn the same tasks."""
    groups: dict[tuple, dict[str, Config]] = {}
    for label, config in part.entries.items():
        groups.setdefault(tuple(getattr(config, name) for name in SHARED), {})[label] = config
    return list(groups.values())


def _run_group(
    part: Part,
    group: dict[str, Config],
    about: dict[str, Any],
    load: Load,
    setting: Setting,
    folder: Path,
    report: Report,
) -> Sheet:
    configs = list(group.values())
    datasets = load(configs[0])
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder)
    clock = _Clock(folder / "seconds.txt")
    setting = Setting(setting.device, setting.precision, setting.max_stack, checkpoints=checkpoints)

    def tell(progress: Progress) -> None:
        clock.keep()
        report(progress)

    try:
        results = run_on(configs, datasets, setting, tell)
    finally:
        checkpoints.wait()
    data = [dataset.provenance() for dataset in datasets]
    return Sheet(
        part.name,
        part.benchmark,
        dict(zip(group, results, strict=True)),
        {**about, "seconds": round(clock.seconds, 1), "data": data},
    )


class _Clock:
    """How long a group has taken, over all times that it went on."""

    def __init__(self, path: Path):
        self.path = path
        self.before = float(path.read_text()) if path.exists() else 0.0
        self.started = self.kept = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def keep(self) -> None:
        if time.monotonic() - self.kept > 10:
            self.kept = time.monotonic()
            self.path.write_text(f"{self.seconds:.1f}")


def check_same(sheet: Sheet, part: Part, quick: bool, path: Path) -> Sheet:
    """Refuse to take results of other settings for those of this part, or of a group of it."""
    if sheet.quick != quick:
        kind = "quick" if sheet.quick else "whole"
        raise InputError(f"there is a {kind} reproduction in this folder already: name another with --out")
    if {label: result.config for label, result in sheet.entries.items()} != part.entries:
        raise InputError(f"{path} is of other settings: remove it, or name another folder with --out")
    return sheet
