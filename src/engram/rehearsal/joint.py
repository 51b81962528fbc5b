"""Joint training: the upper bound, a network trained on all tasks so far at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.registry import REHEARSALS
from engram.common.tensor_file import tensors_under
from engram.rehearsal.rehearsal import (
    Batch,
    Draws,
    Memory,
    Moment,
    Rehearsal,
    State,
    masked,
    snapshot,
    tensors_of,
)


@REHEARSALS.register(
    "joint",
    settings={"start": "joint_start", "steps": "joint_steps"},
    words="repeats all samples of all tasks so far",
)
class Joint(Rehearsal):
    """Trains on all tasks so far. Each batch is drawn from all their samples, and each sample uses its task's outputs.

        loss = CE(x, y),    (x, y) of tasks 1 to n

    Args:
        start: "anew": from the initial weights at each task. "continue": from the weights of the task before.
        steps: "epochs": as many epochs over the samples of all tasks so far as a task has. "task": as many steps as
            the new task alone has.

    Example:
        >>> Joint(start="continue", steps="task").whole_stream
        True
    """

    whole_stream = True

    def __init__(self, *, start: str = "anew", steps: str = "epochs"):
        super().__init__()
        self.start = start
        self.steps = steps

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        begun = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
        return {"begun": begun, **(snapshot(tensors_of(model), "initial.") if self.start == "anew" else {})}

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs, batch.targets)
        allowed = moment.new if batch.tasks is None else moment.allowed[batch.tasks]
        return F.cross_entropy(masked(logits, allowed), batch.targets), logits

    def memory(self, state: State) -> Memory:
        """The initial weights; the samples of all tasks are the stream's own, and counted by the engine."""
        return Memory(0, sum(tensor.nbytes for tensor in tensors_under(state, "initial.").values()))
