"""Kill Engram at random moments, again and again, and compare what it leaves with an undisturbed run.

    python tools/kill.py --kills 50

Five commands are killed with SIGKILL: a run, a run in several stacks, a sweep, a search, and a report. Each is started
again with what a person would type (`engram run --resume`, or the same command) until it finishes. Then every number
must be that of the undisturbed command; and after every kill, everything that was complete before must still be there,
unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optuna
from rich.progress import track

from engram.common.errors import InputError
from engram.runs.run import find_runs, read_run
from engram.runs.sweep.search import STUDY

SOURCE = Path(__file__).parents[1] / "src"
SMALL = ["--dataset", "mnist-small", "--epochs", "2", "--set", "hidden=[16]", "--set", "max_samples=2000",
         "--set", "batch_size=10"]  # fmt: skip
# The command as it is, but with a checkpoint wherever one is possible: otherwise a run of a few seconds has none.
COMMAND = """
from engram.engine.checkpoint import Checkpoints
Checkpoints.is_due = lambda self, task_ended: True
from engram.cli.main import main
main()
"""
State = dict[str, str]  # a digest or text for each thing that must not change


@dataclass(frozen=True)
class Work:
    """A command to kill: its arguments at the start and when resumed, and what it leaves."""

    name: str
    start: Callable[[Path], list[str]]
    resume: Callable[[Path], list[str]]
    finished: Callable[[Path], bool]
    final: Callable[[Path], State]  # what must be equal in the end
    complete: Callable[[Path], State]  # what is complete so far, and must stay


def digests(folder: Path, *patterns: str) -> State:
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def tasks_learned(folder: Path) -> State:
    """The accuracies of every label, trial and task that the runs in a folder have recorded."""
    found: State = {}
    for path in find_runs(folder) if folder.is_dir() else []:
        try:
            run = read_run(path)
        except InputError as reason:
            if "before it started" in str(reason) or "no results yet" in str(reason):
                continue
            raise
        if run.problems:
            raise InputError("; ".join(run.problems.values()))
        for label, result in run.results.items():
            for trial, matrix in zip(result.trials, result.accuracy, strict=True):
                for task, row in enumerate(matrix):
                    if math.isfinite(row[task]):
                        found[f"{path.relative_to(folder)} {label} {trial} {task}"] = repr(row[: task + 1].tolist())
    return found


def has_run(folder: Path) -> bool:
    path = folder / "run.json"
    return path.exists() and path.stat().st_size > 0


def a_run(stack: int | None) -> Work:
    def start(folder: Path) -> list[str]:
        limit = [] if stack is None else ["--stack", str(stack)]
        return ["run", "split-mnist", "--methods", "si,dhp+mas", "--trials", "2", *SMALL, *limit, "--out", str(folder)]

    def resume(folder: Path) -> list[str]:
        return ["run", "--resume", str(folder)] if has_run(folder) else start(folder)

    def finished(folder: Path) -> bool:
        return has_run(folder) and read_run(folder).finished

    def final(folder: Path) -> State:
        return digests(folder, "results.json", "dynamics.csv")

    return Work("run" if stack is None else "run in stacks", start, resume, finished, final, tasks_learned)


def studies(folder: Path) -> State:
    """What Optuna finds in the file of a search."""
    if not (folder / STUDY).exists():
        return {}
    storage = f"sqlite:///{folder / STUDY}"
    found: State = {}
    for name in optuna.get_all_study_names(storage):
        for trial in optuna.load_study(study_name=name, storage=storage).trials:
            numbers = trial.state, trial.params, trial.values, trial.intermediate_values
            found[f"{STUDY} {name} {trial.number}"] = repr(numbers)
    return found


def a_sweep(search: bool) -> Work:
    def command(folder: Path) -> list[str]:
        axes = ["--grid", "strength=0.1,1,10,100,1000"]
        if search:
            axes = ["--search", "strength=0.1..1000:log", "--points", "12"]
        return ["sweep", "split-mnist", "--methods", "dhp+si", "--trials", "3", *axes, *SMALL, "--out", str(folder)]

    def final(folder: Path) -> State:
        files = digests(folder, "*.csv", "*.toml", "*.png", "runs/*/results.json", "runs/*/dynamics.csv")
        return {**files, **studies(folder)}

    def finished(folder: Path) -> bool:
        return (folder / "best-dhp+si.toml").exists()

    def complete(folder: Path) -> State:
        return {**tasks_learned(folder), **studies(folder)}

    return Work("search" if search else "sweep", command, command, finished, final, complete)


def a_report(run: Path) -> Work:
    def command(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        return ["report", str(run), "--out", str(folder / "report.html")]

    def final(folder: Path) -> State:
        return digests(folder, "*.html")

    def complete(folder: Path) -> State:
        return {**final(folder), **tasks_learned(run)}

    return Work("report", command, command, lambda folder: bool(final(folder)), final, complete)


def launch(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def run_undisturbed(work: Work, folder: Path) -> float:
    """Run the command to its end; returns its seconds."""
    started = time.monotonic()
    process = launch(work.start(folder))
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{work.name} failed undisturbed: {errors.decode()}")
    return time.monotonic() - started


def kill_repeatedly(work: Work, folder: Path, kills: int, seconds: float, draw: random.Random) -> list[str]:
    """Kill the command this many times, starting over whenever it has finished; returns what was wrong."""
    expected = work.final(folder / "undisturbed")
    faults: list[str] = []
    number = 0
    path = folder / "killed-0"
    for _ in track(range(kills), description=f"{work.name}: {kills} kills"):
        killed = False
        while not killed:
            before = work.complete(path)
            process = launch(work.resume(path) if path.exists() else work.start(path))
            try:
                _, errors = process.communicate(timeout=draw.uniform(0.3, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                killed = True
                faults += lost(work, path, before)
            else:
                if process.returncode:
                    faults.append(f"{work.name} could not be resumed: {errors.decode().strip()}")
            if work.finished(path):  # before it could be killed, or in its last moment
                faults += differences(work, path, expected)
                number += 1
                path = folder / f"killed-{number}"
    process = launch(work.resume(path) if path.exists() else work.start(path))
    _, errors = process.communicate()
    if process.returncode != 0:
        faults.append(f"{work.name} could not be resumed: {errors.decode().strip()}")
    return faults + differences(work, path, expected)


def lost(work: Work, folder: Path, before: State) -> list[str]:
    """What was complete before a kill and is not there any more."""
    try:
        after = work.complete(folder)
    except (InputError, ValueError, OSError) as reason:
        return [f"{work.name}: a file is damaged after a kill: {reason}"]
    changed = [name for name, value in before.items() if after.get(name) != value]
    return [f"{work.name}: {name} was complete, and is lost or changed" for name in changed]


def differences(work: Work, folder: Path, expected: State) -> list[str]:
    """What is not as the undisturbed command left it."""
    found = work.final(folder)
    faults = [f"{work.name}: {name} is not as undisturbed" for name in expected if found.get(name) != expected[name]]
    unfinished = [str(path) for path in folder.rglob(".*") if path.is_file()]
    return faults + [f"{work.name}: {path} was left behind" for path in unfinished]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill Engram at random moments, and check that nothing is lost.")
    parser.add_argument("--kills", type=int, default=50, help="in all, over run, sweep, search and report")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="engram-kill-"))
    works = [a_run(None), a_run(2), a_sweep(False), a_sweep(True), a_report(folder / "run" / "undisturbed")]
    counts = [options.kills * tenths // 10 for tenths in (3, 2, 2, 2)]
    faults: list[str] = []
    for work, kills in zip(works, [*counts, options.kills - sum(counts)], strict=True):
        (folder / work.name).mkdir()
        seconds = run_undisturbed(work, folder / work.name / "undisturbed")
        found = kill_repeatedly(work, folder / work.name, kills, seconds, draw)
        print(f"{work.name}: {seconds:.1f} s undisturbed, killed {kills} times, {len(found)} faults")
        faults += found
    print(*faults, f"{options.kills} kills, {len(faults)} faults", sep="\n")
    if faults:
        raise SystemExit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
