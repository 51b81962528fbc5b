"""The curves of a run: the points that are logged, and TensorBoard. `servers` has MLflow and W&B."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError, check_choice
from engram.config.settings import Config
from engram.engine.learner import Outcome, Progress
from engram.runs import metrics

LOGS = {
    "tensorboard": "tensorboard is not installed: pip install 'engram-cl[tensorboard]'",
    "mlflow": "mlflow is not installed: pip install 'engram-cl[mlflow]'",
    "wandb": "wandb is not installed: pip install 'engram-cl[wandb]'",
}
OFFLINE = ("offline", "dryrun", "disabled")  # the modes in which wandb needs no account
TAGS = {"loss": "training/loss", "eta": "trace/eta", "hebb_norm": "trace/hebb_norm", "alpha_norm": "trace/alpha_norm"}
Position = tuple[int, float, int]  # task, epoch, record of the epoch: the same in all trials


def check_log(name: str | None) -> None:
    """Refuse a log that does not exist, that would ask for a key, or that is not installed."""
    if name is None:
        return
    check_choice("log", name, LOGS)
    found = find_spec(name)
    if found is None or found.origin is None:  # a folder, such as the one that wandb makes, is no package
        raise InputError(LOGS[name])
    if name == "wandb":
        import wandb  # late: it is an extra

        online = wandb.setup().settings.mode not in OFFLINE
        if online and wandb.run is None and not wandb.login(prompt=False, verify=False):
            raise InputError("wandb has no API key: `wandb login` stores one, and WANDB_MODE=offline needs none")


@dataclass(frozen=True)
class Series:
    """What has curves of its own: one trial of a label, or the mean of the label's trials."""

    label: str
    index: int  # of the label
    trial: int | None  # None for the mean
    config: Config = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Within the label."""
        return "mean" if self.trial is None else f"trial-{self.trial}"

    @property
    def full_name(self) -> str:
        """Within the run."""
        return f"{self.label}/{self.name}"

    @property
    def mean(self) -> Series:
        """The mean of the trials that this is one of."""
        return Series(self.label, self.index, None, self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the config, and what tells the series apart."""
        settings = {name: value for name, value in self.config.to_dict().items() if value is not None}
        return {**settings, "label": self.label, "trial": self.name}


@dataclass(frozen=True)
class Point:
    """Numbers by their tags at one position of a run: of the training, or accuracies after a task."""

    number: int  # in its series, from 0
    position: Position
    step: int  # in the whole run, which trials of unequal length reach at different positions
    values: dict[str, float]

    @property
    def task(self) -> int | None:
        """How many tasks had been learned when the accuracies were measured; None for a point of the training."""
        return self.position[0] + 1 if self.position[1] == math.inf else None


@dataclass
class Update:
    """What is new in a series, and whether it has ended."""

    points: list[Point] = field(default_factory=list)
    ended: str | None = None  # "finished" or "diverged"


class ProgressPoints:
    """Turns `Progress` into points; each point is returned once.

    The points come from the records that a run makes anyway, so nothing is computed for them on the device. A mean is
    over the trials that have reached a position, and is made when all trials that did not diverge have reached it.
    """

    def __init__(self) -> None:
        self.labels: dict[str, _Label] = {}

    @property
    def ended(self) -> bool:
        """Whether all series have ended."""
        return bool(self.labels) and all(label.ended for label in self.labels.values())

    def updates(self, progress: Progress) -> dict[Series, Update]:
        """What is new, for each series that has something new."""
        outcomes: dict[str, dict[int, Outcome]] = {label: {} for label in progress.configs}
        for (label, trial), outcome in progress.outcomes.items():
            outcomes[label][trial] = outcome
        found: dict[Series, Update] = {}
        for index, (label, config) in enumerate(progress.configs.items()):
            known = self.labels.setdefault(label, _Label(config))
            for number, update in known.grow(outcomes[label]).items():
                if update.points or update.ended:
                    found[Series(label, index, number, config)] = update
        return found


class _Label:
    """What has been returned of a label's trials, and what waits to become a mean."""

    def __init__(self, config: Config):
        self.config = config
        self.trials: dict[int, _Trial] = {}
        self.waiting: dict[Position, list[Point]] = defaultdict(list)  # for the other trials
        self.num_means = 0
        self.ended = False

    def grow(self, outcomes: dict[int, Outcome]) -> dict[int | None, Update]:
        """The updates of the trials, and that of the mean."""
        new: dict[int | None, Update] = {}
        for trial, outcome in outcomes.items():
            if trial not in self.trials:
                self.trials[trial] = _Trial(self.config.num_tasks)
            known = self.trials[trial]
            new[trial] = update = Update(list(known.grow(outcome)), known.end(outcome))
            for point in update.points:
                self.waiting[point.position].append(point)
        if len(outcomes) == self.config.trials:
            learning = [self.trials[trial].position for trial, outcome in outcomes.items() if outcome.diverged is None]
            ready = sorted(point for point in self.waiting if all(point <= reached for reached in learning))
            new[None] = Update([self._mean(self.waiting.pop(position)) for position in ready])
            if not self.ended and all(trial.ended for trial in self.trials.values()):
                self.ended, new[None].ended = True, "finished" if learning else "diverged"
        return new

    def _mean(self, points: list[Point]) -> Point:
        """Of several trials at one position; at the mean of their steps, where those differ."""
        tags = dict.fromkeys(tag for point in points for tag in point.values)
        values = {tag: float(np.mean([p.values[tag] for p in points if tag in p.values])) for tag in tags}
        self.num_means += 1
        step = round(np.mean([point.step for point in points]))
        return Point(self.num_means - 1, points[0].position, step, values)


