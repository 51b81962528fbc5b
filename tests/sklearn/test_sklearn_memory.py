"""The memory behind the classifier's default: exact in any order and any calls; and the API that all heads share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.special import logsumexp
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression

from engram import InputError, NotFiniteError
from engram.common.tensor_file import read_tensors, write_tensors
from engram.sklearn import ContinualClassifier
from engram.sklearn.features import Features
from engram.sklearn.sums import MemoryLearner

FEATURES = 3


def blobs(classes, num_samples: int = 60, seed: int = 0, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Clouds of points, one at the same place for each class whenever it is asked for."""
    random = np.random.RandomState(seed)
    y = np.array(classes)[random.randint(len(classes), size=num_samples)]
    places = {c: np.random.RandomState(ord(str(c))).normal(scale=3, size=FEATURES) for c in classes}
    return shift + np.stack([places[c] for c in y]) + random.normal(size=(num_samples, FEATURES)), y


def digits() -> tuple[np.ndarray, np.ndarray]:
    X, y = load_digits(return_X_y=True)
    return X / 16, y


# --- exact


@given(st.permutations(range(30)), st.lists(st.integers(1, 10), min_size=1, max_size=5), st.booleans())
@settings(deadline=None, max_examples=25)
def test_neither_the_order_nor_the_calls_matter(order, cuts, in_tasks: bool) -> None:
    X, y = blobs([0, 1, 2], 30)
    task_of = y % 2
    whole, cut = ContinualClassifier(random_state=0), ContinualClassifier(random_state=0)
    for task in (0, 1):
        own = task_of == task
        whole.partial_fit(X[own], y[own], task=task if in_tasks else None)
    for part in np.split(np.array(order), np.cumsum(cuts)):
        for task in sorted(set(task_of[part])):
            own = part[task_of[part] == task]
            cut.partial_fit(X[own], y[own], task=task if in_tasks else None)
    np.testing.assert_allclose(cut.decision_function(X), whole.decision_function(X), rtol=1e-6, atol=1e-6)


def test_without_random_features_and_shrinkage_it_is_lda() -> None:
    X, y = blobs([0, 1, 2], 200)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(X, y)
    ours = ContinualClassifier(random_features=0, shrinkage=0.0).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-6, atol=1e-9)


