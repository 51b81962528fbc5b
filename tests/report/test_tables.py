"""Tables of small made-up results, whose every character is known."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders import labelled
from engram.cli.terminal import print_table
from engram.common.errors import Divergence
from engram.config.paper import PAPER_RESULTS
from engram.config.presets import preset
from engram.report.layout import Table
from engram.report.pairs import Pair, has_paper_data, mean_accuracy_difference, paper_value, why_not_paired
from engram.report.tables import COLUMNS, gains, so_far, summary, tables_of
from engram.runs.result import Result

NAN = math.nan
SMALL = {"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}
ABOUT = (
    "ACC: mean accuracy over all tasks, after the last. BWT: below zero is forgetting. "
    "first, last: accuracy on the first and on the last task, after the last."
)


def make_result(method: str, *finals: tuple[float, float], benchmark: str = "split-mnist", **changes: Any) -> Result:
    """Two tasks, the first learned to 0.9; `finals` has each trial's last row of the accuracy matrix."""
    settings: dict[str, Any] = {"dataset": "mnist-small", "num_tasks": 2, "trials": len(finals)} | changes
    return Result(
        config=preset(benchmark, method, **settings),
        trials=tuple(range(len(finals))),
        accuracy=np.array([[[0.9, NAN], row] for row in finals]),
        untrained=np.full((len(finals), 2), 0.5),
        data=[SMALL],
    )


FINETUNE = make_result("finetune", (0.5, 0.9), (0.6, 1.0))
DHP = make_result("dhp", (0.75, 0.95), (0.7, 1.0))


NUMBERS = ("ACC %", "± SEM", "BWT", "first %", "last %")
# What makes text of a table is tested with this one, which stays as it is when a summary has more columns.
ROWS = [("finetune", "75.00", "-0.350"), ("dhp", "5.00", "–")]
FORM = Table("Two methods", ("method", "ACC %", "BWT"), ROWS, ("One.", "Two."))


def cells(table: Table, *headings: str) -> list[tuple[str, ...]]:
    """Each row's label and its cells below these headings."""
    places = [0, *(table.columns.index(heading) for heading in headings)]
    return [tuple(row[place] for place in places) for row in table.rows]


def test_a_summary_is_worked_out_by_hand() -> None:
    # finetune: ACC 0.7 and 0.8, mean 0.75, SEM 0.05; BWT -0.4 and -0.3; dhp: ACC 0.85 and 0.85; BWT -0.15 and -0.2
    table = summary(labelled([FINETUNE, DHP]))
    assert table.title == "split-mnist on mnist-small, 2 tasks, 2 trials"
    assert table.columns == ("method", *(heading for heading, _ in COLUMNS))
    assert cells(table, *NUMBERS) == [
        ("finetune", "75.00", "5.00", "-0.350", "55.00", "95.00"),
        ("dhp", "85.00", "0.00", "-0.175", "72.50", "97.50"),
    ]
    assert table.notes == (
        ABOUT,
        "Changed from the preset (in parentheses): dataset mnist-small (mnist); num_tasks 2 (5).",
        "The heads' weights start differently: as nn.Linear's (linear) in finetune; "
        "as the paper's author published them (published) in dhp.",
    )


@pytest.mark.parametrize(
    ("method", "changes", "differently"),
    [
        ("dhp", {}, True),
        ("dhp", {"head_init": "linear"}, False),
        ("steady", {}, False),
        ("slda", {"head_init": "published"}, False),  # it has no weights
        ("slda+si", {"head_init": "published"}, True),
        ("linear", {"head_init": "published"}, True),
    ],
)
def test_a_summary_says_where_heads_start_differently(method: str, changes: dict[str, Any], differently: bool) -> None:
    notes = summary(labelled([FINETUNE, make_result(method, (0.75, 0.95), **changes)])).notes
    assert any(note.startswith("The heads' weights start differently") for note in notes) == differently


def test_markdown_is_exact() -> None:
    assert FORM.to_markdown() == (
        "**Two methods**\n"
        "\n"
        "| method | ACC % | BWT |\n"
        "|---|---:|---:|\n"
        "| finetune | 75.00 | -0.350 |\n"
        "| dhp | 5.00 | – |\n"
        "\n"
        "One.\n"
        "\n"
        "Two.\n"
    )


