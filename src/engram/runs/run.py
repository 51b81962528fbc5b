"""A run: configs by label, the folder that they are trained into, and their results. Reading needs no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError, reason
from engram.common.files import read_json
from engram.config.settings import SETTINGS, Config
from engram.runs.format import DAMAGE, RESULTS, RUN, check_format, read_description, read_results
from engram.runs.result import Result

SWEEP, REPRODUCTION = "sweep.json", "reproduction.json"  # each marks a folder of runs as one of these
STATES = ("finished", "unfinished", "diverged", "damaged")


@dataclass(frozen=True)
class Run:
    """A run as read from its folder, as far as it can be read.

    Args:
        path: the folder.
        configs: the settings by label.
        results: the results by label, for those that have started.
        about: what `run.json` says besides: command, started, finished, versions, runtime, data, …
        problems: a sentence for each label that is damaged.

    Example:
        >>> run = read_run("runs/demo")
        >>> run.results["dhp+si"].average_accuracy[:, -1].shape
        (2,)
    """

    path: Path
    configs: dict[str, Config]
    results: dict[str, Result] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all trials were trained to their end."""
        return bool(self.about.get("finished"))

    @property
    def benchmark(self) -> str:
        """The benchmark, which all labels share."""
        return next(iter(self.configs.values())).benchmark

    @property
    def num_models(self) -> int:
        """How many trials of all labels have started."""
        return sum(len(result.trials) for result in self.results.values())

    def state(self, label: str) -> str:
        """One of STATES."""
        if label in self.problems:
            return "damaged"
        result = self.results.get(label)
        if result is None or not self.finished or len(result.trials) < self.configs[label].trials:
            return "unfinished"
        return "diverged" if result.diverged else "finished"


def read_run(path: str | Path, *, dynamics: bool = True) -> Run:
    """Read a run, or a sweep as one run, in any state.

    A damaged entry costs only its own label, see `Run.problems`; without a readable `run.json` there is no run.

    Args:
        path: the folder.
        dynamics: whether to read `dynamics.csv` too, which is by far the largest file.

    Example:
        >>> read_run("runs/demo").configs["dhp+si"].trials
        2
    """
    path = Path(path)
    return _read_sweep(path, dynamics) if (path / SWEEP).exists() else _read_one(path, dynamics)


def has_started(path: Path) -> bool:
    """Whether a folder holds a run that can be read or resumed; a folder that was only claimed for one does not."""
    try:
        return os.stat(path / RUN).st_size > 0
    except (OSError, ValueError):  # ValueError: the path holds a null character
        return False


def check_started(path: Path) -> None:
    """Refuse a folder that does not hold a run, and say what it is."""
    if has_started(path):
        return
    if not path.is_dir():
        raise InputError(f"there is no folder {path}")
    if not (path / RUN).exists():
        raise InputError(f"{path} does not hold a run: it has no {RUN}")
    raise InputError(f"the run in {path} was stopped before it started: start it again")


def has_finished(path: Path) -> bool:
    """Whether a folder holds a run or a sweep that says that it is finished."""
    file = next((path / name for name in (SWEEP, RUN) if (path / name).exists()), None)
    if file is None or os.stat(file).st_size == 0:
        return False
    content = read_json(file)
    return isinstance(content, dict) and bool(content.get("finished"))


def _read_one(path: Path, dynamics: bool) -> Run:
    check_started(path)
    configs, about = read_description(path)
    results, problems = read_results(path, configs, about["data"], dynamics)
    if about.get("finished"):
        lacking = [label for label in configs if label not in results and label not in problems]
        problems |= dict.fromkeys(lacking, f"it has no entry in {path / RESULTS}, though the run is finished")
    return Run(path, configs, results, about, problems)


def _read_sweep(path: Path, dynamics: bool) -> Run:
    """The runs of a sweep as one: a label has the trials of all runs in which it was tried."""
    content = read_json(path / SWEEP)
    methods = _check_sweep(content, path / SWEEP)
    runs = [_read_one(folder, dynamics) for folder in sorted_runs(path)]
    if not runs:
        raise InputError(f"the sweep in {path} has no results yet")
    about = {**runs[0].about, "finished": None, **content}
    about["seconds"] = sum(float(run.about.get("seconds", 0)) for run in runs)
    configs: dict[str, Config] = {}
    results: dict[str, Result] = {}
    problems: dict[str, str] = {}
    for run in runs:
        problems = {**run.problems, **problems}
        for label, config in run.configs.items():
            if config.method not in methods:
                raise InputError(f"{path / SWEEP} is damaged: it does not name {config.method}, which was tried")
            configs[label] = _joined_config(configs[label], config) if label in configs else config
    for label in configs:
        found = [run.results[label] for run in runs if label in run.results]
        if found:
            results[label] = join_results(configs[label], found)
    return Run(path, configs, results, about, problems)


