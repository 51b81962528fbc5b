"""Synaptic consolidation: what the network has learned becomes hard to change, weight by weight."""

from engram.penalties.ewc import EWC, OnlineEWC
from engram.penalties.mas import MAS
from engram.penalties.penalty import Penalty
from engram.penalties.quadratic import NoPenalty, Quadratic
from engram.penalties.si import SI

__all__ = ["EWC", "MAS", "SI", "NoPenalty", "OnlineEWC", "Penalty", "Quadratic"]
