"""A network that learns continually: its head grows with the classes, and each task is consolidated when it ends."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError
from engram.common.seeding import DRAWING, derive_seed, generator
from engram.config.methods import CUSTOM
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.engine.build import build_model, build_penalty
from engram.nn.classes import mask_logits
from engram.penalties.quadratic import form_of
from engram.sklearn.labels import as_python

LARGEST_GRADIENT = 1.0  # its norm, so that a step stays finite for features of any size, even unscaled ones
SAMPLES_AT_ONCE = 256  # in evaluation and consolidation
# The default λ of each penalty: of those in benchmarks/classifier_defaults.py, the one with the best mean of the two
# accuracies on held-out samples. `steady` and `masked` were chosen in the same way. EWC has Online EWC's. A penalty
# that is not here has the strength of its registration.
STRENGTHS = {"si": 3.0, "ewc": 3.0, "online-ewc": 3.0, "mas": 0.03}


def make_config(params: Mapping[str, Any], seed: int) -> Config:
    """The parameters of a classifier as settings, which are checked there."""
    method, given = str(params["method"]), as_python(params["strength"])
    strength = STRENGTHS.get(method.split("+")[-1]) if given is None else given
    return preset(
        CUSTOM,
        method,
        hidden=[as_python(width) for width in np.atleast_1d(np.asarray(params["hidden"], dtype=object))],
        **{name: as_python(params[name]) for name in ("learning_rate", "batch_size", "epochs")},
        seed=seed,
        baseline_head="linear",
        **({} if strength is None else {"strength": strength}),
        **(STEADY if params["steady"] else {}),
    )


class ContinualLearner:
    """A network, its penalty, and what is needed of the current task. Classes are numbers here: rows of the head.

    Every random draw is a function of the seed and of the number of calls so far, so a saved learner continues exactly
    like one that was never saved.
    """

    def __init__(
        self, config: Config, num_features: int, num_classes: int, device: torch.device, masked: bool, memory_size: int
    ):
        self.config = config
        self.num_features = num_features
        self.device = device
        self.masked = masked
        self.memory_size = memory_size
        self.model = build_model(config, 0, (num_features,), num_classes).to(device)
        vars(self.model.head)["check_values"] = False  # `_step` checks them, with a better message
        if config.rehearsal is not None:
            raise InputError(f"a classifier's method has no rehearsal, but {config.method} has: see `engram.run`")
        self.penalty = build_penalty(config, 0, self.model)
        # A penalty with a path (SI) has all it needs when a task ends; the others need samples of the task.
        form = form_of(self.penalty)
        needs_samples = config.penalty is not None and (form is None or form.path_group is None)
        self.memory = Reservoir(memory_size if needs_samples else 0, config.seed)
        self.seen: list[int] = []  # the classes of all samples so far
        self.classes: list[int] = []  # those of the current task
        self.num_samples = 0  # in the current task
        self.num_calls = 0

    @property
    def num_classes(self) -> int:
        return int(self.model.head.out_features)  # type: ignore[arg-type]

    @property
    def trained_classes(self) -> list[int]:
        """The classes in the softmax while the current task is learned."""
        return self.classes if self.masked else self.seen

    def grow(self, num_classes: int) -> None:
        """Add classes, whose rows start like those of a new network."""
        if num_classes > self.num_classes:
            head: Any = self.model.head.cpu()  # the CPU's generator gives the same numbers everywhere
            with DRAWING, torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(derive_seed(self.config.seed, "growth", num_classes))
                head.grow(num_classes)
            head.to(self.device)
            self.penalty.grow()

    def start_task(self, classes: Iterable[int] = ()) -> None:
        """Consolidate the current task and start another, which has classes already if it was learned before."""
        if self.num_samples:
            self.penalty.consolidate(self.memory.batches(SAMPLES_AT_ONCE), self.trained_classes)
        self.memory.clear()
        self.classes = sorted(classes)
        self.num_samples = 0

    def learn(self, inputs: Tensor, targets: Tensor, epochs: int) -> None:
        """Train on samples of the current task, in batches, with a new order in each epoch."""
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
        """A step on the loss alone, then the penalty's (Eq. 4, with the penalty as its proximal step)."""
        hidden = self._check_finite(self.model.features(inputs))  # nothing else may reach the trace
        logits = self.model.head(hidden, targets)
        self._check_finite(F.cross_entropy(mask_logits(logits, self.trained_classes), targets)).backward()
        self.penalty.after_backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        self.penalty.proximal_step(self.config.learning_rate)
        self.penalty.after_step()
        optimizer.zero_grad()

    def _check_finite(self, values: Tensor) -> Tensor:
        if torch.isfinite(values).all():
            return values
        raise NotFiniteError(
            f"learning diverged with a learning_rate of {self.config.learning_rate}: scale the features "
            "(sklearn.preprocessing.StandardScaler) or lower it, and fit again"
        )

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor:
        """(samples, classes), in double precision, so that they do not depend on the other samples of a batch."""
        model = copy.deepcopy(self.model).double().eval()
        parts = [model(part.to(self.device).double()).cpu() for part in inputs.split(SAMPLES_AT_ONCE)]
        return torch.cat(parts)


class Reservoir:
    """A memory of at most `size` samples, in which each sample so far is with the same probability.

    It is Vitter's algorithm R. What is drawn for a sample depends only on its position in the stream, so the content is
    the same whether samples come one at a time or in batches.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        self.num_tasks = 0  # how many times it was emptied, so that no two tasks draw the same
        self.clear()

    def clear(self) -> None:
        """Discard all samples."""
        self.num_tasks += 1
        self.num_seen = 0
        self.inputs: Tensor | None = None  # (size, features); the first `len(self)` rows are samples
        self.targets: Tensor | None = None  # (size,)

    def __len__(self) -> int:
        return min(self.num_seen, self.size)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Store some of the samples."""
        if not self.size:
            return
        if self.inputs is None or self.targets is None:
            self.inputs = inputs.new_zeros(self.size, *inputs.shape[1:])
            self.targets = targets.new_zeros(self.size)
        stored: dict[int, int] = {}  # the sample for each position: the last one that was drawn for it
        for i in range(len(targets)):
            position = self._position(self.num_seen + i)
            if position < self.size:
                stored[position] = i
        positions, chosen = list(stored), list(stored.values())
        self.inputs[positions] = inputs[chosen]
        self.targets[positions] = targets[chosen]
        self.num_seen += len(targets)

    def _position(self, n: int) -> int:
        """Where the n-th sample goes: the first ones in order, then anywhere in 0..n, which may be outside."""
        return n if n < self.size else derive_seed(self.seed, "memory", self.num_tasks, n) % (n + 1)

    def batches(self, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Its samples in batches."""
        if self.inputs is None or self.targets is None:
            return []
        stored = slice(len(self))
        return list(zip(self.inputs[stored].split(batch_size), self.targets[stored].split(batch_size), strict=True))
