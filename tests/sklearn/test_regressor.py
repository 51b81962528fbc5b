"""ContinualRegressor is scikit-learn's Ridge on all samples so far, in any order and any calls."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge

from engram import InputError
from engram.common.tensor_file import read_tensors, write_tensors
from engram.sklearn import ContinualRegressor
from engram.sklearn.features import bent

SAVED = Path(__file__).parents[1] / "integrations" / "files"


def samples(num_samples: int = 60, outputs: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    X = random.normal(size=(num_samples, 4))
    y = X @ random.normal(size=(4, outputs or 1)) + 0.1 * random.normal(size=(num_samples, outputs or 1)) + 7
    return X, (y if outputs else y[:, 0])


@given(
    st.permutations(range(60)),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.sampled_from([1e-6, 0.1, 1.0, 100.0]),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_it_is_ridge_on_all_samples(order, cuts, alpha: float, outputs: int, weighted: bool) -> None:
    X, y = samples(outputs=outputs)
    weights = np.random.RandomState(1).uniform(0, 3, 60) if weighted else None
    expected = Ridge(alpha).fit(X, y, weights)
    stream = ContinualRegressor(alpha)
    for part in np.split(np.array(order), np.cumsum(cuts)):
        if len(part):
            stream.partial_fit(X[part], y[part], None if weights is None else weights[part])
    np.testing.assert_allclose(stream.predict(X), expected.predict(X), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(stream.coef_, expected.coef_, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(stream.intercept_, expected.intercept_, rtol=1e-8, atol=1e-8)


def test_inputs_of_different_sizes_far_from_zero_are_solved_as_well() -> None:
    X, y = samples(500)
    X = X * [1e-3, 1, 1e3, 1e5] + [1e3, 1e4, 1e5, 1e6]
    expected = Ridge(1.0, solver="svd").fit(X, y)
    np.testing.assert_allclose(ContinualRegressor(1.0).fit(X, y).predict(X), expected.predict(X), rtol=1e-8)


def test_diabetes_in_a_stream_sorted_by_its_target() -> None:
    X, y = load_diabetes(return_X_y=True)
    order = np.argsort(y)
    stream = ContinualRegressor(0.1)
    for part in np.array_split(order, 13):
        stream.partial_fit(X[part], y[part])
    np.testing.assert_allclose(stream.predict(X), Ridge(0.1).fit(X, y).predict(X), rtol=1e-8)


def test_random_features_learn_what_is_not_linear() -> None:
    X = np.random.RandomState(0).uniform(-2, 2, (600, 1))
    y = np.abs(X[:, 0])
    assert ContinualRegressor(1e-3).fit(X[:400], y[:400]).score(X[400:], y[400:]) < 0.1
    curved = ContinualRegressor(1e-3, random_features=100, random_state=0).fit(X[:400], y[:400])
    assert curved.score(X[400:], y[400:]) > 0.99
    assert curved.coef_.shape == (101,)
    psi = curved.sums_.features
    direct = np.concatenate([X, bent(X @ np.concatenate(psi.projections, axis=1) + psi.bias)], axis=1)
    np.testing.assert_allclose(direct @ curved.coef_ + curved.intercept_, curved.predict(X), rtol=1e-6, atol=1e-6)


def test_alpha_takes_effect_at_the_next_prediction() -> None:
    X, y = samples()
    regressor = ContinualRegressor(1.0).fit(X, y)
    regressor.predict(X)
    expected = Ridge(50.0).fit(X, y).predict(X)
    np.testing.assert_allclose(regressor.set_params(alpha=50.0).predict(X), expected, rtol=1e-8)


@pytest.mark.parametrize("outputs", [0, 2])
def test_a_saved_regressor_continues_like_one_never_saved(outputs: int, tmp_path: Path) -> None:
    X, y = samples(outputs=outputs)
    regressor = ContinualRegressor(np.float64(0.5), random_features=6, random_state=3).fit(X[:20], y[:20])
    regressor.save(tmp_path / "model")
    for again in (ContinualRegressor.load(tmp_path / "model"), pickle.loads(pickle.dumps(regressor))):
        assert again.get_params() == regressor.get_params()
        ours = pickle.loads(pickle.dumps(regressor)).partial_fit(X[20:], y[20:])
        np.testing.assert_array_equal(again.partial_fit(X[20:], y[20:]).predict(X), ours.predict(X))


@pytest.mark.parametrize(
    "change",
    [{"features": 5}, {"num_direct": 1}, {"outputs": [0]}, {"outputs": [2]},
     {"count": 0.0}, {"count": "many"}, {"num_random": 10**9}, {"params": {}},
     {"outputs": [1, 1]}, {"feature_names": ["a"]}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(change, tmp_path: Path) -> None:
    ContinualRegressor().fit(*samples()).save(tmp_path / "model")
    header, tensors = read_tensors(tmp_path / "model", "regressor", 1)
    write_tensors(tmp_path / "odd", "regressor", 1, {**header, **change}, tensors)
    with pytest.raises(InputError, match="odd does not hold a regressor"):
        ContinualRegressor.load(tmp_path / "odd")


def test_impossible_input_is_refused_and_changes_nothing() -> None:
    X, y = samples()
    regressor = ContinualRegressor().fit(X, y)
    before = pickle.dumps(regressor)
    with pytest.raises(InputError, match="y had one number for each sample before"):
        regressor.partial_fit(X, np.stack([y, y], axis=1))
    with pytest.raises(ValueError, match="X has 2 features"):
        regressor.partial_fit(X[:, :2], y)
    with pytest.raises(ValueError, match="Sample weights must contain at least one non-zero"):
        regressor.partial_fit(X, y, np.zeros(len(y)))
    assert pickle.dumps(regressor) == before
    for alpha in (-1.0, "strong", float("nan")):
        with pytest.raises(InputError, match="alpha must be a number of at least 0"):
            ContinualRegressor(alpha).fit(X, y)
    with pytest.raises(InputError, match="raise alpha"):
        ContinualRegressor(0.0).fit(X[:2], y[:2]).predict(X)
    with pytest.raises(InputError, match="the parameter random_state RandomState"):
        ContinualRegressor(random_state=np.random.RandomState(0)).fit(X, y).save("nowhere")
