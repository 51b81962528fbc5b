"""The files of a run on disk: one format for what `run`, `sweep`, `reproduce` and `Result.save` write.

A run's folder holds
- `run.json`: the settings of every label, the command, versions, environment, data and times;
- `results.json`: one line for each label with its trial numbers and accuracies, exact, null for NaN;
- `dynamics.csv`: loss, η, ‖Hebb‖ and ‖α‖ over time. The trial is `mean` where only means over trials were saved.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import Divergence, InputError, reason, shortened
from engram.common.files import read_json, read_text, write_atomically
from engram.common.registry import BENCHMARKS, HEADS
from engram.config.methods import CUSTOM, known_methods
from engram.config.settings import Config, as_setting, from_dict
from engram.runs.result import DYNAMICS, MEAN, Result

# The format of every file of a run, a sweep and a reproduction. Raise it when older readers would misread them, and
# convert the published results/: older formats are not read.
FORMAT = 2
RUN, RESULTS, DYNAMICS_FILE = "run.json", "results.json", "dynamics.csv"
MAX_RESULTS_BYTES = 128 * 2**20
MAX_CSV_BYTES, MAX_CSV_ROWS = 128 * 2**20, 2_000_000
NUMBER_BYTES, ROW_BYTES = 25, 130  # the most that an accuracy in JSON, and a row of dynamics without its label, takes
WHOLE = ("trial", "task", "epoch", "step")
SETTINGS = ("common", "configs")  # in run.json; everything else in it is `Run.about`

# What looking into JSON of unknown content can raise.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


def check_format(content: Any, path: Path) -> None:
    """Refuse what is not a file of Engram, or is of another format."""
    written = content.get("format") if isinstance(content, dict) else None
    if type(written) is not int:
        raise InputError(f"{path} is not a file of Engram, or is damaged")
    if written > FORMAT:
        raise InputError(f"{path} was written by a newer version of Engram: this one reads format {FORMAT}")
    if written < FORMAT:
        raise InputError(f"{path} has the old format {written}, which is no longer read: run the command again")


def check_size(configs: Mapping[str, Config], records_per_epoch: int) -> None:
    """Refuse, before anything is trained, a run whose files would be too large to be read again."""
    accuracies = sum(config.trials * config.num_tasks * (config.num_tasks + 1) for config in configs.values())
    rows = sum(config.trials * config.num_tasks * config.epochs * records_per_epoch for config in configs.values())
    longest = max(len(label.encode()) for label in configs)
    _check_size(accuracies, rows, longest)


def check_written_size(results: Mapping[str, Result]) -> None:
    """The same check for results that exist already."""
    accuracies = sum(result.accuracy.size + result.untrained.size for result in results.values())
    rows = sum(len(result.dynamics) for result in results.values())
    _check_size(accuracies, rows, max(len(label.encode()) for label in results))


def _check_size(accuracies: int, rows: int, longest_label: int) -> None:
    too_many = rows > MAX_CSV_ROWS or rows * (ROW_BYTES + longest_label) > MAX_CSV_BYTES
    if too_many or accuracies * NUMBER_BYTES > MAX_RESULTS_BYTES:
        what = f"{accuracies} accuracies and {rows} records of the training"
        raise InputError(f"the results would be too large to be read again ({what}): run fewer methods or trials")


def write_description(folder: Path, configs: Mapping[str, Config], about: Mapping[str, Any]) -> None:
    """Write `run.json`. Settings that all labels share are in it once, and each label's own on one line."""
    settings = [config.to_dict() for config in configs.values()]
    common = {name: value for name, value in settings[0].items() if all(each[name] == value for each in settings)}
    lines = []
    for label, config in configs.items():
        own = {name: value for name, value in config.to_dict().items() if name not in common}
        lines.append(f"{json.dumps(label)}: {json.dumps(own)}")
    head = json.dumps({"format": FORMAT, **about, "common": common}, indent=1).removesuffix("\n}")
    write_atomically(folder / RUN, head + ',\n "configs": {\n' + ",\n".join(lines) + "\n}}\n")


