"""How long `engram runs` takes with many runs: python benchmarks/runs_store.py [number of runs]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import engram
from engram.runs.store.export import export
from engram.runs.store.index import NAME, SETTLED_NS, Index
from engram.runs.store.query import parse_conditions, select

METHODS = ("si", "dhp+si")
TRIALS, TASKS = 3, 5
ABOUT = {"format": 1, "benchmark": "split-mnist", "methods": METHODS, "finished": "2026-01-01T13:00:00+00:00"}


def make_runs(folder: Path, number: int) -> None:
    """Small runs of two methods, written straight from one template; each has its own seed and accuracies."""
    config = {m: engram.preset("split-mnist", m, dataset="mnist-small", trials=TRIALS).to_toml() for m in METHODS}
    data = [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}]
    for run in range(number):
        accuracy = [
            [[(run + k + i + j) % 1000 / 1000 for j in range(TASKS)] for i in range(TASKS)] for k in range(TRIALS)
        ]
        about = {**ABOUT, "started": f"2026-01-01T12:{run // 60 % 60:02}:{run % 60:02}+00:00"}
        content = {
            "format": 1,
            "accuracy": accuracy,
            "untrained": [[0.1] * TASKS] * TRIALS,
            "diverged": [],
            "data": data,
        }
        place = folder / f"{run % 100:02}" / f"run-{run:05}"
        for method in METHODS:
            os.makedirs(place / method)
            (place / method / "config.toml").write_text(config[method].replace("seed = 0", f"seed = {run}", 1))
            (place / method / "accuracy.json").write_text(json.dumps(content))
        (place / "run.json").write_text(json.dumps(about))


def command(*arguments: str) -> None:
    """A whole process, from its start to its end."""
    words = [sys.executable, "-m", "engram", *arguments]
    subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)


def tell(what: str, call: Callable[[], object], times: int = 1) -> None:
    """Print the best of some times: seconds on the clock, and of them those of the processor, in all processes."""
    taken = []
    for _ in range(times):
        begun, busy = time.perf_counter(), sum(os.times()[:4])
        call()
        taken.append((time.perf_counter() - begun, sum(os.times()[:4]) - busy))
    wall, processor = (min(column) for column in zip(*taken, strict=True))
    print(f"{wall:8.2f} s, {processor:8.2f} s of the processor: {what}", flush=True)


def measure(number: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"{number} runs of {len(METHODS)} methods")
        make_runs(folder, number)
        time.sleep(SETTLED_NS / 1e9)
        listing = ("runs", "list", str(folder))
        tell("engram --version", lambda: command("--version"), times=5)
        tell("engram runs list for the first time, which builds the index", lambda: command(*listing))
        tell("engram runs list again", lambda: command(*listing), times=5)
        tell("engram runs list --limit 10", lambda: command(*listing, "--limit", "10"), times=5)
        changed = folder / "00" / "run-00000" / "si" / "accuracy.json"
        changed.write_text(changed.read_text().replace("0.1", "0.2", 1))
        tell("engram runs list after one has changed", lambda: command(*listing))
        wanted = parse_conditions({"method": "si"}, ["seed<100"])
        best = {"sort": "-accuracy", "limit": 10}
        tell("find the ten best from Python", lambda: select(Index(folder), wanted, **best), times=3)
        index = Index(folder)
        everything = select(index)
        tell("export all trials as CSV from Python", lambda: export(index, everything, folder / "all.csv"))
        print(f"{(folder / NAME).stat().st_size / 1e6:8.2f} MB of index")


if __name__ == "__main__":
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
