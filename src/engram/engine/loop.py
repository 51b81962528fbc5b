"""The training loop: learners go through a stream together, task after task, and are evaluated after each."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import Divergence, InputError
from engram.config.settings import Config
from engram.data.batches import Piece, num_batches, plan_epoch, record_steps
from engram.data.samples import Task
from engram.engine.learner import DYNAMICS, Learner, Record
from engram.engine.program import Batches, Program

RECORDS_PER_EPOCH = 4


@dataclass
class Position:
    """How far a stack has come: what is done, and the losses of the current epoch, not yet turned into records."""

    task: int = 0
    epoch: int = 0
    piece: int = 0  # in the epoch
    part: float = 0.0  # the fraction of the epoch that is done, in [0, 1]
    # In the order of the program's learners; in a checkpoint in that of the stack's.
    losses: list[Tensor] = field(default_factory=list)  # those of the epoch's pieces so far
    dynamics: list[Tensor] = field(default_factory=list)  # after those of them that end in a record


OnPosition = Callable[[bool], None]


def _ignore(task_ended: bool) -> None:
    pass


def run_stream(
    program: Program,
    batches: Batches,
    config: Config,
    position: Position | None = None,
    on_position: OnPosition = _ignore,
) -> None:
    """Learn every task of the stream in order. A trial that diverges keeps what it learned before.

    Args:
        program: the learners, and how their device trains them.
        batches: the tasks.
        config: the settings of any learner: batch size and epochs are common to all.
        position: where to start; it moves along.
        on_position: called at every position from which training could be resumed, with whether a task just ended.
    """
    position = Position() if position is None else position
    num_tasks = len(batches.streams[0])
    if not any(learner.outcome.untrained for learner in program.learners):
        for learner, row in zip(program.learners, program.evaluate(range(num_tasks)).tolist(), strict=True):
            learner.outcome.untrained = row
    for n in range(position.task, num_tasks):
        if not any(learner.learning for learner in program.learners):
            break
        train_task(program, batches, config, position, on_position)
        _mark_diverged(program.learners, program.finite(), n)
        _consolidate_at_end(program, batches, config, n)
        accuracy = program.evaluate(range(min(n + 2, num_tasks)), n + 1)  # forward transfer needs the next task too
        for learner, row in zip(program.learners, accuracy.tolist(), strict=True):
            if learner.learning:
                learner.outcome.rows.append(row)
        position.task, position.epoch = n + 1, 0
        on_position(True)


def train_task(
    program: Program,
    batches: Batches,
    config: Config,
    position: Position | None = None,
    on_position: OnPosition = _ignore,
) -> None:
    """Minimise Eq. 4 on one task, from the given position."""
    position = Position() if position is None else position
    if position.epoch == position.piece == 0:
        forget_steps(program.learners)
    sizes = batches.sizes(position.task)
    program.begin_task(position.task)
    while position.epoch < config.epochs and any(learner.learning for learner in program.learners):
        plan = _EpochPlan.of(sizes, config, position.epoch)
        done = np.cumsum([piece.num_steps * len(plan.trials_of(piece)) for piece in plan.pieces])
        program.begin_epoch(position.task, position.epoch)
        for piece in plan.pieces[position.piece :]:
            position.losses.append(program.train(piece))
            if plan.ends_in_record(piece):
                position.dynamics.append(program.dynamics())
            position.part = float(done[position.piece] / done[-1])
            position.piece += 1
            _consolidate_within(program, batches, config, position, plan.trials_of(piece), piece.end)
            if position.piece < len(plan.pieces):
                on_position(False)
        _record_epoch(program.learners, batches, position, plan)
        position.epoch, position.piece, position.part = position.epoch + 1, 0, 0.0
        position.losses, position.dynamics = [], []
        if position.epoch < config.epochs:
            on_position(False)


def forget_steps(learners: Sequence[Learner]) -> None:
    """Before a task: those optimizers start anew that are reset between tasks."""
    for learner in learners:
        if learner.config.reset_optimizer:
            learner.optimizer_state = {}


def check_position(position: Position, learners: Sequence[Learner], batches: Batches, config: Config) -> None:
    """Refuse a position that no run of these learners can reach: it was read from a file."""
    if position.task == len(batches.streams[0]):
        return
    plan = _EpochPlan.of(batches.sizes(position.task), config, position.epoch)
    done = plan.pieces[: position.piece]
    trials = [batches.trials.index(learner.trial) for learner in learners]
    losses = [(sum(trial in plan.trials_of(piece) for trial in trials), piece.num_steps) for piece in done]
    dynamics = [(len(learners), len(DYNAMICS)) for piece in done if plan.ends_in_record(piece)]
    found = [[tuple(tensor.shape) for tensor in tensors] for tensors in (position.losses, position.dynamics)]
    floating = all(tensor.is_floating_point() for tensor in (*position.losses, *position.dynamics))
    started = position.epoch < config.epochs and position.piece < len(plan.pieces)
    if not (started and floating and found == [losses, dynamics]):
        raise InputError(f"no run reaches epoch {position.epoch + 1}, piece {position.piece} with such losses")


def reordered(
    position: Position, batches: Batches, config: Config, learners: Sequence[Learner], others: Sequence[Learner]
) -> Position:
    """A position whose losses and dynamics have rows for the same learners in another order.

    The order of a program's learners depends on how they can be trained, which another device, or the same one on a
    resume, may see in another way. So checkpoints have the order of the stack.

    Args:
        position: in the order of `learners`.
        batches: the tasks.
        config: the settings of any learner.
        learners: in one order.
        others: the same in another order.
    """
    if not position.losses or all(one is other for one, other in zip(learners, others, strict=True)):
        return position

    def in_order(tensor: Tensor, trials: Container[int]) -> Tensor:
        place = {id(learner): row for row, learner in enumerate(each for each in learners if each.trial in trials)}
        rows = [place[id(learner)] for learner in others if learner.trial in trials]
        return tensor[torch.tensor(rows, device=tensor.device)]

    plan = _EpochPlan.of(batches.sizes(position.task), config, position.epoch)
    of_pieces = [[batches.trials[place] for place in plan.trials_of(piece)] for piece in plan.pieces]
    losses = [in_order(tensor, trials) for tensor, trials in zip(position.losses, of_pieces, strict=False)]
    return replace(position, losses=losses, dynamics=[in_order(t, batches.trials) for t in position.dynamics])


@dataclass(frozen=True)
class _EpochPlan:
    """The pieces of an epoch, and for each trial the steps that end in a record."""

    pieces: list[Piece]
    recorded: list[list[int]]

    @classmethod
    def of(cls, sizes: list[int], config: Config, epoch: int) -> _EpochPlan:
        numbers = [num_batches(size, config.batch_size) for size in sizes]
        recorded = [record_steps(number, RECORDS_PER_EPOCH) for number in numbers]
        every, stops = config.consolidate_every, None
        if every is not None:  # a piece ends where a consolidation is due
            stops = [{s for s in range(number) if (epoch * number + s + 1) % every == 0} for number in numbers]
        return cls(plan_epoch(sizes, config.batch_size, RECORDS_PER_EPOCH, stops), recorded)

    def trials_of(self, piece: Piece) -> range:
        """The indices of its trials."""
        return range(len(self.recorded))[piece.trials]

    def ends_in_record(self, piece: Piece) -> bool:
        return any(piece.end - 1 in self.recorded[trial] for trial in self.trials_of(piece))


def _record_epoch(learners: list[Learner], batches: Batches, position: Position, plan: _EpochPlan) -> None:
    """Turn the epoch's losses and dynamics into records, and find the learners that diverged."""
    trials = [batches.trials.index(learner.trial) for learner in learners]
    losses: list[list[np.ndarray]] = [[] for _ in learners]
    dynamics: list[list[np.ndarray]] = [[] for _ in learners]
    read = _on_host([*position.losses, *position.dynamics])
    seen = iter(read[len(position.losses) :])
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
            _record_learner(learner, position, np.concatenate(losses[row]), plan.recorded[trials[row]], dynamics[row])


