"""Models one after another: the program for a CPU, and for models that cannot be mapped.

Batching small products saves nothing on a CPU: one network keeps it as busy as eighty. So each model takes its steps
as its own module, exactly as it would alone, and the models are divided among the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from engram.common.errors import InputError
from engram.data.batches import Piece, read_inputs
from engram.data.samples import Task
from engram.data.scenarios import candidates
from engram.engine.cpu.descent import Descent, descent_of
from engram.engine.cpu.fused import why_not_fused
from engram.engine.cpu.pixels import read_chosen
from engram.engine.cpu.rehearsal import RehearsalDescent
from engram.engine.inspection import draws_numbers, own_generators, seed_draws
from engram.engine.learner import DYNAMICS, Learner, read_dynamics
from engram.engine.program import Batches, accuracy, consolidate_alone, settle_heads

GATHERED = 16  # batches read together for all models of a trial, few enough to stay in a cache


class OneByOne:
    """Trains its learners one after another.

    Args:
        learners: trial after trial.
        batches: what they learn.

    Example:
        >>> program = OneByOne(learners, batches)
    """

    def __init__(self, learners: Sequence[Learner], batches: Batches):
        self.learners = list(learners)
        self.batches = batches
        self.place = {trial: place for place, trial in enumerate(batches.trials)}
        example = batches.tasks(0)[0].train[slice(2)]
        inputs = read_inputs(example.inputs, dtype=batches.dtype)
        self.device = inputs.device
        with own_generators(self.device):
            self.descents = [self._descent_of(learner, inputs, example.targets) for learner in self.learners]
        self.draws = [draws_numbers(learner.model, inputs, example.targets) for learner in self.learners]
        self.orders: list[Tensor] = []
        why = why_not_fused() if self.device.type == "cpu" else None
        self.notes = [] if why is None else [f"a part of each step is not compiled, and takes longer: {why}"]

    def _descent_of(self, learner: Learner, inputs: Tensor, targets: Tensor) -> Descent:
        if learner.rehearsal is None:
            return descent_of(learner, inputs, targets)
        stream = self.batches.streams[self.place[learner.trial]]
        return RehearsalDescent(learner, stream, self.batches.seed, self.batches.dtype)

    def begin_task(self, n: int) -> None:
        self.tasks = self.batches.tasks(n)
        for learner, descent in zip(self.learners, self.descents, strict=True):
            learner.model.train()
            if isinstance(descent, RehearsalDescent):
                descent.enter_task(n)
            descent.begin_task(self.tasks[self.place[learner.trial]].taught)

    def begin_epoch(self, n: int, epoch: int) -> None:
        self.now = (n, epoch)
        self.orders = [order.to(self.device) for order in self.batches.orders(n, epoch)]

    def train(self, piece: Piece) -> Tensor:
        places = range(len(self.batches.trials))[piece.trials]
        chosen = [i for i, learner in enumerate(self.learners) if self.place[learner.trial] in places]
        losses = torch.full((len(chosen), piece.num_steps), float("nan"), device=self.device, dtype=self.batches.dtype)

        def train_some(part: Sequence[int]) -> None:
            """Rows `part` of `losses`, whose learners are of one or of several trials."""
            for place in places:
                own = [row for row in part if self.place[self.learners[chosen[row]].trial] == place]
                for start in range(0, piece.num_steps, GATHERED) if own else ():
                    read = self._batches(piece, place, range(start, min(start + GATHERED, piece.num_steps)))
                    for row in own:
                        taken = self._steps(chosen[row], piece.first_step + start, read)
                        losses[row, start : start + len(taken)] = taken

        learning = [row for row, i in enumerate(chosen) if self.learners[i].learning]
        in_parallel(train_some, [row for row in learning if not self.draws[chosen[row]]], self.device)
        with own_generators(self.device):  # all threads share the generators
            train_some([row for row in learning if self.draws[chosen[row]]])
        return losses

    def _steps(self, i: int, first_step: int, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Take a step of one learner for each batch; returns their losses."""
        learner, descent, losses = self.learners[i], self.descents[i], []
        with descent.steps():
            for step, (inputs, targets) in enumerate(batches, first_step):
                if self.draws[i]:
                    seed_draws(self.batches.seed, learner.trial, *self.now, step)
                if isinstance(descent, RehearsalDescent):
                    descent.at(self.now[1], step)
                try:
                    losses.append(descent.step(inputs, targets))
                except InputError:
                    raise
                except ValueError as reason:  # what PyTorch raises when BatchNorm gets a batch of one
                    where = f"task {self.now[0] + 1} of trial {learner.trial + 1}, on a batch of {len(inputs)}"
                    method = learner.config.method
                    raise InputError(f"the model of {method} cannot train in {where}: {reason}") from reason
        return torch.stack(losses)

    def _batches(self, piece: Piece, place: int, steps: range) -> list[tuple[Tensor, Tensor]]:
        task = self.tasks[place]
        first = piece.first_sample + steps.start * piece.batch_size
        chosen = self.orders[place][first : first + len(steps) * piece.batch_size]
        inputs = read_chosen(task.train.inputs, chosen, task.permutation, self.batches.dtype)
        targets = task.train.targets[chosen]
        return list(zip(inputs.split(piece.batch_size), targets.split(piece.batch_size), strict=True))

    def dynamics(self) -> Tensor:
        rows = []
        for learner in self.learners:
            seen = read_dynamics(learner.model)
            rows.append([float(seen[name]) if seen else float("nan") for name in DYNAMICS])
        return torch.tensor(rows, dtype=torch.float64, device=self.device)

    def finite(self) -> Tensor:
        return torch.tensor(
            [all(torch.isfinite(t).all() for t in learner.model.state_dict().values()) for learner in self.learners]
        )

    def consolidate(self, n: int, seen: Mapping[int, Task] | None = None) -> Tensor:
        settle_heads(self.learners)
        finite = torch.ones(len(self.learners), dtype=torch.bool)
        tasks = dict(zip(self.batches.trials, self.batches.tasks(n), strict=True)) if seen is None else seen

        def consolidate_some(part: Sequence[int]) -> None:
            for i in part:
                descent = self.descents[i]
                if isinstance(descent, RehearsalDescent):  # which never consolidates within a task
                    descent.end_task()
                finite[i] = consolidate_alone(self.learners[i], tasks[self.learners[i].trial], self.batches.dtype)

        own = [i for i, learner in enumerate(self.learners) if learner.learning and learner.trial in tasks]
        in_parallel(consolidate_some, own, self.device)
        self._note_times(n)
        return finite

    def _note_times(self, n: int) -> None:
        """How long each method that trains on all tasks so far took for this one, as the mean over its trials."""
        times: dict[str, list[float]] = {}
        for descent in self.descents:
            if isinstance(descent, RehearsalDescent) and descent.rehearsal.whole_stream:
                times.setdefault(descent.learner.config.method, []).append(descent.seconds)
        for method, seconds in times.items():
            mean = f"{sum(seconds) / len(seconds):.2f} s of training in task {n + 1}"
            self.notes.append(f"{method}: {mean} (mean of {len(seconds)} trials)")

    def evaluate(self, tasks: Sequence[int], learned: int = 0) -> Tensor:
        values = torch.full((len(self.learners), len(tasks)), float("nan"), dtype=torch.float64)

        def evaluate_some(part: Sequence[int]) -> None:
            for i in part:
                stream = self.batches.streams[self.place[self.learners[i].trial]]
                for column, n in enumerate(tasks):
                    among = candidates(stream, n, learned)
                    values[i, column] = accuracy(self.learners[i].model, stream[n], self.batches.dtype, among)

        in_parallel(evaluate_some, [i for i, learner in enumerate(self.learners) if learner.learning], self.device)
        return values


def in_parallel(work: Callable[[Sequence[int]], None], items: list[int], device: torch.device) -> None:
    """Do the work, on a CPU with the items divided among threads; with fewer items than threads, each has several.

    Args:
        work: called with some of the items.
        items: to be divided.
        device: other devices use one thread.

    Example:
        >>> in_parallel(lambda part: train(part), [0, 1, 2], torch.device("cpu"))
    """
    num_threads = torch.get_num_threads()
    num_workers = min(num_threads, len(items)) if device.type == "cpu" else 1
    if num_workers <= 1:
        work(items)
        return
    share = -(-len(items) // num_workers)
    parts = [items[start : start + share] for start in range(0, len(items), share)]
    with threads_each(num_threads // len(parts)), ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


@contextmanager
def threads_each(number: int) -> Iterator[None]:
    """Within the `with` block, products use this many threads, also in threads that start there.

    Args:
        number: of threads.

    Example:
        >>> with threads_each(1):
        ...     result = a @ b
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
