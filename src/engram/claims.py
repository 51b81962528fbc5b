"""The paper's claims, and what our numbers say to each: reproduced, not reproduced, contradicted, or not tested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engram import metrics
from engram.comparisons import Pair, baseline_of, pairs
from engram.config import BENCHMARKS
from engram.metrics import Estimate
from engram.presets import PAPER_RESULTS, preset
from engram.results import Result
from engram.sheets import Sheet
from engram.tables import number

Sheets = Mapping[tuple[str, str], Sheet]
FIRM = 0.003  # below 0.05 / 16: what holds though sixteen differences are looked at
FEWEST_PAIRS = 3  # from which a verdict is given
THIRD = 3  # the task after which η is said to decay


@dataclass(frozen=True)
class Verdict:
    claim: str
    verdict: str
    evidence: str
    sure: str  # how sure we are


def judge(difference: Estimate, claimed: float) -> str:
    """Whether a difference that the paper reports is there: by its sign, where our 95% interval excludes zero."""
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
    """Student's two-sided p: how often chance alone would show as large a difference."""
    if difference.num_trials < 2 or difference.sem == 0:
        return math.nan
    from scipy.stats import t  # late: it costs more to import than everything else here

    return float(2 * t.sf(abs(difference.mean / difference.sem), difference.num_trials - 1))


def certainty(differences: Sequence[Estimate]) -> str:
    """How sure a verdict on one or several differences is, in words."""
    tested = [difference for difference in differences if difference.num_trials >= FEWEST_PAIRS]
    if not tested:
        return "nothing was measured"
    if len(tested) > 1:
        firm = sum(chance(difference) < FIRM for difference in tested)
        return f"{firm} of {len(tested)} differences are firm (p < {FIRM:g})"
    p = chance(tested[0])
    words = "firm" if p < FIRM else "sure" if p < 0.01 else "fairly sure" if p < 0.05 else "open"
    return f"{words} (p = {p:.1g}, {tested[0].num_trials} pairs)"


def table_pairs(sheets: Sheets) -> list[Pair]:
    """The sixteen differences of Table I, as far as both sides were learned to the end."""
    return [
        pair
        for benchmark in BENCHMARKS
        if (benchmark, "table") in sheets
        for pair in pairs(list(sheets[benchmark, "table"].entries.values()))
    ]


def steady_pairs(sheets: Sheets) -> list[Pair]:
    """The same with the steady trace, against the table's baselines."""
    return [
        pair
        for benchmark in BENCHMARKS
        if (benchmark, "variant") in sheets and (benchmark, "table") in sheets
        for pair in pairs(list({**sheets[benchmark, "table"].entries, **sheets[benchmark, "variant"].entries}.values()))
    ]


def claims(sheets: Sheets) -> list[Verdict]:
    """All claims that there is something to say about."""
    made = [
        _improves_everywhere(table_pairs(sheets)),
        *(_improves_on(sheets, benchmark) for benchmark in BENCHMARKS),
        _reduces_forgetting(table_pairs(sheets)),
        _eta_needs_no_tuning(sheets),
        *_dynamics(sheets),
        _not_by_capacity(sheets),
        _better_than_uniform(sheets),
    ]
    return [verdict for verdict in made if verdict is not None]


def points(difference: Estimate) -> str:
    """In accuracy points: +1.56 [+0.62, +2.50]."""
    if difference.num_trials < 2:
        return _signed(difference.mean)
    return f"{_signed(difference.mean)} [{_signed(difference.low)}, {_signed(difference.high)}]"


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{round(100 * value, 2) + 0.0:+.2f}"


def count(verdicts: Sequence[str]) -> str:
    """ "2 reproduced, 3 contradicted"."""
    words = ("reproduced", "not reproduced", "contradicted", "not tested")
    return ", ".join(f"{verdicts.count(word)} {word}" for word in words if word in verdicts)


