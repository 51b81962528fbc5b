"""The contract of a program, which trains a stack on a device; and functions that all programs use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from engram.common.errors import NotFiniteError, SingularError
from engram.data.batches import Piece, batches_of, epoch_order, num_batches
from engram.data.samples import Samples, Stream, Task
from engram.engine.learner import Learner
from engram.engine.rehearsal import kept_by
from engram.nn.classes import mask_logits
from engram.nn.modules import frozen

SMALL_BATCH = 4  # a batch is small if it is less than this part of the others


class Program(Protocol):
    """Learners in one order, trial after trial. What its methods return has a row for each."""

    learners: list[Learner]

    @property
    def notes(self) -> list[str]:
        """What is worth a line in a log."""

    def begin_task(self, n: int) -> None:
        """Prepare for task n: which outputs take part, and how the penalties pull from now on."""

    def begin_epoch(self, n: int, epoch: int) -> None:
        """Draw the order of the samples."""

    def train(self, piece: Piece) -> Tensor:
        """Take the steps of a piece; returns their losses (learners of the piece, steps)."""

    def dynamics(self) -> Tensor:
        """(learners, 3): η, ‖Hebb‖ and ‖α‖, NaN without a trace."""

    def finite(self) -> Tensor:
        """(learners,): whether all weights of a model are finite."""

    def consolidate(self, n: int, seen: Mapping[int, Task] | None = None) -> Tensor:
        """Compute the importance of each weight for task n; returns (learners,): whether all are finite.

        With `seen`, for the samples of these tasks, by trial; trials that are not among them do not consolidate.
        """

    def evaluate(self, tasks: Sequence[int], learned: int = 0) -> Tensor:
        """(learners, tasks): the accuracy on the test samples, after this number of learned tasks."""


EVALUATION_BATCH = 1000
IMPORTANCE_BATCH = 500  # samples at a time; their number does not change the importances


@torch.no_grad()
def accuracy(
    model: nn.Module, task: Task, dtype: torch.dtype = torch.float32, classes: Sequence[int] | None = None
) -> float:
    """The fraction of test samples, in [0, 1], whose class has the largest logit; changes nothing.

    Args:
        model: any.
        task: whose test samples.
        dtype: of the inputs.
        classes: the outputs that take part; by default the task's.
    """
    among = task.classes if classes is None else classes
    correct = torch.zeros((), dtype=torch.int64, device=task.test.targets.device)
    with frozen(model):
        for inputs, targets in batches_of(task.test, EVALUATION_BATCH, permutation=task.permutation, dtype=dtype):
            correct += (mask_logits(model(inputs), among).argmax(dim=1) == targets).sum()
    return int(correct) / len(task.test)


def settle_heads(learners: Sequence[Learner]) -> None:
    """Let every head that solves for what it reads do so, once, before importances and accuracies are computed.

    A learner whose head cannot, since its sums are singular, has failed; the others go on.
    """
    for learner in learners:
        for module in learner.model.modules() if learner.learning else ():
            settle = getattr(module, "settle", None)
            try:
                if callable(settle):
                    settle()
            except SingularError as error:
                learner.failed = str(error)


def memory_notes(learners: Sequence[Learner], batches: Batches) -> list[str]:
    """A line about what each method with a rehearsal keeps between tasks, which is put into its outcome too."""
    notes = []
    for learner in learners:
        learner.outcome.kept = kept_by(learner, batches.streams[batches.trials.index(learner.trial)])
        if learner.outcome.kept is not None:
            samples, size = learner.outcome.kept
            notes.append(f"{learner.config.method} keeps {samples:,} samples of earlier tasks, {size:,} bytes in all")
    return list(dict.fromkeys(notes))


def batch_notes(learners: Sequence[Learner], batches: Batches) -> list[str]:
    """A line about a last batch far smaller than the others: a penalty anchors what its step leaves."""
    for size in {learner.config.batch_size for learner in learners if learner.config.penalty is not None}:
        for task in batches.streams[0]:
            last = len(task.train) % size
            if 0 < last * SMALL_BATCH < size < len(task.train):
                return [
                    f"the last batch of {task.name!r} has {last} of {size} samples: a penalty holds the weights "
                    "where its noisy step leaves them, which costs accuracy; choose another batch_size"
                ]
    return []


def consolidate_alone(
    learner: Learner, task: Task, dtype: torch.dtype, samples_at_once: int = IMPORTANCE_BATCH
) -> bool:
    """Consolidate one learner by the method of its penalty; returns whether all importances are finite."""
    batches = batches_of(task.train, samples_at_once, permutation=task.permutation, dtype=dtype)
    try:
        learner.penalty.consolidate(batches, task.taught)
    except NotFiniteError:  # importances can overflow though the weights do not
        return False
    return True


class Batches:
    """The training samples of several trials, in a different order for each."""

    def __init__(self, trials: Sequence[int], streams: Sequence[Stream], seed: int, dtype: torch.dtype):
        self.trials = list(trials)
        self.streams = list(streams)
        self.seed = seed
        self.dtype = dtype

    def tasks(self, n: int) -> list[Task]:
        """Task n of each trial."""
        return [stream[n] for stream in self.streams]

    @property
    def share_inputs(self) -> bool:
        """Whether all trials learn from the same tensors of inputs; their rows and targets may differ."""
        return all(
            task.train.inputs is first.train.inputs
            for stream in self.streams
            for task, first in zip(stream, self.streams[0], strict=True)
        )

    def targets(self, n: int) -> Tensor:
        """The targets of task n: one tensor (N,) that all trials share, or a row for each trial (T, N)."""
        targets = [task.train.targets for task in self.tasks(n)]
        return targets[0] if all(own is targets[0] for own in targets) else torch.stack(targets)

    def sizes(self, n: int) -> list[int]:
        return [len(task.train) for task in self.tasks(n)]

    def seen(self, n: int, place: int, steps: range, batch_size: int) -> Task:
        """Task n of one trial with the samples of some steps in place of all; a sample seen twice is in it twice.

        Args:
            n: the task.
            place: of the trial.
            steps: counted from the first of the task, over all epochs.
            batch_size: of the steps.
        """
        task, rows = self.streams[place][n], []
        per_epoch = num_batches(len(task.train), batch_size)
        for epoch in range(steps.start // per_epoch, (steps.stop - 1) // per_epoch + 1):
            order = epoch_order(task.train, self.seed, self.trials[place], n, epoch)
            first, last = (min(max(step - epoch * per_epoch, 0), per_epoch) for step in (steps.start, steps.stop))
            rows.append(order[first * batch_size : last * batch_size])
        inputs, targets = task.train.inputs, task.train.targets
        return replace(task, train=Samples(inputs, targets, torch.cat(rows).to(inputs.device)))

    def orders(self, n: int, epoch: int) -> list[Tensor]:
        """For each trial, the rows of its inputs in the order of one epoch."""
        return [
            epoch_order(stream[n].train, self.seed, trial, n, epoch)
            for trial, stream in zip(self.trials, self.streams, strict=True)
        ]


class SideBySide:
    """Several programs as one, for learners that cannot all be trained in the same way."""

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

    def consolidate(self, n: int, seen: Mapping[int, Task] | None = None) -> Tensor:
        return torch.cat([program.consolidate(n, seen).cpu() for program in self.programs])

    def evaluate(self, tasks: Sequence[int], learned: int = 0) -> Tensor:
        return torch.cat([program.evaluate(tasks, learned).cpu() for program in self.programs])
