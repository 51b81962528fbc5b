"""How time and memory grow with the stack, with tasks and with classes: python benchmarks/scaling.py --out FOLDER.

Each part leaves a CSV with all that was measured, a PNG of its curves, a table to read, and a JSON record of how to
repeat it.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from growth import ON_CPU, ON_GPU, QUICK, Found, Setting
from growth_of_classes import grow_classes
from growth_of_stacks import grow_stacks
from growth_of_tasks import grow_tasks
from rich.console import Console
from rich.progress import Progress
from timing import busy_notes, hardware

from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.engine.build import choose_device, precision_of
from engram.report.figures.drawing import save_drawings
from engram.runs.folder import versions

PARTS = {"stack": grow_stacks, "tasks": grow_tasks, "classes": grow_classes}
Part = StrEnum("Part", list(PARTS))


def measure_growth(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    part: Annotated[list[Part] | None, typer.Option(help="Only this part; may be given again.")] = None,
    quick: Annotated[bool, typer.Option(help="Very small, to see that it works: its numbers say nothing.")] = False,
) -> None:
    """Measure how time and memory grow."""
    console = Console()
    try:
        chosen = choose_device(device)
        out.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as reason:
        raise typer.BadParameter(str(reason)) from reason
    scale = QUICK if quick else ON_GPU if chosen.type == "cuda" else ON_CPU
    command = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
    for name in part or PARTS:
        with Progress(console=console) as bar, precision_of("tf32") as dtype:
            shown = bar.add_task(str(name), total=1.0)

            def report(share: float, what: str, bar: Progress = bar, shown: int = shown, name: str = name) -> None:
                bar.update(shown, completed=share, description=f"{name}: {what}")

            notes, begun = busy_notes(), time.perf_counter()
            found = PARTS[name](Setting(chosen, dtype, scale, report))
            seconds = time.perf_counter() - begun
            report(1.0, f"{seconds:.0f} s")
        write(found, out, {"command": command, "seconds": seconds, "notes": notes, "hardware": hardware(chosen.type)})
        console.print(found.drawing.numbers.to_markdown(), markup=False, highlight=False, soft_wrap=True)


def write(found: Found, out: Path, run: dict[str, object]) -> None:
    save_drawings([found.drawing], out, ("csv", "png"))
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        **run,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **found.about,
    }
    name = found.drawing.name
    write_atomically(out / f"{name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    write_atomically(out / f"{name}.md", found.drawing.numbers.to_markdown())


if __name__ == "__main__":
    typer.run(measure_growth)
