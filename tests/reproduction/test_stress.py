"""The stress table: what it changes, at which settings; and a small one from the search to the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import refusal, small_digits
from engram.common.errors import InputError
from engram.config.effect import has_effect
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import CHOOSING
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.engine.training import Runtime
from engram.reproduction import ladder, stress
from engram.reproduction.folder import read_reproduction
from engram.reproduction.form import chosen_head
from engram.reproduction.page import make_page, reproduction_tables
from engram.reproduction.plan import plan
from engram.reproduction.run import run_reproduction
from engram.reproduction.stress import CHANGES, CLASSES, CNN, RATES, contestants, rates_table, stress_table
from engram.runs.result import Divergence, Result
from engram.runs.run import Run

TINY: dict[str, Any] = {"dataset": "mnist-small", "num_tasks": 2, "epochs": 1, "max_samples": 60}
Small = tuple[Path, dict[tuple[str, str], Run]]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return small_digits(200, 60)


def run_parts(folder: Path, digits: Dataset, *parts: str) -> dict[tuple[str, str], Run]:
    made = plan([stress.BENCHMARK], parts, quick=True)
    return run_reproduction(made, folder, lambda config: [digits], quick=True, runtime=Runtime("cpu"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("stress") / "new"
    heads = ("linear", "dhp", "balanced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "KNOBS", {head: ladder.KNOBS[head] for head in heads})
        patch.setattr(ladder, "CANDIDATES", heads[1:])
        with pytest.MonkeyPatch.context() as smaller:
            smaller.setattr("engram.reproduction.plan.QUICK", dict.fromkeys(PAPER_BENCHMARKS, TINY))
            runs = run_parts(folder, digits, *ladder.SEARCH, *stress.STEPS)
        yield folder, runs


def test_every_change_changes_one_thing_of_rung_4_for_both_heads(small: Small) -> None:
    _, runs = small
    found = contestants(stress.BENCHMARK, runs, "balanced", CHANGES | CLASSES)
    assert len(found) == 2 * (len(CHANGES) + len(CLASSES))
    rounds = [runs[stress.BENCHMARK, part] for part in ladder.SEARCH]
    finals = ladder.final_configs(ladder.with_one_budget(stress.BENCHMARK), rounds, ladder.SEARCH_ROUNDS)
    for each in found:
        config, rung_4 = each.config, finals[each.label.removeprefix(f"{each.change}: ")]
        assert (config.method.partition("+")[2], config.trials, config.seed) == ("online-ewc", 5, 0)
        assert config.examine == "test"
        assert (config.epochs, config.hidden) == (
            {"1 epoch": 1, "5 epochs": 5}.get(each.change, 20),
            {"width 100": (100, 100), "width 2,000": (2000, 2000)}.get(each.change, (400, 400)),
        )
        settings = (CHANGES | CLASSES)[each.change]
        assert config == rung_4.replace(**settings, trials=5)
        assert all(has_effect(name, config) for name in settings)
        assert [axis.name for axis in each.axes] == (["learning_rate"] if each.change in RATES else [])
    assert {each.config.head for each in found} == {"linear", "balanced"}


def test_rates_of_other_optimizers_are_searched_as_on_rung_4_and_the_rest_is_not(small: Small) -> None:
    _, runs = small
    both = contestants(stress.BENCHMARK, runs, "balanced")
    configs = ladder.round_configs(both, (), stress.RATE_ROUNDS)
    assert len(configs) == 2 * len(RATES) * 5
    for label, config in configs.items():
        assert label.partition(":")[0] in RATES
        assert {name: getattr(config, name) for name in CHOOSING} == CHOOSING
        assert (config.trials, config.epochs) == (3, 10)
    tried = {config.learning_rate for config in configs.values() if config.optimizer == "adam"}
    assert sorted(tried) == pytest.approx([0.00011, 0.00033, 0.001, 0.003, 0.009])


def test_the_head_is_the_chosen_one_and_each_rate_the_best_that_was_tried(small: Small) -> None:
    _, runs = small
    head = chosen_head(runs)
    rounds = [runs[stress.BENCHMARK, part] for part in stress.ROUNDS]
    assert [len(run.results) for run in rounds] == [2 * len(RATES) * number for number in stress.RATE_ROUNDS]
    final = runs[stress.BENCHMARK, "stress"]
    assert {config.head for config in final.configs.values()} == {"linear", head}
    assert len(final.configs) == 2 * len(CHANGES)
    for label, config in final.configs.items():
        tried = {r.config.learning_rate: r for run in rounds for k, r in run.results.items() if k.startswith(label)}
        assert bool(tried) == (label.partition(":")[0] in RATES)
        if tried:
            assert len(tried) == 8
            assert ladder.score(tried[config.learning_rate]) == max(map(ladder.score, tried.values()))
    classes = runs[stress.BENCHMARK, "stress-classes"].results
    assert {result.config.scenario for result in classes.values()} == {"task"}
    assert [row[0] for row in rates_table(runs).rows] == [
        f"{change}: {name}" for name in ("linear+online-ewc, published", _named(head)) for change in RATES
    ]


def _named(head: str) -> str:
    return f"{head}+online-ewc" + ("" if head == "dhp" else ", published")


def test_the_table_has_both_heads_and_names_the_worst_difference(small: Small) -> None:
    _, runs = small
    table = stress_table(runs)
    assert [row[0] for row in table.rows] == [*CHANGES, *CLASSES]
    head = chosen_head(runs)
    gains = {}
    for name, plain, ours, difference in table.rows:
        results = runs[stress.BENCHMARK, "stress-classes" if name in CLASSES else "stress"].results
        last = [100 * results[f"{name}: {_named(h)}"].average_accuracy[:, -1] for h in ("linear", head)]
        assert [plain.split()[0], ours.split()[0]] == [f"{mean:.2f}" for mean in map(np.mean, last)]
        gains[name] = float(np.mean(last[1] - last[0]))
        assert float(difference.split()[0]) == pytest.approx(gains[name], abs=0.006)
    worst = min(gains, key=lambda name: gains[name])
    (note,) = table.notes
    assert note.startswith(f"The worst of {len(gains)} differences is “{worst}”: {gains[worst] + 0.0:+.2f} points, ")


@pytest.mark.parametrize(
    ("accuracies", "diverged", "words"),
    [
        ({"1 epoch": -0.004}, (), "“1 epoch”: -0.40 points, no more than half a point below."),
        ({"1 epoch": -0.006}, (), "“1 epoch”: -0.60 points, more than half a point below."),
        ({"1 epoch": -0.006, "Adam": -0.02}, (), "“Adam”: -2.00 points, more than half a point below."),
        ({"1 epoch": -0.006}, ("Adam",), "“Adam”: more of its trials diverge, more than half a point below."),
        ({"1 epoch": 0.0}, (), "“as on rung 4”: +0.00 points, no more than half a point below."),
    ],
)
def test_half_a_point_below_is_harm_and_so_is_divergence(
    small: Small, accuracies: dict[str, float], diverged: tuple[str, ...], words: str
) -> None:
    _, runs = small
    run = runs[stress.BENCHMARK, "stress"]
    alike: dict[str, Result] = {}
    for label, result in run.results.items():
        name, ours = label.partition(":")[0], result.config.head != "linear"
        matrix = np.full_like(result.accuracy, 0.5 + (accuracies.get(name, 0.0) if ours else 0.0))
        lost = [Divergence(0, 1, 7)] if ours and name in diverged else []
        alike[label] = replace(result, accuracy=matrix, diverged=lost)
    (note,) = stress_table({(stress.BENCHMARK, "stress"): replace(run, results=alike)}).notes
    assert note == f"The worst of {len(CHANGES)} differences is {words}"


def test_the_cnn_is_rung_4_on_the_mixture(small: Small) -> None:
    _, runs = small
    head = chosen_head(runs)
    here = runs[stress.BENCHMARK, "stress"].results
    rung = {_named(h): here[f"as on rung 4: {_named(h)}"] for h in ("linear", head)}
    with_mixture = {**runs, ("vision-mixture", "rung-4"): replace(runs[stress.BENCHMARK, "stress"], results=rung)}
    table = stress_table(with_mixture)
    assert [row[0] for row in table.rows] == [*CHANGES, *CLASSES, CNN]
    assert table.rows[-1][1:] == table.rows[0][1:]


def test_it_is_shown_where_it_was_run_and_nowhere_else(small: Small) -> None:
    folder, runs = small
    assert "Does " in make_page(folder)
    assert "The stress table: what was tried on validation samples" in make_page(folder)
    reproduction = read_reproduction(folder)
    titles = [table.title for table in reproduction_tables(reproduction)]
    assert sum(title.startswith("Does ") for title in titles) == 1
    searched = {key: run for key, run in runs.items() if key[1] in ladder.SEARCH}
    assert stress_table(searched).rows == rates_table(searched).rows == []
    without = replace(reproduction, runs=searched)
    assert not any(table.title.startswith("Does ") for table in reproduction_tables(without))


def test_the_choice_needs_the_searches_on_all_benchmarks_but_not_in_a_quick_reproduction() -> None:
    searches = {(benchmark, part) for benchmark in PAPER_BENCHMARKS for part in ladder.SEARCH}
    searches -= {("vision-mixture", "search-3"), ("vision-mixture", "search-4")}
    (whole,) = plan(parts=["stress"])
    assert set(whole.needs) == searches | {(stress.BENCHMARK, part) for part in stress.ROUNDS}
    (quick,) = plan(parts=["stress"], quick=True)
    assert {benchmark for benchmark, _ in quick.needs} == {stress.BENCHMARK}
    names = {part.name for part in plan([stress.BENCHMARK])}
    assert "rung-4" in names
    assert names.isdisjoint(stress.STEPS), "one benchmark does not suffice"
    assert set(stress.STEPS) < {part.name for part in plan([stress.BENCHMARK], quick=True)}


def test_a_search_that_is_missing_is_named_with_its_benchmark(tmp_path: Path, digits: Dataset) -> None:
    made = plan([stress.BENCHMARK], ["stress-classes"], most_trials=1)
    said = refusal(run_reproduction, made, tmp_path / "new", lambda config: [digits])
    others = ", ".join(f"{part} of {name}" for name in PAPER_BENCHMARKS[1:3] for part in ladder.SEARCH)
    mixture = ", ".join(f"{part} of vision-mixture" for part in ladder.SEARCH[:2])
    own = ", ".join([*ladder.SEARCH])
    assert said == f"stress-classes of permuted-mnist needs what is not finished: {own}, {others}, {mixture}"
    made = plan([stress.BENCHMARK], [*ladder.SEARCH, "stress-classes"], most_trials=1)
    said = refusal(run_reproduction, made, tmp_path / "new", lambda config: [digits])
    assert said == f"stress-classes of permuted-mnist needs what is not finished: {others}, {mixture}"


def test_a_part_that_needs_what_has_no_data_is_left_out_with_a_line(tmp_path: Path, digits: Dataset) -> None:
    rung, needed = (plan([name], ["rung-1"], quick=True)[0] for name in ("split-mnist", "vision-mixture"))
    needing = replace(rung, needs=(("vision-mixture", "rung-1"),))

    def load(config: Config) -> list[Dataset]:
        if config.benchmark == "vision-mixture":
            raise InputError("there are no files")
        return [digits]

    said: list[str] = []
    options: dict[str, Any] = {"quick": True, "runtime": Runtime("cpu"), "skip_without_data": True, "tell": said.append}
    other = plan(["permuted-mnist"], ["rung-1"], quick=True)[0]
    runs = run_reproduction([needed, needing, other], tmp_path / "new", load, **options)
    assert list(runs) == [("permuted-mnist", "rung-1")]
    assert said[:2] == [
        "vision-mixture is left out: there are no files",
        "rung-1 of split-mnist is left out: it needs rung-1 of vision-mixture",
    ]
