"""Checkpoints: a stack as it stands, in one file, from which it goes on as if it had never stopped.

A checkpoint is a safetensors file: the tensors of every learner, and a JSON header that says where the stack stands.
It is written beside its place and moved there, by a thread of its own, while the stack goes on; the one before it is
kept too, for the day on which a disk has spoiled the newest. When a stack has come to its end, a checkpoint without
learners holds what came of its trials.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import DivergedError, InputError, reason, shortened
from engram.common.files import keep_previous, read_json, remove_unfinished, write_atomically
from engram.common.tensor_file import read_tensors, write_tensors
from engram.config.settings import Config
from engram.engine.learner import Learner, Record, TrialOutcome
from engram.engine.loop import Place
from engram.engine.stacks import Key, Outcomes, Share
from engram.runs.result import DAMAGE, divergence_of, fractions

KIND, FORMAT = "checkpoint", 3
MAX_PIECES = 10**9  # of an epoch
RECORD_WIDTH = 9  # the place of its outcome, and what a record holds
SECONDS_BETWEEN = 180.0  # at most so much work is lost
TASK_END_FACTOR = 6  # a task's end, the best of places, is kept so many times as often: where tasks are short, not each


@dataclass(frozen=True)
class CheckpointFolder:
    """Where the stacks of a run keep their checkpoints, and how often."""

    run: Path
    seconds_between: float = SECONDS_BETWEEN

    @property
    def folder(self) -> Path:
        return self.run / "checkpoints"

    def of_stack(self, number: int) -> Checkpoints:
        return Checkpoints(self.folder / f"stack-{number}.safetensors", self.seconds_between)

    def make(self) -> None:
        """Make the folder, and remove what was being written when its process was killed."""
        self.folder.mkdir(exist_ok=True)
        remove_unfinished(self.folder)

    def keep_limit(self, configs: Sequence[Config], limit: int | None) -> None:
        """Keep how many models a stack may have: the run is divided in the same way when it goes on."""
        write_atomically(self._plan, json.dumps({"configs": digest(configs), "limit": limit}) + "\n")

    def limit(self, configs: Sequence[Config]) -> tuple[int | None] | None:
        """What was kept by `keep_limit`; None if nothing was yet."""
        if not self._plan.exists():
            return None
        try:
            kept = read_json(self._plan)
        except InputError as error:
            raise InputError(f"{error}; remove it, and the run goes on if it is divided as before") from error
        limit = kept.get("limit", 0) if isinstance(kept, dict) else 0
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InputError(f"{self._plan} is damaged: remove it, and the run goes on if it is divided as before")
        if kept.get("configs") != digest(configs):
            raise InputError(f"the settings beside {self.folder} were changed since the run began")
        return (limit,)

    @property
    def kept_any(self) -> bool:
        """Whether there is a checkpoint of any stack."""
        return any("." not in path.stem.removesuffix(".before") for path in self.folder.glob("stack-*.safetensors"))

    @property
    def _plan(self) -> Path:
        return self.folder / "plan.json"

    def remove(self) -> None:
        """A finished run needs none."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Checkpoints:
    """Writes the checkpoints of a stack, and reads them back."""

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

    def save(self, configs: Sequence[Config], learners: Sequence[Learner], outcomes: Outcomes, place: Place) -> None:
        """Begin to write a checkpoint. That the one before could not be written is told here."""
        self.wait()
        tensors = _tensors_of(learners, outcomes, place)
        header = {
            "configs": digest(configs),
            "place": [place.task, place.epoch, place.piece, place.part, len(place.losses), len(place.dynamics)],
            "outcomes": [[*key, *_described(outcome)] for key, outcome in outcomes.items()],
            "finished": not learners,
        }
        self.writer = threading.Thread(target=self._write, args=(tensors, header), daemon=True)
        self.writer.start()
        self.last = time.monotonic()

    def finish(self, configs: Sequence[Config], outcomes: Outcomes) -> None:
        """Keep what came of the trials, now that they have come to their end."""
        self.save(configs, [], outcomes, Place(task=configs[0].num_tasks))
        self.wait()

    def _write(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        try:
            beside = self.path.with_suffix(f".next{self.path.suffix}")
            write_tensors(beside, KIND, FORMAT, header, tensors)
            keep_previous(self.path, self.before)
            beside.replace(self.path)
        except Exception as error:  # told by the next `wait`: a thread of its own could tell nobody
            self.failed = error

    def wait(self) -> None:
        """Until the checkpoint that is being written is there. A full disk is told here."""
        self.join()
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def join(self) -> None:
        """Until nothing is being written any more, however that ended."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None

    def read(self, configs: Sequence[Config], share: Share) -> tuple[Checkpoint | None, list[str]]:
        """What was kept of a stack, None if nothing was yet; and warnings. Where the newest is damaged, the one before.

        Where no checkpoint can be read nothing is begun anew, which would overwrite them.
        """
        damages: list[InputError] = []
        if self.before.exists() and not self.path.exists():
            damages.append(InputError(f"{self.path} is missing"))
        for path in (self.path, self.before):
            if not path.exists():
                continue
            try:
                found = self._read_one(path, configs, share)
            except InputError as damage:
                damages.append(damage)
                continue
            if damages and self.path.exists():
                self.path.replace(self.path.with_suffix(f".damaged{self.path.suffix}"))
            return found, [f"{damage}: the checkpoint before it is taken" for damage in damages]
        if damages:
            raise InputError(f"{damages[0]}; to begin its stack again, remove {self.path.parent / self.path.stem}.*")
        return None, []

    def _read_one(self, path: Path, configs: Sequence[Config], share: Share) -> Checkpoint:
        header, tensors = read_tensors(path, KIND, FORMAT)
        if header.get("configs") != digest(configs):
            raise InputError(f"the settings beside {path} were changed since the run began")
        try:
            _check_header(header, configs, share.keys)
            outcomes = _outcomes_of(header["outcomes"], tensors["records"])
        except (*DAMAGE, InputError) as error:
            raise InputError(f"{path} does not belong to this run ({reason(error)})") from error
        return Checkpoint(path, header, tensors, outcomes)


@dataclass(frozen=True)
class Checkpoint:
    """A stack as it stood."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]
    outcomes: Outcomes

    @property
    def finished(self) -> bool:
        return bool(self.header["finished"])

    def restore(self, learners: Sequence[Learner], keys: Sequence[Key]) -> Place:
        """Bring the learners of the stack, and what came of them so far, to where they stood; returns the place."""
        try:
            for i, (learner, key) in enumerate(zip(learners, keys, strict=True)):
                _load(learner.model, self._part(f"{i}.model."))
                learner.penalty.load_state_dict(self._part(f"{i}.penalty."))
                learner.outcome = self.outcomes[key]
            task, epoch, piece, part, num_losses, num_dynamics = self.header["place"]
            device = next(learners[0].model.parameters()).device
            losses = [self.tensors[f"losses.{i}"].to(device) for i in range(num_losses)]
            dynamics = [self.tensors[f"dynamics.{i}"].to(device) for i in range(num_dynamics)]
        except (*DAMAGE, RuntimeError) as error:
            raise InputError(f"{self.path} does not belong to this run ({reason(error)})") from error
        return Place(task, epoch, piece, part, losses, dynamics)

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
    tensors["records"] = torch.tensor(records, dtype=torch.float64).reshape(-1, RECORD_WIDTH)
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


def _check_header(header: dict[str, Any], configs: Sequence[Config], keys: Sequence[Key]) -> None:
    """Refuse places and outcomes that a stack of these trials cannot have come to; its checksum can be anybody's."""
    num_tasks = configs[0].num_tasks
    task, epoch, *counts, part, num_losses, num_dynamics = header["place"]
    for number, most in (
        (task, num_tasks),
        (epoch, max(config.epochs for config in configs)),
        *((count, MAX_PIECES) for count in (*counts, num_losses, num_dynamics)),
    ):
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(f"{shortened(number)} is not a whole number from 0 to {most}")
    if type(part) not in (int, float) or not 0 <= part <= 1:
        raise ValueError(f"{shortened(part)} of an epoch cannot be done")
    if type(header["finished"]) is not bool:
        raise ValueError(f"{shortened(header['finished'])} does not say whether it is finished")
    if [(place, trial) for place, trial, *_ in header["outcomes"]] != list(keys):
        raise ValueError("its trials are those of another stack")
    for _, trial, untrained, rows, diverged in header["outcomes"]:
        if len(untrained) != num_tasks or len(rows) > num_tasks:
            raise ValueError(f"the outcome of trial {shortened(trial)} is damaged")
        for row in (untrained, *rows):
            measured = all(type(value) in (int, float) for value in row)
            if not measured or len(row) > num_tasks or np.isnan(fractions(row)).any():
                raise ValueError(f"the accuracies of trial {trial} are damaged")
        if diverged is not None:
            divergence_of({"trial": trial, "task": diverged[0], "step": diverged[1]})


def _described(outcome: TrialOutcome) -> list[Any]:
    """As it is now: it may have a row more by the time that it is written."""
    diverged = None if outcome.diverged is None else [outcome.diverged.task, outcome.diverged.step]
    return [list(outcome.untrained), [list(row) for row in outcome.rows], diverged]


def _outcomes_of(described: list[list[Any]], records: Tensor) -> Outcomes:
    if records.ndim != 2 or records.shape[1] != RECORD_WIDTH:
        raise ValueError(f"its records have the shape {tuple(records.shape)}")
    outcomes: Outcomes = {}
    for place, trial, untrained, rows, diverged in described:
        lost = None if diverged is None else DivergedError(*diverged)
        outcomes[place, trial] = TrialOutcome(untrained, rows, [], lost)
    in_order = list(outcomes.items())
    for i, *of, loss, eta, hebb_norm, alpha_norm in records.tolist():
        trial, task, epoch, step = (int(number) for number in of)
        if not 0 <= i < len(in_order) or in_order[int(i)][0][1] != trial or min(task, epoch, step) < 0:
            raise ValueError("a record is of no outcome")
        in_order[int(i)][1].records.append(Record(trial, task, epoch, step, loss, eta, hebb_norm, alpha_norm))
    return outcomes


def digest(configs: Sequence[Config]) -> str:
    """By which settings that were changed since are told."""
    return hashlib.sha256("\n".join(config.to_toml() for config in configs).encode()).hexdigest()
