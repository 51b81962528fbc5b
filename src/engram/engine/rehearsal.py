"""What rehearsals need of an engine: random numbers of a step, the samples of all tasks so far, and their own steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.seeding import generator
from engram.data.batches import num_batches, read_inputs
from engram.data.samples import Stream
from engram.engine.learner import Learner
from engram.rehearsal import Batch, Moment, Rehearsal
from engram.rehearsal.rehearsal import Shapes, moment_of, tensors_of

AT_END = -1  # the epoch and step of what is drawn when a task has been learned


def draw(shapes: Shapes, seed: int, trial: int, task: int, epoch: int, step: int) -> dict[str, Tensor]:
    """Uniform numbers in [0, 1), float64 on the CPU, that depend on nothing else than these arguments.

    Args:
        shapes: of the tensors, by name.
        seed: of the experiment.
        trial: and task, epoch and step: the position.

    Example:
        >>> draw({"read": (64,)}, 0, trial=0, task=1, epoch=0, step=7)["read"].shape
        torch.Size([64])
    """
    if not shapes:
        return {}
    numbers = torch.rand(
        sum(map(math.prod, shapes.values())),
        generator=generator(seed, "rehearsal", trial, task, epoch, step),
        dtype=torch.float64,
    )
    parts = numbers.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def moment_in(stream: Stream, n: int, device: torch.device) -> Moment:
    """The moment of task n of a stream."""
    return moment_of([task.taught for task in stream], n, stream.num_classes, device)


def check_inputs(method: str, rehearsal: Rehearsal, stream: Stream) -> None:
    """Refuse inputs unlike those that a rehearsal makes up.

    Args:
        method: whose rehearsal, for the message.
        rehearsal: any.
        stream: what is to be learned.

    Example:
        >>> check_inputs("generative-replay", rehearsal, stream)
    """
    for task in stream if rehearsal.unit_inputs else ():
        if task.train.inputs.is_floating_point():
            low, high = (float(bound) for bound in task.train.inputs.aminmax())
            if not 0 <= low <= high <= 1:
                found = f"those of task {task.name!r} go from {low:.3g} to {high:.3g}"
                raise InputError(f"{method} needs inputs in [0, 1], as pixels are, and {found}")


class WholeStream:
    """The training samples of tasks 0 to n of a stream, in another order in each epoch: the batches of `joint`.

    In the first task the order is that of any other method.

    Args:
        stream: on its device.
        n: the last of the tasks.
        dtype: of the inputs that are read.

    Example:
        >>> whole = WholeStream(stream, 2, torch.float32)
        >>> batch = whole.read(whole.order(seed=0, trial=0, epoch=0)[:64])
    """

    def __init__(self, stream: Stream, n: int, dtype: torch.dtype):
        self.tasks = stream[: n + 1]
        self.dtype = dtype
        stores = {id(task.train.inputs): task.train for task in self.tasks}  # each once: tasks may share their samples
        starts = dict(zip(stores, itertools.accumulate([0, *(len(s.inputs) for s in stores.values())]), strict=False))
        self.starts = [starts[id(task.train.inputs)] for task in self.tasks]
        self.inputs = _joined([store.inputs for store in stores.values()])
        permutations = [task.permutation for task in self.tasks if task.permutation is not None]
        self.permutations = torch.stack(permutations) if permutations else None
        ends = torch.tensor([0, *itertools.accumulate(len(task.train) for task in self.tasks)])
        self.size = int(ends[-1])
        self.device = self.inputs.device
        self.task_of = torch.repeat_interleave(torch.arange(n + 1), ends.diff()).to(self.device)
        self.row_of = torch.cat([self._rows(k) for k in range(n + 1)]).to(self.device)
        self.target_of = torch.cat([task.train.labels for task in self.tasks])  # tasks may number classes differently

    def _rows(self, k: int) -> Tensor:
        samples = self.tasks[k].train
        rows = torch.arange(len(samples)) if samples.rows is None else samples.rows.cpu()
        return rows + self.starts[k]

    def order(self, seed: int, trial: int, epoch: int) -> Tensor:
        """(samples,): the order of an epoch, as numbers of samples, task after task."""
        n = len(self.tasks) - 1
        drawn = torch.randperm(self.size, generator=generator(seed, "order", trial, n, epoch))
        return drawn.to(self.device)

    def read(self, chosen: Tensor) -> Batch:
        """The samples of these numbers."""
        rows, tasks = self.row_of[chosen], self.task_of[chosen]
        inputs = read_inputs(self.inputs.index_select(0, rows), dtype=self.dtype)
        if self.permutations is not None:
            inputs = inputs.flatten(1).gather(1, self.permutations[tasks]).view_as(inputs)
        return Batch(inputs, self.target_of[chosen], tasks)

    def share(self, step: int, num_steps: int, batch_size: int) -> list[slice]:
        """Which batches of an epoch's order are read in one of its steps, so that all samples are read in all steps.

        Args:
            step: from 0.
            num_steps: that the new task has in an epoch.
            batch_size: of each batch but the last, which may be smaller.

        Example:
            >>> whole.share(1, 2, 64)  # of 256 samples
            [slice(128, 192, None), slice(192, 256, None)]
        """
        total = num_batches(self.size, batch_size)
        numbers = range(step * total // num_steps, (step + 1) * total // num_steps)
        return [slice(k * batch_size, min((k + 1) * batch_size, self.size)) for k in numbers]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@torch.no_grad()
def begin_task(learner: Learner, n: int) -> None:
    """Give a learner that starts each task anew its initial weights; once a task, also if a run is resumed in it.

    Args:
        learner: with a rehearsal.
        n: the number of the task.
    """
    begun = learner.remembered.get("begun")
    if begun is None or int(begun) > n:
        return
    begun.fill_(n + 1)
    own = dict((*learner.model.named_parameters(), *learner.model.named_buffers()))
    for name, tensor in own.items():
        initial = learner.remembered.get(f"initial.{name}")
        if initial is not None:
            tensor.copy_(initial)
            learner.optimizer_state = {}


def end_task(learner: Learner, still: nn.Module, stream: Stream, seed: int, moment: Moment) -> None:
    """Let a learner's rehearsal remember the task, which has been learned; what it remembers changes in place.

    Args:
        learner: with a rehearsal.
        still: a copy of its model in evaluation mode.
        stream: what it learns.
        seed: of the experiment.
        moment: of the task.
    """
    assert learner.rehearsal is not None
    shapes = learner.rehearsal.draws_at_end(stream.input_shape)
    drawn = draw(shapes, seed, learner.trial, moment.task, AT_END, AT_END)
    random = {name: numbers.to(moment.new.device) for name, numbers in drawn.items()}
    state = learner.rehearsal.end_task(still, tensors_of(learner.model), learner.remembered, random, moment)
    for name, tensor in state.items():
        learner.remembered[name].copy_(tensor)


def kept_by(learner: Learner, stream: Stream) -> tuple[int, int] | None:
    """What a learner's rehearsal keeps between tasks: samples of earlier tasks, and bytes; None without a rehearsal.

    Joint training keeps all samples before the last task, as the stream holds them.

    Args:
        learner: any.
        stream: what it learns.

    Example:
        >>> kept_by(learner, stream)  # 200 samples of 784 pixels, as floats, with their labels and tasks
        (200, 630400)
    """
    if learner.rehearsal is None:
        return None
    samples, size = learner.rehearsal.memory(learner.remembered)
    if learner.rehearsal.whole_stream:
        inputs = stream[0].train.inputs
        samples = sum(len(task.train) for task in stream[:-1])
        size += samples * (inputs[0].nbytes + stream[0].train.targets.element_size())
    return samples, size
