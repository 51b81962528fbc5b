"""What is new in a run, in words: lines for its log and for a person who watches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engram.runs.result import Result

if TYPE_CHECKING:
    from engram.runs.experiment import Progress


class News:
    """Tells each thing once, as it comes up in one `Progress` or another."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def lines(self, progress: Progress) -> list[str]:
        """A line for each method that has learned the task, the mean accuracies over its trials."""
        lines = []
        for result in progress.results or ():
            row = task_row(result, progress.task)
            if row:
                lines.append(f"{result.config.method}, task {progress.task + 1}/{result.config.num_tasks}: {row}")
        return self._new(lines)

    def warnings(self, progress: Progress) -> list[str]:
        """Notes, and trials that diverged."""
        notes = [progress.note] if progress.note else []
        lost = [f"{result.config.method}, {lost}" for result in progress.results or () for lost in result.diverged]
        return self._new(notes + lost)

    def _new(self, lines: list[str]) -> list[str]:
        new = [line for line in dict.fromkeys(lines) if line not in self.told]
        self.told.update(new)
        return new


def task_row(result: Result, task: int) -> str:
    """The accuracies after a task, on each task so far, as means over the trials that have learned it; or nothing."""
    learned = result.accuracy[~np.isnan(result.accuracy[:, task, task]), task, : task + 1]
    if len(learned) == 0:
        return ""
    percents = " ".join(f"{100 * value:.1f}" for value in learned.mean(axis=0))
    return f"{percents} ({f'mean of {len(learned)} trials' if len(learned) > 1 else 'one trial'})"
