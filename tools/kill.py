"""Kills Engram at random moments, again and again, and compares what it leaves with what it leaves in peace.

    python tools/kill.py --kills 50

Four commands are killed with SIGKILL: a run, a run in several stacks, a sweep, and a report. Each is started again by
what a person would type (`engram run --resume`, or the same command), until it comes to its end. Then every number must
be that of the command that nobody killed; after every kill each file of a finished trial must be readable and hold what
it held before.
"""

from __future__ import annotations

import hashlib
import json
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
from typing import Annotated

import typer
from rich.progress import track

from engram.common.errors import InputError
from engram.runs.result import read_run
from engram.runs.sheets import read_sheet

SOURCE = Path(__file__).parents[1] / "src"
SMALL = ["--dataset", "mnist-small", "--epochs", "2", "--set", "hidden=[16]", "--set", "max_samples=2000",
         "--set", "batch_size=10"]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A command to be killed: how it begins, how it goes on, and what it leaves."""

    name: str
    begin: Callable[[Path], list[str]]
    go_on: Callable[[Path], list[str]]
    finished: Callable[[Path], bool]
    left: Callable[[Path], dict[str, str]]  # a digest for each thing that must be the same in the end
    complete: Callable[[Path], dict[str, str]]  # a digest for each thing that is complete so far, and must stay


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files(folder: Path, *patterns: str) -> dict[str, str]:
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in found}


def sheets(folder: Path) -> dict[str, str]:
    """The numbers of each sheet, without the times."""
    found = {}
    for path in sorted(folder.glob("rungs/*.json")):
        numbers = {label: result.accuracy.tolist() for label, result in read_sheet(path).entries.items()}
        found[path.name] = digest(repr(numbers).encode())
    return found


def tasks_learned(folder: Path) -> dict[str, str]:
    """Of each method, trial and task that a run has written down: what it says of it."""
    if not (folder / "run.json").exists() or not (folder / "run.json").read_text():
        return {}
    try:
        _, results = read_run(folder)
    except InputError as reason:
        if "no results yet" in str(reason):
            return {}
        raise
    return {
        f"{result.config.method} {trial} {task}": repr(result.accuracy[trial, task, : task + 1].tolist())
        for result in results
        for trial in range(len(result.accuracy))
        for task in range(result.config.num_tasks)
        if result.accuracy[trial, task, task] == result.accuracy[trial, task, task]
    }


def is_finished(folder: Path) -> bool:
    path = folder / "run.json"
    return path.exists() and bool(path.read_text()) and "finished" in json.loads(path.read_text())


def a_run(stack: int | None) -> Work:
    def begin(folder: Path) -> list[str]:
        limit = [] if stack is None else ["--stack", str(stack)]
        return ["run", "split-mnist", "--methods", "si,dhp+mas", "--trials", "2", *SMALL, *limit, "--out", str(folder)]

    def go_on(folder: Path) -> list[str]:
        began = (folder / "run.json").exists() and (folder / "run.json").stat().st_size > 0
        return ["run", "--resume", str(folder)] if began else begin(folder)

    def left(folder: Path) -> dict[str, str]:
        return files(folder, "*/*.json", "*/*.csv", "*/*.toml")

    return Work("run" if stack is None else "run in stacks", begin, go_on, is_finished, left, tasks_learned)


def a_sweep() -> Work:
    def command(folder: Path) -> list[str]:
        axes = ["--grid", "strength=0.1,1,10,100,1000"]
        return ["sweep", "split-mnist", "--methods", "dhp+si", "--trials", "3", *axes, *SMALL, "--out", str(folder)]

    def left(folder: Path) -> dict[str, str]:
        return {**files(folder, "points.csv", "*.toml", "sweep.png"), **sheets(folder)}

    return Work("sweep", command, command, lambda folder: (folder / "best-dhp+si.toml").exists(), left, sheets)


def a_report(run: Path) -> Work:
    def command(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        return ["report", str(run), "--out", str(folder / "report.html")]

    def left(folder: Path) -> dict[str, str]:
        return files(folder, "*.html")

    def complete(folder: Path) -> dict[str, str]:
        return {**left(folder), **tasks_learned(run)}

    return Work("report", command, command, lambda folder: bool(left(folder)), left, complete)


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", QUICKLY_KEPT, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


# The command as it is, but with a checkpoint wherever there can be one: else a run of a few seconds has none.
QUICKLY_KEPT = """
import engram.checkpoint
engram.checkpoint.Checkpoints.is_due = lambda self, task_ended: True
from engram.cli import main
main()
"""


def time_of(work: Work, folder: Path) -> float:
    """Do the work in peace."""
    began = time.monotonic()
    process = start(work.begin(folder))
    _, said = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{work.name} failed though nobody killed it: {said.decode()}")
    return time.monotonic() - began


def torment(work: Work, folder: Path, kills: int, seconds: float, chance: random.Random) -> tuple[int, list[str]]:
    """Kill the work so many times, and begin anew when it has ended; returns the kills, and what was wrong."""
    wrong: list[str] = []
    peace = folder / "peace"
    wanted = work.left(peace)
    done, life = 0, 0
    own = folder / "life-0"
    for _ in track(range(kills), description=f"{work.name}: {kills} kills"):
        while True:
            before = work.complete(own)
            process = start(work.go_on(own) if own.exists() else work.begin(own))
            try:
                process.communicate(timeout=chance.uniform(0.3, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                done += 1
                wrong += check(work, own, before)
            else:
                wrong += [f"{work.name} ended with {process.returncode}"] if process.returncode else []
            if work.finished(own):  # in its last moment, or before it could be killed
                wrong += ended(work, own, wanted)
                life += 1
                own = folder / f"life-{life}"
            if process.returncode < 0:
                break
    process = start(work.go_on(own) if own.exists() else work.begin(own))
    _, said = process.communicate()
    if process.returncode != 0:
        wrong.append(f"{work.name} did not go on: {said.decode().strip()}")
    return done, wrong + ended(work, own, wanted)


def check(work: Work, folder: Path, before: dict[str, str]) -> list[str]:
    """What was complete before a kill must be there after it, as it was."""
    try:
        after = work.complete(folder)
    except (InputError, ValueError, OSError) as reason:
        return [f"{work.name}: a file is damaged after a kill: {reason}"]
    return [
        f"{work.name}: {name} was complete and is lost or changed"
        for name, value in before.items()
        if after.get(name) != value
    ]


def ended(work: Work, folder: Path, wanted: dict[str, str]) -> list[str]:
    """What is not as the work in peace left it."""
    found = work.left(folder)
    wrong = [
        f"{work.name}: {name} differs from that of the work in peace"
        for name in wanted
        if found.get(name) != wanted[name]
    ]
    halves = [str(path) for path in folder.rglob(".*") if path.is_file()]
    return wrong + [f"{work.name}: {path} was left behind" for path in halves]


def main(
    kills: Annotated[int, typer.Option(help="In all, over run, sweep and report.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Kill Engram at random moments and see whether anything is lost."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="engram-kill-"))
    run = a_run(None)
    works = [run, a_run(2), a_sweep(), a_report(folder / "run" / "peace")]
    shares = [kills * share // 10 for share in (3, 2, 3)]
    wrong: list[str] = []
    total = 0
    for work, share in zip(works, [*shares, kills - sum(shares)], strict=True):
        (folder / work.name).mkdir()
        seconds = time_of(work, folder / work.name / "peace")
        done, found = torment(work, folder / work.name, share, seconds, chance)
        print(f"{work.name}: {seconds:.1f} s in peace, killed {done} times, {len(found)} faults")
        total += done
        wrong += found
    for line in wrong:
        print(line)
    print(f"{total} kills, {len(wrong)} faults")
    if not wrong:
        shutil.rmtree(folder)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
