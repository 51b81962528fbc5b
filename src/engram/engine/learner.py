"""A learner: one model of one method in one trial, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from engram.common.errors import DivergedError
from engram.config.settings import Config
from engram.penalties import Penalty


@dataclass(frozen=True)
class Record:
    """One look at a network in training; the last three are NaN without a trace."""

    trial: int
    task: int
    epoch: int
    step: int  # of the task, from 0
    loss: float
    eta: float = float("nan")
    hebb_norm: float = float("nan")
    alpha_norm: float = float("nan")


@dataclass
class Outcome:
    """What one trial leaves: rows of the accuracy matrix as far as it came, and the records on the way."""

    untrained: list[float] = field(default_factory=list)  # accuracy on each task before learning anything
    rows: list[list[float]] = field(default_factory=list)  # after each task, on all tasks up to the next one
    records: list[Record] = field(default_factory=list)
    diverged: DivergedError | None = None


@dataclass
class Learner:
    """A model with its penalty and its settings, somewhere on its way through a stream."""

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
    """η, ‖Hebb‖ and ‖α‖ of the model's plastic layer, if it has one."""
    for module in model.modules():
        dynamics = getattr(module, "dynamics", None)
        if callable(dynamics):
            return dict(dynamics())
    return {}
