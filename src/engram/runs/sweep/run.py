"""Running a sweep: rung after rung into one folder, from which it goes on when it was stopped.

Nothing but the sheets of its rungs is kept on the way. A sweep that goes on asks for the same points again, in the same
order, finds what came of them in the sheets, and so comes to where it stood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError
from engram.common.files import read_json, remove_unfinished, write_atomically
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.runs.experiment import Progress, Report, Setting
from engram.runs.folder import RunFolder, opened
from engram.runs.parts import Load, Part, run_part
from engram.runs.result import Result, changes_since, versions
from engram.runs.sheets import SWEEP
from engram.runs.sweep import halving
from engram.runs.sweep.proposals import GENERATION, Grid, Proposals, Search
from engram.runs.sweep.space import Axis, Choice, Point, check_axes, check_effect, described

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """What is swept: for each method the same axes, over the same tasks and trials."""

    bases: Sequence[Config]  # one a method, with all that the points have in common
    axes: Sequence[Axis]
    num_points: int | None = None  # to be sought; None for a grid
    prune: bool = True

    def __post_init__(self) -> None:
        check_axes(self.axes)
        ranges = [axis for axis in self.axes if not isinstance(axis, Choice)]
        if self.num_points is None and ranges:
            raise InputError(f"{ranges[0]} is a range, in which points are sought: --search, not --grid")
        if self.num_points is not None and self.num_points < 1:
            raise InputError(f"at least one point is sought, not {self.num_points}")
        for base in self.bases:  # before anything is made
            for axis in self.axes:
                check_effect(axis.name, base)
                for value in axis.values if isinstance(axis, Choice) else axis.ends:
                    _config(base, {axis.name: value})

    @property
    def trials(self) -> int:
        return self.bases[0].trials

    @property
    def most_trials(self) -> int:
        """Of all methods and points together, if no point is proposed twice."""
        if self.num_points is None:
            sizes = [math.prod(len(axis.values) for axis in self.axes if isinstance(axis, Choice))]
        else:
            sizes = [min(GENERATION, self.num_points - k) for k in range(0, self.num_points, GENERATION)]
        return len(self.bases) * sum(halving.num_trials(size, self.trials, self.prune) for size in sizes)

    def proposals(self, base: Config) -> Proposals:
        if self.num_points is None:
            return Grid([axis for axis in self.axes if isinstance(axis, Choice)])
        return Search(self.axes, self.num_points, base.seed)

    def to_dict(self) -> dict[str, Any]:
        """By which two sweeps are told apart."""
        return {
            "bases": [base.to_dict() for base in self.bases],
            "axes": [str(axis) for axis in self.axes],
            "num_points": self.num_points,
            "prune": self.prune,
        }


@dataclass
class Tried:
    """A point that was tried."""

    point: Point
    config: Config  # of all its trials
    scores: list[float] = field(default_factory=list)  # final average accuracy of each trial; 0 where it diverged
    num_diverged: int = 0

    @property
    def label(self) -> str:
        return f"{self.config.method}: {described(self.point)}"

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores))

    @property
    def finished(self) -> bool:
        """Whether it was not given up."""
        return len(self.scores) == self.config.trials

    def take(self, result: Result) -> None:
        """What came of some more of its trials."""
        finals = result.average_accuracy[:, -1]
        self.scores += [0.0 if np.isnan(value) else float(value) for value in finals]
        self.num_diverged += int(np.isnan(finals).sum())


def run_sweep(
    plan: Plan,
    folder: Path,
    load: Load,
    *,
    command: str,
    setting: Setting | None = None,
    report: Report = lambda progress: None,
) -> list[Tried]:
    """All points that were tried, method after method, in the order in which they were proposed."""
    setting = Setting() if setting is None else setting
    folder.mkdir(parents=True, exist_ok=True)
    with opened(folder) as held:
        remove_unfinished(folder)
        note = _claim(folder, plan, load(plan.bases[0]), setting, command)
        held.log(command)
        if note:
            held.log(note)
            report(Progress(0, 0, note=note))
        return _Sweep(plan, held, load, command, setting, report).run()


class _Sweep:
    """A sweep on its way."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        load: Load,
        command: str,
        setting: Setting,
        report: Report,
    ):
        self.plan = plan
        self.folder = folder
        self.load = load
        self.command = command
        self.setting = setting
        self.report = report
        self.tried: dict[str, Tried] = {}  # by label
        self.spent = 0  # trials

    def run(self) -> list[Tried]:
        proposals = [(base, self.plan.proposals(base)) for base in self.plan.bases]
        while proposed := [(base, proposer, proposer.next()) for base, proposer in proposals]:
            if not any(points for *_, points in proposed):
                break
            generation = [[self._find(base, point) for point in points] for base, _, points in proposed]
            self._try([tried for own in generation for tried in own])
            for (_, proposer, _), own in zip(proposed, generation, strict=True):
                proposer.tell([tried.scores for tried in own], [tried.finished for tried in own])
        methods = [base.method for base in self.plan.bases]
        return sorted(self.tried.values(), key=lambda tried: methods.index(tried.config.method))

    def _find(self, base: Config, point: Point) -> Tried:
        """A point to be tried; one that was proposed before is not tried twice."""
        found = Tried(point, _config(base, point))
        return self.tried.setdefault(found.label, found)

    def _try(self, generation: Sequence[Tried]) -> None:
        """All that are new, of all methods together, up the rungs."""
        alive, done = list({tried.label: tried for tried in generation if not tried.scores}.values()), 0
        first = 1 + sum(bool(tried.scores) for tried in self.tried.values())  # its number, to tell generations apart
        for rung in halving.rungs(self.plan.trials, self.plan.prune) if alive else ():
            part = Part(SWEEP, self.plan.bases[0].benchmark, _entries(alive, done, rung))
            self.folder.check()
            path = self.folder.path / "rungs" / f"{first}-{rung}.json"
            sheet = run_part(
                part, path, self.load, command=self.command, setting=self.setting, report=self._teller(part.num_models)
            )
            for tried in alive:
                tried.take(sheet.entries[tried.label])
            self.spent += part.num_models
            alive, done = _better(alive), rung

    def _teller(self, num_models: int) -> Report:
        def tell(progress: Progress) -> None:
            if progress.note:
                self.folder.log(progress.note)
            share = (self.spent + progress.share * num_models) / self.plan.most_trials
            self.report(Progress(share, progress.task, None, progress.note))

        return tell


