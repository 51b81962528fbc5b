"""Draw the pictures of docs/concepts.md: traces being written, importance growing, weights held by their anchors."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import engram
from engram.common.files import write_atomically
from engram.data.batches import batches_of
from engram.data.samples import Task
from engram.data.sources import load
from engram.penalties.terms import Term, state_of
from engram.report.figures.drawing import COLOURS, INK, MEDIUM, SMALL, WIDTH, new_figure, rule, tidy

IMAGES = Path(__file__).parent.parent / "docs" / "images"
BATCH_SIZE, LEARNING_RATE = 50, 0.05


def digits() -> engram.streams.Stream:
    """Split MNIST: 0 and 1, then 2 and 3, ...; each image as a row of pixels."""
    return engram.streams.split(load("mnist-small"))


def batches(task: Task) -> list[tuple[Tensor, Tensor]]:
    return [(inputs.flatten(1), targets) for inputs, targets in batches_of(task.train, BATCH_SIZE)]


def show_digit(axes: Axes, row: Tensor) -> None:
    axes.imshow(row.reshape(28, 28), cmap="Greys", vmin=0, vmax=0.8)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, alpha=0.4)


def trace_by_batches() -> Figure:
    """The trace of 3, a row of Hebb, after more and more batches, and the mean of all threes next to it."""
    (_, task, *_) = digits()
    after = (1, 4, 16, 64)
    rates = (0.02, 0.1)
    figure = new_figure(WIDTH, 2.1)
    grid = figure.subplots(len(rates), len(after) + 1, squeeze=False)
    seen = batches(task) * 4
    threes = torch.cat([inputs[targets == 3] for inputs, targets in batches(task)]).mean(dim=0)
    for k, (line, rate) in enumerate(zip(grid, rates, strict=True)):
        head = engram.DHPSoftmax(784, 10, eta=rate)  # on the pixels themselves, so that its trace is an image
        for n, (inputs, targets) in enumerate(seen[: after[-1]], start=1):
            head(inputs, targets)
            if n in after:
                axes = line[after.index(n)]
                show_digit(axes, head.hebb[3])
                if k == 0:
                    axes.set_title(f"{n} batch{'es' * (n > 1)}", fontsize=SMALL)
        line[0].set_ylabel(f"η = {rate}", fontsize=MEDIUM)
        show_digit(line[-1], threes)
    grid[0, -1].set_title("all threes", fontsize=SMALL)
    return figure


def trace_by_tasks() -> Figure:
    """All rows of Hebb after each task of a network that learns: those of other classes stay as they are."""
    torch.manual_seed(0)
    head = engram.DHPSoftmax(784, 10, eta=0.02)
    optimizer = torch.optim.SGD(head.parameters(), lr=LEARNING_RATE)
    stream = digits()
    figure = new_figure(WIDTH, 2.6)
    grid = figure.subplots(len(stream), 10)
    for n, (task, line) in enumerate(zip(stream, grid, strict=True), start=1):
        for inputs, targets in batches(task):
            optimizer.zero_grad()
            cross_entropy(head(inputs, targets), targets).backward()
            optimizer.step()
        for number, axes in enumerate(line):
            show_digit(axes, head.hebb[number])
            if number in task.classes:  # the rows that this task wrote
                for spine in axes.spines.values():
                    spine.set(linewidth=1.4, alpha=1, color=COLOURS["online-ewc"])
            if n == 1:
                axes.set_title(number, fontsize=SMALL)
        line[0].set_ylabel(f"task {n}", fontsize=SMALL, rotation=0, ha="right", va="center")
    return figure


def importance_by_tasks() -> Figure:
    """Ω of the first layer, summed over its units, pixel by pixel after each of three tasks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    penalty = engram.MAS(model, strength=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    maps = []
    for task in digits()[:3]:
        for inputs, targets in batches(task) * 3:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            penalty.proximal_step(LEARNING_RATE)
        penalty.consolidate(batches(task), task.classes)
        maps.append(penalty.terms[0].importance["0.weight"].sum(dim=0).reshape(28, 28))
    figure = new_figure(WIDTH, 1.9)
    grid = figure.subplots(1, len(maps))
    for n, (axes, importance) in enumerate(zip(grid, maps, strict=True), start=1):
        drawn = axes.imshow(importance, cmap="cividis", vmin=0, vmax=float(maps[-1].max()))
        axes.set(xticks=[], yticks=[])
        axes.set_title("after " + ", ".join(f"{2 * k}|{2 * k + 1}" for k in range(n)), fontsize=SMALL)
    bar = figure.colorbar(drawn, ax=grid, shrink=0.8, pad=0.02)
    bar.set_label("Ω, summed over units", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    return figure


def pull_of_the_anchor() -> Figure:
    """One weight θ, anchored at −1, while a new task's loss (θ − 1)² draws it to 1."""
    figure = new_figure(WIDTH, 2.4)
    costs, paths = figure.subplots(1, 2)
    theta = torch.linspace(-1.8, 1.8, 200)
    lines = zip((0.0, 0.3, 1.0, 3.0), ("-", "--", "-.", ":"), (INK, *list(COLOURS.values())[1:4]), strict=True)
    for omega, style, colour in lines:
        weight = nn.Linear(1, 1, bias=False)
        penalty = engram.MAS(weight, strength=1)
        anchor, importance = torch.full((1, 1), -1.0), torch.full((1, 1), omega)
        penalty.state = state_of([Term({"weight": importance}, {"weight": anchor})])
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.05)
        weight.weight.data.copy_(anchor)
        path = [-1.0]
        for _ in range(40):
            optimizer.zero_grad()
            (weight.weight - 1).square().sum().backward()
            optimizer.step()
            penalty.proximal_step(0.05)
            path.append(weight.weight.item())
        look = {"color": colour, "ls": style, "lw": 1.3}
        total = (theta - 1) ** 2 + penalty.strength * omega * (theta + 1) ** 2
        costs.plot(theta, total, **look)
        costs.plot(theta[total.argmin()], total.min(), "o", color=colour, ms=4)
        paths.plot(path, label=f"λΩ = {omega:g}", **look)
    costs.set_ylim(0, 9)
    rule(costs, x=-1, strength=0.4)
    costs.text(-0.95, 8.4, "anchor θ*", fontsize=SMALL)
    tidy(costs, "θ", "(θ − 1)² + λΩ (θ − θ*)²")
    paths.set_ylim(-1.1, 1.25)
    rule(paths, y=-1, strength=0.4)
    rule(paths, y=1, strength=0.4)
    tidy(paths, "steps", "θ")
    paths.text(40, 1.06, "what the new task wants", fontsize=SMALL, ha="right")
    paths.text(40, -0.96, "anchor θ*", fontsize=SMALL, ha="right")
    figure.legend(
        *paths.get_legend_handles_labels(), frameon=False, fontsize=SMALL, ncols=4, loc="outside lower center"
    )
    return figure


FIGURES = {
    "concepts-trace-batches": trace_by_batches,
    "concepts-trace-tasks": trace_by_tasks,
    "concepts-importance": importance_by_tasks,
    "concepts-pull": pull_of_the_anchor,
}


def main(folder: Path = IMAGES) -> None:
    for name, draw in FIGURES.items():
        path = folder / f"{name}.png"
        write_atomically(path, to_png(draw()))
        print(path)


def to_png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=200)
    return image.getvalue()


if __name__ == "__main__":
    main()
