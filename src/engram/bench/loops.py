"""The loops that Engram is compared with, written as people write them; and Engram's own, driven alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.bench.timing import Take, timed
from engram.bench.workload import Workload
from engram.config.settings import Config
from engram.data.batches import LONGEST_PIECE, Piece
from engram.engine.build import build_features
from engram.engine.choose import choose_program
from engram.engine.learner import Learner
from engram.engine.program import Batches


def plain_model(workload: Workload, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The network with an ordinary softmax layer."""
    config = workload.config("plain", "none")
    head = nn.Linear(config.hidden[-1], workload.num_classes, bias=False)
    return nn.Sequential(build_features(config, workload.input_shape), head).to(device=device, dtype=dtype)


def plain_loop(workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """Autograd and `torch.optim.SGD`, without any penalty, on inputs that are floats already."""
    model = plain_model(workload, device, dtype)
    return _autograd_loop(workload, model, lambda x, y: F.cross_entropy(model(x), y), device, dtype)


def plain_loop_with_penalty(workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """The same with EWC in the loss, λ Σ F (θ − θ*)², left to autograd."""
    model = plain_model(workload, device, dtype)
    fisher = [0.01 * torch.rand_like(theta) for theta in model.parameters()]
    anchors = [theta.detach().clone() for theta in model.parameters()]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        for f, theta, anchor in zip(fisher, model.parameters(), anchors, strict=True):
            loss = loss + 100 * (f * (theta - anchor) ** 2).sum()
        return loss

    return _autograd_loop(workload, model, loss_of, device, dtype)


def _autograd_loop(
    workload: Workload,
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Take:
    inputs, targets = workload.batch(workload.samples(device), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = cycle(torch.randperm(len(inputs)).to(device).split(workload.batch_size))

    def steps(num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = next(batches)
            loss = loss_of(inputs[chosen], targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return timed(steps, device)


def engram_loop(workload: Workload, learners: Sequence[Learner], device: torch.device, dtype: torch.dtype) -> Take:
    """The program that `engram run` would choose for these learners, in the midst of an epoch."""
    samples = workload.samples(device)
    trials = sorted({learner.trial for learner in learners})
    batches = Batches(trials, [workload.stream(samples, trial) for trial in trials], 0, dtype)
    program, _ = choose_program(learners, batches, device)
    program.begin_task(0)
    program.begin_epoch(0, 0)

    def steps(num_steps: int) -> None:
        assert num_steps <= LONGEST_PIECE
        program.train(Piece(slice(0, len(trials)), 0, num_steps, 0, workload.batch_size))

    return timed(steps, device)


def learners_of(
    workload: Workload, models: Sequence[tuple[Config, int]], device: torch.device, dtype: torch.dtype
) -> list[Learner]:
    return [workload.learner(config, trial, device, dtype) for config, trial in models]
