"""From paired differences to verdicts, and how certain they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import title_of
from engram.report.layout import count
from engram.report.pairs import Pair, accuracy_difference, pairs
from engram.reproduction.ladder import Runs
from engram.runs.metrics import Estimate
from engram.runs.result import Result

FIRM = 0.003  # below 0.05 / 16: significant although sixteen differences are tested
FEWEST_PAIRS = 3  # with fewer there is no verdict


@dataclass(frozen=True)
class Verdict:
    """What our numbers say about one claim of the paper."""

    claim: str
    verdict: str  # "reproduced", "not reproduced", "contradicted" or "not tested"
    evidence: str
    certainty: str


def judge(difference: Estimate, claimed: float) -> str:
    """The verdict on a difference that the paper reports: by its sign, where our 95% interval excludes zero.

    Args:
        difference: ours.
        claimed: the paper's; only its sign matters.

    Example:
        judge(pair.accuracy, pair.paper)
    """
    if difference.num_trials < FEWEST_PAIRS or math.isnan(difference.low):
        return "not tested"
    if difference.low <= 0 <= difference.high:
        return "not reproduced"
    return "reproduced" if (difference.mean > 0) == (claimed > 0) else "contradicted"


def where(difference: Estimate) -> str:
    """Where the 95% interval lies."""
    words = {"reproduced": "above zero", "contradicted": "below zero", "not reproduced": "around zero"}
    return words.get(judge(difference, 1), "–")


def chance(difference: Estimate) -> float:
    """Student's two-sided p: how often chance alone would show a difference this large."""
    if difference.num_trials < 2 or difference.sem == 0:
        return math.nan
    from scipy.special import stdtr  # imported here because it is slow; scipy.stats takes three times as long

    return float(2 * stdtr(difference.num_trials - 1, -abs(difference.mean / difference.sem)))


def firm(found: Sequence[Estimate]) -> list[Estimate]:
    """Those that exclude zero even after Bonferroni's correction for all that can be tested."""
    tested = [difference for difference in found if where(difference) != "–"]
    return [difference for difference in tested if chance(difference) < 0.05 / len(tested)]


def certainty(differences: Sequence[Estimate]) -> str:
    """How certain a verdict on one or several differences is, in words."""
    tested = [difference for difference in differences if difference.num_trials >= FEWEST_PAIRS]
    if not tested:
        return "nothing was measured"
    if len(tested) > 1:
        firm = sum(chance(difference) < FIRM for difference in tested)
        return f"{firm} of {len(tested)} differences are firm (p < {FIRM:g})"
    p = chance(tested[0])
    words = "firm" if p < FIRM else "sure" if p < 0.01 else "fairly sure" if p < 0.05 else "open"
    return f"{words} (p = {p:.1g}, {tested[0].num_trials} pairs)"


def table_pairs(runs: Runs) -> list[Pair]:
    """The sixteen differences of Table I, where both methods were run."""
    return [
        pair
        for benchmark in PAPER_BENCHMARKS
        if (benchmark, "table") in runs
        for pair in pairs(runs[benchmark, "table"].results)
    ]


def steady_pairs(runs: Runs) -> list[Pair]:
    """The same differences with the steady trace, against the table's baselines."""
    return [pair for benchmark in PAPER_BENCHMARKS for pair in pairs(variant_results(runs, benchmark))]


def variant_results(runs: Runs, benchmark: str) -> dict[str, Result]:
    """The variant's methods with the table's baselines, which it shares; in the table's order."""
    variant = runs.get((benchmark, "variant"))
    if variant is None:
        return {}
    table = runs.get((benchmark, "table"))
    baselines = {} if table is None else {m: r for m, r in table.results.items() if not r.config.plastic}
    order = [] if table is None else list(table.results)
    both = baselines | variant.results
    return {method: both[method] for method in dict.fromkeys([*order, *both]) if method in both}


def points(difference: Estimate) -> str:
    """A difference in points of accuracy, with its interval: "+1.56 [+0.62, +2.50]"."""
    if difference.num_trials < 2:
        return _signed(difference.mean)
    return f"{_signed(difference.mean)} [{_signed(difference.low)}, {_signed(difference.high)}]"


def added(result: Result | None, plain: Result | None) -> str:
    """What a head adds to the plain one, as `points` shows it; where trials diverged, that, and no mean of the others.

    Example:
        added(run.results["dhp+si"], run.results["linear+si"])
    """
    if result is None or plain is None:
        return "–"
    return next(_diverged(("", result), ("plain: ", plain)), points(accuracy_difference(result, plain)))


def difference_in_words(pair: Pair) -> str:
    """A difference as `points` shows it, and how many trials diverged: the mean is that of the others.

    Example:
        difference_in_words(rung_pairs(runs, "vision-mixture", 1, "linear")[3])
    """
    lost = list(_diverged(("", pair.result), (f"{pair.baseline_label}: ", pair.baseline)))
    return "; ".join([points(pair.accuracy), *lost] if pair.accuracy.num_trials or not lost else lost)


def cannot_be_compared(pair: Pair) -> bool:
    """Whether so many trials diverged that there is no verdict."""
    diverged = pair.result.diverged or pair.baseline.diverged
    return bool(diverged) and pair.accuracy.num_trials < FEWEST_PAIRS


def _diverged(*found: tuple[str, Result]) -> Iterator[str]:
    for whose, result in found:
        if result.diverged:
            yield f"{whose}{len(result.diverged)} of {len(result.accuracy)} diverged"


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{round(100 * value, 2) + 0.0:+.2f}"


def counted(found: Sequence[Estimate], better: str = "better") -> str:
    """On which side of zero intervals lie: "better in 2 of 16 comparisons, worse in 8, unclear in 6".

    Example:
        counted([pair.accuracy for pair in table_pairs(runs)])
    """
    at = [where(difference) for difference in found]
    above, around, below = (at.count(f"{word} zero") for word in ("above", "around", "below"))
    untested = f"; {at.count('–')} could not be compared" if "–" in at else ""
    return f"{better} in {above} of {count(len(at), 'comparison')}, worse in {below}, unclear in {around}{untested}"


def each(found: Sequence[tuple[str, Estimate]]) -> str:
    """The differences of several benchmarks, each after its title."""
    return ", ".join(f"{title_of(name)} {points(difference)}" for name, difference in found)


def common_verdict(verdicts: Sequence[str]) -> str:
    """One verdict on several: theirs, if they agree."""
    return verdicts[0] if len(set(verdicts)) == 1 else "not reproduced"
