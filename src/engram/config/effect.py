"""Which settings change anything for a method, a benchmark and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engram.common.errors import InputError
from engram.common.registry import BENCHMARKS, HEADS, PENALTIES, REHEARSALS
from engram.config.methods import CUSTOM, parts_of
from engram.config.rules import OPTIMIZER_SETTINGS, OPTIMIZERS
from engram.config.settings import SETTINGS, Config

LEARNING = OPTIMIZER_SETTINGS | {"optimizer", "learning_rate", "weight_decay"}  # the settings of a step of gradients


def learns(config: Config) -> bool:
    """Whether anything is trained: a head that only remembers gives no gradient, and a rehearsal may have weights.

    Example:
        >>> learns(engram.preset("split-mnist", "slda")), learns(engram.preset("split-mnist", "slda+mas"))
        (False, True)
    """
    return not HEADS.facts(config.head).get("memory") or config.learn_features or config.rehearsal is not None


def has_effect(name: str, config: Config) -> bool:
    """Whether a setting changes anything for this method and benchmark.

    Registrations name the settings that they use. One that some name matters only to those; another matters to all.

    Example:
        >>> has_effect("xi", engram.preset("split-mnist", "mas"))
        False
    """
    parts = {
        "stream": (BENCHMARKS, config.benchmark),
        "head": (HEADS, config.head),
        "penalty": (PENALTIES, config.penalty),
        "rehearsal": (REHEARSALS, config.rehearsal),
    }
    if name in LEARNING and not learns(config):
        return False
    if name == "random_window" and not config.random_features:
        return False
    if name in OPTIMIZER_SETTINGS:
        return name in OPTIMIZERS[config.optimizer] and (name != "reset_optimizer" or _keeps_state(config))
    registry, part = parts.get(SETTINGS[name].stage, (None, None))
    if name == "baseline_head":
        return parts_of(config.method).head is None
    if name == "regularize_alpha" and not config.plastic:
        return False
    if registry is None or part == CUSTOM:
        return True
    if part is None:
        return False
    if name in registry.facts(part).get("settings", {}).values():
        return True
    return not any(name in registry.known_facts(other).get("settings", {}).values() for other in registry.names())


def refuse_without_effect(names: Iterable[str], configs: Sequence[Config]) -> None:
    """Refuse a setting that changes nothing for any of these configs.

    Args:
        names: of the settings that somebody gave.
        configs: with these settings in them; at least one.

    Example:
        >>> refuse_without_effect(["xi"], [engram.preset("split-mnist", "mas")])
        Traceback (most recent call last):
        engram.common.errors.InputError: xi has no effect on mas: leave it out
    """
    for name in names:
        if not any(has_effect(name, config) for config in configs):
            what = ", ".join(dict.fromkeys(config.method for config in configs))
            if name in LEARNING and not any(map(learns, configs)):
                what += ", where nothing is trained"
            elif name == "random_window" and any(has_effect("random_features", config) for config in configs):
                what += " without random_features"
            elif name in OPTIMIZER_SETTINGS:
                what = f"{configs[0].optimizer} as it is set here"
            elif SETTINGS[name].stage == "stream":
                what = configs[0].benchmark
            raise InputError(f"{name} has no effect on {what}: leave it out")


def _keeps_state(config: Config) -> bool:
    """Whether the optimizer remembers anything from step to step."""
    return config.optimizer != "sgd" or config.momentum > 0
