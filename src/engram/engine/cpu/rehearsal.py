"""One step of one model with a rehearsal."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from engram.data.batches import num_batches
from engram.data.samples import Stream
from engram.engine.learner import Learner
from engram.engine.rehearsal import WholeStream, begin_task, draw, end_task, moment_in
from engram.engine.weight_step import prepare_state
from engram.rehearsal import Batch
from engram.rehearsal.agem import project
from engram.rehearsal.rehearsal import Draws, tensors_of


class RehearsalDescent:
    """Steps by the loss of a learner's rehearsal.

    Args:
        learner: with a rehearsal.
        stream: what it learns.
        seed: of the experiment.
        dtype: of the inputs.

    Example:
        >>> descent = RehearsalDescent(learner, stream, seed=0, dtype=torch.float32)
        >>> descent.enter_task(0)
        >>> descent.at(epoch=0, step=0)
        >>> loss = descent.step(inputs, targets)
    """

    def __init__(self, learner: Learner, stream: Stream, seed: int, dtype: torch.dtype):
        assert learner.rehearsal is not None
        self.learner = learner
        self.rehearsal = learner.rehearsal
        self.stream = stream
        self.seed = seed
        self.dtype = dtype
        self.still = copy.deepcopy(learner.model).eval()
        self.device = next(learner.model.parameters()).device
        self.seconds = 0.0  # of training, in this task
        self.epoch_drawn: int | None = None

    def enter_task(self, n: int) -> None:
        """Prepare for task n."""
        self.n = n
        self.seconds = 0.0
        self.epoch_drawn = None
        self.moment = moment_in(self.stream, n, self.device)
        self.whole = WholeStream(self.stream, n, self.dtype) if self.rehearsal.whole_stream else None
        begin_task(self.learner, n)

    def begin_task(self, classes: Sequence[int]) -> None:
        self.trained = {name: p for name, p in self.learner.model.named_parameters() if p.requires_grad}
        self.optimizer = prepare_state(self.learner, self.trained)

    def at(self, epoch: int, step: int) -> None:
        """Tell which step of the task is next."""
        self.epoch, self.number = epoch, step
        if self.whole is not None and self.epoch_drawn != epoch:
            self.order = self.whole.order(self.seed, self.learner.trial, epoch)
            self.epoch_drawn = epoch

    @contextmanager
    def steps(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A step; `joint` takes one for each of its batches, and the mean of their losses is returned."""
        drawn = draw(self.rehearsal.draws(len(targets)), self.seed, self.learner.trial, self.n, self.epoch, self.number)
        random = {name: numbers.to(self.device) for name, numbers in drawn.items()}
        losses = [self._step(batch, random) for batch in self._batches(Batch(inputs, targets))]
        return torch.stack(losses).mean()

    def _batches(self, new: Batch) -> Iterator[Batch]:
        if self.whole is None:
            yield new
            return
        size = self.learner.config.batch_size
        parts = [slice(self.number * size, self.number * size + len(new.targets))]
        if self.learner.config.joint_steps == "epochs":
            parts = self.whole.share(self.number, num_batches(len(self.stream[self.n].train), size), size)
        for part in parts:
            yield self.whole.read(self.order[part])

    def _step(self, batch: Batch, random: Draws) -> Tensor:
        learner, rehearsal, state = self.learner, self.rehearsal, self.learner.remembered
        moment = replace(self.moment, first=(self.n, self.epoch, self.number) == (0, 0, 0))
        loss, logits = rehearsal.loss(learner.model, self.still, state, batch, random, moment)
        if loss.requires_grad:
            gradients = _gradients(loss, self.trained)
            if rehearsal.projects and self.n > 0:
                tensors = {**tensors_of(learner.model), **self.trained}
                reference = rehearsal.reference_loss(self.still, tensors, state, random, moment)
                gradients = project(gradients, _gradients(reference, self.trained))
            self._move(gradients)
        if rehearsal.stores_in(self.epoch):
            learner.remembered.update(rehearsal.store(state, batch, logits.detach(), random, self.n))
        return loss.detach()

    @torch.no_grad()
    def _move(self, gradients: Sequence[Tensor]) -> None:
        for (name, theta), gradient in zip(self.trained.items(), gradients, strict=True):
            slots = self.optimizer.slots_of(name, self.learner.optimizer_state)
            self.optimizer.step(theta, gradient, slots)

    def end_task(self) -> None:
        """Remember the task, which has been learned."""
        end_task(self.learner, self.still, self.stream, self.seed, self.moment)


def _gradients(loss: Tensor, trained: dict[str, torch.nn.Parameter]) -> list[Tensor]:
    """One for each parameter, zeros where the loss does not depend on it."""
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), found, strict=True)]
