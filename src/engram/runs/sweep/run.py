"""Run a sweep: a folder of runs, one for each rung of each generation of points.

Nothing else is needed to resume. A sweep that is resumed asks for the same points again, in the same order, finds their
scores in the runs that are there, and so comes to where it was stopped. What a search found is also in `study.db`, a
copy for Optuna and its dashboard.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engram.common.errors import InputError
from engram.common.files import locked, remove_unfinished
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.engine.learner import Progress, Report, StopAsked, never_stop, no_report
from engram.engine.stacks import Source
from engram.engine.training import Runtime, Training
from engram.runs.folder import LOG, RunFolder, claim_group, now, versions
from engram.runs.run import SWEEP, has_finished
from engram.runs.start import complete_run
from engram.runs.sweep.axes import Axis, Choice, check_axes, check_effect
from engram.runs.sweep.points import (
    GENERATION,
    Grid,
    Point,
    Proposals,
    Tried,
    described,
    rungs,
    survivors,
)
from engram.runs.sweep.search import STUDY, Search, save_studies


@dataclass(frozen=True)
class Plan:
    """What is swept: for each method the same axes, over the same tasks and trials."""

    bases: Sequence[Config]  # one for each method, with everything that its points share
    axes: Sequence[Axis]
    num_points: int | None = None  # to search for; None for a grid
    prune: bool = True

    def __post_init__(self) -> None:
        check_axes(self.axes)
        ranges = [axis for axis in self.axes if not isinstance(axis, Choice)]
        if self.num_points is None and ranges:
            raise InputError(f"{ranges[0]} is a range, which --search takes and --grid does not")
        if self.num_points is not None and self.num_points < 1:
            raise InputError(f"a search has at least one point, not {self.num_points}")
        for base in self.bases:  # before anything is trained
            varied = self.varied(base)
            for axis in self.axes:
                check_effect(axis.name, varied)

    def varied(self, base: Config) -> list[Config]:
        """A base, and with one axis at a time at each of its values or ends: one may give another an effect."""
        pairs = [(axis.name, v) for axis in self.axes for v in (axis.values if isinstance(axis, Choice) else axis.ends)]
        return [base, *(_config(base, {name: value}) for name, value in pairs)]

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
        return len(self.bases) * sum(sizes) * self.trials

    def proposals(self, base: Config) -> Proposals:
        if self.num_points is None:
            return Grid([axis for axis in self.axes if isinstance(axis, Choice)])
        return Search(self.axes, self.num_points, base.seed)

    def to_dict(self) -> dict[str, Any]:
        """What makes two sweeps the same."""
        return {
            "bases": [base.to_dict() for base in self.bases],
            "axes": [str(axis) for axis in self.axes],
            "num_points": self.num_points,
            "prune": self.prune,
            "rungs": rungs(self.trials, self.prune),
        }


def run_sweep(
    plan: Plan,
    datasets: Sequence[Dataset],
    folder: str | Path,
    *,
    command: str = "",
    runtime: Runtime | None = None,
    report: Report = no_report,
    stop_asked: StopAsked = never_stop,
) -> list[Tried]:
    """Start a sweep, or resume the one in the folder.

    Args:
        plan: what to sweep.
        datasets: what is learned.
        folder: a new or empty folder, or one of the same sweep.
        command: saved, so that `engram run --resume FOLDER` can resume the sweep.
        runtime: where and how to compute.
        report: called with each `Progress`, whose `done` is that of the whole sweep.
        stop_asked: asked often; when it returns True everything is saved, and `Stopped` is raised.

    Returns:
        All points that were tried, method after method, in the order in which they were proposed.

    Example:
        >>> plan = Plan([preset("split-mnist", "si")], [parse_choice("strength=0.1,1,10")])
        >>> best_of(run_sweep(plan, datasets, "sweeps/mine")).point
    """
    folder, runtime = Path(folder), Runtime() if runtime is None else runtime
    environment = runtime.environment()
    Training({base.method: base.replace(trials=1) for base in plan.bases}, Source(tuple(datasets)), runtime)  # a check
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOG) as file:
        remove_unfinished(folder)
        fingerprints = [dataset.fingerprint() for dataset in datasets]
        identity = {**plan.to_dict(), "precision": runtime.precision, "fingerprints": fingerprints}
        about = {
            "command": command,
            "arguments": shlex.split(command)[1:],
            "environment": {**environment, **versions()},
        }
        warning = claim_group(folder / SWEEP, identity, about)
        run_folder = RunFolder(folder, file)
        run_folder.log(command)
        if warning:
            run_folder.log(warning)
            report(Progress(0, 0, note=warning))
        tried = _Sweep(plan, datasets, run_folder, command, runtime, report, stop_asked).run()
        run_folder.check()
        claim_group(folder / SWEEP, identity, {**about, "finished": now()})
        return tried


class _Sweep:
    """A sweep that is being run."""

    def __init__(
        self,
        plan: Plan,
        datasets: Sequence[Dataset],
        folder: RunFolder,
        command: str,
        runtime: Runtime,
        report: Report,
        stop_asked: StopAsked,
    ):
        self.plan = plan
        self.datasets = datasets
        self.folder = folder
        self.command = command
        self.runtime = runtime
        self.report = report
        self.stop_asked = stop_asked
        self.tried: dict[str, Tried] = {}  # by label
        self.trials_done = 0
        self.proposed: list[list[Tried]] = [[] for _ in plan.bases]  # those of each method, also what was tried before
        self.trained = False  # whether anything was, since the sweep was resumed

    def run(self) -> list[Tried]:
        proposals = [(base, self.plan.proposals(base)) for base in self.plan.bases]
        while proposed := [(base, proposer, proposer.next()) for base, proposer in proposals]:
            if not any(points for *_, points in proposed):
                break
            generation = [[self._find(base, point) for point in points] for base, _, points in proposed]
            self._try([tried for own in generation for tried in own])
            for (_, proposer, _), own, before in zip(proposed, generation, self.proposed, strict=True):
                proposer.add_scores([tried.scores for tried in own], [tried.finished for tried in own])
                before += own
            if self.trained:  # earlier generations may be in the file already, with others after them
                self._save_studies()
        self._save_studies()
        methods = [base.method for base in self.plan.bases]
        return sorted(self.tried.values(), key=lambda tried: methods.index(tried.config.method))

    def _find(self, base: Config, point: Point) -> Tried:
        """The point to try; one that was proposed before is not tried twice."""
        found = Tried(point, _config(base, point))
        return self.tried.setdefault(found.label, found)

    def _try(self, generation: Sequence[Tried]) -> None:
        """Run all points that are new, of all methods together, rung after rung."""
        alive, done = list({tried.label: tried for tried in generation if not tried.scores}.values()), 0
        first = 1 + sum(bool(tried.scores) for tried in self.tried.values())  # numbers the generations
        for rung in rungs(self.plan.trials, self.plan.prune) if alive else ():
            configs, path = _configs(alive, done, rung), self.folder.path / "runs" / f"{first}-{rung}"
            self.folder.check()
            self.trained = self.trained or not has_finished(path)
            run = complete_run(
                configs,
                self.datasets,
                path,
                command=self.command,
                runtime=self.runtime,
                dynamics=False,  # a sweep has thousands of points, and nobody looks at these
                report=self._report_of(len(alive) * (rung - done)),
                stop_asked=self.stop_asked,
            )
            sound = [tried for tried in alive if tried.why is None]
            for tried in alive:
                tried.add(run.results[tried.label])
            better = _better(alive)
            dropped = len(alive) - len(better)
            self.trials_done += len(alive) * (rung - done) + dropped * (self.plan.trials - rung)
            for tried in sound:
                if tried.why is not None:
                    self.folder.log(f"{tried.label}: trials failed, and count as an accuracy of 0: {tried.why}")
            alive, done = better, rung

    def _save_studies(self) -> None:
        """Bring Optuna's file up to date, if this is a search."""
        if self.plan.num_points is None:
            return
        self.folder.check()
        where = "held-out training samples" if self.plan.bases[0].examine == "validation" else "the test samples"
        about = {
            "command": self.command,
            "dataset": self.plan.bases[0].dataset,
            "value": f"mean accuracy over all tasks after the last, on {where}",
        }
        problem = save_studies(self.folder.path / STUDY, self.plan.axes, self.proposed, about)
        if problem is not None:
            self.folder.log(problem)
            self.report(Progress(self.trials_done / self.plan.most_trials, 0, note=problem))

    def _report_of(self, num_models: int) -> Report:
        """Report the progress of one run as that of the whole sweep."""

        def report(progress: Progress) -> None:
            if progress.note:
                self.folder.log(progress.note)
            done = (self.trials_done + progress.done * num_models) / self.plan.most_trials
            self.report(replace(progress, done=done))

        return report


def _config(base: Config, point: Point) -> Config:
    try:
        return base.replace(**point)
    except InputError as error:
        raise InputError(f"there cannot be a point with {described(point)}: {error}") from error


def _configs(alive: Sequence[Tried], done: int, rung: int) -> dict[str, Config]:
    return {
        tried.label: tried.config.replace(first_trial=tried.config.first_trial + done, trials=rung - done)
        for tried in alive
    }


def _better(points: Sequence[Tried]) -> list[Tried]:
    """Of each method the points that reach the next rung."""
    better: list[Tried] = []
    for method in dict.fromkeys(tried.config.method for tried in points):
        own = {k: tried.scores for k, tried in enumerate(points) if tried.config.method == method}
        better += [points[k] for k in survivors(own)]
    return better
