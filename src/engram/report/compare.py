"""Runs side by side: which settings differ, how accurate each is, and what the difference is where trials pair up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram.common.errors import InputError
from engram.config.settings import SETTINGS, has_effect, names_of
from engram.report.layout import Table, number
from engram.report.tables import difference_cells, with_error
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result
from engram.runs.store.stored import Stored

# All that the samples of a task, their order and the initial weights are drawn from, but for the trial's number.
DRAWN_FROM = (*names_of(stage="stream"), "seed")


@dataclass(frozen=True)
class Side:
    """One method of one of the runs that are compared."""

    run: str
    label: str
    result: Result
    about: dict[str, Any]

    @property
    def trials(self) -> range:
        first = self.result.config.first_trial
        return range(first, first + len(self.result.accuracy))


@dataclass(frozen=True)
class Difference:
    """One side less another, trial by trial."""

    side: Side
    baseline: Side
    accuracy: Estimate  # of differences in [-1, 1]
    transfer: Estimate  # of BWT


def sides_of(runs: Mapping[str, Stored]) -> list[Side]:
    """Every method of every run that has results."""
    sides = []
    for name, stored in runs.items():
        own = [Side(name, e.label, e.result, stored.about) for e in stored.entries if e.result is not None]
        if not own:
            problem = next((e.problem for e in stored.entries if e.problem), "")
            raise InputError(f"{name} has no results to compare" + (f": {problem}" if problem else " yet"))
        sides += own
    return sides


def opposite(side: Side, baselines: Sequence[Side], alone: bool) -> Side | None:
    """What a side is compared with: the same label; if both runs have one method alone, that one."""
    same = next((other for other in baselines if other.label == side.label), None)
    return baselines[0] if same is None and alone and len(baselines) == 1 else same


def why_not_paired(side: Side, baseline: Side) -> str | None:
    """A reason against comparing trial k of one with trial k of the other; None where they had the same tasks."""
    here, there = side.result.config, baseline.result.config
    for name in DRAWN_FROM:
        ours, theirs = getattr(here, name), getattr(there, name)
        if ours != theirs and has_effect(name, here):
            return f"their {name} differs ({_shown(ours)} and {_shown(theirs)})"
    prints = [found.about.get("fingerprints") for found in (side, baseline)]
    if here.benchmark == "custom":
        return "nothing was kept that says whether streams of one's own are the same"
    if side.result.data != baseline.result.data or (None not in prints and prints[0] != prints[1]):
        return "their data are not the same files"
    if not set(side.trials) & set(baseline.trials):
        return f"they have no trial in common ({_span(side.trials)} and {_span(baseline.trials)})"
    return None


def difference(side: Side, baseline: Side) -> Difference:
    """Over the trials that both have, by their numbers."""
    first, last = (pick(side.trials[i], baseline.trials[i]) for pick, i in ((max, 0), (min, -1)))

    def shared(of: Side) -> slice:
        return slice(first - of.trials[0], last + 1 - of.trials[0])

    ours, theirs = side.result, baseline.result
    return Difference(
        side,
        baseline,
        metrics.paired_difference(
            ours.average_accuracy[shared(side), -1], theirs.average_accuracy[shared(baseline), -1]
        ),
        metrics.paired_difference(ours.bwt[shared(side)], theirs.bwt[shared(baseline)]),
    )


def settings_table(sides: Sequence[Side]) -> Table:
    """Settings in which runs differ, a column a run; a value that a run's methods do not share names them."""
    names = list(dict.fromkeys(side.run for side in sides))
    by_label: dict[str, list[Side]] = {}
    for side in sides:
        by_label.setdefault(side.label, []).append(side)
    # A method is compared with itself: that two methods of one run have their own strengths is no difference of runs.
    groups = [group for group in by_label.values() if len(group) > 1] or [list(sides)]
    rows = [
        (name, *(_gather([side for side in sides if side.run == run], name) for run in names))
        for name in SETTINGS
        if name != "method" and any(len({getattr(s.result.config, name) for s in group}) > 1 for group in groups)
    ]
    notes = () if rows else ("All settings are the same.",)
    return Table("Settings that differ", ("setting", *names), rows, notes)


def accuracy_table(sides: Sequence[Side]) -> Table:
    """Average accuracy after all tasks and BWT, methods down and runs across."""
    names = list(dict.fromkeys(side.run for side in sides))
    found = {(side.run, side.label): side.result for side in sides}
    rows = [
        (label, *(_accuracy(found[run, label]) if (run, label) in found else "–" for run in names))
        for label in dict.fromkeys(side.label for side in sides)
    ]
    return Table("Average accuracy in % after all tasks ± SEM, and BWT", ("method", *names), rows)


def differences_table(sides: Sequence[Side]) -> Table:
    """All other runs less the first, in pairs of trials; what has no pair is said below."""
    first, *others = dict.fromkeys(side.run for side in sides)
    baselines = [side for side in sides if side.run == first]
    rows: list[tuple[str, ...]] = []
    notes: dict[str, None] = {}
    for run in others:
        own = [side for side in sides if side.run == run]
        for side in own:
            baseline = opposite(side, baselines, alone=len(own) == 1)
            if baseline is None:
                notes[f"{side.label} of {run} has no pair: {first} did not run it."] = None
            elif reason := why_not_paired(side, baseline):
                notes[f"{side.label} of {run} is not paired with {baseline.label} of {first}: {reason}."] = None
            else:
                made = difference(side, baseline)
                what = side.label if side.label == baseline.label else f"{side.label} − {baseline.label}"
                cells = (*difference_cells(made.accuracy, 100, 2), *difference_cells(made.transfer, 1, 3))
                rows.append((run, what, *cells, str(made.accuracy.num_trials)))
    columns = ("run", "method", "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    paired = ("Trials are paired by their numbers: the same tasks of the same samples.",) if rows else ()
    return Table(f"What differs from {first}", columns, rows, (*paired, *notes))


def _accuracy(result: Result) -> str:
    accuracy = metrics.estimate(result.average_accuracy[:, -1])
    return f"{with_error(accuracy)}, {number(metrics.estimate(result.bwt).mean, 3)}"


def _gather(sides: Sequence[Side], name: str) -> str:
    by_value: dict[str, list[str]] = {}
    for side in sides:
        by_value.setdefault(_shown(getattr(side.result.config, name)), []).append(side.label)
    if len(by_value) == 1:
        return "".join(by_value)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in by_value.items())


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _span(trials: range) -> str:
    return f"{trials[0]} to {trials[-1]}" if len(trials) > 1 else str(trials[0])