class _Trial:
    """How much has been returned of one trial."""

    def __init__(self, num_tasks: int) -> None:
        self.matrix = np.full((num_tasks, num_tasks), np.nan)
        self.position: Position = (0, -1, 0)  # the position of the last point
        self.step = 0
        self.steps_before = 0  # the task that is being learned
        self.num_records = self.num_rows = self.num_points = 0
        self.ended = False

    def grow(self, outcome: Outcome) -> Iterator[Point]:
        """A point for each record that is new, and one for each task that has been learned since."""
        for record in outcome.records[self.num_records :]:
            if record.task > self.num_rows:
                yield self._end_task(outcome)
            number = self.position[2] + 1 if self.position[:2] == (record.task, record.epoch) else 0
            self.position, self.step = (record.task, record.epoch, number), self.steps_before + record.step + 1
            yield self._point({tag: getattr(record, name) for name, tag in TAGS.items()})
        self.num_records = len(outcome.records)
        if self.num_rows < len(outcome.rows):
            yield self._end_task(outcome)

    def end(self, outcome: Outcome) -> str | None:
        """How the trial has ended, once; None before and after."""
        if self.ended or (outcome.diverged is None and self.num_rows < len(self.matrix)):
            return None
        self.ended = True
        return "finished" if outcome.diverged is None else "diverged"

    def _end_task(self, outcome: Outcome) -> Point:
        """The accuracies after a task, on each task so far, and what follows from them, at its last step."""
        task = self.num_rows
        row = outcome.rows[task]
        self.matrix[task, : len(row)] = row
        self.position, self.steps_before, self.num_rows = (task, math.inf, 0), self.step, task + 1
        so_far = self.matrix[: task + 1, : task + 1]  # without the next task
        untrained = outcome.untrained[: task + 1] or [math.nan] * (task + 1)
        return self._point(
            {
                "accuracy/average": float(so_far[-1].mean()),
                "transfer/bwt": float(metrics.backward_transfer(so_far)),
                "transfer/fwt": float(metrics.forward_transfer(so_far, untrained)),
                "transfer/forgetting": float(metrics.forgetting(so_far)),
                **{f"accuracy/task_{n + 1}": float(accuracy) for n, accuracy in enumerate(so_far[-1])},
            }
        )

    def _point(self, values: dict[str, float]) -> Point:
        """At the present position, without what is NaN."""
        self.num_points += 1
        sound = {tag: value for tag, value in values.items() if not math.isnan(value)}
        return Point(self.num_points - 1, self.position, self.step, sound)


class NoLog:
    """For a run that is logged nowhere else than in its folder."""

    def __call__(self, progress: Progress) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Writes `FOLDER/LABEL/trial-0`, …, and `FOLDER/LABEL/mean`, for `tensorboard --logdir FOLDER`. It is a `report`.

    Args:
        folder: a new or empty folder.

    Example:
        >>> result = engram.run(config, report=TensorBoard("runs/mine"))
    """

    def __init__(self, folder: str | Path):
        check_log("tensorboard")
        self.folder = Path(folder)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{self.folder} is not an empty folder, and logs are never overwritten: name another")
        self.name = f"events.out.tfevents.{time.time_ns()}.engram"  # TensorBoard reads files in the order of names
        self.points = ProgressPoints()

    def __call__(self, progress: Progress) -> None:
        """Write what is new."""
        for series, update in self.points.updates(progress).items():
            if update.points:
                self._write(self.folder / _folder_name(series.label, series.index) / series.name, update.points)

    def close(self) -> None:
        """Nothing is left to do, since no file is kept open."""

    def _write(self, folder: Path, points: Sequence[Point]) -> None:
        """Add points to the event file in a folder. It is complete after each call, and not kept open."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # late: it is an extra
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        events = []
        if not folder.exists():
            folder.mkdir(parents=True)
            events.append(Event(wall_time=now, file_version="brain.Event:2"))
            # A TensorBoard that is watching forgets what the run wrote before it was stopped.
            events.append(Event(wall_time=now, session_log=SessionLog(status=SessionLog.START)))
        for point in points:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            events.append(Event(wall_time=now, step=point.step, summary=Summary(value=values)))
        with (folder / self.name).open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())


def _folder_name(label: str, index: int) -> str:
    """The label, if it can be the name of a folder everywhere; else one that is like it."""
    name = re.sub(r"[^\w+=.,() -]", "_", label)
    return label if name == label and not label.startswith(".") else f"{index}-{name}"
