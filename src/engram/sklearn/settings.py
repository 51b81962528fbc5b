"""From the parameters of a classifier to what learns: a memory of sums, or a network with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from engram.common.errors import InputError, check_choice
from engram.common.registry import HEADS, PENALTIES
from engram.config.effect import has_effect
from engram.config.methods import CUSTOM, parts_of
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.engine.build import choose_device
from engram.sklearn.arguments import as_python, whole_number
from engram.sklearn.features import Features, usual_direct, usual_random_features
from engram.sklearn.network import ContinualLearner
from engram.sklearn.sums import MemoryLearner

# Of `head="auto"`. It and the numbers in features.py were chosen on held-out training samples of mnist-small; those for
# few inputs also by cross-validation on digits, wine, breast cancer and moons.
SHRINKAGE = 0.03
OF_TRAINING = ("hidden", "learning_rate", "epochs", "partial_fit_epochs")  # parameters that a memory does not use
OF_NETWORK = (*OF_TRAINING, "strength", "steady", "masked", "memory_size")  # nor that of head="auto"
OF_PARTS = ("random_features", "shrinkage", "strength")  # settings of some heads and of penalties, of the same names
# The default λ of each penalty: of those in benchmarks/classifier_defaults.py, the one with the best mean of the two
# accuracies on held-out samples. `steady` and `masked` were chosen in the same way. EWC has Online EWC's. A penalty
# that is not here has the strength of its registration.
STRENGTHS = {"si": 3.0, "ewc": 3.0, "online-ewc": 3.0, "mas": 0.03}


def method_of(head: str, method: str | None) -> str | None:
    """HEAD+METHOD, as `engram.preset` takes it; None if nothing is named, and the memory of `head="auto"` is meant.

    Args:
        head: "auto", or a registered head.
        method: None, "finetune", a head, a penalty, or both: "dhp+si".
    """
    method = None if method is None else str(method)
    if head == "auto":
        return method
    check_choice("head", head, ("auto", *HEADS.names()))
    if method in (None, "finetune"):
        return head
    if method not in PENALTIES:
        raise InputError(f"head={head!r} can be combined with a penalty, and method={method!r} is none")
    return f"{head}+{method}"


def make_config(params: Mapping[str, Any], method: str, seed: int) -> Config:
    """The parameters of a classifier as settings, which are checked there."""
    head, penalty, rehearsal = parts_of(method)
    if rehearsal is not None:
        raise InputError(f"ContinualClassifier stores no samples of old tasks: {rehearsal} is a method of engram.run")
    given = as_python(params["strength"])
    strength = STRENGTHS.get(str(penalty)) if given is None else given
    needed = {} if penalty is None or strength is None else {"strength": strength}
    changes: dict[str, Any] = {}
    if params["steady"] and head in (None, "dhp"):
        changes |= STEADY
    if head is not None and HEADS.facts(head).get("memory"):
        changes["random_features"] = as_python(params["random_features"]) or 0
        taken = HEADS.facts(head).get("settings", {})
        if params["shrinkage"] is not None and "shrinkage" in taken.values():
            changes["shrinkage"] = as_python(params["shrinkage"])
    return preset(CUSTOM, method, best=False, **needed).replace(
        hidden=[as_python(width) for width in _as_list(params["hidden"])],
        **{name: as_python(params[name]) for name in ("learning_rate", "batch_size", "epochs")},
        seed=seed,
        baseline_head="linear",
        **changes,
    )


def changed(params: Mapping[str, Any], defaults: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of these parameters that are not as they are by default; (4,), [4] and 4 are the same.

    Args:
        params: by name.
        defaults: of all parameters, by name.
        names: of the parameters in question.

    Example:
        >>> changed({"hidden": 4, "epochs": 9}, {"hidden": (4,), "epochs": 20}, ("hidden", "epochs"))
        ['epochs']
    """
    return [name for name in names if _as_list(params[name]) != _as_list(defaults[name])]


def without_effect(
    params: Mapping[str, Any], defaults: Mapping[str, Any], learner: ContinualLearner | MemoryLearner
) -> list[str]:
    """Those parameters that are not as they are by default, and make no difference to what learns.

    Args:
        params: by name.
        defaults: of all parameters, by name.
        learner: what was made from them.

    Example:
        >>> params = {**defaults, "method": "si", "random_features": 500}
        >>> without_effect(params, defaults, make_learner(params, 0, num_features=4, num_classes=2))
        ['random_features']
    """
    if isinstance(learner, MemoryLearner):
        return changed(params, defaults, OF_NETWORK)
    of_parts = [name for name in OF_PARTS if not has_effect(name, learner.config)]
    return changed(params, defaults, of_parts if learner.learns else (*OF_TRAINING, *of_parts))


def _as_list(value: Any) -> list[Any]:
    return np.atleast_1d(np.asarray(value, dtype=object)).tolist()


def is_memory(head: Any, method: Any) -> bool:
    """Whether these parameters mean the memory of `head="auto"`, and no network."""
    return method_of(head, method) is None


def make_learner(
    params: Mapping[str, Any], seed: int, num_features: int, num_classes: int
) -> ContinualLearner | MemoryLearner:
    """What learns, for the parameters of a classifier.

    Args:
        params: by name, as `get_params` gives them.
        seed: of all random draws.
        num_features: the number of inputs.
        num_classes: how many classes are known.
    """
    method, memory_size = method_of(params["head"], params["method"]), params["memory_size"]
    if method is None:
        choose_device(params["device"])  # a memory needs none, but a device that is not there is a mistake
        given = params["random_features"]
        num_random = usual_random_features(num_features) if given is None else whole_number("random_features", given, 0)
        num_direct = usual_direct(num_features) if num_random else num_features
        shrinkage = SHRINKAGE if params["shrinkage"] is None else params["shrinkage"]
        features = Features(num_features, num_direct, num_random, seed)
        return MemoryLearner(features, num_classes, float(shrinkage))
    config, device = make_config(params, method, seed), choose_device(params["device"])
    memory_size = whole_number("memory_size", memory_size, least=1)
    return ContinualLearner(config, num_features, num_classes, device, bool(params["masked"]), memory_size)
