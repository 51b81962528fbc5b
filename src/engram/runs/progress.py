"""Lines about the progress of a run, for its log and for the screen."""

from __future__ import annotations

import numpy as np

from engram.engine.progress import Progress
from engram.runs.result import Divergence


class ProgressLines:
    """Turns `Progress` into lines; each line is returned once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def task_lines(self, progress: Progress) -> list[str]:
        """When a task has ended, a line for each label that has learned it."""
        if not progress.task_ended:
            return []
        task, lines = progress.task, []
        for label, config in progress.configs.items():
            if task < config.num_tasks and (row := task_row(progress, label)):
                lines.append(f"{label}, task {task + 1}/{config.num_tasks}: {row}")
        return self._new(lines)

    def warnings(self, progress: Progress) -> list[str]:
        """The note, and trials that diverged."""
        lines = [progress.note] if progress.note else []
        for (label, trial), outcome in progress.outcomes.items():
            if outcome.diverged is not None:
                lines.append(f"{label}, {Divergence(trial, outcome.diverged.task, outcome.diverged.step)}")
        return self._new(lines)

    def _new(self, lines: list[str]) -> list[str]:
        new = [line for line in dict.fromkeys(lines) if line not in self.seen]
        self.seen.update(new)
        return new


def task_row(progress: Progress, label: str) -> str:
    """A label's accuracies after a task on each task so far, as means over the trials that have learned it; or ""."""
    task = progress.task
    learned = [
        outcome.rows[task][: task + 1]
        for (of, _), outcome in progress.outcomes.items()
        if of == label and len(outcome.rows) > task
    ]
    if not learned:
        return ""
    percents = " ".join(f"{100 * value:.1f}" for value in np.array(learned).mean(axis=0))
    return f"{percents} ({f'mean of {len(learned)} trials' if len(learned) > 1 else 'one trial'})"
