"""How near a stack's optimizer step is to the floor of its memory traffic: python benchmarks/optimizer_steps.py.

Needs a GPU and Triton. The floor is the time in which a copy moves as many bytes as the step must read and write: θ, g
and what the optimizer remembers, and for SI gain, shift and path too, each once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import engram
from engram.engine.build import build_learner
from engram.engine.choose import load_kernels
from engram.engine.gpu.rows import Rows, Step, steps_of
from engram.penalties.quadratic import form_of

MODELS, SHAPE = 80, (1, 28, 28)
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd, momentum": {"momentum": 0.9},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
}


def steps_for(method: str, settings: dict[str, Any], device: torch.device) -> tuple[Rows, dict[str, Step]]:
    """Models that have learned a task, as far as their steps can tell, and those steps."""
    config = engram.preset("split-mnist", method, **settings)
    learners = [build_learner(config, trial, SHAPE, 10, device, torch.float32) for trial in range(MODELS)]
    for learner in learners:
        form = form_of(learner.penalty)
        if form is not None and form.remembers:
            form.remember({name: torch.rand_like(theta) for name, theta in form.parameters.items()})
    rows = Rows([learner.model for learner in learners])
    return rows, steps_of(learners, rows)


def traffic(rows: Rows, steps: dict[str, Step]) -> int:
    """The bytes that a step of all models must move."""
    moved = 0
    for name, step in steps.items():
        theta = rows.parameters[name]
        slots = {} if step.slots is None else step.slots.tensors
        written = [theta, step.path, *(tensor for slot, tensor in slots.items() if slot != "steps")]
        read = [*written, theta, step.gain, step.shift]  # the second θ stands for g, which is as large
        moved += sum(tensor.nbytes for tensor in (*read, *written))
    return moved


def seconds_of(work: Callable[[], object], rounds: int = 50) -> float:
    """The fastest of several rounds, on the GPU's clock."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)


def step_of(
    kernels: ModuleType, rows: Rows, steps: dict[str, Step], gradients: dict[str, Tensor]
) -> Callable[[], None]:
    """One step of all models, captured as it is in a run."""

    def work() -> None:
        slots = next(iter(steps.values())).slots
        if slots is not None and slots.clock is not None:
            slots.clock.tick(slice(0, MODELS))
        for name, step in steps.items():
            kernels.take_step(rows.parameters[name], gradients[name], step)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def main() -> None:
    kernels = load_kernels(torch.float32)
    if kernels is None:
        sys.exit("this needs a GPU and Triton")
    device = torch.device("cuda")
    here, there = (torch.empty(2**28, device=device) for _ in range(2))
    per_byte = seconds_of(lambda: there.copy_(here)) / (2 * here.nbytes)
    print(f"a copy: {1e-12 / per_byte:.2f} TB/s\n")
    print(f"| step of {MODELS} networks | ms | floor | ratio |\n|---|---:|---:|---:|")
    for method in ("finetune", "si"):
        for name, settings in SETTINGS.items():
            rows, steps = steps_for(method, settings, device)
            gradients = {n: torch.randn_like(rows.parameters[n]) for n in steps}
            taken = seconds_of(step_of(kernels, rows, steps, gradients))
            floor = traffic(rows, steps) * per_byte
            print(f"| {method}, {name} | {1000 * taken:.3f} | {1000 * floor:.3f} | {taken / floor:.2f} |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    main()