def test_csv_is_exact() -> None:
    assert FORM.to_csv() == "method,ACC %,BWT\nfinetune,75.00,-0.350\ndhp,5.00,–\n"


def test_text_is_exact() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    print_table(FORM, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == [
        "Two methods",
        "",
        "  method    ACC %     BWT",
        " ─────────────────────────",
        "  finetune  75.00  -0.350",
        "  dhp        5.00       –",
        "",
        "One.",
        "Two.",
    ]


def make_paper_result(method: str, benchmark: str = "split-mnist", **changes: Any) -> Result:
    """A result on the paper's own tasks, everything half right."""
    config = preset(benchmark, method, **({"trials": 2} | changes))
    shape = (config.trials, config.num_tasks)
    return Result(config, tuple(range(config.trials)), np.full((*shape, shape[1]), 0.5), np.full(shape, 0.1))


def test_nothing_is_cut_off_on_a_terminal_of_80_columns() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    results = [make_paper_result("online-ewc"), make_paper_result("dhp+online-ewc")]
    for k in (0, 1):
        results[k].accuracy[:] = 0.99
        results[k].accuracy[:, -1] = [[0.8 + 0.05 * k] * 5, [0.82 + 0.06 * k] * 5]
    for table in (summary(labelled(results)), gains(labelled(results))):
        assert table is not None
        print_table(table, console)
    text = console.file.getvalue()
    assert "…" not in text
    notes = {
        note
        for table in (summary(labelled(results)), gains(labelled(results)))
        if table is not None
        for note in table.notes
    }
    assert all(len(line) <= 80 for line in text.splitlines() if line not in notes)
    for word in ("paper %", "paper BWT", "97.65", "-0.03", "98.96", "dhp+online-ewc", "pairs"):
        assert word in text


def test_a_table_of_special_characters_is_still_csv() -> None:
    table = Table("t", ("a", "b"), [('x,"y"', "1\n2")])
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [["a", "b"], ['x,"y"', "1\n2"]]


def test_the_papers_values_stand_beside_the_papers_data() -> None:
    table = summary(labelled([make_paper_result("finetune"), make_paper_result("ewc")]))
    assert table.columns[-2:] == ("paper %", "paper BWT")
    assert [row[-2:] for row in table.rows] == [("90.43", "-0.13"), ("–", "–")]  # the paper has no plain EWC


@pytest.mark.parametrize("benchmark", PAPER_RESULTS)
@pytest.mark.parametrize("method", PAPER_RESULTS["split-mnist"])
def test_the_papers_values_are_those_of_the_benchmark_and_method(benchmark: str, method: str) -> None:
    accuracy, transfer = PAPER_RESULTS[benchmark][method]
    assert summary(labelled([make_paper_result(method, benchmark)])).rows[0][-2:] == (
        f"{accuracy:.2f}",
        f"{transfer:.2f}",
    )


def test_other_epochs_are_noted_beside_the_papers_values() -> None:
    table = summary(labelled([make_paper_result("finetune", epochs=1)]))
    assert table.columns[-2:] == ("paper %", "paper BWT")
    assert table.notes[1] == "Changed from the preset (in parentheses): epochs 1 (10)."


@pytest.mark.parametrize("dataset", ["mnist-small", "fashion-mnist", "notmnist"])
def test_the_papers_values_are_absent_beside_other_data(dataset: str) -> None:
    result = make_result("finetune", (0.5, 0.9), dataset=dataset)
    assert not has_paper_data(result)
    table = summary(labelled([result]))
    assert not any("paper" in column for column in table.columns)
    assert "90.43" not in table.to_markdown()


@pytest.mark.parametrize(
    ("benchmark", "dataset"),
    [("split-mnist", "mnist"), ("permuted-mnist", "mnist"), ("vision-mixture", "five-datasets")],
)
def test_the_papers_values_are_absent_beside_fewer_tasks(benchmark: str, dataset: str) -> None:
    assert not has_paper_data(make_result("dhp", (0.5, 0.9), benchmark=benchmark, dataset=dataset))


def test_a_single_trial_has_no_error() -> None:
    table = summary(labelled([make_result("si", (0.5, 0.9))]))
    assert table.title.endswith("2 tasks, 1 trial")
    assert cells(table, *NUMBERS) == [("si", "70.00", "–", "-0.400", "50.00", "90.00")]


def test_a_diverged_trial_is_left_out_and_named() -> None:
    result = make_result("si", (0.5, 0.9), (NAN, NAN), (0.7, 0.9))
    result = replace(result, dynamics=[], diverged=[Divergence(1, 1, 4)], data=[SMALL])
    table = summary(labelled([result]))
    assert cells(table, *NUMBERS) == [("si", "75.00", "5.00", "-0.300", "60.00", "90.00")]
    assert table.notes[-1] == (
        "si: trial 2 diverged in task 2, step 5: its loss became NaN or infinite; it is left out of the row."
    )


def test_a_method_of_which_every_trial_diverged_has_dashes() -> None:
    assert cells(summary(labelled([make_result("si", (NAN, NAN))])), *NUMBERS) == [("si", *"–––––")]


def test_a_single_task_has_no_transfer() -> None:
    config = preset("permuted-mnist", "dhp", num_tasks=1, trials=1, dataset="mnist-small")
    result = Result(config, (0,), np.array([[[0.5]]]), np.array([[0.1]]))
    assert cells(summary(labelled([result])), *NUMBERS) == [("dhp", "50.00", "–", "–", "50.00", "50.00")]


def test_settings_that_are_not_the_papers_are_named() -> None:
    result = make_result("finetune", (0.5, 0.9), dataset="mnist", num_tasks=2, epochs=1, hidden=[8])
    assert summary(labelled([result])).notes[1] == (
        "Changed from the preset (in parentheses): num_tasks 2 (5); hidden [8] ([256, 256]); epochs 1 (10)."
    )


def test_a_strength_that_two_methods_do_not_share_is_named_for_each() -> None:
    results = [make_result("si", (0.5, 0.9), strength=7.0), make_result("online-ewc", (0.5, 0.9), strength=9.0)]
    note = summary(labelled(results)).notes[1]
    assert "strength 7.0 (1.0) for si, 9.0 (400.0) for online-ewc" in note


def test_trials_that_are_still_missing_are_named() -> None:
    notes = summary(labelled([make_result("si", (0.5, 0.9), trials=4)])).notes
    assert notes[-1] == "si: 1 of 4 trials finished so far."


def test_a_trial_that_has_only_started_is_not_counted_as_finished() -> None:
    result = make_result("si", (0.5, 0.9), (0.6, 1.0), trials=3)
    result.accuracy[1, 1] = math.nan
    assert summary(labelled([result])).notes[-1] == "si: 1 of 3 trials finished so far."
    result = replace(result, config=result.config.replace(trials=2), diverged=[Divergence(1, 1, 3)])
    assert not any("so far" in note for note in summary(labelled([result])).notes), "it has diverged"


def test_data_that_are_not_the_published_are_named() -> None:
    cropped = {"name": "svhn", "origin": "structure", "train": 73255, "test": 26032}
    result = make_result("dhp", (0.5, 0.9))
    result = replace(result, dynamics=[], diverged=[], data=[SMALL, cropped])
    notes = [note for note in summary(labelled([result])).notes if "samples" in note]
    assert len(notes) == 1
    assert notes[0].startswith("svhn: ")
    assert notes[0].endswith("; 73,255 + 26,032 samples.")


def test_the_papers_settings_need_no_note() -> None:
    assert summary(labelled([make_paper_result("dhp")])).notes == (ABOUT,)


def test_no_change_is_printed_without_a_sign() -> None:
    assert cells(summary(labelled([make_result("si", (0.9 - 1e-9, 0.9))])), "BWT") == [("si", "0.000")]


def test_gains_are_paired_by_trial() -> None:
    # ACC 0.85 - 0.7 and 0.85 - 0.8: mean 0.1, SEM 0.05, times t(1) of 12.7062; BWT 0.25 and 0.1: mean 0.175, SEM 0.075
    table = gains(labelled([FINETUNE, DHP]))
    assert table is not None
    assert table.columns == ("method", "ACC points", "95% interval", "BWT", "95% interval", "pairs")
    assert table.rows == [("dhp", "+10.00", "[-53.53, +73.53]", "+0.175", "[-0.778, +1.128]", "2")]


def test_a_gain_that_every_pair_shares_has_no_spread() -> None:
    # the trials are far apart, but dhp is 0.1 better on the first task in each of them
    table = gains(
        labelled([make_result("finetune", (0.5, 0.9), (0.7, 0.9)), make_result("dhp", (0.6, 0.9), (0.8, 0.9))])
    )
    assert table is not None
    assert table.rows == [("dhp", "+5.00", "[+5.00, +5.00]", "+0.100", "[+0.100, +0.100]", "2")]


def test_gains_pair_every_penalty_with_its_own_plastic_method() -> None:
    methods = ["dhp+si", "ewc", "si", "dhp+ewc", "dhp+online-ewc", "mas"]
    table = gains(labelled([make_result(method, (0.5, 0.9)) for method in methods]))
    assert table is not None
    assert [row[0] for row in table.rows] == ["dhp+si", "dhp+ewc"]


def test_a_pair_of_single_trials_has_a_difference_but_no_interval() -> None:
    table = gains(labelled([make_result("si", (0.5, 0.9)), make_result("dhp+si", (0.4, 0.9))]))
    assert table is not None
    assert table.rows == [("dhp+si", "-5.00", "[–, –]", "-0.100", "[–, –]", "1")]


def test_a_diverged_trial_is_in_no_pair() -> None:
    table = gains(labelled([make_result("si", (0.5, 0.9), (0.5, 0.9)), make_result("dhp+si", (NAN, NAN), (0.7, 0.9))]))
    assert table is not None
    assert table.rows == [("dhp+si", "+10.00", "[–, –]", "+0.200", "[–, –]", "1")]


@pytest.mark.parametrize("methods", [["finetune"], ["dhp"], ["finetune", "si", "mas"], ["si", "dhp+mas"]])
def test_without_pairs_there_are_no_gains(methods: list[str]) -> None:
    assert gains(labelled([make_result(method, (0.5, 0.9)) for method in methods])) is None


@pytest.mark.parametrize("changes", [{"max_samples": 100}, {"examine": "validation"}, {"num_tasks": 3}])
def test_the_paper_has_no_numbers_for_other_samples_or_tasks(changes: dict[str, Any]) -> None:
    config = preset("split-mnist", "dhp", trials=1, **changes)
    tasks = config.num_tasks
    result = Result(config, (0,), np.zeros((1, tasks, tasks)), np.zeros((1, tasks)))
    assert paper_value(result) is None
    usual = Result(preset("split-mnist", "dhp", trials=1), (0,), np.zeros((1, 5, 5)), np.zeros((1, 5)))
    assert paper_value(usual) == PAPER_RESULTS["split-mnist"]["dhp"]


# --- pairs by trial number


def with_trials(result: Result, *trials: int) -> Result:
    """The same rows as other trials, of as many as there would be."""
    return replace(result, trials=trials, config=result.config.replace(trials=max(trials) + 1))


def test_trials_are_paired_by_number_not_by_row() -> None:
    # SI has trials 0 to 3, DHP with SI only trial 3: rows 0 would differ by 40 points, trial 3 by 5.
    si = make_result("si", (0.1, 0.1), (0.5, 0.5), (0.5, 0.5), (0.8, 0.9))
    dhp = with_trials(make_result("dhp+si", (0.9, 0.9)), 3)
    table = gains({"si": si, "dhp+si": dhp})
    assert table is not None
    assert table.rows == [("dhp+si", "+5.00", "[–, –]", "+0.100", "[–, –]", "1")]
    pair = Pair("dhp+si", "si", dhp, si)
    assert pair.trials == (3,)


def test_results_without_a_trial_in_common_are_no_pair() -> None:
    si, dhp = with_trials(make_result("si", (0.5, 0.9)), 0), with_trials(make_result("dhp+si", (0.9, 0.9)), 3)
    assert why_not_paired(dhp, si) == "they have no trial in common (3 and 0)"
    assert gains({"si": si, "dhp+si": dhp}) is None


def test_order_of_rows_does_not_matter() -> None:
    si = make_result("si", (0.5, 0.9), (0.7, 0.9))
    dhp = make_result("dhp+si", (0.6, 0.9), (0.8, 0.9))
    swapped = replace(dhp, trials=(1, 0), accuracy=dhp.accuracy[::-1])
    assert gains({"si": si, "dhp+si": swapped}) == gains({"si": si, "dhp+si": dhp})


FEATURES = "Trials are paired by number: the same initial features, tasks and order of samples."
START = FEATURES.replace("features", "weights")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, FEATURES),
        ({"strength": 3.0}, FEATURES),
        ({"head_init": "linear"}, START),
        ({"hidden": [8]}, "Trials are paired by number: the same tasks and order of samples."),
        ({"initialisation": "he"}, "Trials are paired by number: the same tasks and order of samples."),
    ],
)
def test_the_same_initial_weights_are_only_claimed_where_they_are(changes: dict[str, Any], note: str) -> None:
    table = gains({"si": make_result("si", (0.5, 0.9)), "dhp+si": make_result("dhp+si", (0.5, 0.9), **changes)})
    assert table is not None
    assert table.notes == (note,)


