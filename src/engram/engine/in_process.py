"""The engine contract, and the engine that trains stacks in this process, from their checkpoints if there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from engram.common.errors import InputError, Stopped, reason
from engram.config.settings import Config
from engram.engine.build import choose_device
from engram.engine.checkpoint import Checkpoint, CheckpointFolder
from engram.engine.choose import choose_program
from engram.engine.learner import Outcomes, Progress, Report, StopAsked, never_stop, no_report
from engram.engine.loop import Position, check_position, run_stream
from engram.engine.program import Batches
from engram.engine.stacks import Builder, StackPlan, computing


@dataclass(frozen=True)
class Stack:
    """Learners that train together, and everything that they depend on. Any process can train it."""

    number: int  # among the stacks of its run
    plan: StackPlan
    builder: Builder
    checkpoints: CheckpointFolder | None = None

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
        return environment(device)

    def limit(self, builder: Builder) -> int | None:
        return builder.limit()

    def train(self, stacks: Sequence[Stack], report: ReportOfStack, stop_asked: StopAsked) -> None:
        for stack, following in pairwise([*stacks, None]):
            assert stack is not None
            train_stack(stack, partial(report, stack.number), stop_asked)
            if following is None or following.builder is not stack.builder:
                stack.builder.release()


def environment(device: str) -> dict[str, Any]:
    """The environment of this process: see `Engine.environment`."""
    chosen = choose_device(device)
    gpu = {"gpu": torch.cuda.get_device_name(chosen)} if chosen.type == "cuda" else {}
    return {"device": str(chosen), "threads": torch.get_num_threads(), **gpu}


def train_stack(stack: Stack, report: Report = no_report, stop_asked: StopAsked = never_stop) -> Outcomes:
    """Train a stack to the end of its stream, from its last checkpoint if it has one.

    Args:
        stack: what to train.
        report: called with a `Progress` of this stack alone.
        stop_asked: asked at every position from which the stack could be resumed. If it returns True, the stack is
            saved, and `Stopped` is raised.
    """
    with computing(stack.builder.precision) as dtype:
        return _StackTraining(stack, dtype, report, stop_asked).run()


class _StackTraining:
    """A stack while it is trained."""

    def __init__(self, stack: Stack, dtype: torch.dtype, report: Report, stop_asked: StopAsked):
        self.stack = stack
        self.configs = stack.configs
        self.config = next(iter(self.configs.values()))  # batch size, epochs and tasks are common to all
        self.dtype = dtype
        self.report = report
        self.stop_asked = stop_asked
        self.checkpoints = None if stack.checkpoints is None else stack.checkpoints.of_stack(stack.number)
        self.position = Position()
        self.outcomes: Outcomes = {}
        self.noted: set[str] = set()

    def run(self) -> Outcomes:
        saved = self._read()
        if saved is not None and saved.finished:
            self.outcomes = saved.outcomes
            return self._finished()
        self.learners, batches = self.stack.builder.take(self.stack.plan, self.dtype)
        if saved is not None:
            self._resume(saved, batches)
        keys = self.stack.plan.keys
        self.outcomes = dict(zip(keys, (learner.outcome for learner in self.learners), strict=True))
        device = choose_device(self.stack.builder.device_name)
        self.program, notes = choose_program(self.learners, batches, device)
        for note in notes:
            self._note(note)
        self._stop_if_asked()
        try:
            run_stream(self.program, batches, self.config, self.position, self._on_position)
        finally:
            if self.checkpoints is not None:
                self.checkpoints.join()
        if self.checkpoints is not None:
            finish = self.checkpoints.finish
            self._try_to_save(lambda: finish(self.configs, self.outcomes))
        return self._finished()

    def _finished(self) -> Outcomes:
        self._report(Progress(1.0, self.config.num_tasks - 1))
        return self.outcomes

    def _read(self) -> Checkpoint | None:
        if self.checkpoints is None:
            return None
        saved, warnings = self.checkpoints.read(self.configs, self.stack.plan)
        for warning in warnings:
            self._note(warning)
        return saved

    def _resume(self, saved: Checkpoint, batches: Batches) -> None:
        position = saved.restore(self.learners, self.stack.plan.keys)
        try:
            check_position(position, self.learners, batches, self.config)
        except InputError as error:
            raise InputError(f"{saved.path} does not belong to this run ({reason(error)})") from error
        self.position = position
        self._note(f"resumes at task {position.task + 1}, epoch {position.epoch + 1}")

    def _on_position(self, task_ended: bool) -> None:
        for note in self.program.notes:
            self._note(note)
        task = self.position.task - 1 if task_ended else self.position.task
        self._report(Progress(self._done, task, task_ended=task_ended))
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
        self.checkpoints.save(self.configs, self.learners, self.outcomes, self.position)

    def _try_to_save(
        self, save: Callable[[], None], effect: str = "training continues, and saves again when it can"
    ) -> None:
        """Save something; if that fails, for example because the disk is full, continue without."""
        try:
            save()
        except (OSError, InputError) as error:
            self._note(f"the checkpoint cannot be written: {reason(error)}; {effect}")

    @property
    def _done(self) -> float:
        position = self.position
        return (position.task + (position.epoch + position.part) / self.config.epochs) / self.config.num_tasks

    def _report(self, progress: Progress) -> None:
        self.report(replace(progress, configs=self.configs, outcomes=self.outcomes))

    def _note(self, note: str) -> None:
        if note not in self.noted:
            self.noted.add(note)
            self._report(Progress(self._done, self.position.task, note=note))
