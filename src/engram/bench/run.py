"""The whole comparison: every contestant of each network, timed in turns, and what a stack takes of memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engram.bench import avalanche, floor, loops
from engram.bench.memory import Memory, memory_of_stack
from engram.bench.timing import Contestant, Take, Timing, measure
from engram.bench.workload import HEADS, PENALTIES, WORKLOADS, Workload
from engram.common.errors import InputError, check_choice
from engram.config.settings import Config
from engram.engine.build import choose_device, precision_of

FLOOR, BATCHED = "floor: products", "floor: batched products"
PLAIN, PLAIN_EWC = "plain loop", "plain loop, EWC through autograd"
MIX = "engram, the paper's methods"


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    device: str = "auto"
    precision: str = "tf32"
    networks: tuple[str, ...] = ("mlp", "cnn")
    sizes: tuple[int, ...] = (1, 8, 80)
    penalties: tuple[str, ...] = PENALTIES[:-1]
    seconds: float = 1.0  # for each contestant

    def __post_init__(self) -> None:
        for what, given, choices in (
            ("network", self.networks, WORKLOADS),
            ("penalty", self.penalties, PENALTIES),
        ):
            for name in given:
                check_choice(what, name, choices)
        for what, values in (("networks", self.networks), ("sizes", self.sizes), ("penalties", self.penalties)):
            if not values or len(set(values)) < len(values):
                raise InputError(f"the {what} must be named once each, at least one")
        if min(self.sizes) < 1:
            raise InputError(f"a stack has a size of at least 1, not {min(self.sizes)}")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"the seconds of a measurement must be above 0, not {self.seconds}")


@dataclass(frozen=True)
class Speed:
    """A row: one contestant, with what it is compared with."""

    network: str
    name: str
    size: int
    timing: Timing
    floor_ms: float  # of as many models
    plain_ms: float  # of one model in the plain loop

    @property
    def ms(self) -> float:
        """Milliseconds a step of all its models."""
        return 1e3 * self.timing.seconds

    @property
    def us_per_model(self) -> float:
        return 1e3 * self.ms / self.size

    @property
    def to_floor(self) -> float:
        return self.ms / self.floor_ms

    @property
    def to_plain(self) -> float:
        """A model's share of the time, against the plain loop's."""
        return self.ms / self.size / self.plain_ms


@dataclass(frozen=True)
class StackMemory:
    """A row: what one stack takes, in bytes."""

    network: str
    name: str
    size: int
    models: Memory
    data: int  # the samples of this benchmark of speed, once for all models
    peak: int | None  # as measured on a GPU, beyond what was there before


@dataclass
class Findings:
    """All that was measured."""

    speeds: list[Speed] = field(default_factory=list)
    memory: list[StackMemory] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # of a GPU, from which floors are computed
    notes: list[str] = field(default_factory=list)

    def speed(self, network: str, name: str, size: int = 1) -> Speed:
        return next(s for s in self.speeds if (s.network, s.name, s.size) == (network, name, size))


Report = Callable[[float, str], None]  # told the share that is done, and of what it is
Models = list[tuple[Config, int]]  # settings and trial of each


def busy_notes() -> list[str]:
    """What is to be said where others are at work on this machine."""
    load, num_cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= num_cores / 2:
        return []
    return [f"The machine was busy (a load of {load:.1f} on {num_cores} cores), so that even ratios are rough"]


def run_bench(plan: Plan, report: Report = lambda share, what: None) -> Findings:
    """Measure all that is planned, one network and size after another."""
    device = choose_device(plan.device)
    with precision_of(plan.precision) as dtype:
        bench = Bench(plan, device, dtype)
        groups = [(WORKLOADS[network], size) for network in plan.networks for size in plan.sizes]
        for number, (workload, size) in enumerate(groups):

            def told(part: float, number: int = number, what: str = f"{workload.name}, stack of {size}") -> None:
                report((number + part) / len(groups), what)

            bench.measure_group(workload, size, told)
            gc.collect()  # stacks are large
    return bench.found


class Bench:
    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype):
        self.plan = plan
        self.device = device
        self.dtype = dtype
        self.found = Findings(notes=busy_notes())
        if device.type == "cuda":
            self.found.rates["copy, GB/s"] = floor.copy_bandwidth(device) / 1e9
            self.found.rates["large product, TFLOP/s"] = floor.product_rate(device, dtype) / 1e12

    def measure_group(self, workload: Workload, size: int, report: Callable[[float], None]) -> None:
        """Floor and plain loop are timed in every group, as what its ratios refer to; they are told of once."""
        place = (workload, self.device, self.dtype)
        contestants = [Contestant(FLOOR, 1, floor.one_network(*place)), Contestant(PLAIN, 1, loops.plain_loop(*place))]
        first = not any(speed.network == workload.name for speed in self.found.speeds)
        if first:
            contestants.append(Contestant(PLAIN_EWC, 1, loops.plain_loop_with_penalty(*place)))
            contestants += self._strategies(workload)
        if self._has_batched_floor(workload, size):
            contestants.append(Contestant(BATCHED, size, floor.batched(workload, size, self.device, self.dtype)))
        stacks = self._stacks(workload, size)
        contestants += [Contestant(name, size, self._engram(workload, name, stacks[name])) for name in stacks]
        timings = measure(contestants, self.plan.seconds, report)
        seen = dict(zip((contestant.name for contestant in contestants), timings, strict=True))
        for contestant, timing in zip(contestants, timings, strict=True):
            if first or contestant.name not in (FLOOR, PLAIN):
                floor_ms = self._floor_ms(workload, stacks.get(contestant.name), contestant.size, seen)
                plain_ms = 1e3 * seen[PLAIN].seconds
                self.found.speeds.append(
                    Speed(workload.name, contestant.name, contestant.size, timing, floor_ms, plain_ms)
                )

    def _stacks(self, workload: Workload, size: int) -> dict[str, Models]:
        """By name. On a CPU models go one by one, so that a stack of one method would tell nothing new."""
        penalties = self.plan.penalties
        stacks: dict[str, Models] = {}
        if size == 1 or (self.device.type == "cuda" and size == max(self.plan.sizes)):
            for head in HEADS:
                for penalty in penalties:
                    config = workload.config(head, penalty)
                    stacks[f"engram {head}, {penalty}"] = [(config, trial) for trial in range(size)]
        if size > 1:
            stacks[MIX] = workload.mixed(size, penalties)
        return stacks

    def _engram(self, workload: Workload, name: str, models: Models) -> Take:
        """The loop, and on the way what it takes of memory."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        learners = loops.learners_of(workload, models, self.device, self.dtype)
        holds = memory_of_stack(learners)
        take = loops.engram_loop(workload, learners, self.device, self.dtype)
        take(2)
        peak = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else None
        data = workload.samples(torch.device("cpu"))
        self.found.memory.append(
            StackMemory(workload.name, name, len(models), holds, data.inputs.nbytes + data.targets.nbytes, peak)
        )
        return take

    def _strategies(self, workload: Workload) -> list[Contestant]:
        """Avalanche's, on the network of its own benchmark."""
        if workload.name != "mlp":
            return []
        reason = "avalanche-lib is not installed"
        if avalanche.is_installed():
            try:
                return [
                    Contestant(f"Avalanche {name}", 1, avalanche.strategy_loop(name, workload, self.device, self.dtype))
                    for name in avalanche.STRATEGIES
                ]
            except InputError as error:
                reason = str(error)
        self.found.notes.append(f"Avalanche: {reason}")
        return []

    def _has_batched_floor(self, workload: Workload, size: int) -> bool:
        return size > 1 and self.device.type == "cuda" and workload.name == "mlp"

    def _floor_ms(self, workload: Workload, models: Models | None, size: int, seen: dict[str, Timing]) -> float:
        """On a CPU the products of one network, so many times; for a stack on a GPU the largest of its floors."""
        one = 1e3 * seen[FLOOR].seconds
        if size == 1 or self.device.type != "cuda":
            return one * size
        rates = self.found.rates
        configs = [workload.config("plain", "none")] * size if models is None else [config for config, _ in models]
        moved = floor.traffic_of(workload, configs, self.dtype.itemsize)
        floors = [
            1e3 * size * floor.flops_of(workload) / (1e12 * rates["large product, TFLOP/s"]),
            1e3 * moved / (1e9 * rates["copy, GB/s"]),
        ]
        if BATCHED in seen:
            floors.append(1e3 * seen[BATCHED].seconds)
        return max(floors)
