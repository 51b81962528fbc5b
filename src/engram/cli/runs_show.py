"""`engram runs show` and `compare`: single runs, by their names."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engram.cli.display import print_table, print_tables, say
from engram.cli.runs_list import RUNS
from engram.common.errors import InputError
from engram.report.compare import accuracy_table, differences_table, settings_table, sides_of
from engram.report.html.settings import changes_table, data_table, time_taken, versions_table
from engram.report.layout import Table
from engram.runs.store.stored import open_stored


def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name in runs.", show_default=False)],
) -> None:
    """All that is known of one run: its results, the settings that were changed, versions, data, times.

    Example: engram runs show runs/demo
    """
    stored, console = open_stored(_path_of(run)), Console()
    about = stored.about
    states = dict.fromkeys(entry.state for entry in stored.entries)
    facts = {"kind": stored.kind, "state": ", ".join(states)}
    facts |= {name: str(about[name]) for name in ("command", "started", "finished") if about.get(name)}
    facts |= {"time": taken} if (taken := time_taken(about)) else {}
    print_table(Table(str(stored.path), ("what", "value"), list(facts.items())), console)
    results = [entry.result for entry in stored.entries if entry.result is not None]
    if results and stored.kind != "sheet":
        print_tables(results, console)
    elif results:
        print_table(accuracy_table(sides_of({stored.path.name: stored})), console)
    for made in (changes_table(results), versions_table(about), data_table(results)) if results else ():
        if made is not None:
            print_table(made, console)
    for entry in stored.entries:
        if entry.problem:
            say(console, f"{entry.label or stored.path}: {entry.problem}")
        elif entry.result is None:
            say(console, f"{entry.label}: no trials so far")


def compare_runs(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Runs, the first to compare with.", show_default=False)
    ],
) -> None:
    """Which settings differ, the accuracies side by side, and the differences to the first run in pairs of trials.

    Example: engram runs compare runs/paper runs/steady
    """
    if len(set(runs)) < 2:
        raise InputError(f"to compare takes two runs or more, not {' '.join(runs)} alone")
    opened, console = {name: open_stored(_path_of(name)) for name in runs}, Console()
    sides = sides_of(opened)
    for made in (settings_table(sides), accuracy_table(sides), differences_table(sides)):
        print_table(made, console)
    for name, stored in opened.items():
        for entry in stored.entries:
            if entry.problem:
                say(console, f"{entry.label} of {name} is left out: {entry.problem}")


def _path_of(run: str) -> Path:
    """A run's path as it was given, or in the folder of runs."""
    for path in (Path(run), RUNS / run):
        if path.exists():
            return path
    beside = Path(run).parent if Path(run).parent.is_dir() and Path(run).parent != Path() else RUNS
    names = [path.name for path in beside.iterdir() if path.is_dir()] if beside.is_dir() else []
    near = difflib.get_close_matches(Path(run).name, names, n=1)
    raise InputError(f"there is no run {run}" + (f" (did you mean {beside / near[0]}?)" if near else ""))
