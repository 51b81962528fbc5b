"""What a benchmark of speed leaves behind: tables to read, and a dated record with all that is needed to repeat it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from engram.bench import avalanche
from engram.bench.run import Findings, Plan, Speed, StackMemory
from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.report.layout import Table
from engram.runs.result import versions

RECORD = "record.json"
MB = 1e6


def speed_table(found: Findings, network: str) -> Table:
    speeds = [speed for speed in found.speeds if speed.network == network]
    rows: list[tuple[str, ...]] = [
        (
            speed.name,
            str(speed.size),
            f"{speed.ms:.3f}",
            f"+{100 * speed.timing.spread:.0f}%",
            f"{speed.us_per_model:,.1f}",
            f"{speed.to_floor:.2f}",
            f"{speed.to_plain:.3f}",
        )
        for speed in speeds
    ]
    notes = [
        "Lower quartiles of rounds in which the contestants take turns; median: how far above it lies. "
        "× floor, × plain loop: a step against the bare products of as many models, and a model against the plain loop "
        "without penalty, each of the same rounds.",
        *dhp_notes(speeds),
        *(f"{rate}: {value:,.0f}." for rate, value in found.rates.items()),
        *(f"{note}." for note in found.notes),
    ]
    columns = ("training step", "models", "ms", "median", "µs a model", "× floor", "× plain loop")
    return Table(f"{network}: time of a training step", columns, rows, tuple(notes))


def dhp_notes(speeds: Iterable[Speed]) -> list[str]:
    """What the DHP Softmax adds to a step over the plain head, for each penalty."""
    by_name = {(speed.name, speed.size): speed for speed in speeds}
    notes = []
    for size in sorted({size for _, size in by_name}):
        shares = [
            f"{100 * (dhp.ms / by_name[plain].ms - 1):+.1f}% ({name.removeprefix('engram dhp, ')})"
            for (name, of), dhp in by_name.items()
            if of == size
            and (plain := (name.replace("engram dhp", "engram plain"), size)) in by_name
            and name.startswith("engram dhp")
        ]
        if shares:
            notes.append(f"The DHP head over the plain head, stack of {size}: {', '.join(shares)}.")
    return notes


def memory_table(found: Findings) -> Table:
    rows = [_memory_row(stack) for stack in found.memory]
    columns = (
        "stack",
        "models",
        "parameters",
        "traces",
        "importances",
        "anchors",
        "gain, shift",
        "SI's paths",
        "all, a model",
        "data, once",
        "all",
        "peak",
    )
    notes = ("In MB. Data: the samples of this benchmark, 64 batches. Peak: as PyTorch measured it on a GPU.",)
    return Table("memory of a stack", columns, rows, notes)


def _memory_row(stack: StackMemory) -> tuple[str, ...]:
    held = [stack.models.parameters, stack.models.traces, stack.models.importances, stack.models.anchors]
    held += [stack.models.pulls, stack.models.paths]
    total = stack.models.total
    return (
        f"{stack.network}: {stack.name}",
        str(stack.size),
        *(f"{size / MB:.1f}" for size in held),
        f"{total / stack.size / MB:.2f}",
        f"{stack.data / MB:.1f}",
        f"{(total + stack.data) / MB:.1f}",
        "—" if stack.peak is None else f"{stack.peak / MB:.1f}",
    )


def tables(found: Findings) -> list[Table]:
    networks = dict.fromkeys(speed.network for speed in found.speeds)
    return [*(speed_table(found, network) for network in networks), memory_table(found)]


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds a record already, before anything is measured."""
    if (folder / RECORD).exists():
        raise InputError(f"{folder} holds a record already")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder")


def write_record(folder: Path, plan: Plan, found: Findings, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = describe(plan, command)
    content = about | {
        "speeds": [_speed_to_dict(speed) for speed in found.speeds],
        "memory": [asdict(stack) for stack in found.memory],
        "rates": found.rates,
        "notes": found.notes,
    }
    write_atomically(folder / RECORD, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "README.md", to_markdown(about, tables(found)))


def describe(plan: Plan, command: str) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "hardware": hardware(plan.device),
        "threads": torch.get_num_threads(),
        "versions": versions() | {"platform": platform.system()} | avalanche.version(),
        "plan": asdict(plan),
    }


def to_markdown(about: dict[str, Any], made: Iterable[Table]) -> str:
    versions_ = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = [
        f"# {about['date']}: {about['hardware']}",
        "",
        "```",
        about["command"],
        "```",
        "",
        f"{about['threads']} CPU thread(s); {versions_}.",
        "",
    ]
    return "\n".join(head) + "\n" + "\n".join(table.to_markdown() for table in made)


def hardware(device: str) -> str:
    """The GPU that was measured, or the processor."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor()


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _speed_to_dict(speed: Speed) -> dict[str, Any]:
    return {
        "network": speed.network,
        "name": speed.name,
        "models": speed.size,
        "ms": speed.ms,
        "us_per_model": speed.us_per_model,
        "to_floor": speed.to_floor,
        "to_plain_loop": speed.to_plain,
        "floor_ms": speed.floor_ms,
        "plain_loop_ms": speed.plain_ms,
        "rounds_ms": [1e3 * seconds for seconds in speed.timing.rounds],
    }
