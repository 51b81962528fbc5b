"""A network that learns whatever comes: its head grows with the classes, and a task that ends is consolidated."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import NotFiniteError
from engram.common.seeding import derive_seed, generator
from engram.config.settings import Config
from engram.engine.build import build_model, build_penalty
from engram.nn.masking import mask_logits
from engram.sklearn.reservoir import Reservoir

LARGEST_GRADIENT = 1.0  # its norm: features of any size, also unscaled ones, then leave a step finite
SAMPLES_AT_ONCE = 256  # in evaluation and consolidation
# New weights are drawn from PyTorch's own generator, seeded for them: by one thread at a time.
DRAWING = threading.RLock()


class ContinualLearner:
    """Network, penalty, and what there is of the current task. Classes are numbers here: rows of the head.

    Every random draw is a function of the seed and of how many calls there were, so that a learner that was saved goes
    on exactly as one that was not.
    """

    def __init__(
        self, config: Config, num_features: int, num_classes: int, device: torch.device, masked: bool, memory_size: int
    ):
        self.config = config
        self.num_features = num_features
        self.device = device
        self.masked = masked
        self.memory_size = memory_size
        with DRAWING:
            model = build_model(config, 0, (num_features,), num_classes)
        self.model = model.to(device)
        vars(self.model.head)["check_values"] = False  # `_step` looks out itself, and says what to do about it
        self.penalty = build_penalty(config, 0, self.model)
        # SI has all it needs when a task ends; the others look at samples of the task
        looks_back = config.penalty not in (None, "si")
        self.memory = Reservoir(memory_size if looks_back else 0, config.seed)
        self.seen: list[int] = []  # classes of which there was a sample
        self.classes: list[int] = []  # those of the current task
        self.num_samples = 0  # of the current task
        self.num_calls = 0

    @property
    def num_classes(self) -> int:
        return int(self.model.head.out_features)  # type: ignore[arg-type]

    def grow(self, num_classes: int) -> None:
        """Take up more classes, whose rows begin as those of a new network."""
        if num_classes > self.num_classes:
            head: Any = self.model.head.cpu()  # whose generator gives the same numbers everywhere
            with DRAWING, torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(derive_seed(self.config.seed, "growth", num_classes))
                head.grow(num_classes)
            head.to(self.device)
            self.penalty.grow()

    def begin_task(self, classes: Iterable[int] = ()) -> None:
        """End the current task, and begin one that has some classes already if it was learned before."""
        if self.num_samples:
            self.penalty.consolidate(self.memory.batches(SAMPLES_AT_ONCE), self.taking_part)
        self.memory.clear()
        self.classes = sorted(classes)
        self.num_samples = 0

    @property
    def taking_part(self) -> list[int]:
        """The classes among which the current task is learned."""
        return self.classes if self.masked else self.seen

    def learn(self, inputs: Tensor, targets: Tensor, epochs: int) -> None:
        """Go over some samples of the current task, in batches, in an order of each epoch's own."""
        present = set(targets.tolist())
        self.classes, self.seen = sorted(present.union(self.classes)), sorted(present.union(self.seen))
        self.memory.add(inputs, targets)
        self.num_samples += len(targets)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.learning_rate)
        self.model.train()
        for epoch in range(epochs):
            random = generator(self.config.seed, "order", self.num_calls, epoch)
            order = torch.randperm(len(targets), generator=random).to(self.device)
            for batch in order.split(self.config.batch_size):
                self._step(optimizer, inputs[batch], targets[batch])
        self.model.eval()
        self.num_calls += 1

    def _step(self, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        """A step of the loss alone, then the penalty's (Eq. 4, with the penalty's part as its proximal step)."""
        hidden = self._finite(self.model.features(inputs))  # nothing else may reach the trace
        logits = self.model.head(hidden, targets)
        self._finite(F.cross_entropy(mask_logits(logits, self.taking_part), targets)).backward()
        self.penalty.after_backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        self.penalty.proximal_step(self.config.learning_rate)
        self.penalty.after_step()
        optimizer.zero_grad()

    def _finite(self, values: Tensor) -> Tensor:
        if torch.isfinite(values).all():
            return values
        raise NotFiniteError(
            f"learning diverged with a learning_rate of {self.config.learning_rate}: scale the features "
            "(sklearn.preprocessing.StandardScaler) or lower it, and fit again"
        )

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """In double precision, so that a sample's do not depend on its neighbours in a batch."""
        model = copy.deepcopy(self.model).double().eval()
        parts = [model(part.to(self.device).double()).cpu() for part in inputs.split(SAMPLES_AT_ONCE)]
        return torch.cat(parts)
