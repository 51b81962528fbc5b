"""The engine: trains hundreds of models as one program, here or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram.common.errors import InputError, check_choice
from engram.engine.in_process import Engine, InProcess

ENGINES = ("in-process", "ray")


@contextmanager
def start_engine(name: str = "in-process", address: str | None = None) -> Iterator[Engine]:
    """Start an engine by its name, and shut it down afterwards.

    Args:
        name: "in-process" or "ray".
        address: of a Ray cluster; by default $RAY_ADDRESS, or a new cluster of this machine.

    Example:
        >>> with start_engine("in-process") as engine:
        ...     results = engram.run_many(configs, engine=engine)
    """
    check_choice("engine", name, ENGINES)
    if address is not None and name != "ray":
        raise InputError(f"--address applies only to a Ray cluster, and the engine is {name}: use --engine ray")
    if name == "in-process":
        yield InProcess()
        return
    from engram.engine.ray import start_ray  # an extra

    with start_ray(address) as engine:
        yield engine
