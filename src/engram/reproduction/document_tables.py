"""The tables of docs/reproduction.md, each a function of the sheets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, reason
from engram.common.files import read_json
from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS
from engram.config.presets import CHOOSING, preset, title_of
from engram.report.layout import Table, number
from engram.report.pairs import Pair, baseline_of
from engram.report.tables import with_error
from engram.reproduction.study import BASE, CONTROL, PLASTIC, changes_of
from engram.reproduction.verdicts import FEWEST_PAIRS, Sheets, chance, judge, points, where
from engram.runs import metrics
from engram.runs.result import DAMAGE, Result

NEAR = 3  # points within which a baseline counts as the paper's


def read_selection(results: Path) -> dict[str, Any]:
    path = results / "selection.json"
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), dict):
        raise InputError(f"{path} is not a selection of Engram, or is damaged")
    return dict(content["benchmarks"])


def baseline_table(sheets: Sheets) -> Table:
    """How far the methods without DHP are from the paper's."""
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        sheet = sheets.get((benchmark, "table"))
        for method, result in {} if sheet is None or sheet.missing else sheet.entries.items():
            if not result.config.plastic:
                accuracy = metrics.estimate(result.average_accuracy[:, -1])
                distance = 100 * accuracy.mean - PAPER_RESULTS[benchmark][method][0]
                near = "yes" if abs(distance) <= NEAR else "no"
                last = metrics.estimate(result.latest_task[:, -1])
                rows.append((f"{title_of(benchmark)}: {method}", f"{distance:+.2f}", near, number(100 * last.mean, 1)))
    columns = ("", "ours less the paper's", f"within {NEAR} points", "last task when just learned, %")
    return Table("The baselines, in points of accuracy", columns, rows)


def to_the_left(table: Table) -> str:
    """Of words, which read badly from the right."""
    return table.to_markdown().replace("---:", "---")


def differences(found: Sequence[Pair], title: str, against_paper: bool = True) -> Table:
    rows = [
        (
            f"{title_of(pair.benchmark)}: {pair.method}",
            "–" if pair.paper is None else f"{pair.paper:+.2f}",
            points(pair.accuracy),
            f"{chance(pair.accuracy):.1g}" if pair.accuracy.num_trials >= FEWEST_PAIRS else "–",
            str(pair.accuracy.num_trials),
            judge(pair.accuracy, 1 if pair.paper is None else pair.paper) if against_paper else where(pair.accuracy),
        )
        for pair in found
    ]
    title = f"{title}, less the same method without it: points of accuracy, paired by trial"
    last = "the paper's difference is" if against_paper else "the interval is"
    return Table(title, ("", "paper", "ours, 95% interval", "p", "pairs", last), rows)


def control_table(sheets: Sheets, benchmark: str) -> Table:
    """The steady trace against a constant one of its size, which lets the layer learn as fast and knows nothing."""
    entries = sheets[benchmark, "study"].entries
    rows = []
    for method in PLASTIC:
        steady = entries[f"steady trace: {method}"].average_accuracy[:, -1]
        name = baseline_of(method)
        usual, control = (entries[f"{change}: {name}"].average_accuracy[:, -1] for change in (BASE, CONTROL))
        differences = (metrics.paired_difference(*pair) for pair in ((control, usual), (steady, control)))
        rows.append((name, *map(points, differences)))
    columns = ("", "a constant trace adds to the baseline", "the steady trace adds to that")
    title = f"The control, {title_of(benchmark)} as in the study: points of accuracy, paired by trial"
    return Table(title, columns, rows)


def worst_table(sheets: Sheets) -> Table:
    """A mean can hide a trial that went wrong: the lowest of all trials, with the steady trace and without."""
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        table, variant = (sheets.get((benchmark, part)) for part in ("table", "variant"))
        for method, result in {} if table is None or variant is None else variant.entries.items():
            assert table is not None
            pair = (table.entries[baseline_of(method)], result)
            rows.append((f"{title_of(benchmark)}: {method}", *map(_worst, pair)))
    return Table("The worst trial, accuracy in %", ("", "without DHP", "with the steady trace"), rows)


