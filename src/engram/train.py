"""The loop: a network learns the tasks of a stream one after another, and is examined after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.config import Config
from engram.data.batches import batches_of, num_batches
from engram.data.streams import Stream, Task
from engram.errors import DivergedError, NotFiniteError
from engram.evaluate import evaluate
from engram.masking import mask_logits
from engram.penalties import Penalty
from engram.seeding import generator

RECORDS_PER_EPOCH = 4
IMPORTANCE_BATCH = 500  # samples at a time; their number does not change the importances


@dataclass(frozen=True)
class Record:
    """One look at a network in training; the last three are NaN without a trace."""

    trial: int
    task: int
    epoch: int
    step: int  # of the task, from 0
    loss: float
    eta: float = float("nan")
    hebb_norm: float = float("nan")
    alpha_norm: float = float("nan")


@dataclass
class TrialOutcome:
    """What one trial leaves: rows of the accuracy matrix as far as it came, and the records on the way."""

    untrained: list[float]  # accuracy on each task before learning anything
    rows: list[list[float]] = field(default_factory=list)  # after each task, on all tasks up to the next one
    records: list[Record] = field(default_factory=list)
    diverged: DivergedError | None = None


Watch = Callable[[Record | TrialOutcome], None]  # told of every record, and of the outcome after each task


def run_stream(
    model: nn.Module,
    penalty: Penalty,
    stream: Stream,
    config: Config,
    trial: int,
    watch: Watch = lambda seen: None,
) -> TrialOutcome:
    """Learn every task of the stream in order. A trial that diverges keeps what it had learned until then."""
    outcome = TrialOutcome(untrained=evaluate(model, stream.tasks))
    for n, task in enumerate(stream.tasks):
        try:
            train_task(model, penalty, task, n, config, trial, outcome.records, watch)
            consolidate_task(penalty, task)
        except DivergedError as diverged:
            outcome.diverged = diverged
            break
        except NotFiniteError:  # importances that overflow though the weights do not
            outcome.diverged = DivergedError(n, outcome.records[-1].step)
            break
        outcome.rows.append(evaluate(model, stream.tasks[: n + 2]))
        watch(outcome)
    return outcome


def train_task(
    model: nn.Module,
    penalty: Penalty,
    task: Task,
    n: int,
    config: Config,
    trial: int,
    records: list[Record],
    watch: Watch,
) -> None:
    """Minimise Eq. 4 on one task by plain SGD."""
    # A new optimizer for each task: plain SGD carries no state from one to the next, and none is implied.
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    take_step = {"gradient": step_with_gradient, "proximal": step_proximally}[config.penalty_step]
    steps_per_epoch = num_batches(len(task.train), config.batch_size)
    losses: list[Tensor] = []  # since the last record; read only there, so that a GPU need not wait
    model.train()
    for epoch in range(config.epochs):
        order = generator(config.seed, "order", trial, n, epoch)
        batches = batches_of(task.train, config.batch_size, permutation=task.permutation, order=order)
        for i, (inputs, targets) in enumerate(batches):
            step = epoch * steps_per_epoch + i
            try:
                logits = mask_logits(model(inputs, targets), task.classes)
            except NotFiniteError:
                _mean_loss(losses, n, step)
                raise DivergedError(n, step) from None
            loss = F.cross_entropy(logits, targets)
            take_step(loss, optimizer, penalty)
            penalty.after_step()
            losses.append(loss.detach())
            if (i + 1) * RECORDS_PER_EPOCH // steps_per_epoch > i * RECORDS_PER_EPOCH // steps_per_epoch:
                records.append(Record(trial, n, epoch, step, _mean_loss(losses, n, step + 1), **read_dynamics(model)))
                watch(records[-1])
                losses.clear()
    if not all(torch.isfinite(tensor).all() for tensor in model.state_dict().values()):
        raise DivergedError(n, step)  # the last step left no loss behind it that would show it


def step_with_gradient(loss: Tensor, optimizer: torch.optim.SGD, penalty: Penalty) -> None:
    """Eq. 4 as it stands: the penalty's gradient is added to the task's."""
    optimizer.zero_grad()
    (loss + penalty.loss()).backward()
    optimizer.step()


def step_proximally(loss: Tensor, optimizer: torch.optim.SGD, penalty: Penalty) -> None:
    """A step down the task's loss, then the penalty's exact pull back."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    penalty.proximal_step(optimizer.param_groups[0]["lr"])


def consolidate_task(penalty: Penalty, task: Task) -> None:
    """Weigh the slow weights for the task just learned, from its training samples."""
    batches = batches_of(task.train, IMPORTANCE_BATCH, permutation=task.permutation)
    penalty.consolidate(batches, task.classes)


def read_dynamics(model: nn.Module) -> dict[str, float]:
    """η, ‖Hebb‖ and ‖α‖ of the model's plastic layer, if it has one."""
    for module in model.modules():
        dynamics = getattr(module, "dynamics", None)
        if callable(dynamics):
            return {name: float(value) for name, value in dynamics().items()}
    return {}


def _mean_loss(losses: list[Tensor], n: int, end: int) -> float:
    """The mean loss of the steps before `end`; raises at the first that is no number."""
    if not losses:
        return float("nan")
    values = torch.stack(losses)
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        raise DivergedError(n, end - len(losses) + int(bad[0]))
    return float(values.mean())
