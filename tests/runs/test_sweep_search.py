"""A search is in Optuna's storage too: a copy of the folder that is brought up to date, whatever happened to it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from builders import small_digits
from engram import Progress, preset
from engram.cli.main import main
from engram.config.presets import CHOOSING
from engram.engine.training import Runtime
from engram.runs.sweep.axes import parse_axis
from engram.runs.sweep.points import Tried
from engram.runs.sweep.run import Plan, run_sweep
from engram.runs.sweep.search import STUDY, Search, save_studies, study_name

optuna = pytest.importorskip("optuna")

SMALL = {"dataset": "mnist-small", "num_tasks": 2, "epochs": 1, "batch_size": 20, "trials": 9}
AXES = ("learning_rate=1e-06..1000:log", "hidden=[8],[16]", "batch_size=10..30")
NAMES = ("split-mnist: si", "split-mnist: dhp+si")


def a_plan(num_points: int = 11, **changes: object) -> Plan:
    bases = [preset("split-mnist", method, **SMALL | CHOOSING | changes) for method in ("si", "dhp+si")]
    return Plan(bases, [parse_axis(axis) for axis in AXES], num_points)


def sweep(folder: Path, plan: Plan | None = None, **options: Any) -> list[Tried]:
    usual = {"runtime": Runtime("cpu"), "command": "engram sweep"}
    return run_sweep(plan or a_plan(), [small_digits(900, 60)], folder, **usual | options)


def load(folder: Path, name: str) -> Any:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder / STUDY}")


def said(folder: Path) -> list[tuple[Any, ...]]:
    """Everything that the studies of both methods say."""
    return [
        (name, trial.number, trial.state.name, trial.params, trial.values, trial.intermediate_values, trial.user_attrs)
        for name in NAMES
        for trial in load(folder, name).trials
    ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tried]]:
    folder = tmp_path_factory.mktemp("search") / "sweep"
    return folder, sweep(folder)


@pytest.fixture
def copied(swept: tuple[Path, list[Tried]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(swept[0], tmp_path / "copy"))


# --- what is in it


def test_optuna_loads_the_study_of_each_method_with_every_point(swept: tuple[Path, list[Tried]]) -> None:
    folder, tried = swept
    assert {summary.study_name for summary in optuna.get_all_study_summaries(f"sqlite:///{folder / STUDY}")} == {*NAMES}
    states = set()
    for name, method in zip(NAMES, ("si", "dhp+si"), strict=True):
        study = load(folder, name)
        own = [each for each in tried if each.config.method == method]
        assert study.direction.name == "MAXIMIZE"
        assert study.user_attrs["command"] == "engram sweep"
        assert len(study.trials) == len(own) == 11
        for trial, each in zip(study.trials, own, strict=True):
            assert trial.params == {**each.point, "hidden": str(list(each.point["hidden"]))}
            assert trial.intermediate_values == {
                n: pytest.approx(sum(each.scores[:n]) / n) for n in range(1, 1 + len(each.scores))
            }
            assert trial.user_attrs["trials"] == len(each.scores)
            states.add(trial.state.name)
            if each.failed:
                assert (trial.state.name, trial.value) == ("FAIL", None)
                assert trial.user_attrs["why"] == "diverged"
            else:
                assert trial.state.name == ("COMPLETE" if each.finished else "PRUNED")
                assert trial.value == pytest.approx(each.mean)
        best = max((each for each in own if each.finished), key=lambda each: each.mean)
        assert study.best_params == {**best.point, "hidden": str(list(best.point["hidden"]))}
        assert study.best_value == pytest.approx(best.mean)
    assert states == {"COMPLETE", "PRUNED", "FAIL"}


def test_a_reason_is_kept(tmp_path: Path) -> None:
    base = preset("split-mnist", "slda", dataset="mnist-small", num_tasks=2, trials=1, random_features=300, **CHOOSING)
    plan = Plan([base.replace(random_window=0)], [parse_axis("shrinkage=0"), parse_axis("batch_size=10..90")], 2)
    tried = sweep(tmp_path, plan)
    trials = load(tmp_path, "split-mnist: slda").trials
    assert {trial.state.name for trial in trials} == {"FAIL"}
    assert trials[0].user_attrs["why"] == tried[0].why
    assert "singular" in str(tried[0].why)


def test_a_point_that_is_proposed_twice_is_in_the_study_twice_and_says_so(tmp_path: Path) -> None:
    axes = [parse_axis("penalty_step=proximal,gradient")]
    plan = Plan([preset("split-mnist", "si", **SMALL | CHOOSING | {"trials": 1})], axes, 12)
    tried = sweep(tmp_path, plan)
    trials = load(tmp_path, "split-mnist: si").trials
    assert (len(tried), len(trials)) == (2, 12)
    for trial in trials:
        first = trials[trial.user_attrs.get("same point as", trial.number)]
        assert (trial.params, trial.value) == (first.params, first.value)
    assert sum("same point as" not in trial.user_attrs for trial in trials) == 2


def test_proposed_points_are_inside_their_ranges() -> None:
    """0.12346 rounds to 0.1235 and 0.123454 to 0.1235: to four digits both are outside of the range between."""
    search = Search([parse_axis("eta=0.123454..0.12346")], 10, 0)
    assert all(0.123454 <= point["eta"] <= 0.12346 for point in search.next())


def test_a_grid_has_no_study(tmp_path: Path) -> None:
    sweep(tmp_path, Plan([preset("split-mnist", "si", **SMALL | CHOOSING | {"trials": 1})], [parse_axis("xi=0.1")]))
    assert not (tmp_path / STUDY).exists()


def test_a_scenario_is_in_the_name() -> None:
    assert study_name(preset("split-mnist", "si", scenario="class")) == "split-mnist, class-incremental: si"


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """Some characters have a meaning in an address of a database."""
    folder = tmp_path / "a {b}?c=d%20#e"
    plan = Plan([preset("split-mnist", "si", **SMALL | CHOOSING | {"trials": 1})], [parse_axis("xi=0.1..0.2")], 1)
    sweep(folder, plan)
    assert sorted(path.name for path in folder.iterdir()) == ["log.txt", "runs", "study.db", "sweep.json"]


def test_the_command_says_how_to_look_at_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["sweep", "split-mnist", "--methods", "si", "--search", "strength=0.1..10:log", "--points", "2",
               "--dataset", "mnist-small", "--tasks", "2", "--trials", "1", "--epochs", "1", "--set", "hidden=[8]",
               "--set", "max_samples=100", "--out", str(out)]  # fmt: skip
    with pytest.raises(SystemExit):
        main(command)
    printed = capsys.readouterr().out
    assert f"`optuna-dashboard sqlite:///{out}/study.db` shows the search" in printed
    assert f"`engram report {out}` makes a page" in printed
    assert len(load(out, "split-mnist: si").trials) == 2


# --- the folder is the record


def slow(*cases: Any) -> list[Any]:
    """More cases of what another one tests already; each writes the whole study again."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