def _worst(result: Result) -> str:
    return "diverged" if result.diverged else number(100 * float(result.average_accuracy[:, -1].min()), 2)


def diverged_table(sheets: Sheets) -> Table:
    """Where trials were lost: they are left out of every mean, and their pairs out of every difference."""
    rows = []
    for (benchmark, part), sheet in sheets.items():
        for method, result in sheet.entries.items() if part in ("table", "variant") else ():
            if result.diverged:
                lost = Counter(divergence.task + 1 for divergence in result.diverged)
                where = ", ".join(f"{lost[task]} in task {task}" for task in sorted(lost))
                form = f"{method}, steady trace" if part == "variant" else method
                rows.append(
                    (f"{title_of(benchmark)}: {form}", f"{len(result.diverged)} of {len(result.accuracy)}", where)
                )
    return Table("Trials that diverged", ("", "trials", "when"), rows)


def sensitivity_table(sheets: Sheets) -> Table:
    columns = [benchmark for benchmark in PAPER_BENCHMARKS if (benchmark, "sensitivity") in sheets]
    labels = list(sheets[columns[0], "sensitivity"].entries)
    rows = []
    for label in labels:
        cells = []
        for benchmark in columns:
            accuracy = metrics.estimate(sheets[benchmark, "sensitivity"].entries[label].average_accuracy[:, -1])
            cells.append(with_error(accuracy))
        rows.append((label, *cells))
    title = "DHP alone, accuracy in % after all tasks ± SEM, five trials"
    return Table(title, ("initial value", *(title_of(benchmark) for benchmark in columns)), rows)


def _grids(sheets: Sheets, benchmark: str) -> dict[str, dict[float, float]]:
    """For each method the accuracy in % at each strength."""
    grids: dict[str, dict[float, float]] = {}
    for result in sheets[benchmark, "strengths"].entries.values():
        assert result.config.strength is not None
        grids.setdefault(result.config.method, {})[result.config.strength] = 100 * float(result.average_accuracy[0, -1])
    return grids


def grid_leads(sheets: Sheets, benchmark: str) -> tuple[int, int]:
    """In how many penalties DHP is ahead, each method at the best strength of its grid; and of how many."""
    grids = _grids(sheets, benchmark)
    plastic = [method for method in grids if method.startswith("dhp+")]
    won = sum(max(grids[method].values()) > max(grids[baseline_of(method)].values()) for method in plastic)
    return won, len(plastic)


def strength_tables(sheets: Sheets) -> list[Table]:
    """For each grid the best strength of each method, beside the paper's."""
    tables = []
    for benchmark in PAPER_BENCHMARKS:
        if (benchmark, "strengths") not in sheets:
            continue
        rows = []
        for method, grid in _grids(sheets, benchmark).items():
            best = max(grid, key=lambda strength: grid[strength])
            edge = " (at the edge)" if best in (min(grid), max(grid)) else ""
            papers = preset(benchmark, method).strength
            assert papers is not None
            curve = ", ".join(f"{strength:g}: {accuracy:.1f}" for strength, accuracy in sorted(grid.items()))
            rows.append((method, f"{best:g}{edge}", f"{grid[best]:.2f}", f"{papers:g}", f"{grid[papers]:.2f}", curve))
        columns = ("method", "best λ", "accuracy %", "paper's λ", "accuracy %", "all")
        tables.append(Table(f"{title_of(benchmark)}, one seed, validation samples", columns, rows))
    return tables