def _on_host(tensors: list[Tensor]) -> list[np.ndarray]:
    """The tensors as arrays, fetched in one transfer: waiting for a GPU once is cheaper than once per tensor."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]


def _record_learner(
    learner: Learner, position: Position, losses: np.ndarray, steps: list[int], dynamics: list[np.ndarray]
) -> None:
    first = position.epoch * len(losses)
    bad = np.flatnonzero(~np.isfinite(losses))
    for (begin, end), values in zip(pairwise([0, *(step + 1 for step in steps)]), dynamics, strict=True):
        if len(bad) and bad[0] < end:
            learner.outcome.diverged = Divergence(learner.trial, position.task, first + int(bad[0]))
            return
        mean = float(losses[begin:end].mean())
        learner.outcome.records.append(
            Record(learner.trial, position.task, position.epoch, first + end - 1, mean, *map(float, values))
        )


def _consolidate_within(
    program: Program, batches: Batches, config: Config, position: Position, places: range, end: int
) -> None:
    """Where N steps within a task have been taken since the last consolidation, consolidate on their samples.

    Args:
        program: the learners.
        batches: the tasks.
        config: N is its `consolidate_every`; without it nothing happens.
        position: in which task and epoch.
        places: the trials that have just taken steps.
        end: the number of steps that they have taken in this epoch.
    """
    n, every = position.task, config.consolidate_every
    if every is None:
        return
    taken = {place: position.epoch * _steps_per_epoch(batches, config, n, place) + end for place in places}
    spans = {place: range(steps - every, steps) for place, steps in taken.items() if steps % every == 0}
    if spans:
        step = next(iter(spans.values())).stop - 1
        _mark_diverged(program.learners, program.consolidate(n, _seen(batches, config, n, spans)), n, step)
        program.begin_task(n)  # the penalties pull differently from now on
        program.begin_epoch(n, position.epoch)


def _consolidate_at_end(program: Program, batches: Batches, config: Config, n: int) -> None:
    """Consolidate on the whole task, or on the samples that were seen since the last consolidation within it."""
    every, seen = config.consolidate_every, None
    if every is not None:
        places = range(len(batches.trials))
        totals = {place: config.epochs * _steps_per_epoch(batches, config, n, place) for place in places}
        spans = {place: range(total - total % every, total) for place, total in totals.items() if total % every}
        seen = _seen(batches, config, n, spans)
    _mark_diverged(program.learners, program.consolidate(n, seen), n)


def _steps_per_epoch(batches: Batches, config: Config, n: int, place: int) -> int:
    return num_batches(batches.sizes(n)[place], config.batch_size)


def _seen(batches: Batches, config: Config, n: int, spans: dict[int, range]) -> dict[int, Task]:
    """The tasks with the samples of these steps, by trial; the steps are given by the places of the trials."""
    return {batches.trials[place]: batches.seen(n, place, steps, config.batch_size) for place, steps in spans.items()}


def _mark_diverged(learners: list[Learner], finite: Tensor, n: int, step: int | None = None) -> None:
    """Learners have diverged whose weights or importances are not finite, though no loss was NaN; or that failed."""
    for learner, holds in zip(learners, finite.tolist(), strict=True):
        if learner.outcome.diverged is None and not (holds and learner.learning):
            last = learner.outcome.records[-1].step if step is None else step
            learner.outcome.diverged = Divergence(learner.trial, n, last, learner.failed)
