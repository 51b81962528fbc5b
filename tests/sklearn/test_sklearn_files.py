"""Classifiers in files: they go on as if never saved, old files keep loading, and damaged ones are refused whole."""

from __future__ import annotations

import json
import pickle
import struct
import tempfile
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import InputError
from engram.common.tensor_file import read_tensors, write_tensors
from engram.config.methods import all_methods
from engram.sklearn import ContinualClassifier
from engram.sklearn.files import FORMAT

SAVED = Path(__file__).parents[1] / "integrations" / "files" / "classifier-1.safetensors"
SMALL = {"hidden": (4,), "batch_size": 4, "memory_size": 6, "epochs": 2, "random_state": 0}
NETWORK = {**SMALL, "method": "dhp+si"}
# What the saved file was trained on, and the class and probability that it gave for each of these samples then.
SAVED_X = np.linspace(-1, 1, 12).reshape(4, 3)
SAVED_CLASSES = ["ant", "bee", "cat"]


def samples(classes, num_samples: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    return random.normal(size=(num_samples, 3)), np.array(classes)[random.randint(len(classes), size=num_samples)]


def tensors_of(classifier: ContinualClassifier) -> list[torch.Tensor]:
    learner, memory = classifier.learner_, classifier.learner_.memory
    held = [] if memory.inputs is None else [memory.inputs, memory.targets]
    return [*learner.model.state_dict().values(), *learner.penalty.state_dict().values(), *held]


def continue_learning(classifier: ContinualClassifier, classes: np.ndarray) -> ContinualClassifier:
    """Some more of the current task, a task of a new class, and the old task again."""
    classifier.partial_fit(*samples(classes, seed=2), task=classifier._task)
    classifier.partial_fit(*samples(classes, seed=3), task="another")
    return classifier.partial_fit(*samples(classes[:1], seed=4), task=1)


def assert_classifiers_equal(one: ContinualClassifier, other: ContinualClassifier) -> None:
    assert one.classes_.tolist() == other.classes_.tolist()
    assert one.classes_.dtype == other.classes_.dtype
    assert one._task_rows == other._task_rows
    assert all(map(torch.equal, tensors_of(one), tensors_of(other)))
    X, _ = samples([0])
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))
    np.testing.assert_array_equal(one.predict(X, task=1), other.predict(X, task=1))


@pytest.mark.slow
@given(
    st.sampled_from(all_methods()),
    st.booleans(),
    st.sampled_from(
        [np.array(["a", "bc"]), np.array([3, -1]), np.array([True, False]), np.array(["x", "y"], dtype=object),
         np.array([1.0, 2.0]), np.array([7, 9], dtype=np.uint8)]
    ),
)  # fmt: skip
@settings(deadline=None, max_examples=15)
def test_loaded_classifier_learns_like_one_never_saved(method: str, steady: bool, classes: np.ndarray) -> None:
    classifier = ContinualClassifier(method=method, steady=steady, **SMALL)
    classifier.fit(*samples(classes), task=1).partial_fit(*samples(classes, seed=1), task=2)
    for again in (saved_and_loaded(classifier), pickle.loads(pickle.dumps(classifier))):
        assert_classifiers_equal(again, classifier)
        ours, theirs = pickle.loads(pickle.dumps(classifier)), again
        assert_classifiers_equal(continue_learning(ours, classes), continue_learning(theirs, classes))


def saved_and_loaded(classifier: ContinualClassifier) -> ContinualClassifier:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        classifier.save(path)
        return ContinualClassifier.load(path)


def test_parameters_names_and_joblib(tmp_path: Path) -> None:
    classifier = ContinualClassifier(**{**NETWORK, "hidden": [4], "strength": np.float64(2), "masked": False})
    classifier.fit(*samples([0, 1]), task=1)
    joblib.dump(classifier, tmp_path / "joblib")
    assert_classifiers_equal(joblib.load(tmp_path / "joblib"), classifier)
    classifier.feature_names_in_ = np.array(["length", "width", "height"], dtype=object)
    classifier.memory_size = 99  # takes effect at the next fit
    classifier.save(tmp_path / "model")
    again = ContinualClassifier.load(tmp_path / "model", device="auto")
    assert again.get_params() == {**classifier.get_params(), "hidden": (4,), "device": "auto"}
    assert again.feature_names_in_.tolist() == ["length", "width", "height"]
    assert (again.learner_.masked, again.learner_.memory_size) == (False, 6)


