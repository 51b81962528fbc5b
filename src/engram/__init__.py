"""Engram: continual learning with PyTorch, for networks that learn one task after another and forget less."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Where each public name is defined. It is imported when it is first used, because PyTorch takes seconds to import.
_HOME = {
    "Config": "engram.config.settings",
    "DHPSoftmax": "engram.nn.dhp",
    "Divergence": "engram.common.errors",
    "EWC": "engram.penalties",
    "InputError": "engram.common.errors",
    "MAS": "engram.penalties",
    "MatchedSoftmax": "engram.nn.baselines",
    "NoPenalty": "engram.penalties",
    "NotFiniteError": "engram.common.errors",
    "OnlineEWC": "engram.penalties",
    "Penalty": "engram.penalties",
    "LinearSoftmax": "engram.nn.baselines",
    "Progress": "engram.engine.learner",
    "Result": "engram.runs.result",
    "SI": "engram.penalties",
    "export_onnx": "engram.integrations.export",
    "export_program": "engram.integrations.export",
    "fold": "engram.integrations.export",
    "load_config": "engram.config.presets",
    "load_model": "engram.integrations.model_file",
    "preset": "engram.config.presets",
    "run": "engram.runs.experiment",
    "run_many": "engram.runs.experiment",
    "save_model": "engram.integrations.model_file",
}
# Public names that are modules.
_MODULES = {
    "heads": "engram.nn.heads",
    "streams": "engram.data.streams",
    "testing": "engram.integrations.testing",
}

__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from engram.common.errors import Divergence as Divergence
    from engram.common.errors import InputError as InputError
    from engram.common.errors import NotFiniteError as NotFiniteError
    from engram.config.presets import load_config as load_config
    from engram.config.presets import preset as preset
    from engram.config.settings import Config as Config
    from engram.data import streams as streams
    from engram.engine.learner import Progress as Progress
    from engram.integrations import testing as testing
    from engram.integrations.export import export_onnx as export_onnx
    from engram.integrations.export import export_program as export_program
    from engram.integrations.export import fold as fold
    from engram.integrations.model_file import load_model as load_model
    from engram.integrations.model_file import save_model as save_model
    from engram.nn import heads as heads
    from engram.nn.baselines import LinearSoftmax as LinearSoftmax
    from engram.nn.baselines import MatchedSoftmax as MatchedSoftmax
    from engram.nn.dhp import DHPSoftmax as DHPSoftmax
    from engram.penalties import EWC as EWC
    from engram.penalties import MAS as MAS
    from engram.penalties import SI as SI
    from engram.penalties import NoPenalty as NoPenalty
    from engram.penalties import OnlineEWC as OnlineEWC
    from engram.penalties import Penalty as Penalty
    from engram.runs.experiment import run as run
    from engram.runs.experiment import run_many as run_many
    from engram.runs.result import Result as Result
else:

    def __getattr__(name: str) -> object:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        module = _MODULES.get(name, f"engram.{name}")  # or one of the package's own folders
        try:
            return import_module(module)
        except ModuleNotFoundError as reason:
            if reason.name != module:  # a package that this module needs
                raise
            raise AttributeError(f"module 'engram' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
