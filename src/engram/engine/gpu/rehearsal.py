"""A section whose models rehearse: the functions of a rehearsal, written for one model, mapped over all."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from engram.common.errors import InputError
from engram.data.batches import LONGEST_PIECE, Piece, read_inputs
from engram.data.samples import Task
from engram.engine.cpu.rehearsal import RehearsalDescent
from engram.engine.gpu.layers import gradient_of
from engram.engine.gpu.section import Called, Section
from engram.engine.learner import Learner
from engram.engine.program import Batches, settle_heads
from engram.engine.rehearsal import draw, end_task, moment_in
from engram.rehearsal import Batch
from engram.rehearsal.agem import project
from engram.rehearsal.rehearsal import State

DRAWING_THREADS = 8
TRIAL_RATE = 0.01  # the learning rate of the steps that show whether a rehearsal can be mapped
TOLERANCE = 0.2  # of their norm: coarse, since products in TF32 change the sign of a few activations


class RehearsalSection(Section):
    """Learners of one architecture with the same rehearsal and the same settings of it.

    What they remember is rows of tensors (N, ...), of which each learner's own are views.

    Args:
        learners: trial after trial.
        kernels: the Triton kernels, if there are any; layers are mapped unchanged.
        batches: what they learn.

    Example:
        >>> section = RehearsalSection(learners, None, batches)
        >>> section.enter_task(0)
        >>> section.begin_task()
    """

    def __init__(self, learners: Sequence[Learner], kernels: ModuleType | None, batches: Batches):
        super().__init__(learners, kernels, patched=False)
        assert learners[0].rehearsal is not None
        self.rehearsal = learners[0].rehearsal
        self.batches = batches
        names = learners[0].remembered
        self.remembered: State = {n: torch.stack([learner.remembered[n] for learner in learners]) for n in names}
        for i, learner in enumerate(learners):
            learner.remembered = {name: tensor[i] for name, tensor in self.remembered.items()}
        self.numbers: dict[tuple[int, int], Tensor] = {}  # those of a piece, by batch size and number of trials
        self.drawn: dict[tuple[int, int], Tensor] = {}  # on the CPU, in pinned memory, which a GPU reads fastest
        self.storing = self.first = False

    def enter_task(self, n: int) -> None:
        """Prepare for task n."""
        self.n = n
        self.moment = moment_in(self.batches.streams[0], n, self.device)  # the same outputs in all trials

    def prepare_piece(self, piece: Piece, epoch: int) -> None:
        """Draw the random numbers of a piece: (steps, trials, all numbers of a step)."""
        shapes = self.rehearsal.draws(piece.batch_size)
        trials = self.batches.trials[piece.trials]
        self.storing = self.rehearsal.stores_in(epoch)
        count = sum(map(math.prod, shapes.values()))
        if count == 0:
            return
        key = (piece.batch_size, len(trials))
        if key not in self.numbers:  # a graph refers to it, so it stays the same tensor
            shape = (LONGEST_PIECE, len(trials), count)
            self.numbers[key] = torch.zeros(shape, dtype=torch.float64, device=self.device)
            self.drawn[key] = torch.empty(shape, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        drawn = self.drawn[key][: piece.num_steps]

        def draw_step(k: int) -> None:
            for row, trial in zip(drawn[k], trials, strict=True):
                own = draw(shapes, self.batches.seed, trial, self.n, epoch, piece.first_step + k)
                torch.cat([numbers.flatten() for numbers in own.values()], out=row)

        with ThreadPoolExecutor(DRAWING_THREADS) as pool:  # while the GPU computes the piece before
            list(pool.map(draw_step, range(piece.num_steps)))
        self.numbers[key][: piece.num_steps].copy_(drawn)

    def _random(self, batch_size: int, num_trials: int, slot: Tensor) -> State:
        """The random numbers of the step in this slot of the piece, (T, ...) by name."""
        shapes = self.rehearsal.draws(batch_size)
        if not shapes:
            return {}
        numbers = self.numbers[batch_size, num_trials].index_select(0, slot)[0]
        parts = numbers.split([math.prod(shape) for shape in shapes.values()], dim=1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def rehearse(
        self, inputs: Tensor, targets: Tensor, slot: Tensor, rows: slice, tasks: Tensor | None = None
    ) -> Tensor:
        """One step of the models in `rows`; returns their losses before it. As `step`, with random numbers.

        Args:
            inputs: (T, B, ...), a batch of each trial.
            targets: (T, B).
            slot: (1,), the number of the step in its piece.
            rows: whose.
            tasks: (T, B), the task of each sample; None if all are of the new task.
        """
        axes, rehearsal = (len(inputs), -1), self.rehearsal
        moment = replace(self.moment, first=self.first)
        random = self._random(targets.shape[1], len(inputs), slot)
        leaves, fixed, buffers = self.tensors_of_step(rows, axes)
        state = {name: tensor[rows].unflatten(0, axes) for name, tensor in self.remembered.items()}

        def loss(parameters: State, buffers: State, state: State, batch: State, random: State) -> tuple:
            call = Called(
                self.skeleton,
                lambda model: rehearsal.loss(model, self.still, state, Batch(**batch), random, moment),
            )
            tensors = {f"model.{name}": tensor for name, tensor in (*parameters.items(), *buffers.items())}
            return functional_call(call, tensors, ())

        def reference(parameters: State, buffers: State, state: State, random: State) -> Tensor:
            return rehearsal.reference_loss(self.still, {**parameters, **buffers}, state, random, moment)

        own = (0, 0, 0)
        batch = {"inputs": inputs, "targets": targets, **({} if tasks is None else {"tasks": tasks})}
        mapped = vmap(vmap(loss, in_dims=(*own, None, None), randomness="different"), randomness="different")
        losses, logits = mapped({**leaves, **fixed}, buffers, state, batch, random)
        if losses.requires_grad:
            gradients = self.gradients(losses, leaves)
            if rehearsal.projects and self.n > 0:
                of_reference = vmap(vmap(reference, in_dims=(*own, None)))
                against = self.gradients(of_reference({**leaves, **fixed}, buffers, state, random), leaves)
                flat = [
                    [gradient_of([g]) if isinstance(g, tuple) else g.flatten(0, 1) for g in some]
                    for some in (gradients, against)
                ]
                gradients = [g.unflatten(0, axes) for g in vmap(project)(*flat)]
            self.descend(leaves, gradients, rows)
        if self.storing:
            self._store(state, Batch(inputs, targets), logits.detach(), random, rows)
        return losses.detach().flatten()

    @torch.no_grad()
    def _store(self, state: State, batch: Batch, logits: Tensor, random: State, rows: slice) -> None:
        def store(state: State, z: Tensor, x: Tensor, y: Tensor, random: State) -> State:
            return self.rehearsal.store(state, Batch(x, y), z, random, self.n)

        written = vmap(vmap(store, in_dims=(0, 0, None, None, None)))(
            state, logits, batch.inputs, batch.targets, random
        )
        for name, tensor in written.items():
            self.remembered[name][rows].copy_(tensor.flatten(0, 1))

    def end_task(self) -> None:
        """Remember the task, which has been learned."""
        for learner in self.learners:
            if learner.learning:
                stream = self.batches.streams[self.batches.trials.index(learner.trial)]
                end_task(learner, self.still, stream, self.batches.seed, self.moment)


def _first_samples(task: Task, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    samples = task.train[slice(size)]
    return read_inputs(samples.inputs, task.permutation, dtype), samples.labels


def _step_alone(descents: Sequence[RehearsalDescent], n: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for descent, (inputs, targets) in zip(descents, pairs, strict=True):
        descent.learner.model.train()
        descent.enter_task(n)
        descent.begin_task(())
        descent.at(0, 0)
        descent.step(inputs, targets)
        settle_heads([descent.learner])
        descent.end_task()


def reason_against_rehearsal(group: Sequence[Learner], batches: Batches) -> str | None:
    """Why models with a rehearsal cannot be trained as one, tried on copies; None if they can.

    Copies take a step of the first task and one of the second, stacked and alone.

    Args:
        group: learners of one architecture and rehearsal, whose models can be mapped.
        batches: what they learn.
    """
    assert group[0].rehearsal is not None
    if group[0].rehearsal.whole_stream:
        different = any(len(set(batches.sizes(n))) > 1 for n in range(len(batches.streams[0])))
        return "its trials have different numbers of samples" if different else None
    tried = [group[0], group[-1]] if group[0].trial != group[-1].trial else [group[0]]
    trials = [learner.trial for learner in tried]
    streams = [batches.streams[batches.trials.index(trial)] for trial in trials]
    some = Batches(trials, streams, batches.seed, batches.dtype)
    # Plain SGD, since Adam turns the smallest difference of two gradients into a step of full size.
    plain = {"learning_rate": TRIAL_RATE, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    alone, stacked = (
        [
            replace(copy.deepcopy(learner), config=learner.config.replace(**plain), optimizer_state={})
            for learner in tried
        ]
        for _ in range(2)
    )
    size = min(4, *(len(task.train) for stream in streams for task in stream[:2]))
    piece = Piece(slice(0, len(tried)), 0, 1, 0, size)
    try:
        section = RehearsalSection(stacked, None, some)
        descents = [
            RehearsalDescent(learner, stream, some.seed, some.dtype)
            for learner, stream in zip(alone, streams, strict=True)
        ]
        for n in range(min(2, len(streams[0]))):
            pairs = [_first_samples(stream[n], size, some.dtype) for stream in streams]
            _step_alone(descents, n, pairs)
            section.enter_task(n)
            section.begin_task()
            section.prepare_piece(piece, 0)
            section.first = n == 0
            inputs, targets = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
            section.rehearse(inputs, targets, torch.zeros(1, dtype=torch.int64, device=inputs.device), slice(0, None))
            settle_heads(stacked)
            section.end_task()
    except torch.cuda.OutOfMemoryError:  # which says nothing about the rehearsal
        raise
    except (RuntimeError, InputError, NotImplementedError, TypeError, ValueError) as reason:
        return f"PyTorch cannot map the rehearsal ({str(reason).strip().splitlines()[0]})"
    for before, one, row in zip(tried, alone, stacked, strict=True):
        start, mapped = (dict(learner.model.named_parameters()) for learner in (before, row))
        for name, theta in one.model.named_parameters():
            step, difference = ((theta - other).detach() for other in (start[name], mapped[name]))
            if float(difference.norm()) > TOLERANCE * float(step.norm()) + 1e-5:
                return f"{name!r} takes another step when the rehearsal is mapped"
    return None
