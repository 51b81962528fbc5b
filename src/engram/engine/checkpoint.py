"""Checkpoints: the state of a stack in one file, from which it resumes as if it had never stopped.

A checkpoint is a safetensors file: the tensors of every learner, and a JSON header with the stack's position. A thread
writes it to a temporary file next to its final path and renames it there, while training continues. The previous
checkpoint is kept too, in case the newest is damaged. When a stack is finished, its checkpoint holds the outcomes of
its trials and no learners.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.common.errors import Divergence, InputError, reason, shortened
from engram.common.files import keep_previous, read_json, remove_unfinished, write_atomically
from engram.common.tensor_file import read_tensors, tensors_under, write_tensors
from engram.config.settings import Config
from engram.engine.learner import Key, Learner, Outcome, Outcomes, Record, check_kept
from engram.engine.loop import Position
from engram.engine.optimizer import check_state
from engram.engine.stacks import StackPlan, digest

KIND, FORMAT = "checkpoint", 6
MAX_PIECES = 10**9  # in an epoch
RECORD_WIDTH = 9  # the index of its outcome, and what a record holds
SECONDS_BETWEEN = 180.0  # between checkpoints: a kill loses at most this much work
TASK_END_FACTOR = 6  # at the end of a task, the best position, a checkpoint is due after a sixth of that time
# What looking into a header of any content can raise.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class CheckpointFolder:
    """Where the stacks of a run save their checkpoints, and how often."""

    path: Path
    seconds_between: float = SECONDS_BETWEEN

    def of_stack(self, number: int, half: str = "") -> Checkpoints:
        return Checkpoints(self.path / f"stack-{number}{half}.safetensors", self.seconds_between)

    def make(self) -> None:
        """Make the folder, and remove files that a killed process left half-written."""
        self.path.mkdir(exist_ok=True)
        remove_unfinished(self.path)

    def save_limits(self, configs: Mapping[str, Config], limits: Sequence[int | None]) -> None:
        """Save how many models a stack may have, for each group of configs: a resumed run uses the same stacks."""
        content = {"format": FORMAT, "configs": digest(configs), "limits": list(limits)}
        write_atomically(self._plan, json.dumps(content) + "\n")

    def read_limits(self, configs: Mapping[str, Config], num_groups: int) -> list[int | None] | None:
        """What `save_limits` saved; None if nothing was saved yet."""
        if not self._plan.exists():
            return None
        remedy = "remove it to resume the run with the stacks that fit today"
        try:
            saved = read_json(self._plan)
        except InputError as error:
            raise InputError(f"{error}; {remedy}") from error
        limits = saved.get("limits") if isinstance(saved, dict) else None
        if not isinstance(limits, list) or not all(n is None or (type(n) is int and n >= 1) for n in limits):
            raise InputError(f"{self._plan} is damaged, or of an older version; {remedy}")
        if saved.get("configs") != digest(configs) or len(limits) != num_groups:
            raise InputError(f"the settings were changed since the run that saved {self.path} started")
        return limits

    @property
    def any_saved(self) -> bool:
        """Whether there is a checkpoint of any stack."""
        return any("." not in path.stem.removesuffix(".before") for path in self.path.glob("stack-*.safetensors"))

    @property
    def _plan(self) -> Path:
        return self.path / "plan.json"

    def remove(self) -> None:
        """Remove all checkpoints: a finished run needs none."""
        shutil.rmtree(self.path, ignore_errors=True)


class Checkpoints:
    """Writes and reads the checkpoints of one stack."""

    def __init__(self, path: Path, seconds_between: float = SECONDS_BETWEEN):
        self.path = path
        self.before = path.with_suffix(f".before{path.suffix}")
        self.seconds_between = seconds_between
        self.last = time.monotonic()
        self.writer: threading.Thread | None = None
        self.failed: Exception | None = None

    def is_due(self, task_ended: bool) -> bool:
        seconds = self.seconds_between / TASK_END_FACTOR if task_ended else self.seconds_between
        return time.monotonic() - self.last >= seconds

    def save(
        self, configs: Mapping[str, Config], learners: Sequence[Learner], outcomes: Outcomes, position: Position
    ) -> None:
        """Start to write a checkpoint. Raises if the previous one could not be written."""
        self.wait()
        tensors = _tensors_of(learners, outcomes, position)
        described = []
        for key, outcome in outcomes.items():
            lost = outcome.diverged
            diverged = None if lost is None else [*lost.to_dict().values()][1:]  # the trial is in the key
            # Copies: the outcome may have one more row by the time it is written.
            described.append([*key, list(outcome.untrained), [list(row) for row in outcome.rows], diverged])
        header = {
            "configs": digest(configs),
            "position": [position.task, position.epoch, position.piece, position.part],
            "counts": [len(position.losses), len(position.dynamics)],
            "outcomes": described,
            "kept": [outcome.kept for outcome in outcomes.values()],
            "finished": not learners,
        }
        self.writer = threading.Thread(target=self._write, args=(tensors, header), daemon=True)
        self.writer.start()
        self.last = time.monotonic()

    def finish(self, configs: Mapping[str, Config], outcomes: Outcomes) -> None:
        """Save the outcomes of a finished stack."""
        num_tasks = next(iter(configs.values())).num_tasks
        self.save(configs, [], outcomes, Position(task=num_tasks))
        self.wait()

    def _write(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        try:
            temporary = self.path.with_suffix(f".next{self.path.suffix}")
            write_tensors(temporary, KIND, FORMAT, header, tensors)
            keep_previous(self.path, self.before)
            temporary.replace(self.path)
        except Exception as error:  # raised by the next `wait`, since nothing catches it in a thread
            self.failed = error

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raises if it could not be, because the disk is full for example."""
        self.join()
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def join(self) -> None:
        """Wait until the writer has ended, successfully or not."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None

    def read(self, configs: Mapping[str, Config], plan: StackPlan) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read, None if none was saved yet; and warnings.

        If there are checkpoints but none can be read, refuse: training from the start would overwrite them.
        """
        damages: list[InputError] = []
        if self.before.exists() and not self.path.exists():
            damages.append(InputError(f"{self.path} is missing"))
        for path in (self.path, self.before):
            if not path.exists():
                continue
            try:
                found = self._read_one(path, configs, plan)
            except InputError as damage:
                damages.append(damage)
                continue
            if damages and self.path.exists():
                self.path.replace(self.path.with_suffix(f".damaged{self.path.suffix}"))
            return found, [f"{damage}: the previous checkpoint is used" for damage in damages]
        if damages:
            raise InputError(
                f"{damages[0]}; to train this stack from the start, remove {self.path.parent / self.path.stem}.*"
            )
        return None, []

    def _read_one(self, path: Path, configs: Mapping[str, Config], plan: StackPlan) -> Checkpoint:
        header, tensors = read_tensors(path, KIND, FORMAT)
        if header["format"] < FORMAT:
            raise InputError(f"{path} was written by an older version of Engram, and only that version can resume it")
        if header.get("configs") != digest(configs):
            raise InputError(f"the settings were changed since the run that saved {path} started")
        try:
            _check_header(header, configs, plan.keys)
            outcomes = _outcomes_of(header["outcomes"], header["kept"], tensors["records"])
        except (*MALFORMED, InputError) as error:
            raise InputError(f"{path} does not belong to this run ({reason(error)})") from error
        return Checkpoint(path, header, tensors, outcomes)


