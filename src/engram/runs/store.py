"""Many runs in one folder as rows: found, filtered and sorted. A row is one label of one run. Needs no PyTorch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, check_choice, shortened
from engram.common.registry import BENCHMARKS
from engram.config.methods import CUSTOM, all_datasets, known_methods
from engram.config.presets import form_of_head, parse_setting
from engram.config.settings import SETTINGS, as_setting, check_name
from engram.runs import metrics
from engram.runs.run import STATES, SWEEP, Run, find_runs, has_started, read_run

Row = dict[str, Any]
Report = Callable[[int, int], None]  # how many of how many runs have been read

# The columns of every row; all settings follow.
COLUMNS = (
    *("run", "label", "method", "benchmark", "dataset", "tasks", "trials", "done", "state", "accuracy", "sem", "bwt"),
    *("started", "kind", "form", "problem"),
)
OTHER_NAMES = {"tasks": "num_tasks"}  # columns whose setting has another name
CHOICES: dict[str, Callable[[], Sequence[str]]] = {
    "method": known_methods,
    "benchmark": lambda: (*BENCHMARKS.names(), CUSTOM),
    "dataset": all_datasets,
    "state": lambda: STATES,
}
CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)(.*)", re.DOTALL)
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EQUALITY = ("=", "==", "!=")


@dataclass(frozen=True)
class Listing:
    """The rows of all runs at or below a folder."""

    folder: Path
    rows: list[Row]
    unreadable: list[Path] = field(default_factory=list)  # folders that could not be listed


def list_runs(folder: str | Path, report: Report = lambda done, total: None) -> Listing:
    """Read all runs at or below a folder. A run that cannot be read has a row with the state "damaged".

    Args:
        folder: where to look, at any depth.
        report: called with how many of how many runs have been read.

    Example:
        >>> listing = list_runs("runs")
        >>> best = select(listing.rows, [parse_condition("epochs>=5")], sort="-accuracy", limit=1)
    """
    folder, unreadable = Path(folder), list[Path]()
    found = find_runs(folder, unreadable)
    if not found:
        raise InputError(f"there is no run in {folder} or below it")
    rows: list[Row] = []
    for done, path in enumerate(found):
        report(done, len(found))
        rows += rows_of(path, path.relative_to(folder).as_posix())
    return Listing(folder, rows, unreadable)


def rows_of(path: Path, name: str) -> list[Row]:
    """The rows of one run or sweep, under a name."""
    kind = "sweep" if (path / SWEEP).exists() else "run"
    try:
        run = read_run(path, dynamics=False)
    except (OSError, InputError) as error:
        row = dict.fromkeys((*COLUMNS, *SETTINGS))
        state = "damaged" if kind == "sweep" or has_started(path) else "unfinished"
        return [row | {"run": name, "label": "", "kind": kind, "state": state, "done": 0, "problem": _line(error)}]
    of_run = {"run": name, "kind": kind, "started": _in_utc(run.about.get("started"))}
    return [_row(run, label, of_run) for label in run.configs]


def _row(run: Run, label: str, of_run: Row) -> Row:
    done, accuracy, sem, bwt = 0, math.nan, math.nan, math.nan
    if label in run.results:
        matrix = run.results[label].accuracy
        accuracy, sem, done = metrics.mean_and_sem(matrix[:, -1].mean(axis=-1))  # the final average accuracy
        bwt, _, _ = metrics.mean_and_sem(metrics.backward_transfer(matrix))
    config = run.configs[label]
    return {
        **config.to_dict(),
        **of_run,
        "label": label,
        "form": form_of_head(config, label == config.method),
        "tasks": config.num_tasks,
        "done": done,
        "state": run.state(label),
        "accuracy": _or_none(accuracy),
        "sem": _or_none(sem),
        "bwt": _or_none(bwt),
        "problem": run.problems.get(label),
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _in_utc(started: Any) -> str | None:
    """In UTC, so that sorting the text sorts by time."""
    try:
        return datetime.fromisoformat(started).astimezone(UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def shown_columns(settings: Sequence[str] = ()) -> list[str]:
    """The columns of a listing: COLUMNS and these settings."""
    for name in settings:
        check_name(name)
    return list(dict.fromkeys((*COLUMNS, *settings)))


@dataclass(frozen=True)
class Condition:
    """A column, a comparison such as ">=", and the value to compare with."""

    column: str
    comparison: str
    value: Any

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets it. A row without a value can only meet "is" and "is not"."""
        found = row[self.column]
        if self.comparison not in EQUALITY and found is None:
            return False
        return COMPARE[self.comparison](found, self.value)


def parse_condition(text: str) -> Condition:
    """A condition as it is typed: `epochs=3`, `strength>=0.5`, `alpha!=uniform`, `max_samples=none`."""
    found = CONDITION.fullmatch(text)
    if not found:
        raise InputError(f"a condition is written SETTING=VALUE (or <, <=, >, >=, !=), not {shortened(text)}")
    name, comparison, value = found[1], found[2], found[3].strip()
    check_name(name)
    if comparison not in EQUALITY and not SETTINGS[name].is_number:
        raise InputError(f"{name} is not a number, so it can be = or != but not {comparison}, as in {shortened(text)}")
    if value == "none" and SETTINGS[name].type is not str:
        value = "null"
    wanted = as_setting(name, parse_setting(f"{name}={value}")[name])
    if wanted is None and comparison not in EQUALITY:
        raise InputError(f"nothing is more or less than none, as in {shortened(text)}")
    return Condition(name, comparison, list(wanted) if isinstance(wanted, tuple) else wanted)


def parse_conditions(given: Mapping[str, str | None], where: Sequence[str] = ()) -> list[Condition]:
    """The conditions in `where`, and one for each column of CHOICES that has a value; unknown values are refused."""
    found = [parse_condition(text) for text in where]
    for name, value in given.items():
        if value is not None:
            check_choice(name, value, CHOICES[name]())
            found.append(Condition(name, "=", value))
    return found


def select(
    rows: Sequence[Row], conditions: Sequence[Condition] = (), *, sort: str = "run", limit: int | None = None
) -> list[Row]:
    """The rows that meet all conditions, sorted.

    Args:
        rows: from `list_runs`.
        conditions: from `parse_condition`.
        sort: a column or a setting, with a minus in front for the highest first. Rows without a value come last.
        limit: the largest number of rows.
    """
    by = sort.removeprefix("-")
    check_choice("column", by, (*COLUMNS, *(name for name in SETTINGS if name not in COLUMNS)))
    if limit is not None and limit < 1:
        raise InputError(f"the limit must be at least 1, not {limit}")
    found = [row for row in rows if all(condition.holds(row) for condition in conditions)]
    if sort != "run":  # the order that they have already
        having = [row for row in found if row[by] is not None]
        having.sort(key=lambda row: row[by], reverse=sort.startswith("-"))
        found = having + [row for row in found if row[by] is None]
    return found[:limit]
