"""Checkpoints: a run as it stands, in one file, from which it goes on as if it had never stopped.

A checkpoint is a safetensors file: the tensors of every learner, and a JSON header that says where the run stands.
It is written beside its place and moved there, by a thread of its own, while the run goes on.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.config import Config
from engram.errors import DivergedError, InputError, in_brief, said
from engram.learner import Learner, Record, TrialOutcome
from engram.results import DAMAGE, divergence_of, fractions
from engram.shares import Key, Outcomes, plan_stacks
from engram.tensorfile import read_tensors, write_tensors
from engram.train import Place

KIND, FORMAT = "checkpoint", 2
MAX_PIECES = 10**9  # of an epoch
NAME = "checkpoint.safetensors"
SECONDS_BETWEEN = 180.0  # at most so much work is lost
TASK_END_FACTOR = 6  # a task's end, the best of places, is kept so many times as often: where tasks are short, not each


class Checkpoints:
    """Writes the checkpoints of a run into its folder, and reads them back."""

    def __init__(self, folder: Path, seconds_between: float = SECONDS_BETWEEN):
        self.path = folder / NAME
        self.seconds_between = seconds_between
        self.last = time.monotonic()
        self.writer: threading.Thread | None = None
        self.failed: Exception | None = None

    def is_due(self, task_ended: bool) -> bool:
        seconds = self.seconds_between / TASK_END_FACTOR if task_ended else self.seconds_between
        return time.monotonic() - self.last >= seconds

    def save(
        self,
        configs: Sequence[Config],
        stack: int,
        limit: int | None,
        learners: Sequence[Learner],
        outcomes: Outcomes,
        place: Place,
    ) -> None:
        """Begin to write a checkpoint: the learners of one stack, and the outcomes of all that have been begun.

        `limit` is the number of models that a stack may have: the run is divided in the same way when it goes on.
        """
        self.wait()
        tensors = _tensors_of(learners, outcomes, place)
        header = {
            "configs": digest(configs),
            "stack": stack,
            "limit": limit,
            "place": [place.task, place.epoch, place.piece, place.part, len(place.losses), len(place.dynamics)],
            "outcomes": [[*key, *_described(outcome)] for key, outcome in outcomes.items()],
        }
        self.writer = threading.Thread(target=self._write, args=(tensors, header), daemon=True)
        self.writer.start()
        self.last = time.monotonic()

    def _write(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        try:
            write_tensors(self.path, KIND, FORMAT, header, tensors)
        except Exception as reason:  # told by the next `wait`: a thread of its own could tell nobody
            self.failed = reason

    def wait(self) -> None:
        """Until the checkpoint that is being written is there. A full disk is told here."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def remove(self) -> None:
        """A finished run needs none."""
        self.wait()
        self.path.unlink(missing_ok=True)

    def read(self, configs: Sequence[Config]) -> Checkpoint | None:
        """What was kept of a run of these configs; None if nothing was yet."""
        if not self.path.exists():
            return None
        header, tensors = read_tensors(self.path, KIND, FORMAT)
        if header.get("configs") != digest(configs):
            raise InputError(f"the settings beside {self.path} were changed since the run began")
        try:
            _check_header(header, configs)
        except (*DAMAGE, InputError) as reason:
            raise InputError(f"{self.path} does not belong to this run ({said(reason)})") from reason
        return Checkpoint(self.path, header, tensors)


