"""`ContinualRegressor`: ridge regression that keeps learning, from sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from engram.common.errors import InputError
from engram.sklearn.arguments import checked_weights, whole_number
from engram.sklearn.base import all_or_nothing
from engram.sklearn.features import Features
from engram.sklearn.files import load_regressor, save_regressor
from engram.sklearn.sums import RidgeSums


class ContinualRegressor(RegressorMixin, BaseEstimator):
    """Ridge regression on all samples so far, none of which is stored.

        W = (G − n ψ̄ ψ̄ᵀ + α I)⁻¹ (Q − n ψ̄ ȳᵀ)        ŷ = ȳ + Wᵀ (ψ − ψ̄)

    G = Σ ψψᵀ, Q = Σ ψyᵀ and the means are sums over the samples. So the result is that of `sklearn.linear_model.Ridge`
    on all of them together, for any order and any division into calls.

    Args:
        alpha: α ≥ 0, the strength of the penalty on W, as in `Ridge`.
        random_features: how many random features of the inputs are added, for what is not linear; 0 for none.
            Inputs should then be of about unit size.
        random_state: the seed of these, a `RandomState` from which one is drawn, or None.

    `alpha` takes effect at the next prediction, and the others at the next `fit`.

    Attributes:
        coef_: W, (features,) or (outputs, features), with random features after the inputs.
        intercept_: a number, or one for each output.
        sums_: what is remembered.
        n_features_in_, feature_names_in_: as in all of scikit-learn.

    Example:
        >>> regressor = ContinualRegressor(alpha=0.1)
        >>> regressor.partial_fit([[0.0], [1.0]], [1.0, 3.0]).partial_fit([[2.0]], [5.0]).predict([[3.0]]).round(1)
        array([6.8])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        random_features: int = 0,
        random_state: int | np.random.RandomState | None = None,
    ):
        self.alpha = alpha
        self.random_features = random_features
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from scratch; everything learned before is discarded.

        Args:
            X: the samples, (samples, features).
            y: a number for each, or a row of numbers: (samples,) or (samples, outputs).
            sample_weight: a weight of at least 0 for each sample.

        Example:
            >>> ContinualRegressor(alpha=0).fit([[0.0], [1.0]], [1.0, 3.0]).coef_.round(6)
            array([2.])
        """
        with all_or_nothing(self):
            if hasattr(self, "sums_"):
                del self.sums_
            return self.partial_fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Continue to learn.

        Args:
            X: the samples, (samples, features).
            y: a number for each, or a row of numbers, as in the first call.
            sample_weight: a weight of at least 0 for each sample.

        Example:
            >>> regressor = regressor.partial_fit([[2.0]], [5.0], sample_weight=[2.0])
        """
        self._alpha()
        first = not hasattr(self, "sums_")
        with all_or_nothing(self):
            types = (np.float64, np.float32)
            inputs, goals = validate_data(
                self, X, y, dtype=types, order="C", reset=first, multi_output=True, y_numeric=True
            )
            weights = checked_weights(sample_weight, inputs)
            goals = goals.astype(np.float64)
            goals = goals[:, 0] if goals.ndim == 2 and goals.shape[1] == 1 else goals  # one output, as in Ridge
            if first:
                num_random = whole_number("random_features", self.random_features, least=0)
                seed = int(check_random_state(self.random_state).randint(2**31 - 1))
                num_inputs = inputs.shape[1]
                self.sums_ = RidgeSums(Features(num_inputs, num_inputs, num_random, seed), goals)
            shape = self.sums_.shape
            if goals.shape[1:] != shape:
                had = f"{shape[0]} outputs" if shape else "one number for each sample"
                raise InputError(f"y had {had} before, and now has the shape {goals.shape}")
            self.sums_.add(inputs, goals.reshape(len(goals), -1), weights)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """ŷ of each sample: (samples,) or (samples, outputs), as `y` was.

        Args:
            X: the samples, (samples, features).

        Example:
            >>> regressor.predict([[3.0]]).shape
            (1,)
        """
        check_is_fitted(self, "sums_")
        inputs = validate_data(self, X, dtype=(np.float64, np.float32), order="C", reset=False)
        return self.sums_.predict(inputs, self._alpha())

    @property
    def coef_(self) -> np.ndarray:
        check_is_fitted(self, "sums_")
        weight, _ = self.sums_.reading(self._alpha())
        return weight if self.sums_.shape else weight[0]

    @property
    def intercept_(self) -> np.ndarray | float:
        check_is_fitted(self, "sums_")
        bias = self.sums_.intercept(self._alpha())
        return bias if self.sums_.shape else float(bias[0])

    def save(self, path: str | Path) -> None:
        """Write all that is needed to continue learning into one safetensors file, without pickle.

        Args:
            path: the file; an existing one is replaced once the new one is complete.

        Example:
            >>> regressor.save("regressor.safetensors")
        """
        check_is_fitted(self, "sums_")
        names = self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None
        save_regressor(self.get_params(), self.sums_, names, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Args:
            path: the file.

        Example:
            >>> regressor.save("regressor.safetensors")
            >>> regressor = ContinualRegressor.load("regressor.safetensors")
        """
        params, sums, names = load_regressor(Path(path))
        regressor = cls(**params)
        regressor.sums_, regressor.n_features_in_ = sums, sums.features.num_inputs
        if names is not None:
            regressor.feature_names_in_ = np.array(names, dtype=object)
        return regressor

    def _alpha(self) -> float:
        try:
            alpha = float(self.alpha)
        except (TypeError, ValueError):
            alpha = -1.0
        if not 0 <= alpha < np.inf:
            raise InputError(f"alpha must be a number of at least 0, not {self.alpha!r}")
        return alpha

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
