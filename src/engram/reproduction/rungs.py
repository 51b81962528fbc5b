"""What DHP adds on each rung of the ladder, and at which settings: tables, and the one figure that tells it all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import title_of
from engram.config.settings import Config
from engram.report.figures.drawing import Drawing
from engram.report.figures.ladder import Differences, ladder_figure
from engram.report.layout import Table, count
from engram.report.pairs import Pair, baseline_of
from engram.reproduction import ladder
from engram.reproduction.ladder import ENDINGS, Contestant, Runs
from engram.reproduction.search import best_point, is_inside, settings_at
from engram.reproduction.verdicts import FEWEST_PAIRS, chance, points, where
from engram.runs.metrics import Estimate
from engram.runs.result import Result
from engram.runs.run import Run

RUNGS = {1: "as published", 2: "each its own strength", 3: "one initialisation", 4: "one budget"}
OPPONENTS = ("linear", "matched")
SEARCHED = {2: ladder.with_own_strength, 3: ladder.of_one_initialisation, 4: ladder.with_one_budget}


def rung_results(runs: Runs, benchmark: str, rung: int) -> dict[str, Result]:
    """The results that stand on a rung, by method, whichever run they are in.

    A head alone has no strength, so its result on rung 1 stands on rung 2 as well; and DHP starts as published on all.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.
        rung: 1 to 4.

    Example:
        >>> rung_results(read_reproduction("results").runs, "split-mnist", 3)["linear+si"].config.head_init
        'published'
    """

    def of(part: str) -> dict[str, Result]:
        run = runs.get((benchmark, part))
        return {} if run is None else {label.removesuffix(", published"): r for label, r in run.results.items()}

    alone = {label: result for label, result in of("rung-1").items() if "+" not in label}
    second = {**alone, **of("rung-2")}
    if rung == 3:
        return {**{label: r for label, r in second.items() if label.startswith("dhp")}, **of("rung-3")}
    return {1: of("rung-1"), 2: second if of("rung-2") else {}, 4: of("rung-4")}[rung]


def rung_pairs(runs: Runs, benchmark: str, rung: int, opponent: str, head: str = "dhp") -> list[Pair]:
    """A head minus an opponent on a rung: alone, and with each penalty.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.
        rung: 1 to 4.
        opponent: the head that it is compared with: "linear" or "matched".
        head: the head.

    Example:
        >>> [pair.accuracy.mean for pair in rung_pairs(runs, "split-mnist", 1, "linear")]
    """
    found = rung_results(runs, benchmark, rung)
    both = [(head + ending, opponent + ending) for ending in ENDINGS]
    return [Pair(a, b, found[a], found[b]) for a, b in both if a in found and b in found]


def ladder_table(runs: Runs, opponent: str, head: str = "dhp") -> Table:
    """The sixteen differences, a column for each rung, with the paper's.

    Args:
        runs: those of a reproduction.
        opponent: the head that it is compared with.
        head: the head.

    Example:
        >>> print(ladder_table(read_reproduction("results").runs, "linear").to_text())
    """
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        by_rung = {
            rung: {pair.label: pair for pair in rung_pairs(runs, benchmark, rung, opponent, head)} for rung in RUNGS
        }
        for method in (head + ending for ending in ENDINGS):
            found = {rung: by_rung[rung][method] for rung in RUNGS if method in by_rung[rung]}
            if found:
                theirs = paper_difference(next(iter(found.values())).result.config)
                cells = [points(found[rung].accuracy) if rung in found else "–" for rung in RUNGS]
                paper = "–" if theirs is None else f"{theirs:+.2f}"
                rows.append((f"{title_of(benchmark)}: {method}", paper, *cells))
    return Table(
        f"{head} minus {opponent}, points of accuracy with 95% intervals, rung by rung",
        ("", "paper", *(f"{rung}: {words}" for rung, words in RUNGS.items())),
        rows,
    )


def verdicts_table(runs: Runs) -> Table:
    """Where the intervals of each rung lie, and how many are firm although many differences are tested.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(verdicts_table(read_reproduction("results").runs).to_text())
    """
    rows = []
    for rung, words in RUNGS.items():
        for opponent in OPPONENTS:
            found = rung_differences(runs, rung, opponent)
            if found:
                at = [where(difference) for difference in found]
                tests = sum(position != "–" for position in at)
                firm = [d.mean > 0 for d in found if d.num_trials >= FEWEST_PAIRS and chance(d) < 0.05 / tests]
                counts = [str(at.count(f"{side} zero")) for side in ("above", "around", "below")]
                of_firm = f"{sum(firm)} above, {len(firm) - sum(firm)} below"
                rows.append((f"{rung}: {words}, minus {opponent}", str(tests), *counts, of_firm))
    columns = ("rung", "differences", "above zero", "around zero", "below zero", "firm")
    return Table("DHP on each rung: where the 95% intervals lie", columns, rows)


def rung_differences(runs: Runs, rung: int, opponent: str) -> list[Estimate]:
    """DHP minus an opponent on a rung, on all benchmarks: alone, and with each penalty.

    Args:
        runs: those of a reproduction.
        rung: 1 to 4.
        opponent: "linear" or "matched".

    Example:
        >>> len(rung_differences(read_reproduction("results").runs, 3, "linear"))
    """
    return [pair.accuracy for name in PAPER_BENCHMARKS for pair in rung_pairs(runs, name, rung, opponent)]


def draw_ladder(runs: Runs, opponent: str, head: str = "dhp") -> Drawing:
    """The same as a figure.

    Example:
        >>> draw_ladder(read_reproduction("results").runs, "linear").to_bytes("png")
    """
    found = []
    for benchmark in PAPER_BENCHMARKS:
        for ending in ENDINGS:
            pairs = {
                f"{rung}: {words}": pair
                for rung, words in RUNGS.items()
                for pair in rung_pairs(runs, benchmark, rung, opponent, head)
                if pair.label == head + ending
            }
            if pairs:
                by_rung = {rung: pair.accuracy for rung, pair in pairs.items()}
                paper = paper_difference(next(iter(pairs.values())).result.config)
                found.append(Differences(title_of(benchmark), ending.removeprefix("+") or "alone", by_rung, paper))
    return ladder_figure(found, opponent)


def settings_table(runs: Runs, benchmark: str, rung: int) -> Table:
    """What each contestant of a rung tried, and what was chosen: every setting with its score, in %.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.
        rung: 2 or 3, of grids over strengths; or 4, of the search.

    Example:
        >>> settings_table(read_reproduction("results").runs, "split-mnist", 2).rows[0][1]
    """
    parts = ladder.SEARCH if rung == 4 else ladder.GRID
    sizes = ladder.search_rounds(benchmark) if rung == 4 else ladder.GRID_ROUNDS
    rounds = ladder.rounds_of(runs, benchmark, parts)
    return tried_table(f"Rung {rung}", SEARCHED[rung](benchmark), rounds, sizes)


def tried_table(title: str, contestants: Sequence[Contestant], rounds: Sequence[Run], sizes: Sequence[int]) -> Table:
    """What each contestant tried in the rounds of a search; no row without rounds.

    Args:
        title: for which the search was.
        contestants: who took part. One that has nothing to search is left out.
        rounds: the finished rounds.
        sizes: how many points each round has.

    Example:
        >>> tried_table("Rung 2", with_own_strength("split-mnist"), rounds, GRID_ROUNDS).rows[0][1]
    """
    trials = max((config.trials for run in rounds for config in run.configs.values()), default=0)
    return Table(
        f"{title}: what was tried on validation samples, {count(trials, 'trial')} each, with the accuracy in %",
        ("contestant", "chosen", "less and more tried", "all that was tried"),
        [_tried(each, rounds, sizes) for each in contestants if each.axes and rounds],
    )


def _tried(contestant: Contestant, rounds: Sequence[Run], sizes: Sequence[int]) -> tuple[str, ...]:
    scores = ladder.scores_of(contestant, rounds, sizes)
    best = best_point(scores)

    def words(point: tuple[float, ...]) -> str:
        return " ".join(f"{value:g}" for value in settings_at(contestant.axes, point).values())

    return (
        contestant.label,
        ", ".join(f"{name} {value:g}" for name, value in settings_at(contestant.axes, best).items()),
        "yes" if is_inside(len(contestant.axes), scores) else "no",
        "; ".join(f"{words(point)}: {100 * scores[point]:.2f}" for point in sorted(scores)),
    )


def cells_within(runs: Runs, limit: float) -> tuple[int, int]:
    """How many cells of the paper's Table I rung 1 has within so many points, and how many it has at all.

    Args:
        runs: those of a reproduction.
        limit: in points of accuracy.

    Example:
        >>> near, all_cells = cells_within(read_reproduction("results").runs, 1.0)
    """
    near = total = 0
    for benchmark in PAPER_BENCHMARKS:
        found = rung_results(runs, benchmark, 1)
        for method, (accuracy, _) in PAPER_RESULTS[benchmark].items():
            ours = found.get(_on_rung_1(method))
            if ours is not None and not ours.diverged:
                total += 1
                near += abs(100 * float(ours.average_accuracy[:, -1].mean()) - accuracy) <= limit
    return near, total


def gains_within(runs: Runs, limit: float) -> tuple[int, int]:
    """The same for the paper's differences between DHP and its baselines.

    Example:
        >>> near, all_gains = gains_within(read_reproduction("results").runs, 1.0)
    """
    pairs = [pair for name in PAPER_BENCHMARKS for pair in rung_pairs(runs, name, 1, "linear")]
    both = [(100 * pair.accuracy.mean, paper_difference(pair.result.config)) for pair in pairs]
    known = [(ours, theirs) for ours, theirs in both if theirs is not None and not math.isnan(ours)]
    return sum(abs(ours - theirs) <= limit for ours, theirs in known), len(known)


def _on_rung_1(method: str) -> str:
    """The paper's method as rung 1 names it: its baselines are plain heads."""
    if method.startswith("dhp"):
        return method
    return "linear" if method == "finetune" else f"linear+{method}"


def paper_difference(config: Config) -> float | None:
    """What the paper has for a method minus its baseline, in points; None if it does not have it, or for less data.

    Example:
        >>> round(paper_difference(engram.preset("split-mnist", "dhp")), 2)
        7.8
    """
    known = PAPER_RESULTS[config.benchmark]
    if config.method not in known or config.max_samples is not None:
        return None
    return known[config.method][0] - known[baseline_of(config.method)][0]
