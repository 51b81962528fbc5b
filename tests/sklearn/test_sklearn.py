"""The scikit-learn estimator: scikit-learn's own checks, and what it promises beyond them."""

from __future__ import annotations

import doctest
import gc
import pickle
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import engram.sklearn.classifier
from builders import assert_tensors_equal
from engram import InputError
from engram.common.registry import PENALTIES, Registration
from engram.config.methods import all_methods
from engram.engine.cpu import fused
from engram.sklearn import ContinualClassifier, network
from engram.sklearn.network import ClippedDescent, ContinualLearner, Reservoir
from engram.sklearn.settings import make_config

SMALL = {"hidden": (8,), "batch_size": 4, "memory_size": 10, "epochs": 3, "random_state": 0}
NETWORK = {**SMALL, "method": "dhp+si"}
FEATURES = 3


@pytest.fixture(autouse=True)
def _one_thread():
    """Networks as small as these take many times as long on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blobs(classes, num_samples: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Clouds of points, one at the same place for each class whenever it is asked for."""
    random = np.random.RandomState(seed)
    y = np.array(classes)[random.randint(len(classes), size=num_samples)]
    places = {c: np.random.RandomState(ord(str(c))).normal(scale=4, size=FEATURES) for c in classes}
    return np.stack([places[c] for c in y]) + random.normal(size=(num_samples, FEATURES)), y


def tensors_of(classifier: ContinualClassifier) -> dict[str, torch.Tensor]:
    learner = classifier.learner_
    held = {} if learner.memory.inputs is None else {"inputs": learner.memory.inputs, "targets": learner.memory.targets}
    return {**learner.model.state_dict(), **learner.penalty.state_dict(), **held}


def assert_classifiers_equal(one: ContinualClassifier, other: ContinualClassifier) -> None:
    assert one.classes_.tolist() == other.classes_.tolist()
    assert_tensors_equal(tensors_of(one), tensors_of(other))


# --- scikit-learn's own word ----------------------------------------------------------------------------------------


def test_it_works_inside_pipelines_searches_and_cross_validation() -> None:
    X, y = make_blobs(60, centers=3, random_state=0)
    pipeline = Pipeline([("scale", StandardScaler()), ("learn", ContinualClassifier(**{**NETWORK, "epochs": 10}))])
    grid = {"learn__strength": np.logspace(-1, 1, 2), "learn__method": ["dhp+si"], "learn__hidden": [(8,), 4]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(1000 * X, y)
    assert search.score(1000 * X, y) > 0.85
    assert cross_val_score(make_pipeline(StandardScaler(), pipeline), X, y, cv=2).mean() > 0.8
    copied = clone(search.best_estimator_)
    assert copied.get_params()["learn__strength"] == search.best_params_["learn__strength"]
    with pytest.raises(NotFittedError):
        copied.predict(X)


def test_scikit_learn_is_needed_only_by_engram_sklearn() -> None:
    code = (
        "import engram, sys; assert 'sklearn' not in sys.modules; sys.modules['sklearn'] = None; import engram.sklearn"
    )
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert error.endswith("ImportError: scikit-learn is not installed: pip install 'engram-cl[sklearn]'\n")


def test_examples_in_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    X, y = [[0.0], [1.0]], ["cold", "warm"]
    given = {"classifier": ContinualClassifier(random_state=0).partial_fit(X, y, task="winter"), "X": X, "y": y}
    found = doctest.testmod(engram.sklearn.classifier, extraglobs=given)
    assert (found.attempted, found.failed) == (14, 0)


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_gradients_of_unscaled_features_are_clipped_to_norm_one(scale: float) -> None:
    """So the first step, plain SGD, moves the weights by exactly the learning rate."""
    config = make_config(ContinualClassifier(hidden=(8,)).get_params(), "finetune", seed=0)
    learner = ContinualLearner(config, 2, 2, torch.device("cpu"), masked=True, memory_size=1)
    before = {name: theta.detach().clone() for name, theta in learner.model.named_parameters()}
    inputs = scale * np.array([[1.0, -2.0], [3.0, 0.5]], dtype=np.float32)
    learner.learn(inputs, np.array([0, 1]), None, lambda counts: None, task=0, epochs=1)
    moved = [(theta.detach() - before[name]).square().sum() for name, theta in learner.model.named_parameters()]
    assert torch.stack(moved).sum().sqrt().item() == pytest.approx(config.learning_rate, rel=1e-3)


# --- partial_fit: whatever comes ------------------------------------------------------------------------------------

batches_of_labels = st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=6), min_size=1, max_size=5)


