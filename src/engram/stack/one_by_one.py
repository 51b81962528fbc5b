"""Models one after another: the program for a CPU, and for models that cannot be mapped.

Batching small products gains a CPU nothing: it is as busy with one network as with eighty. So each model takes its
steps as a module of its own, exactly as it would alone, and where there are several, each thread has its own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from engram.data.batches import Piece, batches_of, read_inputs
from engram.errors import NotFiniteError
from engram.evaluate import accuracy
from engram.learner import DYNAMICS, Learner, read_dynamics
from engram.stack.descent import ContractDescent, Descent, FactoredDescent, factored_layers, own_method
from engram.stack.program import Batches

GATHERED = 16  # batches that are read at once for all models of a trial, few enough to stay in a cache
IMPORTANCE_BATCH = 500  # samples at a time; their number does not change the importances


class OneByOne:
    def __init__(self, learners: Sequence[Learner], batches: Batches):
        self.learners = list(learners)
        self.batches = batches
        self.place = {trial: place for place, trial in enumerate(batches.trials)}
        example = batches.tasks(0)[0].train[slice(2)]
        inputs = read_inputs(example.inputs, dtype=batches.dtype)
        self.descents = [_descent(learner, inputs, example.targets) for learner in self.learners]
        self.orders: list[Tensor] = []
        self.notes: list[str] = []

    def begin_task(self, n: int) -> None:
        self.tasks = self.batches.tasks(n)
        for learner, descent in zip(self.learners, self.descents, strict=True):
            learner.model.train()
            descent.begin_task(self.tasks[self.place[learner.trial]].classes)

    def begin_epoch(self, n: int, epoch: int) -> None:
        device = self.tasks[0].train.inputs.device
        self.orders = [order.to(device) for order in self.batches.orders(n, epoch)]

    def train(self, piece: Piece) -> Tensor:
        places = range(len(self.batches.trials))[piece.trials]
        chosen = [i for i, learner in enumerate(self.learners) if self.place[learner.trial] in places]
        device = self.tasks[0].train.inputs.device
        losses = torch.full((len(chosen), piece.num_steps), float("nan"), device=device, dtype=self.batches.dtype)

        def train_some(part: Sequence[int]) -> None:
            """Rows `part` of `losses`, whose learners are of one or of several trials."""
            for place in places:
                own = [row for row in part if self.place[self.learners[chosen[row]].trial] == place]
                self._train_trial(piece, place, [chosen[row] for row in own], losses, own)

        in_parallel(train_some, [row for row, i in enumerate(chosen) if self.learners[i].learning], device)
        return losses

    def _train_trial(self, piece: Piece, place: int, own: list[int], losses: Tensor, rows: list[int]) -> None:
        for start in range(0, piece.num_steps, GATHERED) if own else ():
            read = self._batches(piece, place, range(start, min(start + GATHERED, piece.num_steps)))
            for i, row in zip(own, rows, strict=True):
                with self.descents[i].steps():
                    taken = [self.descents[i].step(inputs, targets) for inputs, targets in read]
                losses[row, start : start + len(taken)] = torch.stack(taken)

    def _batches(self, piece: Piece, place: int, steps: range) -> list[tuple[Tensor, Tensor]]:
        task = self.tasks[place]
        first = piece.first_sample + steps.start * piece.batch_size
        chosen = self.orders[place][first : first + len(steps) * piece.batch_size]
        inputs = read_inputs(task.train.inputs.index_select(0, chosen), task.permutation, self.batches.dtype)
        targets = task.train.targets[chosen]
        return list(zip(inputs.split(piece.batch_size), targets.split(piece.batch_size), strict=True))

    def dynamics(self) -> Tensor:
        rows = []
        for learner in self.learners:
            seen = read_dynamics(learner.model)
            rows.append([float(seen[name]) if seen else float("nan") for name in DYNAMICS])
        return torch.tensor(rows, dtype=torch.float64)

    def finite(self) -> Tensor:
        return torch.tensor(
            [all(torch.isfinite(t).all() for t in learner.model.state_dict().values()) for learner in self.learners]
        )

    def consolidate(self, n: int) -> Tensor:
        finite = torch.ones(len(self.learners), dtype=torch.bool)
        tasks = self.batches.tasks(n)

        def consolidate_some(part: Sequence[int]) -> None:
            for i in part:
                learner, task = self.learners[i], tasks[self.place[self.learners[i].trial]]
                batches = batches_of(
                    task.train, IMPORTANCE_BATCH, permutation=task.permutation, dtype=self.batches.dtype
                )
                try:
                    learner.penalty.consolidate(batches, task.classes)
                except NotFiniteError:  # importances that overflow though the weights do not
                    finite[i] = False

        in_parallel(consolidate_some, [i for i, learner in enumerate(self.learners) if learner.learning])
        return finite

    def evaluate(self, tasks: Sequence[int]) -> Tensor:
        values = torch.full((len(self.learners), len(tasks)), float("nan"), dtype=torch.float64)

        def evaluate_some(part: Sequence[int]) -> None:
            for i in part:
                stream = self.batches.streams[self.place[self.learners[i].trial]]
                for column, n in enumerate(tasks):
                    values[i, column] = accuracy(self.learners[i].model, stream[n], self.batches.dtype)

        in_parallel(evaluate_some, [i for i, learner in enumerate(self.learners) if learner.learning])
        return values


def _descent(learner: Learner, inputs: Tensor, targets: Tensor) -> Descent:
    if own_method(learner.penalty) is not None:
        return ContractDescent(learner)
    return FactoredDescent(learner, factored_layers(learner.model, inputs, targets))


def in_parallel(work: Callable[[Sequence[int]], None], items: list[int], device: torch.device | None = None) -> None:
    """Do the work on some of the items in each of several threads; a single item has all threads to itself."""
    num_threads = torch.get_num_threads()
    on_cpu = device is None or device.type == "cpu"
    if not on_cpu or num_threads == 1 or len(items) < num_threads:
        work(items)
        return
    share = -(-len(items) // num_threads)
    parts = [items[start : start + share] for start in range(0, len(items), share)]
    with single_threaded(), ThreadPoolExecutor(len(parts)) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread for each product; threads that start within it keep to that."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
