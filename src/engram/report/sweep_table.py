"""A sweep as a table, a file of numbers, and settings to run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from engram.config.settings import Config
from engram.report.tables import Table, count, difference_cells, with_error
from engram.runs import metrics
from engram.runs.sweep.points import described, written
from engram.runs.sweep.run import Tried, best_of

SHOWN = 20  # rows; a file has them all


def ranking(tried: Sequence[Tried]) -> list[Tried]:
    """Those with the most trials first, and of them the best."""
    return sorted(tried, key=lambda each: (-len(each.scores), -each.mean))


def sweep_table(tried: Sequence[Tried]) -> Table:
    """The points of one method, the best first, and how far behind it the others are."""
    best, *others = ranking(tried)
    config = best.config
    rows = []
    for each in [best, *others][:SHOWN]:
        accuracy = metrics.estimate(each.scores)
        state = "best" if each is best else "" if each.finished else "given up"
        less = difference_cells(metrics.paired_difference(each.scores, best.scores), 100, 2)
        rows.append((described(each.point), with_error(accuracy), str(len(each.scores)), *less, state))
    where = "on held-out training samples" if config.examine == "validation" else "on the test samples"
    notes = [f"Accuracy: mean over all tasks after the last, {where}; ± one standard error over trials."]
    notes.append(
        "Less the best: in points, over the trials that both had; a point that was given up had the first of them."
    )
    if len(tried) > SHOWN:
        notes.append(f"{len(tried) - SHOWN} more points are in points.csv.")
    lost = sum(each.num_diverged for each in tried)
    if lost:
        notes.append(f"{count(lost, 'trial')} diverged, and {'counts' if lost == 1 else 'count'} as an accuracy of 0.")
    title = f"{config.method} on {config.benchmark} ({config.dataset}), {count(len(tried), 'point')}"
    return Table(title, ("settings", "accuracy %", "trials", "less the best", "95% interval", ""), rows, tuple(notes))


def points_csv(tried: Sequence[Tried]) -> str:
    """Every point, in the order in which it was tried."""
    names = list(tried[0].point)
    best = {id(best_of([t for t in tried if t.config.method == m])) for m in {t.config.method for t in tried}}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *names, "accuracy", "sem", "trials", "diverged", "state"])
    for each in tried:
        accuracy = metrics.estimate(each.scores)
        state = "best" if id(each) in best else "finished" if each.finished else "given up"
        cells = [written(each.point[name]) for name in names]
        sem = "" if accuracy.num_trials < 2 else repr(accuracy.sem)
        measured = [repr(accuracy.mean), sem, len(each.scores), each.num_diverged]
        writer.writerow([each.config.method, *cells, *measured, state])
    return text.getvalue()


def to_run(best: Tried, usual: Config) -> Config:
    """The best settings for a run whose numbers are to be believed: other seeds, and the test samples."""
    return best.config.replace(examine="test", seed=usual.seed, trials=usual.trials)


def on_what(chosen: Config, config: Config) -> str:
    """How honest a test it is of settings that were chosen so."""
    samples = "on the test samples" if chosen.examine != "test" else "on the test samples, on which it was chosen"
    return f"{samples}, with {'other' if chosen.seed != config.seed else 'the same'} seeds"
