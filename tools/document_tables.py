"""The tables that only the documents have: `write_results.py` puts them there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engram.common.errors import InputError
from engram.common.files import read_json
from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import title_of
from engram.report.layout import Table, number
from engram.report.pairs import Pair, accuracy_difference, baseline_of, mean_accuracy_difference
from engram.report.tables import final, with_error
from engram.reproduction.divergence import when_diverged
from engram.reproduction.folder import missing_from_part
from engram.reproduction.ladder import (
    ENDINGS,
    GRID,
    Runs,
    grid_rounds,
    of_one_initialisation,
    rounds_of,
    scores_of,
    with_one_budget,
    with_own_strength,
)
from engram.reproduction.rungs import paper_difference, rung_pairs, rung_results
from engram.reproduction.search import best_point, settings_at
from engram.reproduction.study import BASE, CONTROL, PLASTIC, changes_of
from engram.reproduction.verdicts import FEWEST_PAIRS, chance, judge, points, where
from engram.runs import metrics
from engram.runs.metrics import Estimate
from engram.runs.result import Result

NEAR = 3  # points within which a baseline counts as the paper's


# --- the ladder


def heads_table(runs: Runs, heads: Sequence[str], title: str) -> Table:
    """Each head minus the plain one on rung 4: alone, and with each penalty.

    Args:
        runs: those of a reproduction.
        heads: a column for each.
        title: of the table.

    Example:
        >>> print(heads_table(read_reproduction("results").runs, ["dhp", "steady"], "Rung 4").to_text())
    """
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        found = {head: {p.label: p for p in rung_pairs(runs, benchmark, 4, "linear", head)} for head in heads}
        for ending in ENDINGS:
            cells = [points(found[h][h + ending].accuracy) if h + ending in found[h] else "–" for h in heads]
            if any(cell != "–" for cell in cells):
                rows.append((f"{title_of(benchmark)}: {ending.removeprefix('+') or 'alone'}", *cells))
    return Table(f"{title}, minus the plain head, points of accuracy with 95% intervals", ("", *heads), rows)


def best_settings(runs: Runs) -> dict[str, dict[str, dict[str, Any]]]:
    """The settings of each method that were best on validation samples, by benchmark and method.

    They are those of rung 4; where it has not been run, those of the grids over strengths, at the paper's learning rate
    and with the better of both initialisations.

    Args:
        runs: those of a reproduction.

    Example:
        >>> best_settings(read_reproduction("results").runs)["split-mnist"]["linear+si"]["learning_rate"]
        0.03
    """
    best: dict[str, dict[str, dict[str, Any]]] = {}
    for benchmark in PAPER_BENCHMARKS:
        final = runs.get((benchmark, "rung-4"))
        grid = rounds_of(runs, benchmark, GRID)
        if final is not None and final.finished:
            best[benchmark] = {
                each.config.method: {
                    "head_init": each.config.head_init,
                    **{axis.name: getattr(final.configs[each.label], axis.name) for axis in each.axes},
                }
                for each in with_one_budget(benchmark)
                if each.label in final.configs
            }
        elif len(grid) == len(grid_rounds(benchmark)):
            found: dict[str, tuple[float, dict[str, Any]]] = {}
            for each in (*with_own_strength(benchmark), *of_one_initialisation(benchmark)):
                scores = scores_of(each, grid, grid_rounds(benchmark))
                if scores and max(scores.values()) > found.get(each.config.method, (-math.inf,))[0]:
                    settings = {"head_init": each.config.head_init, **settings_at(each.axes, best_point(scores))}
                    found[each.config.method] = (max(scores.values()), settings)
            best[benchmark] = {method: settings for method, (_, settings) in found.items()}
    return best


def gain_of_start(runs: Runs) -> Estimate:
    """What plain heads gain when they start as large as the published layer, each at its own best strength: the mean.

    Args:
        runs: those of a reproduction.

    Example:
        >>> gain_of_start(read_reproduction("results").runs).mean
    """
    found = []
    for benchmark in PAPER_BENCHMARKS:
        larger, usual = (rung_results(runs, benchmark, rung) for rung in (3, 2))
        labels = [label for label in larger if label in usual and label.startswith("linear")]
        found += [Pair(label, label, larger[label], usual[label]) for label in labels]
    return mean_accuracy_difference(found)


def behind_in_the_grids(runs: Runs, benchmark: str, initial: str) -> str:
    """How many points DHP is behind a plain head where strengths are chosen, each at its best: from least to most.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.
        initial: how the plain head starts, "linear" or "published".

    Example:
        >>> behind_in_the_grids(read_reproduction("results").runs, "vision-mixture", "linear")
        '5.6 to 7.5'
    """
    rounds = rounds_of(runs, benchmark, GRID)
    contestants = (*with_own_strength(benchmark), *of_one_initialisation(benchmark))
    best = {
        (each.config.method, each.config.head_init): max(scores_of(each, rounds, grid_rounds(benchmark)).values())
        for each in contestants
        if each.axes
    }
    behind = [best[f"linear{ending}", initial] - best[f"dhp{ending}", "published"] for ending in ENDINGS[1:]]
    return f"{100 * min(behind):.1f} to {100 * max(behind):.1f}"


def cells_within(runs: Runs, limit: float) -> tuple[int, int]:
    """How many cells of the paper's Table I rung 1 has within so many points, and how many it has at all.

    Args:
        runs: those of a reproduction.
        limit: in points of accuracy.

    Example:
        >>> near, all_cells = cells_within(read_reproduction("results").runs, 1.0)
    """
    near = total = 0
    for benchmark in PAPER_BENCHMARKS:
        found = rung_results(runs, benchmark, 1)
        for method, (accuracy, _) in PAPER_RESULTS[benchmark].items():
            ours = found.get(_on_rung_1(method))
            if ours is not None and not ours.diverged:
                total += 1
                near += abs(100 * float(ours.average_accuracy[:, -1].mean()) - accuracy) <= limit
    return near, total


def gains_within(runs: Runs, limit: float) -> tuple[int, int]:
    """The same for the paper's differences between DHP and its baselines.

    Example:
        >>> near, all_gains = gains_within(read_reproduction("results").runs, 1.0)
    """
    pairs = [pair for name in PAPER_BENCHMARKS for pair in rung_pairs(runs, name, 1, "linear")]
    both = [(100 * pair.accuracy.mean, paper_difference(pair.result.config)) for pair in pairs]
    known = [(ours, theirs) for ours, theirs in both if theirs is not None and not math.isnan(ours)]
    return sum(abs(ours - theirs) <= limit for ours, theirs in known), len(known)


def _on_rung_1(method: str) -> str:
    """The paper's method as rung 1 names it: its baselines are plain heads."""
    if method.startswith("dhp"):
        return method
    return "linear" if method == "finetune" else f"linear+{method}"