def read_description(folder: Path) -> tuple[dict[str, Config], dict[str, Any]]:
    """Read `run.json`: the config of every label, and everything else in it."""
    path = folder / RUN
    content = read_json(path)
    check_format(content, path)
    try:
        configs = _configs(content["common"], content["configs"])
        about = {name: value for name, value in content.items() if name not in SETTINGS}
        about["data"] = [provenance_of(record) for record in about.get("data", [])]
        if not 0 <= float(about.get("seconds", 0)) < math.inf:
            raise ValueError("its time is not a number of seconds")
        first = next(iter(configs.values()))
        if not all(label and label.isprintable() for label in configs):
            raise ValueError("its labels are not all printable words")
        if any((config.benchmark, config.dataset) != (first.benchmark, first.dataset) for config in configs.values()):
            raise ValueError("its settings are of several benchmarks or datasets")
    except InputError as error:
        raise InputError(f"cannot use {path}: {error}") from error
    except (*DAMAGE, StopIteration) as error:
        raise InputError(f"{path} is not a run of Engram, or is damaged ({reason(error)})") from error
    return configs, about


def _configs(common: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> dict[str, Config]:
    """As `from_dict` makes them, but what they share is checked once: a folder may hold ten thousand runs."""
    shared = {name: as_setting(name, value) for name, value in common.items()}
    configs = {}
    for label, settings in own.items():
        values = shared | {name: as_setting(name, value) for name, value in settings.items()}
        try:
            configs[label] = Config(**values) if {"benchmark", "method"} <= values.keys() else from_dict(values)
        except InputError:
            _check_registered(values)
            raise
    return configs


def _check_registered(settings: Mapping[str, Any]) -> None:
    """Refuse names that another package may have registered where the settings were written."""
    known = {"method": known_methods(), "benchmark": (*BENCHMARKS.names(), CUSTOM), "baseline_head": HEADS.names()}
    for what, names in known.items():
        if what in settings and settings[what] not in names:
            missing = "the package that registers it may not be installed"
            raise InputError(f"there is no {what} {shortened(settings[what])} here: {missing}")


def write_results(folder: Path, results: Mapping[str, Result], dynamics: bool = True) -> None:
    """Write, or replace, `results.json` and `dynamics.csv`; each is complete at every moment.

    Labels without trials are left out.
    """
    started = {label: result for label, result in results.items() if result.trials}
    if dynamics:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("label", *DYNAMICS))
        for label, result in started.items():
            for row in result.dynamics:
                trial = "mean" if row["trial"] == MEAN else row["trial"]
                writer.writerow((label, trial, *(row[name] for name in DYNAMICS[1:])))
        write_atomically(folder / DYNAMICS_FILE, text.getvalue())
    lines = []
    for label, result in started.items():
        entry = {
            "label": label,
            "trials": list(result.trials),
            "accuracy": _without_nan(result.accuracy),
            "untrained": _without_nan(result.untrained),
            "diverged": [divergence.to_dict() for divergence in result.diverged],
        }
        if result.kept is not None:
            entry["kept"] = result.kept
        lines.append(json.dumps(entry))
    entries = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    write_atomically(folder / RESULTS, f'{{"format": {FORMAT}, "results": {entries}}}\n')


def _without_nan(values: np.ndarray) -> list[Any]:
    """As nested lists. JSON has no NaN, so null stands for it."""
    found = values.astype(object)
    found[np.isnan(values)] = None
    return found.tolist()


def read_results(
    folder: Path, configs: Mapping[str, Config], data: list[dict[str, Any]], dynamics: bool
) -> tuple[dict[str, Result], dict[str, str]]:
    """The results of the labels that have any, in the order of the run, and a sentence for each that is damaged."""
    path = folder / RESULTS
    try:
        entries = _read_entries(path)
    except InputError as error:
        return {}, dict.fromkeys(configs, str(error))
    results: dict[str, Result] = {}
    problems: dict[str, str] = {}
    for label, config in configs.items():
        if label not in entries:
            continue
        try:
            results[label] = _result(config, entries[label], data)
        except DAMAGE as error:
            problems[label] = f"its entry in {path} is damaged ({reason(error)})"
    if dynamics and results:
        results, damaged = _with_dynamics(results, folder / DYNAMICS_FILE)
        problems |= damaged
    return results, problems


