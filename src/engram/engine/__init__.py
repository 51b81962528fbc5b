"""Engines: who trains the stacks of an experiment, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram.common.errors import InputError, check_choice
from engram.engine.in_process import Engine, InProcess

ENGINES = ("in-process", "ray")


@contextmanager
def start_engine(name: str = "in-process", address: str | None = None) -> Iterator[Engine]:
    """An engine by its name, as long as it is needed. `address` is that of a Ray cluster.

    Example:
        >>> with start_engine("in-process") as engine:
        ...     results = engram.run_many(configs, engine=engine)
    """
    check_choice("engine", name, ENGINES)
    if address is not None and name != "ray":
        raise InputError(f"an address is that of a Ray cluster, and the engine is {name}: --engine ray")
    if name == "in-process":
        yield InProcess()
        return
    from engram.engine.ray import start_ray  # an extra

    with start_ray(address) as engine:
        yield engine