# --- Table I, the steady trace, the study


def baseline_table(runs: Runs) -> Table:
    """How far the methods without DHP are from the paper's."""
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        run = runs.get((benchmark, "table"))
        for method, result in {} if run is None or missing_from_part(run) else run.results.items():
            if not result.config.plastic:
                accuracy = final(result)
                distance = 100 * accuracy.mean - PAPER_RESULTS[benchmark][method][0]
                near = "yes" if abs(distance) <= NEAR else "no"
                last = metrics.estimate(result.latest_task[:, -1])
                rows.append((f"{title_of(benchmark)}: {method}", f"{distance:+.2f}", near, number(100 * last.mean, 1)))
    columns = ("", "ours minus the paper's", f"within {NEAR} points", "last task when just learned, %")
    return Table("The baselines, in points of accuracy", columns, rows)


def differences(found: Sequence[Pair], title: str, against_paper: bool = True) -> Table:
    """Paired differences, with p; and the verdict on the paper's difference, or else where our interval lies."""
    rows = [
        (
            f"{title_of(pair.benchmark)}: {pair.label}",
            "–" if pair.paper is None else f"{pair.paper:+.2f}",
            points(pair.accuracy),
            f"{chance(pair.accuracy):.1g}" if pair.accuracy.num_trials >= FEWEST_PAIRS else "–",
            str(pair.accuracy.num_trials),
            judge(pair.accuracy, 1 if pair.paper is None else pair.paper) if against_paper else where(pair.accuracy),
        )
        for pair in found
    ]
    title = f"{title}, minus the same method without it: points of accuracy, paired by trial"
    last = "the paper's difference is" if against_paper else "the interval is"
    return Table(title, ("", "paper", "ours, 95% interval", "p", "pairs", last), rows)


def control_table(runs: Runs, benchmark: str) -> Table:
    """The steady trace against a constant trace of its size, with which the layer learns as fast but stores nothing."""
    results = runs[benchmark, "study"].results
    rows = []
    for method in PLASTIC:
        steady = results[f"steady trace: {method}"]
        name = baseline_of(method)
        usual, control = (results[f"{change}: {name}"] for change in (BASE, CONTROL))
        gained = accuracy_difference(control, usual), accuracy_difference(steady, control)
        rows.append((name, *map(points, gained)))
    columns = ("", "a constant trace adds to the baseline", "the steady trace adds to that")
    title = f"The control, {title_of(benchmark)} as in the study: points of accuracy, paired by trial"
    return Table(title, columns, rows)


