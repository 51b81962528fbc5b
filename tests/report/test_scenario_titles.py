"""Tables, figures and reports name the scenario where it is not the benchmark's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from builders import labelled, run_on, small_digits, write_run
from engram import Result, preset
from engram.config.presets import changes_from_preset, with_scenario
from engram.report.figures.curves import where_from
from engram.report.html.run_page import run_page
from engram.report.pairs import has_paper_data, why_not_paired
from engram.report.tables import summary_title
from engram.runs.run import read_run

QUICK = {"dataset": "mnist-small", "epochs": 1, "num_tasks": 2, "trials": 1, "hidden": [4]}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """One result for each scenario of Split MNIST, and one without."""
    configs = [preset("split-mnist", "finetune", scenario=name, **QUICK) for name in (None, "task", "domain", "class")]
    made = run_on(configs, [small_digits(80, 40)])
    return dict(zip(("none", "task", "domain", "class"), made, strict=True))


def test_titles_of_tables_and_figures(results: dict[str, Result]) -> None:
    rest = "on mnist-small, 2 tasks, 1 trial"
    for name in ("none", "task"):
        assert summary_title({"finetune": results[name]}) == f"split-mnist {rest}"
        assert where_from({"finetune": results[name]}) == "split-mnist (mnist-small)"
    assert summary_title({"finetune": results["domain"]}) == f"split-mnist, domain-incremental {rest}"
    assert where_from({"finetune": results["class"]}) == "split-mnist, class-incremental (mnist-small)"


def test_title_of_a_report(results: dict[str, Result], tmp_path: Path) -> None:
    page = run_page(read_run(write_run(tmp_path / "run", labelled([results["class"]]))))
    assert "Split MNIST, class-incremental" in page


def test_a_custom_stream_has_no_scenario_of_its_own() -> None:
    config = preset("custom", "dhp")
    assert with_scenario("Custom stream", config) == "Custom stream"
    assert with_scenario("Custom stream", config.replace(scenario="task")) == "Custom stream, task-incremental"


def test_the_benchmarks_own_scenario_is_no_change(results: dict[str, Result]) -> None:
    assert "scenario" not in changes_from_preset(results["task"].config)
    assert changes_from_preset(results["class"].config)["scenario"] == ("class", None)
    assert why_not_paired(results["task"], results["none"], same_data=True) is None
    assert (
        why_not_paired(results["class"], results["none"], same_data=True) == "their scenario differs (class and task)"
    )


def test_the_papers_numbers_are_of_its_own_scenario(results: dict[str, Result]) -> None:
    config = preset("split-mnist", "finetune")
    for scenario, has in ((None, True), ("task", True), ("class", False)):
        assert has_paper_data(replace(results["none"], config=config.replace(scenario=scenario))) is has
