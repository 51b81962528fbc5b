"""`engram bench`: how fast this machine trains."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from engram.bench.record import check_folder, tables, write_record
from engram.bench.run import Plan, run_bench
from engram.bench.workload import USUAL_PENALTIES
from engram.cli.display import columns, print_table
from engram.common.errors import InputError


def bench(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    precision: Annotated[str, typer.Option(help="tf32 (on GPUs that have it), float32 or float64.")] = "tf32",
    networks: Annotated[str, typer.Option(help="Comma-separated: mlp, cnn.")] = "mlp,cnn",
    sizes: Annotated[str, typer.Option(help="Comma-separated numbers of models that train together.")] = "1,8,80",
    penalties: Annotated[str, typer.Option(help="Comma-separated: none, si, online-ewc, mas, ewc.")] = ",".join(
        USUAL_PENALTIES
    ),
    seconds: Annotated[float, typer.Option(help="How long each contestant is measured.")] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep a record in this folder.", show_default="print only"),
    ] = None,
) -> None:
    """Measure the speed of this machine: floors, a plain loop, stacks of models, and Avalanche where it is installed.

    Example: engram bench --networks mlp --sizes 1,8 --out benchmarks/records/2025-01-31-laptop
    """
    plan = Plan(
        device=device,
        precision=precision,
        networks=_words(networks),
        sizes=_numbers(sizes),
        penalties=_words(penalties),
        seconds=seconds,
    )
    if out is not None:
        check_folder(out)
    console = Console()
    with Progress(*columns("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        whole = bar.add_task("making ready", total=1.0)
        found = run_bench(plan, lambda share, what: bar.update(whole, completed=share, description=what))
    for table in tables(found):
        print_table(table, console)
    if out is not None:
        write_record(out, plan, found, shlex.join(["engram", *context.find_root().obj]))
        console.print(f"The record is in {out}", highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InputError(f"sizes are whole numbers with commas between them, not {text!r}") from None
