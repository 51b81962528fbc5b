"""The contract of every rehearsal: settings in the object, a memory that is a dict of tensors, pure functions.

Everything is written for one model, so that `torch.func.vmap` can call it for a stack. Random numbers are arguments:
the engine draws them from (seed, trial, task, epoch, step), so that a resumed run is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engram.common.tensor_file import tensors_under

State = dict[str, Tensor]
Draws = Mapping[str, Tensor]  # uniform numbers in [0, 1), float64
Shapes = dict[str, tuple[int, ...]]


class Batch(NamedTuple):
    """Samples of one step; `tasks` has the number of each one's task, and is None if all are of the new task."""

    inputs: Tensor
    targets: Tensor
    tasks: Tensor | None = None


@dataclass(frozen=True)
class Moment:
    """What is known at a step, apart from the data: the task's number, and which outputs take part.

    Args:
        task: n, the number of tasks before this one.
        new: (C,), the outputs that take part for the new task's samples.
        allowed: (tasks, C), those that take part now for a sample of each task.
        groups: for the distinct kinds of earlier tasks, the outputs that take part now, and those that took part when
            the task before this one was learned: the outputs of which a teacher of that time knows something.
        first: whether this is the first step of all, when nothing is stored yet.
    """

    task: int
    new: Tensor
    allowed: Tensor
    groups: tuple[tuple[Tensor, Tensor], ...]
    first: bool = False


def moment_of(taught: Sequence[Sequence[int]], n: int, num_classes: int, device: torch.device) -> Moment:
    """The moment of task n, from the outputs that take part in the training of each task.

    A sample of an earlier task k uses the outputs of the new task n if those include its own, as where the outputs
    of all classes so far take part, and its own outputs otherwise, as where each task has its own.

    Args:
        taught: for each task, the outputs that take part in its training.
        n: the number of the task, from 0.
        num_classes: C.
        device: of the tensors.

    Example:
        >>> moment_of([(0, 1), (2, 3)], 1, 4, torch.device("cpu")).allowed.int().tolist()
        [[1, 1, 0, 0], [0, 0, 1, 1]]
    """

    def allowed(k: int, now: int) -> tuple[int, ...]:
        return tuple(taught[now]) if set(taught[k]) <= set(taught[now]) else tuple(taught[k])

    def mask(classes: Sequence[int]) -> Tensor:
        row = torch.zeros(num_classes, dtype=torch.bool)
        row[list(classes)] = True
        return row.to(device)

    pairs = dict.fromkeys((allowed(k, n), allowed(k, n - 1)) for k in range(n))
    rows = [mask(allowed(k, n) if k < n else taught[n]) for k in range(len(taught))]
    groups = tuple((mask(now), mask(then)) for now, then in pairs)
    return Moment(n, mask(taught[n]), torch.stack(rows), groups)


class Memory(NamedTuple):
    """What a method keeps between tasks: stored samples of earlier tasks, and bytes of everything it keeps."""

    samples: int
    bytes: int