def study_table(sheets: Sheets, benchmark: str) -> Table:
    """Changes down; for each method without DHP its accuracy, and what DHP adds to it with the same change."""
    sheet = sheets[benchmark, "study"]
    rows = []
    for change, made in changes_of(benchmark).items():
        cells = []
        for method in PLASTIC:
            plastic = sheet.entries.get(f"{change}: {method}") or sheet.entries[f"{made.beside}: {method}"]
            name = baseline_of(method)
            baseline = sheet.entries.get(f"{change}: {name}") or sheet.entries[f"{made.beside}: {name}"]
            if f"{change}: {method}" not in sheet.entries and f"{change}: {name}" not in sheet.entries:
                cells += ["", ""]
                continue
            gain = metrics.paired_difference(plastic.average_accuracy[:, -1], baseline.average_accuracy[:, -1])
            ours = metrics.estimate(baseline.average_accuracy[:, -1])
            cells += [number(100 * ours.mean, 2), points(gain)]
        rows.append((change, *cells))
    columns = [word for method in PLASTIC for word in (baseline_of(method), "DHP adds")]
    config = next(iter(sheet.entries.values())).config
    models, trials = num_models(sheets, benchmark, "study"), f"{config.trials} trials, a seed of its own"
    title = f"{title_of(benchmark)}, {config.num_tasks} tasks: {models} networks, {trials}"
    return Table(title, ("change", *columns), rows)


def num_models(sheets: Sheets, benchmark: str, part: str) -> int:
    return sum(len(result.accuracy) for result in sheets[benchmark, part].entries.values())


def selection_tables(results: Path) -> list[Table]:
    """What was tried before the choice."""
    found = read_selection(results)
    try:
        return _selection_tables(found)
    except DAMAGE as error:
        path = results / "selection.json"
        raise InputError(f"{path} is not a selection of Engram, or is damaged ({reason(error)})") from error


def _selection_tables(selection: Mapping[str, Any]) -> list[Table]:
    tables = []
    for benchmark, found in selection.items():
        candidates = found["candidates"]
        baselines = candidates["baselines"]["accuracy"]
        rows = []
        for name, candidate in candidates.items():
            cells = []
            for method, values in candidate["accuracy"].items():
                gain = metrics.estimate([a - b for a, b in zip(values, baselines[baseline_of(method)], strict=True)])
                mean = metrics.estimate(values).mean
                cells.append(number(mean, 2) if name == "baselines" else f"{gain.mean:+.2f} ± {gain.sem:.2f}")
            rows.append((name, *cells))
        own = {name: value for name, value in found["settings"].items() if name not in CHOOSING}
        words = ", ".join(f"{name} {value}" for name, value in own.items())
        columns = ("candidate", "finetune", "si", "online-ewc", "mas")
        tables.append(Table(f"{title_of(benchmark)}, validation samples, {words}: points added ± SEM", columns, rows))
    return tables


def data_table(sheets: Sheets) -> Table:
    seen: dict[str, tuple[str, ...]] = {}
    for sheet in sheets.values():
        for record in sheet.about["data"]:
            how = "the published files" if record["origin"] == "published" else "of the published form, other files"
            seen[record["name"]] = (record["name"], how, f"{record['train']:,} + {record['test']:,}")
    return Table("Data", ("dataset", "files", "training + test samples"), list(seen.values()))


def times_table(sheets: Sheets) -> Table:
    rows = []
    for (benchmark, part), sheet in sheets.items():
        about = sheet.about
        where = str(about.get("gpu") or f"{about['device']}, {about.get('threads')} threads")
        rows.append(
            (
                f"{title_of(benchmark)}: {part}",
                str(num_models(sheets, benchmark, part)),
                f"{about['seconds']:.0f}",
                where,
            )
        )
    commands = dict.fromkeys(str(sheet.about["command"]) for sheet in sheets.values())
    remarks = [f"{title_of(b)}, {part}: {s.about['note']}." for (b, part), s in sheets.items() if "note" in s.about]
    notes = ("\n".join(["```", *commands, "```"]), *remarks)
    return Table("Seconds of computing, of each part", ("part", "networks", "seconds", "on"), rows, notes)
