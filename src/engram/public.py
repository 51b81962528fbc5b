"""The public names, of which `engram` gives each when it is asked for."""

from engram.common.errors import InputError as InputError
from engram.common.errors import NotFiniteError as NotFiniteError
from engram.config.presets import preset as preset
from engram.config.settings import Config as Config
from engram.config.settings import load_config as load_config
from engram.data import streams as streams
from engram.integrations.export import export_onnx as export_onnx
from engram.integrations.export import export_program as export_program
from engram.integrations.export import fold as fold
from engram.integrations.model_file import load_model as load_model
from engram.integrations.model_file import save_model as save_model
from engram.nn.dhp import DHPSoftmax as DHPSoftmax
from engram.nn.heads import MatchedSoftmax as MatchedSoftmax
from engram.nn.heads import PlainSoftmax as PlainSoftmax
from engram.penalties import EWC as EWC
from engram.penalties import MAS as MAS
from engram.penalties import SI as SI
from engram.penalties import NoPenalty as NoPenalty
from engram.penalties import OnlineEWC as OnlineEWC
from engram.penalties import Penalty as Penalty
from engram.runs.experiment import Progress as Progress
from engram.runs.experiment import run as run
from engram.runs.experiment import run_many as run_many
from engram.runs.result import Divergence as Divergence
from engram.runs.result import Result as Result
