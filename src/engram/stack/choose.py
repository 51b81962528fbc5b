"""Which program trains a stack, and how many models a stack may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engram.config import Config
from engram.learner import Learner
from engram.stack.one_by_one import OneByOne
from engram.stack.program import Batches, Program

Build = Callable[[int], tuple[list[Learner], Batches]]


def choose_program(learners: Sequence[Learner], batches: Batches, device: torch.device) -> tuple[Program, list[str]]:
    """The program for these learners, and what is to be said about the choice."""
    return OneByOne(learners, batches), []


def largest_stack(configs: Sequence[Config], build: Build, device: torch.device) -> int | None:
    """How many models fit into memory together; None for no limit."""
    return None
