"""The options that `run`, `sweep` and `reproduce` share."""

from __future__ import annotations

from typing import Annotated

import typer

from engram.common.registry import BENCHMARKS, REHEARSALS
from engram.config.methods import all_methods

# for help texts
METHOD_NAMES, BENCHMARK_NAMES = ", ".join((*all_methods(), *REHEARSALS.names())), ", ".join(BENCHMARKS.names())

Methods = Annotated[
    str | None,
    typer.Option(
        help=f"Comma-separated, or 'all' or 'reference': {METHOD_NAMES}, or HEAD+METHOD.",
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
    bool, typer.Option("--steady", help="DHP with the steady trace (docs/reproduction.md) instead of the paper's.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated."),
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
