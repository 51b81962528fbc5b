"""The curves of a run, as event files for TensorBoard."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from engram.common.errors import InputError, check_choice
from engram.engine.learner import Outcome, Progress

LOGS = ("tensorboard",)
TAGS = {"loss": "training/loss", "eta": "trace/eta", "hebb_norm": "trace/hebb_norm", "alpha_norm": "trace/alpha_norm"}


def check_log(name: str | None) -> None:
    """Refuse a log that does not exist, or that is not installed."""
    if name is None:
        return
    check_choice("log", name, LOGS)
    if find_spec("tensorboard") is None:
        raise InputError("tensorboard is not installed: pip install 'engram-cl[tensorboard]'")


@dataclass(frozen=True)
class Point:
    """Scalars, by their tags, at one position of a run."""

    position: tuple[int, float, int]  # task, epoch, record of the epoch: the same in all trials
    step: int  # in the whole run, which trials of unequal length reach at different positions
    values: dict[str, float]


class TensorBoard:
    """Writes `FOLDER/LABEL/trial-0`, …, and `FOLDER/LABEL/mean`, for `tensorboard --logdir FOLDER`.

    It is a `report`. What it writes comes from the records that a run makes anyway, so nothing more is computed. A mean
    is over the trials that have reached a point; it is written when all trials that did not diverge have reached it.

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
        self.labels: dict[str, _Label] = {}

    def __call__(self, progress: Progress) -> None:
        """Write what is new."""
        outcomes: dict[str, dict[int, Outcome]] = {label: {} for label in progress.configs}
        for (label, trial), outcome in progress.outcomes.items():
            outcomes[label][trial] = outcome
        for index, (label, config) in enumerate(progress.configs.items()):
            known = self.labels.setdefault(label, _Label(config.trials))
            for name, points in known.grow(outcomes[label]).items():
                self._write(self.folder / _folder_name(label, index) / name, points)

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


class _Label:
    """What has been written of a label's trials, and what waits to become a mean."""

    def __init__(self, num_trials: int):
        self.num_trials = num_trials
        self.trials: dict[int, _Trial] = {}
        self.waiting: dict[tuple[int, float, int], list[Point]] = defaultdict(list)  # for the other trials

    def grow(self, outcomes: dict[int, Outcome]) -> dict[str, list[Point]]:
        """The new points of each trial, and those of the mean."""
        new: dict[str, list[Point]] = {}
        for trial, outcome in outcomes.items():
            points = list(self.trials.setdefault(trial, _Trial()).grow(outcome))
            if points:
                new[f"trial-{trial}"] = points
            for point in points:
                self.waiting[point.position].append(point)
        learning = [self.trials[trial].position for trial, outcome in outcomes.items() if outcome.diverged is None]
        if len(outcomes) == self.num_trials:
            ready = sorted(point for point in self.waiting if all(point <= reached for reached in learning))
            if ready:
                new["mean"] = [_mean(self.waiting.pop(position)) for position in ready]
        return new


class _Trial:
    """How much has been written of one trial."""

    def __init__(self) -> None:
        self.position: tuple[int, float, int] = (0, -1, 0)  # the position of the last point
        self.step = 0
        self.steps_before = 0  # the task that is being learned
        self.num_records = self.num_rows = 0

    def grow(self, outcome: Outcome) -> Iterator[Point]:
        """A point for each record that is new, and one for each task that has been learned since."""
        for record in outcome.records[self.num_records :]:
            if record.task > self.num_rows:
                yield self._end_task(outcome)
            number = self.position[2] + 1 if self.position[:2] == (record.task, record.epoch) else 0
            self.position, self.step = (record.task, record.epoch, number), self.steps_before + record.step + 1
            values = {tag: getattr(record, name) for name, tag in TAGS.items()}
            yield Point(self.position, self.step, {tag: v for tag, v in values.items() if not math.isnan(v)})
        self.num_records = len(outcome.records)
        if self.num_rows < len(outcome.rows):
            yield self._end_task(outcome)

    def _end_task(self, outcome: Outcome) -> Point:
        """The accuracies after a task, on each task so far, at its last step."""
        task = self.num_rows
        row = outcome.rows[task][: task + 1]  # without the next task, which is there for forward transfer
        accuracies = {f"accuracy/task_{n + 1}": accuracy for n, accuracy in enumerate(row)}
        self.position, self.steps_before, self.num_rows = (task, math.inf, 0), self.step, task + 1
        return Point(self.position, self.step, {"accuracy/average": float(np.mean(row)), **accuracies})


def _mean(points: list[Point]) -> Point:
    """Of several trials at one position; at the mean of their steps, where those differ."""
    values = {tag: float(np.mean([point.values[tag] for point in points])) for tag in points[0].values}
    return Point(points[0].position, round(np.mean([point.step for point in points])), values)