def _read_entries(path: Path) -> dict[str, Any]:
    """The entries of results.json by label; none where nothing has been written yet."""
    try:
        content = read_json(path, MAX_RESULTS_BYTES)
    except InputError:
        if not path.exists():
            return {}
        raise
    check_format(content, path)
    try:
        entries = {entry["label"]: entry for entry in content["results"]}
    except DAMAGE as error:
        raise InputError(f"{path} is not a file of Engram, or is damaged ({reason(error)})") from error
    if len(entries) < len(content["results"]):
        raise InputError(f"{path} is damaged: a label has two entries")
    return entries


def _result(config: Config, entry: Mapping[str, Any], data: list[dict[str, Any]]) -> Result:
    trials, tasks = entry["trials"], config.num_tasks
    planned = range(config.first_trial, config.first_trial + config.trials)
    if not isinstance(trials, list) or not all(type(trial) is int and trial in planned for trial in trials):
        raise ValueError(f"its trials are not all from {planned[0]} to {planned[-1]}")
    if not trials or len(set(trials)) < len(trials):
        raise ValueError("it has no trials, or one of them twice")
    accuracy, untrained = fractions(entry["accuracy"]), fractions(entry["untrained"])
    if accuracy.shape != (len(trials), tasks, tasks) or untrained.shape != (len(trials), tasks):
        raise ValueError(f"its tables are not of {len(trials)} trials and {tasks} tasks")
    diverged = [divergence_of(each) for each in entry["diverged"]]
    if not {divergence.trial for divergence in diverged} <= set(trials):
        raise ValueError("it has a divergence of a trial that it does not have")
    kept = entry.get("kept")
    if kept is not None and not (len(kept) == 2 and all(type(n) is int and n >= 0 for n in kept)):
        raise ValueError("what it keeps is not a number of samples and of bytes")
    kept = None if kept is None else tuple(kept)
    return Result(config, tuple(trials), accuracy, untrained, diverged=diverged, data=data, kept=kept)


def _with_dynamics(results: dict[str, Result], path: Path) -> tuple[dict[str, Result], dict[str, str]]:
    """The results with what was recorded of their training; without it, and with a problem each, where that fails."""
    if not path.exists():
        return results, {}
    rows: dict[str, list[dict[str, float]]] = {label: [] for label in results}
    try:
        text = read_text(path, MAX_CSV_BYTES)
        if text.count("\n") > MAX_CSV_ROWS:
            raise ValueError(f"it has more than {MAX_CSV_ROWS} rows")
        header, *lines = csv.reader(io.StringIO(text, newline="")) or [[]]
        if tuple(header) != ("label", *DYNAMICS):
            raise ValueError(f"its columns are not label, {', '.join(DYNAMICS)}")
        for line in lines:
            if line and line[0] in rows:
                rows[line[0]].append(_record(line[1:]))
    except (csv.Error, ValueError, IndexError) as error:
        return results, dict.fromkeys(results, f"cannot read {path}: {reason(error)}")
    return {label: replace(result, dynamics=rows[label]) for label, result in results.items()}, {}


def _record(cells: list[str]) -> dict[str, float]:
    values = [str(MEAN) if cells[0] == "mean" else cells[0], *cells[1:]]
    return {name: int(value) if name in WHOLE else float(value) for name, value in zip(DYNAMICS, values, strict=True)}


def fractions(value: Any) -> np.ndarray:
    """Accuracies from JSON, where null stands for NaN."""
    found = np.array(value, dtype=float)
    if ((found < 0) | (found > 1)).any():  # NaN is neither
        raise ValueError("its accuracies are not all in [0, 1]")
    return found


def divergence_of(entry: Any) -> Divergence:
    if {*entry, "why"} != {"trial", "task", "step", "why"}:
        raise ValueError("a divergence has a trial, a task and a step")
    return Divergence.of(**entry)


def provenance_of(record: Any) -> dict[str, Any]:
    """The name and origin of a dataset, and how many samples it has."""
    name, origin, train, test = (record[key] for key in ("name", "origin", "train", "test"))
    named = all(isinstance(word, str) and word.isprintable() for word in (name, origin))
    if not named or not all(type(count) is int for count in (train, test)):
        raise ValueError(f"{shortened(record)} is not a dataset with a name, an origin and numbers of samples")
    return {"name": name, "origin": origin, "train": train, "test": test}