def test_file_of_format_1_still_loads() -> None:
    classifier = ContinualClassifier.load(SAVED)
    assert classifier.classes_.tolist() == SAVED_CLASSES
    assert {task: classes.tolist() for task, classes in classifier.tasks_.items()} == {
        "first": ["bee", "cat"],
        "second": ["ant", "cat"],
    }
    expected = json.loads(SAVED.with_suffix(".json").read_text())
    np.testing.assert_allclose(classifier.predict_proba(SAVED_X), expected["all"], rtol=1e-9)
    np.testing.assert_allclose(classifier.predict_proba(SAVED_X, task="first"), expected["first"], rtol=1e-9)
    classifier.partial_fit(SAVED_X, ["ant", "bee", "cat", "dog"], task="third")
    assert len(classifier.learner_.penalty.terms) == 1
    assert classifier.classes_.tolist() == [*SAVED_CLASSES, "dog"]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_damaged_file_is_refused_in_one_sentence(data) -> None:
    whole = SAVED.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        else:
            place = data.draw(st.integers(0, len(whole) - 1))
            other = (whole[place] + data.draw(st.integers(1, 255))) % 256
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
        said = what_is_said_of(path)
    (length,) = struct.unpack("<Q", whole[:8])
    if said is None:  # a space in the header of safetensors means nothing
        assert place < 8 + length
    else:
        assert "\n" not in said
        assert str(path) in said


def what_is_said_of(path: Path) -> str | None:
    """The sentence by which a file is refused; None for one that is as good as the kept one."""
    try:
        classifier = ContinualClassifier.load(path)
    except InputError as refusal:
        return str(refusal)
    kept = ContinualClassifier.load(SAVED)
    np.testing.assert_array_equal(classifier.predict_proba(SAVED_X), kept.predict_proba(SAVED_X))
    return None


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ["ant", "bee"]},
        {"features": 4},
        {"seen": [0, 5]},
        {"seen": [0, "1"]},
        {"tasks": [["first", [7]]]},
        {"labels_type": "O!"},
        {"memory": [3, 1]},
        {"memory": [9, 1, 5]},
        {"config": {"benchmark": "custom", "method": "none"}},
        {"params": {"unknown": 1, "hidden": [4]}},
        {"params": None},
        {"num_calls": None},
        {"labels_type": "<U20000000", "labels": ["ant", "bee", 3]},
        {"labels": ["ant", "bee", "bee"]},
        {"labels_type": "<i8"},
        {"labels": [], "labels_type": "<U3"},
        {"seen": []},
        {"seen": [0, 1, 2, 2]},
        {"seen": [0, 1, True]},
        {"classes": [0.0]},
        {"tasks": [["first", [0]], ["first", [1]]]},
        {"tasks": [[["first"], [0]]]},
        {"task": ["first"]},
        {"masked": "no"},
        {"num_samples": -1},
        {"num_samples": "7"},
        {"memory": [6, 0, 0]},
        {"memory": [6.0, 2, 0]},
        {"feature_names": ["length", "width"]},
        {"feature_names": ["length", "width", 3]},
        {"config.hidden": [10**9]},
        {"params.hidden": "4"},
        {"params.hidden": ["4"]},
        {"params.device": 4},
        {"params.method": ["dhp"]},
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change) -> None:
    header, tensors = read_tensors(SAVED, "classifier", 1)
    path = tmp_path / "odd"
    for name, value in change.items():
        place, _, inner = name.partition(".")
        header[place] = {**header[place], inner: value} if inner else value
    write_tensors(path, "classifier", 1, header, tensors)
    with pytest.raises(InputError, match="odd does not hold a classifier") as error:
        ContinualClassifier.load(path)
    assert "\n" not in str(error.value)


def test_text_is_as_wide_as_its_labels_whatever_the_file_says(tmp_path: Path) -> None:
    header, tensors = read_tensors(SAVED, "classifier", 1)
    write_tensors(tmp_path / "wide", "classifier", 1, {**header, "labels_type": "<U20000000"}, tensors)
    assert ContinualClassifier.load(tmp_path / "wide").classes_.dtype == np.dtype("U3")


def test_missing_device_is_not_blamed_on_the_file() -> None:
    with pytest.raises(InputError, match=r"^there is no device 'gpu'"):
        ContinualClassifier.load(SAVED, device="gpu")


@pytest.mark.parametrize("memory_size", [6, 5000, 10**15])
def test_samples_of_the_current_task_are_loaded_whatever_their_memory_could_hold(memory_size: int) -> None:
    classifier = ContinualClassifier(method="ewc", **{**SMALL, "memory_size": memory_size})
    classifier.fit(*samples([0, 1]), task=1)
    again = saved_and_loaded(classifier)
    for _ in range(2):
        assert_classifiers_equal(again, classifier)
        for each in (classifier, again):
            each.partial_fit(*samples([0, 1], num_samples=9000, seed=1), task=1)
    assert_classifiers_equal(continue_learning(again, again.classes_), continue_learning(classifier, again.classes_))


