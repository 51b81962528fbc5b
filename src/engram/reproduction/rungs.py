"""What DHP adds on each rung of the ladder, and at which settings: tables, and the one figure that tells it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import title_of
from engram.config.settings import Config
from engram.report.figures.drawing import Drawing
from engram.report.figures.ladder import Differences, ladder_figure
from engram.report.layout import Table, count
from engram.report.pairs import Pair, accuracy_difference, baseline_of, mean_accuracy_difference
from engram.reproduction import ladder
from engram.reproduction.ladder import ENDINGS, Contestant, Runs
from engram.reproduction.search import DIVERGED, best_point, is_inside, settings_at
from engram.reproduction.verdicts import cannot_be_compared, difference_in_words, firm, points, where
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result
from engram.runs.run import Run

RUNGS = {1: "as published", 2: "each its own strength", 3: "one initialisation", 4: "one budget"}
OPPONENTS = ("linear", "matched")
MIXTURE = "vision-mixture"
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
    on_rung_2 = second if any((name, "rung-2") in runs for name in PAPER_BENCHMARKS) else {}
    return {1: of("rung-1"), 2: on_rung_2, 4: of("rung-4")}[rung]


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
                cells = [difference_in_words(found[rung]) if rung in found else "–" for rung in RUNGS]
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
            pairs = _pairs_of_all(runs, rung, opponent)
            if pairs:
                found = [pair.accuracy for pair in pairs if not cannot_be_compared(pair)]
                at = [where(difference) for difference in found]
                sure = [difference.mean > 0 for difference in firm(found)]
                counts = [at.count(f"{side} zero") for side in ("above", "around", "below")]
                row = map(str, (len(pairs), *counts, len(pairs) - len(found)))
                of_firm = f"{sum(sure)} above, {len(sure) - sum(sure)} below"
                mean = points(rung_mean(runs, rung, opponent))
                rows.append((f"{rung}: {words}, minus {opponent}", *row, of_firm, mean))
    sides = ("above zero", "around zero", "below zero", "diverged")
    columns = ("rung", "differences", *sides, "firm", "mean on MNIST's benchmarks, points")
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
    return [pair.accuracy for pair in _pairs_of_all(runs, rung, opponent)]


def _pairs_of_all(runs: Runs, rung: int, opponent: str) -> list[Pair]:
    return [pair for name in PAPER_BENCHMARKS for pair in rung_pairs(runs, name, rung, opponent)]


def rung_mean(runs: Runs, rung: int, opponent: str) -> Estimate:
    """DHP minus an opponent on a rung: the mean of all but the mixture, where trials diverge.

    Args:
        runs: those of a reproduction.
        rung: 1 to 4, one that was run.
        opponent: "linear" or "matched".

    Example:
        >>> rung_mean(read_reproduction("results").runs, 3, "linear").low
    """
    of_digits = [pair for pair in _pairs_of_all(runs, rung, opponent) if pair.benchmark != MIXTURE]
    found = [pair for pair in of_digits if pair.accuracy.num_trials]
    return mean_accuracy_difference(found) if found else metrics.estimate([])


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
                lost = {rung for rung, pair in pairs.items() if pair.result.diverged or pair.baseline.diverged}
                paper = paper_difference(next(iter(pairs.values())).result.config)
                name = ending.removeprefix("+") or "alone"
                found.append(Differences(title_of(benchmark), name, by_rung, paper, lost))
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
    sizes = ladder.search_rounds(benchmark) if rung == 4 else ladder.grid_rounds(benchmark)
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
        >>> tried_table("Rung 2", with_own_strength("split-mnist"), rounds, grid_rounds("split-mnist")).rows[0][1]
    """
    trials = max((config.trials for run in rounds for config in run.configs.values()), default=0)
    over = len(rounds) == len(sizes)
    so_far = "" if over else f", after {len(rounds)} of {len(sizes)} rounds"
    return Table(
        f"{title}: what was tried on validation samples, {count(trials, 'trial')} each, with the accuracy in %{so_far}",
        ("method", "chosen" if over else "best so far", "inside the grid", "all that was tried"),
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
        "; ".join(f"{words(point)}: {_in_percent(scores[point])}" for point in sorted(scores)),
    )


def _in_percent(score: float) -> str:
    return f"{100 * score:.2f}" if score > DIVERGED else "diverged"


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


# --- at one strength for both


def one_strength_table(runs: Runs) -> Table:
    """DHP minus plain heads at one λ: the best for the plain head, and the best for DHP, of those that both tried.

    The paper's strengths "remain the same with and without DHP Softmax". The grids of rungs 2 and 3 hold that
    comparison, since both heads tried the same values in the same trials.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(one_strength_table(read_reproduction("results").runs).to_text())
    """
    plain = ("linear", "linear, published")  # as PyTorch starts it, and as wide as the published layer
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        rounds = ladder.rounds_of(runs, benchmark, ladder.GRID)
        for ending in ENDINGS[1:] if rounds else ():
            ours = _by_strength(f"dhp{ending}", rounds)
            others = [_by_strength(name.replace("linear", f"linear{ending}"), rounds) for name in plain]
            cells = [cell for theirs in others for cell in _at_one_strength(ours, theirs)]
            rows.append((f"{title_of(benchmark)}: dhp{ending}", *cells))
    return Table(
        "dhp minus a plain head at one strength for both: λ, and points of accuracy with 95% intervals",
        ("", *(f"minus {name}, λ best for {whose}" for name in plain for whose in ("it", "dhp"))),
        rows,
    )


def _by_strength(label: str, rounds: Sequence[Run]) -> dict[float, Result]:
    """What a contestant tried in a grid; a strength at which a trial diverged is left out."""
    found = [r for run in rounds for name, r in run.results.items() if name.startswith(f"{label}: ")]
    return {r.config.strength: r for r in found if r.config.strength is not None and not r.diverged}


def _at_one_strength(ours: Mapping[float, Result], theirs: Mapping[float, Result]) -> list[str]:
    both = sorted(ours.keys() & theirs.keys())
    best = [max(both, key=lambda strength: ladder.score(tried[strength]), default=None) for tried in (theirs, ours)]
    return ["–" if at is None else f"{at:g}: {points(accuracy_difference(ours[at], theirs[at]))}" for at in best]
