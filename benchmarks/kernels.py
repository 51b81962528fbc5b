"""Where a step on a GPU goes: its kernels, by the time that they take.

python benchmarks/kernels.py --networks cnn,mlp-adam --out benchmarks/records/2025-01-31-my-gpu-profile
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from pathlib import Path

import torch
from arguments import whole_number, words
from timing import hardware
from torch.profiler import ProfilerActivity, profile
from workloads import USUAL_PENALTIES, WORKLOADS, Workload, engram_loop

from engram.common.files import write_atomically
from engram.data.batches import LONGEST_PIECE
from engram.engine.build import precision_of
from engram.report.layout import Table
from engram.runs.folder import versions

SMALLEST = 0.005  # of a step: kernels that take less are one row


def profile_step(workload: Workload, size: int) -> Table:
    """The kernels of a step of the paper's methods, so many models of them, in the program that `engram run` chooses.

    Args:
        workload: network and batches.
        size: how many models.
    """
    device = torch.device("cuda")
    with precision_of("tf32") as dtype:
        learners = workload.learners(workload.mixed(size, USUAL_PENALTIES), device, dtype)
        take = engram_loop(workload, learners, device, dtype)
        take(LONGEST_PIECE)  # compiles the kernels and captures the graph
        seconds = min(take(LONGEST_PIECE) for _ in range(8)) / LONGEST_PIECE
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            take(LONGEST_PIECE)
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total / LONGEST_PIECE
        name = event.key[:70] if microseconds >= SMALLEST * 1e6 * seconds else "smaller ones"
        spent[name] += microseconds
        calls[name] += event.count
    order = sorted(spent, key=lambda name: -spent[name])
    rows = [(f"`{name}`", f"{spent[name]:.1f}", f"{calls[name] / LONGEST_PIECE:.1f}") for name in order]
    return Table(
        f"{workload.name}, {size} models: a step takes {1e6 * seconds:.0f} µs", ("kernel", "µs a step", "calls"), rows
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="kernels.py", description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=words, default=("mlp", "cnn"), help=",".join(WORKLOADS))
    parser.add_argument("--size", type=whole_number, default=80, help="models that train together")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep a record in this folder")
    options = parser.parse_args(arguments)
    unknown = [network for network in options.networks if network not in WORKLOADS]
    if unknown:
        parser.error(f"no network is called {unknown[0]}: choose from {', '.join(WORKLOADS)}")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    tables = [profile_step(WORKLOADS[network], options.size).to_markdown() for network in options.networks]
    print(*tables, sep="\n")
    if options.out is not None:
        command = shlex.join(["python", "benchmarks/kernels.py", *arguments])
        words_of = ", ".join(f"{name} {version}" for name, version in versions().items())
        head = f"# Kernels of a step: {hardware('cuda')}\n\n```\n{command}\n```\n\n{words_of}.\n"
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "README.md", "\n".join([head, *tables]).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
