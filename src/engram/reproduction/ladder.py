"""The ladder of fairness: what DHP adds to each penalty, in comparisons that become fairer from rung to rung.

1. As published: the paper's strengths, the published layer against heads that start as nn.Linear does.
2. Strengths: each contestant at the best strength of its own grid. (The paper has one strength with DHP and without:
   `rungs.one_strength_table` compares so.)
3. One initialisation: the same, and every head starts as the published layer.
4. One budget: every contestant gets the same number of settings to try, over its learning rate, its strength and one
   knob of its own.

Grids and searches (`search.py`) use validation samples, a seed of their own and three trials of each setting. Every
rung ends with ten trials on the test samples, and all rungs share their trials, so that any two contestants are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engram.common.errors import InputError
from engram.config.presets import CHOOSING, preset
from engram.config.settings import Config
from engram.reproduction.search import DIVERGED, Axis, Point, best_point, propose, settings_at
from engram.runs.result import Result
from engram.runs.run import Run

Runs = Mapping[tuple[str, str], Run]  # by benchmark and part
Configs = Callable[[str, Runs], dict[str, Config]]
ENDINGS = ("", "+si", "+online-ewc", "+mas")  # of the four methods that a head has
PUBLISHED: dict[str, Any] = {"head_init": "published"}
LINEAR: dict[str, Any] = {"head_init": "linear"}
TRIALS_OF_A_SETTING = 3

# How many settings a contestant tries, round by round.
GRID_ROUNDS = (5, 3)
SEARCH_ROUNDS = (7, 5, 4, 4)
MORE_GRID_ROUNDS = {"vision-mixture": (5, 3, 3)}  # after two, some of the best strengths were at an edge
STRENGTH_FACTOR = RATE_FACTOR = 3.0

# The knob of each head on rung 4, where the middle of its star is the value that the head has otherwise.
KNOBS = {
    "linear": Axis("head_gain", 1.0, 3.0),
    "matched": Axis("head_gain", 1.0, 3.0),
    "dhp": Axis("alpha_init", 0.01, 5.0),
    "dhp-uniform": Axis("alpha_init", 0.01, 5.0),
    "steady": Axis("alpha_init", 0.1, 5.0),
    "balanced": Axis("head_dropout", 0.5, 3.0, fraction=True),
    "balanced-trace": Axis("head_dropout", 0.25, 3.0, fraction=True),
    "hebbian-softmax": Axis("rare_until", 500.0, 5.0),
    "fast-weights": Axis("num_keys", 64, 2.0, whole=True),
    "neuromodulated": Axis("alpha_init", 0.01, 5.0),
}

# Heads of which one may become the form that is recommended: docs/reproduction/registration.md says how it is chosen.
CANDIDATES = ("steady", "balanced", "balanced-trace")

# On rung 4 many networks are trained to choose settings, so they have half of the epochs there. The mixture's networks
# take ten times as long. So they have fewer epochs wherever settings are chosen; and on rung 4 fewer points are tried,
# and the final run is as short, with fewer trials.
SHORTER: dict[str, dict[str, Any]] = {"vision-mixture": {"epochs": 10}}
HALF: dict[str, dict[str, Any]] = {
    "permuted-mnist": {"epochs": 10},
    "imbalanced-permuted-mnist": {"epochs": 10},
}
FEWER_ROUNDS = {"vision-mixture": (7, 3)}
FEWER_TRIALS: dict[str, dict[str, Any]] = {"vision-mixture": {"trials": 5}}


@dataclass(frozen=True)
class Contestant:
    """A head, with a penalty or alone, on one benchmark.

    Args:
        config: its settings in the final run, but for those that are searched.
        axes: what is searched.
        trying: how the settings differ where points are tried.
        change: what else is changed, in words, where that is the question.

    Example:
        >>> Contestant(preset("split-mnist", "linear+si", head_init="published")).label
        'linear+si, published'
    """

    config: Config
    axes: tuple[Axis, ...] = ()
    trying: Mapping[str, Any] = field(default_factory=dict)
    change: str = ""

    @property
    def label(self) -> str:
        """Its name: the change, the method, and its initial weights unless they are the preset's."""
        usual = preset(self.config.benchmark, self.config.method).head_init
        name = self.config.method + ("" if self.config.head_init == usual else f", {self.config.head_init}")
        return f"{self.change}: {name}" if self.change else name

    def tried(self, point: Point) -> tuple[str, Config]:
        """The label and the config of one point of the search."""
        settings = settings_at(self.axes, point)
        words = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        shorter = SHORTER.get(self.config.benchmark, {})
        choosing = {**settings, **shorter, **self.trying, **CHOOSING, "trials": TRIALS_OF_A_SETTING}
        return f"{self.label}: {words}", self.config.replace(**choosing)

    def chosen(self, scores: Mapping[Point, float]) -> Config:
        """The config of the final run, at the best point of the search."""
        return self.config.replace(**settings_at(self.axes, best_point(scores))) if self.axes else self.config