@given(
    batches_of_labels, st.sampled_from(all_methods()), st.booleans(), st.booleans(), st.randoms(use_true_random=False)
)
@settings(deadline=None, max_examples=40)
def test_any_labels_at_any_time(batches, method: str, masked: bool, steady: bool, random) -> None:
    classifier = ContinualClassifier(method=method, masked=masked, steady=steady, **SMALL)
    seen: set[str] = set()
    for labels in batches:
        X = np.random.RandomState(len(seen)).normal(size=(len(labels), FEATURES))
        before = tensors_of(classifier) if seen else {}
        new = set(labels) - seen
        classifier.partial_fit(X, labels, task=random.choice([None, "x", 3]))
        seen |= set(labels)
        assert classifier.classes_.tolist() == sorted(seen)
        grown = classifier.learner_.model.state_dict()["head.weight"]
        assert len(grown) == len(seen)
        assert not before or len(before["head.weight"]) == len(seen) - len(new)
        probabilities = classifier.predict_proba(X)
        assert probabilities.dtype == np.float64
        assert probabilities.shape == (len(labels), len(seen))
        np.testing.assert_allclose(probabilities.sum(axis=1), 1)
        assert set(classifier.predict(X)) <= seen
    assert all(tensor.isfinite().all() for tensor in tensors_of(classifier).values())


@given(st.permutations(range(8)), st.sampled_from(["finetune", "dhp", "dhp+si", "mas"]))
@settings(deadline=None, max_examples=20)
def test_the_order_within_one_batch_does_not_matter(order, method: str) -> None:
    X, y = blobs([0, 1, 2], 8)
    setting = {**SMALL, "batch_size": 8, "method": method}
    one = ContinualClassifier(**setting).partial_fit(X, y)
    other = ContinualClassifier(**setting).partial_fit(X[list(order)], y[list(order)])
    np.testing.assert_allclose(one.predict_proba(X), other.predict_proba(X), atol=1e-5)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["dhp+si", "dhp+online-ewc"]))
@settings(deadline=None, max_examples=15)
def test_importances_do_not_depend_on_how_a_task_is_split_into_calls(cuts, method: str) -> None:
    """With a learning rate too small to matter, samples one at a time and in batches leave the same memory."""
    X, y = blobs([0, 1], sum(cuts) + 10)
    setting = {**SMALL, "learning_rate": 1e-30, "method": method}
    whole = ContinualClassifier(**setting).partial_fit(X, y, classes=[0, 1])
    cut = ContinualClassifier(**setting)
    for part_X, part_y in zip(np.split(X, np.cumsum(cuts)), np.split(y, np.cumsum(cuts)), strict=True):
        cut.partial_fit(part_X, part_y, classes=[0, 1])
    assert cut.learner_.num_samples == whole.learner_.num_samples == len(y)
    assert len(whole.learner_.memory) == (0 if method == "dhp+si" else 10)
    for name in ("inputs", "targets"):
        one, other = getattr(whole.learner_.memory, name), getattr(cut.learner_.memory, name)
        assert one is other is None or torch.equal(one, other)


