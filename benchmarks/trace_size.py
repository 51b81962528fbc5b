"""How much does the trace of the paper's layer matter once a network is trained?

python benchmarks/trace_size.py --data DATA       the table of docs/reproduction/why.md

The DHP Softmax as published learns all tasks of a benchmark, alone and with Online EWC at the strength of rung 2. Then
its trace is set to zero, and the network is evaluated again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import Progress

from engram.config.settings import Config
from engram.engine.build import build_learner, build_streams, load_datasets
from engram.engine.cpu.program import OneByOne
from engram.engine.learner import Learner
from engram.engine.loop import Position, run_stream
from engram.engine.program import Batches
from engram.nn.dhp import DHPSoftmax
from engram.runs.metrics import estimate
from engram.runs.run import read_run

RESULTS = Path(__file__).parents[1] / "results"
METHODS = {"dhp": "rung-1", "dhp+online-ewc": "rung-2"}  # and where their settings are


@torch.no_grad()
def without_trace(program: OneByOne, num_tasks: int) -> list[list[float]]:
    """By learner: ‖α Hebb‖ / ‖θ‖, and the accuracy after all tasks with the trace and without it, in %."""
    heads = [head_of(learner) for learner in program.learners]
    ratios = [float(head.fast_part().norm() / head.weight.norm()) for head in heads]
    found = [program.evaluate(range(num_tasks), num_tasks).mean(dim=1)]
    for head in heads:
        head.hebb.zero_()
    found.append(program.evaluate(range(num_tasks), num_tasks).mean(dim=1))
    return [[ratio, *(100 * float(part[i]) for part in found)] for i, ratio in enumerate(ratios)]


def head_of(learner: Learner) -> DHPSoftmax:
    head = learner.model.head
    assert isinstance(head, DHPSoftmax)
    return head


def train(config: Config, trials: Sequence[int], data: str | None) -> list[list[float]]:
    """What `without_trace` finds in each trial."""
    streams = build_streams(config, trials, load_datasets(config, data))
    shape, classes = streams[0].input_shape, streams[0].num_classes
    learners = [build_learner(config, t, shape, classes, torch.device("cpu"), torch.float32) for t in trials]
    program = OneByOne(learners, Batches(trials, streams, config.seed, torch.float32))
    position = Position()
    with Progress(transient=True) as bar:
        task = bar.add_task(f"{config.benchmark}, {config.method}", total=config.num_tasks)

        def show(ended: bool) -> None:
            bar.update(task, completed=position.task)

        run_stream(program, program.batches, config, position, show)
    return without_trace(program, config.num_tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with the datasets")
    parser.add_argument("--benchmarks", nargs="+", default=["split-mnist"])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than the benchmark has")
    options = parser.parse_args()
    print("| benchmark | method | ‖α Hebb‖ / ‖θ‖ | accuracy, % | with the trace set to zero, % |")
    print("|---|---|---:|---:|---:|")
    for benchmark in options.benchmarks:
        for method, part in METHODS.items():
            config = read_run(RESULTS / benchmark / part).configs[method]
            config = config.replace(epochs=options.epochs or config.epochs)
            found = zip(*train(config, range(options.trials), options.data), strict=True)
            ratio, *shares = (estimate(values) for values in found)
            cells = [f"{ratio.mean:.2g}", *(f"{e.mean:.2f} ± {e.sem:.2f}" for e in shares)]
            print(f"| {benchmark} | {method} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
