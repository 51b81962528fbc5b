"""A sweep as a table, a file of numbers, and settings to run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from engram.config.presets import with_scenario
from engram.config.settings import Config
from engram.report.layout import Table, count
from engram.report.tables import difference_cells, tables_of, with_error
from engram.runs import metrics
from engram.runs.result import Result
from engram.runs.run import Run
from engram.runs.sweep.axes import written
from engram.runs.sweep.points import Tried, described

MOST_ROWS = 20  # rows in the table; points.csv has all points


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
    names = [str(axis).partition("=")[0] for axis in run.about["axes"]]
    trials = {base["method"]: base["trials"] for base in run.about["bases"]}
    found: dict[str, list[Tried]] = {}
    for result in run.results.values():
        config = result.config.replace(trials=trials[result.config.method])
        tried = Tried({name: getattr(config, name) for name in names}, config)
        tried.add(result)
        found.setdefault(config.method, []).append(tried)
    return found


def ranking(tried: Sequence[Tried]) -> list[Tried]:
    """Those with the most trials first, and of them the best."""
    return sorted(tried, key=lambda each: (-len(each.scores), -each.mean if each.scores else 0.0))


def sweep_table(tried: Sequence[Tried], finished: bool = True) -> Table:
    """The points of one method, the best first, and how far the others are behind it.

    Args:
        tried: the points, at least one.
        finished: whether the sweep is; if not, points with fewer trials may still get more.

    Example:
        print(sweep_table(tried_in(read_run("sweeps/split-mnist"))["dhp+si"]).to_text())
    """
    best, *others = ranking(tried)
    config = best.config
    rows = []
    for each in [best, *others][:MOST_ROWS]:
        accuracy = metrics.estimate(each.scores)
        leads = each is best and bool(each.scores)
        state = "best" if leads else "" if each.finished else "dropped" if finished else "so far"
        difference = difference_cells(metrics.paired_difference(each.scores, best.scores), 100, 2)
        rows.append((described(each.point), with_error(accuracy), str(len(each.scores)), *difference, state))
    where = "on held-out training samples" if config.examine == "validation" else "on the test samples"
    notes = [f"Accuracy: mean over all tasks after the last, {where}; ± one standard error over trials."]
    behind = "the difference in points over the trials that both points ran"
    notes.append(f"Minus best: {behind}; dropped points ran only the first trials.")
    if len(tried) > MOST_ROWS:
        notes.append(f"{len(tried) - MOST_ROWS} more points are in points.csv.")
    notes += _lost(tried)
    title = (
        f"{config.method} on {with_scenario(config.benchmark, config)} ({config.dataset}), {count(len(tried), 'point')}"
    )
    return Table(title, ("settings", "accuracy %", "trials", "minus best", "95% interval", ""), rows, tuple(notes))


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


def sweep_tables(run: Run) -> list[Table]:
    """One table for each method of a sweep.

    Example:
        for table in sweep_tables(read_run("sweeps/split-mnist")):
            print(table.to_text())
    """
    return [sweep_table(tried, run.finished) for tried in tried_in(run).values()]


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
    return {label: run.results[label] for label in (ranking(own)[0].label for own in tried_in(run).values())}


def points_csv(tried: Sequence[Tried]) -> str:
    """Every point, in the order in which it was tried, as CSV."""
    names = list(tried[0].point)
    methods = dict.fromkeys(each.config.method for each in tried)
    best = {id(ranking([each for each in tried if each.config.method == method])[0]) for method in methods}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *names, "accuracy", "sem", "trials", "diverged", "state"])
    for each in tried:
        accuracy = metrics.estimate(each.scores)
        state = "best" if id(each) in best else "finished" if each.finished else "dropped"
        cells = [written(each.point[name]) for name in names]
        sem = "" if accuracy.num_trials < 2 else repr(accuracy.sem)
        mean = repr(accuracy.mean) if each.scores else ""
        measured = [mean, sem, len(each.scores), each.num_diverged]
        writer.writerow([each.config.method, *cells, *measured, state])
    return text.getvalue()


def to_run(best: Tried, usual: Config) -> Config:
    """The best settings for a final run: on the test samples, with the preset's seed and trials."""
    return best.config.replace(examine="test", seed=usual.seed, trials=usual.trials)


def on_what(chosen: Config, config: Config) -> str:
    """On which samples and seeds the best settings will be tested, compared with those they were chosen on."""
    samples = "on the test samples" if chosen.examine != "test" else "on the test samples, on which it was chosen"
    return f"{samples}, with {'other' if chosen.seed != config.seed else 'the same'} seeds"
