"""scikit-learn's own checks, for the regressor and for the classifier with every head."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import SkipTest

import pytest
import torch
from sklearn.utils.estimator_checks import estimator_checks_generator

import engram
from engram.common.registry import HEADS
from engram.sklearn import ContinualClassifier, ContinualRegressor

QUICK = {"hidden": (16,), "epochs": 10}
ESTIMATORS: dict[str, Any] = {
    "the classifier as it is": ContinualClassifier(),
    "the classifier with a penalty that keeps samples": ContinualClassifier(method="mas", masked=False, **QUICK),
    "the regressor as it is": ContinualRegressor(),
    "the regressor with random features": ContinualRegressor(random_features=50, random_state=0),
    **{name: ContinualClassifier(head=name, **QUICK) for name in engram.heads.list()},
}
EQUIVALENCE, CLASS_WEIGHT = "check_sample_weight_equivalence_on_dense_data", "check_class_weight_classifiers"
IN_A_STEP = "a weight multiplies the loss in a step, which is not the same as repeating a sample"
NO_SCALE = "distances have no scale, so the weight of a class can be too small for unscaled features"
# Checks that a head cannot pass, and why. scikit-learn says the same as IN_A_STEP of its own MLPClassifier.
EXPECTED = {
    "ncm": {CLASS_WEIGHT: NO_SCALE},
    "cope": {EQUIVALENCE: "its means follow the order of the samples", CLASS_WEIGHT: NO_SCALE},
    "hebbian-softmax": {EQUIVALENCE: IN_A_STEP, CLASS_WEIGHT: "means of the classes take the place of its weights"},
}


def expected_failures(estimator: Any) -> dict[str, str]:
    if isinstance(estimator, ContinualRegressor) or (estimator.head, estimator.method) == ("auto", None):
        return {}
    if estimator.head in EXPECTED:
        return EXPECTED[estimator.head]
    in_memory = estimator.head != "auto" and HEADS.facts(estimator.head).get("memory")
    return {} if in_memory else {EQUIVALENCE: IN_A_STEP}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_it_passes_every_check_of_scikit_learn(name: str) -> None:
    skipped, expected = [], expected_failures(ESTIMATORS[name])
    for estimator, check in estimator_checks_generator(ESTIMATORS[name]):
        if check.func.__name__ in expected:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some checks warn of their own doing
            try:
                check(estimator)
            except SkipTest as reason:
                skipped.append(str(reason))
    of_ours = [reason for reason in skipped if "pandas is not installed" not in reason and "ARRAY_API" not in reason]
    assert not of_ours