@dataclass(frozen=True)
class Checkpoint:
    """A stack as it was saved."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]
    outcomes: Outcomes

    @property
    def finished(self) -> bool:
        return bool(self.header["finished"])

    def restore(self, learners: Sequence[Learner], keys: Sequence[Key]) -> Position:
        """Give the learners their saved state and outcomes; returns the position at which to resume."""
        try:
            for i, (learner, key) in enumerate(zip(learners, keys, strict=True)):
                _load(learner.model.state_dict(keep_vars=True), tensors_under(self.tensors, f"{i}.model."))
                learner.penalty.load_state_dict(tensors_under(self.tensors, f"{i}.penalty."))
                learner.optimizer_state = check_state(learner, tensors_under(self.tensors, f"{i}.optimizer."))
                _load(learner.remembered, tensors_under(self.tensors, f"{i}.rehearsal."))
                learner.outcome = self.outcomes[key]
            task, epoch, piece, part = self.header["position"]
            num_losses, num_dynamics = self.header["counts"]
            device = next(iter(learners[0].model.state_dict().values())).device
            losses = [self.tensors[f"losses.{i}"].to(device) for i in range(num_losses)]
            dynamics = [self.tensors[f"dynamics.{i}"].to(device) for i in range(num_dynamics)]
        except (*MALFORMED, RuntimeError) as error:
            raise InputError(f"{self.path} does not belong to this run ({reason(error)})") from error
        return Position(task, epoch, piece, part, losses, dynamics)


def _tensors_of(learners: Sequence[Learner], outcomes: Outcomes, position: Position) -> dict[str, Tensor]:
    """Everything to save, as copies, since training continues while they are written."""
    tensors: dict[str, Tensor] = {}
    for i, learner in enumerate(learners):
        parts = {"model": learner.model.state_dict(), "penalty": learner.penalty.state_dict()}
        parts |= {"optimizer": learner.optimizer_state, "rehearsal": learner.remembered}
        tensors |= {f"{i}.{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    tensors |= {f"losses.{i}": tensor for i, tensor in enumerate(position.losses)}
    tensors |= {f"dynamics.{i}": tensor for i, tensor in enumerate(position.dynamics)}
    # `vars` and not `astuple`, which copies deeply: there may be a hundred thousand.
    records = [(i, *vars(record).values()) for i, outcome in enumerate(outcomes.values()) for record in outcome.records]
    tensors["records"] = torch.tensor(records, dtype=torch.float64).reshape(-1, RECORD_WIDTH)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _load(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    if {name: _form(tensor) for name, tensor in own.items()} != {name: _form(tensor) for name, tensor in state.items()}:
        raise ValueError("its models have different tensors")
    for name, tensor in own.items():
        tensor.copy_(state[name])


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _check_header(header: dict[str, Any], configs: Mapping[str, Config], keys: Sequence[Key]) -> None:
    """Refuse positions and outcomes that a stack of these trials cannot have: a forged file can be valid otherwise."""
    num_tasks = next(iter(configs.values())).num_tasks
    task, epoch, piece, part = header["position"]
    for number, most in (
        (task, num_tasks),
        (epoch, max(config.epochs for config in configs.values())),
        *((count, MAX_PIECES) for count in (piece, *header["counts"])),
    ):
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(f"{shortened(number)} is not a whole number from 0 to {most}")
    if type(part) not in (int, float) or not 0 <= part <= 1:
        raise ValueError(f"{shortened(part)} is not the fraction of an epoch")
    if type(header["finished"]) is not bool:
        raise ValueError(f"{shortened(header['finished'])} does not say whether it is finished")
    if [(label, trial) for label, trial, *_ in header["outcomes"]] != list(keys):
        raise ValueError("its trials are those of another stack")
    for _, trial, untrained, rows, _ in header["outcomes"]:
        if len(untrained) != num_tasks or len(rows) > num_tasks:
            raise ValueError(f"the outcome of trial {shortened(trial)} is damaged")
        for row in (untrained, *rows):
            measured = all(type(value) in (int, float) and 0 <= value <= 1 for value in row)  # which NaN is not
            if not measured or len(row) > num_tasks:
                raise ValueError(f"the accuracies of trial {trial} are damaged")


def _outcomes_of(described: list[list[Any]], kept: list[Any], records: Tensor) -> Outcomes:
    if records.ndim != 2 or records.shape[1] != RECORD_WIDTH:
        raise ValueError(f"its records have the shape {tuple(records.shape)}")
    outcomes: Outcomes = {}
    for (label, trial, untrained, rows, diverged), own in zip(described, kept, strict=True):
        lost = None if diverged is None else Divergence.of(trial, *diverged)
        outcomes[label, trial] = Outcome(untrained, rows, [], lost, check_kept(own))
    in_order = list(outcomes.items())
    for i, *of, loss, eta, hebb_norm, alpha_norm in records.tolist():
        trial, task, epoch, step = (int(number) for number in of)
        if not 0 <= i < len(in_order) or in_order[int(i)][0][1] != trial or min(task, epoch, step) < 0:
            raise ValueError("a record belongs to no outcome")
        in_order[int(i)][1].records.append(Record(trial, task, epoch, step, loss, eta, hebb_norm, alpha_norm))
    return outcomes