def _improves_everywhere(found: Sequence[Pair]) -> Verdict:
    verdicts = [judge(pair.accuracy, 1) for pair in found]
    tested = [word for word in verdicts if word != "not tested"]
    verdict = "not tested"
    if tested:
        verdict = "reproduced" if set(tested) == {"reproduced"} else "not reproduced"
        if tested.count("contradicted") > tested.count("reproduced"):
            verdict = "contradicted"
    return Verdict(
        "“The addition of DHP in all cases improves the model's ability to reduce forgetting”, by accuracy",
        verdict,
        f"of {len(found)} comparisons: {count(verdicts)}",
        certainty([pair.accuracy for pair in found]),
    )


def _improves_on(sheets: Sheets, benchmark: str) -> Verdict | None:
    """The paper's largest claim about each benchmark."""
    sheet = sheets.get((benchmark, "table"))
    if sheet is None:
        return None
    method, words = {
        "permuted-mnist": ("dhp+mas", "DHP with MAS is the best method on Permuted MNIST, {gain:+.2f} points over MAS"),
        "imbalanced-permuted-mnist": ("dhp", "On Imbalanced Permuted MNIST DHP alone adds {gain:.2f} points"),
        "split-mnist": ("dhp", "On Split MNIST DHP alone adds {gain:.2f} points"),
        "vision-mixture": ("dhp+mas", "On the mixture DHP with MAS adds {gain:.2f} points over MAS"),
    }[benchmark]
    paper = PAPER_RESULTS[benchmark]
    gain = paper[method][0] - paper[baseline_of(method)][0]
    claim = words.format(gain=gain)
    pair = next((pair for pair in pairs(list(sheet.entries.values())) if pair.method == method), None)
    if pair is None:
        return None
    if pair.accuracy.num_trials < FEWEST_PAIRS:
        lost = len(sheet.entries[method].diverged)
        tried = len(sheet.entries[method].accuracy)
        return Verdict(
            claim, "not tested", f"{lost} of {tried} trials of {method} diverged before the last task", certainty([])
        )
    evidence = f"{points(pair.accuracy)} points"
    return Verdict(claim, judge(pair.accuracy, gain), evidence, certainty([pair.accuracy]))


def _reduces_forgetting(found: Sequence[Pair]) -> Verdict:
    verdicts = [judge(pair.transfer, 1) for pair in found]
    tested = [word for word in verdicts if word != "not tested"]
    better, worse = tested.count("reproduced"), tested.count("contradicted")
    verdict = "not tested" if not tested else "reproduced" if better == len(tested) else "not reproduced"
    if worse > better:
        verdict = "contradicted"
    return Verdict(
        "“Our model consistently exhibits lower negative BWT across all benchmarks”",
        verdict,
        f"BWT of {len(found)} comparisons: {count(verdicts)}",
        certainty([pair.transfer for pair in found]),
    )


def _eta_needs_no_tuning(sheets: Sheets) -> Verdict | None:
    spreads = []
    for benchmark in BENCHMARKS:
        sheet = sheets.get((benchmark, "sensitivity"))
        if sheet is not None:
            means = [100 * metrics.estimate(r.average_accuracy[:, -1]).mean for r in sheet.entries.values()]
            sems = [100 * metrics.estimate(r.average_accuracy[:, -1]).sem for r in sheet.entries.values()]
            spreads.append((benchmark, max(means) - min(means), max(sems)))
    if not spreads:
        return None
    parts = [f"{name} {spread:.2f} points (SEM up to {sem:.2f})" for name, spread, sem in spreads]
    flat = all(spread < 2 * sem for _, spread, sem in spreads)
    why = "; the first half holds because η hardly matters at all, so that no value is best" if flat else ""
    return Verdict(
        "η's initial value needs little tuning, and low values are best",
        "reproduced" if flat else "not reproduced",
        f"from the best to the worst of five values: {', '.join(parts)}{why}",
        "only differences larger than two standard errors would have been seen",
    )


