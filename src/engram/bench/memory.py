"""What a stack takes of memory: what each model holds, and the data once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engram.engine.learner import Learner


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    parameters: int
    traces: int
    importances: int
    anchors: int
    pulls: int  # gain and shift, by which a penalty acts in each step
    paths: int  # of SI: path, where it began, and the step before

    @property
    def total(self) -> int:
        return self.parameters + self.traces + self.importances + self.anchors + self.pulls + self.paths

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


NOTHING = Memory(0, 0, 0, 0, 0, 0)


def memory_of(learner: Learner) -> Memory:
    penalty = learner.penalty
    pull = penalty.pull(learner.config.learning_rate, learner.config.penalty_step)
    return Memory(
        parameters=_bytes(learner.model.parameters()),
        traces=_bytes(learner.model.buffers()),
        importances=_bytes(omega for term in penalty.terms for omega in term.importance.values()),
        anchors=_bytes(anchor for term in penalty.terms for anchor in term.anchor.values()),
        pulls=0 if pull is None else _bytes([*pull.gain.values(), *pull.shift.values()]),
        paths=_bytes(tensor for group in penalty.extra_groups for tensor in getattr(penalty, group).values()),
    )


def memory_of_stack(learners: Sequence[Learner]) -> Memory:
    return sum(map(memory_of, learners), NOTHING)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors, each counted once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
