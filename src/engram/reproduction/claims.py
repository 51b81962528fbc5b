"""Table I next to the paper's, and a verdict on each claim: reproduced, not reproduced, contradicted, or not tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from engram.config.methods import all_methods
from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import preset, title_of
from engram.report.layout import Table, number
from engram.report.pairs import Pair, accuracy_difference, baseline_of, paper_value
from engram.report.tables import final_accuracy
from engram.reproduction.ladder import Runs
from engram.reproduction.rungs import RUNGS, rung_pairs
from engram.reproduction.verdicts import (
    Verdict,
    cannot_be_compared,
    certainty,
    common_verdict,
    counted,
    difference_in_words,
    each,
    firm,
    judge,
    table_pairs,
)
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result

LITTLE = 0.01  # a point of accuracy: within it, a value needs no tuning
THIRD = 3  # the task after which η decays, according to the paper
# The paper's largest gain on each benchmark.
LARGEST = {
    "permuted-mnist": "dhp+mas",
    "imbalanced-permuted-mnist": "dhp",
    "split-mnist": "dhp",
    "vision-mixture": "dhp+mas",
}
Pairs = dict[str, list[Pair]]  # by benchmark


# --- what DHP adds, by rung of the ladder


def rung_claims_table(runs: Runs) -> Table:
    """What the paper says that DHP adds, and our verdict on each rung of the ladder.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(rung_claims_table(read_reproduction("results").runs).to_text())
    """
    plain = {rung: _pairs_on(runs, rung, "linear") for rung in RUNGS}
    plain = {rung: found for rung, found in plain.items() if found}
    matched = {rung: _pairs_on(runs, rung, "matched") for rung in plain}
    uniform = {rung: _pairs_on(runs, rung, "dhp-uniform") for rung in plain}
    rows = [
        (
            "“The addition of DHP in all cases improves the model's ability to reduce forgetting”, by accuracy",
            *(_in_all_cases(found, "accuracy") for found in plain.values()),
        ),
        (
            "“Our model consistently exhibits lower negative BWT across all benchmarks”",
            *(_in_all_cases(found, "transfer") for found in plain.values()),
        ),
        (
            "It is not the larger capacity: DHP is better than a matched head",
            *(_in_all_cases(found, "accuracy") for found in matched.values()),
        ),
        (
            "Plasticity that is learned for each synapse is better than one that all share",
            *(_in_all_cases(found, "accuracy") for found in uniform.values()),
        ),
    ]
    for benchmark, method in LARGEST.items():
        gain = PAPER_RESULTS[benchmark][method][0] - PAPER_RESULTS[benchmark][baseline_of(method)][0]
        claim = f"{title_of(benchmark)}: {method} adds {gain:.2f} points"
        rows.append((claim, *(_gains(found.get(benchmark, []), method, gain) for found in plain.values())))
    columns = ("the paper says", *(f"{rung}: {RUNGS[rung]}" for rung in plain))
    return Table("The paper's claims, rung by rung: DHP minus a plain head", columns, rows if plain else [])


def _pairs_on(runs: Runs, rung: int, opponent: str) -> Pairs:
    found = {name: rung_pairs(runs, name, rung, opponent) for name in PAPER_BENCHMARKS}
    return {name: some for name, some in found.items() if some}


def _in_all_cases(found: Pairs, what: str) -> str:
    """A claim that the difference is above zero in every case; a single firm one below zero contradicts it."""
    compared = [pair for some in found.values() for pair in some]
    differences: list[Estimate] = [getattr(pair, what) for pair in compared]
    verdicts = [judge(difference, 1) for difference in differences]
    if not verdicts:
        return "not tested"
    above, below = verdicts.count("reproduced"), verdicts.count("contradicted")
    surely_below = sum(difference.mean < 0 for difference in firm(differences))
    worst = next(word for word in ("contradicted", "not reproduced", "not tested", "reproduced") if word in verdicts)
    verdict = "not reproduced" if worst == "contradicted" and not surely_below else worst
    lost = sum(cannot_be_compared(pair) for pair in compared)
    words = f"{verdict}: better in {above} of {len(verdicts)}, worse in {below}"
    words += f" ({surely_below} firm)" if below else ""
    return words + (f", diverged in {lost}" if lost else "")


def _gains(found: Sequence[Pair], method: str, gain: float) -> str:
    pair = next((pair for pair in found if pair.label == method), None)
    if pair is None:
        return "not run"
    return f"{judge(pair.accuracy, gain)}: {difference_in_words(pair)}"


def claims_verdict(runs: Runs) -> list[str]:
    """What Table I says where no rung of the ladder was run, in sentences.

    Example:
        print(*claims_verdict(read_reproduction("results").runs))
    """
    compared = [pair.accuracy for pair in table_pairs(runs)]
    if not compared:
        return ["No method of the paper has been run with DHP and without, so no claim is tested."]
    return [f"A method with DHP is {counted(compared, 'better than without')}."]


# --- what the trace does


def claims(runs: Runs) -> list[Verdict]:
    """The verdicts on what the paper says of η and the trace, where there are results.

    Args:
        runs: those of a reproduction, by benchmark and part.

    Example:
        for verdict in claims(read_reproduction("results").runs):
            print(verdict.claim, verdict.verdict)
    """
    return [*_eta(runs), *_dynamics(runs)]


def claims_table(runs: Runs) -> Table:
    """What the paper says of η and the trace, and our verdicts."""
    rows = [(made.claim, made.verdict, made.certainty, made.evidence) for made in claims(runs)]
    return Table("The paper's claims about the trace", ("claim", "verdict", "how sure", "evidence"), rows)


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


# --- Table I


def accuracy_table(runs: Runs) -> Table:
    """Table I, our numbers before the paper's: a row for each method, a column for each benchmark.

    Example:
        print(accuracy_table(read_reproduction("results").runs).to_markdown())
    """

    def cell(result: Result) -> str:
        paper = paper_value(result)
        return f"{final_accuracy(result)} / {'–' if paper is None else f'{paper[0]:.2f}'}"

    return _across(runs, "Average accuracy in % after all tasks: ours ± SEM / the paper's", cell)


def transfer_table(runs: Runs) -> Table:
    """BWT as in `accuracy_table`."""

    def cell(result: Result) -> str:
        paper = paper_value(result)
        return f"{number(metrics.estimate(result.bwt).mean, 3)} / {'–' if paper is None else f'{paper[1]:.2f}'}"

    return _across(runs, "Backward transfer, below zero is forgetting: ours / the paper's", cell)


def _across(runs: Runs, title: str, cell: Callable[[Result], str]) -> Table:
    columns = {name: runs[name, "table"].results for name in PAPER_BENCHMARKS if (name, "table") in runs}
    methods = [method for method in all_methods() if any(method in results for results in columns.values())]
    rows = [
        (method, *(cell(results[method]) if method in results else "not run" for results in columns.values()))
        for method in methods
    ]
    trials = (str(max(len(result.accuracy) for result in results.values())) for results in columns.values())
    return Table(title, ("method", *(title_of(name) for name in columns)), [*rows, ("trials", *trials)])
