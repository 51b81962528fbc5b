"""What a run leaves behind: written atomically, read back exactly.

A run's folder holds `run.json` (what was run, with which versions, on which data), `log.txt`, and for each method
a folder with its `config.toml`, `accuracy.json` (the accuracy matrices) and `dynamics.csv` (loss, η, ‖Hebb‖ and
‖α‖ over time); until it is finished also a checkpoint.
"""

from __future__ import annotations

import csv
import io
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from engram import __version__
from engram.common.errors import InputError, reason
from engram.common.files import MAX_JSON_BYTES, read_json, read_text, write_atomically
from engram.config.methods import all_methods
from engram.config.settings import Config, load_config
from engram.runs import metrics
from engram.runs.metrics import Array

FORMAT = 1  # of all files of a run; raised when an older reader would misread them
MAX_CSV_BYTES, MAX_CSV_ROWS = 32 * 2**20, 1_000_000  # of dynamics
NUMBER_BYTES, ROW_BYTES = 25, 125  # at most, of an accuracy in JSON and of a row of dynamics in CSV
MEAN = -1  # the trial of dynamics that are means over trials
DYNAMICS = ("trial", "task", "epoch", "step", "loss", "eta", "hebb_norm", "alpha_norm")


@dataclass(frozen=True)
class Divergence:
    """Where a trial's loss stopped being a number; all counted from 0."""

    trial: int
    task: int
    step: int

    def __str__(self) -> str:
        place = f"in task {self.task + 1}, step {self.step + 1}"
        return f"trial {self.trial + 1} diverged {place}: its loss became NaN or infinite"


@dataclass(frozen=True)
class Result:
    """One method's outcome. What was not measured, after a divergence say, is NaN."""

    config: Config
    trials: tuple[int, ...]  # the trial number of each row; trials that have not started have no row
    accuracy: Array  # (trials, tasks, tasks): [k, i, j] on task j after learning task i, in trial trials[k]
    untrained: Array  # (trials, tasks): on each task before learning anything
    dynamics: list[dict[str, float]] = field(default_factory=list)  # rows of DYNAMICS
    diverged: list[Divergence] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)  # which datasets, and how many samples

    @property
    def average_accuracy(self) -> Array:
        """(trials, tasks): after each task, the mean over the tasks so far."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def bwt(self) -> Array:
        """(trials,): the paper's backward transfer."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def forgetting(self) -> Array:
        return metrics.forgetting(self.accuracy)

    @property
    def forward_transfer(self) -> Array:
        return metrics.forward_transfer(self.accuracy, self.untrained)

    @property
    def first_task(self) -> Array:
        """(trials, tasks): after each task, the accuracy on the first."""
        return metrics.first_task(self.accuracy)

    @property
    def latest_task(self) -> Array:
        """(trials, tasks): after each task, the accuracy on that task."""
        return metrics.latest_task(self.accuracy)

    @property
    def tasks_learned(self) -> int:
        """How many tasks all trials that did not diverge have learned."""
        diverged = {divergence.trial for divergence in self.diverged}
        sound = [row for row, trial in enumerate(self.trials) if trial not in diverged]
        learned = np.isfinite(np.diagonal(self.accuracy[sound], axis1=1, axis2=2)).sum(axis=1)
        return int(learned.min(initial=self.config.num_tasks))

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read back what `save` wrote."""
        return read_result(path)

    def save(self, path: str | Path) -> None:
        """Write the result into a new or empty folder; what a folder already holds is never overwritten."""
        check_readable(self.config, len(self.dynamics))
        write_result(self, claim_folder(path, "config.toml"))


def check_readable(config: Config, num_records: int) -> None:
    """Refuse results whose files would be larger than those that are read: better before they are computed."""
    num_accuracies = config.trials * config.num_tasks * (config.num_tasks + 1)
    if num_accuracies * NUMBER_BYTES > MAX_JSON_BYTES or num_records * ROW_BYTES > MAX_CSV_BYTES:
        what = f"{config.trials} trials of {config.num_tasks} tasks and {config.epochs} epochs"
        raise InputError(f"the results of {what} would be too large to be read again: run fewer trials at a time")


def claim_folder(path: str | Path, first_file: str) -> Path:
    """Make a folder for results, or take an empty one, and begin its first file: of two claims one is refused."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
        if taken is None:
            (folder / first_file).open("x").close()
            return folder
    except FileExistsError:  # a file in the place of the folder, or another claim a moment ago
        taken = folder / first_file if folder.is_dir() else None
        if taken is None:
            raise InputError(f"cannot write to {folder}: it is not a folder") from None
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    holds = "already holds a run" if (folder / "run.json").exists() else f"is not empty (it holds {taken.name})"
    raise InputError(f"{folder} {holds}, and results are never overwritten: name another folder")


