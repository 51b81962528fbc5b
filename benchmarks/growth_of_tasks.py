"""How the cost of a task grows with the number of tasks that were learned before it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from growth import MB, NOT_MEASURED, Found, Scale, Setting, cells_of, columns_of, in_mb
from timing import bytes_of, synchronize

from engram.config.presets import preset
from engram.config.settings import Config
from engram.data.batches import move_streams
from engram.data.samples import Stream
from engram.engine.build import build_learner, build_streams, load_datasets
from engram.engine.choose import choose_program
from engram.engine.loop import Position, train_task
from engram.engine.program import Batches
from engram.report.figures.drawing import WIDTH, Drawing, colour_of_method, legend_below, new_figure, rule, tidy
from engram.report.tables import Table

METHODS = ("online-ewc", "si", "mas", "dhp", "dhp+online-ewc", "dhp+si", "dhp+mas", "ewc")
SPANS = ((6, 15), (91, 100), (991, 1000))  # the tasks whose medians stand for 10, 100 and 1,000
NUMBERS = (
    "method",
    *(f"ms, {first}–{last}" for first, last in SPANS),
    "tasks",
    "last / newcomer",
    "ms to evaluate",
    "MB after the first",
    "MB after the last",
)


@dataclass(frozen=True)
class Row:
    method: str
    task: int  # from 1
    train_ms: float
    consolidate_ms: float
    newcomer_ms: float  # of a newcomer that learns its first tasks in turns with these, consolidation included
    evaluate_ms: float  # on all tasks so far
    penalty_bytes: float  # terms, and SI's paths

    @property
    def ms(self) -> float:
        return self.train_ms + self.consolidate_ms


def grow_tasks(setting: Setting) -> Found:
    """All methods take turns at each task, and towards the end a newcomer of each takes turns with them.

    So a slow moment of the machine affects old and new alike: their ratio shows how the work has grown.
    """
    scale = setting.scale
    stream, streams = make_streams(setting)
    old, new = ({method: Student(method, stream, setting) for method in METHODS} for _ in range(2))
    rows = []
    for n in range(scale.tasks):
        setting.report(n / scale.tasks, f"task {n + 1} of {scale.tasks}")
        for method in METHODS:
            last = scale.ewc_tasks if method == "ewc" else scale.tasks
            if n < last:
                first_turn = last - scale.turns
                rows.append(learn_in_turns(method, n, n - first_turn, old[method], new[method], n + 1 in marks(last)))
    for student in (*old.values(), *new.values()):
        student.check()
    about = {"data": "mnist-small", "samples of a task": scale.samples, "streams": streams}
    return Found(draw(rows, scale), about)


def learn_in_turns(method: str, n: int, n_of_new: int, old: Student, new: Student, evaluated: bool) -> Row:
    """Learn task n, and a task of the newcomer if it takes part by now; neither always comes first."""
    newcomer = NOT_MEASURED
    if n_of_new >= 0 and n % 2:
        newcomer = sum(new.learn(n_of_new))
    train, consolidate = old.learn(n)
    if n_of_new >= 0 and not n % 2:
        newcomer = sum(new.learn(n_of_new))
    if not evaluated:
        return Row(method, n + 1, train, consolidate, newcomer, NOT_MEASURED, NOT_MEASURED)
    return Row(method, n + 1, train, consolidate, newcomer, old.evaluate(n + 1), old.penalty_bytes())


def marks(last: int) -> list[int]:
    """After so many tasks all of them are evaluated: 1, 2, 5, 10, … and the last."""
    return [n for n in (k * 10**e for e in range(6) for k in (1, 2, 5)) if n < last] + [last]


def make_streams(setting: Setting) -> tuple[Stream, list[dict[str, float]]]:
    """The stream; and the seconds and bytes of streams with a hundredth, a tenth and all of its tasks."""
    taken: list[dict[str, float]] = []
    for num_tasks in sorted({max(1, setting.scale.tasks // part) for part in (100, 10, 1)}):
        config = config_of("dhp", num_tasks, setting.scale)
        datasets = load_datasets(config, None)
        begun = time.perf_counter()
        (stream,) = move_streams(build_streams(config, [0], datasets), setting.device)
        seconds = time.perf_counter() - begun
        tensors = [t for task in stream for part in (task.train, task.test) for t in (part.inputs, part.targets)]
        tensors += [task.permutation for task in stream if task.permutation is not None]
        taken.append({"tasks": num_tasks, "seconds": seconds, "bytes": bytes_of(tensors)})
    return stream, taken


def config_of(method: str, num_tasks: int, scale: Scale) -> Config:
    small: dict[str, Any] = {"dataset": "mnist-small", "hidden": [64], "epochs": 1, "batch_size": 20}
    return preset("permuted-mnist", method, num_tasks=num_tasks, max_samples=scale.samples, **small)


class Student:
    """A learner with a clock."""

    def __init__(self, method: str, stream: Stream, setting: Setting):
        self.config = config_of(method, len(stream), setting.scale)
        self.device = setting.device
        shape, num_classes = stream.input_shape, stream.num_classes
        self.learner = build_learner(self.config, 0, shape, num_classes, setting.device, setting.dtype)
        self.batches = Batches([0], [stream], self.config.seed, setting.dtype)
        self.program, _ = choose_program([self.learner], self.batches, setting.device)

    def learn(self, n: int) -> tuple[float, float]:
        """Milliseconds of training on a task, and of consolidating it."""
        train = self._ms(lambda: train_task(self.program, self.batches, self.config, Position(task=n)))
        return train, self._ms(lambda: self.program.consolidate(n))

    def evaluate(self, num_tasks: int) -> float:
        """Milliseconds of an evaluation on so many tasks."""
        return self._ms(lambda: self.program.evaluate(range(num_tasks)))

    def penalty_bytes(self) -> int:
        return bytes_of(self.learner.penalty.state_dict().values())

    def check(self) -> None:
        """A learner that has diverged takes no more steps, and would look fast."""
        if not (self.learner.learning and bool(self.program.finite().all())):
            raise RuntimeError(f"{self.config.method} has diverged")

    def _ms(self, work: Callable[[], object]) -> float:
        synchronize(self.device)
        begun = time.perf_counter()
        work()
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - begun)


def to_newcomer(rows: Sequence[Row], skipped: int) -> float:
    """The last tasks of a method over the first of a newcomer: the median, over turns, of a turn's ratio."""
    beside = [row for row in rows if row.newcomer_ms == row.newcomer_ms][skipped:]
    return statistics.median(row.ms / row.newcomer_ms for row in beside)


