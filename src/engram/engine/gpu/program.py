"""Many models as one: the program for a GPU.

The models of an architecture are one section, called as one. A step of all sections (reading the batch, forward and
backward passes, penalties, traces) is captured once as a CUDA graph, and then replayed: one call starts it, and nothing
is read back from the GPU until an epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from engram.common.errors import InputError
from engram.data.batches import LONGEST_PIECE, Piece, read_inputs, read_many
from engram.data.samples import Task
from engram.data.scenarios import candidates
from engram.engine.gpu.heads import BATCHES_KEPT
from engram.engine.gpu.rehearsal import RehearsalSection
from engram.engine.gpu.section import Section
from engram.engine.learner import Learner
from engram.engine.memory import Portion
from engram.engine.program import IMPORTANCE_BATCH, Batches, consolidate_alone, settle_heads
from engram.nn.classes import mask_logits

EVALUATED = 400_000  # samples at a time, over all models of a section, where memory allows
WEIGHED = 65_536  # samples at a time for the importances of one model


@dataclass(frozen=True)
class Part:
    """The models of one section that take part in a piece."""

    section: Section
    rows: slice  # their rows in the section
    trial: Tensor | None  # which of the piece's batches each of them gets; None where it is one each, in order
    places: slice  # their places among all learners


class Mapped:
    """Trains its learners together.

    Args:
        groups: the learners by architecture, each in the order of their trials.
        batches: what they learn.
        kernels: the Triton kernels, if there are any.

    Example:
        >>> program = Mapped([learners], batches, load_kernels(torch.float32))
    """

    def __init__(self, groups: Sequence[Sequence[Learner]], batches: Batches, kernels: ModuleType | None):
        self.batches = batches
        self.place = {trial: place for place, trial in enumerate(batches.trials)}
        self.learners = [learner for group in groups for learner in group]
        self.device = batches.tasks(0)[0].train.inputs.device
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)  # the number of the step in its piece
        self.sections = [
            Section(group, kernels, self.slot)
            if group[0].rehearsal is None
            else RehearsalSection(group, kernels, batches)
            for group in groups
        ]
        self.tasks_of_batch: Tensor | None = None  # (T, B), where a batch has samples of several tasks
        self.rehearsing = [section for section in self.sections if isinstance(section, RehearsalSection)]
        self.kernels = kernels
        self.captures = self.device.type == "cuda" and kernels is not None
        self.branches = [torch.cuda.Stream() for _ in self.sections[1:]] if self.captures else []
        self.notes: list[str] = []
        self.evaluated = Portion(EVALUATED, "an evaluation", self.notes)
        self.weighed = Portion(WEIGHED, "an importance", self.notes)
        self.aside = ThreadPoolExecutor(2)  # for work on the CPU while the GPU computes
        self.drawn: tuple[tuple[int, int], Future[Tensor]] | None = None
        self.graphs: dict[tuple[int, int, int, bool], torch.cuda.CUDAGraph] = {}
        self.parts: dict[tuple[int, int], list[Part]] = {}
        self.cursor = torch.zeros((), dtype=torch.int64, device=self.device)  # the next sample of the epoch's order
        self.losses = torch.zeros(len(self.learners), LONGEST_PIECE, dtype=batches.dtype, device=self.device)

    # --- learning -----------------------------------------------------------------------------------------------

    def begin_task(self, n: int) -> None:
        self.tasks = self.batches.tasks(n)
        self.targets = self.batches.targets(n)
        self.graphs.clear()  # they refer to the previous task's data and pulls
        for rehearsing in self.rehearsing:
            rehearsing.enter_task(n)
        for section in self.sections:
            section.begin_task()
        sizes = self.batches.sizes(n)
        self.order = torch.zeros(len(sizes), max(sizes), dtype=torch.int64, device=self.device)
        permutations = [task.permutation for task in self.tasks if task.permutation is not None]
        self.permutations = torch.stack(permutations) if permutations else None

    def begin_epoch(self, n: int, epoch: int) -> None:
        self.now = (n, epoch)
        ready = self.drawn is not None and self.drawn[0] == (n, epoch)
        drawn = self.drawn[1].result() if self.drawn is not None and ready else self._draw(n, epoch)
        self.order.copy_(drawn, non_blocking=True)
        # The next epoch's order is drawn while the GPU computes this one.
        self.drawn = ((n, epoch + 1), self.aside.submit(self._draw, n, epoch + 1))

    def _draw(self, n: int, epoch: int) -> Tensor:
        """(T, samples): the order of each trial, and zeros where a trial has fewer."""
        orders = torch.zeros(self.order.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        for row, order in zip(orders, self.batches.orders(n, epoch), strict=True):
            row[: len(order)] = order
        return orders

    def train(self, piece: Piece) -> Tensor:
        trials = range(len(self.batches.trials))[piece.trials]
        self.cursor.fill_(piece.first_sample)
        self.slot.fill_(0)
        key = (trials.start, trials.stop, piece.batch_size)
        taken = self._prepare_rehearsals(piece, key)
        graph = (*key, any(section.storing for section in self.rehearsing))
        if self.captures and taken < piece.num_steps and graph not in self.graphs:
            self._step(*key)  # a real step, which also prepares what a capture needs
            taken += 1
            self._capture(graph)
        parts = self._parts(trials.start, trials.stop)
        for number in range(1, piece.num_steps + 1):
            if number > taken and self.captures:
                self.graphs[graph].replay()
            elif number > taken:
                self._step(*key)
            if number % BATCHES_KEPT == 0 or number == piece.num_steps:
                for part in parts:
                    part.section.catch_up(part.rows, piece.batch_size, (number - 1) % BATCHES_KEPT + 1)
        if len(trials) == len(self.batches.trials):
            return self.losses[:, : piece.num_steps].clone()
        return torch.cat([self.losses[part.places, : piece.num_steps] for part in parts])

    def _prepare_rehearsals(self, piece: Piece, key: tuple[int, int, int]) -> int:
        """Prepare what sections that rehearse need for a piece; returns how many of its steps were taken already.

        The first step of all is another one than the others, since nothing is remembered yet.
        """
        first = bool(self.rehearsing) and (*self.now, piece.first_step) == (0, 0, 0)
        for section in self.rehearsing:
            section.prepare_piece(piece, self.now[1])
            section.first = first
        if first:
            self._step(*key)
        for section in self.rehearsing:
            section.first = False
        return int(first)

    def _capture(self, key: tuple[int, int, int, bool]) -> None:
        """Keep the graph of a step; where a rehearsal cannot be captured, its steps are called one by one."""
        try:
            self.graphs[key] = self._captured(*key[:3])
        except RuntimeError as reason:
            if not self.rehearsing or isinstance(reason, torch.cuda.OutOfMemoryError):
                raise
            self.captures = False
            methods = ", ".join(dict.fromkeys(learner.config.method for learner in self.learners))
            why = str(reason).strip().splitlines()[0]
            self.notes.append(f"{methods}: steps are not captured as a graph, and take longer, because {why}")

    def _captured(self, first: int, last: int, batch_size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may invalidate the capture: another thread may be drawing the next order.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step(first, last, batch_size)
        return graph

    def _step(self, first: int, last: int, batch_size: int) -> None:
        """One step of all models of the trials from `first` to `last`."""
        inputs, targets = self._batch(first, last, batch_size)
        parts = self._parts(first, last)
        for part, _ in zip(parts, self._side_by_side(len(parts)), strict=True):
            losses = self._losses(part, inputs, targets)
            self.losses[part.places].index_copy_(1, self.slot, losses[:, None])
        self.cursor += batch_size
        self.slot += 1

    def _losses(self, part: Part, inputs: Tensor, targets: Tensor) -> Tensor:
        try:
            if isinstance(part.section, RehearsalSection):
                return part.section.rehearse(inputs, targets, self.slot, part.rows, self.tasks_of_batch)
            return part.section.step(inputs, targets, self.tasks[0].taught, part.rows)
        except InputError:
            raise
        except ValueError as reason:  # what PyTorch raises when BatchNorm gets a batch of one
            what = f"the model of {part.section.learners[0].config.method} cannot train in task {self.now[0] + 1}"
            raise InputError(f"{what}, on a batch of {targets.shape[1]}: {reason}") from reason

    def _batch(self, first: int, last: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """The next batch of each trial, (T, B, ...) and (T, B), read from pixels that all trials share."""
        pixels, order = self.tasks[0].train.inputs, self.order[first:last]
        permutations = None if self.permutations is None else self.permutations[first:last]
        targets = self.targets if self.targets.ndim == 1 else self.targets[first:last]
        if self.kernels is not None:
            return self.kernels.gather(pixels, targets, order, self.cursor, permutations, batch_size)
        chosen = order.index_select(1, self.cursor + torch.arange(batch_size, device=self.device))  # (T, B)
        read = read_many(pixels, chosen, permutations, self.batches.dtype)
        return read, targets[chosen] if targets.ndim == 1 else targets.gather(1, chosen)

    def _side_by_side(self, number: int) -> Iterator[None]:
        """Sections do not wait for each other: each but the first has its own stream of the GPU."""
        if not self.captures:
            yield from [None] * number
            return
        current = torch.cuda.current_stream()
        yield None
        for branch in self.branches[: number - 1]:
            branch.wait_stream(current)
            with torch.cuda.stream(branch):
                yield None
        for branch in self.branches[: number - 1]:
            current.wait_stream(branch)

    def _parts(self, first: int, last: int) -> list[Part]:
        if (first, last) not in self.parts:
            parts, offset = [], 0
            for section in self.sections:
                own = [i for i, learner in enumerate(section.learners) if first <= self.place[learner.trial] < last]
                trial = [self.place[section.learners[i].trial] - first for i in own]
                parts.append(
                    Part(
                        section,
                        slice(own[0], own[-1] + 1),
                        None if trial == list(range(last - first)) else torch.tensor(trial, device=self.device),
                        slice(offset + own[0], offset + own[-1] + 1),
                    )
                )
                offset += len(section)
            self.parts[first, last] = parts
        return self.parts[first, last]

    def dynamics(self) -> Tensor:
        return torch.cat([section.dynamics() for section in self.sections])

    def finite(self) -> Tensor:
        return torch.cat([section.rows.finite() for section in self.sections])

    def consolidate(self, n: int, seen: Mapping[int, Task] | None = None) -> Tensor:
        self.graphs.clear()  # and the steps, since importances need the memory: `begin_task` makes both anew
        for section in self.sections:
            section.steps = {}
        settle_heads(self.learners)
        tasks = dict(zip(self.batches.trials, self.batches.tasks(n), strict=True)) if seen is None else seen
        for rehearsing in self.rehearsing:  # which never consolidate within a task
            rehearsing.end_task()
        return torch.cat([self._consolidate(section, tasks) for section in self.sections])

    def _consolidate(self, section: Section, tasks: Mapping[int, Task]) -> Tensor:
        """One model after another, since the samples of a task fill a GPU; returns (N,): which are finite."""
        finite = torch.ones(len(section), dtype=torch.bool, device=self.device)
        for row, learner in enumerate(section.learners):
            if not (learner.learning and learner.penalty.remembers and learner.trial in tasks):
                continue
            work = partial(consolidate_alone, learner, tasks[learner.trial], self.batches.dtype)
            own = "consolidate" in learner.penalty.custom_verbs  # which cannot begin anew with fewer samples at a time
            finite[row] = work(IMPORTANCE_BATCH) if own else self.weighed.fitting(work, 1)
        return finite

    def evaluate(self, tasks: Sequence[int], learned: int = 0) -> Tensor:
        return torch.stack([self._accuracies(n, learned) for n in tasks], dim=1).cpu()

    def _accuracies(self, n: int, learned: int) -> Tensor:
        tasks = self.batches.tasks(n)
        among = candidates(self.batches.streams[0], n, learned)
        together = all(task.test.is_same(tasks[0].test) for task in tasks)
        spans = [(0, len(tasks))] if together else [(place, place + 1) for place in range(len(tasks))]
        found = []
        for span in spans:
            parts = self._parts(*span)
            largest = max(part.rows.stop - part.rows.start for part in parts)  # one section is called after another
            work = partial(self._fractions, parts, tasks[slice(*span)], among)
            found.append(self.evaluated.fitting(work, largest))
        return torch.stack(found).sum(dim=0)

    def _fractions(
        self, parts: Sequence[Part], tasks: Sequence[Task], among: Sequence[int], samples_at_once: int
    ) -> Tensor:
        """The accuracies of the models of these parts, whose tasks share their test samples; 0 for all others."""
        store = tasks[0].test
        permutations = None if tasks[0].permutation is None else torch.stack([t.permutation for t in tasks])  # type: ignore[misc]
        correct = torch.zeros(len(self.learners), dtype=torch.int64, device=self.device)
        for start in range(0, len(store), samples_at_once):
            chosen = torch.arange(start, min(start + samples_at_once, len(store)), device=self.device)
            chosen = chosen if store.rows is None else store.rows[chosen]
            targets = store.targets[chosen]
            for part in parts:
                inputs = self._seen_by(part, store.inputs, chosen, permutations)
                logits = part.section.logits(inputs, permutations is None, part.rows)
                correct[part.places] += (mask_logits(logits, among).argmax(dim=2) == targets).sum(dim=1)
        return correct.double() / len(store)

    def _seen_by(self, part: Part, inputs: Tensor, chosen: Tensor, permutations: Tensor | None) -> Tensor:
        if permutations is None:
            return read_inputs(inputs[chosen], dtype=self.batches.dtype)
        read = read_many(inputs, chosen.expand(len(permutations), -1), permutations, self.batches.dtype)
        return read if part.trial is None else read[part.trial]
