"""The page of a run: its tables, its figures, how it was made, and what it lacks."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from engram.config.methods import CUSTOM, in_words, known_methods, parts_of
from engram.config.presets import changes_from_preset, form_of_head, title_of, with_scenario
from engram.report.figures import draw_run
from engram.report.html.page import (
    Html,
    Section,
    code,
    facts,
    figure,
    figures,
    folded,
    heading,
    notice,
    paragraph,
    render,
    side_by_side,
    table,
)
from engram.report.layout import Table, count, data_table, device_of, gathered, in_short, time_taken, versions_table
from engram.report.pairs import baseline_label, has_paper_data
from engram.report.sweep_table import (
    best_results,
    how_searched,
    is_sweep,
    run_tables,
    sweep_tables,
    tried_in,
    verdict,
)
from engram.report.tables import diverged, run_verdict, unfinished
from engram.runs.result import Result
from engram.runs.run import Run

Results = Mapping[str, Result]
NOT_SETTINGS = ("benchmark", "method")
MISSING = "What is missing"
MOST_POINTS = 100  # of each method of a sweep, in the table of its page


def run_page(run: Run) -> str:
    """One page of all labels of a run.

    Args:
        run: a run that has results, finished or not.

    Example:
        Path("report.html").write_text(run_page(read_run("runs/demo")), encoding="utf-8")
    """
    if is_sweep(run):
        return _sweep_page(run)
    missing = missing_from_run(run)
    config = next(iter(run.configs.values()))
    sections = [
        Section("results", "Results", table_blocks(run_tables(run), missing)),
        Section("figures", "Figures", [figures(draw_run(run), "figure")]),
        Section("methods", "The methods", method_blocks(run.results)),
        Section("settings", "Settings and versions", made_with(run)),
        *missing_section(missing),
    ]
    return render(
        "Engram, report of a run",
        with_scenario(title_of(config.benchmark), config),
        f"How well each method still knows {_tasks(run.results)} of {config.dataset} after learning them in turn.",
        [*verdict_blocks(run), facts(_facts(run))],
        sections,
    )


def _sweep_page(run: Run) -> str:
    """Which settings are best, everything that was tried, how it was searched, and how to repeat it."""
    missing = missing_from_run(run)
    config = next(iter(run.configs.values()))
    tried, best = ([each for each in draw_run(run) if (each.name == "sweep") == is_sweep] for is_sweep in (True, False))
    made = made_with(run)
    tables = table_blocks(sweep_tables(run, MOST_POINTS, "the numbers of the picture"), missing)
    sections = [
        Section("points", "All points", [*(figure(each, f"figure-{each.name}") for each in tried), *tables]),
        Section("search", "How it was searched", [paragraph(text) for text in how_searched(run)]),
        Section("best", "The best points", [figures(best, "figure")]),
        Section("methods", "The methods", method_blocks(run.results)),
        Section("repeat", "How to repeat it", [*made[:-1], *_best_runs(run), made[-1]]),
        *missing_section(missing),
    ]
    methods = ", ".join(tried_in(run))
    return render(
        "Engram, report of a sweep",
        with_scenario(title_of(config.benchmark), config),
        f"Which settings of {methods} are best for {_tasks(run.results)} of {config.dataset}, learned in turn.",
        [*verdict_blocks(run), facts(_facts(run))],
        sections,
    )


def verdict_blocks(run: Run) -> list[Html]:
    """What a run found, in a paragraph; of a sweep, one for each method."""
    if is_sweep(run):
        said = [verdict(tried, run.finished) for tried in tried_in(run).values()]
    else:
        said = [" ".join(run_verdict(run.results, run.finished))]
    return [paragraph(text, "verdict") for text in said]


def method_blocks(results: Results) -> list[Html]:
    """What each method is, and how it was measured and compared."""
    return [table(methods_table(results), "words"), *map(paragraph, how_measured(results))]


def methods_table(results: Results) -> Table:
    """What each method is, in a sentence.

    Example:
        print(methods_table(read_run("runs/demo").results).to_text())
    """
    configs = [result.config for result in results.values()]
    rows = dict.fromkeys((config.method, in_words(config.method)) for config in configs)
    heads = dict.fromkeys(config.baseline_head for config in configs if parts_of(config.method).head is None)
    notes = [f"A method that names no head has the head {head}. {in_words(head)}" for head in heads]
    if any(form_of_head(config, in_full=False) for config in configs):
        notes.append("The trace of dhp is the steady form: slow, centred and read at a fixed size.")
    return Table("What each method is", ("method", "what it is"), list(rows), tuple(notes))


def how_measured(results: Results) -> list[str]:
    """How methods were tested and compared: a paragraph each."""
    held_out = next(iter(results.values())).config.examine == "validation"
    samples = "training samples that were held out" if held_out else "the test samples"
    return [
        f"The tasks are learned in turn. After each of them, a method is tested on all tasks so far, on {samples}. "
        "ACC is the mean accuracy over all tasks after the last. BWT is how much the accuracy on a task has changed "
        "since it was learned, as a mean over tasks: below zero is forgetting.",
        "± is one standard error over trials. Intervals hold 95% by Student's t. Two methods are compared trial by "
        "trial, since a trial has the same tasks and the same order of samples in both. Where the interval of their "
        "difference includes zero, they cannot be told apart.",
    ]


def missing_section(sentences: Sequence[str]) -> list[Section]:
    """The last part of a page; none where nothing is missing."""
    return [Section("missing", MISSING, [notice("", sentences)])] if sentences else []


def _best_runs(run: Run) -> list[Html]:
    """The commands that run the best points, as far as their settings were written."""
    files = [run.path / f"best-{method}.toml" for method in tried_in(run)]
    commands = [f"engram run {shlex.quote(str(file))}" for file in files if file.is_file()]
    if not commands:
        return []
    return [heading("The best points, on the test samples and with the preset's seed"), code("\n".join(commands))]


def runs_page(title: str, runs: Mapping[str, Run], unreadable: Mapping[str, str]) -> str:
    """One page of several runs, a section each.

    Args:
        title: of the page.
        runs: the runs by name, such as `open_runs` returns for a folder of runs; at least one has results.
        unreadable: why others cannot be shown, by name.

    Example:
        runs_page("runs", open_runs("runs"), {})
    """
    with_results = {name: run for name, run in runs.items() if run.results}
    empty = [f"{name} has no results yet." for name in runs if name not in with_results]
    empty += [f"{name} cannot be shown: {reason}." for name, reason in unreadable.items()]
    sections = []
    for k, (name, run) in enumerate(with_results.items(), start=1):
        missing = missing_from_run(run)
        blocks = [*verdict_blocks(run), *table_blocks(run_tables(run), missing), figures(draw_run(run), f"run-{k}")]
        blocks += [*method_blocks(run.results), *made_with(run), notice(MISSING, missing)]
        sections.append(Section(f"run-{k}", name, blocks))
    lead = f"{count(len(with_results), 'run')}: how well each method still knows its tasks after learning them in turn."
    opening = [facts({"runs": str(len(runs) + len(unreadable))})]
    return render("Engram, report of several runs", title, lead, opening, [*sections, *missing_section(empty)])


def table_blocks(tables: Sequence[Table], already: Sequence[str] = ()) -> list[Html]:
    """Tables as blocks of a page. Notes that the page shows `already` are not repeated."""
    return [
        table(dataclasses.replace(made, notes=tuple(note for note in made.notes if note not in already)))
        for made in tables
    ]


def made_with(run: Run) -> list[Html]:
    """The command, settings, data and versions of a run, as blocks of a page."""
    blocks = [heading("The command"), code(str(run.about["command"]))] if run.about.get("command") else []
    made = (data_table(run.about), versions_table(run.about))
    facts = [table(content, "words") for content in made if content is not None]
    results = best_results(run)
    changed = [table(content, "words")] if (content := changes_table(results)) is not None else []
    settings = folded("All settings", [table(settings_table(results), "words")])
    return [*blocks, side_by_side([*changed, settings], facts)]


def missing_from_run(run: Run) -> list[str]:
    """What a reader might expect from a run and will not find, in sentences."""
    sentences = [] if run.finished else [f"The run is not finished: resume it with `engram run --resume {run.path}`."]
    sentences += [f"{label}: {problem}." for label, problem in run.problems.items()]
    sentences += [
        f"{label}: no trials so far."
        for label in run.configs
        if run.state(label) == "unfinished" and label not in run.results
    ]
    return sentences if is_sweep(run) else sentences + missing_from(run.results)


def missing_from(results: Results) -> list[str]:
    """What a reader might expect from results and will not find, in sentences."""
    sentences = unfinished(results)
    sentences += [
        f"{label}: {result.tasks_learned} of {result.config.num_tasks} tasks learned so far."
        for label, result in results.items()
        if result.tasks_learned < result.config.num_tasks
    ]
    sentences += diverged(results)
    plastic = {label: result for label, result in results.items() if result.config.plastic}
    baselines = {label: baseline_label(label, result) for label, result in plastic.items() if label in known_methods()}
    sentences += [
        f"{other} was not run, so {label} has no pair."
        for label, other in baselines.items()
        if other is not None and other not in results
    ]
    if without := [label for label, result in plastic.items() if not result.dynamics]:
        sentences.append(f"{in_short(without)}: no dynamics were saved.")
    if not plastic:
        sentences.append("No method with DHP was run, so there are no differences and no dynamics of the trace.")
    if all(len(result.accuracy) == 1 for result in results.values()):
        sentences.append("There is only one trial, so there are no standard errors and no intervals.")
    if all(result.config.num_tasks == 1 for result in results.values()):
        sentences.append("There is only one task, so there is no forgetting to measure, and BWT is empty.")
    config = next(iter(results.values())).config
    if config.benchmark != CUSTOM and not any(map(has_paper_data, results.values())):
        tasks = f"{with_scenario(config.benchmark, config)} with {_tasks(results)} of {config.dataset}"
        sentences.append(f"The paper has no numbers for {tasks}, so none are shown next to ours.")
    return sentences


def settings_table(results: Results, title: str = "Settings") -> Table:
    """Every setting, with the preset's value where it was changed; a value that not all labels share names them."""
    configs = {label: result.config for label, result in results.items()}
    changes = {label: changes_from_preset(config) for label, config in configs.items()}
    rows = []
    for name in next(iter(configs.values())).to_dict():
        if name not in NOT_SETTINGS:
            here = gathered((label, config.to_dict()[name]) for label, config in configs.items())
            usual = gathered((label, changed[name][1]) for label, changed in changes.items() if name in changed)
            rows.append((name, here, usual))
    if not any(usual for _, _, usual in rows):
        return Table(title, ("setting", "value"), [row[:2] for row in rows])
    return Table(title, ("setting", "value", "the preset's, where changed"), rows)


