"""What a program is: learners that share their batches, and the seven things that the loop asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engram.common.errors import NotFiniteError
from engram.data.batches import Piece, batches_of, epoch_order
from engram.data.streams import Stream, Task
from engram.engine.learner import Learner


class Program(Protocol):
    """Learners in one order, trial after trial; what it returns has a row for each."""

    learners: list[Learner]

    @property
    def notes(self) -> list[str]:
        """What has turned out that is worth a line in a log."""

    def begin_task(self, n: int) -> None:
        """Make ready to learn task n: which outputs take part, and how the penalties now pull."""

    def begin_epoch(self, n: int, epoch: int) -> None:
        """Draw the order of the samples."""

    def train(self, piece: Piece) -> Tensor:
        """Take the steps of a piece; returns their losses (learners of the piece, steps)."""

    def dynamics(self) -> Tensor:
        """(learners, 3): η, ‖Hebb‖ and ‖α‖, NaN without a trace."""

    def finite(self) -> Tensor:
        """(learners,): whether a model still consists of numbers."""

    def consolidate(self, n: int) -> Tensor:
        """Give the weights their importance for task n; returns (learners,): whether the importances are numbers."""

    def evaluate(self, tasks: Sequence[int]) -> Tensor:
        """(learners, tasks): the accuracy on the test samples."""


IMPORTANCE_BATCH = 500  # samples at a time; their number does not change the importances


def consolidate_alone(learner: Learner, task: Task, dtype: torch.dtype) -> bool:
    """Consolidate one learner by its penalty's own method; returns whether its importances are numbers."""
    batches = batches_of(task.train, IMPORTANCE_BATCH, permutation=task.permutation, dtype=dtype)
    try:
        learner.penalty.consolidate(batches, task.taught)
    except NotFiniteError:  # importances that overflow though the weights do not
        return False
    return True


class Batches:
    """The training samples of several trials, each in an order of its own."""

    def __init__(self, trials: Sequence[int], streams: Sequence[Stream], seed: int, dtype: torch.dtype):
        self.trials = list(trials)
        self.streams = list(streams)
        self.seed = seed
        self.dtype = dtype

    def tasks(self, n: int) -> list[Task]:
        """Task n of each trial."""
        return [stream[n] for stream in self.streams]

    def sizes(self, n: int) -> list[int]:
        return [len(task.train) for task in self.tasks(n)]

    def orders(self, n: int, epoch: int) -> list[Tensor]:
        """For each trial the rows of its inputs in the order of one epoch."""
        return [
            epoch_order(stream[n].train, self.seed, trial, n, epoch)
            for trial, stream in zip(self.trials, self.streams, strict=True)
        ]


class SideBySide:
    """Several programs as one, for learners of which not all can be trained in the same way."""

    def __init__(self, programs: Sequence[Program]):
        self.programs = list(programs)
        self.learners = [learner for program in self.programs for learner in program.learners]

    @property
    def notes(self) -> list[str]:
        return [note for program in self.programs for note in program.notes]

    def begin_task(self, n: int) -> None:
        for program in self.programs:
            program.begin_task(n)

    def begin_epoch(self, n: int, epoch: int) -> None:
        for program in self.programs:
            program.begin_epoch(n, epoch)

    def train(self, piece: Piece) -> Tensor:
        return torch.cat([program.train(piece) for program in self.programs])

    def dynamics(self) -> Tensor:
        return torch.cat([program.dynamics() for program in self.programs])

    def finite(self) -> Tensor:
        return torch.cat([program.finite().cpu() for program in self.programs])

    def consolidate(self, n: int) -> Tensor:
        return torch.cat([program.consolidate(n).cpu() for program in self.programs])

    def evaluate(self, tasks: Sequence[int]) -> Tensor:
        return torch.cat([program.evaluate(tasks).cpu() for program in self.programs])