class Stop(Exception):
    pass


def test_a_resumed_search_doubles_nothing(swept: tuple[Path, list[Tried]], tmp_path: Path) -> None:
    for share in (0.05, 0.4, 0.92, 0.97):

        def stop(progress: Progress, share: float = share) -> None:
            if progress.done > share:
                raise Stop

        with pytest.raises(Stop):
            sweep(tmp_path, report=stop)
        if share == 0.92:  # in the second generation, of one point: points are added while the search goes on
            assert said(tmp_path) == [row for row in said(swept[0]) if row[1] < 10]
    sweep(tmp_path)
    assert said(tmp_path) == said(swept[0])
    sweep(tmp_path)
    assert said(tmp_path) == said(swept[0])


@pytest.mark.parametrize("added", [12, *slow(0, 1, 9)])
def test_a_search_that_is_killed_while_the_file_is_written_loses_nothing(
    swept: tuple[Path, list[Tried]], copied: Path, monkeypatch: pytest.MonkeyPatch, added: int
) -> None:
    (copied / STUDY).unlink()
    add, calls = optuna.study.Study.add_trial, []

    def kill(study: Any, trial: Any) -> None:
        if len(calls) == added:
            raise KeyboardInterrupt
        calls.append(trial)
        add(study, trial)

    with monkeypatch.context() as patched:
        patched.setattr(optuna.study.Study, "add_trial", kill)
        with pytest.raises(KeyboardInterrupt):
            sweep(copied)
    assert sum(len(load(copied, name).trials) for name in NAMES[: 1 + added // 11]) == added
    sweep(copied)
    assert said(copied) == said(swept[0])


def by_hand(study: Any) -> None:
    study.add_trial(study.trials[0])


def optimized(study: Any) -> None:
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)


def enqueued(study: Any) -> None:
    study.enqueue_trial({"learning_rate": 0.1})


def removed(study: Any) -> None:
    optuna.delete_study(study_name=study.study_name, storage=study._storage)


@pytest.mark.parametrize("change", [by_hand, *slow(optimized, enqueued, removed)])
def test_a_file_that_says_something_else_is_written_again(
    swept: tuple[Path, list[Tried]], copied: Path, change: Any
) -> None:
    change(load(copied, NAMES[0]))
    sweep(copied)
    assert said(copied) == said(swept[0])


def test_a_changed_value_is_put_right(swept: tuple[Path, list[Tried]], copied: Path) -> None:
    with sqlite3.connect(copied / STUDY) as database:
        database.execute("update trial_values set value = 0.99")
    sweep(copied)
    assert said(copied) == said(swept[0])


def test_remarks_that_a_person_added_stay(copied: Path) -> None:
    load(copied, NAMES[0]).set_user_attr("mine", "look at this again")
    sweep(copied)
    assert load(copied, NAMES[0]).user_attrs["mine"] == "look at this again"


def no_database(path: Path) -> None:
    path.write_bytes(b"no database at all" * 500)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10_000])