def test_memory_takes_no_more_rows_than_its_samples_need() -> None:
    whole, cut = (Reservoir(10**30, seed=0) for _ in range(2))
    inputs, targets = torch.arange(10_000.0)[:, None], torch.arange(10_000) % 3
    whole.add(inputs, targets)
    for some in torch.arange(10_000).split(700):
        cut.add(inputs[some], targets[some])
    for memory in (whole, cut):
        assert len(memory.inputs) == len(memory.targets) == 2**14
        assert len(memory) == 10_000
        assert torch.equal(memory.inputs[:10_000], inputs)
        assert torch.equal(memory.targets[:10_000], targets)
    small = Reservoir(5000, seed=0)
    for some in torch.arange(10_000).split(700):
        small.add(inputs[some], targets[some])
    assert len(small.inputs) == 5000, "it never has more rows than its size"


def test_memory_is_a_uniform_sample() -> None:
    """Each of 40 samples is among 10 with probability 1/4: over 300 seeds 75 times, with a deviation of 7.5."""
    counts = np.zeros(40)
    for seed in range(300):
        memory = Reservoir(10, seed)
        memory.add(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.int64))
        assert len(memory) == 10
        counts[memory.inputs[:, 0].int().numpy()] += 1
    assert counts.sum() == 3000, "no sample twice"
    assert counts.min() > 75 - 4.5 * 7.5
    assert counts.max() < 75 + 4.5 * 7.5


@pytest.mark.parametrize("masked", [True, False])
def test_one_sample_at_a_time_is_learned(masked: bool) -> None:
    X, y = blobs(["a", "b", "c"], 250)
    classifier = ContinualClassifier(**{**NETWORK, "masked": masked})
    for i in range(len(y)):
        classifier.partial_fit(X[i : i + 1], y[i : i + 1])
    assert classifier.score(*blobs(["a", "b", "c"], 200, seed=1)) > 0.9


def test_a_single_class_is_predicted_for_all() -> None:
    X, _ = blobs([0])
    classifier = ContinualClassifier(**NETWORK).fit(X, np.full(len(X), "only"))
    assert set(classifier.predict(X)) == {"only"}
    assert (classifier.predict_proba(X) == 1).all()


@pytest.mark.parametrize("method", ["dhp+si", "ewc"])
def test_types_of_numbers_do_not_matter(method: str) -> None:
    X, y = blobs([0, 1])
    X = np.rint(X)
    made = [ContinualClassifier(method=method, **SMALL) for _ in range(4)]
    for classifier, kind in zip(made, (np.float64, np.float32, np.int64, np.int8), strict=True):
        classifier.partial_fit(X.astype(kind), y, task=1).partial_fit(X.astype(kind), y, task=2)
        assert_classifiers_equal(classifier, made[0])
        np.testing.assert_array_equal(classifier.predict_proba(X.astype(kind)), made[0].predict_proba(X))


def test_memory_layout_of_arrays_does_not_matter() -> None:
    X, y = blobs([0, 1])
    X = X.astype(np.float32)
    expected = ContinualClassifier(**NETWORK).partial_fit(X, y)
    locked = X.copy()
    locked.flags.writeable = False
    for same in (np.asfortranarray(X), locked, X[::-1].copy()[::-1], X.astype(">f4"), X.tolist()):
        assert_classifiers_equal(ContinualClassifier(**NETWORK).partial_fit(same, y), expected)
        np.testing.assert_array_equal(expected.predict(same), expected.predict(X))


def test_equal_seeds_give_equal_networks() -> None:
    X, y = blobs([0, 1, 2])
    make = [ContinualClassifier(**{**NETWORK, "random_state": seed}).partial_fit(X, y) for seed in (1, 1, 2)]
    state = torch.get_rng_state()
    assert_classifiers_equal(make[0], make[1])
    assert not np.array_equal(make[0].predict_proba(X), make[2].predict_proba(X))
    make[0].partial_fit(X, y + 3)
    assert torch.equal(torch.get_rng_state(), state), "PyTorch's own generator is left alone"


