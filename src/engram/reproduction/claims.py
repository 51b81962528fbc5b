"""The paper's claims, and our verdict on each: reproduced, not reproduced, contradicted, or not tested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import preset
from engram.report.layout import number
from engram.report.pairs import accuracy_difference, baseline_of, pairs
from engram.reproduction.ladder import Runs
from engram.reproduction.rungs import paper_difference, rung_pairs, rung_results
from engram.reproduction.verdicts import (
    FEWEST_PAIRS,
    Verdict,
    certainty,
    common_verdict,
    counted,
    each,
    judge,
    points,
    table_pairs,
)
from engram.runs.metrics import Estimate
from engram.runs.result import Result

LITTLE = 0.01  # a point of accuracy: within it, a value needs no tuning
THIRD = 3  # the task after which η decays, according to the paper


def claims(runs: Runs) -> list[Verdict]:
    """The verdicts on all claims for which there are results.

    Args:
        runs: those of a reproduction, by benchmark and part.

    Example:
        for verdict in claims(read_reproduction("results").runs):
            print(verdict.claim, verdict.verdict)
    """
    made = [
        _in_all_cases(
            "“The addition of DHP in all cases improves the model's ability to reduce forgetting”, by accuracy",
            [pair.accuracy for pair in table_pairs(runs)],
        ),
        *(_improves_on(runs, benchmark) for benchmark in PAPER_BENCHMARKS),
        _in_all_cases(
            "“Our model consistently exhibits lower negative BWT across all benchmarks”",
            [pair.transfer for pair in table_pairs(runs)],
        ),
        *_eta(runs),
        *_dynamics(runs),
        _not_by_capacity(runs),
        _better_than_uniform(runs),
    ]
    return [verdict for verdict in made if verdict is not None]


def claims_verdict(runs: Runs) -> list[str]:
    """What became of the paper's claims, in sentences.

    Example:
        print(*claims_verdict(read_reproduction("results").runs))
    """
    compared = [pair.accuracy for pair in table_pairs(runs)]
    if not compared:
        return ["No method of the paper has been run with DHP and without, so no claim is tested."]
    verdicts = [made.verdict for made in claims(runs)]
    words = ("reproduced", "not reproduced", "contradicted", "not tested")
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in words if word in verdicts)
    return [
        f"Of the paper's {len(verdicts)} claims: {counts}.",
        f"A method with DHP is {counted(compared, 'better than without')}.",
    ]


def _in_all_cases(claim: str, found: Sequence[Estimate]) -> Verdict:
    """A claim that the difference is above zero in every case; a single case below zero contradicts it."""
    verdicts = [judge(difference, 1) for difference in found]
    words = ("contradicted", "not reproduced", "reproduced", "not tested")
    return Verdict(
        claim,
        next((word for word in words if word in verdicts), "not tested"),
        counted(found),
        certainty(found),
    )


def _improves_on(runs: Runs, benchmark: str) -> Verdict | None:
    """The paper's largest claim about each benchmark."""
    run = runs.get((benchmark, "table"))
    if run is None:
        return None
    method, words = {
        "permuted-mnist": ("dhp+mas", "On Permuted MNIST DHP adds {gain:.2f} points to MAS"),
        "imbalanced-permuted-mnist": ("dhp", "On Imbalanced Permuted MNIST DHP alone adds {gain:.2f} points"),
        "split-mnist": ("dhp", "On Split MNIST DHP alone adds {gain:.2f} points"),
        "vision-mixture": ("dhp+mas", "On the mixture DHP adds {gain:.2f} points to MAS"),
    }[benchmark]
    paper = PAPER_RESULTS[benchmark]
    gain = paper[method][0] - paper[baseline_of(method)][0]
    claim = words.format(gain=gain)
    pair = next((pair for pair in pairs(run.results) if pair.label == method), None)
    if pair is None:
        return None
    if pair.accuracy.num_trials < FEWEST_PAIRS:
        diverged = len(run.results[method].diverged)
        tried = len(run.results[method].accuracy)
        evidence = (
            f"{diverged} of {tried} trials of {method} diverged" if diverged else "too few trials learned all tasks"
        )
        return Verdict(claim, "not tested", evidence, certainty([]))
    evidence = f"{points(pair.accuracy)} points"
    return Verdict(claim, judge(pair.accuracy, gain), evidence, certainty([pair.accuracy]))


