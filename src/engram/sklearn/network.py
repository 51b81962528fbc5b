"""A network that learns continually: its head grows with the classes, and a task is consolidated when it ends.

Penalties that need samples of the task for that get them from a `Reservoir`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError
from engram.common.seeding import DRAWING, derive_seed, generator
from engram.config.settings import Config
from engram.engine.build import build_model, build_penalty
from engram.nn.classes import mask_logits
from engram.penalties.quadratic import form_of
from engram.sklearn.arguments import ClassWeights, add_log

LARGEST_GRADIENT = 1.0  # its norm, so that a step stays finite for features of any size, even unscaled ones
SAMPLES_AT_ONCE = 256  # in evaluation and consolidation
FEWEST_ROWS = 4096  # of a memory of samples, unless its size is smaller


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
        self.inputs: Tensor | None = None  # (rows, features); the first `len(self)` rows are samples
        self.targets: Tensor | None = None  # (rows,)

    def __len__(self) -> int:
        return min(self.num_seen, self.size)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Store some of the samples."""
        if not self.size:
            return
        rows = self.rows_for(self.num_seen + len(targets))
        self.inputs, self.targets = _with_rows(rows, self.inputs, inputs), _with_rows(rows, self.targets, targets)
        stored: dict[int, int] = {}  # the sample for each position: the last one that was drawn for it
        for i in range(len(targets)):
            position = self._position(self.num_seen + i)
            if position < self.size:
                stored[position] = i
        positions, chosen = list(stored), list(stored.values())
        self.inputs[positions] = inputs[chosen]
        self.targets[positions] = targets[chosen]
        self.num_seen += len(targets)

    def rows_for(self, num_seen: int) -> int:
        """How many rows it has after so many samples: a power of two, so that few copies are made, up to its size."""
        return min(self.size, max(FEWEST_ROWS, 1 << max(0, num_seen - 1).bit_length()))

    def _position(self, n: int) -> int:
        """Where the n-th sample goes: the first ones in order, then anywhere in 0..n, which may be outside."""
        return n if n < self.size else derive_seed(self.seed, "memory", self.num_tasks, n) % (n + 1)

    def batches(self, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Its samples in batches."""
        if self.inputs is None or self.targets is None:
            return []
        stored = slice(len(self))
        return list(zip(self.inputs[stored].split(batch_size), self.targets[stored].split(batch_size), strict=True))


def _with_rows(rows: int, stored: Tensor | None, new: Tensor) -> Tensor:
    """What is stored, with at least so many rows of the shape that new samples have."""
    held = new[:0] if stored is None else stored
    return held if len(held) >= rows else torch.cat([held, new.new_zeros(rows - len(held), *new.shape[1:])])


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
        self.counts = np.zeros(num_classes)  # the weight of the samples of each class so far
        self._exact: nn.Module | None = None  # the model in double precision

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_exact": None}  # it follows from the model

    @property
    def task_size(self) -> int:
        """The number of samples that a task has at least, unless tasks have names."""
        return self.config.batch_size

    @property
    def learns(self) -> bool:
        """Whether there are weights to train; a head that remembers sums has none of its own."""
        return any(theta.requires_grad for theta in self.model.parameters())

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
            self._exact = None
            self.counts = np.concatenate([self.counts, np.zeros(num_classes - self.num_classes)])
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

    def learn(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray | None,
        weigh: ClassWeights,
        task: int,
        epochs: int,
    ) -> str:
        """Train on samples of the current task, in batches, with a new order in each epoch.

        Args:
            inputs: (B, m).
            targets: class numbers (B,).
            weights: by which the loss of each sample is multiplied (B,); None for 1.
            weigh: what gives the weight of each class, by the samples of each so far. Those of a head that only
                remembers count when it is read.
            task: not used.
            epochs: passes over these samples. A head that only remembers takes one.
        """
        self._exact = None
        present = set(targets.tolist())
        self.classes, self.seen = sorted(present.union(self.classes)), sorted(present.union(self.seen))
        x, rows = torch.tensor(inputs), torch.tensor(targets)
        self.memory.add(x, rows)
        self.num_samples += len(rows)
        x, rows = x.to(self.device), rows.to(self.device)
        self.counts += np.bincount(targets, weights, minlength=len(self.counts))
        learns, of_class = self.learns, weigh(self.counts)
        if learns and of_class is not None:
            weights = of_class[targets] if weights is None else weights * of_class[targets]
        w = None if weights is None else torch.tensor(weights, dtype=torch.float32).to(self.device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config.learning_rate) if learns else None
        self.model.train()
        loss = torch.zeros(())
        for epoch in range(epochs if learns else 1):
            random = generator(self.config.seed, "order", self.num_calls, epoch)
            order = torch.randperm(len(rows), generator=random).to(self.device)
            for batch in order.split(self.config.batch_size):
                weight = None if w is None else w[batch]
                if optimizer is None:
                    self._remember(x[batch], rows[batch], weight)
                else:
                    loss = self._step(optimizer, x[batch], rows[batch], weight)
        self.model.eval()
        self.num_calls += 1
        return f"loss of the last batch {loss.item():.4f}" if learns else "remembered"

    @torch.no_grad()
    def _remember(self, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> None:
        head: Any = self.model.head
        hidden = self._check_finite(self.model.features(inputs))
        if weight is None:
            head(hidden, targets)
        elif hasattr(head, "write"):
            head.write(hidden, targets, weight)
        else:
            raise InputError(f"the head {self.config.head} takes no weights of samples")

    def _step(self, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """A step on the loss alone, then the penalty's (Eq. 4, with the penalty as its proximal step)."""
        hidden = self._check_finite(self.model.features(inputs))  # nothing else may reach the trace
        logits = mask_logits(self.model.head(hidden, targets), self.trained_classes)
        if weight is None:
            loss = F.cross_entropy(logits, targets)
        else:
            loss = (F.cross_entropy(logits, targets, reduction="none") * weight).mean()
        self._check_finite(loss).backward()
        self.penalty.after_backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        self.penalty.proximal_step(self.config.learning_rate)
        self.penalty.after_step()
        optimizer.zero_grad()
        return loss.detach()

    def _check_finite(self, values: Tensor) -> Tensor:
        if torch.isfinite(values).all():
            return values
        raise NotFiniteError(
            f"learning diverged with a learning_rate of {self.config.learning_rate}: scale the features "
            "(sklearn.preprocessing.StandardScaler) or lower it, and fit again"
        )

    @torch.no_grad()
    def logits(self, inputs: np.ndarray, weigh: ClassWeights, task: int | None = None) -> np.ndarray:
        """(samples, classes), in double precision, so that they do not depend on the other samples of a batch.

        Args:
            inputs: (B, m).
            weigh: the weight of each class, whose logarithm is added to the logits of a head that only remembers.
            task: not used: the weights are those of all tasks.
        """
        if self._exact is None:
            self._exact = copy.deepcopy(self.model).double().eval()
        parts = torch.tensor(inputs).split(SAMPLES_AT_ONCE)
        logits = torch.cat([self._exact(part.to(self.device).double()).cpu() for part in parts]).numpy()
        return logits if self.learns else add_log(logits, weigh(np.ones(self.num_classes)))
