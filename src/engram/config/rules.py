"""What a field of `Config` declares besides its type: rules for its value, its stage, and who must share its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

LARGEST = 3.4028234663852886e38  # the largest 32-bit float, which networks compute with
MAX_TRIALS = 10**6  # tables of results grow with these two
MAX_TASKS = 10**4

Stage = Literal["method", "trial", "stream", "features", "head", "penalty", "training"]
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
