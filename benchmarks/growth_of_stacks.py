"""How a training step grows with the number of models that train together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from growth import MB, Found, Peak, Setting, cells_of, columns_of, in_mb, ratio_in_turns
from timing import Contestant, Take, measure
from workloads import USUAL_PENALTIES, WORKLOADS, Workload, engram_loop, memory_of

from engram.config.paper import PAPER_METHODS
from engram.config.presets import preset
from engram.report.figures.drawing import OTHER, WIDTH, Drawing, colour_of_method, legend_below, new_figure, tidy
from engram.report.tables import Table

MIXED = "the paper's eight"
METHODS = {"mlp": ("finetune", "dhp+online-ewc", MIXED), "cnn": ("dhp+online-ewc", MIXED)}


@dataclass(frozen=True)
class Row:
    network: str
    method: str
    models: int
    ms: float  # a step of all of them: the median over rounds
    us_per_model: float
    to_smallest: float  # the time per model, over that in the smallest stack of this method in the same rounds
    held_bytes: int  # parameters, traces, importances, anchors, gain and shift, SI's paths
    peak_bytes: float  # on a GPU, data and activations included


@dataclass(frozen=True)
class Stack:
    size: int
    take: Take
    held: int
    peak: float


def grow_stacks(setting: Setting) -> Found:
    """Time each stack in turns with the smallest that trains the same."""
    plans = [
        (WORKLOADS[network], method, sizes_of(method, sizes))
        for network, sizes in setting.scale.stacks.items()
        for method in METHODS[network]
    ]
    rows: list[Row] = []
    rounds: dict[str, tuple[float, ...]] = {}
    total = sum(len(sizes) for _, _, sizes in plans)
    for workload, method, sizes in plans:
        make_stack(workload, method, sizes[0], setting)  # what libraries allocate once must not count as a stack's
        smallest = make_stack(workload, method, sizes[0], setting)
        for size in sizes:
            setting.report(len(rows) / total, f"{workload.name}, {method}: {size}")
            stack = smallest if size == smallest.size else make_stack(workload, method, size, setting)
            contestants = [Contestant(method, each.size, each.take) for each in (smallest, stack)]
            timings = measure(contestants, setting.scale.seconds)
            ms = 1e3 * statistics.median(timings[1].rounds)
            ratio = ratio_in_turns(timings[1], timings[0]) * smallest.size / size
            rows.append(Row(workload.name, method, size, ms, 1e3 * ms / size, ratio, stack.held, stack.peak))
            rounds[f"{workload.name}, {method}, {size}"] = timings[1].rounds
            del stack, contestants  # before the next is made
    return Found(draw(rows, setting.on_gpu), {"data": "random pixels", "seconds a step, by round": rounds})


def sizes_of(method: str, sizes: tuple[int, ...]) -> list[int]:
    """Several methods share a stack in equal numbers; one method needs no stack of eight."""
    eight = len(PAPER_METHODS)
    return [size for size in sizes if (size % eight == 0 if method == MIXED else size != eight)]


def make_stack(workload: Workload, method: str, size: int, setting: Setting) -> Stack:
    """Models in the middle of an epoch, with penalties that act; each trial has its own batches."""
    if method == MIXED:
        models = workload.mixed(size, USUAL_PENALTIES)
    else:
        models = [(preset(workload.benchmark, method), trial) for trial in range(size)]
    with Peak(setting.device) as peak:
        learners = workload.learners(models, setting.device, setting.dtype)
        held = memory_of(learners).total
        take = engram_loop(workload, learners, setting.device, setting.dtype)
        take(2)
    return Stack(size, take, held, peak.bytes)


def draw(rows: list[Row], on_gpu: bool) -> Drawing:
    """On a CPU as ratios: there, models go one by one, and other load on the machine matters more than their number."""
    figure = new_figure(WIDTH, 3.0)
    time, memory = figure.subplots(1, 2)
    handles = []
    for network, method in dict.fromkeys((row.network, row.method) for row in rows):
        own = [row for row in rows if (row.network, row.method) == (network, method)]
        colour = OTHER if method == MIXED else colour_of_method(method)
        line = {"color": colour, "ls": "-" if network == "mlp" else ":", "marker": "o", "ms": 3, "lw": 1.3}
        sizes = [row.models for row in own]
        shares = [row.us_per_model if on_gpu else row.to_smallest for row in own]
        handles += time.plot(sizes, shares, label=f"{network}: {method}", **line)
        memory.plot(sizes, [(row.peak_bytes if on_gpu else row.held_bytes) / MB for row in own], **line)
    for axes in (time, memory):
        axes.set_xscale("log")
        axes.set_yscale("log")
    if not on_gpu:
        time.set_yscale("linear")
        time.set_ylim(bottom=0)
    tidy(time, "models in a stack", "µs a model and step" if on_gpu else "time / in the smallest stack")
    tidy(memory, "models in a stack", "MB at the peak" if on_gpu else "MB that the models hold")
    legend_below(figure, handles)
    numbers = [
        (
            f"{row.network}: {row.method}",
            str(row.models),
            f"{row.ms:.3f}",
            f"{row.us_per_model:,.1f}",
            f"{row.to_smallest:.3f}",
            in_mb(row.held_bytes),
            in_mb(row.peak_bytes),
        )
        for row in rows
    ]
    table = Table("Stacks", ("stack", "models", "ms", "µs a model", "× smallest", "MB held", "MB at peak"), numbers)
    caption = "Time of a training step for each model of a stack, and the memory of the stack."
    return Drawing("scaling-stack", "Stacks", caption, figure, columns_of(Row), cells_of(rows), table)
