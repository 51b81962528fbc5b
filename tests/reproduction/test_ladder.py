"""The ladder: who stands on which rung, at which settings; and a small one from its first part to its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from document_tables import best_settings, cells_within, heads_table

from builders import refusal, small_digits
from engram import preset
from engram.config.effect import has_effect
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import CHOOSING
from engram.data.samples import Dataset
from engram.engine.training import Runtime
from engram.reproduction import ladder
from engram.reproduction.folder import read_reproduction
from engram.reproduction.form import by_rate_table, candidates_table, counts_table, crossed_table
from engram.reproduction.page import ladder_verdict, make_page
from engram.reproduction.plan import NOT_RUN, Part, plan
from engram.reproduction.run import run_reproduction
from engram.reproduction.rungs import (
    RUNGS,
    draw_ladder,
    ladder_table,
    one_strength_table,
    paper_difference,
    rung_results,
    settings_table,
)
from engram.reproduction.search import best_point
from engram.runs.format import write_results
from engram.runs.result import Divergence
from engram.runs.run import Run, read_run

RESULTS = Path(__file__).parents[2] / "results"
GRID = ("grid-1", "grid-2")  # of Split MNIST
TINY: dict[str, Any] = {"dataset": "mnist-small", "num_tasks": 2, "epochs": 1, "hidden": [8], "max_samples": 60}


@pytest.mark.parametrize("benchmark", PAPER_BENCHMARKS)
def test_rung_1_is_the_published_layer_against_heads_of_nn_linear_at_the_paper_s_strengths(benchmark: str) -> None:
    configs = ladder.STEPS["rung-1"].configs(benchmark, {})
    assert len(configs) == 12
    for label, config in configs.items():
        head, _, penalty = label.partition("+")
        assert config.head_init == ("published" if head == "dhp" else "linear")
        assert config.strength == (preset(benchmark, penalty).strength if penalty else None)
        assert (config.trials, config.seed, config.examine) == (10, 0, "test")
        assert config == preset(benchmark, label, head_init=config.head_init)


@pytest.mark.parametrize("benchmark", PAPER_BENCHMARKS)
@pytest.mark.parametrize("part", ["grid-1", "search-1"])
def test_settings_are_chosen_on_validation_samples_and_another_seed_in_three_trials(benchmark: str, part: str) -> None:
    configs = ladder.STEPS[part].configs(benchmark, {})
    for config in configs.values():
        assert {name: getattr(config, name) for name in CHOOSING} == CHOOSING
        assert config.trials == 3
    assert len({repr(config) for config in configs.values()}) == len(configs), "no setting is tried twice"


def test_every_contestant_tries_as_many_settings() -> None:
    for part, number in (("grid-1", 5), ("search-1", 7)):
        configs = ladder.STEPS[part].configs("split-mnist", {})
        tried = [label.partition(":")[0] for label in configs]
        assert {tried.count(name) for name in tried} == {number}


def test_on_the_mixture_the_grids_have_a_third_round_which_goes_beyond_an_edge() -> None:
    first = {("vision-mixture", part): read_run(RESULTS / "vision-mixture" / part) for part in GRID}
    configs = ladder.STEPS["grid-3"].configs("vision-mixture", first)
    assert len(configs) == 15 * 3
    for each in ladder.with_own_strength("vision-mixture"):
        scores = ladder.scores_of(each, ladder.rounds_of(first, "vision-mixture", ladder.GRID), (5, 3))
        third = {config.strength for label, config in configs.items() if label.startswith(f"{each.label}:")}
        tried = {each.axes[0].value(k) for (k,) in scores}
        assert len(third) == 3
        assert not third & tried
        if each.axes[0].value(best_point(scores)[0]) == max(tried):
            assert sum(value > max(tried) for value in third) >= 2, each.label


def test_networks_have_fewer_epochs_where_many_are_trained_to_choose_settings() -> None:
    for benchmark, of_grids, of_searches in (
        ("permuted-mnist", 20, 10),
        ("split-mnist", 10, 10),
        ("vision-mixture", 10, 10),
    ):
        assert {config.epochs for config in ladder.STEPS["grid-1"].configs(benchmark, {}).values()} == {of_grids}
        assert {config.epochs for config in ladder.STEPS["search-1"].configs(benchmark, {}).values()} == {of_searches}
    assert {each.config.epochs for each in ladder.with_one_budget("permuted-mnist")} == {20}


def test_on_rung_3_and_4_every_head_starts_as_the_published_layer() -> None:
    for contestants in (ladder.of_one_initialisation, ladder.with_one_budget):
        assert {each.config.head_init for each in contestants("permuted-mnist")} == {"published"}


def test_on_rung_4_every_head_has_its_rate_its_strength_and_one_knob() -> None:
    for each in ladder.with_one_budget("split-mnist"):
        rate, *strength, knob = (axis.name for axis in each.axes)
        assert rate == "learning_rate"
        assert strength == (["strength"] if each.config.penalty else [])
        assert knob == ladder.KNOBS[each.config.head].name


def test_the_knobs_start_at_what_the_heads_have_otherwise() -> None:
    for head, axis in ladder.KNOBS.items():
        assert getattr(preset("split-mnist", head), axis.name) == axis.value(0)


@pytest.mark.parametrize("benchmark", PAPER_BENCHMARKS)
def test_all_that_is_searched_has_an_effect(benchmark: str) -> None:
    for each in (*ladder.with_own_strength(benchmark), *ladder.with_one_budget(benchmark)):
        for axis in each.axes:
            assert has_effect(axis.name, each.config), (each.label, axis.name)


# --- a small one


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return small_digits(200, 60)


def tiny(monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]) -> list[Part]:
    heads = ("linear", "dhp", "balanced")
    monkeypatch.setattr(ladder, "KNOBS", {head: ladder.KNOBS[head] for head in heads})
    monkeypatch.setattr(ladder, "CANDIDATES", heads[1:])
    monkeypatch.setattr("engram.reproduction.plan.QUICK", dict.fromkeys(PAPER_BENCHMARKS, TINY))
    return plan(["split-mnist"], parts, quick=True, most_trials=1)


def run_parts(parts: list[Part], folder: Path, digits: Dataset) -> dict[tuple[str, str], Run]:
    load = lambda config: [digits]  # noqa: E731
    return run_reproduction(parts, folder, load, quick=True, runtime=Runtime("cpu"))


@pytest.fixture(scope="module")
def small_ladder(
    tmp_path_factory: pytest.TempPathFactory, digits: Dataset
) -> Iterator[tuple[Path, dict[tuple[str, str], Run]]]:
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        yield folder, run_parts(tiny(patch, tuple(ladder.STEPS)), folder / "new", digits)


def test_each_rung_uses_what_its_rounds_found(small_ladder: tuple[Path, dict[tuple[str, str], Run]]) -> None:
    folder, runs = small_ladder
    assert [part for _, part in runs] == [part for part in ladder.STEPS if part != "grid-3"]
    grid = [runs["split-mnist", part] for part in GRID]
    assert [len(run.results) for run in grid] == [15 * 5, 15 * 3]
    for label, config in runs["split-mnist", "rung-2"].configs.items():
        tried = {
            other: result for run in grid for other, result in run.results.items() if other.startswith(f"{label}:")
        }
        assert len(tried) == 8
        finished = {other: result for other, result in tried.items() if not result.diverged}
        best = max(finished.values(), key=lambda result: np.mean(result.average_accuracy[:, -1]))
        assert config.strength == best.config.strength
        assert (config.seed, config.examine) == (0, "test")
    assert "dhp+si" not in runs["split-mnist", "rung-3"].configs, "it is that of rung 2"
    search = [runs["split-mnist", part] for part in ladder.SEARCH]
    for each in ladder.with_one_budget("split-mnist"):
        scores = ladder.scores_of(each, search, ladder.SEARCH_ROUNDS)
        assert len(scores) == sum(ladder.SEARCH_ROUNDS)
        config = runs["split-mnist", "rung-4"].configs[each.label]
        assert config.learning_rate == each.axes[0].value(best_point(scores)[0])
    missing = read_reproduction(folder / "new").missing
    assert "permuted-mnist: rung 1 of the ladder: as published was not run" in missing


def test_the_tables_and_the_figure_show_every_rung(small_ladder: tuple[Path, dict[tuple[str, str], Run]]) -> None:
    _, runs = small_ladder
    table = ladder_table(runs, "linear")
    assert [row[0] for row in table.rows] == [
        f"Split MNIST: dhp{second}" for second in ("", "+si", "+online-ewc", "+mas")
    ]
    assert {row[1] for row in table.rows} == {"–"}, "the paper had more data"
    for row, second in zip(table.rows, ("", "+si", "+online-ewc", "+mas"), strict=True):
        ours = {
            1: (runs["split-mnist", "rung-1"], f"dhp{second}", runs["split-mnist", "rung-1"], f"linear{second}"),
            4: (
                runs["split-mnist", "rung-4"],
                f"dhp{second}",
                runs["split-mnist", "rung-4"],
                f"linear{second}, published",
            ),
        }
        for rung, (here, label, there, other) in ours.items():
            difference = here.results[label].average_accuracy[:, -1] - there.results[other].average_accuracy[:, -1]
            assert row[1 + rung].startswith(f"{100 * difference.mean():+.2f}")
    assert table.rows[0][2] == table.rows[0][3], "alone, nothing is chosen on rung 2"
    results = rung_results(runs, "split-mnist", 3)
    assert results["dhp+si"] is runs["split-mnist", "rung-2"].results["dhp+si"]
    assert results["linear+si"] is runs["split-mnist", "rung-3"].results["linear+si, published"]
    drawn = draw_ladder(runs, "linear")
    assert len(drawn.rows) == 16
    assert drawn.to_bytes("png").startswith(b"\x89PNG")


@pytest.mark.parametrize(("rung", "number", "points"), [(2, 9, 8), (3, 6, 8), (4, 12, 20)])
def test_the_settings_that_were_tried_are_shown_with_their_scores(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]], rung: int, number: int, points: int
) -> None:
    _, runs = small_ladder
    table = settings_table(runs, "split-mnist", rung)
    assert len(table.rows) == number
    for label, chosen, edge, tried in table.rows:
        assert len(tried.split("; ")) == points
        assert edge in ("yes", "no")
        values = " ".join(part.split()[1] for part in chosen.split(", "))
        scores = {words.partition(": ")[0]: float(words.partition(": ")[2]) for words in tried.split("; ")}
        assert scores[values] == max(scores.values()), label


def test_the_form_is_the_candidate_that_gains_most_often_on_validation_samples(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    rounds = [runs["split-mnist", part] for part in ladder.SEARCH]
    best: dict[str, float] = {}
    for run in rounds:
        for label, result in run.results.items():
            name = label.partition(":")[0].removesuffix(", published")
            best[name] = max(best.get(name, 0.0), ladder.score(result))
    expected = []
    for head in ladder.CANDIDATES:
        gains = [best[head + ending] - best["linear" + ending] for ending in ladder.ENDINGS]
        expected.append((sum(gain > 0 for gain in gains), sum(gains) / 4, head))
    expected.sort(reverse=True)
    rows = candidates_table(runs).rows
    assert rows == [(head, "4", f"{above}", f"{100 * mean:+.2f}") for above, mean, head in expected]
    unfinished = {key: run for key, run in runs.items() if key[1] != "search-4"}
    assert candidates_table(unfinished).rows == []


def test_every_head_stands_on_rung_4_with_its_differences(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    results = runs["split-mnist", "rung-4"].results
    heads = list(dict.fromkeys(result.config.head for result in results.values()))
    others = [head for head in heads if head != "linear"]
    assert [row[0] for row in counts_table(runs).rows] == others
    table = heads_table(runs, others, "Heads")
    assert [row[0] for row in table.rows] == [f"Split MNIST: {name}" for name in ("alone", "si", "online-ewc", "mas")]
    last = {r.config.method: 100 * r.average_accuracy[:, -1].mean() for r in results.values()}
    for column, head in enumerate(others, start=1):
        gains = [last[head + ending] - last["linear" + ending] for ending in ladder.ENDINGS]
        assert [float(row[column].split()[0]) for row in table.rows] == pytest.approx(gains, abs=0.006)
        counted = next(row for row in counts_table(runs).rows if row[0] == head)
        assert counted[1:3] == ("4", f"{sum(gain > 0 for gain in gains)}")
        assert float(counted[-1]) == pytest.approx(sum(gains) / 4, abs=0.006)


def test_heads_are_compared_at_one_strength_the_best_of_one_of_them(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    tried = [each for part in GRID for each in runs["split-mnist", part].results.values() if not each.diverged]

    def scores(method: str, init: str) -> dict[float, float]:
        chosen = [r for r in tried if (r.config.method, r.config.head_init) == (method, init)]
        return {float(r.config.strength or 0): float(r.average_accuracy[0, -1]) for r in chosen}

    rows = {name: cells for name, *cells in one_strength_table(runs).rows}
    assert list(rows) == [f"Split MNIST: dhp+{penalty}" for penalty in ("si", "online-ewc", "mas")]
    for name, cells in rows.items():
        penalty = name.partition("+")[2]
        ours = scores(f"dhp+{penalty}", "published")
        expected = []
        for init in ("linear", "published"):
            theirs = scores(f"linear+{penalty}", init)
            both = sorted(set(ours) & set(theirs))
            assert len(both) >= 5
            for judged in (theirs, ours):
                best = max(both, key=lambda strength, judged=judged: judged[strength])  # type: ignore[misc]
                expected.append((f"{best:g}", 100 * (ours[best] - theirs[best])))
        for cell, (strength, gain) in zip(cells, expected, strict=True):
            assert cell.partition(": ")[0] == strength
            assert float(cell.partition(": ")[2]) == pytest.approx(gain, abs=0.006)
    run = runs["split-mnist", "grid-1"]
    lost = {k: replace(r, diverged=[Divergence(0, 0, 0)]) for k, r in run.results.items() if k.startswith("dhp+si: ")}
    changed = {("split-mnist", "grid-1"): replace(run, results=run.results | lost)}
    assert one_strength_table(changed).rows[0][1:] == ("–",) * 4, "no strength is left where trials diverged"
    assert one_strength_table({}).rows == []


def test_heads_are_compared_at_one_learning_rate_with_all_else_as_the_search_began(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    table = by_rate_table(runs)
    assert table.columns == ("", "linear", "dhp", "balanced")
    star = runs["split-mnist", "search-1"].results
    rates = {"alone": {0.0033, 0.01, 0.03, 0.09, 0.27}, "si": {0.01, 0.03, 0.09}}
    for name, found in rates.items():
        in_table = {float(row[0].rpartition(", ")[2]) for row in table.rows if f": {name}," in row[0]}
        assert found <= in_table
    for rate in rates["si"]:
        (row,) = (row for row in table.rows if row[0] == f"Split MNIST: si, {rate:g}")
        usual = f"learning_rate {rate:g}, strength 1, "
        plain = star[f"linear+si, published: {usual}head_gain 1"].average_accuracy[0, -1]
        others = (f"dhp+si: {usual}alpha_init 0.01", f"balanced+si, published: {usual}head_dropout 0.5")
        assert row[1].split()[0] == f"{100 * plain:.2f}"
        for cell, label in zip(row[2:], others, strict=True):
            assert float(cell) == pytest.approx(100 * (star[label].average_accuracy[0, -1] - plain), abs=0.006)
    diverged = {label: replace(r, diverged=[Divergence(0, 0, 0)]) for label, r in star.items() if r.config.plastic}
    run = replace(runs["split-mnist", "search-1"], results=star | diverged)
    (row,) = (row for row in by_rate_table({("split-mnist", "search-1"): run}).rows if row[0].endswith("si, 0.03"))
    assert row[2] == "1 of 1 diverged"
    assert by_rate_table({}).rows == []


def test_the_best_settings_are_those_of_rung_4_or_else_of_the_grids(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    best = best_settings(runs)["split-mnist"]
    for label, config in runs["split-mnist", "rung-4"].configs.items():
        assert all(getattr(config, name) == value for name, value in best[config.method].items()), label
        assert {"learning_rate", "head_init"} < set(best[config.method])
    without = {key: run for key, run in runs.items() if key[1] != "rung-4"}
    grids = best_settings(without)["split-mnist"]
    tried = [result for part in GRID for result in runs["split-mnist", part].results.values()]
    for method, settings in grids.items():
        scores = {
            (result.config.head_init, result.config.strength): ladder.score(result)
            for result in tried
            if result.config.method == method
        }
        assert scores[settings["head_init"], settings["strength"]] == max(scores.values())
    assert best_settings({key: run for key, run in without.items() if key[1] != "grid-2"}) == {}


def test_of_candidates_that_gain_as_often_the_larger_mean_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"steady": [0.02, -0.01, 0.03], "balanced": [0.05, 0.02, -0.01]}
    monkeypatch.setattr(ladder, "CANDIDATES", tuple(gains))
    monkeypatch.setattr("engram.reproduction.form._gains", lambda runs, head: gains[head])
    assert [row[0] for row in candidates_table({}).rows] == ["balanced", "steady"]
    gains["steady"][1] = 0.001
    assert [row[0] for row in candidates_table({}).rows] == ["steady", "balanced"]


def test_the_paper_s_differences_are_those_of_its_table() -> None:
    found = [
        paper_difference(preset("split-mnist", method)) for method in ("dhp", "dhp+si", "dhp+online-ewc", "dhp+mas")
    ]
    assert found == pytest.approx([7.80, 1.38, 1.31, 0.19])
    assert paper_difference(preset("split-mnist", "steady+si")) is None
    assert paper_difference(preset("split-mnist", "dhp", max_samples=100)) is None


def test_cells_near_the_paper_s_are_counted(small_ladder: tuple[Path, dict[tuple[str, str], Run]]) -> None:
    _, runs = small_ladder
    assert cells_within(runs, 100) == (8, 8)
    ours = 100 * runs["split-mnist", "rung-1"].results["linear+si"].average_accuracy[0, -1]
    assert cells_within(runs, abs(ours - 97.77) - 1e-6)[0] < cells_within(runs, abs(ours - 97.77) + 1e-6)[0]


def test_the_report_of_a_ladder_opens_with_its_figure(small_ladder: tuple[Path, dict[tuple[str, str], Run]]) -> None:
    folder, _ = small_ladder
    page = make_page(folder / "new")
    assert page.index("What DHP adds to a linear head, rung by rung") < page.index(
        "dhp minus linear, points of accuracy"
    )
    for rung in (2, 3, 4):
        assert f"Rung {rung}: what was tried on validation samples, 1 trial each" in page


def test_the_verdict_says_where_the_intervals_of_each_rung_lie(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    opening, *said = ladder_verdict(runs)
    assert opening == "The paper's layer (DHP) against a plain one, in comparisons that become fairer."
    assert len(said) == 4
    for rung, sentence in enumerate(said, start=1):
        assert sentence == (
            f"Rung {rung}, {RUNGS[rung]}, on Split MNIST alone: "
            "better in 0 of 4 comparisons, worse in 0, unclear in 0; 4 could not be compared."
        )
    assert ladder_verdict({}) == []


def test_a_rung_alone_says_what_it_needs(tmp_path: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny(monkeypatch, ("rung-2",))
    said = refusal(run_parts, parts, tmp_path / "new", digits)
    assert said == "rung-2 of split-mnist needs what is not finished: grid-1, grid-2"
    run_parts(tiny(monkeypatch, GRID), tmp_path / "new", digits)
    assert list(run_parts(parts, tmp_path / "new", digits)) == [("split-mnist", "rung-2")]


def test_a_third_round_of_the_grids_is_used_wherever_two_are(
    tmp_path: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "MORE_GRID_ROUNDS", {"split-mnist": (5, 3, 3)})
    monkeypatch.setattr("engram.reproduction.plan.NOT_RUN", NOT_RUN - {("split-mnist", "grid-3")})
    folder, third = tmp_path / "new", tmp_path / "new" / "split-mnist" / "grid-3"
    two = run_parts(tiny(monkeypatch, ladder.GRID[:2]), folder, digits)
    assert settings_table(two, "split-mnist", 2).columns[1] == "best so far"
    assert settings_table(two, "split-mnist", 2).title.endswith("after 2 of 3 rounds")
    assert best_settings(two) == {}, "the grids are not finished"
    said = refusal(run_parts, tiny(monkeypatch, ("rung-2",)), folder, digits)
    assert said == "rung-2 of split-mnist needs what is not finished: grid-3"

    run_parts(tiny(monkeypatch, ladder.GRID), folder, digits)
    run = read_run(third)
    for result in run.results.values():
        result.accuracy[:, -1] = 1.0  # the best of all
    write_results(third, run.results)
    strengths = {label.partition(":")[0]: set[float]() for label in run.configs}
    for label, config in run.configs.items():
        assert config.strength is not None
        strengths[label.partition(":")[0]].add(config.strength)
    run_parts(tiny(monkeypatch, ("rung-2", "rung-3")), folder, digits)
    runs = read_reproduction(folder).runs
    for rung in (2, 3):
        for label, config in runs["split-mnist", f"rung-{rung}"].configs.items():
            if config.penalty:
                assert config.strength in strengths[label], label
        table = settings_table(runs, "split-mnist", rung)
        assert table.columns[1] == "chosen"
        assert all(float(row[1].removeprefix("strength ")) in strengths[row[0]] for row in table.rows)
    for method, settings in best_settings(runs)["split-mnist"].items():
        assert settings["strength"] in strengths[method] | strengths.get(f"{method}, published", set())
    both = strengths["dhp+si"] & strengths["linear+si"]
    (cells,) = (row[1:3] for row in one_strength_table(runs).rows if row[0].endswith("dhp+si"))
    assert all(float(cell.partition(":")[0]) in both for cell in cells) or not both


def test_a_round_after_one_that_is_missing_does_not_count(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    without = {key: run for key, run in runs.items() if key[1] != "search-2"}
    assert ladder.rounds_of(without, "split-mnist", ladder.SEARCH) == [runs["split-mnist", "search-1"]]
    assert settings_table(without, "split-mnist", 4).title.endswith("after 1 of 4 rounds")
    assert settings_table(runs, "split-mnist", 4).columns[1] == "chosen"


def test_a_damaged_round_is_not_finished(tmp_path: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    run_parts(tiny(monkeypatch, GRID), tmp_path / "new", digits)
    path = tmp_path / "new" / "split-mnist" / "grid-2" / "results.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"accuracy"', '"acuracy"', 1), encoding="utf-8")
    said = refusal(run_parts, tiny(monkeypatch, ("rung-2",)), tmp_path / "new", digits)
    assert said == "rung-2 of split-mnist needs what is not finished: grid-2"


def test_in_trials_that_did_not_choose_the_best_setting_has_no_luck(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two settings the first is the best of all three trials, but for its luck in the first it would not be."""
    _, runs = small_ladder
    run = runs["split-mnist", "search-1"]
    finals = np.array([[0.9, 0.1, 0.6], [0.4, 0.7, 0.4]])  # chosen without the first trial: the second setting, at 0.4
    crossed = np.mean([0.4, 0.1, 0.4])
    results = {}
    for each in ladder.with_one_budget("split-mnist"):
        labels = [label for label in run.results if label.startswith(f"{each.label}:")]
        for k, label in enumerate(labels):
            final = np.full(3, 0.2) if each.config.head == "linear" else finals[min(k, 1)]
            accuracy = np.broadcast_to(final[:, None, None], (3, 2, 2)).copy()
            lost = [Divergence(0, 0, 0)] if each.label == "dhp+mas" else []  # all that it tried diverged
            config = run.results[label].config.replace(trials=3)
            results[label] = replace(
                run.results[label], config=config, trials=(0, 1, 2), accuracy=accuracy, diverged=lost
            )
    configs = {label: result.config for label, result in results.items()}
    changed = {("split-mnist", "search-1"): replace(run, results=results, configs=configs)}
    monkeypatch.setattr(ladder, "KNOBS", {head: ladder.KNOBS[head] for head in ("linear", "dhp", "balanced")})
    table = crossed_table(changed, "split-mnist")
    assert "(1 of 4 rounds)" in table.title
    rows = {row[0]: row[1:] for row in table.rows}
    means = {cell.partition(" ")[0] for cell in (*rows["balanced"], *rows["dhp"][:3])}
    assert means == {f"{100 * (crossed - 0.2):+.2f}"}
    assert rows["dhp"][3] == "–"
    assert crossed_table({}, "split-mnist").rows == []
    assert crossed_table(runs, "split-mnist").rows == [], "a single trial cannot choose and compare"


def test_a_setting_at_which_a_trial_diverged_is_the_worst(
    small_ladder: tuple[Path, dict[tuple[str, str], Run]],
) -> None:
    _, runs = small_ladder
    result = runs["split-mnist", "rung-1"].results["dhp+si"]
    assert ladder.score(result) == pytest.approx(np.mean(result.average_accuracy[:, -1]))
    assert ladder.score(replace(result, diverged=[Divergence(0, 0, 0)])) == -np.inf


def test_the_rounds_of_another_search_are_refused(small_ladder: tuple[Path, dict[tuple[str, str], Run]]) -> None:
    _, runs = small_ladder
    contestant = ladder.with_own_strength("split-mnist")[0]
    said = refusal(ladder.scores_of, contestant, [runs["split-mnist", "search-1"]], (5,))
    assert "does not have linear+si: strength 1: it is not a round of this search" in said
