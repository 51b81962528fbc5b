"""Joint training of many models as one: batches are drawn from all tasks so far, and a step may have several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from engram.data.batches import Piece, num_batches, read_many
from engram.engine.gpu.program import Mapped
from engram.engine.learner import Learner
from engram.engine.program import Batches
from engram.engine.rehearsal import WholeStream, begin_task


class JointMapped(Mapped):
    """Trains learners whose rehearsal is given the whole stream. All trials have as many samples in each task.

    Args:
        groups: the learners by architecture, each in the order of their trials.
        batches: what they learn.
        kernels: the Triton kernels, if there are any.

    Example:
        >>> program = JointMapped([learners], batches, None)
    """

    def __init__(self, groups: Sequence[Sequence[Learner]], batches: Batches, kernels: ModuleType | None):
        super().__init__(groups, batches, kernels)
        self.seconds = 0.0
        self.every = {learner.config.joint_steps for learner in self.learners} == {"epochs"}

    def begin_task(self, n: int) -> None:
        for learner in self.learners:
            begin_task(learner, n)
        super().begin_task(n)
        self.whole = [WholeStream(stream, n, self.batches.dtype) for stream in self.batches.streams]
        self.row_of, self.task_of, self.target_of = (
            torch.stack([getattr(whole, name) for whole in self.whole]) for name in ("row_of", "task_of", "target_of")
        )
        found = [whole.permutations for whole in self.whole if whole.permutations is not None]
        self.all_permutations = torch.stack(found) if found else None  # (T, tasks, pixels)
        self.whole_order = torch.zeros_like(self.row_of)
        self.seconds = 0.0

    def begin_epoch(self, n: int, epoch: int) -> None:
        self.now = (n, epoch)
        for row, whole, trial in zip(self.whole_order, self.whole, self.batches.trials, strict=True):
            row.copy_(whole.order(self.batches.seed, trial, epoch))

    def train(self, piece: Piece) -> Tensor:
        """The steps of a piece; each takes one or more batches, and its loss is their mean."""
        start = time.perf_counter()
        losses = torch.zeros(len(self.learners), piece.num_steps, dtype=self.batches.dtype, device=self.device)
        for k, step in enumerate(range(piece.first_step, piece.end)):
            parts = self._slices(piece, step)
            for part in parts:
                self._take(part)
                losses[:, k] += self.losses[:, 0] / len(parts)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return losses

    def _slices(self, piece: Piece, step: int) -> list[slice]:
        """The batches of one step, as slices of the epoch's order."""
        size = self.learners[0].config.batch_size
        if not self.every:
            return [slice(step * size, step * size + piece.batch_size)]
        return self.whole[0].share(step, num_batches(self.batches.sizes(self.now[0])[0], size), size)

    def _take(self, part: slice) -> None:
        """One step of all models on one batch; its losses are in the first column."""
        key = (0, len(self.batches.trials), part.stop - part.start)
        self.cursor.fill_(part.start)
        self.slot.fill_(0)
        graph = (*key, False)
        if self.captures and graph in self.graphs:
            self.graphs[graph].replay()
            return
        self._step(*key)  # a real step, which also prepares what a capture needs
        if self.captures:
            self._capture(graph)

    def _batch(self, first: int, last: int, batch_size: int) -> tuple[Tensor, Tensor]:
        numbers = self.cursor + torch.arange(batch_size, device=self.device)
        chosen = self.whole_order.index_select(1, numbers)  # (T, B)
        rows, targets = self.row_of.gather(1, chosen), self.target_of.gather(1, chosen)
        self.tasks_of_batch = self.task_of.gather(1, chosen)
        inputs = read_many(self.whole[0].inputs, rows, None, self.batches.dtype)
        if self.all_permutations is not None:
            places = torch.stack([own[k] for own, k in zip(self.all_permutations, self.tasks_of_batch, strict=True)])
            inputs = inputs.flatten(2).gather(2, places).view_as(inputs)
        return inputs, targets

    def consolidate(self, n: int, *seen: object) -> Tensor:
        method = self.learners[0].config.method
        number = len(self.learners)
        self.notes.append(f"{method}: {self.seconds:.2f} s of training in task {n + 1} ({number} models together)")
        return super().consolidate(n)