def test_threads_do_not_disturb_each_other() -> None:
    X, y = blobs([0, 1])

    def learned(seed: int) -> ContinualClassifier:
        classifier = ContinualClassifier(**{**NETWORK, "hidden": (64,), "epochs": 1, "random_state": seed}).fit(X, y)
        for more in range(2, 8):
            classifier.partial_fit(X[:1], [more])
        return classifier

    state = torch.get_rng_state()
    alone = [learned(seed) for seed in range(12)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(learned, range(12)))
    finally:
        sys.setswitchinterval(before)
    for one, other in zip(alone, together, strict=True):
        assert_classifiers_equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_fit_starts_afresh() -> None:
    X, y = blobs([0, 1, 2])
    used = ContinualClassifier(**NETWORK).partial_fit(X, y + 7, task="old")
    used.fit(X, y)
    assert_classifiers_equal(used, ContinualClassifier(**NETWORK).fit(X, y))
    assert used.tasks_ == {}


# --- growth, tasks, scenarios ---------------------------------------------------------------------------------------


def test_new_classes_leave_the_rows_of_old_ones() -> None:
    classifier = ContinualClassifier(**{**NETWORK, "learning_rate": 1e-30}).fit(*blobs(["m", "p"]))
    before = {n: t.clone() for n, t in classifier.learner_.model.state_dict().items() if n.startswith("head.")}
    classifier.partial_fit(*blobs(["a", "z", "n"]))
    after = classifier.learner_.model.state_dict()
    for name in ("head.weight", "head.alpha", "head.hebb"):
        assert torch.equal(after[name][:2], before[name]), name
    assert classifier.classes_.tolist() == ["a", "m", "n", "p", "z"], "sorted, as scikit-learn has them"
    assert classifier._labels.values.tolist() == ["m", "p", "a", "n", "z"], "in the head, as they came"


def test_declared_classes_have_a_column_and_no_probability_before_their_first_sample() -> None:
    X, y = blobs([1, 3])
    classifier = ContinualClassifier(**NETWORK).partial_fit(X, y, classes=[3, 2, 1])
    assert classifier.classes_.tolist() == [1, 2, 3]
    assert not classifier.predict_proba(X)[:, 1].any()
    classifier.partial_fit(X[:1], [2]).partial_fit(X[:1], [9], classes=[9, 8])
    assert classifier.classes_.tolist() == [1, 2, 3, 8, 9]
    assert classifier.predict_proba(X)[:, 1].all()
    with pytest.raises(InputError, match=r"y holds 4, which is not among the classes \[5, 6\]"):
        classifier.partial_fit(X[:1], [4], classes=[5, 6])
    assert classifier.classes_.tolist() == [1, 2, 3, 8, 9]


def consolidations(classifier: ContinualClassifier) -> int:
    return len(classifier.learner_.penalty.terms)


def test_a_task_is_consolidated_when_its_label_changes() -> None:
    X, y = blobs([0, 1])
    classifier = ContinualClassifier(method="ewc", **SMALL)
    for task, expected in [("a", 0), ("a", 0), ("b", 1), ("b", 1), ("a", 2), (None, 3), (None, 3), (np.int64(2), 4)]:
        classifier.partial_fit(X, y, task=task)
        assert consolidations(classifier) == expected
    assert consolidations(classifier.consolidate()) == 5
    assert consolidations(classifier.consolidate()) == 5, "there is nothing new to consolidate"
    assert len(classifier.learner_.memory) == 0, "what was kept of a task is discarded with it"
    assert set(classifier.tasks_) == {"a", "b", 2}


def test_call_with_only_new_classes_starts_a_task_where_none_is_named() -> None:
    classifier = ContinualClassifier(method="ewc", **SMALL)
    classifier.partial_fit(*blobs([0, 1], 3))
    classifier.partial_fit(*blobs([2, 3], 3))
    assert consolidations(classifier) == 0, "the first had less than a batch, as at the beginning of any stream"
    classifier.partial_fit(*blobs([3, 4]))
    assert consolidations(classifier) == 0, "one of the classes was known"
    classifier.partial_fit(*blobs([5, 6]))
    assert consolidations(classifier) == 1
    assert classifier.learner_.classes == [5, 6]
    classifier.partial_fit(*blobs([0, 5]))
    assert consolidations(classifier) == 1


