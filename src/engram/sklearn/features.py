"""What the memories of this package compute with: the inputs, fixed random features of them, or both.

    ψ(x) = [ x − x₀,  |x R + b| ]        R, b random, never learned; x₀ the first sample

|z| = max(z, 0) + max(−z, 0) is a ReLU of both signs. x₀ only keeps sums small: what is read from a memory does not
depend on it. With more than 256 inputs there are too many to keep beside the random features at no cost, and

    ψ(x) = (x R)² m / ‖x − x̄‖²        x̄ the mean of the sample's inputs, and the columns of R have mean 0

which does not change when a sample is scaled or shifted. Everything is in double precision, so neither a sum nor a
prediction depends on which samples share a call.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg.blas import dsyrk

from engram.common.seeding import derive_seed
from engram.nn.memory import check_moment_fits

MOST_BESIDE = 256  # up to this many inputs are themselves among the features: they cost little, and are linear
MOST_INPUTS = 1000  # wider inputs are used as they are: they are features already
LEAST_RANDOM, MOST_RANDOM, RANDOM_PER_INPUT = 256, 750, 6
GROUP = 188  # random features that see the same inputs
SHARE = 8  # with wide inputs, a random feature sees one of this many: as accurate, and less work
BIAS = 0.1  # the standard deviation of b, for inputs of about unit size
CONSTANT, SMALLEST = 1e-12, 1e-300  # a sample counts as constant if its spread is below this part of its square
ROWS = 1024  # at once


def usual_random_features(num_inputs: int) -> int:
    """How many random features are computed if nobody says so: six for an input, from 256 to 750.

    Args:
        num_inputs: m. Above 1000 there are none: inputs as wide as this are features already.

    Example:
        >>> usual_random_features(2), usual_random_features(64), usual_random_features(784), usual_random_features(2048)
        (256, 384, 750, 0)
    """
    if num_inputs > MOST_INPUTS:
        return 0
    return min(MOST_RANDOM, max(LEAST_RANDOM, RANDOM_PER_INPUT * num_inputs))


def num_direct(num_inputs: int, num_random: int) -> int:
    """How many inputs are themselves among the features: all, if they are at most 256 or there are no random ones.

    Args:
        num_inputs: m.
        num_random: the number of random features.

    Example:
        >>> num_direct(64, 512), num_direct(784, 750), num_direct(784, 0)
        (64, 0, 784)
    """
    return num_inputs if num_inputs <= MOST_BESIDE or not num_random else 0


class Features:
    """ψ, drawn from a seed. The inputs are among the features if there are at most 256, or no random ones.

    Args:
        num_inputs: m.
        num_random: the number of random features; 0 for none.
        seed: of R and b.

    Example:
        >>> Features(2, num_random=100, seed=0)(np.ones((5, 2))).shape
        (5, 102)
    """

    def __init__(self, num_inputs: int, num_random: int, seed: int):
        self.num_inputs = num_inputs
        self.num_random = num_random
        self.num_direct = num_direct(num_inputs, num_random)
        self.width = self.num_direct + num_random
        check_moment_fits(self.width)
        self.origin: np.ndarray | None = None  # x₀ (m,)
        # This generator of NumPy gives the same numbers in every version.
        random = np.random.RandomState(derive_seed(seed, "random features") % 2**32)
        num_seen = -(-num_inputs // SHARE) if num_inputs > MOST_BESIDE else num_inputs
        self.groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # inputs, R, b
        for start in range(0, num_random, GROUP):
            size = min(GROUP, num_random - start)
            inputs = np.sort(random.permutation(num_inputs)[:num_seen])
            projection = random.standard_normal((num_seen, size)) / num_seen**0.5
            if not self.num_direct:
                projection -= projection.mean(axis=0)
            self.groups.append((inputs, projection, BIAS * random.standard_normal(size)))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """ψ of some samples (B, m) → (B, k)."""
        wide = inputs.astype(np.float64, copy=False)
        if self.origin is None:
            self.origin = wide[0].copy()
        psi = np.empty((len(wide), self.width))
        if self.num_direct:
            np.subtract(wide, self.origin, out=psi[:, : self.num_direct])
        column = self.num_direct
        for seen, projection, bias in self.groups:
            part = (wide if len(seen) == self.num_inputs else np.take(wide, seen, axis=1)) @ projection
            into = psi[:, column : column + part.shape[1]]
            if self.num_direct:
                np.abs(part + bias, out=into)
            else:
                np.square(part, out=into)
            column += part.shape[1]
        if not self.num_direct:
            square = np.einsum("ij,ij->i", wide, wide)
            spread = square - wide.sum(axis=1) ** 2 / self.num_inputs  # ‖x − x̄‖²
            psi *= (self.num_inputs / np.maximum(spread, CONSTANT * square + SMALLEST))[:, np.newaxis]
        return psi


def empty_moment(width: int) -> np.ndarray:
    """G = 0 (k, k), laid out so that `add_moment` can add in place."""
    return np.zeros((width, width), order="F")


def add_moment(moment: np.ndarray, psi: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """G + Σ w ψ ψᵀ, of which only the upper half is computed.

    Args:
        moment: G (k, k), changed in place.
        psi: ψ (B, k).
        weight: w (B,) ≥ 0; None for 1.
    """
    rows = psi if weight is None else psi * np.sqrt(weight)[:, np.newaxis]
    return dsyrk(1.0, rows.T, beta=1.0, c=moment, overwrite_c=1)


def both_halves(moment: np.ndarray) -> np.ndarray:
    """The symmetric matrix whose upper half `add_moment` computed."""
    return np.triu(moment) + np.triu(moment, 1).T
