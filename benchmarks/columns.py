"""From the command to the table: how long `engram run` takes for a column of Table I, or for all of it in one command.

python benchmarks/columns.py --data DATA --device cuda --out benchmarks/records/2025-01-31-my-gpu-columns
python benchmarks/columns.py --benchmarks vision-mixture --table --data DATA --device cuda --rounds 1
python benchmarks/columns.py --benchmarks split-mnist --device cpu --set dataset=mnist-small --set epochs=1

Each is a process of its own, timed from its start to its end. The first round finds nothing compiled: the folders of
compiled kernels are new. Further rounds find what the first one left there. After all rounds the steps of the same
models are timed alone, beside their floor and a plain loop, and multiplied by the number of steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from record import RECORD, Plan, to_markdown
from rich.progress import Progress
from speed import COMPILED, MIX, PLAIN, Bench
from timing import busy_notes, hardware
from workloads import USUAL_PENALTIES, Workload

from engram.common.errors import InputError, check_choice
from engram.common.files import write_atomically
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS
from engram.config.presets import parse_setting, preset, title_of
from engram.data.batches import num_batches
from engram.data.sources import chosen_folder, named_folder
from engram.engine.build import build_streams, choose_device, load_datasets, precision_of
from engram.report.layout import Table
from engram.runs.folder import versions

TABLE = "Table I"
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")  # of Triton, CUDA and Engram's C library
TASK = re.compile(r", task (\d+)/\d+: ")  # a line of `engram run`, printed when a task has been learned
PART = re.compile(r"^([\w-]+): table, .* in .* s(; \d+ diverged)?$")  # of `engram reproduce`, when a column has ended


@dataclass(frozen=True)
class Round:
    """Seconds since the process was started."""

    seconds: float  # until it had ended
    tasks: list[float]  # until each task was learned by the first method
    parts: dict[str, float]  # of a table, until each of its columns was there

    @property
    def task(self) -> float | None:
        """What a task took, but for the first: the median."""
        between = [after - before for before, after in zip(self.tasks, self.tasks[1:], strict=False)]
        return statistics.median(between) if between else None

    @property
    def start(self) -> float | None:
        """What the first task took longer than the others: imports, reading data, compiling."""
        return None if self.task is None else self.tasks[0] - self.task


@dataclass(frozen=True)
class Steps:
    """The steps of a column alone."""

    benchmark: str
    steps: int  # of one model; the mean over trials that differ
    models: int
    stack_ms: float  # one step of all models, by Engram
    floor_ms: float
    rounds_ms: dict[str, list[float]]  # of one model, by contestant; of all, for Engram's stack

    def seconds(self, name: str) -> float | None:
        """All steps of all models, one model after another, at the speed of this contestant."""
        if name not in self.rounds_ms:
            return None
        quartile = statistics.quantiles(self.rounds_ms[name], n=4, method="inclusive")[0]
        return self.steps * self.models * quartile / 1e3


@dataclass
class Column:
    """One command, with all its rounds."""

    name: str
    command: str
    rounds: list[Round] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)  # one for a column, several for a table

    def in_all(self, seconds: Callable[[Steps], float | None]) -> float | None:
        """The sum over its columns, where all are known."""
        known = [found for one in self.steps if (found := seconds(one)) is not None]
        return sum(known) if known and len(known) == len(self.steps) else None


# --- the commands


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    """What a user types, after `engram`, but for the folder of the results."""
    common = ["--data", options.data] if options.data else []
    common += ["--device", options.device]
    if name == TABLE:
        return ["reproduce", "--part", "table", *(["--quick"] if options.quick else []), *common]
    return ["run", name, *(word for text in options.set for word in ("--set", text)), *common]


def run_once(words: Sequence[str], out: Path, caches: Path) -> Round:
    """Run a command to its end, and note when it printed what.

    Args:
        words: the command, after `engram`.
        out: a new folder, for the results.
        caches: a folder for whatever is compiled; an empty one means that everything is compiled again.

    Example:
        >>> run_once(["run", "split-mnist"], Path("results"), Path("caches")).seconds
        16.3
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not named_folder() and chosen_folder().is_dir():  # in the user's cache, which is elsewhere for this process
        environment["ENGRAM_DATA"] = str(chosen_folder())
    for name in CACHES:
        (caches / name).mkdir(parents=True, exist_ok=True)
        environment[name] = str(caches / name)
    command = [sys.executable, "-m", "engram", *words, "--out", str(out)]
    tasks: dict[int, float] = {}
    parts: dict[str, float] = {}
    said: list[str] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter() - start
            said.append(line.rstrip())
            if task := TASK.search(line):
                tasks.setdefault(int(task[1]), now)
            elif part := PART.match(said[-1]):
                parts[part[1]] = now
    seconds = time.perf_counter() - start
    if process.returncode:
        raise InputError(f"engram {shlex.join(words)} failed: {' '.join(said[-3:])}")
    return Round(seconds, list(tasks.values()), parts)


