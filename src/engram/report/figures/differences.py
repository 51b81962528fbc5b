"""Ours against the paper's, and with a head against without: a row each, its mean and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engram.report.figures.curves import where_from
from engram.report.figures.drawing import (
    INK,
    MEDIUM,
    OURS,
    PAPER,
    SMALL,
    WIDTH,
    Cell,
    Drawing,
    colour_of_method,
    legend_below,
    looks,
    new_figure,
    paper_mark,
    percent,
    rule,
    tidy,
)
from engram.report.layout import Table, number
from engram.report.pairs import Pair, head_of, paper_value
from engram.report.tables import final, label_heading
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

ROW = 0.27  # inches
WIDEST = 34  # characters of a name left of its row: a longer one would leave no room for the axis


def differences(pairs: Sequence[Pair], name: str = "differences") -> Drawing:
    """A forest plot: what the head adds to each method, in points of accuracy, with Student's 95% interval.

    Args:
        pairs: those of one run, or of several benchmarks.
        name: of the figure's files.

    Example:
        differences(pairs(read_run("runs/demo").results)).to_bytes("png")
    """
    benchmarks = list(dict.fromkeys(pair.benchmark for pair in pairs))
    titles = [f"{pair.label} − {pair.baseline_label}" for pair in pairs]
    if above := max(map(len, titles)) > WIDEST:  # then in two lines above its row
        titles = [f"{pair.label}\n− {pair.baseline_label}" for pair in pairs]
    step = 2.4 if above else 1
    figure = new_figure(WIDTH, ROW * (step * len(pairs) + 1.4 * (len(benchmarks) > 1) * len(benchmarks)) + 1.3)
    axes = figure.subplots()
    rule(axes, x=0, strength=0.6)
    positions: list[float] = []
    position = 0.0
    last = None
    for pair in pairs:
        if len(benchmarks) > 1 and pair.benchmark != last:
            axes.annotate(
                pair.benchmark,
                (0, position + 0.1),
                xycoords=("axes fraction", "data"),
                fontsize=SMALL,
                fontweight="bold",
            )
            position += 1
        position += step - 1
        difference = pair.accuracy
        colour = colour_of_method(pair.result.config.method)
        axes.plot([100 * difference.low, 100 * difference.high], [position, position], color=colour, lw=1.6)
        axes.plot([100 * difference.mean], [position], color=colour, **OURS)
        if pair.paper is not None:
            axes.plot([pair.paper], [position], color=colour, **PAPER)
        positions.append(position)
        position, last = position + 1, pair.benchmark
    _rows(axes, positions, [] if above else titles)
    for title, at in zip(titles, positions, strict=True) if above else ():
        axes.annotate(title, (0, at - 0.3), xycoords=("axes fraction", "data"), fontsize=SMALL, in_layout=False)
    tidy(axes, "what it adds, points of accuracy")
    axes.tick_params(axis="y", length=0)
    legend_below(figure, _marks(_has_paper(pairs), "ours, with 95% interval"))
    rows: list[tuple[Cell, ...]] = [
        (
            p.benchmark,
            p.label,
            p.baseline_label,
            *(100 * value for value in (p.accuracy.mean, p.accuracy.low, p.accuracy.high)),
            p.accuracy.num_trials,
            "" if p.paper is None else p.paper,
        )
        for p in pairs
    ]
    return Drawing(
        name,
        f"What {head_of(pairs)} adds, in pairs",
        f"Each trial with {head_of(pairs)} minus the same without: right of the line, it is better. "
        "Bars are 95% intervals."
        + (" Hollow: the paper's own difference, which has no interval." if _has_paper(pairs) else ""),
        figure,
        ("benchmark", "method", "baseline", "points", "low", "high", "pairs", "paper points"),
        rows,
        Table(
            "Differences in points of accuracy",
            _columns(len(benchmarks) > 1),
            [_in_words(p, benchmarks) for p in pairs],
        ),
    )


def paper_against_ours(results: Mapping[str, Result]) -> Drawing:
    """The final accuracy of each label, ours with SEM next to the paper's.

    Args:
        results: the Results of one run, by label.

    Example:
        paper_against_ours(read_run("runs/paper").results).to_csv()
    """
    figure = new_figure(WIDTH, ROW * len(results) + 1.2)
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    look = looks(results)
    for position, (label, result) in enumerate(results.items()):
        ours, paper = final(result), paper_value(result)
        colour = look[label].colour
        rule(axes, y=position, strength=0.08)
        axes.errorbar([100 * ours.mean], [position], xerr=[100 * ours.sem], color=colour, elinewidth=1.4, **OURS)
        if paper is not None:
            axes.plot([paper[0]], [position], color=colour, **PAPER)
        theirs = paper[0] if paper is not None else ""
        rows.append((label, 100 * ours.mean, 100 * ours.sem, ours.num_trials, theirs))
        gap = number(100 * ours.mean - paper[0], 2) if paper is not None else "–"
        numbers.append((label, percent(ours), "–" if paper is None else f"{paper[0]:.2f}", gap))
    _rows(axes, list(range(len(results))), list(results))
    tidy(axes, "average accuracy after the last task, %")
    axes.tick_params(axis="y", length=0)
    axes.set_title(where_from(results), fontsize=MEDIUM)
    legend_below(figure, _marks(True, "ours, with SEM"))
    return Drawing(
        "paper",
        "The paper's numbers against ours",
        "After the last task. Filled: ours, with one standard error. Hollow: the paper's Table I.",
        figure,
        (label_heading(results), "accuracy %", "SEM", "trials", "paper %"),
        rows,
        Table("Final average accuracy in %", (label_heading(results), "ours", "paper", "ours − paper"), numbers),
    )


def _rows(axes: Axes, positions: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_yticks(positions[: len(labels)], labels)
    axes.set_ylim(positions[-1] + 0.6, -0.6)
    axes.spines["left"].set_visible(False)


def _marks(with_paper: bool, ours: str) -> list[Artist]:
    from matplotlib.lines import Line2D

    mine: Artist = Line2D([], [], color=INK, lw=1.4, label=ours, **OURS)
    return [mine, paper_mark()] if with_paper else [mine]


def _has_paper(pairs: Sequence[Pair]) -> bool:
    return any(pair.paper is not None for pair in pairs)


def _columns(with_benchmark: bool) -> tuple[str, ...]:
    return (*(["benchmark"] if with_benchmark else []), "difference", "points", "95% interval", "pairs", "paper")


def _in_words(pair: Pair, benchmarks: Sequence[str]) -> tuple[str, ...]:
    e = pair.accuracy
    interval = "–" if e.low != e.low else f"[{100 * e.low:+.2f}, {100 * e.high:+.2f}]"
    mean = "–" if e.mean != e.mean else f"{100 * e.mean:+.2f}"
    paper = "–" if pair.paper is None else f"{pair.paper:+.2f}"
    first = [pair.benchmark] if len(benchmarks) > 1 else []
    return (*first, f"{pair.label} − {pair.baseline_label}", mean, interval, str(e.num_trials), paper)
