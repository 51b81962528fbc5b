"""What `speed.py` measures and leaves: tables to read, and a dated record with all that is needed to repeat it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from contestants import avalanche_is_installed
from timing import Timing, hardware
from workloads import HEADS, PENALTIES, USUAL_PENALTIES, WORKLOADS, Memory

from engram.common.errors import InputError, check_choice
from engram.common.files import write_atomically
from engram.report.layout import Table
from engram.runs.folder import versions

RECORD = "record.json"
MB = 1e6


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    device: str = "auto"
    precision: str = "tf32"
    networks: tuple[str, ...] = ("mlp", "cnn")
    sizes: tuple[int, ...] = (1, 8, 80)
    penalties: tuple[str, ...] = USUAL_PENALTIES
    heads: tuple[str, ...] = HEADS  # of stacks of one method
    seconds: float = 1.0  # for each contestant
    compiled: bool = True  # a plain loop by torch.compile too: compiling takes up to a minute

    def __post_init__(self) -> None:
        for network in self.networks:
            check_choice("network", network, WORKLOADS)
        for penalty in self.penalties:
            check_choice("penalty", penalty, PENALTIES)
        for what, values in (("networks", self.networks), ("sizes", self.sizes), ("penalties", self.penalties)):
            if not values or len(set(values)) < len(values):
                raise InputError(f"give at least one of the {what}, each once")
        if min(self.sizes) < 1:
            raise InputError(f"the size of a stack must be at least 1, not {min(self.sizes)}")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"the seconds of a measurement must be above 0, not {self.seconds}")


@dataclass(frozen=True)
class Speed:
    """One contestant, with what it is compared with."""

    network: str
    name: str
    size: int
    timing: Timing
    floor_ms: float  # of as many models
    plain_ms: float  # of one model in the plain loop

    @property
    def ms(self) -> float:
        """Milliseconds per step of all its models."""
        return 1e3 * self.timing.seconds

    @property
    def us_per_model(self) -> float:
        return 1e3 * self.ms / self.size

    @property
    def to_floor(self) -> float:
        return self.ms / self.floor_ms

    @property
    def to_plain(self) -> float:
        """The time per model, over the plain loop's."""
        return self.ms / self.size / self.plain_ms


@dataclass(frozen=True)
class StackMemory:
    """What one stack takes, in bytes."""

    network: str
    name: str
    size: int
    models: Memory
    data: int  # the samples of this benchmark, once for all models
    peak: int | None  # as measured on a GPU, beyond what was in use before


@dataclass
class Findings:
    """All that was measured."""

    speeds: list[Speed] = field(default_factory=list)
    memory: list[StackMemory] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # of a GPU, from which floors are computed
    notes: list[str] = field(default_factory=list)

    def speed(self, network: str, name: str, size: int = 1) -> Speed:
        return next(s for s in self.speeds if (s.network, s.name, s.size) == (network, name, size))


def speed_table(found: Findings, network: str) -> Table:
    speeds = [speed for speed in found.speeds if speed.network == network]
    rows = [
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
        "ms: the lower quartile of rounds in which the contestants take turns; median: how far above it lies. "
        "× floor, × plain loop: a step over the bare products of as many models, and the time per model over the plain "
        "loop without penalty, each in the same rounds.",
        *dhp_notes(speeds),
        *(f"{rate}: {value:,.0f}." for rate, value in found.rates.items()),
        *(f"{note}." for note in found.notes),
    ]
    columns = ("training step", "models", "ms", "median", "µs a model", "× floor", "× plain loop")
    return Table(f"{network}: time of a training step", columns, rows, tuple(notes))


def dhp_notes(speeds: Iterable[Speed]) -> list[str]:
    """What the DHP Softmax adds to a step over the plain head, for each penalty."""
    ms = {(speed.size, speed.name): speed.ms for speed in speeds}
    notes = []
    for size in sorted({size for size, _ in ms}):
        costs = [
            f"{100 * (ms[size, dhp] / ms[size, plain] - 1):+.1f}% ({penalty})"
            for penalty in PENALTIES
            if (size, dhp := f"engram dhp, {penalty}") in ms and (size, plain := f"engram linear, {penalty}") in ms
        ]
        if costs:
            notes.append(f"The DHP head over the plain head, stack of {size}: {', '.join(costs)}.")
    return notes


def memory_table(found: Findings) -> Table:
    held = ("parameters", "traces", "importances", "anchors", "gain, shift", "SI's paths")
    columns = ("stack", "models", *held, "all, a model", "data, once", "all", "peak")
    rows = [
        (
            f"{stack.network}: {stack.name}",
            str(stack.size),
            *(f"{size / MB:.1f}" for size in astuple(stack.models)),
            f"{stack.models.total / stack.size / MB:.2f}",
            f"{stack.data / MB:.1f}",
            f"{(stack.models.total + stack.data) / MB:.1f}",
            "—" if stack.peak is None else f"{stack.peak / MB:.1f}",
        )
        for stack in found.memory
    ]
    notes = (
        "In MB, without what an optimizer remembers. Data: the samples of this benchmark, 64 batches. Peak: as PyTorch "
        "measured it on a GPU.",
    )
    return Table("memory of a stack", columns, rows, notes)


def tables_of(found: Findings) -> list[Table]:
    networks = dict.fromkeys(speed.network for speed in found.speeds)
    return [*(speed_table(found, network) for network in networks), memory_table(found)]


def write_record(folder: Path, plan: Plan, found: Findings, command: str) -> None:
    """All that is needed to repeat the measurement, as JSON, and the tables to read."""
    avalanche = {"avalanche-lib": metadata.version("avalanche-lib")} if avalanche_is_installed() else {}
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "hardware": hardware(plan.device),
        "threads": torch.get_num_threads(),
        "versions": versions() | {"platform": platform.system()} | avalanche,
        "plan": asdict(plan),
    }
    content = about | {
        "speeds": [_speed_to_dict(speed) for speed in found.speeds],
        "memory": [asdict(stack) for stack in found.memory],
        "rates": found.rates,
        "notes": found.notes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECORD, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "README.md", to_markdown(about, tables_of(found)))


def to_markdown(about: dict[str, Any], tables: Iterable[Table]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = f"# {about['date']}: {about['hardware']}\n\n```\n{about['command']}\n```\n"
    return "\n".join([head, f"{about['threads']} CPU thread(s); {installed}.\n", *(t.to_markdown() for t in tables)])


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
