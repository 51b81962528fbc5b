"""What is trained while the time is taken: the paper's two networks, on pixels that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram.common.seeding import generator
from engram.config.presets import preset
from engram.config.settings import PAPER_METHODS, Config
from engram.data.batches import LONGEST_PIECE
from engram.data.samples import Samples
from engram.data.streams import Stream, Task
from engram.engine.build import build_learner
from engram.engine.learner import Learner

HEADS = ("plain", "matched", "dhp")
PENALTIES = ("none", "si", "online-ewc", "mas", "ewc")
USUAL_PENALTIES = PENALTIES[:-1]  # those of the paper's Table I


@dataclass(frozen=True)
class Workload:
    """A network with a batch's shape."""

    name: str
    benchmark: str  # whose settings it has
    input_shape: tuple[int, ...]
    num_classes: int
    classes: tuple[int, ...]  # that take part
    permuted: bool

    def config(self, head: str, penalty: str) -> Config:
        """The settings of a method with this head and penalty."""
        parts = [part for part in ("dhp" if head == "dhp" else "", penalty.removeprefix("none")) if part]
        baseline = {} if head == "dhp" else {"baseline_head": head}
        return preset(self.benchmark, "+".join(parts) or "finetune", **baseline)

    def mixed(self, size: int, penalties: Sequence[str]) -> list[tuple[Config, int]]:
        """The paper's methods, trial after trial, until there are `size` models: (settings, trial) of each."""
        configs = [preset(self.benchmark, method) for method in PAPER_METHODS]
        configs = [config for config in configs if (config.penalty or "none") in penalties]
        return [(configs[k % len(configs)], k // len(configs)) for k in range(size)]

    @property
    def batch_size(self) -> int:
        return preset(self.benchmark, "finetune").batch_size

    def samples(self, device: torch.device) -> Samples:
        """As many as the longest piece of an epoch needs."""
        draw = generator(0, f"bench {self.name}")
        count = LONGEST_PIECE * self.batch_size
        pixels = torch.randint(0, 256, (count, *self.input_shape), dtype=torch.uint8, generator=draw)
        targets = torch.randint(0, len(self.classes), (count,), generator=draw)
        return Samples(pixels.to(device), targets.to(device))

    def stream(self, samples: Samples, trial: int) -> Stream:
        """One task; where pixels are permuted, each trial has an order of its own."""
        few = samples[slice(len(self.classes))]
        order = None
        if self.permuted:
            num_pixels = samples.inputs[0].numel()
            order = torch.randperm(num_pixels, generator=generator(0, "permutation", trial)).to(samples.inputs.device)
        return Stream((Task(self.name, samples, few, self.classes, order),), self.num_classes)

    def learner(self, config: Config, trial: int, device: torch.device, dtype: torch.dtype) -> Learner:
        """A model whose penalty is in force, as after a first task."""
        learner = build_learner(config, trial, self.input_shape, self.num_classes, device, dtype)
        if config.penalty is not None:
            weights = learner.penalty.parameters
            learner.penalty.remember({name: 0.01 * torch.rand_like(theta) for name, theta in weights.items()})
        return learner

    def layers(self) -> list[nn.Module]:
        """The layers that are products, from the inputs to the logits, of a network with the plain head."""
        one = build_learner(
            self.config("plain", "none"), 0, self.input_shape, self.num_classes, torch.device("cpu"), torch.float32
        )
        return [layer for layer in one.model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]

    def batch(self, samples: Samples, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All inputs as floats, in the order in which a loop of one's own would keep them, and their targets."""
        return samples.inputs.to(dtype) / 255, samples.targets


WORKLOADS = {
    "mlp": Workload("mlp", "permuted-mnist", (1, 28, 28), 10, tuple(range(10)), permuted=True),
    "cnn": Workload("cnn", "vision-mixture", (3, 32, 32), 50, tuple(range(10)), permuted=False),
}
