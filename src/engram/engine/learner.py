"""A learner: one model of one method in one trial; what it leaves behind; and `Progress`, the event that reports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from engram.common.errors import Divergence, shortened
from engram.config.settings import Config
from engram.penalties import Penalty
from engram.rehearsal import Rehearsal


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
    diverged: Divergence | None = None
    kept: tuple[int, int] | None = None  # by a rehearsal between tasks: samples, and bytes of everything


def check_kept(kept: Any) -> tuple[int, int] | None:
    """What a file says about `Outcome.kept`, if it can be that."""
    if kept is None:
        return None
    samples, size = kept
    if not all(type(number) is int and number >= 0 for number in (samples, size)):
        raise ValueError(f"{shortened(kept)} is not a number of samples and of bytes")
    return samples, size


@dataclass
class Learner:
    """A model with its penalty or rehearsal and its settings, at some step of a stream."""

    config: Config
    trial: int
    model: nn.Module
    penalty: Penalty
    outcome: Outcome = field(default_factory=Outcome)
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)  # see engine/optimizer.py; {} before a step
    rehearsal: Rehearsal | None = None
    remembered: dict[str, Tensor] = field(default_factory=dict)  # by the rehearsal
    failed: str | None = None  # why its head cannot be read, until the outcome says it

    @property
    def learning(self) -> bool:
        return self.outcome.diverged is None and self.failed is None


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


Key = tuple[str, int]  # the label of a config, and a trial
Outcomes = dict[Key, Outcome]  # for all trials that have started


@dataclass(frozen=True)
class Progress:
    """How far training has come; reported several times an epoch and after each task.

    Args:
        done: the fraction of the whole that is done, in [0, 1].
        task: the task that is being learned, or that has just ended.
        configs: what is being trained, by label.
        outcomes: of all trials that have started, by label and trial. They are live: they grow as training continues.
        task_ended: whether some models have just ended the task and been evaluated.
        note: something worth a line in a log.

    Example:
        >>> seen = []
        >>> result = engram.run(config, report=lambda progress: seen.append(progress.done))
        >>> seen[-1]
        1.0
    """

    done: float
    task: int
    configs: Mapping[str, Config] = field(default_factory=dict, repr=False)
    outcomes: Mapping[Key, Outcome] = field(default_factory=dict, repr=False)
    task_ended: bool = False
    note: str | None = None


Report = Callable[[Progress], None]
StopAsked = Callable[[], bool]  # returns whether to save everything and stop


def no_report(progress: Progress) -> None:
    """Report to nobody."""


def never_stop() -> bool:
    """Train to the end."""
    return False
