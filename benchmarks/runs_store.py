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
from engram.display import as_text
from engram.store.export import export
from engram.store.index import NAME, SETTLED_NS, Index
from engram.store.query import parse_conditions, select
from engram.tables import Table

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


def list_all(folder: Path) -> str:
    rows = select(Index(folder))
    return as_text(Table("", tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """The best of some times."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"{number} runs of {len(METHODS)} methods")
        print(f"{seconds(lambda: make_runs(folder, number)):8.2f} s  to write them")
        time.sleep(SETTLED_NS / 1e9)
        print(f"{seconds(lambda: list_all(folder)):8.2f} s  to list them the first time, which builds the index")
        print(f"{seconds(lambda: list_all(folder), 3):8.2f} s  to list them again")
        changed = folder / "00" / "run-00000" / "si" / "accuracy.json"
        changed.write_text(changed.read_text().replace("0.1", "0.2", 1))
        print(f"{seconds(lambda: list_all(folder)):8.2f} s  to list them after one has changed")
        wanted = parse_conditions({"method": "si"}, ["seed<100"])
        few = seconds(lambda: select(Index(folder), wanted, sort="-accuracy", limit=10), 3)
        print(f"{few:8.2f} s  to find ten of them by method, setting and accuracy")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "engram", "runs", "list", str(folder)]
        whole = seconds(lambda: subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL), 3)
        bare = seconds(lambda: subprocess.run([*command[:3], "--version"], check=True, stdout=subprocess.DEVNULL), 3)
        print(f"{whole:8.2f} s  for the whole command, {bare:.2f} s of which go to starting Python and PyTorch")
        index = Index(folder)
        everything = select(index)
        print(f"{seconds(lambda: export(index, everything, folder / 'all.csv')):8.2f} s  to export all trials as CSV")
        print(f"{(folder / NAME).stat().st_size / 1e6:8.2f} MB of index")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
