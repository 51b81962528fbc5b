"""A run: several methods on one benchmark, together, into one folder, from which it can go on when it was stopped."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, check_choice, reason
from engram.common.files import read_json, remove_unfinished, write_atomically
from engram.config.settings import Config, load_config
from engram.data.samples import Dataset
from engram.engine import Engine, InProcess
from engram.engine.build import build_model, build_streams
from engram.engine.checkpoint import SECONDS_BETWEEN, CheckpointFolder
from engram.engine.loop import RECORDS_PER_EPOCH
from engram.engine.progress import StopAsked, never_stop
from engram.engine.runtime import Runtime
from engram.engine.stacks import digest
from engram.engine.training import check_together
from engram.runs.experiment import Progress, Report, Setting, check_shared, run_on
from engram.runs.folder import RunFolder, claimed, now, opened
from engram.runs.news import News
from engram.runs.result import FORMAT, Result, are_methods, changes_since, check_format, check_readable, versions
from engram.runs.tensorboard import TensorBoard, check_log

PRECISIONS = ("tf32", "float32", "float64")


def default_folder(benchmark: str) -> Path:
    """A name that is still free, also after a clock was set back."""
    name = f"{benchmark}-{datetime.now():%Y%m%d-%H%M%S}"
    free = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
    return next(folder for folder in free if not folder.exists())


def run_methods(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    folder: str | Path,
    *,
    command: str,
    setting: Setting | None = None,
    log: str | None = None,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Run all configs together on the same data. What is learned is safe in the folder, whatever happens next.

    `command` is kept, for whoever wants to run it again; `log="tensorboard"` writes event files into the folder too;
    `seconds_between` is the time from checkpoint to checkpoint.
    """
    setting = Setting() if setting is None else setting
    where = check_options(configs, setting)
    check_log(log)
    check_buildable(configs, datasets)
    with claimed(folder) as run_folder:
        for config in configs:
            (run_folder.path / config.method).mkdir(exist_ok=True)
            write_atomically(run_folder.path / config.method / "config.toml", config.to_toml())
        description = {
            "format": FORMAT,
            "benchmark": configs[0].benchmark,
            "methods": [config.method for config in configs],
            "command": command,
            "started": now(),
            "device": where["device"],
            "precision": setting.precision,
            "max_stack": setting.max_stack,
            "engine": setting.engine.name,
            "log": log,
            "settings": digest(_labelled(configs)),
            "versions": versions(),
            "surroundings": {name: value for name, value in where.items() if name != "device"},
            "data": [dataset.provenance() for dataset in datasets],
            "fingerprints": [dataset.fingerprint() for dataset in datasets],
        }
        run_folder.describe(description)
        run_folder.log(f"{command} on {where['device']}")
        setting = replace(setting, device=where["device"])
        return _go_on(configs, datasets, run_folder, description, setting, seconds_between, report)


