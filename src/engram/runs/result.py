"""The result of one config over its trials: accuracy matrices, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engram.common.errors import Divergence, InputError
from engram.config.settings import Config, check_name
from engram.runs import metrics
from engram.runs.metrics import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MEAN = -1  # the trial of dynamics that are means over trials
DYNAMICS = ("trial", "task", "epoch", "step", "loss", "eta", "hebb_norm", "alpha_norm")


@dataclass(frozen=True)
class Result:
    """One config's accuracies, trial by trial. What was not measured, after a divergence for example, is NaN.

    A notebook shows a result as its `summary`.

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

    def __repr__(self) -> str:
        config = self.config
        accuracy, sem, finished = metrics.mean_and_sem(self.average_accuracy[:, -1])
        facts = [f"{config.method} on {config.benchmark} ({config.dataset})", f"{config.num_tasks} tasks"]
        facts.append(f"{finished} of {config.trials} trials")
        if finished:
            error = f" ± {100 * sem:.2f}" if finished > 1 else ""
            facts += [f"accuracy {100 * accuracy:.2f}{error} %", f"BWT {metrics.mean_and_sem(self.bwt)[0]:.3f}"]
        return f"<Result: {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        return str(self.summary()._repr_html_())

    def summary(self, *others: Result) -> Any:
        """The table that `engram table` prints: accuracy, BWT, first and last task, with notes.

        Args:
            others: further results of the same benchmark, a row for each.

        Returns:
            A `Table`. `print` writes it as text, a notebook shows it, and `to_markdown` and `to_csv` return text.

        Example:
            >>> print(result.summary().columns)
            ('method', 'ACC %', '± SEM', 'BWT', 'first %', 'last %')
        """
        return import_module("engram.report.tables").summary(label_results((self, *others)))

    def compare(self, baseline: Result) -> Any:
        """What this result has more than another, in pairs of trials, with 95% intervals.

        Trial k of both must have had the same tasks: the same benchmark, dataset, seed and number of tasks. Two
        results of a custom stream must come from one `engram.run_many`, since nothing else tells that it is the same.

        Args:
            baseline: the result that is subtracted.

        Returns:
            A `Table`, as `summary` returns.

        Raises:
            InputError: if trials cannot be paired.

        Example:
            >>> label, points, interval, *others = result.compare(result).rows[0]
            >>> points, interval
            ('+0.00', '[+0.00, +0.00]')
        """
        return import_module("engram.report.compare").compare_two(self, baseline)

    def plot(self, *others: Result, figure: str = "accuracy") -> Figure:
        """A figure of this result, or of several. A notebook shows it; `savefig` writes it to a file.

        Args:
            others: further results of the same benchmark.
            figure: one of those that `engram figures` draws: "accuracy" (the average over the tasks so far),
                "first-and-latest", "matrices" or "dynamics" (of the trace).

        Example:
            >>> result.plot(figure="matrices").savefig("matrices.png")
        """
        return import_module("engram.report.figures").draw_one(label_results((self, *others)), figure).figure

    def to_frame(self, *, matrix: bool = False, settings: Sequence[str] = ("method",)) -> DataFrame:
        """The numbers as a pandas DataFrame, with the columns of `engram runs export`. It needs pandas.

        Args:
            matrix: a row for each accuracy that was measured, on `task` after this many tasks (`after`; 0 is before
                the first), in place of a row for each trial.
            settings: settings to put in front as columns, so that several frames can be joined.

        Example:
            >>> frame = result.to_frame()
            >>> list(frame.columns[:4])
            ['method', 'trial', 'diverged', 'average_accuracy']
        """
        for name in settings:
            check_name(name)
        try:
            from pandas import DataFrame  # late: it is an extra
        except ImportError as error:
            raise InputError("pandas is not installed: pip install 'engram-cl[pandas]'") from error
        columns = self.columns(matrix)
        return DataFrame({name: [getattr(self.config, name)] * len(columns["trial"]) for name in settings} | columns)

    def columns(self, matrix: bool = False) -> dict[str, np.ndarray]:
        """The numbers by column, as in `to_frame`, for which pandas is not needed.

        Args:
            matrix: as in `to_frame`.

        Example:
            >>> result.columns()["trial"].tolist()
            [0, 1]
        """
        trials = np.array(self.trials, dtype=int)
        if matrix:
            table = np.concatenate([self.untrained[:, None], self.accuracy], axis=1)  # (trials, 1 + tasks, tasks)
            k, after, task = np.nonzero(np.isfinite(table))
            return {"trial": trials[k], "after": after, "task": task + 1, "accuracy": table[k, after, task]}
        return {
            "trial": trials,
            "diverged": np.isin(trials, [divergence.trial for divergence in self.diverged]),
            "average_accuracy": self.average_accuracy[:, -1],
            "bwt": self.bwt,
            "forgetting": self.forgetting,
            "forward_transfer": self.forward_transfer,
            "first_task": self.first_task[:, -1],
            "last_task": self.latest_task[:, -1],
        }

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


def label_configs(configs: Sequence[Config]) -> dict[str, Config]:
    """A label for each config: its method; where several have the same, with the position in front."""
    times = Counter(config.method for config in configs)
    return {
        config.method if times[config.method] == 1 else f"{position}-{config.method}": config
        for position, config in enumerate(configs)
    }


def label_results(results: Sequence[Result]) -> dict[str, Result]:
    """Results by label, as `label_configs` names their configs."""
    return dict(zip(label_configs([result.config for result in results]), results, strict=True))
