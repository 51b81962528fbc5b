"""A network that learns continually: its head grows with the classes, and a task is consolidated when it ends.

Penalties that need samples of the task for that get them from a `Reservoir`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError
from engram.common.seeding import DRAWING, derive_seed, generator
from engram.config.settings import Config
from engram.engine.build import build_model, build_penalty
from engram.engine.cpu.chain import PlasticPass, known_chain
from engram.engine.cpu.fused import ClippedStep
from engram.nn.classes import mask_logits
from engram.nn.networks import Network
from engram.penalties import Penalty
from engram.penalties.quadratic import form_of
from engram.rehearsal.reservoir import Reservoir
from engram.sklearn.arguments import ClassWeights, add_log

LARGEST_GRADIENT = 1.0  # its norm, so that a step stays finite for features of any size, even unscaled ones
SAMPLES_AT_ONCE = 256  # in evaluation and consolidation


class ClippedDescent:
    """Steps on the loss alone, then the penalty's (Eq. 4, with the penalty as its proximal step).

    A multilayer perceptron whose head writes no trace is trained without autograd. The numbers are the same.

    Args:
        model: any.
        penalty: of the same model.
        rate: lr, of plain SGD, along a gradient whose norm is limited.
        classes: the outputs that take part.

    Example:
        >>> descent = ClippedDescent(model, NoPenalty(model), rate=0.1, classes=(0, 1))
        >>> loss = descent.step(inputs, targets, weight=None)
    """

    def __init__(self, model: Network, penalty: Penalty, rate: float, classes: Sequence[int]):
        self.model = model
        self.penalty = penalty
        self.rate = rate
        self.classes = classes
        self.trained = {name: theta for name, theta in model.named_parameters() if theta.requires_grad}
        self.clipped = ClippedStep(list(self.trained.values()), rate, LARGEST_GRADIENT)
        form = form_of(penalty)
        self.pulled = form is None or form.pull(rate) is not None  # not before the first consolidation
        chain = known_chain(model)
        self.chain = None if chain is None or isinstance(chain.head, PlasticPass) else chain
        self.gradients = {} if self.chain is None else {n: torch.empty_like(p) for n, p in self.trained.items()}

    def step(self, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """Take a step, and return the loss before it.

        Args:
            inputs: (B, m).
            targets: class numbers (B,).
            weight: by which the loss of each sample is multiplied (B,); None for 1.
        """
        by = self._by_autograd if self.chain is None else self._by_chain
        loss = by(inputs, targets, weight)
        self.penalty.after_backward()
        self.clipped.take()
        if self.pulled:
            self.penalty.proximal_step(self.rate)
        self.penalty.after_step()
        for theta in self.trained.values():
            theta.grad = None
        return loss

    @torch.no_grad()
    def _by_chain(self, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """The loss; each weight then has its gradient. Features that are not finite give a loss that is not."""
        assert self.chain is not None
        slopes = self.chain.slopes(inputs, targets, self.classes, weight)
        check_finite(slopes.loss, self.rate)
        gradients = slopes.gradients(self.gradients)
        for name, theta in self.trained.items():
            theta.grad = gradients[name]
        return slopes.loss

    def _by_autograd(self, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        hidden = check_finite(self.model.features(inputs), self.rate)  # nothing else may reach the trace
        logits = mask_logits(self.model.head(hidden, targets), self.classes)
        if weight is None:
            loss = F.cross_entropy(logits, targets)
        else:
            loss = (F.cross_entropy(logits, targets, reduction="none") * weight).mean()
        check_finite(loss, self.rate).backward()
        return loss.detach()


def check_finite(values: Tensor, rate: float) -> Tensor:
    """The values, if none of them is NaN or infinite.

    Args:
        values: what a network computes in training.
        rate: the learning rate, which the error names.

    Example:
        >>> check_finite(torch.ones(2), rate=0.1)
        tensor([1., 1.])
    """
    # A finite sum takes one pass, and has finite terms; a sum that is not finite may be one of large terms.
    total = values.sum() if values.ndim else values
    if math.isfinite(total.item()) or torch.isfinite(values).all():
        return values
    raise NotFiniteError(
        f"learning diverged with a learning_rate of {rate}: scale the features "
        "(sklearn.preprocessing.StandardScaler) or lower it, and fit again"
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
        vars(self.model.head)["check_values"] = False  # `check_finite` does, with a better message
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

    def check(self, inputs: np.ndarray) -> None:
        """Refuse samples that cannot be learned, before anything is changed. A network takes all finite ones."""

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
        present = np.flatnonzero(np.bincount(targets)).tolist()
        self.classes, self.seen = sorted({*present, *self.classes}), sorted({*present, *self.seen})
        # PyTorch warns about memory that it must not write to.
        x = torch.from_numpy(inputs if inputs.flags.writeable else inputs.copy())
        rows = torch.from_numpy(targets)
        self.memory.add(x, rows)
        self.num_samples += len(rows)
        x, rows = x.to(self.device), rows.to(self.device)
        self.counts += np.bincount(targets, weights, minlength=len(self.counts))
        if getattr(self.model.head, "waits", False):
            self.model.start(x)
            self.penalty = build_penalty(self.config, 0, self.model)  # which remembers how the weights start
        learns, of_class = self.learns, weigh(self.counts)
        if learns and of_class is not None:
            weights = of_class[targets] if weights is None else weights * of_class[targets]
        w = None if weights is None else torch.tensor(weights, dtype=torch.float32).to(self.device)
        rate = self.config.learning_rate
        step = ClippedDescent(self.model, self.penalty, rate, self.trained_classes).step if learns else self._remember
        loss = torch.zeros(())
        self.model.train()
        for epoch in range(epochs if learns else 1):
            random = generator(self.config.seed, "order", self.num_calls, epoch)
            order = torch.randperm(len(rows), generator=random).to(self.device)
            for batch in order.split(self.config.batch_size):
                weight = None if w is None else w[batch]
                loss = step(x.index_select(0, batch), rows.index_select(0, batch), weight)
        self.model.eval()
        self.num_calls += 1
        return f"loss of the last batch {loss.item():.4f}" if learns else "remembered"

    @torch.no_grad()
    def _remember(self, inputs: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
        """Show a batch to a head that only remembers. There is no loss, and 0 is returned for it."""
        head: Any = self.model.head
        hidden = check_finite(self.model.features(inputs), self.config.learning_rate)
        if weight is None:
            head(hidden, targets)
        elif hasattr(head, "write"):
            head.write(hidden, targets, weight)
        else:
            raise InputError(f"the head {self.config.head} takes no weights of samples")
        return torch.zeros(())

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