def measure_column(name: str, options: argparse.Namespace, report: Callable[[str], None]) -> Column:
    """All rounds of one command; its caches are empty in the first round, and kept from then on."""
    words = command_of(name, options)
    column = Column(name, shlex.join(["engram", *words]))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            report(f"{name}, {'nothing compiled' if number == 0 else 'again'}")
            results = Path(options.results or folder, f"{name.replace(' ', '-').lower()}-{number + 1}")
            column.rounds.append(run_once(words, results, Path(folder, "caches")))
    return column


# --- its steps alone


def measure_steps(benchmark: str, changes: Mapping[str, Any], options: argparse.Namespace) -> tuple[Steps, list[str]]:
    """A step of all models of a column, its floor, and one of a plain loop; how many there are of them; and notes."""
    config = preset(benchmark, "finetune").replace(**changes)
    streams = build_streams(config, range(config.trials), load_datasets(config, options.data))
    batches = [num_batches(len(task.train), config.batch_size) for stream in streams for task in stream]
    steps, models = round(config.epochs * sum(batches) / len(streams)), config.trials * len(PAPER_METHODS)
    first = streams[0][0]
    permuted = first.permutation is not None
    shape, classes = streams[0].input_shape, streams[0].num_classes
    workload = Workload(benchmark, benchmark, shape, classes, first.classes, permuted, changes)
    plan = Plan(options.device, sizes=(models,), penalties=USUAL_PENALTIES, heads=())
    plan = replace(plan, seconds=options.seconds, compiled=options.compiled)
    with precision_of(plan.precision) as dtype:
        bench = Bench(plan, choose_device(plan.device), dtype)
        bench.measure_group(workload, models, lambda done: None)
    stack = bench.found.speed(benchmark, MIX, models)
    rounds = {speed.name: [1e3 * seconds for seconds in speed.timing.rounds] for speed in bench.found.speeds}
    notes = [f"{note}." for note in bench.found.notes if note.startswith(COMPILED)]
    return Steps(benchmark, steps, models, stack.ms, stack.floor_ms, rounds), notes


def add_steps(columns: Sequence[Column], options: argparse.Namespace, report: Callable[[str], None]) -> list[str]:
    """Measure the steps of all columns; those of a table have the paper's settings. Returns notes."""
    changes: dict[str, Any] = {}
    for text in options.set:
        changes |= parse_setting(text)
    notes: list[str] = []
    for column in columns:
        parts = column.rounds[0].parts if column.rounds else ()
        benchmarks = {name: {} for name in parts} if column.name == TABLE else {column.name: changes}
        for benchmark, settings in benchmarks.items():
            report(f"{benchmark}, steps")
            steps, new = measure_steps(benchmark, settings, options)
            column.steps.append(steps)
            notes += [note for note in new if note not in notes]
            gc.collect()  # stacks are large
    return notes


# --- the table and the record