def write_result(result: Result, folder: Path) -> None:
    """Write, or write anew, the files of one method as far as it has come; each is whole at every moment."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.toml", result.config.to_toml())
    if len(result.accuracy) == 0:  # no trial has been begun
        return
    write_atomically(folder / "dynamics.csv", _to_csv(result.dynamics))
    content = {
        "format": FORMAT,
        "accuracy": _without_nan(result.accuracy.tolist()),
        "untrained": _without_nan(result.untrained.tolist()),
        "diverged": [asdict(divergence) for divergence in result.diverged],
        "data": result.data,
    }
    write_atomically(folder / "accuracy.json", json.dumps(content) + "\n")


def read_result(folder: str | Path) -> Result:
    """Read back what `write_result` wrote."""
    folder = Path(folder)
    if (folder / "run.json").exists():
        raise InputError(f"{folder} holds a run of several methods: load one of its folders, one a method")
    result = read_accuracy(folder, load_config(folder / "config.toml"))
    return replace(result, dynamics=_from_csv(folder / "dynamics.csv"))


def read_accuracy(folder: Path, config: Config) -> Result:
    """All of a result but its dynamics, which are much the largest of its files."""
    path = folder / "accuracy.json"
    content = read_json(path)
    check_format(content, path)
    try:
        accuracy, untrained = fractions(content["accuracy"]), fractions(content["untrained"])
        diverged = [divergence_of(entry) for entry in content["diverged"]]
        data = [provenance_of(record) for record in content["data"]]
    except DAMAGE as error:
        raise InputError(f"{path} is not a result of Engram, or is damaged ({reason(error)})") from error
    num_trials, num_tasks = len(accuracy) if accuracy.ndim else 0, config.num_tasks
    if num_trials == 0 or accuracy.shape[1:] != (num_tasks, num_tasks) or untrained.shape != (num_trials, num_tasks):
        raise InputError(f"{path} is damaged: its tables are not of {num_tasks} tasks")
    trials = tuple(range(config.first_trial, config.first_trial + num_trials))
    return Result(config, trials, accuracy, untrained, diverged=diverged, data=data)


# What looking into a table that holds anything at all can raise.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


def fractions(value: Any) -> Array:
    """Accuracies from JSON, where null stands for NaN."""
    found = np.array(value, dtype=float)
    if not ((found >= 0) & (found <= 1) | np.isnan(found)).all():
        raise ValueError("its accuracies are not all in [0, 1]")
    return found


def divergence_of(entry: Any) -> Divergence:
    if set(entry) != {"trial", "task", "step"} or not all(type(v) is int and v >= 0 for v in entry.values()):
        raise ValueError("where a trial diverged is told by trial, task and step")
    return Divergence(**entry)


def provenance_of(record: Any) -> dict[str, Any]:
    """Which dataset, and how many samples."""
    name, origin, train, test = (record[key] for key in ("name", "origin", "train", "test"))
    named = all(isinstance(word, str) and word.isprintable() for word in (name, origin))
    if not named or not all(type(count) is int for count in (train, test)):
        raise ValueError("its data have no name, origin and numbers of samples")
    return {"name": name, "origin": origin, "train": train, "test": test}


def read_run(folder: str | Path) -> tuple[dict[str, Any], list[Result]]:
    """A run's description, and the results of all its methods that have any so far, in the order of the run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if (folder / "accuracy.json").exists():  # a single result, saved from Python
        result = read_result(folder)
        return {"methods": [result.config.method], "finished": None}, [result]
    if not (folder / "run.json").exists():
        raise InputError(f"{folder} does not hold a run: it has no run.json")
    description = read_json(folder / "run.json")
    check_format(description, folder / "run.json")
    methods = description.get("methods")
    if not are_methods(methods):
        raise InputError(f"{folder / 'run.json'} is not a run of Engram, or is damaged")
    results = [read_result(folder / method) for method in methods if (folder / method / "accuracy.json").exists()]
    if not results:
        raise InputError(f"the run in {folder} has no results yet")
    there = [method for method in methods if (folder / method / "accuracy.json").exists()]
    for method, config in zip(there, (result.config for result in results), strict=True):
        first = results[0].config
        if (config.method, config.benchmark, config.num_tasks) != (method, first.benchmark, first.num_tasks):
            raise InputError(f"{folder / method} is of another run, or of another method")
    return description, results


def are_methods(names: Any) -> bool:
    """Whether this is a list of methods, each once."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    return bool(names) and set(names) <= set(all_methods()) and len(set(names)) == len(names)


def check_format(content: Any, path: Path) -> None:
    written = content.get("format") if isinstance(content, dict) else None
    if not isinstance(written, int):
        raise InputError(f"{path} is not a file of Engram, or is damaged")
    if written > FORMAT:
        raise InputError(f"{path} was written by a newer version of Engram")


def versions() -> dict[str, str]:
    """Of everything that the numbers may depend on."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "engram": __version__,
        **{package: _version_of(package) for package in ("torch", "numpy", "scipy")},
    }


def changes_since(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A warning where versions or surroundings are no longer those that something began in; None where they are."""
    changed = [f"{name} {then.get(name)} is now {value}" for name, value in now.items() if then.get(name) != value]
    if not changed:
        return None
    return f"the results may differ from those of a run never stopped, in last bits: {'; '.join(changed)}"


def _version_of(package: str) -> str:
    """As the package itself says, which may name its build too; this module need not import it for that."""
    loaded = sys.modules.get(package)
    return str(loaded.__version__) if loaded is not None else metadata.version(package)


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if value != value else value


def _to_csv(rows: list[dict[str, float]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(DYNAMICS)
    writer.writerows([row[name] for name in DYNAMICS] for row in rows)
    return text.getvalue()


def _from_csv(path: Path) -> list[dict[str, float]]:
    whole = {"trial", "task", "epoch", "step"}
    try:
        text = read_text(path, MAX_CSV_BYTES)
        if text.count("\n") > MAX_CSV_ROWS:
            raise ValueError(f"it has more than {MAX_CSV_ROWS} rows")
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        if tuple(header) != DYNAMICS:
            raise ValueError(f"its columns are not {', '.join(DYNAMICS)}")
        return [
            {name: int(cell) if name in whole else float(cell) for name, cell in zip(DYNAMICS, row, strict=True)}
            for row in rows
            if row
        ]
    except (csv.Error, ValueError) as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from error
