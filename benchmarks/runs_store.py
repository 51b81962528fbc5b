"""How long `engram runs` takes with many runs: python benchmarks/runs_store.py [number of runs]."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import track

import engram
from engram.runs.export import export
from engram.runs.format import write_description, write_results
from engram.runs.result import Result
from engram.runs.store import list_runs, parse_condition, select

METHODS = ("si", "dhp+si")
TRIALS, TASKS = 3, 5
ABOUT = {
    "command": "engram run split-mnist",
    "finished": "2026-01-01T13:00:00+00:00",
    "data": [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}],
}


def make_runs(folder: Path, number: int) -> None:
    """Small runs of two methods; each has its own seed and accuracies."""
    configs = {m: engram.preset("split-mnist", m, dataset="mnist-small", trials=TRIALS) for m in METHODS}
    offsets = np.add.outer(np.arange(TRIALS), np.add.outer(np.arange(TASKS), np.arange(TASKS)))
    untrained = np.full((TRIALS, TASKS), 0.1)
    for run in track(range(number), "making runs", transient=True):
        path = folder / f"{run % 100:02}" / f"run-{run:05}"
        path.mkdir(parents=True)
        seeded = {label: replace(config, seed=run) for label, config in configs.items()}
        accuracy = (run + offsets) % 1000 / 1000
        started = f"2026-01-01T12:{run // 60 % 60:02}:{run % 60:02}+00:00"
        write_description(path, seeded, {**ABOUT, "started": started})
        results = {label: Result(config, range(TRIALS), accuracy, untrained) for label, config in seeded.items()}
        write_results(path, results)


def command(*arguments: str) -> None:
    """A whole process, from its start to its end."""
    words = [sys.executable, "-m", "engram", *arguments]
    subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)


def measure(what: str, call: Callable[[], object], times: int = 1) -> None:
    """Print the best of some times: seconds that passed, and seconds of the processor in all processes."""
    taken = []
    for _ in range(times):
        start, busy = time.perf_counter(), sum(os.times()[:4])
        call()
        taken.append((time.perf_counter() - start, sum(os.times()[:4]) - busy))
    wall, processor = (min(column) for column in zip(*taken, strict=True))
    print(f"{wall:8.2f} s, {processor:8.2f} s of the processor: {what}", flush=True)


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"{number} runs of {len(METHODS)} methods")
        os.fsync = lambda handle: None  # only while the runs are made
        make_runs(folder, number)
        measure("engram --version", lambda: command("--version"), times=3)
        measure("engram runs list", lambda: command("runs", "list", str(folder)), times=3)
        measure("engram runs list --limit 10", lambda: command("runs", "list", str(folder), "--limit", "10"), times=3)
        measure("list all runs from Python", lambda: list_runs(folder), times=3)
        rows = list_runs(folder).rows
        conditions = [parse_condition("method=si"), parse_condition("seed<100")]
        measure("choose the ten best", lambda: select(rows, conditions, sort="-accuracy", limit=10), times=3)
        measure("export all trials as CSV", lambda: export(folder, rows, folder / "all.csv"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("number", type=int, nargs="?", default=10_000, help="of runs")
    main(parser.parse_args().number)
