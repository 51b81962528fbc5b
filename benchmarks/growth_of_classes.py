"""How a training step of a head grows with the number of classes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from growth import MB, Found, Peak, Setting, cells_of, columns_of, in_mb, ratio_in_turns
from timing import Contestant, bytes_of, measure, timed
from torch import Tensor, nn

from engram.common.seeding import generator
from engram.nn.baselines import LinearSoftmax, MatchedSoftmax
from engram.nn.dhp import DHPSoftmax
from engram.report.figures.drawing import COLOURS, INK, WIDTH, Drawing, legend_below, new_figure, tidy
from engram.report.tables import Table

HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "plain": LinearSoftmax,
    "matched": MatchedSoftmax,
    "dhp": DHPSoftmax,
}
LOOKS = {"plain": (INK, "--"), "matched": (COLOURS["si"], "--"), "dhp": (COLOURS["online-ewc"], "-")}
BATCH = 64


@dataclass(frozen=True)
class Row:
    head: str
    classes: int
    ms: float  # a step: the median over rounds
    to_plain: float  # over the plain head's in the same rounds
    held_bytes: int  # parameters, their gradients, trace
    kept_bytes: int  # besides, by autograd, from the forward to the backward pass
    peak_bytes: float  # on a GPU


def grow_classes(setting: Setting) -> Found:
    """The heads of each size take turns."""
    rows: list[Row] = []
    rounds: dict[str, tuple[float, ...]] = {}
    sizes = setting.scale.classes
    for name in HEADS:  # what libraries allocate once must not count as a head's
        Head(name, sizes[0], setting).steps(2)
    for number, size in enumerate(sizes):
        setting.report(number / len(sizes), f"{size} classes")
        heads = []
        for name in HEADS:
            with Peak(setting.device) as peak:
                head = Head(name, size, setting)
                head.steps(2)
            heads.append((head, peak.bytes))
        contestants = [
            Contestant(name, 1, timed(head.steps, setting.device)) for name, (head, _) in zip(HEADS, heads, strict=True)
        ]
        timings = dict(zip(HEADS, measure(contestants, setting.scale.seconds_of_heads), strict=True))
        medians = {name: 1e3 * statistics.median(timing.rounds) for name, timing in timings.items()}
        for name, (head, peak_bytes) in zip(HEADS, heads, strict=True):
            ratio = ratio_in_turns(timings[name], timings["plain"])
            rows.append(Row(name, size, medians[name], ratio, head.held_bytes(), head.kept_bytes(), peak_bytes))
            rounds[f"{name}, {size}"] = timings[name].rounds
        del heads, contestants, head  # before the next are made
    about = {"data": "random features", "features": setting.scale.features, "batch": BATCH}
    return Found(draw(rows, setting.on_gpu), {**about, "seconds a step, by round": rounds})


class Head:
    """A head with a batch, called as a network calls it: the gradient with respect to its features is computed too."""

    def __init__(self, name: str, num_classes: int, setting: Setting):
        draw = generator(0, "scaling classes", num_classes)
        features = setting.scale.features
        self.head = HEADS[name](features, num_classes).to(device=setting.device, dtype=setting.dtype)
        if isinstance(self.head, DHPSoftmax):
            self.head.check_values = False  # as `engram run` has it
        self.hidden = torch.rand(BATCH, features, generator=draw).to(setting.device, setting.dtype).requires_grad_()
        self.targets = torch.randint(num_classes, (BATCH,), generator=draw).to(setting.device)
        learned = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(learned, lr=0.01)

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()

    def loss(self) -> Tensor:
        self.hidden.grad = None
        return F.cross_entropy(self.head(self.hidden, self.targets), self.targets)

    def held_bytes(self) -> int:
        gradients = [parameter.grad for parameter in self.head.parameters() if parameter.grad is not None]
        return bytes_of([*self.head.parameters(), *gradients, *self.head.buffers()])

    def kept_bytes(self) -> int:
        own = {tensor.data_ptr() for tensor in (*self.head.parameters(), *self.head.buffers())}
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
            self.loss()
        return bytes_of(tensor for tensor in kept if tensor.data_ptr() not in own)


def draw(rows: list[Row], on_gpu: bool) -> Drawing:
    figure = new_figure(WIDTH, 2.9)
    time, memory = figure.subplots(1, 2)
    handles = []
    for name in HEADS:
        own = [row for row in rows if row.head == name]
        colour, dashes = LOOKS[name]
        line = {"color": colour, "ls": dashes, "marker": "o", "ms": 3, "lw": 1.3}
        sizes = [row.classes for row in own]
        handles += time.plot(sizes, [row.ms for row in own], label=f"{name} head", **line)
        used = [row.peak_bytes if on_gpu else row.held_bytes + row.kept_bytes for row in own]
        memory.plot(sizes, [num_bytes / MB for num_bytes in used], **line)
    for axes in (time, memory):
        axes.set_xscale("log")
        axes.set_yscale("log")
    tidy(time, "classes", "ms a step")
    tidy(memory, "classes", "MB at the peak" if on_gpu else "MB held and kept")
    legend_below(figure, handles)
    numbers = [
        (
            f"{row.head}",
            f"{row.classes:,}",
            f"{row.ms:.3f}",
            f"{row.to_plain:.2f}",
            in_mb(row.held_bytes),
            in_mb(row.kept_bytes),
            in_mb(row.peak_bytes),
        )
        for row in rows
    ]
    columns = ("head", "classes", "ms", "× plain", "MB held", "MB kept for backward", "MB at peak")
    caption = "Time and memory of a training step of a head alone."
    table = Table("Classes", columns, numbers)
    return Drawing("scaling-classes", "Classes", caption, figure, columns_of(Row), cells_of(rows), table)