def test_results_of_other_seeds_are_no_pair() -> None:
    results = {"si": make_result("si", (0.5, 0.9)), "dhp+si": make_result("dhp+si", (0.5, 0.9), seed=7)}
    assert why_not_paired(results["dhp+si"], results["si"]) == "their seed differs (7 and 0)"
    assert gains(results) is None
    results |= {"finetune": make_result("finetune", (0.5, 0.9)), "dhp": make_result("dhp", (0.5, 0.9))}
    table = gains(results)
    assert table is not None
    assert table.notes == (FEATURES, "dhp+si is not paired with si: their seed differs (7 and 0).")


# --- labels that are not methods


def test_labels_are_shown_and_paired_by_what_stands_beside_the_method() -> None:
    results = {
        f"{method}: strength={strength:g}": make_result(method, (0.5, 0.9), strength=strength)
        for method in ("si", "dhp+si")
        for strength in (1.0, 2.0)
    }
    table = summary(results)
    assert table.columns[0] == "settings"
    assert [row[0] for row in table.rows] == list(results)
    added = gains(results)
    assert added is not None
    assert [row[0] for row in added.rows] == ["dhp+si: strength=1", "dhp+si: strength=2"]


def test_labels_with_different_numbers_of_tasks_share_a_table() -> None:
    five = Result(preset("split-mnist", "dhp", trials=1), (0,), np.full((1, 5, 5), 0.5), np.full((1, 5), 0.1))
    results = {"two": make_result("si", (0.5, 0.9)), "five": five}
    assert summary(results).title == "split-mnist on mnist-small, 2 to 5 tasks, 1 trial"
    assert [table.title for table in tables_of(results)] == [summary(results).title]