def test_logits_are_the_equation() -> None:
    """z_c = log Σ_t n_tc exp(μᵀΛψ − ½ μᵀΛμ), with Λ of scaled features, in a direct reading."""
    X, y = blobs([0, 1], 80)
    task = np.arange(80) % 2
    X = X + 4 * task[:, np.newaxis]
    classifier = ContinualClassifier(random_features=5, shrinkage=0.1, random_state=0)
    for t in (0, 1):
        classifier.partial_fit(X[task == t], y[task == t], task=t)
    psi = classifier.learner_.features(X)
    cloud = 2 * task + y
    mean = np.stack([psi[cloud == j].mean(axis=0) for j in range(4)])
    covariance = (psi - mean[cloud]).T @ (psi - mean[cloud]) / 80
    variance = covariance.diagonal() + 1e-6 * psi.var(axis=0)
    variance[FEATURES:] = variance[FEATURES:].mean()
    scale = np.sqrt(variance)
    correlation = covariance / np.outer(scale, scale)
    inverse = np.linalg.inv(0.9 * correlation + 0.1 * correlation.diagonal().mean() * np.eye(len(scale)))
    from_mean = (psi[:, np.newaxis] - mean) / scale
    by_cloud = -0.5 * np.einsum("bjk,kl,bjl->bj", from_mean, inverse, from_mean)
    by_cloud += np.log([np.mean(cloud == j) for j in range(4)])
    expected = logsumexp(by_cloud.reshape(80, 2, 2), axis=1)
    np.testing.assert_allclose(classifier.decision_function(X), expected[:, 1] - expected[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factors", [(1e3, 1, 1e-3), (1e-6, 1e6, 1)])
def test_the_scale_of_inputs_does_not_matter_without_random_features(factors) -> None:
    X, y = blobs([0, 1, 2])
    plain = ContinualClassifier(random_features=0).fit(X, y)
    scaled = ContinualClassifier(random_features=0).fit(X * factors + 5, y)
    np.testing.assert_allclose(scaled.predict_proba(X * factors + 5), plain.predict_proba(X), rtol=1e-5, atol=1e-8)


def test_a_prediction_does_not_depend_on_the_other_samples() -> None:
    X, y = digits()
    classifier = ContinualClassifier(random_state=0).fit(X[:500], y[:500])
    together = classifier.decision_function(X[500:1600])
    alone = np.concatenate([classifier.decision_function(X[i : i + 1]) for i in range(500, 520)])
    np.testing.assert_allclose(together[:20], alone, rtol=1e-9, atol=1e-9)


# --- many inputs: sums in single precision


def images(num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Samples of 600 inputs, of which each class has some that are larger."""
    random = np.random.RandomState(seed)
    y = random.randint(3, size=num_samples)
    X = random.uniform(size=(num_samples, 600))
    for c in range(3):
        X[y == c, 200 * c : 200 * c + 40] += 0.2
    return X, y


def test_many_inputs_are_learned_alike_in_any_order_and_calls() -> None:
    X, y = images(2500)
    whole = ContinualClassifier(random_state=0).fit(X[:1500], y[:1500])
    cut = ContinualClassifier(random_state=0)
    for part in np.split(np.random.RandomState(1).permutation(1500), [1, 3, 700, 701, 1400]):
        cut.partial_fit(X[part], y[part])
    held = X[1500:]
    np.testing.assert_allclose(cut.predict_proba(held), whole.predict_proba(held), atol=5e-4)
    assert whole.score(held, y[1500:]) > 0.85


def test_sums_in_single_precision_are_those_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = images(1500)
    held, _ = images(100, seed=1)
    single = ContinualClassifier(random_state=0).fit(X, y).decision_function(held)
    monkeypatch.setattr("engram.sklearn.sums.np.float32", np.float64)
    double = ContinualClassifier(random_state=0).fit(X, y).decision_function(held)
    assert not np.array_equal(single, double)
    np.testing.assert_allclose(single, double, atol=1e-3)


@pytest.mark.parametrize(("num_inputs", "num_random"), [(784, 800), (784, 100), (784, 150), (2048, 500), (201, 101)])
def test_every_input_is_seen_by_a_random_feature(num_inputs: int, num_random: int) -> None:
    features = Features(num_inputs, 0, num_random, seed=0)
    origin = features(np.zeros((1, num_inputs)))
    moved = features(np.eye(num_inputs)) - origin
    assert (np.abs(moved[:, features.num_direct :]).max(axis=1) > 0).all()


@pytest.mark.parametrize("num_inputs", [20, 256, 257, 400, 800, 1001])
def test_what_a_linear_classifier_can_separate_is_learned(num_inputs: int) -> None:
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 2000)
    X = random.standard_normal((2000, num_inputs)) + np.where(y, 0.3, -0.3)[:, np.newaxis]
    classifier = ContinualClassifier(random_state=0).fit(X[:1000], y[:1000])
    assert classifier.score(X[1000:], y[1000:]) > 0.85


@pytest.mark.parametrize("num_inputs", [4, 700])
def test_numbers_too_large_to_be_squared_are_refused_before_they_are_added(num_inputs: int) -> None:
    X, y = np.random.default_rng(0).standard_normal((60, num_inputs)), np.arange(60) % 3
    classifier = ContinualClassifier(random_state=0).fit(X, y)
    before = classifier.predict_proba(X)
    with pytest.raises(NotFiniteError, match="too large to be squared"):
        classifier.partial_fit(np.full((1, num_inputs), 1e160), [0])
    np.testing.assert_array_equal(classifier.predict_proba(X), before)


def test_a_device_that_is_not_there_is_refused_though_a_memory_needs_none() -> None:
    with pytest.raises(InputError, match="foo"):
        ContinualClassifier(device="foo").fit(*blobs([0, 1]))


def test_sparse_inputs_are_refused_in_scikit_learns_words() -> None:
    X, y = blobs([0, 1])
    with pytest.raises(TypeError, match="Sparse data was passed"):
        ContinualClassifier().fit(csr_matrix(X), y)


@pytest.mark.parametrize("scale", [1e-12, 255.0, 1e15])
def test_one_scale_of_many_inputs_does_not_matter(scale: float) -> None:
    X, y = images(1500)
    held, _ = images(200, seed=1)
    plain = ContinualClassifier(random_state=0).fit(X, y).predict_proba(held)
    scaled = ContinualClassifier(random_state=0).fit(scale * X, y).predict_proba(scale * held)
    np.testing.assert_allclose(scaled, plain, atol=5e-4)


@pytest.mark.parametrize("offset", [100.0, 10_000.0])
def test_inputs_far_from_zero_keep_their_precision(offset: float) -> None:
    """Sums are around the first sample, so an offset is not squared. A random feature is then linear in the inputs."""
    X, y = images(2000)
    linear = LinearDiscriminantAnalysis().fit(X[:1500], y[:1500]).score(X[1500:], y[1500:])
    far = ContinualClassifier(random_state=0).fit(X[:1500] + offset, y[:1500])
    assert far.score(X[1500:] + offset, y[1500:]) > linear - 0.02


def test_a_prediction_from_many_inputs_does_not_depend_on_the_other_samples() -> None:
    X, y = images(1600)
    classifier = ContinualClassifier(random_state=0).fit(X[:400], y[:400])
    together = classifier.decision_function(X[400:])
    order = np.random.RandomState(0).permutation(1200)
    np.testing.assert_allclose(classifier.decision_function(X[400:][order]), together[order], rtol=1e-9, atol=1e-9)
    alone = np.concatenate([classifier.decision_function(X[i : i + 1]) for i in range(400, 420)])
    np.testing.assert_allclose(together[:20], alone, rtol=1e-9, atol=1e-9)


def test_a_pickle_between_calls_changes_nothing_in_what_follows() -> None:
    X, y = images(600)
    classifier = ContinualClassifier(random_state=0).fit(X[:300], y[:300])
    again = pickle.loads(pickle.dumps(classifier)).partial_fit(X[300:], y[300:])
    classifier.partial_fit(X[300:], y[300:])
    np.testing.assert_array_equal(again.decision_function(X), classifier.decision_function(X))


# --- what it is good for


def test_new_classes_are_learned_as_if_all_came_at_once() -> None:
    X, y = digits()
    stream = ContinualClassifier(random_state=0)
    for task in range(5):
        own = np.flatnonzero(y[:1200] // 2 == task)
        stream.partial_fit(X[own], y[own], task=task)
    assert stream.score(X[1200:], y[1200:]) > LogisticRegression(max_iter=200).fit(X[:1200], y[:1200]).score(
        X[1200:], y[1200:]
    )


def test_a_class_that_comes_back_with_other_inputs_is_remembered_separately() -> None:
    """Elsewhere, and with its sides changed: no linear classifier with one mean for a class can learn both."""
    random = np.random.RandomState(0)
    y = random.randint(2, size=400)
    task = np.arange(400) % 2
    X = np.stack([8.0 * (y ^ task), 8.0 * task], axis=1) + random.normal(size=(400, 2))
    apart, together = (ContinualClassifier(random_features=0) for _ in range(2))
    for t in (0, 1):
        apart.partial_fit(X[task == t], y[task == t], task=t)
        together.partial_fit(X[task == t], y[task == t])
    assert apart.score(X, y) > 0.99
    assert together.score(X, y) < 0.9
    assert apart.score(X[task == 1], y[task == 1], task=1) > 0.99
    assert apart.score(X[task == 1], y[task == 1], task=0) < 0.1, "where it is known, only the task's own means count"


# --- the API


def test_classes_have_scikit_learns_place_and_never_name_a_task() -> None:
    X, y = blobs([0, 1])
    classifier = ContinualClassifier().partial_fit(X, y, [0, 1, 2])
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert classifier.tasks_ == {}
    assert np.isneginf(classifier.decision_function(X)[:, 2]).all()
    with pytest.raises(InputError, match="classes must be a list of labels, not 'winter': a task is named by task="):
        classifier.partial_fit(X, y, "winter")
    with pytest.raises(TypeError):
        classifier.predict(X, "winter")


@pytest.mark.parametrize("head", ["auto", "slda", "ridge"])
def test_weights_count_as_repetitions(head: str) -> None:
    X, y = blobs([0, 1, 2])
    weights = np.random.RandomState(0).randint(0, 4, len(y))
    weighted = ContinualClassifier(head=head, random_state=0).fit(X, y, weights)
    repeated = ContinualClassifier(head=head, random_state=0).fit(np.repeat(X, weights, 0), np.repeat(y, weights))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-5, atol=1e-7)


def test_impossible_weights_are_refused() -> None:
    X, y = blobs([0, 1])
    for weights, message in (
        (np.zeros(len(y)), "Sample weights must contain at least one non-zero"),
        (-np.ones(len(y)), "Negative"),
    ):
        with pytest.raises(ValueError, match=message):
            ContinualClassifier().partial_fit(X, y, sample_weight=weights)
    for of_class, message in (("even", "class_weight must be None"), ({0: -1}, "the weight of the class 0 must be")):
        with pytest.raises(InputError, match=message):
            ContinualClassifier(class_weight=of_class).partial_fit(X, y)


def test_balanced_classes_have_equal_prior_probabilities() -> None:
    X, y = blobs([0, 1], 300)
    few = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:10]])
    classifier = ContinualClassifier(random_features=0, shrinkage=0.0).fit(X[few], y[few])
    as_counted = classifier.decision_function(X)
    odds = np.sum(y[few] == 0) / 10
    np.testing.assert_allclose(
        classifier.set_params(class_weight="balanced").decision_function(X), as_counted + np.log(odds)
    )
    np.testing.assert_allclose(
        classifier.set_params(class_weight={1: 3.0}).decision_function(X), as_counted + np.log(3)
    )


def test_a_network_balances_by_the_counts_so_far() -> None:
    X, y = blobs([0, 1], 200)
    few = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:8]])
    made = {
        given: ContinualClassifier(8, "finetune", class_weight=given, random_state=0).fit(X[few] / 4, y[few])
        for given in (None, "balanced")
    }
    assert np.mean(made["balanced"].predict(X / 4)) > np.mean(made[None].predict(X / 4))
    assert made["balanced"].learner_.counts.tolist() == np.bincount(y[few]).tolist()


def test_a_change_after_fit_takes_effect_or_says_that_it_does_not() -> None:
    classifier = ContinualClassifier().fit(*blobs([0, 1]))
    with pytest.warns(UserWarning, match="^shrinkage: changes take effect at the next fit, not before$"):
        classifier.set_params(shrinkage=0.5)
    assert classifier.learner_.shrinkage != 0.5
    assert classifier.fit(*blobs([0, 1])).learner_.shrinkage == 0.5
    classifier.set_params(verbose=True, class_weight="balanced", partial_fit_epochs=2)


def test_verbose_says_what_was_learned(capsys: pytest.CaptureFixture[str]) -> None:
    ContinualClassifier(verbose=True).fit(*blobs([0, 1]), task="first")
    assert capsys.readouterr().out == "call 1: 60 samples, task 'first', 2 classes, 2 means of 259 features\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": "lda"}, "there is no head 'lda'"),
        ({"head": "slda", "method": "dhp+si"}, "head='slda' can be combined with a penalty, and method='dhp"),
        ({"method": "replay"}, "stores no samples of old tasks: replay is a method of engram.run"),
        ({"shrinkage": 2.0}, r"shrinkage must lie in \[0, 1\], not 2.0"),
        ({"random_features": -1}, "random_features must be a whole number of at least 0, not -1"),
        ({"random_features": 10**7}, "the second moment of 10000003 features takes"),
    ],
)
def test_impossible_parameters_are_refused(change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ContinualClassifier(**change).fit(*blobs([0, 1]))


def test_singular_features_need_shrinkage() -> None:
    X, y = blobs([0, 1])
    doubled = np.concatenate([X, X], axis=1)
    with pytest.raises(InputError, match="raise shrinkage"):
        ContinualClassifier(random_features=0, shrinkage=0.0).fit(doubled, y).predict(doubled)


def test_samples_that_are_all_the_same_are_learned() -> None:
    X, y = [[0.0], [1.0]], ["cold", "warm"]
    classifier = ContinualClassifier(random_state=0)
    for task in ("winter", "summer", None, "winter"):
        classifier.partial_fit(X, y, task=task)
        assert classifier.predict(X).tolist() == y
        assert classifier.predict([[-0.1], [1.2]]).tolist() == y


@pytest.mark.parametrize("head", ["auto", "slda", "ncm", "ridge"])
def test_what_only_training_uses_is_named_where_nothing_is_trained(head: str) -> None:
    X, y = blobs([0, 1])
    given = {"hidden": [8], "learning_rate": 0.5, "epochs": np.int64(3), "partial_fit_epochs": 2}
    words = "a memory of sums" if head == "auto" else f"the head {head}"
    for method in ("fit", "partial_fit"):
        with pytest.warns(UserWarning, match="no effect on") as seen:
            getattr(ContinualClassifier(head=head, **given), method)(X, y)
        (warning,) = seen
        assert str(warning.message) == (
            "hidden, learning_rate, epochs, partial_fit_epochs: no effect on "
            f"{words}, which takes one pass and trains nothing"
        )
        assert warning.filename == __file__
    with pytest.warns(UserWarning, match=r"^epochs: no effect on"):
        ContinualClassifier(head=head, epochs=3).fit(X, y).partial_fit(X, y)
    ContinualClassifier(head=head, hidden=np.array([256]), epochs=np.int64(20), batch_size=4).fit(X, y)
    ContinualClassifier(head="cope", **given).fit(X, y)


# --- files


@pytest.mark.parametrize("head", ["auto", "slda", "ncm", "ridge", "linear"])
def test_a_saved_classifier_continues_like_one_never_saved(head: str, tmp_path: Path) -> None:
    more = {"hidden": 4} if head == "linear" else {}
    classifier = ContinualClassifier(head=head, random_state=0, class_weight={"a": 2.0, "b": 1.0}, **more)
    classifier.fit(*blobs(["a", "b"]), task=1).partial_fit(*blobs(["b", "c"], shift=1.0), task=2)
    classifier.save(tmp_path / "model")
    for again in (ContinualClassifier.load(tmp_path / "model"), pickle.loads(pickle.dumps(classifier))):
        assert again.get_params() == classifier.get_params()
        more = blobs(["a", "d"], seed=3)
        ours = pickle.loads(pickle.dumps(classifier)).partial_fit(*more, task=1)
        np.testing.assert_array_equal(
            again.partial_fit(*more, task=1).predict_proba(more[0]), ours.predict_proba(more[0])
        )
        assert {t: c.tolist() for t, c in again.tasks_.items()} == {t: c.tolist() for t, c in ours.tasks_.items()}


@pytest.mark.parametrize(
    "change",
    [{"clouds": []}, {"num_direct": 1}, {"clouds": [[0, 9]]}, {"clouds": [[0, 0], [0, 0]]}, {"num_random": 3},
     {"seed": "x"}, {"num_random": 10**9}, {"shrinkage": None}, {"features": 4}, {"clouds": [[0.5, 0], [0, 1]]}],
    ids=str,
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(change, tmp_path: Path) -> None:
    ContinualClassifier(random_features=2).fit(*blobs([0, 1])).save(tmp_path / "model")
    header, tensors = read_tensors(tmp_path / "model", "classifier", 3)
    write_tensors(tmp_path / "odd", "classifier", 3, {**header, **change}, tensors)
    with pytest.raises(InputError, match="odd does not hold a classifier"):
        ContinualClassifier.load(tmp_path / "odd")


def test_a_memory_needs_no_samples_to_be_pickled_small() -> None:
    learner = MemoryLearner(Features(2, 2, 0, seed=0), num_classes=2, shrinkage=0.1)
    X = np.random.RandomState(0).normal(size=(5000, 2))
    learner.learn(X, (X[:, 0] > 0).astype(int), None, lambda counts: None, task=0, epochs=1)
    assert len(pickle.dumps(learner)) < 2000


def test_samples_that_are_too_large_change_nothing() -> None:
    X, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3
    classifier = ContinualClassifier(random_state=0).partial_fit(X, y, task="a")
    with pytest.raises(ValueError, match="too large"):
        classifier.partial_fit(X * 1e200, y + 5, task="b")
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert list(classifier.tasks_) == ["a"]


@pytest.mark.parametrize("wrong", [{0: -3}, "zz"])
def test_a_class_weight_set_after_fit_is_checked(wrong: object) -> None:
    X, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3
    classifier = ContinualClassifier(random_state=0).fit(X, y).set_params(class_weight=wrong)
    with pytest.raises(ValueError, match="class"):
        classifier.predict(X)


def test_what_only_a_network_uses_is_named_for_the_memory() -> None:
    X, y = blobs([0, 1])
    with pytest.warns(UserWarning, match="^strength, masked: no effect on a memory of sums"):
        ContinualClassifier(strength=30, masked=False).fit(X, y)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"method": "si", "random_features": 500}, "random_features: no effect on si"),
        ({"head": "dhp", "random_features": 0, "shrinkage": 0.1}, "random_features, shrinkage: no effect on dhp"),
        ({"method": "dhp", "strength": 3.0}, "strength: no effect on dhp"),
        (
            {"head": "ncm", "shrinkage": 0.1},
            "shrinkage: no effect on the head ncm, which takes one pass and trains nothing",
        ),
    ],
)
def test_what_only_a_memory_or_another_method_uses_is_named_for_a_network(params: dict[str, Any], words: str) -> None:
    X, y = blobs([0, 1])
    for method in ("fit", "partial_fit"):
        with pytest.warns(UserWarning, match="no effect on") as seen:
            getattr(ContinualClassifier(**params), method)(X, y)
        assert [str(warning.message) for warning in seen] == [words]


def test_what_a_method_uses_is_not_named() -> None:
    X, y = blobs([0, 1])
    ContinualClassifier(method="dhp+mas", strength=1.0, steady=False, masked=False, memory_size=9, epochs=2).fit(X, y)
    ContinualClassifier(head="ridge", random_features=9, shrinkage=0.1).fit(X, y)
    ContinualClassifier(head="slda", method="si", random_features=9, shrinkage=0.1, strength=1.0, epochs=2).fit(X, y)


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_samples_that_are_too_large_do_not_start_a_memory(method: str) -> None:
    X, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3
    classifier = ContinualClassifier(random_state=0)
    with pytest.raises(ValueError, match="too large"):
        getattr(classifier, method)(X * 1e200, y)
    assert not hasattr(classifier, "classes_")
