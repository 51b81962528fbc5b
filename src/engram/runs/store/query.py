"""Questions to the index: which rows, in which order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engram.common.errors import InputError, check_choice, shortened
from engram.common.registry import BENCHMARKS
from engram.config.methods import CUSTOM, all_datasets, all_methods
from engram.config.settings import SETTINGS, as_setting, parse_setting
from engram.runs.store.cells import as_cell, from_cell
from engram.runs.store.index import Index
from engram.runs.store.survey import STATES

CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)(.*)", re.DOTALL)
IN_SQL = {"=": "IS", "==": "IS", "!=": "IS NOT"}  # which know what to say of a setting that is none
# Of every row, as they are named to a person; the index has some under another name.
SHOWN = (
    *("run", "method", "benchmark", "dataset", "tasks", "trials", "done", "state", "accuracy", "sem", "bwt"),
    *("started", "kind", "label", "problem"),
)
OTHER_NAMES = {"run": "place", "tasks": "num_tasks"}
CHOICES = {
    "method": all_methods(),
    "benchmark": (*BENCHMARKS.names(), CUSTOM),
    "dataset": all_datasets(),
    "state": STATES,
}


@dataclass(frozen=True)
class Condition:
    """A column, a comparison, and the value that it is compared with."""

    column: str
    comparison: str  # in SQL
    value: Any


def parse_condition(text: str) -> Condition:
    """As a person types it: `epochs=3`, `strength>=0.5`, `alpha!=uniform`, `max_samples=none`."""
    found = CONDITION.fullmatch(text)
    if not found:
        raise InputError(f"a condition is written SETTING=VALUE (or <, <=, >, >=, !=), not {shortened(text)}")
    name, comparison, value = found[1], found[2], found[3].strip()
    check_choice("setting", name, SETTINGS)
    if comparison not in IN_SQL and not SETTINGS[name].is_number:
        raise InputError(f"{name} is not a number, so it can be = or != but not {comparison}, as in {shortened(text)}")
    if value == "none" and SETTINGS[name].type is not str:
        value = "null"
    wanted = as_setting(name, parse_setting(f"{name}={value}")[name])
    if wanted is None and comparison not in IN_SQL:
        raise InputError(f"nothing is more or less than none, as in {shortened(text)}")
    return Condition(name, IN_SQL.get(comparison, comparison), as_cell(wanted))


def parse_conditions(given: Mapping[str, str | None], where: Sequence[str] = ()) -> list[Condition]:
    """Of the names in CHOICES those that are given, and any others as words; what could never be is refused."""
    found = [parse_condition(text) for text in where]
    for name, value in given.items():
        if value is not None:
            check_choice(name, value, CHOICES[name])
            found.append(Condition(name, "IS", value))
    return found


def select(
    index: Index,
    conditions: Sequence[Condition] = (),
    *,
    settings: Sequence[str] = (),
    sort: str = "run",
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """A row for each method of each run that fulfils all conditions: the columns SHOWN, then these settings.

    A minus in front of a column's name turns the order round. What a row does not have comes last either way.
    """
    for name in settings:
        check_choice("setting", name, SETTINGS)
    by = sort.removeprefix("-")
    check_choice("column", by, (*SHOWN, *(name for name in SETTINGS if name not in SHOWN)))
    if limit is not None and limit < 1:
        raise InputError(f"the limit must be at least 1, not {limit}")
    columns = shown_columns(settings)
    by, wanted = OTHER_NAMES.get(by, by), ", ".join(f'"{OTHER_NAMES.get(name, name)}"' for name in columns)
    holds = " AND ".join(f'"{c.column}" {c.comparison} ?' for c in conditions) or "TRUE"
    order = f'"{by}" IS NULL, "{by}" {"DESC" if sort.startswith("-") else "ASC"}, place, position'
    if sort == "run":  # the order of the index, which need not be sorted
        order = "place, position"
    found = index.table.execute(
        f"SELECT {wanted} FROM entry WHERE {holds} ORDER BY {order} LIMIT ?",
        (*(condition.value for condition in conditions), -1 if limit is None else limit),
    )
    rows = [dict(zip(columns, row, strict=True)) for row in found]
    for row in rows:
        row["run"] = os.fsdecode(row["run"]) or "."
    for name in settings:
        for row in rows:
            row[name] = from_cell(row[name], SETTINGS[name].type)
    return rows


def shown_columns(settings: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*SHOWN, *settings)))
