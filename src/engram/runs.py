"""A run: several methods on one benchmark, together, into one folder, from which it can go on when it was stopped."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from engram.build import NOTHING_OWN, build_model, build_streams, choose_device
from engram.checkpoint import NAME, SECONDS_BETWEEN, Checkpoints, digest
from engram.config import Config, load_config
from engram.data.samples import Dataset
from engram.errors import InputError, check_choice, said
from engram.experiment import Progress, Report, Setting, check_own, run_on
from engram.logs import TensorBoard, check_log
from engram.news import News
from engram.reading import read_json
from engram.replacing import sweep, write_atomically
from engram.results import (
    FORMAT,
    Result,
    are_methods,
    check_format,
    check_readable,
    claim_folder,
    versions,
    write_result,
)
from engram.shares import plan_stacks
from engram.train import RECORDS_PER_EPOCH

try:
    import fcntl
except ImportError:  # Windows, where two processes on one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

PRECISIONS = ("tf32", "float32", "float64")


def default_folder(benchmark: str) -> Path:
    return Path("runs") / f"{benchmark}-{datetime.now():%Y%m%d-%H%M%S}"


def run_methods(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    folder: str | Path,
    *,
    command: str,
    device: str = "auto",
    precision: str = "tf32",
    max_stack: int | None = None,
    log: str | None = None,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Run all configs together on the same data. What is learned is safe in the folder, whatever happens next.

    `command` is kept, for whoever wants to run it again; `log="tensorboard"` writes event files into the folder too;
    `seconds_between` is the time from checkpoint to checkpoint.
    """
    where = check_options(configs, device, precision, max_stack)
    check_log(log)
    check_buildable(configs, datasets)
    folder = claim_folder(folder, "run.json")
    with sole_writer(folder):
        for config in configs:
            (folder / config.method).mkdir()
            write_atomically(folder / config.method / "config.toml", config.to_toml())
        description = {
            "format": FORMAT,
            "benchmark": configs[0].benchmark,
            "methods": [config.method for config in configs],
            "command": command,
            "started": _now(),
            "device": str(where),
            "precision": precision,
            "max_stack": max_stack,
            "log": log,
            "settings": digest(configs),
            "versions": versions(),
            "surroundings": surroundings(where),
            "data": [dataset.provenance() for dataset in datasets],
            "fingerprints": [dataset.fingerprint() for dataset in datasets],
        }
        write_description(folder, description)
        start_log(folder)(f"{command} on {where}")
        return _go_on(configs, datasets, folder, description, Checkpoints(folder, seconds_between), report)


def resume_methods(
    folder: str | Path,
    datasets: Sequence[Dataset],
    *,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = lambda progress: None,
) -> list[Result]:
    """Go on with a run that was stopped, from its last checkpoint, to the same results as if it had not been."""
    folder = Path(folder)
    read_unfinished(folder)  # refuse what is no run before its log is touched
    with sole_writer(folder):
        description, configs = read_unfinished(folder)
        try:
            then = description["data"], description["fingerprints"]
            options = [description[name] for name in ("device", "precision", "max_stack")]
            made_with = {**description["versions"], **description["surroundings"]}
        except (KeyError, TypeError) as reason:
            raise InputError(f"{folder / 'run.json'} does not say enough to go on from ({said(reason)})") from reason
        now = [dataset.provenance() for dataset in datasets], [dataset.fingerprint() for dataset in datasets]
        if description.get("settings") != digest(configs):
            raise InputError(f"the settings in {folder} were changed since the run began")
        if now != then:
            raise InputError(f"the data are not those that the run in {folder} began with")
        where = check_options(configs, *options)
        check_log(description.get("log"))
        check_buildable(configs, datasets)
        changed = [
            f"{name} {made_with.get(name)} is now {value}"
            for name, value in {**versions(), **surroundings(where)}.items()
            if made_with.get(name) != value
        ]
        for place in (folder, *(folder / config.method for config in configs)):
            sweep(place)
        log = start_log(folder)
        log(f"engram run --resume {folder} on {where}")
        if not (folder / NAME).exists():
            nothing = "nothing was kept yet when the run was stopped: it begins again"
            log(nothing)
            report(Progress(0, 0, note=nothing))
        if changed:
            warning = f"the results may differ from those of a run never stopped, in last bits: {'; '.join(changed)}"
            log(warning)
            report(Progress(0, 0, note=warning))
        return _go_on(configs, datasets, folder, description, Checkpoints(folder, seconds_between), report)


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
        raise InputError(f"the run in {folder} was stopped before it began: remove the folder and start it again")
    description = read_json(path)
    check_format(description, path)
    if "finished" in description:
        raise InputError(f"the run in {folder} is finished; `engram table {folder}` shows it")
    methods = description.get("methods")
    if not are_methods(methods):
        raise InputError(f"{path} is not a run of Engram, or is damaged")
    return description, [load_config(folder / method / "config.toml") for method in methods]