# --- who stands on which rung


def as_published(benchmark: str) -> list[Contestant]:
    """Rung 1: DHP as published, and plain and matched heads that start as nn.Linear does."""
    return _contestants(benchmark, ("linear", "matched", "dhp"))


def with_own_strength(benchmark: str) -> list[Contestant]:
    """Rung 2: those of rung 1 that have a strength, with a grid over it."""
    return [_with_strength(each) for each in as_published(benchmark) if each.config.strength is not None]


def of_one_initialisation(benchmark: str) -> list[Contestant]:
    """Rung 3: plain and matched heads that start as the published layer. DHP is that of rungs 1 and 2."""
    return [_with_strength(each) for each in _contestants(benchmark, ("linear", "matched"), **PUBLISHED)]


def with_one_budget(benchmark: str) -> list[Contestant]:
    """Rung 4: every head, with a search over its learning rate, its strength and its knob."""
    shorter = {**SHORTER.get(benchmark, {}), **FEWER_TRIALS.get(benchmark, {})}
    found = []
    for head, knob in KNOBS.items():
        for each in _contestants(benchmark, (head,), **PUBLISHED, **shorter):
            rate = Axis("learning_rate", 0.03, RATE_FACTOR)
            axes = (rate, *_with_strength(each).axes, knob)
            found.append(Contestant(each.config, axes, HALF.get(benchmark, {})))
    return found


def _contestants(benchmark: str, heads: Sequence[str], **changes: Any) -> list[Contestant]:
    """Each head alone, and with each penalty."""
    return [Contestant(preset(benchmark, head + ending, **changes)) for head in heads for ending in ENDINGS]


def _with_strength(contestant: Contestant) -> Contestant:
    strength = contestant.config.strength
    axes = () if strength is None else (Axis("strength", strength, STRENGTH_FACTOR),)
    return Contestant(contestant.config, axes)


# --- a search, round by round


def round_configs(contestants: Sequence[Contestant], rounds: Sequence[Run], sizes: Sequence[int]) -> dict[str, Config]:
    """The next round of a search.

    Args:
        contestants: who takes part. One that has nothing to search is left out.
        rounds: the finished rounds.
        sizes: how many points each round has, this one's included.

    Example:
        >>> len(round_configs(with_own_strength("split-mnist"), (), (5, 3)))
        45
    """
    number = sizes[len(rounds)]
    return dict(
        each.tried(point)
        for each in contestants
        if each.axes
        for point in propose(len(each.axes), scores_of(each, rounds, sizes), number)
    )


def final_configs(contestants: Sequence[Contestant], rounds: Sequence[Run], sizes: Sequence[int]) -> dict[str, Config]:
    """The run of a rung, each contestant at the best of what its rounds tried.

    Args:
        contestants: who takes part.
        rounds: the finished rounds; none if nothing is searched.
        sizes: how many points each round has.

    Example:
        >>> final_configs(as_published("split-mnist"), (), ())["dhp+si"].head_init
        'published'
    """
    return {each.label: each.chosen(scores_of(each, rounds, sizes)) for each in contestants}