class Rehearsal:
    """A method that repeats something of earlier tasks in every step. This class repeats nothing.

    A subclass defines what it needs of the functions below. Its settings are attributes; it keeps nothing else.

    Args:
        weight: the share w of the rehearsed part in the loss,  (1 − w) new + w rehearsed; None for the method's own.

    Example:
        >>> class Twice(Rehearsal):
        ...     def loss(self, model, still, state, batch, random, moment):
        ...         loss, logits = super().loss(model, still, state, batch, random, moment)
        ...         return 2 * loss, logits
    """

    stores: ClassVar[bool] = False  # whether `store` is called after each step
    projects: ClassVar[bool] = False  # whether the gradient is projected against that of `reference_loss`
    whole_stream: ClassVar[bool] = False  # whether batches are drawn from all tasks so far
    unit_inputs: ClassVar[bool] = False  # whether inputs must be in [0, 1], as pixels are

    def __init__(self, *, weight: float | None = None):
        self.weight = weight

    def attach(self, model: nn.Module, input_shape: Sequence[int]) -> None:
        """Add modules that train with the model, such as a generator.

        Args:
            model: new, on the CPU.
            input_shape: of one sample.
        """

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        """What is remembered before the first step; a state always has the same names, shapes and types.

        Args:
            model: on its device.
            input_shape: of one sample.
            num_classes: C.
        """
        return {}

    def draws(self, batch_size: int) -> Shapes:
        """The shapes of the uniform numbers that a step needs, by name.

        Args:
            batch_size: the number of new samples.
        """
        return {}

    def draws_at_end(self, input_shape: Sequence[int]) -> Shapes:
        """The shapes of the uniform numbers that the end of a task needs, by name.

        Args:
            input_shape: of one sample.
        """
        return {}

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        """The loss of a step, and the logits (B, C) of the new samples.

        Args:
            model: in training mode.
            still: a copy in evaluation mode, to be called with other tensors, as in `teacher_logits`.
            state: what is remembered.
            batch: the new samples.
            random: as `draws` asks for.
            moment: the task, and which outputs take part.
        """
        logits = model(batch.inputs, batch.targets)
        return F.cross_entropy(masked(logits, moment.new), batch.targets), logits

    def reference_loss(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> Tensor:
        """The loss on earlier tasks that a step must not increase, for a method that projects the gradient.

        Args:
            still: the model in evaluation mode, to be called with `tensors`.
            tensors: the model's parameters and buffers by name.
            state: what is remembered.
            random: as `draws` asks for.
            moment: the task, and which outputs take part.
        """
        raise NotImplementedError

    def stores_in(self, epoch: int) -> bool:
        """Whether samples of this epoch are offered to `store`: by default those of the first, so each once.

        Args:
            epoch: of the task, from 0.
        """
        return self.stores and epoch == 0

    def store(self, state: State, batch: Batch, logits: Tensor, random: Draws, n: int) -> State:
        """Remember new samples.

        Args:
            state: what is remembered.
            batch: the new samples.
            logits: theirs, before the step.
            random: as `draws` asks for.
            n: the number of the task.
        """
        return state

    def end_task(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> State:
        """What is remembered when a task has been learned.

        Args:
            still: the model in evaluation mode, to be called with `tensors`.
            tensors: the model's parameters and buffers by name.
            state: what is remembered.
            random: as `draws_at_end` asks for.
            moment: of the task just learned.
        """
        return state

    def memory(self, state: State) -> Memory:
        """How much is kept between tasks.

        Args:
            state: what is remembered.
        """
        return Memory(0, sum(tensor.nbytes for tensor in state.values()))

    def share(self, n: int) -> float:
        """w, the share of the rehearsed part: by default all tasks have the same,  w = 1 − 1/(n + 1).

        Args:
            n: the number of tasks before this one.

        Example:
            >>> Rehearsal().share(1)
            0.5
        """
        return 1 - 1 / (n + 1) if self.weight is None else self.weight

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name: models of a stack that are computed as one have the same."""
        return dict(vars(self))


# --- what several methods use


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits with −∞ where an output takes no part; `allowed` is (C,) or (B, C)."""
    return logits.masked_fill(~allowed, -math.inf)


def distillation(logits: Tensor, teacher: Tensor, group: tuple[Tensor, Tensor], temperature: float) -> Tensor:
    """Cross-entropy between the softened outputs of the teacher and of the model (Li & Hoiem 2017, Hinton 2015):

        −T² mean_b Σ_c q_bc log p_bc,    q = softmax(teacher / T),  p = softmax(logits / T)

    An output that the teacher did not know has q = 0.

    Args:
        logits: (B, C).
        teacher: (B, C), constants.
        group: the outputs of p and those of q.
        temperature: T.
    """
    now, then = group
    log_p = F.log_softmax(masked(logits, now) / temperature, dim=1)
    q = F.softmax(masked(teacher, then) / temperature, dim=1)
    # 0 · log 0 = 0
    return -(temperature**2) * torch.where(then & now, q * log_p.masked_fill(~now, 0), 0).sum(dim=1).mean()


def mean_distillation(logits: Tensor, teacher: Tensor, moment: Moment, temperature: float) -> Tensor:
    """The mean of `distillation` over the kinds of earlier tasks: where each has its own outputs, one each."""
    parts = [distillation(logits, teacher, group, temperature) for group in moment.groups]
    return torch.stack(parts).mean()


def snapshot(tensors: Mapping[str, Tensor], prefix: str = "teacher.") -> State:
    """Copies of a model's tensors, named as in a state."""
    return {prefix + name: tensor.detach().clone() for name, tensor in tensors.items()}


def tensors_of(model: nn.Module) -> State:
    """A model's parameters and buffers by name, detached."""
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def teacher_logits(still: nn.Module, state: State, inputs: Tensor) -> Tensor:
    """The logits (B, C) of the model of the time of the snapshot."""
    with torch.no_grad():
        return functional_call(still, tensors_under(state, "teacher."), (inputs,))
