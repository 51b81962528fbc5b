"""A unit of work: one stack of an experiment, which any process can train, here or on another machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engram.common.errors import InputError, Stopped, reason
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.data.streams import Stream, masked_only_when_examined, move_streams
from engram.engine.build import NOTHING_OWN, Own, build_learner, build_streams, choose_device, precision_of
from engram.engine.checkpoint import Checkpoint, CheckpointFolder
from engram.engine.choose import choose_program, largest_stack
from engram.engine.cpu.step import check_step
from engram.engine.learner import Learner
from engram.engine.loop import Place, Watch, check_place, run_stream
from engram.engine.program import Batches
from engram.engine.stacks import Outcomes, Share

NO_SIZE = ("strength", "eta", "xi", "gamma", "learning_rate")  # settings on which no model's memory depends


@dataclass(frozen=True)
class Source:
    """Where the tasks come from: datasets of which a config makes streams, or a stream that all trials learn."""

    config: Config
    datasets: tuple[Dataset, ...] = ()
    stream: Stream | None = None

    def streams(self, trials: Sequence[int]) -> list[Stream]:
        if self.stream is None:
            return build_streams(self.config, trials, self.datasets)
        learned = self.stream if self.config.mask_training else masked_only_when_examined(self.stream)
        return [learned] * len(trials)


@dataclass(frozen=True)
class Unit:
    """One stack, and all that it depends on."""

    number: int  # among the stacks of its experiment
    configs: Sequence[Config]  # of the whole experiment
    share: Share
    source: Source
    device: str
    precision: str
    own: Own = NOTHING_OWN
    checkpoints: CheckpointFolder | None = None


@dataclass(frozen=True)
class Told:
    """How far a unit has come."""

    done: float  # in [0, 1]
    task: int  # that is being learned, or that has been
    outcomes: Outcomes  # of its trials
    learned: bool = False  # whether a task has just been
    note: str | None = None  # something worth a line in a log


Tell = Callable[[Told], None]
Asked = Callable[[], bool]  # whether a person asked to stop


def nobody_asks() -> bool:
    return False


def train_unit(unit: Unit, tell: Tell = lambda told: None, stop_asked: Asked = nobody_asks) -> Outcomes:
    """Take a stack to the end of its stream, from where it stood if something was kept of it.

    When a person asks to stop, the steps that are being taken are ended, where the stack stands is kept, and `Stopped`
    is raised.
    """
    with _computing(unit.precision) as dtype:
        return _Training(unit, dtype, tell, stop_asked).run()


def find_limit(unit: Unit) -> int | None:
    """How many models like those of a unit fit into the memory of its device; None for as many as one likes."""
    alike = {
        config.replace(**{name: 1.0 for name in NO_SIZE if getattr(config, name) is not None}): config
        for config in unit.configs
    }
    kinds = replace(unit, configs=list(alike.values()))
    with _computing(unit.precision) as dtype:
        device = choose_device(unit.device)
        first = unit.share.trials[:1]
        return largest_stack(
            kinds.configs, lambda place: _build(replace(kinds, share=Share((place,), first)), device, dtype), device
        )


@contextmanager
def _computing(precision: str) -> Iterator[torch.dtype]:
    """Whatever the surroundings think of gradients."""
    with precision_of(precision) as dtype, torch.inference_mode(False), torch.enable_grad():
        yield dtype


def _build(unit: Unit, device: torch.device, dtype: torch.dtype) -> tuple[list[Learner], Batches]:
    """Learners in the order of the stack, and what they learn."""
    streams = move_streams(unit.source.streams(unit.share.trials), device)
    shape, num_classes = streams[0].input_shape, streams[0].num_classes
    learners = [
        build_learner(unit.configs[c], trial, shape, num_classes, device, dtype, unit.own)
        for c, trial in unit.share.keys
    ]
    check_apart(learners)
    for learner in learners:
        check_step(learner.penalty, learner.config.penalty_step)
    return learners, Batches(unit.share.trials, streams, unit.configs[0].seed, dtype)


def check_apart(learners: Sequence[Learner]) -> None:
    """Refuse models that share a tensor: each would train the others."""
    seen: set[int] = set()
    for learner in learners:
        own = [*learner.model.parameters(), *learner.model.buffers()]
        tensors = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}
        if tensors & seen:
            raise InputError("two models share a tensor: features and head must make a new module at each call")
        seen |= tensors


class _Training:
    """A stack on its way."""

    def __init__(self, unit: Unit, dtype: torch.dtype, tell: Tell, stop_asked: Asked):
        self.unit = unit
        self.dtype = dtype
        self.tell = tell
        self.stop_asked = stop_asked
        self.config = unit.configs[unit.share.configs[0]]  # its batches and epochs are those of all
        self.checkpoints = None if unit.checkpoints is None else unit.checkpoints.of_stack(unit.number)
        self.place = Place()
        self.outcomes: Outcomes = {}
        self.noted: set[str] = set()

    def run(self) -> Outcomes:
        kept = self._read()
        if kept is not None and kept.finished:
            self.outcomes = kept.outcomes
            return self._finished()
        device = choose_device(self.unit.device)
        self.learners, batches = _build(self.unit, device, self.dtype)
        if kept is not None:
            self._go_on(kept, batches)
        keys = self.unit.share.keys
        self.outcomes = dict(zip(keys, (learner.outcome for learner in self.learners), strict=True))
        self.program, notes = choose_program(self.learners, batches, device)
        for note in notes:
            self._note(note)
        self._stop_if_asked()
        try:
            run_stream(self.program, batches, self.config, self.place, Watch(self._moved, self._learned, self._keep))
        finally:
            if self.checkpoints is not None:
                self.checkpoints.join()
        if self.checkpoints is not None:
            finish = self.checkpoints.finish
            self._or_note(lambda: finish(self.unit.configs, self.outcomes))
        return self._finished()

    def _finished(self) -> Outcomes:
        self.tell(Told(1.0, self.config.num_tasks - 1, self.outcomes))
        return self.outcomes

    def _read(self) -> Checkpoint | None:
        if self.checkpoints is None:
            return None
        kept, warnings = self.checkpoints.read(self.unit.configs, self.unit.share)
        for warning in warnings:
            self._note(warning)
        return kept

    def _go_on(self, kept: Checkpoint, batches: Batches) -> None:
        place = kept.restore(self.learners, self.unit.share.keys)
        try:
            check_place(place, self.learners, batches, self.config)
        except InputError as error:
            raise InputError(f"{kept.path} does not belong to this run ({reason(error)})") from error
        self.place = place
        self._note(f"goes on from task {place.task + 1}, epoch {place.epoch + 1}")

    def _moved(self) -> None:
        for note in self.program.notes:
            self._note(note)
        self._say()

    def _learned(self, n: int) -> None:
        self._say(learned=True, task=n)

    def _keep(self, task_ended: bool) -> None:
        if self.place.task == self.config.num_tasks:  # the end is kept in a way of its own
            return
        if self.checkpoints is not None and self.checkpoints.is_due(task_ended):
            self._or_note(self._save)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if not self.stop_asked():
            return
        if self.checkpoints is not None and self.outcomes and any(o.untrained for o in self.outcomes.values()):
            lost = "what was learned since the last checkpoint is lost"
            self._or_note(self._save, lost)
            self._or_note(self.checkpoints.wait, lost)
        raise Stopped

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(self.unit.configs, self.learners, self.outcomes, self.place)

    def _or_note(self, keep: Callable[[], None], then: str = "it goes on, and is kept when it can be") -> None:
        """Keep something; where that fails, for a full disk say, the stack goes on without."""
        try:
            keep()
        except (OSError, InputError) as error:
            self._note(f"where the run stands could not be kept: {reason(error)}; {then}")

    def _say(self, learned: bool = False, task: int | None = None, note: str | None = None) -> None:
        place = self.place
        done = (place.task + (place.epoch + place.part) / self.config.epochs) / self.config.num_tasks
        self.tell(Told(done, place.task if task is None else task, self.outcomes, learned, note))

    def _note(self, note: str) -> None:
        if note not in self.noted:
            self.noted.add(note)
            self._say(note=note)
