"""The engine contract, and the engine that trains stacks in this process, from their checkpoints if there are any."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from engram.common.errors import InputError, Stopped, reason
from engram.config.settings import Config
from engram.engine.build import choose_device, precision_of
from engram.engine.checkpoint import Checkpoint, CheckpointFolder
from engram.engine.choose import choose_program
from engram.engine.learner import Learner, Outcomes, Progress, Report, StopAsked
from engram.engine.loop import Position, check_position, reordered, run_stream
from engram.engine.program import Batches, batch_notes, memory_notes
from engram.engine.stacks import Builder, StackPlan


@dataclass(frozen=True)
class Stack:
    """Learners that train together, and everything that they depend on. Any process can train it."""

    number: int  # among the stacks of its run
    plan: StackPlan
    builder: Builder
    checkpoints: CheckpointFolder | None = None
    half: str = ""  # of a stack that no longer fits: which half, as in "-1"

    @property
    def configs(self) -> dict[str, Config]:
        return {label: self.builder.configs[label] for label in self.plan.labels}


ReportOfStack = Callable[[int, Progress], None]  # with the number of the stack


class Engine(Protocol):
    """What trains the stacks of a run. The same stacks have the same outcomes in every engine."""

    name: str

    @property
    def at_once(self) -> int:
        """How many stacks it can train at the same time."""

    def environment(self, device: str) -> dict[str, Any]:
        """What the last bits of a number may depend on: the device that is meant, threads, the GPU's name."""

    def limit(self, builder: Builder) -> int | None:
        """How many models like those of a builder fit into memory together; None for any number."""

    def train(self, stacks: Sequence[Stack], report: ReportOfStack, stop_asked: StopAsked) -> None:
        """Train all stacks to their ends. When `stop_asked` returns True, save them and raise `Stopped`."""


class InProcess:
    """Trains one stack after another in this process."""

    name = "in-process"
    at_once = 1

    def environment(self, device: str) -> dict[str, Any]:
        chosen = choose_device(device)
        gpu = {"gpu": torch.cuda.get_device_name(chosen)} if chosen.type == "cuda" else {}
        return {"device": str(chosen), "threads": torch.get_num_threads(), **gpu}

    def limit(self, builder: Builder) -> int | None:
        return builder.limit()

    def train(self, stacks: Sequence[Stack], report: ReportOfStack, stop_asked: StopAsked) -> None:
        for stack, following in pairwise([*stacks, None]):
            assert stack is not None
            StackTraining(stack, partial(report, stack.number), stop_asked).run()
            if following is None or following.builder is not stack.builder:
                stack.builder.release()


