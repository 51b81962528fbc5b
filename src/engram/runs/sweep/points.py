"""The points of a sweep: what it varies, which points it tries, and which of them get more trials.

Points come from a grid, or are proposed by Optuna. They are dropped by successive halving: all points have one trial,
the better third of them three, and so on. The steps are trials and not tasks: what a network knows after half of its
tasks says little about what it will have forgotten after all of them, while each trial is a complete measurement.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engram.common.errors import InputError, check_choice, shortened
from engram.config.presets import parse_setting
from engram.config.settings import SETTINGS, Config, as_setting, has_effect, names_of

Name = TypeVar("Name")
Point = dict[str, Any]  # settings by name
FIXED = ("method", *names_of(agree="run"))  # what all points share
MAX_POINTS = 10_000
GENERATION = 10  # points that are proposed before any of them has a score
FACTOR = 3  # the best 1/3 get 3 times as many trials
FEWEST = 2  # points that are never dropped, so that the best has one to compare with


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


def check_effect(name: str, config: Config) -> None:
    """Refuse to vary what makes no difference."""
    if not has_effect(name, config):
        raise InputError(f"{name} has no effect on the method {config.method}, so a sweep cannot vary it")


def grid(choices: Sequence[Choice]) -> list[Point]:
    """Every combination of the values, the last axis fastest."""
    number = math.prod(len(choice.values) for choice in choices)
    if number > MAX_POINTS:
        raise InputError(f"a grid of {number} points is too large: at most {MAX_POINTS}")
    return [
        dict(zip((choice.name for choice in choices), values, strict=True))
        for values in itertools.product(*(choice.values for choice in choices))
    ]


def described(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {written(value)}" for name, value in point.items())


def _split(text: str) -> tuple[str, str]:
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise InputError(f"an axis is written name=value,value,…, not {shortened(text)}")
    check_choice("setting", name, SETTINGS)
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


def rungs(trials: int, prune: bool) -> list[int]:
    """After how many trials points are dropped, up to all: 1, 3 and 10 for ten trials."""
    found = [trials]
    while prune and found[-1] >= FACTOR:
        found.append(found[-1] // FACTOR)
    return found[::-1]


def num_survivors(num_points: int) -> int:
    """How many points reach the next rung."""
    return min(num_points, max(FEWEST, -(-num_points // FACTOR)))


def survivors(scores: Mapping[Name, float]) -> list[Name]:
    """The best points, in their own order; of equal ones the earlier."""
    names = list(scores)
    best = sorted(names, key=lambda name: -scores[name])[: num_survivors(len(names))]
    return [name for name in names if name in best]


def num_trials(num_points: int, trials: int, prune: bool) -> int:
    """The number of trials over all points, when the last point has all its trials."""
    total, done = 0, 0
    for rung in rungs(trials, prune):
        total += num_points * (rung - done)
        done, num_points = rung, num_survivors(num_points)
    return total


class Proposals(Protocol):
    """Points in generations. The scores of one generation are added before the next is asked for."""

    def next(self) -> list[Point]:
        """The next generation; empty when there is none."""

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        """For each point of the generation the scores of its trials, and whether it had all of them."""


class Grid:
    """All points in one generation."""

    def __init__(self, choices: Sequence[Choice]):
        self.points = grid(choices)

    def next(self) -> list[Point]:
        points, self.points = self.points, []
        return points

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        pass


class Search:
    """Points by Optuna's tree of Parzen estimators. The same seed and the same scores give the same points."""

    def __init__(self, axes: Sequence[Axis], num_points: int, seed: int):
        self.optuna = _import_optuna()
        self.axes = list(axes)
        self.left = num_points
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an argument is experimental
            sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self.study = self.optuna.create_study(direction="maximize", sampler=sampler)
        self.asked: list[Any] = []

    def next(self) -> list[Point]:
        number = min(self.left, GENERATION)
        self.left -= number
        ranges = {axis.name: self._distribution(axis) for axis in self.axes}
        self.asked = [self.study.ask(ranges) for _ in range(number)]
        return [{axis.name: self._value(axis, trial.params[axis.name]) for axis in self.axes} for trial in self.asked]

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        state = self.optuna.trial.TrialState
        for trial, own, complete in zip(self.asked, scores, finished, strict=True):
            mean = sum(own) / len(own)
            trial.report(mean, len(own))
            self.study.tell(trial, mean if complete else None, state.COMPLETE if complete else state.PRUNED)

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if isinstance(axis, Choice):
            return kinds.CategoricalDistribution(range(len(axis.values)))
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def _value(self, axis: Axis, found: Any) -> Any:
        if isinstance(axis, Range):
            # four digits are more than a sweep can tell apart, and easy to type
            return found if axis.whole else as_setting(axis.name, float(f"{found:.4g}"))
        return axis.values[found]


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InputError("Optuna is not installed: pip install 'engram-cl[optuna]'; --grid needs nothing") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