def _check_sweep(content: Any, path: Path) -> list[str]:
    """Refuse a file that does not say what a sweep tried; returns the methods."""
    check_format(content, path)
    try:
        names = [axis.partition("=")[0] for axis in content["axes"]]
        bases = [(base["method"], int(base["trials"])) for base in content["bases"]]
        if not names or not bases or not set(names) <= SETTINGS.keys():
            raise ValueError("it does not say which settings of which methods were tried")
    except DAMAGE as error:
        raise InputError(f"{path} is not a sweep of Engram, or is damaged ({reason(error)})") from error
    return [method for method, _ in bases]


def sorted_runs(sweep: Path) -> list[Path]:
    """The runs of a sweep in the order in which they were made: NUMBER-TRIALS, both numbers."""
    found = [path.parent for path in (sweep / "runs").glob(f"*/{RUN}") if has_started(path.parent)]
    names = {folder: folder.name.split("-") for folder in found}
    whole = [folder for folder, parts in names.items() if len(parts) == 2 and all(part.isdecimal() for part in parts)]
    return sorted(whole, key=lambda folder: [int(part) for part in names[folder]])


def _joined_config(config: Config, other: Config) -> Config:
    first = min(config.first_trial, other.first_trial)
    return config.replace(first_trial=first, trials=config.trials + other.trials)


def join_results(config: Config, results: Sequence[Result]) -> Result:
    """One result of several of the same settings that have different trials, ordered by trial number."""
    trials = [trial for result in results for trial in result.trials]
    if len(set(trials)) < len(trials):
        raise InputError("the same trial is in two of the results that are to be joined")
    order = np.argsort(trials)
    return replace(
        results[0],
        config=config,
        trials=tuple(trials[k] for k in order),
        accuracy=np.concatenate([result.accuracy for result in results])[order],
        untrained=np.concatenate([result.untrained for result in results])[order],
        dynamics=sorted((row for result in results for row in result.dynamics), key=lambda row: row["trial"]),
        diverged=sorted((each for result in results for each in result.diverged), key=lambda each: each.trial),
    )


def open_runs(path: str | Path, *, dynamics: bool = True, unreadable: dict[str, str] | None = None) -> dict[str, Run]:
    """Whatever a command left in a folder: a run, a sweep as one run, or the runs of a folder, e.g. a reproduction.

    Args:
        path: the folder.
        dynamics: as in `read_run`.
        unreadable: of a folder of runs, those that cannot be read are added to it, by name, with the reason. Without
            it, or if none can be read, the first of them is an `InputError`.

    Returns:
        The runs by name: for a folder of runs their paths below it, such as "split-mnist/table".

    Example:
        >>> for name, run in open_runs("runs").items():
        ...     print(name, run.num_models)
        demo 2
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"there is no folder {path}")
    if (path / RUN).exists() or (path / SWEEP).exists():
        return {path.name or str(path.resolve().name): read_run(path, dynamics=dynamics)}
    found = [folder for folder in find_runs(path) if (folder / SWEEP).exists() or has_started(folder)]
    if not found:
        raise InputError(f"there is no run in {path} or below it")
    runs = {}
    for folder in found:
        name = folder.relative_to(path).as_posix()
        try:
            runs[name] = read_run(folder, dynamics=dynamics)
        except InputError as error:
            if unreadable is None:
                raise
            unreadable[name] = str(error)
    if not runs and unreadable:
        raise InputError(next(iter(unreadable.values())))
    return runs


def saved_arguments(path: Path) -> list[str] | None:
    """The arguments of the `engram` command that started the sweep or reproduction in a folder; None for neither."""
    file = next((path / name for name in (SWEEP, REPRODUCTION) if (path / name).exists()), None)
    if file is None:
        return None
    content = read_json(file)
    check_format(content, file)
    arguments = content.get("arguments")
    if not isinstance(arguments, list) or not arguments or not all(isinstance(word, str) for word in arguments):
        raise InputError(f"{file} does not say with which arguments it was started")
    return arguments


def find_runs(folder: str | Path, unreadable: list[Path] | None = None) -> list[Path]:
    """The folders of all runs and sweeps at or below a folder, sorted.

    Folders whose names start with a dot are skipped. Links are followed last, and only to what is neither below the
    folder nor above it, so that nothing is found twice and no circle is followed.

    Args:
        folder: where to look.
        unreadable: folders that could not be listed are added to it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    unreadable = [] if unreadable is None else unreadable
    return sorted(_find(str(folder), unreadable), key=lambda path: path.parts)


def _find(folder: str, unreadable: list[Path]) -> Iterator[Path]:
    top = os.path.realpath(folder)
    seen: set[str] = set()
    waiting, links = [(folder, top)], list[tuple[str, str]]()  # each with the path that it has without links
    while waiting or links:
        path, real = waiting.pop() if waiting else links.pop()
        if real in seen:
            continue
        seen.add(real)
        try:
            with os.scandir(path) as listed:
                entries = list(listed)
        except OSError:
            unreadable.append(Path(path))
            continue
        if any(entry.name in (RUN, SWEEP) for entry in entries):
            yield Path(path)
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if os.path.isdir(target) and not _contains(top, target) and not _contains(target, top):
                    links.append((entry.path, target))
            elif entry.is_dir():
                waiting.append((entry.path, os.path.join(real, entry.name)))


def _contains(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