def span_ms(rows: Sequence[Row], first: int, last: int) -> str:
    own = [row.ms for row in rows if first <= row.task <= last]
    return f"{statistics.median(own):.2f}" if len(own) == last - first + 1 else "—"


def numbers_of(rows: Sequence[Row], evaluated: Sequence[Row], ratio: float) -> tuple[str, ...]:
    """The row of one method."""
    spans = [span_ms(rows, first, last) for first, last in SPANS]
    first, last = evaluated[0], evaluated[-1]
    held = (in_mb(first.penalty_bytes), in_mb(last.penalty_bytes))
    return (last.method, *spans, str(last.task), f"{ratio:.3f}", f"{last.evaluate_ms:,.1f}", *held)


def draw(rows: list[Row], scale: Scale) -> Drawing:
    figure = new_figure(WIDTH, 4.8)
    (learning, turns), (evaluating, memory) = figure.subplots(2, 2)
    handles, numbers = [], []
    steady = {row.task: row.ms for row in rows if row.method == "dhp"}  # it has no penalty
    for place, method in enumerate(METHODS):
        own = [row for row in rows if row.method == method]
        evaluated = [row for row in own if row.evaluate_ms == row.evaluate_ms]
        colour, plastic = colour_of_method(method), "dhp" in method
        line = {"color": colour, "ls": "-" if plastic else "--", "lw": 1.2, "marker": "o", "ms": 2}
        width = max(1, scale.tasks // 40)
        windows = [own[start : start + width] for start in range(0, len(own), width)]
        middles = [statistics.mean(row.task for row in window) for window in windows]
        medians = [statistics.median(row.ms / steady[row.task] for row in window) for window in windows]
        handles += learning.plot(middles, medians, label=method, **line)
        ratio = to_newcomer(own, scale.skipped)
        turns.plot([ratio], [place], "o", ms=4, color=colour, mfc=colour if plastic else "none")
        tasks = [row.task for row in evaluated]
        evaluating.plot(tasks, [row.evaluate_ms for row in evaluated], **line)
        memory.plot(tasks, [row.penalty_bytes / MB for row in evaluated], **line)
        numbers.append(numbers_of(own, evaluated, ratio))
    learning.set_ylim(bottom=0)
    tidy(learning, "task", "time to learn it / dhp's")
    turns.set_yticks(range(len(METHODS)), METHODS)
    turns.invert_yaxis()
    tidy(turns, "last / newcomer")
    rule(turns, x=1, strength=0.4)
    evaluating.set_xscale("log")
    evaluating.set_yscale("log")
    tidy(evaluating, "tasks so far", "ms to evaluate all")
    memory.set_xscale("log")
    tidy(memory, "tasks so far", "MB of a penalty's state")
    legend_below(figure, handles)
    caption = (
        "Time to train on a task and consolidate it, over that of DHP alone for the same task; that of the last tasks "
        "over that of a newcomer's first; time to evaluate all tasks so far; and the memory of a penalty."
    )
    table = Table("Tasks", NUMBERS, numbers)
    return Drawing("scaling-tasks", "Tasks", caption, figure, columns_of(Row), cells_of(rows), table)