def resume_methods(
    folder: str | Path,
    datasets: Sequence[Dataset],
    *,
    engine: Engine | None = None,
    stop_asked: StopAsked = never_stop,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Go on with a run that was stopped, from its last checkpoint, to the same results as if it had not been."""
    folder = Path(folder)
    read_unfinished(folder)  # refuse what is no run before its log is touched
    with opened(folder) as run_folder:
        description, configs = read_unfinished(folder)
        try:
            then = description["data"], description["fingerprints"]
            device, precision, max_stack = (description[name] for name in ("device", "precision", "max_stack"))
            made_with = {**description["versions"], **description["surroundings"]}
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder / 'run.json'} does not say enough to go on from ({reason(error)})") from error
        found = [dataset.provenance() for dataset in datasets], [dataset.fingerprint() for dataset in datasets]
        if description.get("settings") != digest(_labelled(configs)):
            raise InputError(f"the settings in {folder} were changed since the run began")
        if found != then:
            raise InputError(f"the data are not those that the run in {folder} began with")
        setting = Setting(device, precision, max_stack, engine=engine or InProcess(), stop_asked=stop_asked)
        where = check_options(configs, setting)
        check_log(description.get("log"))
        check_buildable(configs, datasets)
        for place in (folder, *(folder / config.method for config in configs)):
            remove_unfinished(place)
        run_folder.log(f"engram run --resume {folder} on {where['device']}")
        notes = []
        if not CheckpointFolder(folder / "checkpoints").any_saved:
            notes.append("nothing was kept yet when the run was stopped: it begins again")
        here = {name: value for name, value in {**versions(), **where}.items() if name != "device"}
        if warning := changes_since(made_with, here):
            notes.append(warning)
        for note in notes:
            run_folder.log(note)
            report(Progress(0, 0, note=note))
        return _go_on(configs, datasets, run_folder, description, setting, seconds_between, report)


def has_begun(folder: Path) -> bool:
    """Whether there is a run from which to go on."""
    path = folder / "run.json"
    return path.exists() and path.stat().st_size > 0


def read_unfinished(folder: Path) -> tuple[dict[str, Any], list[Config]]:
    """The description and the configs of a run that can go on."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    path = folder / "run.json"
    if not path.exists():
        raise InputError(f"{folder} does not hold a run: it has no run.json")
    if not has_begun(folder):
        raise InputError(f"the run in {folder} was stopped before it began: start it again")
    description = read_json(path)
    check_format(description, path)
    if "finished" in description:
        CheckpointFolder(folder / "checkpoints").remove()  # of a process that was killed in its last moment
        raise InputError(f"the run in {folder} is finished; `engram table {folder}` shows it")
    methods = description.get("methods")
    if not are_methods(methods):
        raise InputError(f"{path} is not a run of Engram, or is damaged")
    return description, [load_config(folder / method / "config.toml") for method in methods]


def _go_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    run_folder: RunFolder,
    description: dict[str, Any],
    setting: Setting,
    seconds_between: float,
    report: Report,
) -> list[Result]:
    """From the folder's checkpoints to the end; from the beginning, where there are none yet."""
    news = News()
    watchers = [*_logs(run_folder.path, description), report]
    started = time.monotonic()

    def keep(progress: Progress) -> None:
        for line in (*news.lines(progress), *news.warnings(progress)):
            run_folder.log(line)
        trouble = run_folder.keep(progress.results)
        for watch in watchers:
            watch(progress)
        if trouble:
            keep(replace(progress, results=None, note=trouble))

    checkpoints = CheckpointFolder(run_folder.path / "checkpoints", seconds_between)
    results = run_on(configs, datasets, replace(setting, checkpoints=checkpoints), keep)
    run_folder.finish(results, {**description, "finished": now()})
    checkpoints.remove()
    run_folder.log(f"done in {time.monotonic() - started:.1f} s")
    return results


def _logs(folder: Path, description: dict[str, Any]) -> list[Report]:
    """What the run is told to besides. On going on they begin again, from what the checkpoint has."""
    if description.get("log") is None:
        return []
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    return [TensorBoard(folder / "tensorboard")]


def check_options(configs: Sequence[Config], setting: Setting) -> dict[str, Any]:
    """Refuse what cannot be run anywhere, or not there; returns the surroundings."""
    check_choice("precision", setting.precision, PRECISIONS)
    for config in configs:
        check_readable(config, config.trials * config.num_tasks * config.epochs * RECORDS_PER_EPOCH)
    check_shared(configs)
    check_together(_labelled(configs))
    return Runtime(setting.device, setting.precision, setting.max_stack, setting.engine).environment()


def _labelled(configs: Sequence[Config]) -> dict[str, Config]:
    return {str(place): config for place, config in enumerate(configs)}


def check_buildable(configs: Sequence[Config], datasets: Sequence[Dataset]) -> None:
    """Refuse what cannot be a stream or a network before a folder is claimed for its results."""
    (stream,) = build_streams(configs[0], [0], datasets)
    for config in configs:
        build_model(config, 0, stream.input_shape, stream.num_classes)
