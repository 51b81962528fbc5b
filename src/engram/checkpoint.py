"""Checkpoints: a run as it stands, in one file, from which it goes on as if it had never stopped.

A checkpoint is a safetensors file: the tensors of every learner, and a JSON header that says where the run stands.
It is written beside its place and moved there, by a thread of its own, while the run goes on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engram.errors import DivergedError, InputError
from engram.learner import Learner, Record, TrialOutcome
from engram.results import write_atomically
from engram.train import Place

FORMAT = 1
NAME = "checkpoint.safetensors"
SECONDS_BETWEEN = 180.0  # at most so much work is lost; the end of a task is always kept


class Checkpoints:
    """Writes the checkpoints of a run into its folder, and reads them back."""

    def __init__(self, folder: Path, seconds_between: float = SECONDS_BETWEEN):
        self.path = folder / NAME
        self.seconds_between = seconds_between
        self.last = time.monotonic()
        self.writer: threading.Thread | None = None
        self.failed: OSError | None = None

    def is_due(self) -> bool:
        return time.monotonic() - self.last >= self.seconds_between

    def save(
        self,
        stack: int,
        limit: int | None,
        learners: Sequence[Learner],
        finished: Sequence[TrialOutcome],
        place: Place,
    ) -> None:
        """Begin to write a checkpoint of the learners of one stack; `finished` are the outcomes of those before it.

        `limit` is the number of models that a stack may have: the run is divided in the same way when it goes on.
        """
        self.wait()
        tensors, header = _pack(learners, finished, place)
        header |= {"stack": stack, "limit": limit}
        self.writer = threading.Thread(target=self._write, args=(tensors, header), daemon=True)
        self.writer.start()
        self.last = time.monotonic()

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

    def _write(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        try:
            write_atomically(self.path, save(tensors, {"engram": json.dumps(header)}))
        except OSError as reason:
            self.failed = reason


def read_header(path: Path) -> dict[str, Any]:
    """Where the run stood; refused whole if the file is damaged or was written by a newer version."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["engram"])
            written = int(header["format"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as reason:
        raise InputError(f"{path} is not a checkpoint of Engram, or is damaged ({reason})") from reason
    if written > FORMAT:
        raise InputError(f"{path} was written by a newer version of Engram")
    return dict(header)


def restore(path: Path, header: dict[str, Any], learners: Sequence[Learner]) -> tuple[list[TrialOutcome], Place]:
    """Bring the learners of the checkpoint's stack to where they stood; returns the outcomes before them, and the place."""
    try:
        device = str(next(learners[0].model.parameters()).device)
        with safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        outcomes = _outcomes(header["outcomes"], tensors.pop("records"))
        for i, learner in enumerate(learners):
            state = _taken(tensors, f"{i}.model.")
            with torch.no_grad():
                own = learner.model.state_dict(keep_vars=True)
                if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in state.items()}:
                    raise InputError(f"the models in {path} are not those of this run")
                for name, tensor in own.items():
                    tensor.copy_(state[name])
            learner.penalty.load_state_dict(_taken(tensors, f"{i}.penalty."))
        for learner, outcome in zip(learners, outcomes[header["num_finished"] :], strict=True):
            learner.outcome = outcome
        torch.set_rng_state(tensors.pop("rng").cpu())
        place = Place(header["task"], header["epoch"], header["piece"])
        place.losses = [tensors[f"losses.{i}"] for i in range(header["num_losses"])]
        place.dynamics = [tensors[f"dynamics.{i}"] for i in range(header["num_dynamics"])]
    except (SafetensorError, KeyError, TypeError, ValueError) as reason:
        raise InputError(f"{path} does not belong to this run, or is damaged ({reason})") from reason
    return outcomes[: header["num_finished"]], place


def _pack(
    learners: Sequence[Learner], finished: Sequence[TrialOutcome], place: Place
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for i, learner in enumerate(learners):
        tensors |= {f"{i}.model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
        tensors |= {f"{i}.penalty.{name}": tensor for name, tensor in learner.penalty.state_dict().items()}
    tensors |= {f"losses.{i}": tensor for i, tensor in enumerate(place.losses)}
    tensors |= {f"dynamics.{i}": tensor for i, tensor in enumerate(place.dynamics)}
    outcomes = [*finished, *(learner.outcome for learner in learners)]
    tensors["records"] = torch.tensor(
        [[i, *astuple(record)] for i, outcome in enumerate(outcomes) for record in outcome.records],
        dtype=torch.float64,
    ).reshape(-1, 9)
    tensors["rng"] = torch.get_rng_state()  # for modules that draw, as dropout does
    header = {
        "format": FORMAT,
        "task": place.task,
        "epoch": place.epoch,
        "piece": place.piece,
        "num_losses": len(place.losses),
        "num_dynamics": len(place.dynamics),
        "num_finished": len(finished),
        "outcomes": [
            {
                "untrained": outcome.untrained,
                "rows": outcome.rows,
                "diverged": outcome.diverged and [outcome.diverged.task, outcome.diverged.step],
            }
            for outcome in outcomes
        ],
    }
    # The run goes on while this is written, so it must be copies.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, header


def _outcomes(described: list[dict[str, Any]], records: Tensor) -> list[TrialOutcome]:
    outcomes = [
        TrialOutcome(entry["untrained"], entry["rows"], [], entry["diverged"] and DivergedError(*entry["diverged"]))
        for entry in described
    ]
    for i, trial, task, epoch, step, *values in records.tolist():
        outcomes[int(i)].records.append(Record(int(trial), int(task), int(epoch), int(step), *values))
    return outcomes


def _taken(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