def test_a_memory_with_a_row_for_each_sample_of_its_size_is_loaded_too(tmp_path: Path) -> None:
    """As files had it once."""
    classifier = ContinualClassifier(method="ewc", **{**SMALL, "memory_size": 5000}).fit(*samples([0, 1]), task=1)
    classifier.save(tmp_path / "new")
    header, tensors = read_tensors(tmp_path / "new", "classifier", FORMAT)
    for rows in (5000, 4999, 6000):
        for name in ("memory.inputs", "memory.targets"):
            whole = tensors[name].new_zeros(rows, *tensors[name].shape[1:])
            whole[:4096] = tensors[name][:4096]
            tensors[name] = whole
        write_tensors(tmp_path / "old", "classifier", FORMAT, header, tensors)
        if rows == 5000:
            assert len(ContinualClassifier.load(tmp_path / "old").learner_.memory) == 10
        else:
            assert "its memory has shape" in what_is_said_of(tmp_path / "old")


def test_loading_does_not_consolidate_the_current_task() -> None:
    classifier = ContinualClassifier(method="ewc", **SMALL).fit(*samples([0, 1]), task="now")
    again = saved_and_loaded(classifier).partial_fit(*samples([0, 1], seed=1), task="now")
    assert len(again.learner_.penalty.terms) == 0
    assert len(again.partial_fit(*samples([0, 1]), task="then").learner_.penalty.terms) == 1


@pytest.mark.parametrize("method", ["ewc", "online-ewc", "mas"])
def test_sums_round_alike_after_loading(method: str) -> None:
    """With sizes at which a file leaves tensors unaligned, and kernels take another path over them."""
    random = np.random.RandomState(0)
    X, y = random.normal(size=(64, 37)).astype(np.float32), random.randint(3, size=64)
    classifier = ContinualClassifier((50,), method, random_state=0, epochs=2).fit(X, y, task=1)
    again = saved_and_loaded(classifier)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors_of(again))
    for each in (classifier, again):
        each.partial_fit(X, y, task=2).partial_fit(X, y, task=3)
    assert all(map(torch.equal, tensors_of(classifier), tensors_of(again)))


@pytest.mark.parametrize(
    ("name", "value", "comes_back"),
    [
        ("hidden", 4, 4), ("hidden", np.int64(4), 4), ("hidden", (4, 3), (4, 3)), ("hidden", [4], (4,)),
        ("hidden", (np.int64(4), 3), (4, 3)), ("hidden", np.array([4, 3]), (4, 3)), ("method", "mas", "mas"),
        ("method", np.str_("mas"), "mas"), ("strength", None, None), ("strength", 2, 2), ("strength", 0.5, 0.5),
        ("steady", np.bool_(False), False), ("masked", False, False), ("learning_rate", np.float32(0.5), 0.5),
        ("batch_size", np.int32(3), 3), ("epochs", 1, 1), ("partial_fit_epochs", np.int64(2), 2), ("memory_size", 5, 5),
        ("random_state", None, None), ("random_state", 7, 7), ("random_state", np.uint8(7), 7),
        ("device", "auto", "auto"),
    ],
)  # fmt: skip
def test_every_form_of_a_parameter_is_saved(name: str, value, comes_back) -> None:
    classifier = ContinualClassifier(**{**NETWORK, name: value}).fit(*samples([0, 1]), task=1)
    again = saved_and_loaded(classifier)
    got = again.get_params()[name]
    assert (got, type(got)) == (comes_back, type(comes_back))
    assert_classifiers_equal(
        again.partial_fit(*samples([0, 2]), task=2), classifier.partial_fit(*samples([0, 2]), task=2)
    )


def test_files_of_another_kind_or_a_newer_format_are_refused(tmp_path: Path) -> None:
    header, tensors = read_tensors(SAVED, "classifier", 1)
    write_tensors(tmp_path / "later", "classifier", FORMAT + 1, header, tensors)
    with pytest.raises(InputError, match="newer version of Engram"):
        ContinualClassifier.load(tmp_path / "later")
    write_tensors(tmp_path / "other", "checkpoint", 1, header, tensors)
    with pytest.raises(InputError, match="not a classifier of Engram"):
        ContinualClassifier.load(tmp_path / "other")
    with pytest.raises(InputError, match="there is no file"):
        ContinualClassifier.load(tmp_path / "none")


def test_unsavable_values_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model"
    X, y = samples([0, 1])
    with pytest.raises(InputError, match=r"the task \(1, 2\) cannot be saved"):
        ContinualClassifier(**NETWORK).fit(X, y, task=(1, 2)).save(path)
    with pytest.raises(InputError, match="the parameter random_state RandomState"):
        ContinualClassifier(**{**NETWORK, "random_state": np.random.RandomState(0)}).fit(X, y).save(path)
    for name, value in (("hidden", "wide"), ("hidden", (4.5,)), ("hidden", [[4]]), ("method", ["si"])):
        changed = ContinualClassifier(**NETWORK).fit(X, y)
        setattr(changed, name, value)
        with pytest.raises(InputError, match=f"the parameter {name} .* cannot be saved"):
            changed.save(path)
    assert list(tmp_path.iterdir()) == []
