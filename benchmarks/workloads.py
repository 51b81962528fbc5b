"""What is trained while the time is taken: the paper's networks and a wider one on random pixels; a stack's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from timing import Take, bytes_of, timed
from torch import Tensor, nn

from engram.common.seeding import generator
from engram.config.paper import PAPER_METHODS
from engram.config.presets import preset
from engram.config.settings import Config
from engram.data.batches import LONGEST_PIECE, Piece
from engram.data.samples import Samples, Stream, Task
from engram.engine.build import build_learner
from engram.engine.choose import choose_program
from engram.engine.learner import Learner
from engram.engine.program import Batches
from engram.penalties.quadratic import form_of
from engram.penalties.terms import TERMS

HEADS = ("linear", "matched", "dhp")
PENALTIES = ("none", "si", "online-ewc", "mas", "ewc")
USUAL_PENALTIES = PENALTIES[:-1]  # those of the paper's Table I
Models = list[tuple[Config, int]]  # settings and trial of each


@dataclass(frozen=True)
class Workload:
    """A network with the shape of its batches."""

    name: str
    benchmark: str  # the benchmark whose settings it has
    input_shape: tuple[int, ...]
    num_classes: int
    classes: tuple[int, ...]  # of the task
    permuted: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # in place of the benchmark's
    heads: tuple[str, ...] = HEADS

    def config(self, head: str, penalty: str) -> Config:
        """The settings of a method with this head and penalty."""
        parts = [part for part in ("dhp" if head == "dhp" else "", penalty.removeprefix("none")) if part]
        baseline = {} if head == "dhp" else {"baseline_head": head}
        return preset(self.benchmark, "+".join(parts) or "finetune").replace(**{**self.settings, **baseline})

    def mixed(self, size: int, penalties: Sequence[str]) -> Models:
        """The paper's methods, trial after trial, until there are `size` models."""
        configs = [preset(self.benchmark, method).replace(**self.settings) for method in PAPER_METHODS]
        configs = [
            config
            for config in configs
            if (config.penalty or "none") in penalties and ("dhp" in self.heads or not config.plastic)
        ]
        return [(configs[k % len(configs)], k // len(configs)) for k in range(size)]

    @property
    def batch_size(self) -> int:
        return self.config("linear", "none").batch_size

    def samples(self, device: torch.device) -> Samples:
        """As many as the longest piece of an epoch needs."""
        draw = generator(0, f"bench {self.name}")
        count = LONGEST_PIECE * self.batch_size
        pixels = torch.randint(0, 256, (count, *self.input_shape), dtype=torch.uint8, generator=draw)
        targets = torch.randint(0, len(self.classes), (count,), generator=draw)
        return Samples(pixels.to(device), targets.to(device))

    def floats(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All inputs as floats, as a plain loop would keep them, and their targets."""
        samples = self.samples(device)
        return samples.inputs.to(dtype) / 255, samples.targets

    def stream(self, samples: Samples, trial: int) -> Stream:
        """One task; where pixels are permuted, each trial has its own permutation."""
        permutation = None
        if self.permuted:
            draw = generator(0, "permutation", trial)
            permutation = torch.randperm(samples.inputs[0].numel(), generator=draw).to(samples.inputs.device)
        test = samples[slice(len(self.classes))]
        return Stream((Task(self.name, samples, test, self.classes, permutation),), self.num_classes)

    def learner(self, config: Config, trial: int, device: torch.device, dtype: torch.dtype) -> Learner:
        """A model whose penalty acts, as after a first task."""
        learner = build_learner(config, trial, self.input_shape, self.num_classes, device, dtype)
        if config.penalty is not None:
            weights = learner.penalty.parameters
            learner.penalty.remember({name: 0.01 * torch.rand_like(theta) for name, theta in weights.items()})
        return learner

    def learners(self, models: Models, device: torch.device, dtype: torch.dtype) -> list[Learner]:
        return [self.learner(config, trial, device, dtype) for config, trial in models]

    def layers(self) -> list[nn.Module]:
        """The layers that are products, from the inputs to the logits, of a network with the plain head."""
        learner = self.learner(self.config("linear", "none"), 0, torch.device("cpu"), torch.float32)
        return [layer for layer in learner.model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


# Of van de Ven & Tolias, whose images are padded to 32×32: benchmarks/van_de_ven.py says where they are from.
THEIRS = {
    "hidden": [1000, 1000],
    "batch_size": 256,
    "optimizer": "adam",
    "learning_rate": 1e-4,
    "leaky_slope": 0.0,
    "baseline_head": "linear",
    "head_bias": True,
    "penalty_step": "gradient",
}
WORKLOADS = {
    "mlp": Workload("mlp", "permuted-mnist", (1, 28, 28), 10, tuple(range(10)), permuted=True),
    "cnn": Workload("cnn", "vision-mixture", (3, 32, 32), 50, tuple(range(10)), permuted=False),
    "mlp-adam": Workload(
        "mlp-adam", "permuted-mnist", (1, 32, 32), 10, tuple(range(10)), True, THEIRS, heads=("linear",)
    ),
}


def engram_loop(workload: Workload, learners: Sequence[Learner], device: torch.device, dtype: torch.dtype) -> Take:
    """The program that `engram run` would choose for these learners, in the middle of an epoch."""
    samples = workload.samples(device)
    trials = sorted({learner.trial for learner in learners})
    batches = Batches(trials, [workload.stream(samples, trial) for trial in trials], 0, dtype)
    program, _ = choose_program(learners, batches, device)
    program.begin_task(0)
    program.begin_epoch(0, 0)

    def steps(num_steps: int) -> None:
        assert num_steps <= LONGEST_PIECE
        program.train(Piece(slice(0, len(trials)), 0, num_steps, 0, workload.batch_size))

    return timed(steps, device)


@dataclass(frozen=True)
class Memory:
    """What models hold, in bytes."""

    parameters: int
    traces: int
    importances: int
    anchors: int
    pulls: int  # gain and shift, by which a penalty acts in each step
    paths: int  # of SI: its path, the weights at its start, and those of the step before

    @property
    def total(self) -> int:
        return sum(astuple(self))


def memory_of(learners: Sequence[Learner]) -> Memory:
    """The memory of all models of a stack together."""
    each = [_memory_of_one(learner) for learner in learners]
    return Memory(*(sum(column) for column in zip(*each, strict=True)))


def _memory_of_one(learner: Learner) -> tuple[int, ...]:
    penalty = form_of(learner.penalty)
    assert penalty is not None
    pull = penalty.pull(learner.config.learning_rate, learner.config.penalty_step)
    return (
        bytes_of(learner.model.parameters()),
        bytes_of(learner.model.buffers()),
        bytes_of(omega for term in penalty.terms for omega in term.importance.values()),
        bytes_of(anchor for term in penalty.terms for anchor in term.anchor.values()),
        0 if pull is None else bytes_of([*pull.gain.values(), *pull.shift.values()]),
        bytes_of(tensor for name, tensor in penalty.state.items() if not name.startswith(TERMS)),
    )
