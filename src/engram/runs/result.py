"""The result of one config over its trials: accuracy matrices, and what follows from them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engram import __version__
from engram.common.errors import InputError
from engram.config.settings import Config
from engram.runs import metrics
from engram.runs.metrics import Array

if TYPE_CHECKING:
    from engram.engine.learner import Outcome

MEAN = -1  # the trial of dynamics that are means over trials
DYNAMICS = ("trial", "task", "epoch", "step", "loss", "eta", "hebb_norm", "alpha_norm")


@dataclass(frozen=True)
class Divergence:
    """Where a trial's loss became NaN or infinite.

    Args:
        trial: its number. This and the others are counted from 0.
        task: in which task.
        step: in which step of the task.

    Example:
        >>> print(Divergence(trial=0, task=1, step=99))
        trial 1 diverged in task 2, step 100: its loss became NaN or infinite
    """

    trial: int
    task: int
    step: int

    def __str__(self) -> str:
        where = f"in task {self.task + 1}, step {self.step + 1}"
        return f"trial {self.trial + 1} diverged {where}: its loss became NaN or infinite"


@dataclass(frozen=True)
class Result:
    """One config's accuracies, trial by trial. What was not measured, after a divergence for example, is NaN.

    Args:
        config: the settings.
        trials: the trial number of each row. Trials that have not started have no row, so two results are compared
            by these numbers and never by position.
        accuracy: (trials, tasks, tasks); [k, i, j] is the accuracy on task j after learning task i, in trial trials[k].
        untrained: (trials, tasks), the accuracy on each task before learning anything.
        dynamics: rows with the names of DYNAMICS; their trial is MEAN where only means over trials were saved.
        diverged: where trials diverged.
        data: the name, origin and number of samples of each dataset.
        kept: what a method with a rehearsal keeps between tasks, in samples and bytes.

    Example:
        >>> result = engram.run(engram.preset("split-mnist", "dhp+si", dataset="mnist-small", trials=3))
        >>> result.average_accuracy[:, -1].shape
        (3,)
    """

    config: Config
    trials: tuple[int, ...]
    accuracy: Array
    untrained: Array
    dynamics: list[dict[str, float]] = field(default_factory=list)
    diverged: list[Divergence] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    kept: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.trials) != len(self.accuracy):
            raise InputError(f"{len(self.accuracy)} trials need as many trial numbers, not {len(self.trials)}")

    @property
    def average_accuracy(self) -> Array:
        """(trials, tasks): after each task, the mean over the tasks so far."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def bwt(self) -> Array:
        """(trials,): the paper's backward transfer; below zero is forgetting."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def forgetting(self) -> Array:
        """(trials,): mean over earlier tasks of the best accuracy minus the final one."""
        return metrics.forgetting(self.accuracy)

    @property
    def forward_transfer(self) -> Array:
        """(trials,): mean over later tasks of the accuracy just before learning them minus that without training."""
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

    @property
    def trials_finished(self) -> int:
        """How many trials have learned all tasks; those that diverged have not."""
        return int(np.isfinite(self.average_accuracy[:, -1]).sum())

    def save(self, path: str | Path) -> None:
        """Write the result into a new or empty folder, as a run with one label, its method.

        Args:
            path: the folder. What a folder already holds is never overwritten.

        Example:
            >>> result.save("results/mine")
        """
        from engram.runs.folder import save_result  # late: it is made of results

        save_result(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """Read what `save` wrote, or the result of any run with one label.

        Args:
            path: the folder.

        Example:
            >>> result.save("results/mine")
            >>> Result.load("results/mine").bwt.shape
            (2,)
        """
        from engram.runs.run import read_run

        run = read_run(path)
        for label, problem in run.problems.items():
            raise InputError(f"cannot read the result of {label}: {problem}")
        if len(run.configs) != 1:
            labels = ", ".join(run.configs)
            raise InputError(f"{path} holds several results ({labels}): engram.runs.run.read_run reads them all")
        if not run.results:
            raise InputError(f"the run in {path} has no results yet")
        (result,) = run.results.values()
        return result


def results_of(
    configs: Mapping[str, Config], outcomes: Mapping[tuple[str, int], Outcome], data: list[dict[str, Any]]
) -> dict[str, Result]:
    """The result of each label, from the trials that have started, in the order of their numbers."""
    by_label: dict[str, dict[int, Outcome]] = {label: {} for label in configs}
    for label, trial in sorted(outcomes, key=lambda key: key[1]):
        if outcomes[label, trial].untrained:  # else it has not been evaluated even once
            by_label[label][trial] = outcomes[label, trial]
    return {label: _result_of(config, by_label[label], data) for label, config in configs.items()}


def _result_of(config: Config, outcomes: Mapping[int, Outcome], data: list[dict[str, Any]]) -> Result:
    num_tasks = config.num_tasks
    accuracy = np.full((len(outcomes), num_tasks, num_tasks), np.nan)
    for k, outcome in enumerate(outcomes.values()):
        for i, row in enumerate(outcome.rows):
            accuracy[k, i, : len(row)] = row
    return Result(
        config=config,
        trials=tuple(outcomes),
        accuracy=accuracy,
        untrained=np.array([outcome.untrained for outcome in outcomes.values()]).reshape(-1, num_tasks),
        dynamics=[dict(vars(record)) for outcome in outcomes.values() for record in outcome.records],
        diverged=[
            Divergence(trial, outcome.diverged.task, outcome.diverged.step)
            for trial, outcome in outcomes.items()
            if outcome.diverged is not None
        ],
        data=data,
        kept=next((outcome.kept for outcome in outcomes.values()), None),
    )


def versions() -> dict[str, str]:
    """Of everything that the numbers may depend on."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "engram": __version__,
        # As a package itself says, which may name its build too; asking does not import it.
        **{
            name: str(sys.modules[name].__version__) if name in sys.modules else metadata.version(name)
            for name in ("torch", "numpy", "scipy")
        },
    }
