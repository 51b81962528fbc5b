"""The public names, of which `engram` gives each when it is asked for."""

from engram.config import Config as Config
from engram.config import load_config as load_config
from engram.data import streams as streams
from engram.errors import InputError as InputError
from engram.errors import NotFiniteError as NotFiniteError
from engram.experiment import Progress as Progress
from engram.experiment import run as run
from engram.experiment import run_many as run_many
from engram.export import export_onnx as export_onnx
from engram.export import export_program as export_program
from engram.export import fold as fold
from engram.modelfile import load_model as load_model
from engram.modelfile import save_model as save_model
from engram.nn.dhp import DHPSoftmax as DHPSoftmax
from engram.nn.heads import MatchedSoftmax as MatchedSoftmax
from engram.nn.heads import PlainSoftmax as PlainSoftmax
from engram.penalties import EWC as EWC
from engram.penalties import MAS as MAS
from engram.penalties import SI as SI
from engram.penalties import NoPenalty as NoPenalty
from engram.penalties import OnlineEWC as OnlineEWC
from engram.penalties import Penalty as Penalty
from engram.presets import preset as preset
from engram.results import Divergence as Divergence
from engram.results import Result as Result
