"""Sums over a stream, and what is read from them: the classifier behind `head="auto"`, and ridge regression.

The sums are the same for any order of the samples and any division into calls, up to rounding. Nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from engram.common.errors import InputError, NotFiniteError
from engram.nn.memory import class_means, read_lda, read_ridge, within_class_covariance
from engram.sklearn.arguments import ClassWeights, add_log
from engram.sklearn.features import ROWS, Features, SecondMoment

LEAST_VARIANCE = 1e-6  # within the classes, relative to the variance over all samples
NOISE = 1e-8  # a mean variance of scaled features below this is rounding
CONSTANT = 1e-12  # a feature counts as constant if its variance is below this part of its mean square
# The largest distance of an input from the first sample's whose square can be summed.
LARGEST: dict[Any, float] = {np.float64: 1e150, np.float32: 1e17}


class Sums:
    """What both memories have: features ψ, and their second moment G = Σ w ψ ψᵀ.

    Args:
        features: ψ.
    """

    def __init__(self, features: Features):
        self.features = features
        self.moment = SecondMoment(np.zeros((self.features.width, self.features.width)))  # G (k, k)
        self._read: Any = None  # what was read last; None after samples were added

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": None}  # it follows from the sums

    def _check_size(self, values: np.ndarray, first: np.ndarray | None, dtype: type = np.float64) -> None:
        """Refuse what is too large to be squared, before anything is added."""
        if not len(values):
            return
        extremes = np.stack([values.min(axis=0), values.max(axis=0)])  # the farthest from any number
        with np.errstate(over="ignore"):
            largest = float(np.abs(extremes - (values[0] if first is None else first)).max(initial=0))
        if not largest < LARGEST[dtype]:
            raise NotFiniteError("the samples hold numbers that are too large to be squared: scale them first")

    def _linear(self, inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """W ψ + b of each sample (B, outputs), in double precision, so that it does not depend on the other samples."""
        return np.concatenate([self.features(inputs[part]) @ weight.T for part in blocks(len(inputs))]) + bias


def blocks(num_samples: int) -> Iterator[slice]:
    """Samples in parts of at most 1024.

    Args:
        num_samples: how many there are.

    Example:
        >>> [part.start for part in blocks(2000)]
        [0, 1024]
    """
    return (slice(start, start + ROWS) for start in range(0, num_samples, ROWS))


class MemoryLearner(Sums):
    """Streaming LDA, with a mean for each class in each task. Classes are numbers here.

        n_j = Σ w        S_j = Σ w ψ(x)        G = Σ w ψ(x) ψ(x)ᵀ        j: the samples of one class in one task

    A class that comes back in another task, with other inputs, is a second cloud of points, not a wider one. So it has
    a mean for each, and its probability is the sum over them. Where each class comes in one task, it is streaming LDA.

    Args:
        features: ψ.
        num_classes: how many classes are known.
        shrinkage: ε in [0, 1]: the correlations of the features are multiplied by 1 − ε.
    """

    task_size = 1  # the number of samples that a task has at least, unless tasks have names
    learns = False  # there are no weights to train

    def __init__(self, features: Features, num_classes: int, shrinkage: float):
        if not 0 <= shrinkage <= 1:
            raise InputError(f"shrinkage must lie in [0, 1], not {shrinkage!r}")
        super().__init__(features)
        self.num_features = features.num_inputs
        self.num_classes = num_classes
        self.shrinkage = shrinkage
        self.clouds: list[tuple[int, int]] = []  # (task, class) of each j
        self.count = np.zeros(0)  # n (J,)
        self.total = np.zeros((0, self.features.width))  # S (J, k)
        self.seen: list[int] = []  # the classes of all samples so far
        self.classes: list[int] = []  # those of the current task
        self.num_samples = 0  # in the current task
        self.num_calls = 0

    def grow(self, num_classes: int) -> None:
        """Add classes, which have no samples yet."""
        self.num_classes = num_classes

    @property
    def _dtype(self) -> type:
        # Inputs may depend on each other to the last digit. Random features alone do not, and are shrunk by far more.
        return np.float64 if self.features.num_direct else np.float32

    def check(self, inputs: np.ndarray) -> None:
        """Refuse samples that cannot be learned, before anything is changed."""
        self._check_size(inputs, self.features.origin, self._dtype)

    def start_task(self, classes: Iterable[int] = ()) -> None:
        """Start another task, which has classes already if it was learned before. There is nothing to consolidate."""
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
        """Add samples to the sums, once: more passes would count each several times.

        Args:
            inputs: (B, m).
            targets: class numbers (B,).
            weights: (B,) above 0; None for 1.
            weigh: not used: weights of classes count when the sums are read.
            task: the number of the task that they belong to.
            epochs: not used.
        """
        self._read = None
        numbers = self._numbers(task, targets)
        for part in blocks(len(targets)):
            psi = self.features(inputs[part], self._dtype)
            weight = None if weights is None else weights[part]
            member = (numbers[part, np.newaxis] == np.arange(len(self.clouds))).astype(np.float64)
            member = member if weight is None else member * weight[:, np.newaxis]
            self.count += member.sum(axis=0)
            self.total += member.T.astype(psi.dtype) @ psi
            self.moment.add(psi, weight)
        present = set(targets.tolist())
        self.classes, self.seen = sorted(present.union(self.classes)), sorted(present.union(self.seen))
        self.num_samples += len(targets)
        self.num_calls += 1
        return f"{len(self.clouds)} means of {self.features.width} features"

    def _numbers(self, task: int, targets: np.ndarray) -> np.ndarray:
        """The j of each sample; those that are new are added."""
        known = {cloud: j for j, cloud in enumerate(self.clouds)}
        for row in np.unique(targets).tolist():
            known.setdefault((task, row), len(known))
        self.clouds = list(known)
        new = len(known) - len(self.count)
        if new:
            self.count = np.concatenate([self.count, np.zeros(new)])
            self.total = np.concatenate([self.total, np.zeros((new, self.features.width))])
        number_of_row = np.zeros(self.num_classes, dtype=np.int64)
        for (of_task, row), j in known.items():
            if of_task == task:
                number_of_row[row] = j
        return number_of_row[targets]

    def logits(self, inputs: np.ndarray, weigh: ClassWeights, task: int | None = None) -> np.ndarray:
        """log p(class, x) up to a constant of each sample: (samples, classes), −∞ for a class without samples.

        Args:
            inputs: (B, m).
            weigh: what gives the weight of each class, by which its prior probability is multiplied.
            task: the number of a task, if only its samples count.
        """
        if self._read is None:
            self._read = self.reading()
        by_cloud = self._linear(inputs, *self._read)
        logits = np.full((len(inputs), self.num_classes), -np.inf)
        for j, (of_task, row) in enumerate(self.clouds):
            if task is None or of_task == task:
                logits[:, row] = np.logaddexp(logits[:, row], by_cloud[:, j])
        return add_log(logits, weigh(self.counts))

    def reading(self) -> tuple[np.ndarray, np.ndarray]:
        """Weight (J, k) and bias (J,): LDA on scaled features, with the frequencies as prior probabilities.

        z_j = μ_jᵀ Λ ψ − ½ μ_jᵀ Λ μ_j + log n_j. Inputs are divided by their standard deviations before correlations are
        shrunk, so that the scale of each does not matter. Random features, which are alike, share one scale.
        """
        count, total = torch.from_numpy(self.count), torch.from_numpy(self.total)
        moment = torch.from_numpy(self.moment.whole())
        num_samples = count.sum()
        centre, square = total.sum(dim=0) / num_samples, moment.diagonal() / num_samples
        covariance = within_class_covariance(count, total, moment)
        variance = covariance.diagonal().clamp(min=0) + LEAST_VARIANCE * (square - centre.square()).clamp(min=0)
        random = slice(self.features.num_direct, None)
        variance[random], square[random] = variance[random].mean(), square[random].mean()
        size = torch.where(variance > CONSTANT * square, variance.rsqrt(), 0)  # 1 / the standard deviation
        mean = (class_means(count, total) - centre) * size
        scaled = covariance * size * size.unsqueeze(-1)
        if scaled.diagonal().mean() < NOISE:  # all samples of a cloud are the same: there is nothing but the means
            scaled.zero_()
        weight, bias = read_lda(mean, scaled, self.shrinkage)
        weight = weight * size
        bias = bias - weight @ centre + (count / num_samples).log()
        return weight.numpy(), bias.numpy()

    @property
    def counts(self) -> np.ndarray:
        """The weight of the samples of each class so far (C,)."""
        counts = np.zeros(self.num_classes)
        np.add.at(counts, [row for _, row in self.clouds], self.count)
        return counts


class RidgeSums(Sums):
    """n, Σ ψ, G = Σ ψψᵀ, Σ y and Q = Σ ψyᵀ over the samples so far, each with its weight, all in double precision.

    Args:
        features: ψ.
        goals: the first y, (samples,) or (samples, outputs). Sums of y are around its first value, to keep them small.
    """

    def __init__(self, features: Features, goals: np.ndarray):
        super().__init__(features)
        self.shape: tuple[int, ...] = goals.shape[1:]  # of one y
        self.zero = goals[0].reshape(-1).copy()
        self.count = 0.0  # n
        self.total = np.zeros(self.features.width)  # Σ ψ (k,)
        self.goals = np.zeros(len(self.zero))  # Σ y
        self.products = np.zeros((self.features.width, len(self.zero)))  # Q

    def add(self, inputs: np.ndarray, goals: np.ndarray, weights: np.ndarray | None) -> None:
        """Add samples.

        Args:
            inputs: (B, m).
            goals: y (B, outputs).
            weights: (B,) of at least 0; None for 1.
        """
        self._check_size(inputs, self.features.origin)
        self._check_size(goals, self.zero)
        self._read = None
        for part in blocks(len(inputs)):
            psi, y = self.features(inputs[part]), goals[part] - self.zero
            w = np.ones(len(psi)) if weights is None else weights[part]
            self.count += float(w.sum())
            self.total += w @ psi
            self.goals += w @ y
            self.products += psi.T @ (y * w[:, np.newaxis])
            self.moment.add(psi, None if weights is None else w)

    def predict(self, inputs: np.ndarray, alpha: float) -> np.ndarray:
        """ŷ (B,) or (B, outputs), as y was.

        Args:
            inputs: (B, m).
            alpha: α.
        """
        return self._linear(inputs, *self.reading(alpha)).reshape(len(inputs), *self.shape)

    def reading(self, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """Weight (outputs, k) and bias (outputs,) on ψ, solved once for an α.

        Features are divided by their spread before the matrix is solved, and α with them: the same solution, found as
        well for features of very different sizes.

        Args:
            alpha: α ≥ 0.
        """
        if self._read is None or self._read[0] != alpha:
            spread = self.moment.upper().diagonal() - self.total**2 / self.count
            spread = np.maximum(spread, 0) + alpha
            size = torch.from_numpy(1 / np.sqrt(np.where(spread > 0, spread, 1)))
            column = size.unsqueeze(-1)
            moment, products = torch.from_numpy(self.moment.whole()), torch.from_numpy(self.products)
            total, goals = torch.from_numpy(self.total), torch.from_numpy(self.goals)
            count = torch.tensor(self.count, dtype=torch.float64)
            weight, bias = read_ridge(
                moment * size * column, products * column, total * size, goals, count, alpha * size.square(), "alpha"
            )
            self._read = alpha, (weight * size).numpy(), bias.numpy() + self.zero
        return self._read[1:]

    def intercept(self, alpha: float) -> np.ndarray:
        """The bias for φ(x), rather than for ψ(x) = φ(x) − φ(x₀): (outputs,).

        Args:
            alpha: α.
        """
        weight, bias = self.reading(alpha)
        return bias - weight @ self.features.at_origin()