def table_of(columns: Sequence[Column], notes: Sequence[str]) -> Table:
    def cell(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds:,.1f}"

    rows = []
    for column in columns:
        cold = column.rounds[0] if column.rounds else None
        warm = min(column.rounds[1:], key=lambda one: one.seconds, default=None)
        last = warm or cold
        rows.append(
            (
                column.name if column.name == TABLE else title_of(column.name),
                cell(cold.seconds if cold else None),
                cell(warm.seconds if warm else None),
                *(cell(one.start if one else None) for one in (cold, warm)),
                cell(last.task if last else None),
                cell(column.in_all(lambda one: one.steps * one.stack_ms / 1e3)),
                cell(column.in_all(lambda one: one.steps * one.floor_ms / 1e3)),
                cell(column.in_all(lambda one: one.seconds(PLAIN))),
                cell(column.in_all(lambda one: one.seconds(COMPILED))),
            )
        )
    explained = (
        "Seconds. Cold: with nothing compiled; again: the fastest of the further rounds. Start: what the first task "
        "took longer than the median of the others, cold and again. Each task: that median.",
        "Its steps, floor, plain loop, torch.compile: the number of steps times the time of one, measured apart; both "
        "loops without penalties, importances and evaluation, one model after another.",
    )
    times = ("cold", "again", "start, cold", "start, again", "each task")
    peers = ("its steps", "floor", "plain loop", "torch.compile")
    return Table("from the command to the table", ("", *times, *peers), rows, (*explained, *notes))


def write_record(folder: Path, columns: Sequence[Column], notes: Sequence[str], device: str, command: str) -> None:
    """All that is needed to repeat the measurement, as JSON, and the table to read."""
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "versions": versions() | {"platform": platform.system()},
    }
    content = about | {"columns": [asdict(column) for column in columns], "notes": list(notes)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "README.md", to_markdown(about, [table_of(columns, notes)]))


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="columns.py", description=(__doc__ or "").splitlines()[0])
    usual = "permuted-mnist,split-mnist"
    parser.add_argument("--benchmarks", default=usual, help=f"by commas, of {', '.join(PAPER_BENCHMARKS)}")
    parser.add_argument("--table", action="store_true", help="engram reproduce --part table too, as one command")
    parser.add_argument("--quick", action="store_true", help="of --table: engram reproduce --quick")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of each command: the first with nothing compiled; 0: only steps"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contestant of the steps; 0: no steps")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="no plain loop by torch.compile")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="passed on to engram run")
    parser.add_argument("--data", metavar="DIR", help="the folder with the datasets")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep what the commands write in this folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep a record in this folder")
    return parser


def main(arguments: list[str]) -> None:
    parser = parser_of()
    options = parser.parse_args(arguments)
    names = [name for name in options.benchmarks.split(",") if name]
    columns: list[Column] = []
    try:
        for name in names:
            check_choice("benchmark", name, PAPER_BENCHMARKS)
        if options.rounds < 0:
            raise InputError(f"the number of rounds must not be negative, and is {options.rounds}")
        if options.out is not None and (options.out / RECORD).exists():
            raise InputError(f"{options.out} holds a record already")
        notes = [f"{note}." for note in busy_notes()]
        with Progress(transient=True) as bar:
            shown = bar.add_task("starting", total=None)

            def report(what: str) -> None:
                bar.update(shown, description=what)

            asked = [*names, *([TABLE] if options.table else [])]
            columns += [measure_column(name, options, report) for name in asked]
            if options.seconds > 0:  # after all rounds: this process then holds memory of the GPU
                known = [column for column in columns if column.name != TABLE or not options.quick]
                notes += add_steps(known, options, report)
    except InputError as reason:
        parser.error(str(reason))
    print(table_of(columns, notes).to_markdown())
    if options.out is not None:
        command = shlex.join(["python", "benchmarks/columns.py", *arguments])
        write_record(options.out, columns, notes, options.device, command)
        print(f"The record is in {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
