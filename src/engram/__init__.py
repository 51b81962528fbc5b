"""Engram: Differentiable Hebbian Consolidation, for networks that learn task after task without forgetting."""

from engram.config import Config, load_config
from engram.data import streams
from engram.errors import InputError, NotFiniteError
from engram.experiment import Progress, run, run_many
from engram.export import export_onnx, export_program, fold
from engram.modelfile import load_model, save_model
from engram.nn.dhp import DHPSoftmax
from engram.nn.heads import MatchedSoftmax, PlainSoftmax
from engram.penalties import EWC, MAS, SI, NoPenalty, OnlineEWC, Penalty
from engram.presets import preset
from engram.results import Divergence, Result
from engram.version import __version__

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
