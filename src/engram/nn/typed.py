"""The types of a head's settings, checked in one place: those that its signature says."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, cast

import torch

from engram.common.errors import InputError, shortened

Function = TypeVar("Function", bound=Callable[..., Any])


def _is_number(value: Any) -> bool:
    with suppress(OverflowError):  # of a whole number with hundreds of digits
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return False


def _is_device(value: Any) -> bool:
    with suppress(RuntimeError):
        return isinstance(value, torch.device | str) and bool(torch.device(value).type)
    return False


class Kind(NamedTuple):
    """What a value of a type must be, and the words for it: "eta must be a finite number"."""

    holds: Callable[[Any], bool]
    words: str


KINDS: dict[Any, Kind] = {
    bool: Kind(lambda value: isinstance(value, bool), "True or False"),
    int: Kind(lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    float: Kind(_is_number, "a finite number"),
    str: Kind(lambda value: isinstance(value, str), "a word"),
    torch.device: Kind(_is_device, "a device"),
    torch.dtype: Kind(lambda value: isinstance(value, torch.dtype) and value.is_floating_point, "a type of floats"),
}


def typed(make: Function) -> Function:
    """A decorator: refuse arguments that are not of the types in the signature, in one sentence, before the call.

    The first type of a union counts, and None where it is among the others. Which numbers and words make sense is for
    the function to say. Types that are not in `KINDS` are not looked at.

    Args:
        make: what makes a layer: its `__init__`.

    Example:
        >>> engram.DHPSoftmax(4, 2, eta="a")
        Traceback (most recent call last):
        engram.common.errors.InputError: eta must be a finite number, not 'a'
    """

    @functools.cache  # at the first call: only then all names in the signature are known
    def types() -> dict[str, tuple[Any, ...]]:
        hints = typing.get_type_hints(make)
        named = {name: hints.get(name) for name in inspect.signature(make).parameters}
        return {name: typing.get_args(hint) or (hint,) for name, hint in named.items()}

    @functools.wraps(make)
    def checked(*arguments: Any, **settings: Any) -> Any:
        for name, value in (*zip(types(), arguments, strict=False), *settings.items()):
            first, *others = types().get(name, (None,))
            if first in KINDS and not KINDS[first].holds(value) and not (value is None and type(None) in others):
                raise InputError(f"{name} must be {KINDS[first].words}, not {shortened(value)}")
        return make(*arguments, **settings)

    return cast(Function, checked)
