"""Runs side by side: the settings that differ, the accuracy of each, and the differences in pairs of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram.common.errors import InputError
from engram.config.settings import SETTINGS
from engram.report.layout import Table, gathered, number
from engram.report.pairs import Pair, why_not_paired
from engram.report.tables import difference_cells, final, how_paired, with_error
from engram.runs import metrics
from engram.runs.result import Result
from engram.runs.run import Run


@dataclass(frozen=True)
class Side:
    """One label of one of the runs that are compared."""

    run: str
    label: str
    result: Result
    about: dict[str, Any]


def sides_of(runs: Mapping[str, Run]) -> list[Side]:
    """Every label of every run that has results."""
    sides = []
    for name, run in runs.items():
        if not run.results:
            problem = next(iter(run.problems.values()), "")
            raise InputError(f"{name} has no results to compare" + (f": {problem}" if problem else " yet"))
        sides += [Side(name, label, result, run.about) for label, result in run.results.items()]
    return sides


def sides_of_folders(folders: Mapping[str, Mapping[str, Run]]) -> list[Side]:
    """Every label of what several folders hold, each opened by `open_runs`: a run, or a folder of runs.

    Beside a single run, a folder of runs is represented by its runs of the same benchmark, those with the most labels
    in common first, and without those that have none. Where all are folders of runs, their runs are compared by name.
    """
    alone = {name: next(iter(runs.values())) for name, runs in folders.items() if len(runs) == 1}
    if not alone:
        for folder, runs in folders.items():
            if not any(run.results for run in runs.values()):
                raise InputError(f"{folder} has no results to compare yet")
        named = [(folder, name, run) for folder, runs in folders.items() for name, run in runs.items()]
        return [
            Side(folder, f"{name}: {label}", result, run.about)
            for folder, name, run in named
            for label, result in run.results.items()
        ]
    benchmarks = {run.benchmark for run in alone.values()}
    labels = {label for run in alone.values() for label in run.results}
    chosen: dict[str, Run] = {}
    for folder, runs in folders.items():
        if folder in alone:
            chosen[folder] = alone[folder]
            continue
        same = {f"{folder}/{name}": run for name, run in runs.items() if run.results and run.benchmark in benchmarks}
        if not same:
            raise InputError(f"{folder} has no results of {' or '.join(sorted(benchmarks))} to compare")
        common = {name: len(labels & run.results.keys()) for name, run in same.items()}
        kept = [name for name in same if common[name]] or list(same)
        chosen |= {name: same[name] for name in sorted(kept, key=lambda name: -common[name])}
    return sides_of(chosen)


def opposite(side: Side, baselines: Sequence[Side], alone: bool) -> Side | None:
    """What a side is compared with: the same label; or, if both runs have only one, that one."""
    same = next((other for other in baselines if other.label == side.label), None)
    return baselines[0] if same is None and alone and len(baselines) == 1 else same


def pair_of(side: Side, baseline: Side) -> Pair:
    """Two sides, trial by trial."""
    return Pair(side.label, baseline.label, side.result, baseline.result)


def reason_against(side: Side, baseline: Side) -> str | None:
    """Why two sides cannot be paired; None where they can."""
    prints = [found.about.get("fingerprints") for found in (side, baseline)]
    same_data = None if None in prints else prints[0] == prints[1]
    return why_not_paired(side.result, baseline.result, False if same_data is False else None)


def settings_table(sides: Sequence[Side]) -> Table:
    """Settings in which runs differ, a column for each run; a value that not all labels of a run share names them.

    Args:
        sides: those of all runs, from `sides_of`.

    Example:
        print(settings_table(sides_of({"a": read_run("a"), "b": read_run("b")})).to_text())
    """
    names = list(dict.fromkeys(side.run for side in sides))
    by_label: dict[str, list[Side]] = {}
    for side in sides:
        by_label.setdefault(side.label, []).append(side)
    # A label is compared with itself: different strengths of two methods of one run are not a difference between runs.
    groups = [group for group in by_label.values() if len(group) > 1] or [list(sides)]
    rows = [
        (name, *(gathered((s.label, getattr(s.result.config, name)) for s in sides if s.run == run) for run in names))
        for name in SETTINGS
        if name != "method" and any(len({getattr(s.result.config, name) for s in group}) > 1 for group in groups)
    ]
    notes = () if rows else ("All settings are the same.",)
    return Table("Settings that differ", ("setting", *names), rows, notes)


def accuracy_table(sides: Sequence[Side]) -> Table:
    """Average accuracy after all tasks, and BWT: a row for each label, a column for each run."""
    names = list(dict.fromkeys(side.run for side in sides))
    found = {(side.run, side.label): side.result for side in sides}
    rows = [
        (label, *(_accuracy(found[run, label]) if (run, label) in found else "–" for run in names))
        for label in dict.fromkeys(side.label for side in sides)
    ]
    return Table("Average accuracy in % after all tasks ± SEM, and BWT", ("method", *names), rows)


def differences_table(sides: Sequence[Side]) -> Table:
    """All other runs minus the first, in pairs of trials; notes name what has no pair."""
    first, *others = dict.fromkeys(side.run for side in sides)
    baselines = [side for side in sides if side.run == first]
    rows: list[tuple[str, ...]] = []
    found: list[Pair] = []
    notes: dict[str, None] = {}
    for run in others:
        own = [side for side in sides if side.run == run]
        for side in own:
            baseline = opposite(side, baselines, alone=len(own) == 1)
            if baseline is None:
                notes[f"{side.label} of {run} has no pair: {first} did not run it."] = None
            elif reason := reason_against(side, baseline):
                notes[f"{side.label} of {run} is not paired with {baseline.label} of {first}: {reason}."] = None
            else:
                made = pair_of(side, baseline)
                found.append(made)
                what = side.label if side.label == baseline.label else f"{side.label} − {baseline.label}"
                cells = (*difference_cells(made.accuracy, 100, 2), *difference_cells(made.transfer, 1, 3))
                rows.append((run, what, *cells, str(made.accuracy.num_trials)))
    columns = ("run", "method", "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    return Table(f"What differs from {first}", columns, rows, (*([how_paired(found)] if found else []), *notes))


def compare_two(result: Result, baseline: Result) -> Table:
    """One result minus another, in pairs of trials.

    Args:
        result: the one whose gain is asked for.
        baseline: the one that is subtracted.

    Example:
        print(compare_two(run.results["dhp+si"], run.results["si"]).to_text())
    """
    # Results of one `run_many` share the record of their data, and so their custom stream.
    against = why_not_paired(result, baseline, same_data=True if result.data is baseline.data else None)
    if against:
        raise InputError(f"the trials of these results cannot be paired: {against}")
    pair = Pair(result.config.method, baseline.config.method, result, baseline)
    sizes = (*difference_cells(pair.accuracy, 100, 2), *difference_cells(pair.transfer, 1, 3))
    columns = ("method", "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    row = (f"{pair.label} − {pair.baseline_label}", *sizes, str(pair.accuracy.num_trials))
    return Table("Difference, trial by trial", columns, [row], (how_paired([pair]),))


def _accuracy(result: Result) -> str:
    return f"{with_error(final(result))}, {number(metrics.estimate(result.bwt).mean, 3)}"
