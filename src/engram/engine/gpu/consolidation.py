"""Importances for a whole section of a stack: a penalty's own `importance`, written for one model, mapped over many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.data.batches import batches_of, read_inputs
from engram.data.streams import Task
from engram.engine.gpu.section import Called, Section
from engram.engine.memory import Portion
from engram.engine.program import consolidate_alone
from engram.penalties import EWC, SI, NoPenalty, Penalty
from engram.penalties.per_sample import known_layers


def consolidate_section(
    section: Section, tasks: dict[int, Task], dtype: torch.dtype, portion: Portion, notes: list[str]
) -> Tensor:
    """Consolidate every learner of a section; returns (N,): whether its importances are numbers."""
    finite = torch.ones(len(section), dtype=torch.bool, device=section.device)
    groups: dict[Any, list[int]] = {}
    for row, learner in enumerate(section.learners):
        if learner.learning and type(learner.penalty) is not NoPenalty:
            groups.setdefault((len(tasks[learner.trial].train), *_kind(learner.penalty)), []).append(row)
    for rows in groups.values():
        try:
            importances = _importances(section, rows, tasks, dtype, portion)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError) as reason:
            _note(notes, section.learners[rows[0]].penalty, reason)
            for row in rows:
                learner = section.learners[row]
                finite[row] = consolidate_alone(learner, tasks[learner.trial], dtype)
            continue
        finite[rows] = torch.stack(
            [omega.isfinite().reshape(len(rows), -1).all(dim=1) for omega in importances.values()]
        ).all(dim=0)
        for place, row in enumerate(rows):
            section.learners[row].penalty.remember({name: omega[place] for name, omega in importances.items()})
    return finite


def _kind(penalty: Penalty) -> tuple[Any, ...]:
    """What penalties must have in common to be mapped as one; numbers may differ from model to model."""
    return (type(penalty), tuple(penalty.parameters), tuple(sorted(_fixed(penalty).items())))


def _fixed(penalty: Penalty) -> dict[str, str | bool | int]:
    """Settings that cannot be mapped over."""
    return {name: value for name, value in vars(penalty).items() if isinstance(value, str | bool | int)}


def _check_mappable(penalty: Penalty, one: Penalty) -> None:
    """Refuse to map over penalties that hold something that could not be a value of each model."""
    usual = {"model", "parameters", "fast", "terms", "_pull", "_found_alive", *penalty.extra_groups}
    usual |= {"task_gradient", "gradients", "trusted_scale"}  # which a loop of one's own fills
    for name, value in vars(penalty).items():
        if name not in usual and not isinstance(value, str | bool | int | float):
            raise TypeError(f"its {name!r} is a {type(value).__name__}, which cannot be mapped over")
    if {n: type(v) for n, v in vars(penalty).items() if n not in usual} != {
        n: type(v) for n, v in vars(one).items() if n not in usual
    }:
        raise TypeError("not all have the same settings")


def _importances(
    section: Section, rows: list[int], tasks: dict[int, Task], dtype: torch.dtype, portion: Portion
) -> dict[str, Tensor]:
    """(K, *shape) of each protected weight, for the models in `rows`, whose tasks have as many samples each."""
    penalties = [section.learners[row].penalty for row in rows]
    one = penalties[0]
    if type(one).consolidate not in {Penalty.consolidate, EWC.consolidate, SI.consolidate}:
        raise TypeError("it has a `consolidate` of its own")
    for penalty in penalties:
        _check_mappable(penalty, one)
    own_tasks = [tasks[section.learners[row].trial] for row in rows]
    index = torch.tensor(rows, device=section.device)
    numbers = {name: value for name, value in vars(one).items() if isinstance(value, float)}
    settings = {
        name: torch.tensor([getattr(p, name) for p in penalties], dtype=dtype, device=section.device)
        for name in numbers
    }
    states = {
        group: {name: torch.stack([getattr(p, group)[name] for p in penalties]) for name in getattr(one, group)}
        for group in one.extra_groups
    }
    parameters = {name: section.rows.parameters[name].detach()[index] for name in one.parameters}

    def with_batches_of(samples_at_once: int) -> dict[str, Tensor]:
        def work(model: nn.Module, settings: Any, states: Any, parameters: Any, place: Tensor) -> dict[str, Tensor]:
            # Whatever else the first of the penalties has is its own, and no other model may see it.
            penalty = object.__new__(type(one))
            vars(penalty).update(_fixed(one), **settings, **states, model=model, parameters=parameters)
            return penalty.importance(_batches(own_tasks, samples_at_once, place, dtype), own_tasks[0].taught)

        call = Called(section.still, work)
        arguments = (settings, states, parameters, torch.arange(len(rows), device=section.device))
        examples = _examples(own_tasks[0], samples_at_once, dtype)
        with known_layers(section.still, examples):
            # What is drawn must not depend on the neighbours: importances by draws are not mapped.
            return section.mapped(call, arguments, in_dims=(0, 0, 0, 0), rows=index, randomness="error")

    return portion.fitting(with_batches_of, len(rows))


def _batches(
    tasks: Sequence[Task], samples_at_once: int, place: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the task at `place`, which is a different one for each model of the mapping."""
    iterators = [batches_of(task.train, samples_at_once, permutation=task.permutation, dtype=dtype) for task in tasks]
    for read in zip(*iterators, strict=True):
        inputs = torch.stack([inputs for inputs, _ in read])
        targets = torch.stack([targets for _, targets in read])
        yield inputs[place], targets[place]


def _examples(task: Task, samples_at_once: int, dtype: torch.dtype) -> list[Tensor]:
    """An input of each size that the batches have."""
    sizes = {min(samples_at_once, len(task.train)), len(task.train) % samples_at_once} - {0}
    return [read_inputs(task.train[slice(size)].inputs, dtype=dtype) for size in sizes]


def _note(notes: list[str], penalty: Penalty, reason: Exception) -> None:
    short = str(reason).strip().splitlines()[0]
    notes.append(f"the importances of {type(penalty).__name__} are computed for one model after another ({short})")
