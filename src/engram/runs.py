"""A run: several methods on one benchmark, into one folder, each result written as soon as it is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from engram.build import build_model, build_stream, choose_device
from engram.config import Config
from engram.data.samples import Dataset
from engram.experiment import Progress, Report, run_on
from engram.results import FORMAT, Result, claim_folder, versions, write_atomically, write_result


def default_folder(benchmark: str) -> Path:
    return Path("runs") / f"{benchmark}-{datetime.now():%Y%m%d-%H%M%S}"


def run_methods(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    folder: str | Path,
    *,
    command: str,
    device: str = "auto",
    report: Report = lambda progress: None,
) -> list[Result]:
    """Run each config in turn on the same data. What is finished is safe in the folder, whatever happens next.

    `command` is kept, for whoever wants to run it again.
    """
    where = choose_device(device)
    check_buildable(configs, datasets)
    folder = claim_folder(folder, "run.json")
    description: dict[str, Any] = {
        "format": FORMAT,
        "benchmark": configs[0].benchmark,
        "methods": [config.method for config in configs],
        "command": command,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": str(where),
        "versions": versions(),
        "data": [dataset.provenance() for dataset in datasets],
    }
    write_description(folder, description)
    log = start_log(folder / "log.txt")
    log(f"{command} on {where}")
    results = []
    for config in configs:
        log(f"{config.method}: begins")
        started = time.monotonic()
        results.append(
            run_on(config, datasets, device=str(where), report=_keeping(folder / config.method, log, report))
        )
        log(f"{config.method}: done in {time.monotonic() - started:.1f} s")
    write_description(folder, {**description, "finished": datetime.now().astimezone().isoformat(timespec="seconds")})
    log("done")
    return results


def check_buildable(configs: Sequence[Config], datasets: Sequence[Dataset]) -> None:
    """Refuse what cannot be a stream or a network before a folder is claimed for its results."""
    stream = build_stream(configs[0], 0, datasets)
    for config in configs:
        build_model(config, 0, stream.input_shape, stream.num_classes)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    write_atomically(folder / "run.json", json.dumps(description, indent=2) + "\n")


def start_log(path: Path) -> Callable[[str], None]:
    """A function that adds a line, with the time, to the log."""

    def log(line: str) -> None:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    return log


def _keeping(folder: Path, log: Callable[[str], None], report: Report) -> Report:
    """`report`, with results and log lines kept on the way."""

    def keep(progress: Progress) -> None:
        place = f"{progress.config.method}: trial {progress.trial + 1}"
        if progress.row is not None:
            log(f"{place}, task {progress.task + 1}: " + " ".join(f"{100 * value:.2f}" for value in progress.row))
        if progress.result is not None:
            write_result(progress.result, folder)
            for divergence in progress.result.diverged:
                if divergence.trial == progress.trial:
                    log(f"{progress.config.method}: {divergence}")
        report(progress)

    return keep
