"""The loop: learners go through a stream task after task, all together, and are examined after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from torch import Tensor

from engram.config import Config
from engram.data.batches import Piece, num_batches, plan_epoch, record_steps
from engram.errors import DivergedError
from engram.learner import Learner, Record
from engram.stack.program import Batches, Program

RECORDS_PER_EPOCH = 4


@dataclass
class Place:
    """Where a run stands: what is done, and what of an epoch begun is still to be told."""

    task: int = 0
    epoch: int = 0
    piece: int = 0  # of the epoch
    losses: list[Tensor] = field(default_factory=list)  # of the epoch's pieces so far
    dynamics: list[Tensor] = field(default_factory=list)  # after those of them that end in a record

    def next_epoch(self) -> None:
        self.epoch, self.piece, self.losses, self.dynamics = self.epoch + 1, 0, [], []

    def next_task(self) -> None:
        self.task, self.epoch = self.task + 1, 0


@dataclass(frozen=True)
class Watch:
    """Who is told what, in the course of a run."""

    share: Callable[[float], None] = lambda share: None  # how much of it is done, in [0, 1]
    task: Callable[[int], None] = lambda task: None  # a task has been learned, or a learner was lost in it
    keep: Callable[[Place, bool], None] = lambda place, task_ended: None  # a moment from which the run can go on


def run_stream(program: Program, batches: Batches, config: Config, place: Place, watch: Watch) -> None:
    """Learn every task of the stream in order. A trial that diverges keeps what it had learned until then.

    `config` is that of any of the learners: they have batches and epochs in common.
    """
    num_tasks = len(batches.streams[0])
    if not any(learner.outcome.untrained for learner in program.learners):
        for learner, row in zip(program.learners, program.evaluate(range(num_tasks)).tolist(), strict=True):
            learner.outcome.untrained = row
    for n in range(place.task, num_tasks):
        if not any(learner.learning for learner in program.learners):
            break
        train_task(program, batches, config, place, watch)
        _mark(program.learners, program.finite(), n)
        _mark(program.learners, program.consolidate(n), n)
        accuracy = program.evaluate(range(min(n + 2, num_tasks)))
        for learner, row in zip(program.learners, accuracy.tolist(), strict=True):
            if learner.learning:
                learner.outcome.rows.append(row)
        place.next_task()
        watch.task(n)
        watch.keep(place, True)


def train_task(program: Program, batches: Batches, config: Config, place: Place, watch: Watch) -> None:
    """Minimise Eq. 4 on one task by plain SGD; from the middle, if that is where the run stands."""
    n = place.task
    program.begin_task(n)
    pieces = plan_epoch(batches.sizes(n), config.batch_size, RECORDS_PER_EPOCH)
    ends = _recorded_ends(batches.sizes(n), config.batch_size)
    done_per_piece = np.cumsum([_weight(piece, len(batches.trials)) for piece in pieces])
    while place.epoch < config.epochs:
        program.begin_epoch(n, place.epoch)
        for piece in pieces[place.piece :]:
            place.losses.append(program.train(piece))
            if piece.end in ends:
                place.dynamics.append(program.dynamics())
            part = done_per_piece[place.piece] / done_per_piece[-1]
            place.piece += 1
            watch.share((n + (place.epoch + part) / config.epochs) / len(batches.streams[0]))
            if place.piece < len(pieces):
                watch.keep(place, False)
        _record_epoch(program.learners, batches, config, place, pieces, ends)
        place.next_epoch()
        if not any(learner.learning for learner in program.learners):
            break
        if place.epoch < config.epochs:
            watch.keep(place, False)


def _weight(piece: Piece, num_trials: int) -> int:
    return piece.num_steps * len(range(num_trials)[piece.trials])


def _recorded_ends(sizes: list[int], batch_size: int) -> set[int]:
    """The steps of an epoch before which some trial makes a record."""
    return {i + 1 for size in sizes for i in record_steps(num_batches(size, batch_size), RECORDS_PER_EPOCH)}


def _record_epoch(
    learners: list[Learner], batches: Batches, config: Config, place: Place, pieces: list[Piece], ends: set[int]
) -> None:
    """Turn the epoch's losses and dynamics into records, and find out who diverged in it."""
    trials = {trial: index for index, trial in enumerate(batches.trials)}
    sizes = batches.sizes(place.task)
    losses = np.full((len(learners), max(num_batches(size, config.batch_size) for size in sizes)), np.nan)
    dynamics: dict[int, list[np.ndarray]] = {row: [] for row in range(len(learners))}
    seen = iter([tensor.double().cpu().numpy() for tensor in place.dynamics])
    for piece, values in zip(pieces, [tensor.double().cpu().numpy() for tensor in place.losses], strict=True):
        within = range(len(batches.trials))[piece.trials]
        rows = [row for row, learner in enumerate(learners) if trials[learner.trial] in within]
        losses[rows, piece.first_step : piece.end] = values
        if piece.end in ends:
            now = next(seen)
            for row in rows:
                own = record_steps(num_batches(sizes[trials[learners[row].trial]], config.batch_size), RECORDS_PER_EPOCH)
                if piece.end - 1 in own:
                    dynamics[row].append(now[row])
    for row, learner in enumerate(learners):
        if learner.learning:
            num_steps = num_batches(sizes[trials[learner.trial]], config.batch_size)
            _record_learner(learner, place, losses[row, :num_steps], dynamics[row])


def _record_learner(learner: Learner, place: Place, losses: np.ndarray, dynamics: list[np.ndarray]) -> None:
    first = place.epoch * len(losses)
    bad = np.flatnonzero(~np.isfinite(losses))
    steps = record_steps(len(losses), RECORDS_PER_EPOCH)
    for (begin, end), values in zip(pairwise([0, *(step + 1 for step in steps)]), dynamics, strict=True):
        if len(bad) and bad[0] < end:
            learner.outcome.diverged = DivergedError(place.task, first + int(bad[0]))
            return
        mean = float(losses[begin:end].mean())
        learner.outcome.records.append(
            Record(learner.trial, place.task, place.epoch, first + end - 1, mean, *map(float, values))
        )


def _mark(learners: list[Learner], finite: Tensor, n: int) -> None:
    """Learners that no longer consist of numbers have diverged, though no loss has shown it."""
    for learner, holds in zip(learners, finite.tolist(), strict=True):
        if learner.learning and not holds:
            learner.outcome.diverged = DivergedError(n, learner.outcome.records[-1].step)