def changes_table(results: Results, title: str = "Settings that are not the preset's") -> Table | None:
    """The settings that were changed, and the preset's values; None if there are none."""
    rows = [row for row in settings_table(results).rows if len(row) == 3 and row[2]]
    return Table(title, ("setting", "value", "the preset's"), rows) if rows else None


def _facts(run: Run) -> dict[str, str]:
    results = run.results
    found = {
        "methods": str(len({result.config.method for result in results.values()})),
        "trials": str(max(len(result.accuracy) for result in results.values())),
        "tasks": str(max(result.config.num_tasks for result in results.values())),
    }
    if is_sweep(run):
        tried = [each for own in tried_in(run).values() for each in own]
        failed = sum(each.failed for each in tried)
        dropped = sum(not (each.finished or each.failed) for each in tried) if run.finished else 0
        counts = {"points": len(tried), "dropped": dropped, "failed": failed}
        found = {name: str(number) for name, number in counts.items() if number} | found
    if device := device_of(run.about):
        found["device"] = device
    if taken := time_taken(run.about):
        found["time"] = taken
    return found


def _tasks(results: Results) -> str:
    numbers = sorted({result.config.num_tasks for result in results.values()})
    if len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]} tasks"
    return "one task" if numbers == [1] else f"{numbers[0]} tasks"
