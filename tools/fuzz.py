"""Feed damaged files to every parser: each must be refused in one sentence or read right, soon and in little memory.

    python tools/fuzz.py                                   # 10,000 damaged files for each parser
    python tools/fuzz.py --only mat --only idx --files 500 # some of them
    python tools/fuzz.py --seed 1                          # others

The damage is a function of seed, parser and number. Files that show a fault are kept, with the reason.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from fuzz_targets import TARGETS
from fuzz_workers import Fault, Tally, damaged, feed
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engram.cli.display import columns


def fuzz(
    files: Annotated[int, typer.Option(help="Damaged files for each parser.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the damage.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TARGETS)}; may be repeated.")] = None,
    processes: Annotated[int, typer.Option(help="At a time.")] = 2,
    out: Annotated[Path, typer.Option(help="Where files that show a fault are kept.")] = Path("fuzz-faults"),
) -> None:
    """Damage files of every kind that Engram reads, and see that none does harm."""
    chosen = only or list(TARGETS)
    if unknown := set(chosen) - set(TARGETS):
        raise typer.BadParameter(f"there is no parser {min(unknown)}, only {', '.join(TARGETS)}")
    console, lock = Console(), threading.Lock()
    tallies: dict[str, tuple[Tally, float]] = {}
    faults: list[Fault] = []
    with Progress(*columns("{task.description}"), console=console) as bar:
        bars = {target: bar.add_task(target, total=files) for target in chosen}

        def work(target: str) -> None:
            started = time.monotonic()
            for news in feed(target, TARGETS[target], seed, list(range(files))):
                with lock:
                    if isinstance(news, Fault):
                        faults.append(news)
                        keep(news, seed, out)
                        console.print(f"{target} {news.index}: {news.reason.splitlines()[-1][:200]}", markup=False)
                    elif isinstance(news, Tally):
                        console.print(f"{target}: {files} files", highlight=False)
                        tallies[target] = news, time.monotonic() - started
                    else:
                        bar.advance(bars[target], news)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(work, chosen))
    table = Table("parser", "damaged files", "refused", "read right", "faults", "slowest, s", "whole, s")
    for target in chosen:
        tally, seconds = tallies[target]
        wrong = sum(fault.target == target for fault in faults)
        row = (files, tally.refused, tally.read, wrong, f"{tally.slowest:.2f}", f"{seconds:.0f}")
        table.add_row(target, *map(str, row))
    console.print(table)
    if faults:
        console.print(f"{len(faults)} faults; their files are in {out}", markup=False)
        raise typer.Exit(1)


def keep(fault: Fault, seed: int, out: Path) -> None:
    """The damaged file and the reason, side by side."""
    name, content = damaged(fault.target, TARGETS[fault.target](), seed, fault.index)
    folder = out / f"{fault.target}-{seed}-{fault.index}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / Path(name).name).write_bytes(content)
    (folder / "reason.txt").write_text(f"{name}\n\n{fault.reason}\n", encoding="utf-8", errors="backslashreplace")


if __name__ == "__main__":
    typer.run(fuzz)
