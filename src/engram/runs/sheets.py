"""What a reproduction leaves behind: a sheet for each part of it on each benchmark, small enough to be published.

A reproduction's folder holds `BENCHMARK/PART.json`, one sheet each. A sheet has an entry for each setting that was run:
its config, the accuracy matrices of all trials, and what became of the trace, as a mean over the trials.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError, reason, shortened
from engram.common.files import read_json, write_atomically
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS, PARTS
from engram.config.settings import Config, from_dict
from engram.runs.result import DAMAGE, DYNAMICS, Result, check_format, divergence_of, fractions, provenance_of
from engram.runs.run import Run, read_run

FORMAT = 1
SWEEP = "sweep"  # of a sweep's sheets, which are no part of a reproduction
WITH_DYNAMICS = ("table", "variant")  # the others would be large
PAPER_TRIALS = 10
PROVENANCE = ("name", "origin", "train", "test")
MEASURES = ("loss", "eta", "hebb_norm", "alpha_norm")
DIGITS = 5  # of an accuracy: a hundred times finer than a test sample
FIGURES = 5  # significant, of what is recorded on the way


@dataclass(frozen=True)
class Sheet:
    """The results of one part on one benchmark, by label; and how they came about."""

    part: str
    benchmark: str
    entries: dict[str, Result]
    about: dict[str, Any]  # command, device, versions, seconds, data, quick, …

    @property
    def quick(self) -> bool:
        return bool(self.about.get("quick"))

    @property
    def missing(self) -> list[str]:
        """What was to be there and is not, in sentences."""
        sentences = [
            f"{self.benchmark}, {self.part}: {label} has {len(result.accuracy)} of {result.config.trials} trials"
            for label, result in self.entries.items()
            if len(result.accuracy) < result.config.trials
        ]
        if self.part == "table":
            absent = [method for method in PAPER_METHODS if method not in self.entries]
            sentences += [f"{self.benchmark}, {self.part}: {method} was not run" for method in absent]
        planned = min(result.config.trials for result in self.entries.values())
        if self.part in WITH_DYNAMICS and planned < PAPER_TRIALS and not self.quick:
            sentences.append(f"{self.benchmark}, {self.part}: {planned} of the paper's {PAPER_TRIALS} trials were run")
        learned = min(result.tasks_learned for result in self.entries.values())
        num_tasks = next(iter(self.entries.values())).config.num_tasks
        if learned < num_tasks:
            sentences.append(f"{self.benchmark}, {self.part}: {learned} of {num_tasks} tasks were learned")
        return sentences


@dataclass(frozen=True)
class Reproduction:
    folder: Path
    sheets: dict[tuple[str, str], Sheet]  # by benchmark and part
    missing: list[str]  # in sentences

    @property
    def quick(self) -> bool:
        return any(sheet.quick for sheet in self.sheets.values())


def sheet_path(folder: Path, benchmark: str, part: str) -> Path:
    return folder / benchmark / f"{part}.json"


def holds_reproduction(folder: Path) -> bool:
    return any(
        sheet_path(folder, benchmark, part).exists() or (folder / benchmark / part / "run.json").exists()
        for benchmark in PAPER_BENCHMARKS
        for part in PARTS
    )


def _sheet_of(run: Run) -> Sheet:
    about = {**run.about["environment"], **run.about["runtime"], **run.about}
    entries = {
        label: replace(result, dynamics=[{**row, "trial": max(row["trial"], 0)} for row in result.dynamics])
        for label, result in run.results.items()
    }
    return Sheet(run.about["part"], run.benchmark, entries, about)


def begun_parts(folder: Path) -> list[str]:
    """Parts of a reproduction that were stopped before any of their sheets was whole, as BENCHMARK/PART."""
    return [f"{b}/{part}" for b in PAPER_BENCHMARKS for part in PARTS if (folder / b / f".{part}").is_dir()]


def read_reproduction(folder: str | Path, parts: Sequence[str] = tuple(PARTS)) -> Reproduction:
    """All sheets of a folder, and what is missing of a whole reproduction."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if not holds_reproduction(folder):
        raise InputError(f"{folder} holds no reproduction: it has no sheet such as {PAPER_BENCHMARKS[0]}/table.json")
    sheets: dict[tuple[str, str], Sheet] = {}
    missing = []
    for benchmark in PAPER_BENCHMARKS:
        for part in parts:
            path = sheet_path(folder, benchmark, part)
            if (folder / benchmark / part / "run.json").exists():
                sheet = sheets[benchmark, part] = _sheet_of(read_run(folder / benchmark / part))
                missing += sheet.missing
            elif path.exists():
                sheet = sheets[benchmark, part] = read_sheet(path)
                if (sheet.benchmark, sheet.part) != (benchmark, part):
                    raise InputError(f"{path} is of another place: it holds the {sheet.part} of {sheet.benchmark}")
                missing += sheet.missing
            elif (benchmark, part) not in NOT_IN_THE_PAPER:
                missing.append(f"{benchmark}: {PARTS[part]} was not run")
    return Reproduction(folder, sheets, missing)


