"""What a field of `Config` declares besides its type: rules for its value, its stage, and who must share its value."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engram.common.errors import InputError, nearest, shortened

MAX_WHOLE = 2**128 - 1  # the largest whole number that a setting can be
LARGEST = 3.4028234663852886e38  # the largest 32-bit float, which networks compute with
MAX_TRIALS = 10**6  # tables of results grow with these two
MAX_TASKS = 10**4
MAX_FEATURES = 10**6

# Each optimizer, and the settings that it uses besides learning_rate and weight_decay.
OPTIMIZERS = {
    "sgd": ("momentum", "reset_optimizer"),
    "adam": ("beta1", "beta2", "adam_eps", "reset_optimizer"),
    "adamw": ("beta1", "beta2", "adam_eps", "reset_optimizer"),
}
OPTIMIZER_SETTINGS = frozenset(name for names in OPTIMIZERS.values() for name in names)

Stage = Literal["method", "trial", "stream", "features", "head", "penalty", "rehearsal", "training"]
Agree = Literal["run", "stack", "section", "free"]
# run: all configs of a run have the same tasks
# stack: models that train together take the same steps
# section: models that are computed as one have the same architecture
# free: any two models may differ


class Rule(NamedTuple):
    """A condition on a value, and the words for it: "epochs must be at least 1"."""

    holds: Callable[[Any], bool]
    words: str


def at_least(least: int) -> Rule:
    return Rule(lambda value: value >= least, f"at least {least}")


def at_most(most: int) -> Rule:
    return Rule(lambda value: value <= most, f"at most {most}")


FINITE = Rule(lambda value: abs(value) <= LARGEST, "a number")
POSITIVE = Rule(lambda value: 0 < value <= LARGEST, "above 0")
NOT_NEGATIVE = Rule(lambda value: 0 <= value <= LARGEST, "at least 0")
BELOW_ONE = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
FRACTION = Rule(lambda value: 0 <= value <= 1, "in [0, 1]")
WIDTHS = Rule(lambda value: len(value) > 0 and all(width >= 1 for width in value), "widths of at least 1")


def setting(
    *rules: Rule, stage: Stage, agree: Agree = "free", choices: Callable[[], Iterable[str]] | None = None, **field: Any
) -> Any:
    """A field of `Config`; `default` is among the arguments that go to `dataclasses.field`."""
    facts = {"rules": rules, "stage": stage, "agree": agree, "choices": choices}
    return dataclasses.field(metadata=facts, **field)


def one_of(*names: str) -> Callable[[], Iterable[str]]:
    return lambda: names


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that a setting can be."""
    return type(value) is int and abs(value) <= MAX_WHOLE


@dataclass(frozen=True)
class Setting:
    """What is declared about one field of `Config`."""

    name: str
    type: type  # str, bool, int, float, or tuple, of whole numbers
    optional: bool  # whether it may be None
    default: Any
    stage: Stage
    agree: Agree
    rules: tuple[Rule, ...]
    choices: Callable[[], Iterable[str]] | None

    @property
    def is_number(self) -> bool:
        return self.type in (int, float)

    @property
    def words(self) -> str:
        """The type, in words."""
        words = {str: "a word", int: "a whole number", float: "a number", bool: "true or false"}
        return words.get(self.type, "a list of whole numbers")

    @property
    def allowed(self) -> str:
        """What the value may be, in words: "a number above 0; or null"."""
        if self.choices is not None:
            words = " or ".join(self.choices())
        else:
            kind = "a list of" if self.type is tuple else self.words
            words = " ".join((kind, " and ".join(rule.words for rule in self.rules if rule is not FINITE)))
        return words.strip() + ("; or null" if self.optional else "")

    def check(self, value: Any) -> None:
        """Refuse a value that is none of the choices, or breaks one of the rules."""
        if self.choices is not None:
            allowed = tuple(self.choices())
            if value not in allowed:
                words = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
                raise InputError(f"{self.name} must be {words}, not {shortened(value)}{nearest(value, allowed)}")
        for rule in self.rules:
            if not (value is None and self.optional) and not rule.holds(value):
                raise InputError(f"{self.name} must be {rule.words}, not {shortened(value)}")


def declared(field: dataclasses.Field[Any], hint: Any) -> Setting:
    """What a field of `Config` with this type declares."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    facts = {"agree": "free", "rules": (), "choices": None, **field.metadata}
    return Setting(field.name, typing.get_origin(kind) or kind, len(kinds) > 1, field.default, **facts)