def test_masked_training_leaves_other_tasks_outputs_alone() -> None:
    old, new = blobs(["a", "b"]), blobs(["c", "d"])
    for masked in (True, False):
        classifier = ContinualClassifier(**{**NETWORK, "masked": masked, "method": "finetune"}).fit(*old, task=1)
        before = classifier.learner_.model.head.weight[:2].detach().clone()
        classifier.partial_fit(*new, task=2)
        assert torch.equal(classifier.learner_.model.head.weight[:2], before) == masked


def test_a_task_restricts_the_prediction_to_its_classes() -> None:
    old, new = blobs(["a", "b"], 100), blobs(["c", "d"], 100)
    classifier = ContinualClassifier(**NETWORK).fit(*old, task="first")
    for _ in range(3):
        classifier.partial_fit(*new, task="second")
    assert classifier.tasks_["first"].tolist() == ["a", "b"]
    assert set(classifier.predict(new[0], task="first")) <= {"a", "b"}
    probabilities = classifier.predict_proba(old[0], task="first")
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert not probabilities[:, 2:].any()
    assert classifier.score(*old, task="first") > 0.9
    assert classifier.score(*new, task="second") > 0.9
    with pytest.raises(ValueError, match=r"there is no task 'third', only 'first', 'second'"):
        classifier.predict(old[0], task="third")
    with pytest.raises(ValueError, match="there is no task 0"):
        ContinualClassifier(**NETWORK).fit(*old).predict_proba(old[0], task=0)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "y", "options", "message"),
    [
        (scipy.sparse.csr_matrix(np.eye(3)), [0, 1, 0], {}, "Sparse"),
        ([[1.0, float("nan")]], [0], {}, "NaN"),
        ([[1.0, float("inf")]], [0], {}, "infinity"),
        ([[1.0, 2.0]], [0, 1], {}, "inconsistent numbers"),
        ([[1.0, 2.0]] * 3, [0.1, 0.2, 0.3], {}, "continuous"),
        ([[1.0, 2.0]], [0], {"task": ["a"]}, r"hashable value, not \['a'\]"),
        ([[1.0, 2.0]], [0], {"task": float("nan")}, "NaN cannot be the name of a task"),
        ([[1.0, 2.0]], ["a"], {"classes": []}, "y holds 'a', but classes is empty"),
        ([[1.0, 2.0]], ["a"], {"classes": [1, 2]}, "labels must be of one kind: 1 is one of the numbers, and a one"),
    ],
)
def test_impossible_samples_are_refused(X, y, options, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ContinualClassifier(**NETWORK).partial_fit(X, y, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "dhp+sy"}, r"there is no method 'dhp\+sy' \(did you mean dhp\+si\?\)"),
        ({"hidden": (0,)}, r"hidden must be widths of at least 1, not \(0,\)"),
        ({"hidden": ("wide",)}, "hidden must be a list of whole numbers"),
        ({"strength": -1.0}, "strength must be above 0, not -1.0"),
        ({"learning_rate": 0}, "learning_rate must be above 0, not 0.0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"partial_fit_epochs": 0}, "partial_fit_epochs must be a whole number of at least 1, not 0"),
        ({"memory_size": 0}, "memory_size must be a whole number of at least 1, not 0"),
        ({"device": "abacus"}, "there is no device 'abacus' here"),
    ],
)
def test_impossible_parameters_are_refused(change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ContinualClassifier(**{**NETWORK, **change}).partial_fit(*blobs([0, 1]))


def test_the_default_strength_of_another_penalty_is_its_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {"mine": Registration("mine", PENALTIES["mas"].make, {"strength": 0.01})}
    monkeypatch.setattr(PENALTIES, "_registered", PENALTIES._registered | registered)
    for method, chosen, strength in (
        ("dhp+mine", None, 0.01),
        ("mine", 2.0, 2.0),
        ("mas", None, 0.03),
        ("dhp", None, None),
    ):
        params = ContinualClassifier(**{**NETWORK, "method": method, "strength": chosen}).get_params()
        assert make_config(params, method, 0).strength == strength
    ContinualClassifier(**{**NETWORK, "method": "mine"}).fit(*blobs([0, 1]))


def test_what_does_not_fit_what_was_learned_is_refused_and_changes_nothing() -> None:
    X, y = blobs([0, 1])
    classifier = ContinualClassifier(**NETWORK).fit(X, y)
    before = {name: tensor.clone() for name, tensor in tensors_of(classifier).items()}
    for bad in (lambda: classifier.partial_fit(X[:, :2], y), lambda: classifier.predict(X[:, :2])):
        with pytest.raises(ValueError, match="X has 2 features"):
            bad()
    with pytest.raises(ValueError, match="labels must be of one kind: 0 is one of the numbers, and 0 one of the text"):
        classifier.partial_fit(X, y.astype(str), task="new")
    after = tensors_of(classifier)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert consolidations(classifier) == 0


def test_a_call_that_fails_leaves_everything_as_it_was() -> None:
    X, y = blobs([0, 1])
    classifier = ContinualClassifier(method="ewc", **SMALL).fit(X, y, task="old")
    before = pickle.dumps(classifier)
    classifier.partial_fit_epochs = 0
    with pytest.raises(InputError, match="partial_fit_epochs"):
        classifier.partial_fit(X, y + 5, task="new")
    classifier.partial_fit_epochs = 1
    assert pickle.dumps(classifier) == before
    classifier.memory_size = 0
    with pytest.raises(InputError, match="memory_size"):
        classifier.fit(X[:, :2], y)  # whose number of features was noted before
    classifier.memory_size = SMALL["memory_size"]
    assert pickle.dumps(classifier) == before
    unfitted = ContinualClassifier(**{**NETWORK, "partial_fit_epochs": 0})
    for call in (lambda: unfitted.partial_fit(X, y), lambda: unfitted.set_params(epochs=0).fit(X, y)):
        with pytest.raises(InputError, match="epochs"):
            call()
        assert not hasattr(unfitted, "classes_")
        assert not hasattr(unfitted, "n_features_in_")


@pytest.mark.parametrize(
    ("known", "later"),
    [
        (np.array([2**62, 2**62 + 1]), np.array([5, 2**63 + 1], dtype=np.uint64)),
        (np.array([2**62, 2**62 + 1]), np.array([3.0, 4.0])),
        (np.array([1.0, 2.0**62]), np.array([2**62 + 1, 7])),
    ],
    ids=["unsigned", "floats later", "floats first"],
)
def test_labels_that_would_merge_are_refused(known: np.ndarray, later: np.ndarray) -> None:
    X = np.eye(2, FEATURES)
    classifier = ContinualClassifier(**NETWORK).partial_fit(X, known)
    error = r"labels of the types \w+ and \w+ cannot be compared exactly: \d+ would become"
    with pytest.raises(InputError, match=error):
        classifier.partial_fit(X, later)
    with pytest.raises(InputError, match=error):
        ContinualClassifier(**NETWORK).partial_fit(
            X, known, classes=np.concatenate([later, known[:1].astype(later.dtype)])
        )
    assert classifier.classes_.tolist() == known.tolist()
    small = ContinualClassifier(**NETWORK).partial_fit(X, np.array([1, 2])).partial_fit(X, np.array([2.0, 3.0]))
    assert small.classes_.tolist() == [1, 2, 3], "those that stay apart are taken"


@pytest.mark.parametrize("method", ["finetune", "online-ewc", "si", "dhp+mas"])
@pytest.mark.parametrize("given", ["plain", "weights", "one class"])
def test_steps_are_those_of_autograd_and_pytorch(method: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def learned() -> ContinualClassifier:
        classifier = ContinualClassifier(**{**SMALL, "method": method, "hidden": (8, 5)})
        for task, classes in enumerate(["ab", "c" if given == "one class" else "cde"]):
            X, y = blobs(list(classes))
            weight = np.random.RandomState(0).rand(len(y)) if given == "weights" else None
            classifier.partial_fit(X, y, sample_weight=weight, task=task).partial_fit(X[:3], y[:3], task=task)
        return classifier

    fast = learned()
    monkeypatch.setattr(network, "known_chain", lambda model: None)
    monkeypatch.setattr(fused, "compiled_clip", lambda: None)
    assert_classifiers_equal(fast, learned())


def test_a_perceptron_is_trained_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ClippedDescent, "_by_autograd")
    X, y = blobs(["a", "b"])
    for method in ("finetune", "online-ewc"):
        ContinualClassifier(**SMALL, method=method).partial_fit(X, y).consolidate().partial_fit(X, y)
    with pytest.raises(AttributeError):
        ContinualClassifier(**SMALL, method="dhp").partial_fit(X, y)


def test_inputs_that_must_not_be_written_to_are_learned_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    X, y = blobs(["a", "b"])
    X = X.astype(np.float32)
    X.setflags(write=False)
    ContinualClassifier(**NETWORK).partial_fit(X, y)
    assert not recwarn


def test_divergence_names_a_remedy() -> None:
    X, y = blobs([0, 1, 2])
    with pytest.raises(ValueError, match=r"diverged with a learning_rate of 1e\+30: scale the features"):
        ContinualClassifier(**{**NETWORK, "learning_rate": 1e30}).fit(X, y)
    unscaled = ContinualClassifier(**{**NETWORK, "method": "dhp+si"}).fit(1e6 * X, y)
    assert np.isfinite(unscaled.predict_proba(1e6 * X)).all()


# --- a long life ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dhp+si", "dhp+online-ewc"])  # which keeps samples, as MAS does
def test_a_thousand_calls_take_no_more_memory_and_no_more_time(method: str) -> None:
    classifier = ContinualClassifier(method=method, **SMALL)
    X, y = blobs([0, 1, 2, 3], 2000)
    sizes, tensors, seconds = [], [], []
    for i in range(1000):
        began = time.process_time()
        classifier.partial_fit(X[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2], task=i // 25 % 8)
        seconds.append(time.process_time() - began)
        if i in (199, 999):
            sizes.append(len(pickle.dumps(classifier)))
            gc.collect()
            tensors.append(sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects()))
    assert tensors[1] == tensors[0], "anywhere in the process"
    assert sizes[1] < sizes[0] + 1000, "a few numbers, which are longer to write"
    early, late = statistics.median(seconds[100:300]), statistics.median(seconds[800:])
    assert late < 1.5 * early


def test_ewc_grows_with_its_tasks_and_not_with_its_calls() -> None:
    classifier = ContinualClassifier(method="ewc", **SMALL)
    X, y = blobs([0, 1])
    sizes = []
    for i in range(60):
        classifier.partial_fit(X, y, task=i // 20)
        sizes.append(len(pickle.dumps(classifier)))
    assert sizes[19] < sizes[1] + 100
    assert sizes[20] > sizes[19] + 100
    assert consolidations(classifier) == 2


def test_a_scaled_head_is_scaled_by_the_first_samples_before_its_penalty_starts() -> None:
    X, y = make_blobs(60, n_features=FEATURES, centers=3, random_state=0)
    classifier = ContinualClassifier(**SMALL | {"method": "scaled+si", "epochs": 1, "learning_rate": 1e-9})
    classifier.partial_fit(X[:20], y[:20], task=0)
    learner = classifier.learner_
    logits = learner.model.eval()(torch.from_numpy(X[:20]).float()).detach()
    assert float(logits.square().mean().sqrt()) == pytest.approx(0.25, rel=1e-3)
    torch.testing.assert_close(learner.penalty.group("start")["head.weight"], learner.model.head.weight.detach())
    weight = learner.model.head.weight.detach().clone()
    classifier.partial_fit(100 * X[20:], y[20:], task=1)
    torch.testing.assert_close(classifier.learner_.model.head.weight.detach()[: len(weight)], weight)
