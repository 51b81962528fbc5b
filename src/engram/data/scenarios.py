"""The three scenarios of continual learning (van de Ven & Tolias 2019), as functions from a stream to a stream.

    scenario   outputs                        trained among              evaluated among
    task       each task its own              those of the task          those of the task
    domain     shared by all tasks            all                        all
    class      each task its own              those of tasks 0..n        those of all tasks seen so far

In the task scenario a network is told which task a sample belongs to. In the other two it is not: in the domain
scenario it need not find out, since the tasks share their outputs; in the class scenario it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.common.errors import InputError, check_choice
from engram.data.samples import Samples

if TYPE_CHECKING:
    from engram.data.samples import Stream, Task

SCENARIOS = ("task", "domain", "class")
Groups = list[tuple[int, ...]]  # the classes of each task
Renumbered = dict[tuple[int, tuple[int, ...], int], Tensor]  # targets that have been renumbered


def in_scenario(stream: Stream, scenario: str) -> Stream:
    """The same tasks in one of the three scenarios of van de Ven & Tolias: "task", "domain" or "class".

    domain:       the target is the place of the class within its task; all tasks share the outputs.
    task, class:  every task has its own outputs. Where all tasks have the same K classes, target k of task n
                  becomes n K + k; where they have different classes, targets stay the same.

    If every task has all classes, but no label is found in two tasks, a task's classes are the labels found in it. If
    only some classes return in later tasks, they keep their outputs. If tasks differ in their number of classes, the
    domain scenario has as many outputs as the largest task.

    Args:
        stream: any stream, whichever scenario it has now.
        scenario: "task", "domain" or "class".

    Example:
        >>> stream = engram.streams.in_scenario(engram.streams.split("mnist-small"), "domain")
        >>> stream.num_classes, stream[4].classes
        (2, (0, 1))
    """
    return _in_scenario(stream, scenario, {})


def _in_scenario(stream: Stream, scenario: str, renumbered: Renumbered) -> Stream:
    check_choice("scenario", scenario, SCENARIOS)
    groups = classes_of_tasks(stream)
    if scenario == "domain":
        num_classes = max(map(len, groups))
        outputs = tuple(range(num_classes))
        tasks = [
            _renumber(task, group, 0, outputs, outputs, renumbered) for task, group in zip(stream, groups, strict=True)
        ]
        return replace(stream, tasks=tuple(tasks), num_classes=num_classes, scenario=scenario)
    own, num_classes = groups, stream.num_classes
    if len(groups) > 1 and len({frozenset(group) for group in groups}) == 1:  # the same classes in all tasks
        _check_same_labels(stream)
        size = len(groups[0])
        own = [tuple(range(n * size, (n + 1) * size)) for n in range(len(groups))]
        num_classes = size * len(groups)
    tasks = []
    for n, (task, group) in enumerate(zip(stream, groups, strict=True)):
        taught = own[n] if scenario == "task" else union(own[: n + 1])
        first = None if own is groups else own[n][0]
        tasks.append(_renumber(task, group, first, own[n], taught, renumbered))
    return replace(stream, tasks=tuple(tasks), num_classes=num_classes, scenario=scenario)


def candidates(stream: Stream, n: int, learned: int) -> tuple[int, ...]:
    """The outputs among which task n is evaluated when some tasks have been learned: the task's own classes.

    In the class scenario, those of all tasks seen so far; for a task that is not learned yet, those up to its own.

    Args:
        stream: the tasks.
        n: the task that is evaluated.
        learned: how many tasks have been learned.

    Example:
        >>> stream = engram.streams.in_scenario(engram.streams.split("mnist-small"), "class")
        >>> candidates(stream, 0, learned=2), candidates(stream, 2, learned=2)
        ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5))
    """
    if stream.scenario != "class":
        return stream[n].classes
    return union([task.classes for task in stream[: max(n + 1, learned)]])


def arrange(streams: Sequence[Stream], scenario: str | None, mask_training: bool) -> list[Stream]:
    """The streams of several trials in a scenario. Streams and targets that are the same stay one object.

    Args:
        streams: those of the trials.
        scenario: None for the streams as they are.
        mask_training: False to train with all outputs of the network. The evaluation stays the scenario's.

    Example:
        >>> (arranged,) = arrange([engram.streams.split("mnist-small")], "class", mask_training=True)
        >>> arranged[1].taught
        (0, 1, 2, 3)
    """
    renumbered: Renumbered = {}
    made: dict[int, Stream] = {}
    for stream in streams:
        if id(stream) not in made:
            found = stream if scenario is None else _in_scenario(stream, scenario, renumbered)
            made[id(stream)] = found if mask_training else masked_only_in_evaluation(found)
    return [made[id(stream)] for stream in streams]


def masked_only_in_evaluation(stream: Stream) -> Stream:
    """The same tasks, with all outputs in training, so that the network does not know which task it learns."""
    return replace(stream, tasks=tuple(replace(task, taught=tuple(range(stream.num_classes))) for task in stream))


def classes_of_tasks(stream: Stream) -> Groups:
    """The classes of each task: those it names, or the labels found in it if no label is found in two tasks.

    Args:
        stream: any.

    Example:
        >>> x, low, high = torch.rand(4, 8), torch.tensor([0, 1, 0, 1]), torch.tensor([2, 3, 2, 3])
        >>> classes_of_tasks(engram.streams.from_arrays([(x, low, x, low), (x, high, x, high)]))
        [(0, 1), (2, 3)]
    """
    named = [task.classes for task in stream]
    if len(named) > 1 and len({frozenset(group) for group in named}) == 1:
        found = [_labels(task) for task in stream]
        if sum(map(len, found)) == len(set().union(*found)):
            return [tuple(sorted(labels)) for labels in found]
    return named


def _check_same_labels(stream: Stream) -> None:
    """Refuse tasks that name the same classes but hold different labels: which classes a task has is not clear."""
    found = [_labels(task) for task in stream]
    for n, labels in enumerate(found):
        if labels != found[0]:
            raise InputError(
                f"tasks 1 and {n + 1} name the same classes but hold different labels, and some labels are in several "
                "tasks: say with classes= which classes each task has"
            )


def _labels(task: Task) -> set[int]:
    return {*task.train.labels.unique().tolist(), *task.test.labels.unique().tolist()}


def union(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The classes of several tasks, each once, in ascending order.

    Args:
        groups: the classes of each task.

    Example:
        >>> union([(2, 3), (0, 1)])
        (0, 1, 2, 3)
    """
    return tuple(sorted({c for group in groups for c in group}))


def _renumber(
    task: Task,
    group: tuple[int, ...],
    first: int | None,
    classes: tuple[int, ...],
    taught: tuple[int, ...],
    renumbered: Renumbered,
) -> Task:
    """The task with class k of its group as target first + k; with `first` None, the targets as they are."""

    def moved(samples: Samples) -> Samples:
        if first is None or group == tuple(range(first, first + len(group))):
            return samples
        key = (id(samples.targets), group, first)
        if key not in renumbered:
            places = torch.full((1 + max(int(samples.targets.max()), *group),), -1)
            places[list(group)] = torch.arange(first, first + len(group))
            renumbered[key] = places.to(samples.targets.device)[samples.targets]
        return Samples(samples.inputs, renumbered[key], samples.rows)

    return replace(task, train=moved(task.train), test=moved(task.test), classes=classes, taught=taught)