def _claim(folder: Path, plan: Plan, datasets: Sequence[Dataset], setting: Setting, command: str) -> str | None:
    """Write down what is swept here; a folder of another sweep, or of anything else, is refused.

    Returns a warning where the sweep goes on in other surroundings than it began in.
    """
    path = folder / "sweep.json"
    fingerprints = [dataset.fingerprint() for dataset in datasets]
    swept = {**plan.to_dict(), "precision": setting.precision, "fingerprints": fingerprints}
    content = {"format": FORMAT, "command": command, **json.loads(json.dumps(swept))}
    made_with = {**versions(), **setting.engine.environment(setting.device)}
    if path.exists():
        kept = read_json(path)
        kept = kept if isinstance(kept, dict) else {}
        then = kept.pop("made_with", {})
        if {**kept, "command": command} == content:
            return changes_since(then if isinstance(then, dict) else {}, made_with)
        if {**kept, "command": command, "fingerprints": fingerprints} == content:
            raise InputError(
                f"the data are not those that the sweep in {folder} began with: name another folder with --out"
            )
        raise InputError(f"there is another sweep in {folder}: name another folder with --out")
    taken = next((entry for entry in folder.iterdir() if entry.name != "log.txt"), None)
    if taken is not None:
        raise InputError(f"{folder} is not empty (it holds {taken.name}): name another folder with --out")
    write_atomically(path, json.dumps({**content, "made_with": made_with}, indent=2) + "\n")
    return None


def _config(base: Config, point: Point) -> Config:
    try:
        return base.replace(**point)
    except InputError as reason:
        raise InputError(f"there cannot be a point with {described(point)}: {reason}") from reason


def _entries(alive: Sequence[Tried], done: int, rung: int) -> dict[str, Config]:
    return {
        tried.label: tried.config.replace(first_trial=tried.config.first_trial + done, trials=rung - done)
        for tried in alive
    }


def _better(points: Sequence[Tried]) -> list[Tried]:
    """Of each method the points that go on."""
    better: list[Tried] = []
    for method in dict.fromkeys(tried.config.method for tried in points):
        own = {k: tried.mean for k, tried in enumerate(points) if tried.config.method == method}
        better += [points[k] for k in halving.survivors(own)]
    return better


def best_of(tried: Sequence[Tried]) -> Tried:
    """The best of the points that had all trials; of equal ones the earlier."""
    return max((each for each in tried if each.finished), key=lambda each: each.mean)
