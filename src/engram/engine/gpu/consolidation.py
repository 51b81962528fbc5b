"""Importances for a whole section of a stack: a penalty's `importance`, written for one model, mapped over many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.data.batches import batches_of, read_inputs
from engram.data.streams import Task
from engram.engine.gpu.rows import form_in_stack
from engram.engine.gpu.section import Called, Section
from engram.engine.memory import Portion
from engram.engine.program import consolidate_alone
from engram.penalties.per_sample import known_layers
from engram.penalties.quadratic import Quadratic


def consolidate_section(
    section: Section, tasks: Mapping[int, Task], dtype: torch.dtype, portion: Portion, notes: list[str]
) -> Tensor:
    """Consolidate every learner of a section; returns (N,): whether its importances are finite.

    Args:
        section: the learners.
        tasks: the task that was learned, by trial; learners of other trials do not consolidate.
        dtype: to compute in.
        portion: how many samples are read at a time.
        notes: to which a line is added for each penalty that cannot be mapped.

    Example:
        >>> finite = consolidate_section(section, {0: stream[0]}, torch.float32, Portion(1000, "an importance", []), [])
    """
    finite = torch.ones(len(section), dtype=torch.bool, device=section.device)
    groups: dict[Any, list[int]] = {}
    for row, learner in enumerate(section.learners):
        if learner.learning and learner.penalty.remembers and learner.trial in tasks:
            groups.setdefault((len(tasks[learner.trial].train), *_kind(form_in_stack(learner))), []).append(row)
    for rows in groups.values():
        try:
            importances = _importances(section, rows, tasks, dtype, portion)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as reason:
            name = type(section.learners[rows[0]].penalty).__name__
            short = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            notes.append(f"the importances of {name} are computed for one model after another ({short})")
            for row in rows:
                learner = section.learners[row]
                finite[row] = consolidate_alone(learner, tasks[learner.trial], dtype)
            continue
        finite[rows] = torch.stack(
            [omega.isfinite().reshape(len(rows), -1).all(dim=1) for omega in importances.values()]
        ).all(dim=0)
        for place, row in enumerate(rows):
            form_in_stack(section.learners[row]).remember({name: omega[place] for name, omega in importances.items()})
    return finite


def _kind(penalty: Quadratic) -> tuple[Any, ...]:
    """What penalties must have in common to be mapped as one; numbers may differ from model to model."""
    # A seed is for draws alone, and importances that draw numbers are not mapped.
    fixed = {name: v for name, v in penalty.settings.items() if not isinstance(v, float) and name != "seed"}
    return (type(penalty), tuple(penalty.parameters), tuple(penalty.state), tuple(sorted(fixed.items())))


class _StackedState(Mapping[str, Tensor]):
    """The states of several penalties as the state of one, within a mapping over them: stacked when it is read."""

    def __init__(self, penalties: Sequence[Quadratic], names: Mapping[str, str], number: Tensor):
        self.states = [penalty.state for penalty in penalties]
        self.keys_of = {_renamed(key, names): key for key in self.states[0]}
        self.number = number  # the number of the penalty, different for each model of the mapping

    def __getitem__(self, key: str) -> Tensor:
        return torch.stack([state[self.keys_of[key]] for state in self.states])[self.number]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """A key of a state, whose weight is named differently in the section and in its own model."""
    for own, name in names.items():
        if own != name and key.endswith(f".{own}"):
            return key.removesuffix(own) + name
    return key


def _importances(
    section: Section, rows: list[int], tasks: Mapping[int, Task], dtype: torch.dtype, portion: Portion
) -> dict[str, Tensor]:
    """(K, *shape) of each protected weight, for the models in `rows`, whose tasks have the same number of samples."""
    penalties = [form_in_stack(section.learners[row]) for row in rows]
    one, names = penalties[0], section.rows.names[rows[0]]
    if "consolidate" in one.custom_verbs:
        raise TypeError("it defines its own `consolidate`")
    own_tasks = [tasks[section.learners[row].trial] for row in rows]
    index = torch.tensor(rows, device=section.device)
    fixed = {name: value for name, value in one.settings.items() if not isinstance(value, float)}
    numbers = {
        name: torch.tensor([penalty.settings[name] for penalty in penalties], dtype=dtype, device=section.device)
        for name in one.settings
        if name not in fixed
    }
    parameters = {names[name]: section.rows.parameters[names[name]].detach()[index] for name in one.parameters}

    def with_batches_of(samples_at_once: int) -> dict[str, Tensor]:
        def work(model: nn.Module, numbers: Any, parameters: Any, number: Tensor) -> dict[str, Tensor]:
            state = _StackedState(penalties, names, number)
            batches = _batches(own_tasks, samples_at_once, number, dtype)
            return one.importance(model, parameters, state, {**fixed, **numbers}, batches, own_tasks[0].taught)

        call = Called(section.still, work)
        arguments = (numbers, parameters, torch.arange(len(rows), device=section.device))
        examples = _examples(own_tasks[0], samples_at_once, dtype)
        with known_layers(section.still, examples):
            # What is drawn must not depend on the other models: importances that draw numbers are not mapped.
            return section.mapped(call, arguments, in_dims=(0, 0, 0), rows=index, randomness="error")

    found = portion.fitting(with_batches_of, len(rows))
    return {name: found[names[name]] for name in one.parameters}


def _batches(
    tasks: Sequence[Task], samples_at_once: int, number: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the task of this number, a different one for each model of the mapping."""
    iterators = [batches_of(task.train, samples_at_once, permutation=task.permutation, dtype=dtype) for task in tasks]
    for read in zip(*iterators, strict=True):
        inputs = torch.stack([inputs for inputs, _ in read])
        targets = torch.stack([targets for _, targets in read])
        yield inputs[number], targets[number]


def _examples(task: Task, samples_at_once: int, dtype: torch.dtype) -> list[Tensor]:
    """An input of each size that the batches have."""
    sizes = {min(samples_at_once, len(task.train)), len(task.train) % samples_at_once} - {0}
    return [read_inputs(task.train[slice(size)].inputs, dtype=dtype) for size in sizes]
