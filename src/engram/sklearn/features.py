"""What the memories of this package compute with: the inputs, fixed random features of them, or both; and sums of them.

    φ(x) = [ x, f(x R + b) ]     f(z) = |z| + z/2     ψ(x) = φ(x) − φ(x₀)     R, b random, never learned; x₀: below

f has the slopes −1/2 and 3/2. Unlike |z| it tells x from −x, and unlike a ReLU it is never flat: inputs far from 0 keep
what is linear in them. φ(x₀), of the first sample, only keeps sums small: what is read from a memory does not depend on
it. With random features alone b = 0, so that a common scale of all inputs does not matter. Each random feature sees
only 200 neighbouring inputs (more, if there are too few features to see every input): less work than all of them, and
more accurate where neighbours belong together, as in images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg.blas import dsyrk, ssyrk

from engram.common.seeding import derive_seed
from engram.nn.memory import check_moment_fits

MOST_FEATURES, LEAST_RANDOM, RANDOM_PER_INPUT = 800, 256, 6  # by default
MOST_INPUTS = 1000  # wider inputs are used as they are: they are features already
WINDOW, GROUP = 200, 100  # how many neighbouring inputs a random feature sees; how many features see the same ones
BIAS = 0.1  # the standard deviation of b, for inputs of about unit size
ROWS = 1024  # samples at once; and how many are summed in single precision
ROWS_IN_CACHE = 32  # samples whose features a processor's cache holds


def usual_random_features(num_inputs: int) -> int:
    """How many random features there are by default: six for an input, at least 256; at most 800 features in all.

    Args:
        num_inputs: m. Above 1000 there are none: inputs as wide as this are features already.

    Example:
        >>> [usual_random_features(num_inputs) for num_inputs in (2, 64, 200, 784, 2048)]
        [256, 384, 600, 800, 0]
    """
    if num_inputs > MOST_INPUTS:
        return 0
    return min(MOST_FEATURES - usual_direct(num_inputs), max(LEAST_RANDOM, RANDOM_PER_INPUT * num_inputs))


def usual_direct(num_inputs: int) -> int:
    """How many inputs are themselves among the features by default: all, or none where 545 to 1000 would be too slow.

    Args:
        num_inputs: m.

    Example:
        >>> usual_direct(64), usual_direct(784), usual_direct(2048)
        (64, 0, 2048)
    """
    return 0 if MOST_FEATURES - LEAST_RANDOM < num_inputs <= MOST_INPUTS else num_inputs


class Features:
    """ψ, drawn from a seed.

    Args:
        num_inputs: m.
        num_direct: m if the inputs are among the features, else 0.
        num_random: the number of random features; 0 for none.
        seed: of R and b.

    Example:
        >>> Features(2, num_direct=2, num_random=100, seed=0)(np.ones((5, 2))).shape
        (5, 102)
    """

    def __init__(self, num_inputs: int, num_direct: int, num_random: int, seed: int):
        self.num_inputs = num_inputs
        self.num_direct = num_direct
        self.num_random = num_random
        self.seed = seed
        self.width = self.num_direct + num_random
        check_moment_fits(self.width)
        self.origin: Any = None  # x₀ (m,), from the first sample on
        self._draw(generator(seed))
        self._cast: dict[Any, tuple[list[np.ndarray], np.ndarray]] = {}  # R, and x₀ R + b, by their type

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cast": {}}

    def _draw(self, random: np.random.RandomState) -> None:
        """R in parts, for windows that are spread evenly over the inputs, and b (num_random,)."""
        num_windows = -(-self.num_random // GROUP)
        least = -(-self.num_inputs // max(1, num_windows))  # so that each input is in a window
        window = min(self.num_inputs, max(WINDOW, least))
        starts = np.linspace(0, self.num_inputs - window, num_windows).round().astype(int).tolist()
        self.windows = [slice(start, start + window) for start in starts]
        sizes = [min(GROUP, self.num_random - GROUP * i) for i in range(num_windows)]
        self.projections = [random.standard_normal((window, size)) / window**0.5 for size in sizes]
        self.bias = (BIAS if self.num_direct else 0) * random.standard_normal(self.num_random)

    def __call__(self, inputs: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """ψ of some samples (B, m) → (B, k), in this type."""
        if self.origin is None:
            self.origin = inputs[0].astype(np.float64)
        moved: np.ndarray = np.empty(inputs.shape, dtype)
        np.subtract(inputs, self.origin, out=moved, dtype=np.float64, casting="same_kind")
        psi: np.ndarray = np.empty((len(inputs), self.width), dtype)
        psi[:, : self.num_direct] = moved[:, : self.num_direct]
        if dtype not in self._cast:
            self._cast[dtype] = [r.astype(dtype) for r in self.projections], self._shift().astype(dtype)
        projections, shift = self._cast[dtype]
        column = self.num_direct
        for window, projection in zip(self.windows, projections, strict=True):  # x R + b = (x − x₀) R + (x₀ R + b)
            np.matmul(moved[:, window], projection, out=psi[:, column : column + projection.shape[1]])
            column += projection.shape[1]
        at_origin = bent(shift)
        for start in range(0, len(psi), ROWS_IN_CACHE):
            z = psi[start : start + ROWS_IN_CACHE, self.num_direct :]
            z += shift
            z[...] = bent(z)
            z -= at_origin
        return psi

    def at_origin(self) -> np.ndarray:
        """φ(x₀) (k,)."""
        return np.concatenate([self.origin[: self.num_direct], bent(self._shift())])

    def _shift(self) -> np.ndarray:
        """x₀ R + b (num_random,)."""
        parts = [self.origin[w] @ r for w, r in zip(self.windows, self.projections, strict=True)]
        return np.concatenate([*parts, np.zeros(0)]) + self.bias


def bent(z: np.ndarray) -> np.ndarray:
    """f(z) = |z| + z/2.

    Args:
        z: any numbers.

    Example:
        >>> bent(np.array([-2.0, 2.0]))
        array([1., 3.])
    """
    return np.abs(z) + z / 2


def generator(seed: int) -> np.random.RandomState:
    """What random features are drawn from: this generator of NumPy gives the same numbers in every version."""
    return np.random.RandomState(derive_seed(seed, "random features") % 2**32)


class SecondMoment:
    """G = Σ w ψ ψᵀ (k, k) in double precision, of which only the upper half is computed.

    Rows in single precision are added up in single precision, which takes half the time, for up to 1024 samples; then
    their sum is added to G.

    Args:
        total: G so far (k, k).

    Example:
        >>> moment = SecondMoment(np.zeros((2, 2)))
        >>> moment.add(np.array([[1.0, 2.0]]), weight=None)
        >>> moment.whole()
        array([[1., 2.],
               [2., 4.]])
    """

    def __init__(self, total: np.ndarray):
        self._total = np.asfortranarray(np.triu(total))  # as BLAS takes it, to add in place
        self._recent: np.ndarray | None = None  # the sum in single precision
        self._num_recent = 0  # samples in it

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return {**vars(self), "_recent": None}

    def add(self, psi: np.ndarray, weight: np.ndarray | None) -> None:
        """Add samples.

        Args:
            psi: ψ (B, k), in double or single precision.
            weight: w (B,) ≥ 0; None for 1.
        """
        rows = psi if weight is None else psi * np.sqrt(weight).astype(psi.dtype)[:, np.newaxis]
        if rows.dtype == np.float64:
            self._total = dsyrk(1.0, rows.T, beta=1.0, c=self._total, overwrite_c=1)
            return
        if self._num_recent + len(rows) > ROWS:
            self._settle()
        if self._recent is None:
            self._recent = np.zeros(self._total.shape, np.float32, order="F")
        beta = 1.0 if self._num_recent else 0.0
        self._recent = ssyrk(1.0, rows.T, beta=beta, c=self._recent, overwrite_c=1)
        self._num_recent += len(rows)

    def _settle(self) -> None:
        """Add what is in single precision to G."""
        if self._num_recent:
            self._total += self._recent
            self._num_recent = 0

    def upper(self) -> np.ndarray:
        """G, its upper half."""
        self._settle()
        return self._total

    def whole(self) -> np.ndarray:
        """G, both halves."""
        upper = self.upper()
        whole = upper + upper.T
        np.fill_diagonal(whole, upper.diagonal())
        return whole
