"""The loop: learners go through a stream task after task, all together, and are examined after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import DivergedError, InputError
from engram.config.settings import Config
from engram.data.batches import Piece, num_batches, plan_epoch, record_steps
from engram.engine.learner import DYNAMICS, Learner, Record
from engram.engine.program import Batches, Program

RECORDS_PER_EPOCH = 4


@dataclass
class Place:
    """Where a run stands: what is done, and what of an epoch begun is still to be told."""

    task: int = 0
    epoch: int = 0
    piece: int = 0  # of the epoch
    part: float = 0.0  # of the epoch that is done, in [0, 1]
    losses: list[Tensor] = field(default_factory=list)  # of the epoch's pieces so far
    dynamics: list[Tensor] = field(default_factory=list)  # after those of them that end in a record

    def next_epoch(self) -> None:
        self.epoch, self.piece, self.part, self.losses, self.dynamics = self.epoch + 1, 0, 0.0, [], []

    def next_task(self) -> None:
        self.task, self.epoch = self.task + 1, 0


def _nothing(*told: object) -> None:
    pass


@dataclass(frozen=True)
class Watch:
    """Who is told what in the course of a run; where it stands is in its place."""

    moved: Callable[[], None] = _nothing  # some steps were taken
    learned: Callable[[int], None] = _nothing  # a task has been learned, or all learners were lost in it
    keep: Callable[[bool], None] = _nothing  # from here the run can go on; whether a task has ended


UNWATCHED = Watch()


def run_stream(
    program: Program, batches: Batches, config: Config, place: Place | None = None, watch: Watch = UNWATCHED
) -> None:
    """Learn every task of the stream in order. A trial that diverges keeps what it had learned until then.

    `config` is that of any of the learners: they have batches and epochs in common.
    """
    place = Place() if place is None else place
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
        accuracy = program.evaluate(range(min(n + 2, num_tasks)))  # forward transfer needs the next task too
        for learner, row in zip(program.learners, accuracy.tolist(), strict=True):
            if learner.learning:
                learner.outcome.rows.append(row)
        place.next_task()
        watch.learned(n)
        watch.keep(True)


def train_task(
    program: Program, batches: Batches, config: Config, place: Place | None = None, watch: Watch = UNWATCHED
) -> None:
    """Minimise Eq. 4 on one task by plain SGD; from the middle, if that is where the run stands."""
    place = Place() if place is None else place
    plan = _Plan.of(batches.sizes(place.task), config.batch_size)
    done = np.cumsum([piece.num_steps * len(plan.trials_of(piece)) for piece in plan.pieces])
    program.begin_task(place.task)
    while place.epoch < config.epochs and any(learner.learning for learner in program.learners):
        program.begin_epoch(place.task, place.epoch)
        for piece in plan.pieces[place.piece :]:
            place.losses.append(program.train(piece))
            if plan.ends_in_record(piece):
                place.dynamics.append(program.dynamics())
            place.part = float(done[place.piece] / done[-1])
            place.piece += 1
            watch.moved()
            if place.piece < len(plan.pieces):
                watch.keep(False)
        _record_epoch(program.learners, batches, place, plan)
        place.next_epoch()
        if place.epoch < config.epochs:
            watch.keep(False)


def check_place(place: Place, learners: Sequence[Learner], batches: Batches, config: Config) -> None:
    """Refuse a place at which no run of these learners can stand: a file may say anything."""
    if place.task == len(batches.streams[0]):
        return
    plan = _Plan.of(batches.sizes(place.task), config.batch_size)
    done = plan.pieces[: place.piece]
    trials = [batches.trials.index(learner.trial) for learner in learners]
    losses = [(sum(trial in plan.trials_of(piece) for trial in trials), piece.num_steps) for piece in done]
    dynamics = [(len(learners), len(DYNAMICS)) for piece in done if plan.ends_in_record(piece)]
    found = [[tuple(tensor.shape) for tensor in tensors] for tensors in (place.losses, place.dynamics)]
    floating = all(tensor.is_floating_point() for tensor in (*place.losses, *place.dynamics))
    begun = place.epoch < config.epochs and place.piece < len(plan.pieces)
    if not (begun and floating and found == [losses, dynamics]):
        raise InputError(f"no run can stand in epoch {place.epoch + 1} after piece {place.piece} with such losses")


@dataclass(frozen=True)
class _Plan:
    """The pieces of an epoch, and for each trial the steps after which it makes a record."""

    pieces: list[Piece]
    recorded: list[list[int]]

    @classmethod
    def of(cls, sizes: list[int], batch_size: int) -> _Plan:
        recorded = [record_steps(num_batches(size, batch_size), RECORDS_PER_EPOCH) for size in sizes]
        return cls(plan_epoch(sizes, batch_size, RECORDS_PER_EPOCH), recorded)

    def trials_of(self, piece: Piece) -> range:
        """The places of its trials."""
        return range(len(self.recorded))[piece.trials]

    def ends_in_record(self, piece: Piece) -> bool:
        return any(piece.end - 1 in self.recorded[place] for place in self.trials_of(piece))


def _record_epoch(learners: list[Learner], batches: Batches, place: Place, plan: _Plan) -> None:
    """Turn the epoch's losses and dynamics into records, and find out who diverged in it."""
    trials = [batches.trials.index(learner.trial) for learner in learners]
    losses: list[list[np.ndarray]] = [[] for _ in learners]
    dynamics: list[list[np.ndarray]] = [[] for _ in learners]
    read = _on_host([*place.losses, *place.dynamics])
    seen = iter(read[len(place.losses) :])
    for piece, of_piece in zip(plan.pieces, read, strict=False):
        rows = [row for row, trial in enumerate(trials) if trial in plan.trials_of(piece)]
        for row, values in zip(rows, of_piece, strict=True):
            losses[row].append(values)
        if plan.ends_in_record(piece):
            now = next(seen)
            for row in rows:
                if piece.end - 1 in plan.recorded[trials[row]]:
                    dynamics[row].append(now[row])
    for row, learner in enumerate(learners):
        if learner.learning:
            _record_learner(learner, place, np.concatenate(losses[row]), plan.recorded[trials[row]], dynamics[row])


def _on_host(tensors: list[Tensor]) -> list[np.ndarray]:
    """The tensors as arrays, fetched at once: a GPU is asked a single time, and then at rest for a moment only."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]


def _record_learner(
    learner: Learner, place: Place, losses: np.ndarray, steps: list[int], dynamics: list[np.ndarray]
) -> None:
    first = place.epoch * len(losses)
    bad = np.flatnonzero(~np.isfinite(losses))
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
