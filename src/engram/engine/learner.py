"""A learner: one model of one method in one trial, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from engram.common.errors import DivergedError
from engram.config.settings import Config
from engram.penalties import Penalty


@dataclass(frozen=True)
class Record:
    """What is recorded about a network at one training step; the last three are NaN without a trace."""

    trial: int
    task: int
    epoch: int
    step: int  # in the task, from 0
    loss: float
    eta: float = float("nan")
    hebb_norm: float = float("nan")
    alpha_norm: float = float("nan")


@dataclass
class Outcome:
    """What one trial leaves: the rows of the accuracy matrix so far, and the records made during training."""

    untrained: list[float] = field(default_factory=list)  # accuracy on each task before learning anything
    rows: list[list[float]] = field(default_factory=list)  # after each task, on all tasks up to the next one
    records: list[Record] = field(default_factory=list)
    diverged: DivergedError | None = None


@dataclass
class Learner:
    """A model with its penalty and its settings, at some step of a stream."""

    config: Config
    trial: int
    model: nn.Module
    penalty: Penalty
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def learning(self) -> bool:
        return self.outcome.diverged is None


DYNAMICS = ("eta", "hebb_norm", "alpha_norm")


def read_dynamics(model: nn.Module) -> dict[str, Tensor]:
    """η, ‖Hebb‖ and ‖α‖ of the model's plastic layer; an empty dict if it has none.

    Args:
        model: any.

    Example:
        >>> read_dynamics(Network(features, engram.DHPSoftmax(8, 3)))["eta"]
        tensor(0.0010)
    """
    for module in model.modules():
        dynamics = getattr(module, "dynamics", None)
        if callable(dynamics):
            return dict(dynamics())
    return {}
