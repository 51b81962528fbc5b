"""Results as tables: accuracy, BWT, first and last task of each label, and what DHP adds to each, in pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from engram.config.presets import changes_from_preset, title_of, with_scenario
from engram.report.layout import Table, count, in_short, interval_of_accuracy, number, rounded
from engram.report.pairs import (
    Pair,
    accuracy_difference,
    different_starts,
    has_paper_data,
    head_of,
    pairs,
    paper_value,
    unpaired,
    why_not_paired,
)
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result

Results = Mapping[str, Result]  # by label; in a plain run the label is the method
ABOUT = (
    "ACC: mean accuracy over all tasks, after the last. BWT: below zero is forgetting. "
    "first, last: accuracy on the first and on the last task, after the last."
)

# The columns of the table, after the labels. A new one is one line here: its heading, and the cell of a Result.
COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("ACC %", lambda result: number(100 * final(result).mean, 2)),
    ("± SEM", lambda result: number(100 * final(result).sem, 2)),
    ("BWT", lambda result: number(metrics.estimate(result.bwt).mean, 3)),
    ("first %", lambda result: number(100 * metrics.estimate(result.first_task[:, -1]).mean, 2)),
    ("last %", lambda result: number(100 * metrics.estimate(result.latest_task[:, -1]).mean, 2)),
)
# These columns follow if the data are the paper's.
PAPER_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("paper %", lambda result: _paper_cell(result, 0)),
    ("paper BWT", lambda result: _paper_cell(result, 1)),
)


def summary(results: Results) -> Table:
    """One row per label, after all tasks, with the paper's values next to ours if the data are the paper's.

    Args:
        results: the Results of one run, by label.

    Example:
        print(summary(read_run("runs/demo").results).to_markdown())
    """
    made = (*COLUMNS, *(PAPER_COLUMNS if any(map(has_paper_data, results.values())) else ()))
    rows = [(label, *(cell(result) for _, cell in made)) for label, result in results.items()]
    about = (_changes, different_starts, _other_files, _kept, unfinished, diverged)
    notes = (ABOUT, *(note for found in about for note in found(results)))
    return Table(summary_title(results), (label_heading(results), *(heading for heading, _ in made)), rows, notes)


def gains(results: Results) -> Table | None:
    """What a head adds to each method that was run with it and without; None if there is no such pair.

    Args:
        results: the Results of one run, by label.

    Example:
        made = gains(read_run("runs/demo").results)
    """
    found = pairs(results)
    if not found:
        return None
    rows = [
        (
            pair.label,
            *difference_cells(pair.accuracy, 100, 2),
            *difference_cells(pair.transfer, 1, 3),
            str(pair.accuracy.num_trials),
        )
        for pair in found
    ]
    columns = (label_heading(results), "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    title = f"What {head_of(found)} adds to the same method without it"
    return Table(title, columns, rows, (how_paired(found), *unpaired(results)))


def so_far(results: Results) -> Table | None:
    """The accuracy after as many tasks as every label has learned.

    None if all labels have learned all tasks, or one of them has learned none.

    Args:
        results: the Results of one run, by label.

    Example:
        made = so_far(read_run("runs/unfinished").results)
    """
    learned = min(result.tasks_learned for result in results.values())
    config = _first(results).config
    if learned == 0 or all(result.tasks_learned == result.config.num_tasks for result in results.values()):
        return None
    rows = []
    for label, result in results.items():
        accuracy = metrics.estimate(result.average_accuracy[:, learned - 1])
        tasks = ", ".join(f"task {d.task + 1}" for d in sorted(result.diverged, key=lambda d: d.task))
        rows.append((label, with_error(accuracy), str(accuracy.num_trials), tasks or "none"))
    num_tasks = max(result.config.num_tasks for result in results.values())
    name = with_scenario(title_of(config.benchmark), config)
    title = f"{name} after {learned} of {num_tasks} tasks, which all have learned so far"
    return Table(title, (label_heading(results), "accuracy %", "trials", "diverged in"), rows)


def tables_of(results: Results) -> list[Table]:
    """All tables of one run: its summary, what it has so far if it is not finished, and what DHP adds.

    Args:
        results: the Results of one run, by label.

    Example:
        for table in tables_of(read_run("runs/demo").results):
            print(table.to_text())
    """
    return [table for table in (summary(results), so_far(results), gains(results)) if table is not None]


def run_verdict(results: Results, finished: bool = True) -> list[str]:
    """What a run found, in sentences: which method knows most, what cannot be told apart from it, and what DHP adds.

    Methods with a rehearsal are set apart: they are there for scale.

    Args:
        results: the Results of one run, by label.
        finished: whether the run is.

    Example:
        print(*run_verdict(read_run("runs/demo").results))
    """
    said = [] if finished else ["The run is not finished; this is what it has so far."]
    means = {label: final(result) for label, result in results.items()}
    measured = [label for label, accuracy in means.items() if accuracy.num_trials]
    if not measured:
        return [*said, "No trial has learned all tasks."]
    own = [label for label in measured if results[label].config.rehearsal is None] or measured
    best, *others = sorted(own, key=lambda label: -means[label].mean)
    trials, within = count(means[best].num_trials, "trial"), interval_of_accuracy(means[best].low, means[best].high)
    interval = f"95% interval {within}, {trials}" if means[best].num_trials > 1 else trials
    apart = " without rehearsal" if len(own) < len(measured) else ""
    most = f"has the highest of {len(own)} mean accuracies{apart}:" if others else "has a mean accuracy of"
    said.append(f"{best} {most} {number(100 * means[best].mean, 2)}% over all tasks after the last ({interval}).")
    said += _told_apart(results, best, others) if means[best].num_trials > 1 else []
    if rehearsed := [f"{label} {number(100 * means[label].mean, 2)}%" for label in measured if label not in own]:
        said.append(f"With rehearsal, for scale: {', '.join(rehearsed)}.")
    if lost := [label for label in results if label not in measured]:
        said.append(f"No trial of {in_short(lost, ' and ')} has learned all tasks.")
    return [*said, *_added(pairs(results))]


def _told_apart(results: Results, best: str, others: Sequence[str]) -> list[str]:
    """Which labels are not clearly worse than the best, trial by trial."""
    paired = [label for label in others if why_not_paired(results[label], results[best], same_data=True) is None]
    behind = {label: accuracy_difference(results[label], results[best]) for label in paired}
    close = [label for label, difference in behind.items() if not difference.high < 0]
    if close and max(difference.num_trials for difference in behind.values()) < 3:
        return [f"Two trials are too few to tell {in_short(close, ' and ')} apart from it."]
    if close:
        return [f"Trial by trial, {in_short(close, ' and ')} cannot be told apart from it."]
    return ["Trial by trial, all others are clearly worse."] if paired and len(paired) == len(others) else []


def _added(found: Sequence[Pair]) -> list[str]:
    """What each head adds to each method, by where the interval of the difference lies."""
    by_head: dict[str, dict[str, list[str]]] = {}
    for pair in found:
        verbs: dict[str, list[str]] = {"improves": [], "harms": [], "makes no clear difference to": []}
        if pair.accuracy.num_trials > 1:
            better, worse, neither = by_head.setdefault(head_of([pair]), verbs).values()
            where = better if pair.accuracy.low > 0 else worse if pair.accuracy.high < 0 else neither
            where.append(pair.baseline_label)
    said = []
    for head, named in by_head.items():
        does = _joined([f"{verb} {in_short(labels, ' and ')}" for verb, labels in named.items() if labels])
        said.append(f"{head[0].upper()}{head[1:]} {does}, by the accuracy after the last task.")
    return said


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def summary_title(results: Results) -> str:
    """Benchmark, dataset, tasks and trials, in words."""
    config = _first(results).config
    tasks = sorted({result.config.num_tasks for result in results.values()})
    trials = max(len(result.accuracy) for result in results.values())
    num_tasks = count(tasks[0], "task") if len(tasks) == 1 else f"{tasks[0]} to {tasks[-1]} tasks"
    return f"{with_scenario(config.benchmark, config)} on {config.dataset}, {num_tasks}, {count(trials, 'trial')}"


def label_heading(results: Results) -> str:
    """What the labels are: methods, or settings of another kind."""
    return "method" if all(label == result.config.method for label, result in results.items()) else "settings"


def unfinished(results: Results) -> list[str]:
    """A sentence for each label with trials that have neither learned all tasks nor diverged yet."""
    return [
        f"{label}: {result.trials_finished} of {result.config.trials} trials finished so far."
        for label, result in results.items()
        if result.trials_finished + len(result.diverged) < result.config.trials
    ]


def diverged(results: Results) -> list[str]:
    """A sentence for each trial that diverged."""
    return [
        f"{label}: {divergence}; it is left out of the row."
        for label, result in results.items()
        for divergence in result.diverged
    ]


def final(result: Result) -> Estimate:
    """The average accuracy after the last task, over trials."""
    return metrics.estimate(result.average_accuracy[:, -1])


def with_error(accuracy: Estimate) -> str:
    """An accuracy in % with its standard error: `with_error(final(result))` is "97.31 ± 0.12"."""
    return "–" if accuracy.num_trials == 0 else f"{number(100 * accuracy.mean, 2)} ± {number(100 * accuracy.sem, 2)}"


def final_accuracy(result: Result) -> str:
    """After the last task, over the trials that reached it; if some diverged, with the number that did not."""
    accuracy = final(result)
    if not result.diverged:
        return with_error(accuracy)
    if accuracy.num_trials == 0:
        return "diverged"
    return f"{with_error(accuracy)} ({accuracy.num_trials} of {len(result.accuracy)} trials)"


def difference_cells(difference: Estimate, scale: float, digits: int) -> tuple[str, str]:
    """A difference and its 95% interval, with their signs."""

    def signed(value: float) -> str:
        return "–" if math.isnan(value) else f"{rounded(scale * value, digits):+.{digits}f}"

    return signed(difference.mean), f"[{signed(difference.low)}, {signed(difference.high)}]"


def how_paired(found: Sequence[Pair]) -> str:
    """The note below differences; it mentions initial weights only as far as they are the same in all pairs."""
    features = "initial features, " if all(pair.same_features for pair in found) else ""
    start = "initial weights, " if all(pair.same_start for pair in found) else features
    return f"Trials are paired by number: the same {start}tasks and order of samples."


def _first(results: Results) -> Result:
    return next(iter(results.values()))


def _paper_cell(result: Result, index: int) -> str:
    paper = paper_value(result)
    return "–" if paper is None else f"{paper[index]:.2f}"


def _changes(results: Results) -> list[str]:
    """Each setting that is not the preset's, with each of its values here and, in parentheses, in the preset."""
    changed: dict[str, dict[str, list[str]]] = {}
    for label, result in results.items():
        for name, (here, usual) in changes_from_preset(result.config).items():
            changed.setdefault(name, {}).setdefault(f"{here} ({usual})", []).append(label)
    settings = []
    for name, values in changed.items():
        several = [f"{value} for {in_short(labels, ' and ')}" for value, labels in values.items()]
        settings.append(f"{name} {', '.join(several if len(values) > 1 else values)}")
    return [f"Changed from the preset (in parentheses): {'; '.join(settings)}."] if settings else []


def _kept(results: Results) -> list[str]:
    """What methods with a rehearsal keep between tasks."""
    facts = [(label, *result.kept) for label, result in results.items() if result.kept is not None]
    if not facts:
        return []
    kept = "; ".join(f"{label} {count(samples, 'sample')}, {size:,} bytes" for label, samples, size in facts)
    return [f"Kept between tasks, at most: {kept}."]


def _other_files(results: Results) -> list[str]:
    return [
        f"{record['name']}: not the published files, but files of the same form; "
        f"{record['train']:,} + {record['test']:,} samples."
        for record in _first(results).data
        if record["origin"] == "structure"
    ]
