"""Sweeps: what is tried, what is dropped, and that stopping one anywhere changes nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import small_digits
from engram import InputError, Progress, preset
from engram.cli.main import main
from engram.common.registry import PENALTIES, Registration
from engram.config.presets import CHOOSING, load_config
from engram.engine.training import Runtime
from engram.report.sweep_table import on_what, sweep_tables
from engram.runs import metrics
from engram.runs.run import open_runs, read_run
from engram.runs.sweep.axes import Choice, Range, check_axes, parse_axis, parse_choice
from engram.runs.sweep.points import Tried, best_of, grid, num_survivors, rungs, survivors
from engram.runs.sweep.run import Plan, run_sweep
from engram.runs.sweep.search import Search

# --- what is swept


def test_axes_are_read_as_a_person_types_them() -> None:
    assert parse_choice("strength=0.1,1,10") == Choice("strength", (0.1, 1.0, 10.0))
    assert parse_choice(" hidden = [100],[400, 400]") == Choice("hidden", ((100,), (400, 400)))
    assert parse_choice("alpha=synapse,uniform") == Choice("alpha", ("synapse", "uniform"))
    assert parse_choice("learn_eta=true,false") == Choice("learn_eta", (True, False))
    assert parse_axis("eta=0.0001..0.1:log") == Range("eta", 1e-4, 0.1, True)
    assert parse_axis("epochs=1..5") == Range("epochs", 1, 5, False)
    assert parse_axis("eta=0.1,0.2") == Choice("eta", (0.1, 0.2))
    assert str(parse_axis("eta=0.0001..0.1:log")) == "eta=0.0001..0.1:log"
    assert str(parse_choice("hidden=[100],[4,4]")) == "hidden=[100],[4, 4]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strength", "written name=value"),
        ("strength=", "written name=value"),
        ("strenght=1", "did you mean strength?"),
        ("strength=x", "strength must be a number, not 'x'"),
        ("strength=1,1.0", "given twice"),
        ("strength=1..0.1", "to a larger one"),
        ("strength=1..x", "are not numbers"),
        ("strength=0..1:log", "starts above 0"),
        ("strength=1..2:lag", "low..high:log"),
        ("strength=1..inf", "to a larger one"),
        ("epochs=1.5..3", "whole number"),
        ("alpha=a..b", "give its values"),
    ],
)
def test_malformed_axes_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_axis(text)
    assert words in str(refused.value)


def test_a_sweep_is_over_how_something_is_learned_and_not_over_what() -> None:
    for name in ("trials=1,2", "seed=1,2", "num_tasks=2,3", "method=si,mas", "dataset=mnist,notmnist"):
        with pytest.raises(InputError, match="cannot vary"):
            check_axes([parse_choice(name)])
    with pytest.raises(InputError, match="given twice"):
        check_axes([parse_choice("eta=0.1"), parse_choice("eta=0.2")])
    with pytest.raises(InputError, match="something to vary"):
        check_axes([])


def test_a_grid_is_every_combination() -> None:
    points = grid([parse_choice("eta=0.1,0.2"), parse_choice("strength=1,2,3")])
    assert len(points) == 6
    assert points[1] == {"eta": 0.1, "strength": 2.0}
    many = [Choice(name, tuple(range(1, 101))) for name in ("xi", "strength", "eta")]
    with pytest.raises(InputError, match="1000000 points is too large"):
        grid(many)


# --- what is dropped


def test_no_point_is_dropped_before_three_trials() -> None:
    assert rungs(10, True) == [3, 10]
    assert rungs(30, True) == [3, 10, 30]
    assert rungs(9, True) == [3, 9]
    for few in (1, 2, 3, 8):
        assert rungs(few, True) == [few]
    assert rungs(10, False) == [10]


def test_the_better_third_gets_more_trials_and_so_does_what_is_not_clearly_worse() -> None:
    assert [num_survivors(n) for n in (1, 2, 3, 6, 7, 30)] == [1, 2, 2, 2, 3, 10]
    steady = {name: [level, level + 0.01, level] for name, level in zip("abcdefg", range(7), strict=True)}
    assert survivors(steady) == ["e", "f", "g"]
    # d is behind g by 3 points on average, but not in every trial: its interval includes zero.
    assert survivors(steady | {"d": [6.5, 1.0, 1.5]}) == ["d", "e", "f", "g"]
    assert survivors({}) == []


def test_a_tie_is_never_dropped() -> None:
    assert survivors({name: [0.5, 0.6, 0.7] for name in "abcd"}) == ["a", "b", "c", "d"]
    # c and d have the same mean, and both are clearly worse than a; c is in the better half only by its place.
    scores = {"a": [0.9, 0.9, 0.9], "d": [0.5, 0.5, 0.5], "c": [0.5, 0.5, 0.5], "e": [0.1, 0.1, 0.1]}
    assert survivors(scores) == ["a", "d", "c"]


def test_more_points_need_more_certainty() -> None:
    """Of many points one is far behind by chance. With two others t(2) must be 4.3, with five 7.0."""
    behind = [0.44, 0.46, 0.47]  # by 0.0433 with an SEM of 0.0088: t is 4.9
    few = {"a": [0.5, 0.5, 0.5], "b": [0.5, 0.5, 0.5], "c": behind}
    assert survivors(few) == ["a", "b"]
    many = few | {f"worse {k}": [0.1, 0.1, 0.1] for k in range(3)}
    assert survivors(many) == ["a", "b", "c"]


def test_the_order_of_the_trials_does_not_break_a_tie() -> None:
    """b and c have the same scores in another order, and the sum of one order is smaller in its last digit."""
    b, c = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]
    assert np.mean(c) < np.mean(b)
    scores = {"a": [0.9, 0.91, 0.9], "b": b, "c": c, "d": [0.0, 0.0, 0.0]}
    assert survivors(scores) == ["a", "b", "c"]


def test_a_dropped_point_is_clearly_worse_than_each_of_several_best() -> None:
    """a and b are equally good; d follows b up and down, so only the comparison with b is certain."""
    scores = {"a": [0.5, 0.9, 0.7], "b": [0.9, 0.5, 0.7], "c": [0.6, 0.9, 0.55], "d": [0.8, 0.4, 0.6]}
    shuffled = {name: scores[name] for name in "bdca"}
    assert survivors(scores) == ["a", "b", "c", "d"]
    assert set(survivors(shuffled)) == set(survivors(scores)), "and their order does not matter"


@given(
    st.integers(1, 5).flatmap(
        lambda trials: st.lists(
            st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 0.9]), min_size=trials, max_size=trials),
            min_size=1,
            max_size=9,
        )
    ),
    st.randoms(use_true_random=False),
)
def test_what_is_dropped_is_clearly_worse_and_no_tie_and_had_more_than_one_trial(
    points: list[list[float]], random: Random
) -> None:
    scores = dict(enumerate(points))
    kept = survivors(scores)
    assert len(kept) >= num_survivors(len(points))
    best = max(scores.values(), key=sum)
    least = sorted(map(sum, points), reverse=True)[num_survivors(len(points)) - 1]
    for name in scores.keys() - set(kept):
        own = scores[name]
        assert len(own) > 1
        assert metrics.paired_difference(own, best).high < 0
        assert sum(own) < least - 1e-9, "it does not tie with any of the better third"
        assert own not in [scores[other] for other in kept]
    names = list(scores)
    random.shuffle(names)
    assert set(survivors({name: scores[name] for name in names})) == set(kept)


def test_points_are_compared_in_the_trials_that_both_have() -> None:
    """The second trial is easy; one point has not had it, which says nothing against it."""
    assert survivors({"a": [0.5, 0.9], "b": [0.45, 0.85], "c": [0.5]}) == ["a", "b", "c"]


# --- Optuna


def asked(seed: int, scores: float) -> list[dict[str, object]]:
    axes = [parse_axis(text) for text in ("strength=0.01..100:log", "epochs=1..9", "alpha=synapse,uniform")]
    search = Search(axes, 25, seed)
    points = []
    while generation := search.next():
        points += generation
        search.add_scores([[scores * k] for k in range(len(generation))], [k % 2 == 0 for k in range(len(generation))])
    return points


def test_a_resumed_search_asks_for_the_same_points() -> None:
    pytest.importorskip("optuna")
    points = asked(1, 0.01)
    assert len(points) == 25
    assert points == asked(1, 0.01)
    assert points != asked(2, 0.01)
    assert points[:10] == asked(1, -0.01)[:10]
    assert points[10:] != asked(1, -0.01)[10:], "what was found has a say in what is sought"
    for point in points:
        assert 0.01 <= point["strength"] <= 100
        assert type(point["epochs"]) is int
        assert point["alpha"] in ("synapse", "uniform")


def test_without_optuna_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'engram-cl\[optuna\]'"):
        Search([parse_axis("eta=0..1")], 3, 0)


# --- running

SMALL = {"dataset": "mnist-small", "num_tasks": 2, "epochs": 1, "hidden": [8], "batch_size": 20, "trials": 9}


def a_plan(*axes: str, num_points: int | None = None, prune: bool = True, **changes: object) -> Plan:
    bases = [preset("split-mnist", method, **SMALL | CHOOSING | changes) for method in ("si", "dhp+si")]
    return Plan(bases, [parse_axis(axis) for axis in axes], num_points, prune)


def tried_in(plan: Plan, folder: Path, **options: object) -> list[Tried]:
    usual = {"runtime": Runtime("cpu"), "command": "engram sweep"}
    return run_sweep(plan, [small_digits(300, 60)], folder, **usual | options)


RATES = ("1e-06", "0.1", "0.2", "0.3")
GRID = (f"learning_rate={','.join(RATES)}", "xi=0.1")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Tried], list[float]]:
    """A sweep, and how far it said to be."""
    shares: list[float] = []
    folder = tmp_path_factory.mktemp("sweep")
    return tried_in(a_plan(*GRID), folder, report=lambda progress: shares.append(progress.done)), shares


def test_a_sweep_tries_all_points_and_gives_up_the_worse(swept: tuple[list[Tried], list[float]]) -> None:
    tried, shares = swept
    assert [each.config.method for each in tried] == ["si"] * 4 + ["dhp+si"] * 4
    for own in (tried[:4], tried[4:]):
        dropped = [each for each in own if not each.finished]
        assert dropped
        assert {len(each.scores) for each in dropped} == {3}
        kept = survivors({each.label: each.scores[:3] for each in own})
        assert kept == [each.label for each in own if each.finished]
        leader = max((each.scores[:3] for each in own), key=sum)
        assert all(metrics.paired_difference(each.scores, leader).high < 0 for each in dropped), "clearly worse"
        assert best_of(own).mean == max(each.mean for each in own if each.finished)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_dropped_points_save_trials_and_change_no_other_point(
    swept: tuple[list[Tried], list[float]], tmp_path: Path
) -> None:
    whole = tried_in(a_plan(*GRID, prune=False), tmp_path)
    for one, other in zip(swept[0], whole, strict=True):
        assert len(other.scores) == 9
        assert one.scores == other.scores[: len(one.scores)]


def test_a_stopped_sweep_resumes_to_the_same_results(swept: tuple[list[Tried], list[float]], tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    for share in (0.01, 0.3, 0.6, 0.9):

        def stop(progress: Progress, share: float = share) -> None:
            if progress.done > share:
                raise Stop

        with pytest.raises(Stop):
            tried_in(a_plan(*GRID), tmp_path, report=stop)
    assert [vars(each) for each in tried_in(a_plan(*GRID), tmp_path)] == [vars(each) for each in swept[0]]
    assert [vars(each) for each in tried_in(a_plan(*GRID), tmp_path)] == [vars(each) for each in swept[0]]


def test_a_search_tries_nothing_twice(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    tried = tried_in(a_plan("penalty_step=proximal,gradient", num_points=12, trials=1), tmp_path)
    assert sorted((each.config.method, each.point["penalty_step"]) for each in tried) == [
        (method, step) for method in ("dhp+si", "si") for step in ("gradient", "proximal")
    ]


def test_trials_that_diverge_count_as_nothing(tmp_path: Path) -> None:
    tried = tried_in(a_plan("learning_rate=0.01,1e30", trials=2), tmp_path)
    lost = [each for each in tried if each.num_diverged]
    assert [each.point for each in lost] == [{"learning_rate": 1e30}] * 2
    assert all(each.scores == [0.0, 0.0] for each in lost)
    assert best_of(tried[:2]).point == {"learning_rate": 0.01}


def memory_plan(*axes: str, methods: tuple[str, ...], trials: int = 2, num_points: int | None = None) -> Plan:
    """Each task has fewer samples than random features: without shrinkage their second moment is singular."""
    base = SMALL | CHOOSING | {"trials": trials, "random_features": 300, "random_window": 0}
    bases = [preset("split-mnist", method, **{k: v for k, v in base.items() if k != "hidden"}) for method in methods]
    return Plan(bases, [parse_axis(axis) for axis in axes], num_points)


def test_a_point_with_a_singular_moment_fails_and_the_sweep_goes_on(tmp_path: Path) -> None:
    plan = memory_plan("shrinkage=0,0.1", methods=("slda", "ridge"))
    tried = tried_in(plan, tmp_path / "all")
    words = "the second moment of the 300 features is singular"
    for lost, kept in (tried[:2], tried[2:]):
        assert (lost.scores, lost.num_diverged, kept.num_diverged, kept.why) == ([0.0, 0.0], 2, 0, None)
        assert str(lost.why).startswith(words)
        assert min(kept.scores) > 0.5
        assert best_of((lost, kept)) is kept
        line = f"{lost.label}: trials failed, and count as an accuracy of 0: {lost.why}"
        assert (tmp_path / "all" / "log.txt").read_text().count(line) == 1
    sound = tried_in(memory_plan("shrinkage=0.1", methods=("slda", "ridge")), tmp_path / "sound")
    assert [each.scores for each in sound] == [each.scores for each in tried[1::2]]
    assert [vars(each) for each in tried_in(plan, tmp_path / "all")] == [vars(each) for each in tried], "read again"
    for table in sweep_tables(read_run(tmp_path / "all")):
        why = f"shrinkage 0: 2 trials failed, and count as an accuracy of 0: {words}"
        assert sum(note.startswith(why) for note in table.notes) == 1


def test_a_sweep_goes_on_after_points_that_all_fail(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    axes = ("shrinkage=0", "batch_size=10..90")
    tried = tried_in(memory_plan(*axes, methods=("slda",), trials=1, num_points=11), tmp_path)
    assert len({each.point["batch_size"] for each in tried}) > 1
    assert all(each.scores == [0.0] and each.why for each in tried)
    assert len(list((tmp_path / "runs").iterdir())) == 2, "of ten points, and of one"


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    tried_in(a_plan("xi=0.1", trials=1), tmp_path / "one")
    with pytest.raises(InputError, match="one holds a sweep of other methods or settings: name another"):
        tried_in(a_plan("xi=0.2", trials=1), tmp_path / "one")
    with pytest.raises(InputError, match="one holds a sweep of other methods or settings"):
        tried_in(a_plan("xi=0.1", trials=1), tmp_path / "one", runtime=Runtime("cpu", "float64"))
    with pytest.raises(InputError, match="one holds a sweep of other data"):
        run_sweep(a_plan("xi=0.1", trials=1), [small_digits(299, 60)], tmp_path / "one", command="engram sweep")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty \(it holds mine.txt\)"):
        tried_in(a_plan("xi=0.2", trials=1), tmp_path / "two")


def test_a_penalty_that_cannot_be_built_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: object, **settings: object) -> None:
        raise InputError("it cannot be built")

    monkeypatch.setitem(PENALTIES._registered, "mine", Registration("mine", refused, {"strength": 1.0}))
    plan = Plan([preset("split-mnist", "mine", **SMALL | CHOOSING)], [parse_axis("strength=1,2")])
    with pytest.raises(InputError, match="it cannot be built"):
        tried_in(plan, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_a_range_is_not_a_grid() -> None:
    with pytest.raises(InputError, match="is a range"):
        a_plan("xi=0.1..0.2")
    with pytest.raises(InputError, match="at least one point"):
        a_plan("xi=0.1..0.2", num_points=0)
    bases = [preset("split-mnist", "finetune")]
    for axis in ("strength=1,2", "eta=0.1", "xi=0.1", "gamma=0.5", "protect=slow"):
        with pytest.raises(InputError, match="has no effect on the method finetune"):
            Plan(bases, [parse_choice(axis)])


def test_one_axis_may_give_another_its_effect() -> None:
    bases = [preset("split-mnist", "slda+si")]
    window, features = parse_choice("random_window=2,3"), parse_choice("random_features=0,9")
    with pytest.raises(InputError, match="random_window has no effect on the method slda"):
        Plan(bases, [window])
    assert len(Plan(bases, [window, features]).varied(bases[0])) == 5
    Plan([preset("split-mnist", "si")], [parse_choice("beta1=0.8,0.9"), parse_choice("optimizer=sgd,adam")])


def test_two_values_are_two_points() -> None:
    assert [str(parse_choice(f"xi={text}")) for text in ("1", "1.0000001")] == ["xi=1", "xi=1.0000001"]


def test_a_sweep_whose_folder_vanished_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"

    def vanish(progress: Progress) -> None:
        if folder.exists() and progress.done > 0.1:
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(InputError, match="the folder was removed; they are in"):
        tried_in(a_plan("xi=0.1,0.2", trials=1), folder, report=vanish)
    assert not folder.exists()


def test_a_sweep_resumed_elsewhere_warns(tmp_path: Path) -> None:
    tried_in(a_plan("xi=0.1", trials=1), tmp_path)
    content = json.loads((tmp_path / "sweep.json").read_text())
    content["environment"]["torch"] = "1.0"
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    notes: list[str | None] = []
    tried_in(a_plan("xi=0.1", trials=1), tmp_path, report=lambda progress: notes.append(progress.note))
    assert "torch 1.0 is now" in notes[0]
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept["environment"]["torch"] == "1.0", "what it was started with is kept"
    assert kept["started"] == content["started"]


def test_a_sweep_is_read_as_one_run_with_all_its_trials(tmp_path: Path) -> None:
    tried = tried_in(a_plan(*GRID), tmp_path / "mine")
    (run,) = open_runs(tmp_path / "mine").values()
    assert run.finished
    assert list(run.results) == [f"{m}: learning_rate {rate}, xi 0.1" for m in ("si", "dhp+si") for rate in RATES]
    for each in tried:
        result = run.results[each.label]
        assert result.trials == tuple(range(len(each.scores)))
        assert result.average_accuracy[:, -1] == pytest.approx(each.scores, abs=1e-5)
        assert run.state(each.label) == "finished"


def test_an_unfinished_sweep_says_so(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.done > 0.5:
            raise Stop

    with pytest.raises(Stop):
        tried_in(a_plan(*GRID), tmp_path, report=stop)
    run = read_run(tmp_path)
    assert not run.finished
    assert {run.state(label) for label in run.configs} == {"unfinished"}


def test_it_is_said_on_what_the_best_was_chosen() -> None:
    usual = preset("split-mnist", "si")
    chosen = usual.replace(**CHOOSING)
    assert on_what(chosen, usual) == "on the test samples, with other seeds"
    assert on_what(chosen.replace(seed=0), usual) == "on the test samples, with the same seeds"
    assert "on which it was chosen" in on_what(chosen.replace(examine="test"), usual)


# --- the command


def test_the_command_prints_the_best_and_leaves_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["sweep", "split-mnist", "--methods", "si", "--grid", "learning_rate=0.001,0.1,0.3", "--dataset",
               "mnist-small", "--tasks", "2", "--trials", "9", "--epochs", "1", "--set", "hidden=[8]", "--set",
               "max_samples=200", "--set", "batch_size=20", "--out", str(out)]  # fmt: skip
    for _ in range(2):  # the second time nothing is run
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code is None
        printed = capsys.readouterr().out
        assert "si on split-mnist (mnist-small), 3 points" in printed
        assert "best" in printed
        assert "dropped" in printed
        assert f"`engram run {out / 'best-si.toml'}` runs the best on the test samples" in printed
    with (out / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    (best,) = [row for row in rows if row["state"] == "best"]
    assert len(rows) == 3
    assert float(best["accuracy"]) == max(float(row["accuracy"]) for row in rows if row["trials"] == "9")
    config = load_config(out / "best-si.toml")
    assert (config.examine, config.seed, config.trials) == ("test", 0, 10)
    assert config.learning_rate == float(best["learning_rate"])
    assert (out / "sweep.png").stat().st_size > 5000
    assert json.loads((out / "sweep.json").read_text())["axes"] == ["learning_rate=0.001,0.1,0.3"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "a sweep needs something to vary"),
        (["--grid", "eta=0.1", "--search", "eta=0..1"], "--grid and --search cannot be given together"),
        (["--grid", "eta=0.1", "--points", "3"], "--points applies only to --search"),
        (["--grid", "eta=0.1,7"], "eta must be in [0, 1], not 7.0"),
        (["--search", "eta=0..7"], "eta must be in [0, 1], not 7.0"),
    ],
)
def test_what_cannot_be_swept_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "sweep",
                "split-mnist",
                "--methods",
                "dhp",
                "--dataset",
                "mnist-small",
                *given,
                "--out",
                str(tmp_path / "x"),
            ]
        )
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