def scores_of(contestant: Contestant, rounds: Sequence[Run], sizes: Sequence[int]) -> dict[Point, float]:
    """The score of each point that a contestant tried, found by proposing the same points again.

    Args:
        contestant: whose.
        rounds: the finished rounds.
        sizes: how many points each round has.

    Example:
        >>> scores = scores_of(contestant, [read_run("reproduction/split-mnist/grid-1")], GRID_ROUNDS)
    """
    scores: dict[Point, float] = {}
    for run, number in zip(rounds if contestant.axes else (), sizes, strict=False):
        labels = {point: contestant.tried(point)[0] for point in propose(len(contestant.axes), scores, number)}
        for label in labels.values():
            if label not in run.results:
                raise InputError(f"{run.path} does not have {label}: it is not a round of this search")
        scores |= {point: score(run.results[label]) for point, label in labels.items()}
    return scores


def score(result: Result) -> float:
    """What is compared: the average accuracy after all tasks, mean over the trials; −∞ if one of them diverged."""
    return DIVERGED if result.diverged else float(result.average_accuracy[:, -1].mean())


# --- the parts of a reproduction


def rounds_of(runs: Runs, benchmark: str, parts: Sequence[str]) -> list[Run]:
    """The finished rounds of a search, up to the first that is not.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.
        parts: the names of the rounds.

    Example:
        >>> rounds = rounds_of(read_reproduction("results").runs, "split-mnist", GRID)
    """
    found: list[Run] = []
    for part in parts:
        run = runs.get((benchmark, part))
        if run is None or not run.finished:
            break
        found.append(run)
    return found


def _grid(benchmark: str, runs: Runs) -> dict[str, Config]:
    contestants = [*with_own_strength(benchmark), *of_one_initialisation(benchmark)]
    return round_configs(contestants, rounds_of(runs, benchmark, GRID), grid_rounds(benchmark))


def _search(benchmark: str, runs: Runs) -> dict[str, Config]:
    rounds = rounds_of(runs, benchmark, SEARCH)
    return round_configs(with_one_budget(benchmark), rounds, search_rounds(benchmark))


def _after_grid(contestants: Callable[[str], list[Contestant]]) -> Configs:
    def configs(benchmark: str, runs: Runs) -> dict[str, Config]:
        return final_configs(contestants(benchmark), rounds_of(runs, benchmark, GRID), grid_rounds(benchmark))

    return configs


def _rung_4(benchmark: str, runs: Runs) -> dict[str, Config]:
    rounds = rounds_of(runs, benchmark, SEARCH)
    return final_configs(with_one_budget(benchmark), rounds, search_rounds(benchmark))


def grid_rounds(benchmark: str) -> tuple[int, ...]:
    """How many strengths each round of the grids has."""
    return MORE_GRID_ROUNDS.get(benchmark, GRID_ROUNDS)


def search_rounds(benchmark: str) -> tuple[int, ...]:
    """How many points each round of the search for rung 4 has."""
    return FEWER_ROUNDS.get(benchmark, SEARCH_ROUNDS)


@dataclass(frozen=True)
class Step:
    """A part that may follow from others.

    Args:
        configs: what it runs on a benchmark, given the finished runs of the parts that it needs.
        needs: those parts, on the same benchmark.
        of_all: parts that it needs on all benchmarks.
    """

    configs: Configs
    needs: tuple[str, ...] = ()
    of_all: tuple[str, ...] = ()


GRID, SEARCH = ("grid-1", "grid-2", "grid-3"), ("search-1", "search-2", "search-3", "search-4")
STEPS = {
    "rung-1": Step(lambda benchmark, _: final_configs(as_published(benchmark), (), ())),
    "grid-1": Step(_grid),
    "grid-2": Step(_grid, GRID[:1]),
    "grid-3": Step(_grid, GRID[:2]),
    "rung-2": Step(_after_grid(with_own_strength), GRID),
    "rung-3": Step(_after_grid(of_one_initialisation), GRID),
    "search-1": Step(_search),
    "search-2": Step(_search, SEARCH[:1]),
    "search-3": Step(_search, SEARCH[:2]),
    "search-4": Step(_search, SEARCH[:3]),
    "rung-4": Step(_rung_4, SEARCH),
}
