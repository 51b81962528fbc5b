"""The sums behind `ContinualRegressor`, and the ridge regression that is read from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engram.common.errors import NotFiniteError
from engram.nn.memory import read_ridge
from engram.sklearn.features import ROWS, Features, SecondMoment


class RidgeSums:
    """n, Σ ψ, G = Σ ψψᵀ, Σ y and Q = Σ ψyᵀ over the samples so far, each with its weight.

    Args:
        num_inputs: the number of inputs.
        num_random: the number of random features.
        seed: of these.
        goals: the first y, (samples,) or (samples, outputs). Sums of y are around its first value, to keep them small.
    """

    def __init__(self, num_inputs: int, num_random: int, seed: int, goals: np.ndarray):
        self.seed = seed
        self.features = Features(num_inputs, num_random, seed)
        self.shape: tuple[int, ...] = goals.shape[1:]  # of one y
        self.zero = goals[0].reshape(-1).copy()
        width, num_outputs = self.features.width, len(self.zero)
        self.count = 0.0  # n
        self.total = np.zeros(width)  # Σ ψ (k,)
        self.moment = SecondMoment(np.zeros((width, width)))  # G
        self.goals = np.zeros(num_outputs)  # Σ y
        self.products = np.zeros((width, num_outputs))  # Q
        self._read: tuple[float, np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": None}  # it follows from the sums

    def add(self, inputs: np.ndarray, goals: np.ndarray, weights: np.ndarray | None) -> None:
        """Add samples.

        Args:
            inputs: (B, m).
            goals: y (B, outputs).
            weights: (B,) of at least 0; None for 1.
        """
        self._read = None
        for start in range(0, len(inputs), ROWS):
            part = slice(start, start + ROWS)
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
        weight, bias = self.reading(alpha)
        parts = [self.features(inputs[start : start + ROWS]) @ weight.T for start in range(0, len(inputs), ROWS)]
        return (np.concatenate(parts) + bias).reshape(len(inputs), *self.shape)

    def reading(self, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """Weight (outputs, k) and bias (outputs,) on ψ, solved once for an α.

        Features are divided by their spread before the matrix is solved, and α with them: the same solution, found as
        well for features of very different sizes.

        Args:
            alpha: α ≥ 0.
        """
        if self._read is None or self._read[0] != alpha:
            spread = self.moment.upper().diagonal() - self.total**2 / self.count
            if not np.isfinite(spread).all():
                raise NotFiniteError("the features are too large to be squared: scale them, and fit again")
            spread = np.maximum(spread, 0) + alpha
            size = torch.from_numpy(1 / np.sqrt(np.where(spread > 0, spread, 1)))
            column = size.unsqueeze(-1)
            moment, products = torch.from_numpy(self.moment.whole()), torch.from_numpy(self.products)
            total, goals = torch.from_numpy(self.total), torch.from_numpy(self.goals)
            count = torch.tensor(self.count, dtype=torch.float64)
            sums = (moment * size * column, products * column, total * size, goals, count)
            weight, bias = read_ridge(*sums, alpha * size.square(), setting="alpha")
            self._read = alpha, (weight * size).numpy(), bias.numpy() + self.zero
        return self._read[1:]

    def intercept(self, alpha: float) -> np.ndarray:
        """The bias for φ(x), rather than for ψ(x) = φ(x) − φ(x₀): (outputs,).

        Args:
            alpha: α.
        """
        weight, bias = self.reading(alpha)
        return bias - weight @ self.features.at_origin()