def _go_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    folder: Path,
    description: dict[str, Any],
    checkpoints: Checkpoints,
    report: Report,
) -> list[Result]:
    """From the folder's checkpoint to the end; from the beginning, where there is none yet."""
    log, news = start_log(folder), News()
    watchers = [*_logs(folder, description), report]
    started = time.monotonic()

    def keep(progress: Progress) -> None:
        for line in (*news.lines(progress), *news.warnings(progress)):
            log(line)
        for result in progress.results or ():
            write_result(result, folder / result.config.method)
        for watch in watchers:
            watch(progress)

    device, precision, max_stack = (description[name] for name in ("device", "precision", "max_stack"))
    setting = Setting(device, precision, max_stack, checkpoints=checkpoints)
    try:
        results = run_on(configs, datasets, setting, keep)
    finally:
        checkpoints.wait()
    for result in results:
        write_result(result, folder / result.config.method)
    write_description(folder, {**description, "finished": _now()})
    checkpoints.remove()
    log(f"done in {time.monotonic() - started:.1f} s")
    return results


def _logs(folder: Path, description: dict[str, Any]) -> list[Report]:
    """What the run is told to besides. On going on they begin again, from what the checkpoint has."""
    if description.get("log") is None:
        return []
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    return [TensorBoard(folder / "tensorboard")]


def check_options(configs: Sequence[Config], device: str, precision: str, max_stack: int | None) -> torch.device:
    """Refuse what cannot be run anywhere, or not here; returns the device."""
    check_choice("precision", precision, PRECISIONS)
    for config in configs:
        check_readable(config, config.trials * config.num_tasks * config.epochs * RECORDS_PER_EPOCH)
    plan_stacks(configs, max_stack)
    check_own(configs, NOTHING_OWN)
    return choose_device(device)


def check_buildable(configs: Sequence[Config], datasets: Sequence[Dataset]) -> None:
    """Refuse what cannot be a stream or a network before a folder is claimed for its results."""
    (stream,) = build_streams(configs[0], [0], datasets)
    for config in configs:
        build_model(config, 0, stream.input_shape, stream.num_classes)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the run's log for this process alone. The system lets go of it however the process ends."""
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"another process is at work on the run in {folder}") from None
            except OSError:
                pass  # a file system that has no locks
        yield


def surroundings(device: torch.device) -> dict[str, Any]:
    """What the last bits of a number may depend on besides versions."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"threads": torch.get_num_threads(), **gpu}


def write_description(folder: Path, description: dict[str, Any]) -> None:
    write_atomically(folder / "run.json", json.dumps(description, indent=2) + "\n")


def start_log(folder: Path) -> Callable[[str], None]:
    """A function that adds a line, with the time, to the log."""

    def log(line: str) -> None:
        with (folder / "log.txt").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    return log


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
