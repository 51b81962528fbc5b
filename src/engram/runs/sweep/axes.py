"""What a sweep varies: settings with a list or a range of values, as they are typed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engram.common.errors import InputError, shortened
from engram.config.effect import has_effect
from engram.config.presets import parse_setting
from engram.config.settings import SETTINGS, Config, as_setting, check_name, names_of

FIXED = ("method", *names_of(agree="run"))  # what all points share


@dataclass(frozen=True)
class Choice:
    """A setting with a list of values."""

    name: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(written, self.values))}"


@dataclass(frozen=True)
class Range:
    """A number between two others, on a linear or a logarithmic scale."""

    name: str
    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        return SETTINGS[self.name].type is int

    @property
    def ends(self) -> tuple[float, float]:
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def __str__(self) -> str:
        return f"{self.name}={self.low:g}..{self.high:g}{':log' if self.log else ''}"


Axis = Choice | Range


def written(value: Any) -> str:
    """A value as it is typed. Different values are written differently."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(list(value) if isinstance(value, tuple) else value)


def parse_choice(text: str) -> Choice:
    """`strength=0.1,1,10`, `hidden=[100],[400,400]`, `alpha=synapse,uniform`."""
    name, values = _split(text)
    pieces = _pieces(values)
    found = tuple(as_setting(name, parse_setting(f"{name}={piece}")[name]) for piece in pieces)
    if len(set(found)) < len(found):
        raise InputError(f"a value is given twice in {shortened(text)}")
    return Choice(name, found)


def parse_axis(text: str) -> Axis:
    """`strength=0.01..100:log`, `eta=0.0001..0.1`; or a list, as a grid has it."""
    name, values = _split(text)
    if ".." not in values:
        return parse_choice(text)
    ends, colon, log = values.partition(":")
    low, _, high = (end.strip() for end in ends.partition(".."))
    if not SETTINGS[name].is_number:
        raise InputError(f"{name} is not a number, so it has no range: give its values, {name}=a,b,c")
    if colon and log != "log":
        raise InputError(f"a range is written {name}=low..high, or {name}=low..high:log, not {shortened(text)}")
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise InputError(f"the ends of {shortened(text)} are not numbers") from None
    found = Range(name, first, last, bool(colon))
    if not (math.isfinite(first) and math.isfinite(last) and first < last):
        raise InputError(f"a range goes from a number to a larger one, not {shortened(ends)}")
    if found.log and first <= 0:
        raise InputError(f"a logarithmic range starts above 0, not at {first:g}")
    if found.whole and not (first.is_integer() and last.is_integer()):
        raise InputError(f"{name} is a whole number, and so are the ends of its range, not {shortened(ends)}")
    return found


def check_axes(axes: Sequence[Axis]) -> None:
    """Refuse two axes of one setting, and settings that decide what is learned rather than how."""
    if not axes:
        raise InputError("a sweep needs something to vary: --grid strength=1,10, or --search strength=0.01..100:log")
    names = [axis.name for axis in axes]
    for name in names:
        if name in FIXED:
            raise InputError(f"a sweep cannot vary {name}, which all its points share")
        if names.count(name) > 1:
            raise InputError(f"{name} is given twice")


def check_effect(name: str, configs: Sequence[Config]) -> None:
    """Refuse to vary what makes no difference to any of these configs of one method."""
    if not any(has_effect(name, config) for config in configs):
        raise InputError(f"{name} has no effect on the method {configs[0].method}, so a sweep cannot vary it")


def _split(text: str) -> tuple[str, str]:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise InputError(f"an axis is written name=value,value,…, not {shortened(text)}")
    check_name(name)
    return name, values


def _pieces(values: str) -> list[str]:
    """The text split at commas, except for commas within brackets."""
    pieces, depth = [""], 0
    for character in values:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]
