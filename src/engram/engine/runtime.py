"""Runtime: everything about a run that is not a method's settings: device, precision, stack size, engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engram.common.errors import InputError, check_choice, shortened
from engram.engine.build import PRECISIONS
from engram.engine.in_process import Engine, InProcess


@dataclass(frozen=True)
class Runtime:
    """Where and how to compute.

    Args:
        device: "auto" (the GPU if there is one), "cpu", "cuda", ...
        precision: "tf32" (on GPUs that have it, otherwise as float32), "float32" or "float64".
        max_stack: the largest number of models that train together; by default as many as fit into memory.
        engine: what trains the stacks; see `engram.engine.start_engine`.

    Example:
        >>> Runtime("cpu", precision="float64")
    """

    device: str = "auto"
    precision: str = "tf32"
    max_stack: int | None = None
    engine: Engine = field(default_factory=InProcess)

    def check(self) -> None:
        """Refuse values that no machine can use."""
        check_choice("precision", self.precision, PRECISIONS)
        if self.max_stack is not None and (type(self.max_stack) is not int or self.max_stack < 1):
            raise InputError(f"a stack has at least one model, not {shortened(self.max_stack)}")

    def environment(self) -> dict[str, Any]:
        """What the last bits of a number may depend on: the device that is meant, threads, the GPU's name."""
        self.check()
        return self.engine.environment(self.device)