@dataclass(frozen=True)
class Checkpoint:
    """A run as it stood."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def stack(self) -> int:
        """The one that was being trained."""
        return int(self.header["stack"])

    @property
    def limit(self) -> int | None:
        limit: int | None = self.header["limit"]
        return limit

    def restore(self, learners: Sequence[Learner], keys: Sequence[Key]) -> tuple[Outcomes, Place]:
        """Bring the learners of the stack to where they stood; returns the outcomes so far, and the place."""
        try:
            outcomes = _outcomes_of(self.header["outcomes"], self.tensors["records"])
            for i, (learner, key) in enumerate(zip(learners, keys, strict=True)):
                _load(learner.model, self._part(f"{i}.model."))
                learner.penalty.load_state_dict(self._part(f"{i}.penalty."))
                learner.outcome = outcomes[key]
            task, epoch, piece, part, num_losses, num_dynamics = self.header["place"]
            device = next(learners[0].model.parameters()).device
            losses = [self.tensors[f"losses.{i}"].to(device) for i in range(num_losses)]
            dynamics = [self.tensors[f"dynamics.{i}"].to(device) for i in range(num_dynamics)]
        except (*DAMAGE, RuntimeError) as reason:
            raise InputError(f"{self.path} does not belong to this run ({said(reason)})") from reason
        return outcomes, Place(task, epoch, piece, part, losses, dynamics)

    def _part(self, prefix: str) -> dict[str, Tensor]:
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def _tensors_of(learners: Sequence[Learner], outcomes: Outcomes, place: Place) -> dict[str, Tensor]:
    """All that is to be kept, as copies, since the run goes on while they are written."""
    tensors: dict[str, Tensor] = {}
    for i, learner in enumerate(learners):
        tensors |= {f"{i}.model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
        tensors |= {f"{i}.penalty.{name}": tensor for name, tensor in learner.penalty.state_dict().items()}
    tensors |= {f"losses.{i}": tensor for i, tensor in enumerate(place.losses)}
    tensors |= {f"dynamics.{i}": tensor for i, tensor in enumerate(place.dynamics)}
    # `vars` and not `astuple`, which copies deeply: there may be a hundred thousand.
    records = [(i, *vars(record).values()) for i, outcome in enumerate(outcomes.values()) for record in outcome.records]
    tensors["records"] = torch.tensor(records, dtype=torch.float64).reshape(-1, 9)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _load(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    own = model.state_dict(keep_vars=True)
    if {name: _form(tensor) for name, tensor in own.items()} != {name: _form(tensor) for name, tensor in state.items()}:
        raise ValueError("its models have other tensors")
    for name, tensor in own.items():
        tensor.copy_(state[name])


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _check_header(header: dict[str, Any], configs: Sequence[Config]) -> None:
    """Refuse places and outcomes that a run of these configs cannot have come to; its checksum can be anybody's."""
    num_tasks = configs[0].num_tasks
    stacks = len(plan_stacks(configs, header["limit"]))
    task, epoch, *counts, part, num_losses, num_dynamics = header["place"]
    for number, most in (
        (header["stack"], stacks - 1),
        (task, num_tasks),
        (epoch, max(config.epochs for config in configs)),
        *((count, MAX_PIECES) for count in (*counts, num_losses, num_dynamics)),
    ):
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(f"{in_brief(number)} is not a whole number from 0 to {most}")
    if type(part) not in (int, float) or not 0 <= part <= 1:
        raise ValueError(f"{in_brief(part)} of an epoch cannot be done")
    for place, trial, untrained, rows, diverged in header["outcomes"]:
        sound = type(place) is type(trial) is int and 0 <= place < len(configs) and len(rows) <= num_tasks
        if not sound or len(untrained) != num_tasks:
            raise ValueError(f"the outcome of trial {in_brief(trial)} is damaged")
        for row in (untrained, *rows):
            measured = all(type(value) in (int, float) for value in row)
            if not measured or len(row) > num_tasks or np.isnan(fractions(row)).any():
                raise ValueError(f"the accuracies of trial {trial} are damaged")
        if diverged is not None:
            divergence_of({"trial": trial, "task": diverged[0], "step": diverged[1]})


def _described(outcome: TrialOutcome) -> list[Any]:
    diverged = None if outcome.diverged is None else [outcome.diverged.task, outcome.diverged.step]
    return [outcome.untrained, outcome.rows, diverged]


def _outcomes_of(described: list[list[Any]], records: Tensor) -> Outcomes:
    outcomes: Outcomes = {}
    for place, trial, untrained, rows, diverged in described:
        lost = None if diverged is None else DivergedError(*diverged)
        outcomes[place, trial] = TrialOutcome(untrained, rows, [], lost)
    in_order = list(outcomes.values())
    for i, trial, task, epoch, step, *values in records.tolist():
        if not 0 <= i < len(in_order):
            raise ValueError("a record is of no outcome")
        in_order[int(i)].records.append(Record(int(trial), int(task), int(epoch), int(step), *values))
    return outcomes


def digest(configs: Sequence[Config]) -> str:
    """By which settings that were changed since are told."""
    return hashlib.sha256("\n".join(config.to_toml() for config in configs).encode()).hexdigest()
