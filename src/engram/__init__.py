"""Engram: Differentiable Hebbian Consolidation, for networks that learn task after task without forgetting."""

# ruff: noqa: F403, F405
from importlib import import_module
from typing import TYPE_CHECKING

from engram.common.version import __version__

__all__ = [
    "EWC",
    "MAS",
    "SI",
    "Config",
    "DHPSoftmax",
    "Divergence",
    "InputError",
    "MatchedSoftmax",
    "NoPenalty",
    "NotFiniteError",
    "OnlineEWC",
    "Penalty",
    "PlainSoftmax",
    "Progress",
    "Result",
    "__version__",
    "export_onnx",
    "export_program",
    "fold",
    "load_config",
    "load_model",
    "preset",
    "run",
    "run_many",
    "save_model",
    "streams",
]

if TYPE_CHECKING:
    from engram.public import *
else:
    # Each comes when it is asked for: PyTorch takes longer to import than many a command that does without it.
    def __getattr__(name: str) -> object:
        if name in __all__:
            return getattr(import_module("engram.public"), name)
        try:
            return import_module(f"engram.{name}")
        except ModuleNotFoundError as reason:
            if reason.name != f"engram.{name}":  # another module, which that one needs
                raise
            raise AttributeError(f"module 'engram' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
