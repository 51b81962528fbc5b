"""What the memories of this package compute with: the inputs, fixed random features of them, or both; and sums of them.

    φ(x) = [ x, |x R + b| ]        ψ(x) = φ(x) − φ(x₀)        R, b random, never learned; x₀ the first sample

|z| = max(z, 0) + max(−z, 0) is a ReLU of both signs. φ(x₀) only keeps sums small: what is read from a memory does not
depend on it. With more than 256 inputs there are too many to keep beside the random features at no cost, and
φ(x) = |x R|, so that a common scale of all inputs does not matter. Each random feature sees only 200 neighbouring
inputs (more, if there are too few features to see every input): less work than all of them, and more accurate where
neighbours belong together, as in images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg.blas import dsyrk, ssyrk

from engram.common.seeding import derive_seed
from engram.nn.memory import check_moment_fits

MOST_BESIDE = 256  # up to this many inputs are themselves among the features: they cost little, and are linear
MOST_INPUTS = 1000  # wider inputs are used as they are: they are features already
LEAST_RANDOM, MOST_FEATURES, RANDOM_PER_INPUT = 256, 800, 6
WINDOW, GROUP = 200, 100  # how many neighbouring inputs a random feature sees; how many features see the same ones
BIAS = 0.1  # the standard deviation of b, for inputs of about unit size
ROWS = 1024  # samples at once; and how many are summed in single precision


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
    beside = num_inputs if num_inputs <= MOST_BESIDE else 0
    return min(MOST_FEATURES - beside, max(LEAST_RANDOM, RANDOM_PER_INPUT * num_inputs))


def num_direct(num_inputs: int, num_random: int) -> int:
    """How many inputs are themselves among the features: all, if they are at most 256 or there are no random ones.

    Args:
        num_inputs: m.
        num_random: the number of random features.

    Example:
        >>> num_direct(64, 384), num_direct(784, 800), num_direct(784, 0)
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

    form = 2  # of ψ, in files

    def __init__(self, num_inputs: int, num_random: int, seed: int):
        self.num_inputs = num_inputs
        self.num_random = num_random
        self.num_direct = num_direct(num_inputs, num_random)
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
        moved = np.subtract(inputs, self.origin, dtype=np.float64).astype(dtype, copy=False)
        psi: np.ndarray = np.empty((len(inputs), self.width), dtype)
        psi[:, : self.num_direct] = moved[:, : self.num_direct]
        if dtype not in self._cast:
            self._cast[dtype] = [r.astype(dtype) for r in self.projections], self._shift().astype(dtype)
        projections, shift = self._cast[dtype]
        column = self.num_direct
        for window, projection in zip(self.windows, projections, strict=True):  # x R + b = (x − x₀) R + (x₀ R + b)
            np.matmul(moved[:, window], projection, out=psi[:, column : column + projection.shape[1]])
            column += projection.shape[1]
        random = psi[:, self.num_direct :]
        random += shift
        np.abs(random, out=random)
        random -= np.abs(shift)
        return psi

    def at_origin(self) -> np.ndarray:
        """φ(x₀) (k,)."""
        return np.concatenate([self.origin[: self.num_direct], np.abs(self._shift())])

    def _shift(self) -> np.ndarray:
        """x₀ R + b (num_random,)."""
        parts = [self.origin[w] @ r for w, r in zip(self.windows, self.projections, strict=True)]
        return np.concatenate([*parts, np.zeros(0)]) + self.bias


class FirstFeatures(Features):
    """ψ of files that were written before random features had windows; it is drawn and computed as it was then.

    ψ(x) = [x − x₀, |x R + b|], and with more than 256 inputs (x R)² m / ‖x − x̄‖², where x̄ is the mean of the sample's
    inputs and the columns of R have mean 0.

    Args:
        num_inputs: m.
        num_random: the number of random features; 0 for none.
        seed: of R and b.

    Example:
        >>> FirstFeatures(2, num_random=100, seed=0)(np.ones((5, 2))).shape
        (5, 102)
    """

    form = 1
    group, share = 188, 8  # features that see the same inputs; wide inputs: they see one of this many

    def _draw(self, random: np.random.RandomState) -> None:
        num_seen = -(-self.num_inputs // self.share) if self.num_inputs > MOST_BESIDE else self.num_inputs
        self.groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # inputs, R, b
        for start in range(0, self.num_random, self.group):
            size = min(self.group, self.num_random - start)
            inputs = np.sort(random.permutation(self.num_inputs)[:num_seen])
            projection = random.standard_normal((num_seen, size)) / num_seen**0.5
            if not self.num_direct:
                projection -= projection.mean(axis=0)
            self.groups.append((inputs, projection, BIAS * random.standard_normal(size)))

    def __call__(self, inputs: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """ψ of some samples (B, m) → (B, k), in double precision whatever the type."""
        wide = inputs.astype(np.float64, copy=False)
        self.origin = wide[0] if self.origin is None else self.origin
        parts = [wide[:, seen] @ projection for seen, projection, _ in self.groups]
        if self.num_direct:
            random = [np.abs(part + bias) for part, (_, _, bias) in zip(parts, self.groups, strict=True)]
            return np.concatenate([wide - self.origin, *random], axis=1)
        square = np.einsum("ij,ij->i", wide, wide)
        spread = np.maximum(square - wide.sum(axis=1) ** 2 / self.num_inputs, 1e-12 * square + 1e-300)  # ‖x − x̄‖²
        return np.square(np.concatenate(parts, axis=1)) * (self.num_inputs / spread)[:, np.newaxis]

    def at_origin(self) -> np.ndarray:
        """x₀, and 0 for the random features, which are not moved (k,)."""
        return np.concatenate([self.origin[: self.num_direct], np.zeros(self.num_random)])


FORMS = {kind.form: kind for kind in (FirstFeatures, Features)}


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