class StackTraining:
    """Trains a stack to the end of its stream, from its last checkpoint if it has one.

    Args:
        stack: what to train.
        report: called with a `Progress` of this stack alone.
        stop_asked: asked at every position from which the stack could be resumed. If it returns True, the stack is
            saved, and `Stopped` is raised.

    Example:
        >>> outcomes = StackTraining(stack, no_report, never_stop).run()
    """

    def __init__(self, stack: Stack, report: Report, stop_asked: StopAsked):
        self.stack = stack
        self.configs = stack.configs
        self.config = next(iter(self.configs.values()))  # batch size, epochs and tasks are common to all
        self.report = report
        self.stop_asked = stop_asked
        self.checkpoints = None if stack.checkpoints is None else stack.checkpoints.of_stack(stack.number, stack.half)
        self.position = Position()
        self.outcomes: Outcomes = {}
        self.noted: set[str] = set()

    def run(self) -> Outcomes:
        builder, plan, saved = self.stack.builder, self.stack.plan, None
        with precision_of(builder.precision) as dtype:
            if self.checkpoints is not None:
                saved, warnings = self.checkpoints.read(self.configs, plan)
                self._note(*warnings)
            if saved is not None and saved.finished:
                self.outcomes = saved.outcomes
            else:
                self.learners, batches = builder.take(plan, dtype)
                if saved is not None:
                    self._resume(saved, batches)
                self.outcomes = dict(zip(plan.keys, (learner.outcome for learner in self.learners), strict=True))
                full = False
                try:
                    self.program, notes = choose_program(self.learners, batches, choose_device(builder.device_name))
                    self.batches = batches
                    self.position = self._position_for(self.learners, self.program.learners)
                    self._note(*notes, *memory_notes(self.learners, batches), *batch_notes(self.learners, batches))
                    self._stop_if_asked()
                    run_stream(self.program, batches, self.config, self.position, self._on_position)
                except torch.cuda.OutOfMemoryError:
                    if len(plan) == 1:
                        raise
                    full = True  # what the error refers to is freed only when this block ends
                finally:
                    if self.checkpoints is not None:
                        self.checkpoints.join()
                if full:
                    self._train_halves()
                if self.checkpoints is not None:
                    self._try_to_save(partial(self.checkpoints.finish, self.configs, self.outcomes))
            self.position = Position(task=self.config.num_tasks)  # even if all trials diverged before
            self._report(self.config.num_tasks - 1)
        return self.outcomes

    def _train_halves(self) -> None:
        """Train two stacks of half the size, one after another: no model depends on another.

        They have checkpoints of their own. A resume finds that the whole stack does not fit, and resumes them.
        """
        self._note(
            f"{len(self.stack.plan)} models no longer fit into the GPU's memory, which other programs may use too: "
            "they train again, in two halves"
        )
        vars(self).pop("program", None)
        self.learners = []
        gc.collect()
        torch.cuda.empty_cache()
        for number, plan in enumerate(self.stack.plan.halves):

            def report(progress: Progress, before: int = number) -> None:
                self.report(replace(progress, done=(before + progress.done) / 2))

            half = replace(self.stack, plan=plan, half=f"{self.stack.half}-{number + 1}")
            self.outcomes |= StackTraining(half, report, self.stop_asked).run()

    def _resume(self, saved: Checkpoint, batches: Batches) -> None:
        position = saved.restore(self.learners, self.stack.plan.keys)
        try:
            check_position(position, self.learners, batches, self.config)
        except InputError as error:
            raise InputError(f"{saved.path} does not belong to this run ({reason(error)})") from error
        self.position = position
        self._note(f"resumes at task {position.task + 1}, epoch {position.epoch + 1}")

    def _on_position(self, task_ended: bool) -> None:
        self._note(*self.program.notes)
        task = self.position.task - 1 if task_ended else self.position.task
        self._report(task, task_ended=task_ended)
        if self.position.task == self.config.num_tasks:  # the end has another kind of checkpoint
            return
        if self.checkpoints is not None and self.checkpoints.is_due(task_ended):
            self._try_to_save(self._save)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if not self.stop_asked():
            return
        if self.checkpoints is not None and any(outcome.untrained for outcome in self.outcomes.values()):
            effect = "what was learned since the last checkpoint is lost"
            self._try_to_save(self._save, effect)
            self._try_to_save(self.checkpoints.wait, effect)
        raise Stopped

    def _save(self) -> None:
        assert self.checkpoints is not None
        position = self._position_for(self.program.learners, self.learners)
        self.checkpoints.save(self.configs, self.learners, self.outcomes, position)

    def _position_for(self, learners: Sequence[Learner], others: Sequence[Learner]) -> Position:
        """The position with the rows of these learners in another order."""
        return reordered(self.position, self.batches, self.config, learners, others)

    def _try_to_save(
        self, save: Callable[[], None], effect: str = "training continues, and saves again when it can"
    ) -> None:
        """Save something; if that fails, for example because the disk is full, continue without."""
        try:
            save()
        except (OSError, InputError) as error:
            self._note(f"the checkpoint cannot be written: {reason(error)}; {effect}")

    def _note(self, *notes: str) -> None:
        """Report each note, once."""
        for note in notes:
            if note not in self.noted:
                self.noted.add(note)
                self._report(self.position.task, note=note)

    def _report(self, task: int, **event: Any) -> None:
        at = self.position
        done = (at.task + (at.epoch + at.part) / self.config.epochs) / self.config.num_tasks
        self.report(Progress(done, task, self.configs, self.outcomes, **event))
