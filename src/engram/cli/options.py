"""The options that `run`, `sweep` and `reproduce` share."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from engram.common.registry import BENCHMARKS, REHEARSALS
from engram.config.methods import all_methods
from engram.config.settings import SETTINGS

# for help texts
METHOD_NAMES, BENCHMARK_NAMES = ", ".join((*all_methods(), *REHEARSALS.names())), ", ".join(BENCHMARKS.names())

Methods = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated, or 'all' or 'reference': {METHOD_NAMES}, or HEAD+METHOD such as scaled+si.",
        show_default="the paper's eight",
    ),
]
Trials = Annotated[
    int | None, typer.Option(help="Repetitions with other weights, orders and tasks.", show_default="10")
]
Epochs = Annotated[int | None, typer.Option(help="Passes over each task.", show_default="the paper's")]
Tasks = Annotated[int | None, typer.Option(help="Number of tasks.", show_default="the paper's")]
DatasetName = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="mnist, mnist-small (needs no download), fashion-mnist or notmnist.",
        show_default="the paper's",
    ),
]
ScenarioName = Annotated[
    str | None,
    typer.Option("--scenario", help="task, domain or class (docs/scenarios.md).", show_default="the benchmark's own"),
]
Steady = Annotated[
    bool,
    typer.Option("--steady", help="DHP with the steady trace (docs/reproduction/steady.md) instead of the paper's."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated."),
]


def _list_settings(wanted: bool) -> None:
    """Print every setting, what it may be and its default, by what it touches."""
    if not wanted:
        return
    for stage in dict.fromkeys(setting.stage for setting in SETTINGS.values()):
        print(f"{stage}:")
        for setting in (each for each in SETTINGS.values() if each.stage == stage):
            has_default = setting.default is not dataclasses.MISSING
            default = (
                f"  [default: {json.dumps(setting.default)}]" if has_default and setting.default is not None else ""
            )
            print(f"  {setting.name:<25}{setting.allowed}{default}")
    print("Presets set what the paper gives. `--set NAME=VALUE` changes a setting; lists are written [400,400].")
    raise typer.Exit


HelpSettings = Annotated[
    bool,
    typer.Option("--help-settings", callback=_list_settings, is_eager=True, help="List all settings for --set."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
Precision = Annotated[str, typer.Option(help="tf32 (on GPUs that have it), float32 or float64.")]
StackSize = Annotated[
    int | None,
    typer.Option("--stack", metavar="N", help="Train at most N models together.", show_default="all that fit"),
]
EngineName = Annotated[str, typer.Option("--engine", metavar="ENGINE", help="in-process, or ray: on a cluster.")]
Address = Annotated[
    str | None,
    typer.Option(help="Address of the Ray cluster.", show_default="$RAY_ADDRESS, else a new one on this machine"),
]


@dataclass(frozen=True)
class TimeLimit:
    """The minutes after which a command is to stop, counted from when its options were read."""

    minutes: float
    until: float  # by `time.monotonic`

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def __str__(self) -> str:
        return f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}"


def _time_limit(text: str) -> TimeLimit:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise typer.BadParameter(f"must be a positive number, not {text!r}")
    return TimeLimit(minutes, time.monotonic() + 60 * minutes)


Minutes = Annotated[
    TimeLimit | None,
    typer.Option(
        metavar="N",
        parser=_time_limit,
        help="Stop after N minutes, save, and exit with code 124; `engram run --resume DIR` resumes.",
        show_default="never",
    ),
]