def worst_table(runs: Runs) -> Table:
    """The worst trial with the steady trace and without: a mean can hide a trial that went wrong."""
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        table, variant = (runs.get((benchmark, part)) for part in ("table", "variant"))
        for method, result in {} if table is None or variant is None else variant.results.items():
            assert table is not None
            pair = (table.results[baseline_of(method)], result)
            rows.append((f"{title_of(benchmark)}: {method}", *map(_worst, pair)))
    return Table("The worst trial, accuracy in %", ("", "without DHP", "with the steady trace"), rows)


def _worst(result: Result) -> str:
    return "diverged" if result.diverged else number(100 * float(result.average_accuracy[:, -1].min()), 2)


def diverged_table(runs: Runs) -> Table:
    """Where trials diverged: they are left out of every mean, and their pairs out of every difference."""
    rows = []
    for (benchmark, part), run in runs.items():
        for method, result in run.results.items() if part in ("table", "variant") else ():
            if result.diverged:
                form = f"{method}, steady trace" if part == "variant" else method
                rows.append((f"{title_of(benchmark)}: {form}", *when_diverged(result).split(", ", 1)))
    return Table("Trials that diverged", ("", "trials", "when"), rows)


def sensitivity_table(runs: Runs) -> Table:
    columns = [benchmark for benchmark in PAPER_BENCHMARKS if (benchmark, "sensitivity") in runs]
    labels = list(runs[columns[0], "sensitivity"].results)
    rows = []
    for label in labels:
        cells = []
        for benchmark in columns:
            cells.append(with_error(final(runs[benchmark, "sensitivity"].results[label])))
        rows.append((label, *cells))
    title = "DHP alone, accuracy in % after all tasks ± SEM, five trials"
    return Table(title, ("initial value", *(title_of(benchmark) for benchmark in columns)), rows)


def study_table(runs: Runs, benchmark: str) -> Table:
    """A row for each change: the accuracy of each method without DHP, and what DHP adds to it with the same change."""
    run = runs[benchmark, "study"]
    rows = []
    for change, made in changes_of(benchmark).items():
        cells = []
        for method in PLASTIC:
            plastic = run.results.get(f"{change}: {method}") or run.results[f"{made.compared_with}: {method}"]
            name = baseline_of(method)
            baseline = run.results.get(f"{change}: {name}") or run.results[f"{made.compared_with}: {name}"]
            if f"{change}: {method}" not in run.results and f"{change}: {name}" not in run.results:
                cells += ["", ""]
                continue
            cells += [number(100 * final(baseline).mean, 2), points(accuracy_difference(plastic, baseline))]
        rows.append((change, *cells))
    columns = [word for method in PLASTIC for word in (baseline_of(method), "DHP adds")]
    config = next(iter(run.results.values())).config
    models, trials = run.num_models, f"{config.trials} trials, with its own seed"
    title = f"{title_of(benchmark)}, {config.num_tasks} tasks: {models} networks, {trials}"
    return Table(title, ("change", *columns), rows)


def data_table(runs: Runs) -> Table:
    seen: dict[str, tuple[str, ...]] = {}
    for run in runs.values():
        for record in run.about["data"]:
            how = "the published files" if record["origin"] == "published" else "of the published form, other files"
            seen[record["name"]] = (record["name"], how, f"{record['train']:,} + {record['test']:,}")
    return Table("Data", ("dataset", "files", "training + test samples"), list(seen.values()))


def times_table(runs: Runs) -> Table:
    """How long each run took, on which device, and with which command."""
    rows = []
    for (benchmark, part), run in runs.items():
        environment = run.about["environment"]
        where = environment.get("gpu") or f"{environment['device']}, {environment.get('threads')} threads"
        rows.append((f"{title_of(benchmark)}: {part}", str(run.num_models), f"{run.about['seconds']:.0f}", where))
    commands = dict.fromkeys(str(run.about["command"]) for run in runs.values())
    remarks = [f"{title_of(b)}, {part}: {run.about['note']}." for (b, part), run in runs.items() if "note" in run.about]
    notes = ("\n".join(["```", *commands, "```"]), *remarks)
    return Table("Seconds of computing, of each run", ("run", "networks", "seconds", "on"), rows, notes)


def read_selection(results: Path) -> dict[str, Any]:
    path = results / "selection.json"
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), dict):
        raise InputError(f"{path} is not a selection of Engram, or is damaged")
    return dict(content["benchmarks"])


def num_selected(folder: Path) -> int:
    """How many networks were trained to choose the form of the steady trace."""
    return sum(
        len(values)
        for found in read_selection(folder).values()
        for candidate in found["candidates"].values()
        for values in candidate["accuracy"].values()
    )