# The paper varies η on three benchmarks, and describes two grids of strengths; what else there is, is ours.
NOT_IN_THE_PAPER = {
    ("vision-mixture", "sensitivity"),
    ("imbalanced-permuted-mnist", "strengths"),
    ("vision-mixture", "strengths"),
    ("imbalanced-permuted-mnist", "study"),
    ("vision-mixture", "study"),
}


def write_sheet(sheet: Sheet, path: Path) -> None:
    """One entry a line, so that two versions can be compared by eye."""
    configs = [result.config.to_dict() for result in sheet.entries.values()]
    common = {name: value for name, value in configs[0].items() if all(config[name] == value for config in configs)}
    head = {"format": FORMAT, "part": sheet.part, "benchmark": sheet.benchmark, "about": sheet.about, "common": common}
    lines = [
        json.dumps(_entry(label, result, common, sheet.part in WITH_DYNAMICS))
        for label, result in sheet.entries.items()
    ]
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _entry(label: str, result: Result, common: Mapping[str, Any], with_dynamics: bool) -> dict[str, Any]:
    own = {name: value for name, value in result.config.to_dict().items() if name not in common}
    return {
        "label": label,
        "settings": own,
        "accuracy": _rounded(result.accuracy.tolist()),
        "untrained": _rounded(result.untrained.tolist()),
        "diverged": [asdict(divergence) for divergence in result.diverged],
        "dynamics": mean_dynamics(result) if with_dynamics else {},
    }


def _rounded(value: Any) -> Any:
    """To the digits that are kept; JSON has no NaN, null stands for it."""
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return None if value != value else round(value, DIGITS)


def mean_dynamics(result: Result) -> dict[str, list[float]]:
    """Means over the trials of what was recorded: of a task, all make as many records, if not at the same steps."""
    if not result.config.plastic:
        return {}
    seen: dict[tuple[int, int], list[dict[str, float]]] = {}  # of (task, record) over trials
    count: dict[tuple[int, int], int] = {}
    for row in result.dynamics:
        trial, task = int(row["trial"]), int(row["task"])
        index = count[trial, task] = count.get((trial, task), 0) + 1
        seen.setdefault((task, index), []).append(row)
    columns: dict[str, list[float]] = {name: [] for name in DYNAMICS if name != "trial"}
    for (task, _), rows in sorted(seen.items()):
        for name in ("epoch", "step"):
            columns[name].append(int(rows[0][name]))
        columns["task"].append(task)
        for name in MEASURES:
            columns[name].append(_significant(float(np.mean([row[name] for row in rows]))))
    return columns if columns["task"] else {}


def _significant(value: float) -> float:
    return value if not math.isfinite(value) or value == 0 else float(f"{value:.{FIGURES}g}")


def read_sheet(path: str | Path) -> Sheet:
    """Read back what `write_sheet` wrote."""
    path = Path(path)
    content = read_json(path)
    check_format(content, path)
    try:
        data = [provenance_of(record) for record in content["about"]["data"]]
        entries = {
            entry["label"]: _result(from_dict({**content["common"], **entry["settings"]}), entry, data)
            for entry in content["entries"]
        }
        sheet = Sheet(str(content["part"]), str(content["benchmark"]), entries, dict(content["about"]))
    except InputError as error:
        raise InputError(f"cannot use {path}: {error}") from error
    except DAMAGE as error:
        raise InputError(f"{path} is not a sheet of Engram, or is damaged ({reason(error)})") from error
    labelled = entries and all(isinstance(label, str) for label in entries)
    if not labelled or sheet.part not in (*PARTS, SWEEP) or sheet.benchmark not in PAPER_BENCHMARKS:
        raise InputError(f"{path} is not a sheet of Engram, or is damaged")
    return sheet


def _result(config: Config, entry: Mapping[str, Any], data: list[dict[str, Any]]) -> Result:
    accuracy, untrained = (fractions(entry[name]) for name in ("accuracy", "untrained"))
    tasks = config.num_tasks
    if accuracy.ndim != 3 or accuracy.shape[1:] != (tasks, tasks) or untrained.shape != (len(accuracy), tasks):
        raise ValueError(f"the tables of {shortened(entry['label'])} are not of {tasks} tasks")
    columns = entry["dynamics"]
    if columns and set(columns) != {*DYNAMICS} - {"trial"}:
        raise ValueError(
            f"the dynamics of {shortened(entry['label'])} have other columns than {', '.join(DYNAMICS[1:])}"
        )
    if any(type(value) not in (int, float) for values in columns.values() for value in values):
        raise ValueError(f"the dynamics of {shortened(entry['label'])} are not all numbers")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    dynamics = [{"trial": 0, **row} for row in rows]  # the mean stands in the place of a trial
    trials = tuple(range(config.first_trial, config.first_trial + len(accuracy)))
    return Result(config, trials, accuracy, untrained, dynamics, [divergence_of(d) for d in entry["diverged"]], data)
