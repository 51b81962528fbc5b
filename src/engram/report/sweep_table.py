"""A sweep as a verdict, a table, a file of numbers, and settings to run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from engram.config.presets import with_scenario
from engram.config.settings import Config
from engram.report.layout import Table, count, interval_of_accuracy, number
from engram.report.tables import difference_cells, tables_of, with_error
from engram.runs import metrics
from engram.runs.result import Result
from engram.runs.run import Run
from engram.runs.sweep.axes import written
from engram.runs.sweep.points import CHANCE, GENERATION, Tried, described

MOST_ROWS = 20  # rows in the table; points.csv has all points
MOST_LISTED = 3  # points that a verdict names


def is_sweep(run: Run) -> bool:
    """Whether a run was read from the folder of a sweep."""
    return isinstance(run.about.get("axes"), list) and isinstance(run.about.get("bases"), list)


def tried_in(run: Run) -> dict[str, list[Tried]]:
    """The points of a sweep by method, with the scores that they have so far.

    Args:
        run: a sweep, as `read_run` reads it.

    Example:
        for method, tried in tried_in(read_run("sweeps/split-mnist")).items():
            print(sweep_table(tried).to_text())
    """
    found: dict[str, list[Tried]] = {}
    for tried in _tried_by_label(run).values():
        found.setdefault(tried.config.method, []).append(tried)
    return found


def _tried_by_label(run: Run) -> dict[str, Tried]:
    names = [str(axis).partition("=")[0] for axis in run.about["axes"]]
    bases = {base["method"]: base for base in run.about["bases"]}
    found = {}
    for label, result in run.results.items():
        base = bases[result.config.method]
        config = result.config.replace(trials=base["trials"], first_trial=base.get("first_trial", 0))
        found[label] = Tried({name: getattr(config, name) for name in names}, config)
        found[label].add(result)
    return found


def ranking(tried: Sequence[Tried]) -> list[Tried]:
    """Those with the most trials first, and of them the best."""
    return sorted(tried, key=lambda each: (-len(each.scores), -each.mean if each.scores else 0.0))


def sweep_table(
    tried: Sequence[Tried], finished: bool = True, most_rows: int = MOST_ROWS, others_in: str = "points.csv"
) -> Table:
    """The points of one method, the best first, and how far the others are behind it.

    Args:
        tried: the points, at least one.
        finished: whether the sweep is; if not, points with fewer trials may still get more.
        most_rows: how many points are shown.
        others_in: where the others are.

    Example:
        print(sweep_table(tried_in(read_run("sweeps/split-mnist"))["dhp+si"]).to_text())
    """
    best, *others = ranking(tried)
    config = best.config
    rows = []
    for each in [best, *others][:most_rows]:
        accuracy = metrics.estimate(each.scores)
        leads = each is best and bool(each.scores)
        state = state_of(each, leads, finished)
        difference = difference_cells(metrics.paired_difference(each.scores, best.scores), 100, 2)
        rows.append((described(each.point), with_error(accuracy), str(len(each.scores)), *difference, state))
    notes = [f"Accuracy: mean over all tasks after the last, {_where(config)}; ± one standard error over trials."]
    behind = "the difference in points over the trials that both points ran"
    notes.append(f"Minus best: {behind}; dropped points ran only the first trials.")
    if len(tried) > most_rows:
        rest = len(tried) - most_rows
        found = f" {'is' if rest == 1 else 'are'} in {others_in}" if finished else " so far"
        notes.append(f"{count(rest, 'more point')}{found}.")
    notes += _lost(tried)
    title = (
        f"{config.method} on {with_scenario(config.benchmark, config)} ({config.dataset}), {count(len(tried), 'point')}"
    )
    return Table(title, ("settings", "accuracy %", "trials", "minus best", "95% interval", "state"), rows, tuple(notes))


def state_of(tried: Tried, leads: bool, finished: bool = True) -> str:
    """What became of a point, in a word.

    Args:
        tried: the point.
        leads: whether it is the best of its method.
        finished: whether the sweep is.

    Example:
        state_of(best_of(tried), leads=True)
    """
    if tried.failed:
        return "failed"
    if leads:
        return "best"
    return "finished" if tried.finished else "dropped" if finished else "so far"


def _where(config: Config) -> str:
    return "on held-out training samples" if config.examine == "validation" else "on the test samples"


def _lost(tried: Sequence[Tried]) -> list[str]:
    """A line about trials that diverged, and one for each other reason why some failed, with the first such point."""
    lines = []
    for why in dict.fromkeys(each.why for each in tried):
        points = [each for each in tried if each.why == why and each.num_diverged]
        lost = sum(each.num_diverged for each in points)
        counts = f"{'counts' if lost == 1 else 'count'} as an accuracy of 0"
        if points and why is None:
            lines.append(f"{count(lost, 'trial')} diverged, and {counts}.")
        elif points:
            named = described(points[0].point) + (f" and {count(len(points) - 1, 'other')}" if len(points) > 1 else "")
            lines.append(f"{named}: {count(lost, 'trial')} failed, and {counts}: {why}.")
    return lines


def sweep_tables(run: Run, most_rows: int = MOST_ROWS, others_in: str = "points.csv") -> list[Table]:
    """One table for each method of a sweep; the arguments are those of `sweep_table`.

    Example:
        for table in sweep_tables(read_run("sweeps/split-mnist")):
            print(table.to_text())
    """
    return [sweep_table(tried, run.finished, most_rows, others_in) for tried in tried_in(run).values()]


def verdict(tried: Sequence[Tried], finished: bool = True) -> str:
    """The best point of one method with its accuracy, and which others cannot be told apart from it, in sentences.

    Points are compared in the trials that both ran.

    Args:
        tried: the points, at least one.
        finished: whether the sweep is.

    Example:
        print(verdict(tried_in(read_run("sweeps/split-mnist"))["dhp+si"]))
    """
    best, *others = ranking(tried)
    method, so_far = best.config.method, "" if finished else " so far"
    if not best.scores:
        return f"{method}: no trial has finished yet."
    if best.failed:
        return f"{method}: all trials of all points failed{so_far}."
    accuracy = metrics.estimate(best.scores)
    within = interval_of_accuracy(accuracy.low, accuracy.high)
    interval = f"95% interval {within}, " if accuracy.num_trials > 1 else ""
    of = f"is the best of {len(tried)} points{so_far}, with" if others else "is the only point, with"
    trials = count(accuracy.num_trials, "trial")
    found = [f"{method}: `{described(best.point)}` {of} {number(100 * accuracy.mean, 2)}% ({interval}{trials})."]
    behind = {id(each): metrics.paired_difference(each.scores, best.scores) for each in others}
    ahead = [described(each.point) for each in others if behind[id(each)].low > 0]
    close = [described(each.point) for each in others if not (behind[id(each)].high < 0 or behind[id(each)].low > 0)]
    if close:
        found.append(f"In the trials that both ran, {_listed(close)} cannot be told apart from it.")
    elif others and not ahead:
        found.append("All others are clearly worse in the trials that both ran.")
    if ahead:
        found.append(f"In the fewer trials that both ran, {_listed(ahead)} did better.")
    return " ".join(found)


def _listed(names: Sequence[str]) -> str:
    """As in a sentence: "a, b and c", or "a, b, c and 7 others"."""
    points = [f"`{name}`" for name in names[:MOST_LISTED]]
    points += [count(len(names) - MOST_LISTED, "other")] if len(names) > MOST_LISTED else []
    return " and ".join([", ".join(points[:-1]), points[-1]] if points[1:] else points)


def how_searched(run: Run) -> list[str]:
    """How the points of a sweep were chosen, which of them were dropped and why, and what decided: a paragraph each.

    Args:
        run: a sweep, as `read_run` reads it.

    Example:
        for paragraph in how_searched(read_run("sweeps/split-mnist")):
            print(paragraph)
    """
    about, tried = run.about, tried_in(run)
    config = next(iter(run.configs.values()))
    axes = " and ".join(f"`{axis}`" for axis in about["axes"])
    if isinstance(about.get("num_points"), int):
        points = (
            f"Optuna searched {axes} with its tree of Parzen estimators: {about['num_points']} points of each method"
        )
        points += f", {GENERATION} at a time, which train together; the next ones are near the best so far."
        compared = f"the best of the same {GENERATION}"
    else:
        points, compared = f"Every combination of {axes} was tried with each method.", "the best of their method"
    steps = [step for step in about.get("rungs", ()) if isinstance(step, int)]
    if len(steps) > 1:
        after = " and ".join(count(step, "trial") for step in steps[:-1])
        dropped = sum(not each.finished for own in tried.values() for each in own)
        trials = (
            f"After {after}, points are dropped that are clearly worse than {compared} in the same trials, by a t test "
            f"of the differences, at {CHANCE:.0%} divided by the number of the other points. The others get "
            f"{steps[-1]} trials. The better third continues in any case, and a tie is never dropped. "
        )
        trials += f"{count(dropped, 'point')} {'was' if dropped == 1 else 'were'} dropped." if run.finished else ""
    else:
        trials = "No point is dropped: all get all trials."
    failed = "A trial that diverges, or fails for another reason, counts as an accuracy of 0."
    held_out = "the last sixth of the training samples, which are held out of training,"
    samples = held_out if config.examine == "validation" else "the test samples"
    chosen = (
        f"Accuracies are on {samples} with seed {config.seed}. That of the best point is a little too high, because "
    )
    return [points, f"{trials.rstrip()} {failed}", f"{chosen}it is the largest of several."]


def run_tables(run: Run) -> list[Table]:
    """All tables of a run, or of a sweep.

    Args:
        run: a run that has results, finished or not.

    Example:
        for table in run_tables(read_run("runs/demo")):
            print(table.to_text())
    """
    return sweep_tables(run) if is_sweep(run) else tables_of(run.results)


def best_results(run: Run) -> dict[str, Result]:
    """The Results of the best point of each method so far; of a run that is not a sweep, all of them."""
    if not is_sweep(run):
        return run.results
    best: dict[str, str] = {}
    tried = _tried_by_label(run)
    for each in ranking(list(tried.values())):
        best.setdefault(each.config.method, next(label for label in tried if tried[label] is each))
    return {label: run.results[label] for label in tried if label in best.values()}


def points_csv(tried: Sequence[Tried]) -> str:
    """Every point, in the order in which it was tried, as CSV."""
    names = list(tried[0].point)
    methods = dict.fromkeys(each.config.method for each in tried)
    best = {method: ranking([each for each in tried if each.config.method == method])[0] for method in methods}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    compared = ["minus_best", "low", "high"]  # in the trials that both ran
    writer.writerow(["method", *names, "accuracy", "sem", "trials", "diverged", *compared, "state"])
    for each in tried:
        accuracy, leader = metrics.estimate(each.scores), best[each.config.method]
        behind = metrics.paired_difference(each.scores, leader.scores)
        cells = [written(each.point[name]) for name in names]
        measured = [_exact(accuracy.mean), _exact(accuracy.sem), len(each.scores), each.num_diverged]
        measured += [_exact(value) for value in (behind.mean, behind.low, behind.high)]
        writer.writerow([each.config.method, *cells, *measured, state_of(each, each is leader)])
    return text.getvalue()


def _exact(value: float) -> str:
    """Every digit; empty where it was not measured."""
    return "" if math.isnan(value) else repr(value)


def to_run(best: Tried, usual: Config) -> Config:
    """The best settings for a final run: on the test samples, with the preset's seed and trials."""
    return best.config.replace(examine="test", seed=usual.seed, trials=usual.trials)


def on_what(chosen: Config, config: Config) -> str:
    """On which samples and seeds the best settings will be tested, compared with those they were chosen on."""
    samples = "on the test samples" if chosen.examine != "test" else "on the test samples, on which it was chosen"
    return f"{samples}, with {'other' if chosen.seed != config.seed else 'the same'} seeds"
