"""The memory behind `head="auto"`: streaming LDA on random features, with a mean for each class in each task.

    n_j = Σ w        S_j = Σ w ψ(x)        G = Σ w ψ(x) ψ(x)ᵀ        j: the samples of one class in one task

A class that comes back in another task, with other inputs, is a second cloud of points, not a wider one. So it has a
mean for each, and its probability is the sum over them. Where each class comes in one task, this is streaming LDA.
Sums are all that is stored. They are the same for any order of the samples and any division into calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from engram.common.errors import InputError, NotFiniteError
from engram.nn.memory import class_means, read_lda, within_class_covariance
from engram.sklearn.features import ROWS, Features, SecondMoment
from engram.sklearn.weights import ClassWeights, add_log

LEAST_VARIANCE = 1e-6  # within the classes, relative to the variance over all samples
NOISE = 1e-8  # a mean variance of scaled features below this is rounding
CONSTANT = 1e-12  # a feature counts as constant if its variance is below this part of its mean square


class MemoryLearner:
    """Sums over the samples so far, and the linear classifier that they stand for. Classes are numbers here.

    Args:
        seed: of the random features.
        num_features: the number of inputs.
        num_classes: how many classes are known.
        num_random: the number of random features.
        shrinkage: ε in [0, 1]: the correlations of the features are multiplied by 1 − ε.
    """

    task_size = 1  # the number of samples that a task has at least, unless tasks have names

    def __init__(self, seed: int, num_features: int, num_classes: int, num_random: int, shrinkage: float):
        if not 0 <= shrinkage <= 1:
            raise InputError(f"shrinkage must lie in [0, 1], not {shrinkage!r}")
        self.seed = seed
        self.num_features = num_features
        self.num_classes = num_classes
        self.shrinkage = shrinkage
        self.features = Features(num_features, num_random, seed)
        self.clouds: list[tuple[int, int]] = []  # (task, class) of each j
        self.count = np.zeros(0)  # n (J,)
        self.total = np.zeros((0, self.features.width))  # S (J, k)
        self.moment = SecondMoment(np.zeros((self.features.width, self.features.width)))  # G
        self.seen: list[int] = []  # the classes of all samples so far
        self.classes: list[int] = []  # those of the current task
        self.num_samples = 0  # in the current task
        self.num_calls = 0
        self._read: tuple[np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": None}  # it follows from the sums

    def grow(self, num_classes: int) -> None:
        """Add classes, which have no samples yet."""
        self.num_classes = num_classes

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
        # Inputs may depend on each other to the last digit. Random features alone do not, and are shrunk by far more.
        dtype = np.float64 if self.features.num_direct else np.float32
        for start in range(0, len(targets), ROWS):
            part = slice(start, start + ROWS)
            psi = self.features(inputs[part], dtype)
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
        weight, bias = self._read
        by_cloud = np.concatenate(
            [self.features(inputs[start : start + ROWS]) @ weight.T for start in range(0, len(inputs), ROWS)]
        )
        by_cloud += bias
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
        if not torch.isfinite(square).all():
            raise NotFiniteError("the features are too large to be squared: scale them, and fit again")
        covariance = within_class_covariance(count, total, moment) * (num_samples.clamp(min=1) / num_samples)
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
