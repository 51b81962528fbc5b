"""Progress: the one event that travels from the training loop to the screen, the log and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engram.config.settings import Config
from engram.engine.learner import Outcome

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
        >>> engram.run(config, report=lambda progress: print(f"{progress.done:.0%}"))
    """

    done: float
    task: int
    configs: Mapping[str, Config] = field(default_factory=dict)
    outcomes: Mapping[Key, Outcome] = field(default_factory=dict)
    task_ended: bool = False
    note: str | None = None


Report = Callable[[Progress], None]
StopAsked = Callable[[], bool]  # returns whether to save everything and stop


def no_report(progress: Progress) -> None:
    """Report to nobody."""


def never_stop() -> bool:
    """Train to the end."""
    return False
