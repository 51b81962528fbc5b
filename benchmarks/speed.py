"""How fast this machine trains: floors, plain loops, Engram's stacks and Avalanche's strategies, side by side.

python benchmarks/speed.py --device cpu --out benchmarks/records/2025-01-31-my-laptop
python benchmarks/speed.py --device cuda --networks mlp-adam --sizes 1,80

`mlp` and `cnn` are the paper's networks. `mlp-adam` is van de Ven & Tolias': two hidden layers of 1,000, with Adam.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import contestants as others
import torch
from arguments import whole_numbers, words
from record import RECORD, Findings, Plan, Speed, StackMemory, tables_of, write_record
from rich.progress import Progress
from timing import Contestant, Take, Timing, busy_notes, measure
from workloads import PENALTIES, USUAL_PENALTIES, WORKLOADS, Models, Workload, engram_loop, memory_of

from engram.common.errors import InputError
from engram.engine.build import choose_device, precision_of

FLOOR, BATCHED = "floor: products", "floor: batched products"
PLAIN, PLAIN_EWC = "plain loop", "plain loop, EWC through autograd"
COMPILED = "plain loop, torch.compile"
MIX = "engram, the paper's methods"


def measure_speed(plan: Plan, report: Callable[[float, str], None] = lambda done, what: None) -> Findings:
    """Measure all that is planned, one network and size after another.

    Args:
        plan: what to measure.
        report: called with the fraction that is done, and with what is being measured.
    """
    device = choose_device(plan.device)
    with precision_of(plan.precision) as dtype:
        bench = Bench(plan, device, dtype)
        groups = [(WORKLOADS[network], size) for network in plan.networks for size in plan.sizes]
        for number, (workload, size) in enumerate(groups):

            def report_group(part: float, n: int = number, what: str = f"{workload.name}, stack of {size}") -> None:
                report((n + part) / len(groups), what)

            bench.measure_group(workload, size, report_group)
            gc.collect()  # stacks are large
    return bench.found


class Bench:
    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype):
        self.plan = plan
        self.device = device
        self.dtype = dtype
        self.on_gpu = device.type == "cuda"
        self.found = Findings(notes=busy_notes())
        if self.on_gpu:
            self.found.rates["copy, GB/s"] = others.copy_bandwidth(device) / 1e9
            self.found.rates["large product, TFLOP/s"] = others.product_rate(device, dtype) / 1e12

    def measure_group(self, workload: Workload, size: int, report: Callable[[float], None]) -> None:
        """Floor and plain loop are timed in every group, since its ratios refer to them, and shown once."""
        where = (workload, self.device, self.dtype)
        group = [Contestant(FLOOR, 1, others.floor_of_one(*where)), Contestant(PLAIN, 1, others.plain_loop(*where))]
        first = not any(speed.network == workload.name for speed in self.found.speeds)
        if first:
            group.append(Contestant(PLAIN_EWC, 1, others.plain_loop(*where, ewc=True)))
            group += [*self._compiled(workload), *self._strategies(workload)]
        if size > 1 and self.on_gpu and not others.has_convolutions(workload):
            group.append(Contestant(BATCHED, size, others.floor_of_stack(workload, size, self.device, self.dtype)))
        stacks = self._stacks(workload, size)
        group += [Contestant(name, size, self._engram(workload, name, stacks[name])) for name in stacks]
        timings = {c.name: timing for c, timing in zip(group, measure(group, self.plan.seconds, report), strict=True)}
        plain_ms = 1e3 * timings[PLAIN].seconds
        for contestant in group:
            name = contestant.name
            if first or name not in (FLOOR, PLAIN):
                floor_ms = self._floor_ms(workload, stacks.get(name), contestant.size, timings)
                speed = Speed(workload.name, name, contestant.size, timings[name], floor_ms, plain_ms)
                self.found.speeds.append(speed)

    def _stacks(self, workload: Workload, size: int) -> dict[str, Models]:
        """By name. On a CPU models go one by one, so a stack of one method would show nothing new."""
        stacks: dict[str, Models] = {}
        if size == 1 or (self.on_gpu and size == max(self.plan.sizes)):
            for head, penalty in itertools.product(self.plan.heads, self.plan.penalties):
                if head in workload.heads:
                    config = workload.config(head, penalty)
                    stacks[f"engram {head}, {penalty}"] = [(config, trial) for trial in range(size)]
        mixed = workload.mixed(size, self.plan.penalties)
        if size > 1 and size % len({id(config) for config, _ in mixed}) == 0:  # a stack has whole trials
            stacks[MIX] = mixed
        return stacks

    def _engram(self, workload: Workload, name: str, models: Models) -> Take:
        """Engram's loop; its memory is measured as it is made."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        learners = workload.learners(models, self.device, self.dtype)
        memory = memory_of(learners)
        take = engram_loop(workload, learners, self.device, self.dtype)
        take(2)
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.on_gpu else None
        samples = workload.samples(torch.device("cpu"))
        data = samples.inputs.nbytes + samples.targets.nbytes
        self.found.memory.append(StackMemory(workload.name, name, len(models), memory, data, peak))
        return take

    def _compiled(self, workload: Workload) -> list[Contestant]:
        """The plain loop, compiled; where that fails, a note says why."""
        if not self.plan.compiled:
            return []
        try:
            take = others.plain_loop(workload, self.device, self.dtype, compiled=True)
        except InputError as error:
            self.found.notes.append(f"{COMPILED}, {workload.name}: {error}")
            return []
        return [Contestant(COMPILED, 1, take)]

    def _strategies(self, workload: Workload) -> list[Contestant]:
        """Avalanche's, on the network of its own benchmark."""
        if workload.name != "mlp":
            return []
        reason = "avalanche-lib is not installed"
        if others.avalanche_is_installed():
            try:
                return [
                    Contestant(f"Avalanche {name}", 1, others.avalanche_loop(name, workload, self.device, self.dtype))
                    for name in others.STRATEGIES
                ]
            except InputError as error:
                reason = str(error)
        self.found.notes.append(f"Avalanche: {reason}")
        return []

    def _floor_ms(self, workload: Workload, models: Models | None, size: int, timings: dict[str, Timing]) -> float:
        """On a CPU the products of one network, so many times; for a stack on a GPU the largest of its floors."""
        if size == 1 or not self.on_gpu:
            return 1e3 * timings[FLOOR].seconds * size
        rates = self.found.rates
        configs = [workload.config("linear", "none")] * size if models is None else [config for config, _ in models]
        moved = others.traffic_of(workload, configs, self.dtype.itemsize)
        floors = [
            1e3 * size * others.flops_of(workload) / (1e12 * rates["large product, TFLOP/s"]),
            1e3 * moved / (1e9 * rates["copy, GB/s"]),
        ]
        if BATCHED in timings:
            floors.append(1e3 * timings[BATCHED].seconds)
        return max(floors)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="speed.py", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--precision", default="tf32", help="tf32 (on GPUs that have it), float32 or float64")
    parser.add_argument("--networks", type=words, default=("mlp", "cnn"), help=",".join(WORKLOADS))
    parser.add_argument("--sizes", type=whole_numbers, default=(1, 8, 80), help="models that train together: 1,8,80")
    parser.add_argument("--penalties", type=words, default=USUAL_PENALTIES, help=",".join(PENALTIES))
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each contestant is measured")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="no plain loop by torch.compile")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep a record in this folder")
    options = vars(parser.parse_args(arguments))
    out: Path | None = options.pop("out")
    try:
        plan = Plan(**options)
        if out is not None and (out / RECORD).exists():
            raise InputError(f"{out} holds a record already")
        with Progress(transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            found = measure_speed(plan, lambda done, what: bar.update(task, completed=done, description=what))
    except InputError as reason:
        parser.error(str(reason))
    print(*(table.to_markdown() for table in tables_of(found)), sep="\n")
    if out is not None:
        write_record(out, plan, found, shlex.join(["python", "benchmarks/speed.py", *arguments]))
        print(f"The record is in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