def other_tables(path: Path) -> None:
    """As another version of Optuna would have left it."""
    with sqlite3.connect(path) as database:
        database.execute("update alembic_version set version_num = 'v99.0.0.a'")


def unlinked(path: Path) -> None:
    path.unlink()


def old_journal(path: Path) -> None:
    no_database(path)
    path.with_name("study.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(3000))


@pytest.mark.parametrize("damage", [old_journal, *slow(no_database, cut, other_tables, unlinked)])
def test_a_damaged_file_is_written_again(swept: tuple[Path, list[Tried]], copied: Path, damage: Any) -> None:
    damage(copied / STUDY)
    sweep(copied)
    assert said(copied) == said(swept[0])
    assert not (copied / "study.db-journal").exists()


def test_a_file_that_cannot_be_written_does_not_end_the_sweep(swept: tuple[Path, list[Tried]], copied: Path) -> None:
    (copied / STUDY).unlink()
    (copied / STUDY).mkdir()
    notes: list[str] = []
    tried = sweep(copied, report=lambda progress: notes.append(progress.note or ""))
    assert [vars(each) for each in tried] == [vars(each) for each in swept[1]]
    assert "study.db cannot be written" in notes[-1]
    assert notes[-1] in (copied / "log.txt").read_text()
    (copied / STUDY).rmdir()
    sweep(copied)
    assert said(copied) == said(swept[0])


def test_a_file_that_somebody_reads_is_still_brought_up_to_date(copied: Path, swept: tuple[Path, list[Tried]]) -> None:
    """As the dashboard does while the sweep goes on: it sees what is added."""
    study = load(copied, NAMES[0])
    assert len(study.trials) == 11
    more = sweep_of_points(swept[1], "si") * 2
    assert save_studies(copied / STUDY, a_plan().axes, [more], {}) is None
    assert len(study.trials) == 22


def sweep_of_points(tried: list[Tried], method: str) -> list[Tried]:
    return [each for each in tried if each.config.method == method]


WRITING = """
import sys
from pathlib import Path
from test_sweep_search import a_plan, made_up
from engram.runs.sweep.search import save_studies
import optuna
optuna.storages.RDBStorage("sqlite://")  # imports everything
print("ready", flush=True)
save_studies(Path(sys.argv[1]), a_plan().axes, [made_up(60)], {"command": "engram sweep"})
print("done", flush=True)
"""


def made_up(number: int) -> list[Tried]:
    config, draw, found = preset("split-mnist", "si", **SMALL | CHOOSING), random.Random(0), []
    for k in range(number):
        point = {"learning_rate": 0.001 * (k + 1), "hidden": (8,), "batch_size": 10 + k % 20}
        scores = [round(draw.random(), 5) for _ in range(9 if k % 3 else 3)]
        found.append(Tried(point, config.replace(**point), scores))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2])
def test_a_process_that_is_killed_while_it_writes_leaves_a_file_that_is_brought_up_to_date(
    tmp_path: Path, seconds: float
) -> None:
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests / "runs"), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(tmp_path / STUDY)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wanted = made_up(60)
    assert save_studies(tmp_path / STUDY, a_plan().axes, [wanted], {"command": "engram sweep"}) is None
    trials = load(tmp_path, NAMES[0]).trials
    assert [trial.value for trial in trials] == [pytest.approx(each.mean) for each in wanted]
    assert [len(trial.intermediate_values) for trial in trials] == [len(each.scores) for each in wanted]
    assert not (tmp_path / "study.db-journal").exists()
