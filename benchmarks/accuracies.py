"""Are the accuracies of two engines the same? Runs of the same settings by each, trial by trial.

python benchmarks/accuracies.py --old results/split-mnist/table --new runs/again/split-mnist/table

Each pair of folders is one benchmark. A method is compared where both runs have it with the same settings: the average
accuracy after the last task that at least half of the trials have learned in both, in these trials.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.report.layout import Table, count, device_of
from engram.runs.metrics import Estimate, paired_difference
from engram.runs.result import Result
from engram.runs.run import Run, read_run

RECORD = "record.json"
HEAD = ("benchmark", "method", "tasks", "pairs", "diverged, old and new", "difference, points with 95% interval")


def same_settings(old: Run, new: Run) -> list[tuple[str, Result, Result]]:
    """The methods that both runs have, by their name in the old one: `finetune` is `matched` by another name."""
    both = [(label, ours, theirs) for label, ours in old.results.items() for theirs in new.results.values()]
    return [(label, ours, theirs) for label, ours, theirs in both if facts_of(ours) == facts_of(theirs)]


def facts_of(result: Result) -> tuple[object, ...]:
    """What decides a result, apart from the name of its method."""
    config = result.config
    return config.head, config.penalty, {**config.to_dict(), "method": None}


def compare(old: Result, new: Result) -> dict[str, Any]:
    """The accuracies by trial after as many tasks as at least half of the trials have learned in both; else None."""
    reached = min(old.tasks_learned, new.tasks_learned)
    diverged = [[row.trial for row in result.diverged if row.task < reached] for result in (old, new)]
    in_both = np.isfinite(old.accuracy[:, :, 0]) & np.isfinite(new.accuracy[:, :, 0])  # (trials, tasks)
    num_tasks = max(1, int((in_both.mean(axis=0) >= 0.5).sum()))
    after = [result.accuracy[:, num_tasks - 1, :num_tasks].mean(axis=1) for result in (old, new)]
    known = [[float(value) if np.isfinite(value) else None for value in values] for values in after]
    return {"num_tasks": num_tasks, "old": known[0], "new": known[1], "diverged": diverged}


def difference(found: dict[str, Any]) -> Estimate:
    """Of the differences of the trials that both have."""
    return paired_difference(np.array(found["new"], dtype=float), np.array(found["old"], dtype=float))


def table_of(cells: Sequence[dict[str, Any]]) -> Table:
    """A row for each method, and how many intervals contain zero."""
    rows, around = [], []
    for cell in cells:
        change = difference(cell)
        known = np.isfinite(change.mean)
        around += [change.low <= 0 <= change.high] if known else []
        words = f"{100 * change.mean:+.3f} [{100 * change.low:+.3f}, {100 * change.high:+.3f}]" if known else "–"
        diverged = ", ".join(str(len(trials)) for trials in cell["diverged"])
        facts = (cell["benchmark"], cell["method"], str(cell["num_tasks"]), str(change.num_trials), diverged)
        rows.append((*facts, words))
    verdict = f"Zero lies in {sum(around)} of {count(len(around), 'interval')}."
    return Table("Accuracies by the new engine minus those by the old one", HEAD, rows, (verdict,))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="accuracies.py", description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, action="append", required=True, metavar="RUN", help="of the old engine")
    parser.add_argument("--new", type=Path, action="append", required=True, metavar="RUN", help="of the new one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep a record in this folder")
    options = parser.parse_args(arguments)
    if len(options.old) != len(options.new):
        parser.error("give as many runs with --new as with --old, in the same order")
    try:
        runs = [(read_run(old), read_run(new)) for old, new in zip(options.old, options.new, strict=True)]
    except InputError as error:
        parser.error(str(error))
    cells = [
        {"benchmark": old.benchmark, "method": label, **compare(ours, theirs)}
        for old, new in runs
        for label, ours, theirs in same_settings(old, new)
    ]
    if not cells:
        parser.error("the runs have no method with the same settings")
    table = table_of(cells)
    print(table.to_text())
    if options.out is not None:
        command = shlex.join(["python", "benchmarks/accuracies.py", *arguments])
        by = [
            f"- {old.benchmark}: old {old.about['started'][:10]}, new {new.about['started'][:10]} "
            f"on {device_of(new.about)}, `{new.about['command']}`"
            for old, new in runs
        ]
        head = ["# The same accuracies", "", "```", command, "```", "", *by, "", f"`{RECORD}` has every trial.", ""]
        text = "\n".join([*head, table.to_markdown()])
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "README.md", text.encode())
        write_atomically(options.out / RECORD, (json.dumps(cells, indent=1) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