def _dynamics(sheets: Sheets) -> list[Verdict]:
    sheet = sheets.get(("permuted-mnist", "table"))
    result = None if sheet is None else sheet.entries.get("dhp")
    if result is None or not result.dynamics:
        return []
    eta, hebb, alpha = (_by_task(result, name) for name in ("eta", "hebb_norm", "alpha_norm"))
    if len(eta) < result.config.num_tasks or len(eta) <= THIRD:
        return []
    peak, ends = max(eta[0]), [values[-1] for values in eta]
    rises = peak > 10 * preset("permuted-mnist", "dhp").eta
    decays = max(ends[THIRD:]) < peak / 2
    humps = sum(0 < int(np.argmax(values)) < len(values) - 1 for values in eta[THIRD:])
    grows = [values[-1] > values[0] for values in alpha]
    seen = f"means over {len(result.accuracy)} trials, without an interval"
    return [
        Verdict(
            "On Permuted MNIST η rises quickly in the first task, from 0.001 to 0.024, and decays after the third",
            "reproduced" if rises and decays else "not reproduced",
            f"it reaches {peak:.3f} in the first task and ends at {number(ends[0], 4)}, {number(ends[1], 4)} and "
            f"{number(ends[2], 4)} after the first three, at {number(ends[-1], 4)} after the last; in {humps} of the "
            "tasks 4 to 10 it first rises, then falls",
            seen,
        ),
        Verdict(
            "‖Hebb‖ grows without running away, and ‖α‖ grows within each task",
            "reproduced" if all(grows) and np.isfinite(hebb[-1][-1]) else "not reproduced",
            f"‖Hebb‖ ends at {hebb[0][-1]:.1f} after the first task and at {hebb[-1][-1]:.1f} after the last; "
            f"‖α‖ grows in {sum(grows)} of {len(grows)} tasks, to {alpha[-1][-1]:.2f}",
            seen,
        ),
    ]


def _by_task(result: Result, name: str) -> list[list[float]]:
    tasks: dict[int, list[float]] = {}
    for row in result.dynamics:
        tasks.setdefault(int(row["task"]), []).append(float(row[name]))
    return [tasks[task] for task in sorted(tasks)]


def _not_by_capacity(sheets: Sheets) -> Verdict | None:
    """The baseline with an extra set of slow weights against the plain one."""
    sheet = sheets.get(("split-mnist", "study"))
    table = {} if sheet is None else sheet.entries
    matched, plain, dhp = (
        table.get(label) for label in ("as in the table: finetune", "plain baseline: finetune", "as in the table: dhp")
    )
    if matched is None or plain is None or dhp is None:
        return None
    over_plain = metrics.paired_difference(dhp.average_accuracy[:, -1], plain.average_accuracy[:, -1])
    over_matched = metrics.paired_difference(dhp.average_accuracy[:, -1], matched.average_accuracy[:, -1])
    return Verdict(
        "DHP alone beats a baseline of the same capacity, which has an extra set of slow weights",
        judge(over_matched, 1),
        f"Split MNIST: DHP alone {points(over_plain)} points over the plain baseline, and {points(over_matched)} over "
        "the one with the extra set, which also has twice the learning rate in that layer",
        certainty([over_matched]),
    )


def _better_than_uniform(sheets: Sheets) -> Verdict | None:
    sheet = sheets.get(("split-mnist", "study"))
    if sheet is None:
        return None
    found = []
    for method in ("dhp", "dhp+si", "dhp+online-ewc", "dhp+mas"):
        synapse = sheet.entries.get(f"as in the table: {method}")
        uniform = sheet.entries.get(f"uniform plasticity: {method}")
        if synapse is not None and uniform is not None:
            difference = metrics.paired_difference(synapse.average_accuracy[:, -1], uniform.average_accuracy[:, -1])
            found.append((method, difference))
    if not found:
        return None
    verdicts = [judge(difference, 1) for _, difference in found]
    verdict = verdicts[0] if len(set(verdicts)) == 1 else "not reproduced"
    evidence = "; ".join(f"{method} {points(difference)}" for method, difference in found)
    return Verdict(
        "Plasticity that is learned for each synapse is better than one that all share",
        verdict,
        f"Split MNIST, points over the uniform one: {evidence}",
        certainty([difference for _, difference in found]),
    )