def _eta(runs: Runs) -> list[Verdict]:
    """The sensitivity to η's initial value, paired by trial like all comparisons."""
    widest, lowest = [], []
    for benchmark in PAPER_BENCHMARKS:
        run = runs.get((benchmark, "sensitivity"))
        if run is None:
            continue
        by_eta = {result.config.eta: result for result in run.results.values()}
        usual = by_eta.get(preset(benchmark, "dhp").eta)
        if usual is None or len(by_eta) < 2:
            continue
        others = [accuracy_difference(result, usual) for result in by_eta.values() if result is not usual]
        widest.append((benchmark, max(others, key=lambda difference: abs(difference.mean))))
        lowest.append((benchmark, accuracy_difference(by_eta[min(by_eta)], by_eta[max(by_eta)])))
    if not widest:
        return []
    small = all(abs(difference.mean) < LITTLE for _, difference in widest)
    return [
        Verdict(
            "η's initial value needs little tuning",
            "reproduced" if small else "not reproduced",
            "the largest change from a value other than the paper's: " + each(widest),
            certainty([difference for _, difference in widest]),
        ),
        Verdict(
            "Low initial values of η are best",
            common_verdict([judge(difference, 1) for _, difference in lowest]),
            "the lowest minus the highest of the values: " + each(lowest),
            certainty([difference for _, difference in lowest]),
        ),
    ]


def _dynamics(runs: Runs) -> list[Verdict]:
    run = runs.get(("permuted-mnist", "table"))
    result = None if run is None else run.results.get("dhp")
    if result is None or not result.dynamics:
        return []
    eta, hebb, alpha = (_by_task(result, name) for name in ("eta", "hebb_norm", "alpha_norm"))
    if len(eta) < result.config.num_tasks or len(eta) <= THIRD:
        return []
    peak, ends = max(eta[0]), [values[-1] for values in eta]
    rises = peak > 10 * preset("permuted-mnist", "dhp").eta
    keeps = ends[THIRD - 1] > peak / 2  # as the claim requires: it decays only after the third
    larger = sum(after[-1] > before[-1] for before, after in pairwise(hebb))
    grows = sum(values[-1] > values[0] for values in alpha)
    seen = f"means over {len(result.accuracy)} trials, without an interval"
    after = f"{number(ends[0], 4)}, {number(ends[1], 4)} and {number(ends[2], 4)}"
    return [
        Verdict(
            "On Permuted MNIST η rises quickly in the first task, from 0.001 to 0.024",
            "reproduced" if rises else "not reproduced",
            f"it reaches {peak:.3f}",
            seen,
        ),
        Verdict(
            "η decays after the third task",
            "reproduced" if keeps and max(ends[THIRD:]) < peak / 2 else "not reproduced",
            f"it ends at {after} after the first three tasks, at {number(ends[-1], 4)} after the last",
            seen,
        ),
        Verdict(
            "‖Hebb‖ grows every time a new task is learned, without running away",
            "reproduced" if larger == len(hebb) - 1 else "not reproduced",
            f"it is larger after {larger} of {len(hebb) - 1} further tasks; {hebb[0][-1]:.1f} after the first, "
            f"{hebb[-1][-1]:.1f} after the last",
            seen,
        ),
        Verdict(
            "‖α‖ grows within each task",
            "reproduced" if grows == len(alpha) else "not reproduced",
            f"in {grows} of {len(alpha)} tasks, to {alpha[-1][-1]:.2f}",
            seen,
        ),
    ]


def _by_task(result: Result, name: str) -> list[list[float]]:
    tasks: dict[int, list[float]] = {}
    for row in result.dynamics:
        tasks.setdefault(int(row["task"]), []).append(float(row[name]))
    return [tasks[task] for task in sorted(tasks)]


def _not_by_capacity(runs: Runs) -> Verdict | None:
    """The baseline with an extra set of slow weights against the plain one."""
    run = runs.get(("split-mnist", "study"))
    table = {} if run is None else run.results
    matched, plain, dhp = (
        table.get(label) for label in ("as in the table: finetune", "plain baseline: finetune", "as in the table: dhp")
    )
    if matched is None or plain is None or dhp is None:
        return None
    over_plain = accuracy_difference(dhp, plain)
    over_matched = accuracy_difference(dhp, matched)
    return Verdict(
        "DHP alone beats a baseline of the same capacity, which has an extra set of slow weights",
        judge(over_matched, 1),
        f"Split MNIST: DHP alone {points(over_plain)} points over the plain baseline, and {points(over_matched)} over "
        "the one with the extra set, which also has twice the learning rate in that layer",
        certainty([over_matched]),
    )


def _better_than_uniform(runs: Runs) -> Verdict | None:
    run = runs.get(("split-mnist", "study"))
    if run is None:
        return None
    found = []
    for method in ("dhp", "dhp+si", "dhp+online-ewc", "dhp+mas"):
        synapse = run.results.get(f"as in the table: {method}")
        uniform = run.results.get(f"uniform plasticity: {method}")
        if synapse is not None and uniform is not None:
            found.append((method, accuracy_difference(synapse, uniform)))
    if not found:
        return None
    verdicts = [judge(difference, 1) for _, difference in found]
    verdict = common_verdict(verdicts)
    evidence = "; ".join(f"{method} {points(difference)}" for method, difference in found)
    return Verdict(
        "Plasticity that is learned for each synapse is better than one that all share",
        verdict,
        f"Split MNIST, points over the uniform one: {evidence}",
        certainty([difference for _, difference in found]),
    )


# --- how near rung 1 is to the paper's table


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
