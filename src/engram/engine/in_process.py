"""What an engine is; and the one that needs nothing, which trains stack after stack in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from engram.engine.build import choose_device
from engram.engine.unit import Asked, Told, Unit, find_limit, train_unit

TellOf = Callable[[int, Told], None]  # of the unit with that number


class Engine(Protocol):
    """Where units are trained. The same units have the same outcomes in all of them."""

    name: str

    @property
    def at_once(self) -> int:
        """How many units it can train at the same time."""

    def surroundings(self, device: str) -> dict[str, Any]:
        """What the last bits of a number may depend on: the device that "auto" or a name stands for, threads, GPU."""

    def limit(self, unit: Unit) -> int | None:
        """How many models like those of a unit fit into memory there."""

    def train(self, units: Sequence[Unit], tell: TellOf, stop_asked: Asked) -> None:
        """Train all units to their ends, and tell of each."""


class InProcess:
    """One stack after another, in this process."""

    name = "in-process"
    at_once = 1

    def surroundings(self, device: str) -> dict[str, Any]:
        return surroundings(device)

    def limit(self, unit: Unit) -> int | None:
        return find_limit(unit)

    def train(self, units: Sequence[Unit], tell: TellOf, stop_asked: Asked) -> None:
        for unit in units:
            train_unit(unit, partial(tell, unit.number), stop_asked)


def surroundings(device: str) -> dict[str, Any]:
    """Of this process."""
    where = choose_device(device)
    gpu = {"gpu": torch.cuda.get_device_name(where)} if where.type == "cuda" else {}
    return {"device": str(where), "threads": torch.get_num_threads(), **gpu}