def test_a_new_column_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    column = ("trials", lambda result: str(len(result.trials)))
    monkeypatch.setattr("engram.report.tables.COLUMNS", (*COLUMNS, column))
    table = summary(labelled([FINETUNE]))
    assert table.columns[-1] == "trials"
    assert table.rows[0][-1] == "2"


def test_a_run_that_is_not_finished_shows_what_all_have_learned() -> None:
    behind = make_result("si", (NAN, NAN))
    table = so_far({"finetune": FINETUNE, "si": behind})
    assert table is not None
    assert table.title == "Split MNIST after 1 of 2 tasks, which all have learned so far"
    assert table.rows == [("finetune", "90.00 ± 0.00", "2", "none"), ("si", "90.00 ± –", "1", "none")]


def test_a_mean_of_differences_has_the_interval_of_the_trials_means() -> None:
    """Differences of one trial are not independent: two copies of one are no more certain than one."""
    plain, plastic = make_result("si", (0.5, 0.8), (0.6, 0.9)), make_result("dhp+si", (0.7, 0.8), (0.6, 0.95))
    first, second = Pair("dhp", "finetune", DHP, FINETUNE), Pair("dhp+si", "si", plastic, plain)
    assert mean_accuracy_difference([first, first]) == first.accuracy
    both = mean_accuracy_difference([first, second])
    assert both.mean == pytest.approx((first.accuracy.mean + second.accuracy.mean) / 2)
    rows = [pair.result.average_accuracy[:, -1] - pair.baseline.average_accuracy[:, -1] for pair in (first, second)]
    assert both.sem == pytest.approx(np.mean(rows, axis=0).std(ddof=1) / math.sqrt(len(first.trials)))
