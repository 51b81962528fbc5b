"""The store of many runs: what it lists is what lies in the folders, whatever becomes of them or of its index."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import operator
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram import Config, Divergence, InputError, Result, preset
from engram.cli.main import main
from engram.common.files import write_atomically
from engram.config.settings import SETTINGS
from engram.runs.result import write_result
from engram.runs.sheets import Sheet, write_sheet
from engram.runs.store import export as exporting
from engram.runs.store import index as indexing
from engram.runs.store import rows as reading
from engram.runs.store import survey as surveying
from engram.runs.store.cells import in_csv
from engram.runs.store.export import columns, export
from engram.runs.store.index import NAME, Index
from engram.runs.store.query import parse_condition, parse_conditions, select

ROOT = Path(__file__).parents[2]
make_runs = runpy.run_path(str(ROOT / "benchmarks" / "runs_store.py"))["make_runs"]
DATA = [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}]
TASKS = 3


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once, so that it is seen what is read again; one test is about the waiting."""
    monkeypatch.setattr(indexing, "SETTLED_NS", -(10**12))


def config_of(method: str = "si", **changes: Any) -> Config:
    return preset("split-mnist", method, dataset="mnist-small", num_tasks=TASKS, **{"trials": 2, **changes})


def result_of(config: Config, level: float = 0.5, trials: int | None = None, **more: Any) -> Result:
    trials = config.trials if trials is None else trials
    noise = np.random.default_rng(config.seed).random((trials, config.num_tasks, config.num_tasks))
    untrained = np.full((trials, config.num_tasks), 0.1)
    first = config.first_trial
    numbers = tuple(range(first, first + trials))
    return Result(config, numbers, np.clip(level + 0.1 * noise, 0, 1), untrained, data=DATA, **more)


def make_run(folder: Path, *results: Result, finished: bool = True, **about: Any) -> Path:
    for result in results:
        write_result(result, folder / result.config.method)
    description = {
        "format": 1,
        "benchmark": results[0].config.benchmark,
        "methods": [result.config.method for result in results],
        "command": "engram run",
        "started": "2026-02-03T04:05:06+00:00",
        "versions": {"engram": "0.1.0"},
        "fingerprints": ["f5"],
        **({"finished": "2026-02-03T05:05:06+00:00"} if finished else {}),
        **about,
    }
    (folder / "run.json").write_text(json.dumps(description))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs in every state, at several depths, a single result and a sheet."""
    folder = tmp_path / "runs"
    make_run(folder / "one", result_of(config_of("si")), result_of(config_of("dhp+si"), 0.8))
    make_run(folder / "deep" / "er" / "two", result_of(config_of("mas", seed=3, epochs=2)))
    make_run(folder / "going", result_of(config_of("si", trials=4), trials=2), finished=False)
    lost = result_of(config_of("ewc", strength=1e6), diverged=[Divergence(0, 1, 7)])
    lost.accuracy[0, 1:] = math.nan
    make_run(folder / "lost", lost)
    result_of(config_of("finetune", seed=4), 0.3).save(folder / "single")
    sheet = Sheet("table", "split-mnist", {"dhp": result_of(config_of("dhp", seed=9))}, {"data": DATA})
    write_sheet(sheet, folder / "paper" / "split-mnist" / "table.json")
    (folder / "empty").mkdir()
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").touch()
    broken = make_run(folder / "broken", result_of(config_of("si")), result_of(config_of("mas")))
    (broken / "si" / "accuracy.json").write_text("{")
    return folder


def listing(folder: Path, **how: Any) -> list[dict[str, Any]]:
    return select(Index(folder), settings=tuple(SETTINGS), **how)


def rebuilt(folder: Path) -> list[dict[str, Any]]:
    (folder / NAME).unlink(missing_ok=True)
    return listing(folder)


def states(folder: Path) -> dict[tuple[str, str], str]:
    return {(row["run"], row["label"]): row["state"] for row in listing(folder)}


# --- what is found


def test_every_run_is_listed_in_its_state(runs: Path) -> None:
    assert states(runs) == {
        ("begun", ""): "unfinished",
        ("broken", "mas"): "finished",
        ("broken", "si"): "damaged",
        ("deep/er/two", "mas"): "finished",
        ("going", "si"): "unfinished",
        ("lost", "ewc"): "diverged",
        ("one", "dhp+si"): "finished",
        ("one", "si"): "finished",
        ("paper/split-mnist/table.json", "dhp"): "finished",
        ("single", "finetune"): "finished",
    }


def test_a_row_has_the_numbers_and_settings_of_its_result(runs: Path) -> None:
    row = next(row for row in listing(runs) if row["label"] == "dhp+si")
    result = result_of(config_of("dhp+si"), 0.8)
    final = result.average_accuracy[:, -1]
    assert row["accuracy"] == final.mean()
    assert row["sem"] == pytest.approx(final.std(ddof=1) / math.sqrt(2))
    assert row["bwt"] == pytest.approx(result.bwt.mean())
    assert (row["done"], row["trials"], row["tasks"], row["started"]) == (2, 2, 3, "2026-02-03T04:05:06+00:00")
    assert {name: row[name] for name in SETTINGS} == result.config.to_dict()


def test_links_are_followed_once_and_never_in_circles(runs: Path, tmp_path: Path) -> None:
    before = listing(runs)
    outside = make_run(tmp_path / "elsewhere" / "far", result_of(config_of("mas", seed=77))).parent
    (runs / "latest").symlink_to(runs / "one")
    (runs / "deep" / "up").symlink_to("..")
    (runs / "deep" / "top").symlink_to("/")
    (runs / "itself").symlink_to("itself")
    (outside / "back").symlink_to(runs)
    (outside / "round").symlink_to(outside)
    (runs / "away").symlink_to(outside)
    assert [row for row in listing(runs) if row["run"] != "away/far"] == before
    assert [row["seed"] for row in listing(runs) if row["run"] == "away/far"] == [77]


def test_a_run_may_be_the_folder_itself_and_gets_no_index(runs: Path) -> None:
    assert [row["run"] for row in listing(runs / "one")] == [".", "."]
    assert not (runs / "one" / NAME).exists()


def test_a_folder_without_runs_is_left_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run in .* or below it"):
        Index(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="there is no folder"):
        Index(tmp_path / "none")


def test_a_name_that_is_no_text_is_listed(tmp_path: Path) -> None:
    try:
        make_run(tmp_path / os.fsdecode(b"caf\xe9"), result_of(config_of()))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert [row["state"] for row in listing(tmp_path)] == ["finished"]
    assert [row["state"] for row in listing(tmp_path)] == ["finished"]


def test_a_folder_that_is_closed_is_named_and_the_others_are_listed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    index = Index(runs)
    assert index.closed == ["deep"]
    assert "one" in index.places()


# --- what has changed since


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The runs that are read when the index is brought up to date."""
    seen = set()
    read = reading.read_stored

    def watch(path: Path, kind: str) -> Any:
        seen.add(str(path.relative_to(folder)))
        return read(path, kind)

    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_stored", watch)
        listing(folder)
    return seen


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


CHANGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "nothing": (lambda runs: None, set()),
    "a new run": (lambda runs: make_run(runs / "deep" / "new", result_of(config_of())), {"deep/new"}),
    "a run is gone": (lambda runs: shutil.rmtree(runs / "one"), set()),
    "a run has moved": (lambda runs: (runs / "one").rename(runs / "deep" / "one"), {"deep/one"}),
    "it goes on": (
        lambda runs: rewrite(runs / "one" / "run.json", lambda text: text.replace('"finished"', '"once finished"')),
        {"one"},
    ),
    "a number is another": (
        lambda runs: rewrite(runs / "one" / "si" / "accuracy.json", lambda text: text.replace("0.5", "0.6", 1)),
        {"one"},
    ),
    "a setting is another": (
        lambda runs: rewrite(runs / "one" / "si" / "config.toml", lambda text: text.replace("seed = 0", "seed = 8")),
        {"one"},
    ),
    "a file is cut off": (lambda runs: os.truncate(runs / "one" / "si" / "accuracy.json", 40), {"one"}),
    "a file is gone": (lambda runs: (runs / "one" / "si" / "accuracy.json").unlink(), {"one"}),
    "a run.json is gone": (lambda runs: (runs / "one" / "run.json").unlink(), {"one/si", "one/dhp+si"}),
    "a result becomes a run": (lambda runs: (runs / "single" / "run.json").write_text("{}"), {"single"}),
    "a sheet is cut off": (
        lambda runs: os.truncate(runs / "paper/split-mnist/table.json", 50),
        {"paper/split-mnist/table.json"},
    ),
    "something else is written": (lambda runs: (runs / "one" / "log.txt").write_text("more"), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_has_changed_is_read_and_the_listing_is_a_rebuilt_one(
    change: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(runs)
    make, read = CHANGES[change]
    make(runs)
    assert opened(runs, monkeypatch) == read
    assert opened(runs, monkeypatch) == set(), "it was not kept"
    after = listing(runs)
    assert after == rebuilt(runs)
    assert (after == before) == (change in ("nothing", "something else is written"))


def test_a_change_that_leaves_size_and_time_of_modification_is_seen(runs: Path) -> None:
    path = runs / "one" / "si" / "accuracy.json"
    before, was = listing(runs), path.stat()
    rewrite(path, lambda text: text.replace("0.5", "0.6", 1))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert path.stat().st_size == was.st_size
    assert listing(runs) != before


def test_what_has_just_been_written_is_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock may be too coarse to tell two writes apart."""
    monkeypatch.setattr(indexing, "SETTLED_NS", 2_000_000_000)
    everything = opened(runs, monkeypatch)
    assert len(everything) == 8
    assert opened(runs, monkeypatch) == everything
    later = time.time_ns() + 3_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert opened(runs, monkeypatch) == everything
    assert opened(runs, monkeypatch) == set()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_jumps_makes_nothing_stale_and_hides_nothing(
    hours: int, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, files are from the future; put forward, from the past: each is read once, and when it has changed."""
    jumped = time.time_ns() + hours * 3_600_000_000_000
    monkeypatch.setattr(indexing, "SETTLED_NS", 2_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: jumped)
    assert len(opened(runs, monkeypatch)) == 8
    assert opened(runs, monkeypatch) == set()
    path = runs / "one" / "si" / "accuracy.json"
    rewrite(path, lambda text: text.replace("0.5", "0.6", 1))
    assert opened(runs, monkeypatch) == {"one"}
    assert listing(runs) == rebuilt(runs)


@pytest.mark.parametrize("year", [1971, 2300])
def test_a_time_of_modification_is_only_compared(year: int, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(runs)
    path = runs / "one" / "si" / "accuracy.json"
    rewrite(path, lambda text: text.replace("0.5", "0.6", 1))
    os.utime(path, ((year - 1970) * 31_556_952,) * 2)
    assert opened(runs, monkeypatch) == {"one"}
    assert opened(runs, monkeypatch) == set()
    assert listing(runs) == rebuilt(runs)


def test_a_file_in_the_place_of_another_is_seen_whatever_the_clock_says(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All times are the same, as within one tick; the size is too."""

    def stat(path: str) -> SimpleNamespace:
        found = os.stat(path)
        return SimpleNamespace(st_mtime_ns=1, st_ctime_ns=1, st_size=found.st_size, st_ino=found.st_ino)

    stopped = SimpleNamespace(stat=stat, scandir=os.scandir, path=os.path, sep=os.sep)
    monkeypatch.setattr(surveying, "os", stopped)
    listing(runs)
    path = runs / "one" / "si" / "accuracy.json"
    write_atomically(path, path.read_text().replace("0.5", "0.6", 1))
    assert opened(runs, monkeypatch) == {"one"}
    assert listing(runs) == rebuilt(runs)


# --- what is damaged


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "binary": lambda text: "\x00\x01",
    "surrogates": lambda text: '{"format": 1, "methods": ["\\ud800"], "started": "\\ud800"}',
    "a newer format": lambda text: text.replace('"format": 1', '"format": 99').replace("method = ", "methods = "),
}


@pytest.mark.parametrize("name", ["run.json", "si/accuracy.json", "si/config.toml"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_damaged_row_and_no_other_row_suffers(damage: str, name: str, tmp_path: Path) -> None:
    make_run(tmp_path / "sound", result_of(config_of()))
    folder = make_run(tmp_path / "hurt", result_of(config_of()), result_of(config_of("mas")))
    sound = [row for row in listing(tmp_path) if row["run"] == "sound"]
    rewrite(folder / name, DAMAGE[damage])
    rows = listing(tmp_path)
    assert [row for row in rows if row["run"] == "sound"] == sound
    hurt = {row["label"]: row["state"] for row in rows if row["run"] == "hurt"}
    expected = "unfinished" if (name, damage) == ("run.json", "empty") else "damaged"
    assert hurt == ({"": expected} if name == "run.json" else {"si": "damaged", "mas": "finished"})
    problems = [row["problem"] for row in rows if row["problem"]]
    assert len(problems) == 1
    assert "\n" not in problems[0]


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("accuracy", None), ("accuracy", [[[2.0] * 3] * 3] * 2), ("accuracy", [[[10**400] * 3] * 3] * 2), ("accuracy", []),
     ("accuracy", [[["x"] * 3] * 3] * 2), ("untrained", 3), ("diverged", [3]), ("diverged", {"a": 1}), ("data", None),
     ("data", [3]), ("accuracy", [[[0.5] * 4] * 4] * 2)],
)  # fmt: skip
def test_values_of_the_wrong_type_are_damage(key: str, wrong: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hurt", result_of(config_of()))
    path = folder / "si" / "accuracy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: wrong}))
    assert states(tmp_path) == {("hurt", "si"): "damaged"}


@pytest.mark.parametrize("wrong", [None, 3, "si", [], ["sgd"], ["../../si"], [["si"]], {"si": 1}])
def test_a_run_with_no_methods_that_could_be_is_damaged(wrong: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "hurt", result_of(config_of()), methods=wrong)
    assert states(tmp_path) == {("hurt", ""): "damaged"}


@pytest.mark.parametrize("wrong", [None, 3, "yesterday", [], "0001-01-01T00:00:00+23:59", "\ud800"])
def test_a_time_that_is_none_is_left_empty(wrong: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run", result_of(config_of()), started=wrong, benchmark=[wrong])
    assert [(row["started"], row["state"]) for row in listing(tmp_path)] == [(None, "finished")]


def test_a_seed_beyond_sixty_four_bits_is_no_trouble(tmp_path: Path) -> None:
    make_run(tmp_path / "run", result_of(config_of(seed=2**70)))
    assert [row["run"] for row in listing(tmp_path, conditions=[parse_condition(f"seed={2**70}")])] == ["run"]
    export(index := Index(tmp_path), select(index), tmp_path / "all.csv")
    assert str(2**70) in (tmp_path / "all.csv").read_text()


# --- the index itself


def test_an_index_with_any_byte_wrong_gives_the_listing_of_a_rebuilt_one(runs: Path) -> None:
    expected = listing(runs)
    whole, dice = (runs / NAME).read_bytes(), random.Random(0)
    for _ in range(60):
        hurt = bytearray(whole)
        for _ in range(dice.choice((1, 1, 10, 500))):
            hurt[dice.randrange(len(hurt))] ^= dice.randrange(1, 256)
        (runs / NAME).write_bytes(hurt[: dice.choice((len(hurt), dice.randrange(len(hurt))))])
        assert listing(runs) == expected
        assert indexing._load(runs / NAME) is not None, "it was made anew"


@pytest.mark.parametrize("content", [b"", b"\0", b"SQLite format 3\0", b"x" * 5000])
def test_an_index_that_was_forged_is_made_anew(content: bytes, runs: Path) -> None:
    """Its checksum is right, since anybody can work it out."""
    expected = listing(runs)
    (runs / NAME).write_bytes(content + hashlib.sha256(content).digest())
    assert listing(runs) == expected


def test_an_index_of_another_version_is_made_anew(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = listing(runs)
    for name, value in (("VERSION", 99), ("SCHEMA", (*indexing.SCHEMA, "CREATE TABLE more (x)"))):
        with monkeypatch.context() as patch:
            patch.setattr(indexing, name, value)
            assert listing(runs) == expected
        assert len(opened(runs, monkeypatch)) == 8
        assert listing(runs) == expected


def test_an_index_that_came_with_a_copy_is_not_believed(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing(runs)
    shutil.copytree(runs, tmp_path / "copy")
    assert len(opened(tmp_path / "copy", monkeypatch)) == 8


def test_a_folder_that_cannot_be_written_is_listed_from_memory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(30, "Read-only file system", str(path))

    monkeypatch.setattr(indexing, "replacing", refuse)
    assert len(listing(runs)) == 10
    assert not (runs / NAME).exists()


def test_a_folder_in_the_place_of_the_index_is_no_trouble(runs: Path) -> None:
    (runs / NAME).mkdir()
    assert len(listing(runs)) == 10


def test_the_index_goes_with_the_last_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run", result_of(config_of()))
    listing(tmp_path)
    assert (tmp_path / NAME).exists()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(InputError, match="there is no run"):
        listing(tmp_path)
    assert list(tmp_path.iterdir()) == [], "the folder can take a run again"


def test_what_a_killed_process_left_behind_is_removed(runs: Path) -> None:
    old, new = (runs / f".{NAME}.{word}" for word in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    listing(runs)
    assert not old.exists()
    assert new.exists(), "its process may be at work"


KILLED = """
import os, signal, sys
from pathlib import Path
from engram.cli.main import main

def die(path, content):
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)

Path.write_bytes = die
main(["runs", "list", sys.argv[1]])
"""


def test_a_process_killed_in_the_act_harms_nothing(runs: Path) -> None:
    expected = listing(runs)
    for there in (True, False):  # an index of before
        rewrite(runs / "one" / "run.json", lambda text: text + " ")
        before = (runs / NAME).read_bytes()
        if not there:
            (runs / NAME).unlink()
        died = subprocess.run([sys.executable, "-c", KILLED, str(runs)], capture_output=True)
        assert died.returncode == -signal.SIGKILL
        assert (runs / NAME).read_bytes() == before if there else not (runs / NAME).exists()
        assert listing(runs) == expected
        for left in runs.glob(f".{NAME}.*"):
            os.utime(left, (0, 0))
    rewrite(runs / "one" / "run.json", lambda text: text + " ")
    assert listing(runs) == expected
    assert not list(runs.glob(f".{NAME}.*"))


def test_two_processes_at_once_say_the_same(runs: Path) -> None:
    words = [sys.executable, "-m", "engram", "runs", "list", str(runs)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    (out, err), other = (process.communicate() for process in both)
    assert other == (out, err)
    assert (err, out.count(b"\n")) == (b"", 13)
    assert len(listing(runs)) == 10


def test_many_at_once_all_see_the_same(runs: Path) -> None:
    expected = listing(runs)
    seen: list[Any] = []

    def look() -> None:
        for turn in range(5):
            if turn % 2:
                (runs / NAME).unlink(missing_ok=True)
            seen.append(listing(runs))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 20
    assert all(rows == expected for rows in seen)
    assert {path.name for path in runs.iterdir() if path.name.startswith(".")} <= {NAME}


def test_a_thousand_runs_are_listed_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    """The bound is for ten thousand in a second; benchmarks/runs_store.py measures those."""
    make_runs(tmp_path, 1000)
    assert len(select(Index(tmp_path))) == 2000

    def taken() -> float:
        begun = time.process_time()
        rows = select(Index(tmp_path))
        assert len(rows) > 1990
        return time.process_time() - begun

    assert min(taken() for _ in range(5)) < 0.1
    shutil.rmtree(tmp_path / "07" / "run-00007")
    assert taken() < 0.2
    assert len(select(Index(tmp_path), parse_conditions({}, ["seed<10"]))) == 18


# --- what a stranger's run may say


@pytest.mark.parametrize("bad", ["\x1b[2J", "[/b]", "[red]x", "\ud800", "a\rb"])
def test_what_a_run_says_of_itself_is_no_command_to_a_terminal(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"command": bad, "versions": {bad: bad}, "started": bad, "finished": bad}
    run = make_run(tmp_path / "runs" / bad.replace("/", "").replace("\ud800", "x"), result_of(config_of()), **about)
    for words in (["list", str(run.parent)], ["show", str(run)]):
        with pytest.raises(SystemExit) as stopped:
            main(["runs", *words])
        shown = capsys.readouterr().out
        assert not stopped.value.code
        assert not {"\x1b", "\r"} & set(shown)
        assert bad.encode("unicode_escape").decode() in shown or words[0] == "list"


# --- questions


GRID = {
    "epochs": (1, 2, 5),
    "strength": (0.5, 1.0, 20.0),
    "max_samples": (None, 10, 1000),
    "alpha": ("synapse", "uniform"),
    "learn_eta": (True, False),
    "hidden": ([3], [3, 4]),
}
COMPARISONS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
COMPARISONS |= {">": operator.gt, ">=": operator.ge}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, list[Config]]:
    folder, dice = tmp_path_factory.mktemp("grid"), random.Random(1)
    configs = []
    for number in range(40):
        chosen = {name: dice.choice(values) for name, values in GRID.items()}
        config = config_of("si", seed=number, **chosen)
        make_run(folder / f"{number:02}", result_of(config, dice.random() / 2))
        configs.append(config)
    return Index(folder), configs


@st.composite
def conditions(draw: st.DrawFn) -> tuple[str, str, Any]:
    name = draw(st.sampled_from(sorted(GRID)))
    ordered = name in ("epochs", "strength", "max_samples")
    comparison = draw(st.sampled_from(sorted(COMPARISONS) if ordered else ["=", "!="]))
    values = [value for value in GRID[name] if value is not None or comparison in ("=", "!=")]
    value = draw(st.sampled_from(values))
    return name, comparison, draw(st.sampled_from([value, value + 1])) if ordered and value is not None else value


def holds(config: Config, name: str, comparison: str, value: Any) -> bool:
    here = config.to_dict()[name]
    if comparison not in ("=", "!=") and here is None:
        return False
    return COMPARISONS[comparison](here, value)


@given(wanted=st.lists(conditions(), max_size=3), by=st.sampled_from(["seed", "-seed", "strength", "-max_samples"]))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_filters_and_orders_are_those_of_python(
    wanted: list[tuple[str, str, Any]], by: str, grid: tuple[Index, list[Config]]
) -> None:
    index, configs = grid
    words = [f"{n} {c} {v if isinstance(v, str) else json.dumps(v)}" for n, c, v in wanted]
    rows = select(index, parse_conditions({}, words), settings=("seed", "strength", "max_samples"), sort=by)
    expected = [config.seed for config in configs if all(holds(config, *each) for each in wanted)]
    assert sorted(row["seed"] for row in rows) == expected
    name, sign = by.removeprefix("-"), -1 if by.startswith("-") else 1
    keys = [(row[name] is None, sign * (row[name] or 0), row["seed"]) for row in rows]
    assert keys == sorted(keys)


def test_a_limit_cuts_off_the_end(grid: tuple[Index, list[Config]]) -> None:
    every = select(grid[0], sort="-accuracy")
    assert select(grid[0], sort="-accuracy", limit=7) == every[:7]
    accuracies = [row["accuracy"] for row in every]
    assert accuracies == sorted(accuracies, reverse=True)


def test_none_can_be_asked_for_in_two_ways(grid: tuple[Index, list[Config]]) -> None:
    index, configs = grid
    expected = sum(config.max_samples is None for config in configs)
    for words in ("max_samples=none", "max_samples = null", "max_samples==none"):
        assert len(select(index, [parse_condition(words)])) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("epoch=3", "there is no setting 'epoch' (did you mean epochs?), only benchmark, method"),
        ("epochs", "a condition is written SETTING=VALUE (or <, <=, >, >=, !=), not 'epochs'"),
        ("epochs=many", "epochs must be a whole number, not 'many'"),
        ("epochs=1.5", "epochs must be a whole number, not 1.5"),
        ("epochs=null", "epochs must be a whole number, not None"),
        ("alpha<uniform", "alpha is not a number, so it can be = or != but not <, as in 'alpha<uniform'"),
        ("hidden>[3]", "hidden is not a number"),
        ("max_samples<none", "nothing is more or less than none, as in 'max_samples<none'"),
        ("=3", "a condition is written"),
        ('"; DROP TABLE run; --=3', "a condition is written"),
    ],
)
def test_a_condition_that_cannot_be_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        parse_condition(words)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


# --- exporting


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_an_export_has_every_trial_with_all_settings(runs: Path, tmp_path: Path) -> None:
    index = Index(runs)
    written, without = export(index, select(index), tmp_path / "all.csv")
    rows = read_csv(tmp_path / "all.csv")
    assert (written, without) == (len(rows), 2)  # one damaged, one that had not begun
    assert list(rows[0]) == list(columns(matrix=False))
    assert {(row["run"], row["trial"]) for row in rows if row["run"] == "going"} == {("going", "0"), ("going", "1")}
    row = next(row for row in rows if row["label"] == "dhp+si" and row["trial"] == "1")
    result = result_of(config_of("dhp+si"), 0.8)
    assert float(row["average_accuracy"]) == result.average_accuracy[1, -1]
    assert float(row["forward_transfer"]) == result.forward_transfer[1]
    assert json.loads(row["hidden"]) == [256, 256]
    assert (row["learn_eta"], row["max_samples"], row["diverged"]) == ("true", "", "false")
    lost = [row for row in rows if row["run"] == "lost"]
    assert [(row["average_accuracy"] == "", row["diverged"]) for row in lost] == [(True, "true"), (False, "false")]


def test_an_export_with_matrices_has_all_that_was_measured(runs: Path, tmp_path: Path) -> None:
    index = Index(runs)
    export(index, select(index, parse_conditions({"method": "ewc"})), tmp_path / "all.csv", matrix=True)
    rows = read_csv(tmp_path / "all.csv")
    assert len(rows) == 2 * TASKS + TASKS + TASKS * TASKS  # untrained; the first row of one trial; all of the other
    found = {(int(r["trial"]), int(r["after"]), int(r["task"])): float(r["accuracy"]) for r in rows}
    result = result_of(config_of("ewc"))
    assert found[1, 3, 2] == result.accuracy[1, 2, 1]
    assert found[0, 0, 1] == 0.1
    assert (0, 2, 1) not in found


@pytest.mark.parametrize("matrix", [False, True])
def test_parquet_holds_what_csv_does(matrix: bool, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(exporting, "ROWS_AT_ONCE", 5)
    index = Index(runs)
    for name in ("all.csv", "all.parquet"):
        export(index, select(index), tmp_path / name, matrix=matrix)
    table = parquet.read_table(tmp_path / "all.parquet")
    assert table.column_names == list(columns(matrix))
    text = [{name: "" if v is None else str(in_csv(v)) for name, v in row.items()} for row in table.to_pylist()]
    assert text == read_csv(tmp_path / "all.csv")


def test_a_value_that_parquet_cannot_hold_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    make_run(tmp_path / "run", result_of(config_of(seed=2**70)))
    index = Index(tmp_path)
    with pytest.raises(InputError, match=r"does not fit into Parquet .*; a \.csv file takes it"):
        export(index, select(index), tmp_path / "all.parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"run", NAME}


def test_without_pyarrow_there_is_one_sentence(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    index = Index(runs)
    with pytest.raises(InputError, match=r"^pyarrow is not installed: pip install 'engram-cl\[parquet\]'$"):
        export(index, select(index), tmp_path / "all.parquet")
    assert not (tmp_path / "all.parquet").exists()


def test_an_export_that_fails_leaves_the_old_file(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all.csv").write_text("old")

    def fail(path: Path, kind: str) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "read_stored", fail)
    index = Index(runs)
    with pytest.raises(InputError, match=r"cannot write .*all\.csv: No space left on device"):
        export(index, select(index), tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "all.csv"}


# --- the command line


@pytest.fixture
def engram(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path) -> Callable[..., Any]:
    """`engram runs …` beside the folder of runs: its exit code, output and errors."""
    monkeypatch.chdir(runs.parent)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(["runs", *arguments])
        said = capsys.readouterr()
        return stopped.value.code or 0, said.out, said.err

    return call


def test_a_list_in_letters(engram: Callable[..., Any]) -> None:
    code, out, err = engram("list", "--where", "seed<3", "--sort", "-accuracy", "--settings", "epochs")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.splitlines()[0] == "5 methods of 4 runs in runs"
    assert " ".join(lines[1]) == "run method benchmark dataset tasks trials state epochs ACC % ± SEM BWT started"
    assert lines[3][:8] == ["one", "dhp+si", "split-mnist", "mnist-small", "3", "2", "finished", "10"]
    assert ["going", "si", "split-mnist", "mnist-small", "3", "2/4", "unfinished"] in [line[:7] for line in lines]
    assert len({line.index("  split-mnist") for line in out.splitlines()[3:]}) == 1, "columns are aligned"


def test_a_list_for_programs(engram: Callable[..., Any], runs: Path) -> None:
    code, out, _ = engram("list", "--format", "json", "--state", "damaged")
    (row,) = json.loads(out)
    assert (code, row["run"], row["method"], row["accuracy"]) == (0, "broken", "si", None)
    assert row["problem"].startswith(f"cannot read {Path('runs/broken/si/accuracy.json')}")
    code, out, _ = engram("list", "runs", "--format", "csv", "--settings", "hidden", "--dataset", "mnist-small")
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["hidden"] for row in rows] == ["[256, 256]"] * 8
    assert engram("list", "--format", "json", "--method", "dhp+mas")[:2] == (0, "[]\n")
    assert engram("list", "--format", "csv", "--method", "dhp+mas")[1].startswith("run,method,benchmark")


def test_show_says_all_that_is_known(engram: Callable[..., Any], runs: Path) -> None:
    code, out, err = engram("show", "one")
    assert (code, err) == (0, "")
    for words in ("runs/one", "finished", "engram run", "60 min", "dhp+si", "num_tasks", "mnist-small", "0.1.0"):
        assert words in out
    assert "si: cannot read runs/broken/si/accuracy.json" in engram("show", "runs/broken")[1]
    assert "it was stopped before it began" in engram("show", "begun")[1]
    assert "finetune" in engram("show", "single")[1]
    assert "dhp" in engram("show", "runs/paper/split-mnist/table.json")[1]


def test_compare_sets_runs_side_by_side(engram: Callable[..., Any], runs: Path) -> None:
    make_run(runs / "three", result_of(config_of("si", epochs=3), 0.7))
    code, out, err = engram("compare", "one", "three", "deep/er/two", "broken")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "epochs 10 3 2 10" in lines
    assert "three si +20.00 [+20.00, +20.00] +0.000 [+0.000, +0.000] 2" in lines
    assert "mas of deep/er/two has no pair: one did not run it." in lines
    assert any(line.startswith("si of broken is left out: cannot read") for line in lines)
    (runs / "one" / "run.json").unlink()
    refused = engram("compare", "runs/one/si", "deep/er/two")[1]
    assert "mas of deep/er/two is not paired with si of runs/one/si: their seed differs (3 and 0)." in refused


def test_export_says_what_it_wrote(engram: Callable[..., Any], tmp_path: Path) -> None:
    assert engram("export", "runs", "--out", "all.csv", "--method", "si") == (
        0,
        "4 rows in all.csv; 1 without results left out\n",
        "",
    )
    assert engram("export", "--out", "all.csv", "--state", "diverged", "--matrix")[1] == "18 rows in all.csv\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("list nowhere", "there is no folder nowhere"),
        ("list runs/empty", "there is no run in runs/empty or below it"),
        ("list --method dhp+s", "there is no method 'dhp+s' (did you mean dhp+si?), only finetune, dhp,"),
        ("list --benchmark split-mnits", "there is no benchmark 'split-mnits' (did you mean split-mnist?), only"),
        ("list --dataset mnist-smal", "there is no dataset 'mnist-smal' (did you mean mnist-small?), only"),
        ("list --state broken", "there is no state 'broken', only finished, unfinished, diverged, damaged"),
        ("list --where epoch=3", "there is no setting 'epoch' (did you mean epochs?), only"),
        ("list --sort accurracy", "there is no column 'accurracy' (did you mean accuracy?), only run, method,"),
        ("list --settings etta", "there is no setting 'etta' (did you mean eta?), only"),
        ("list --limit 0", "the limit must be at least 1, not 0"),
        ("list --format yaml", "there is no format 'yaml', only table, json, csv"),
        ("show oen", "there is no run oen (did you mean runs/one?)"),
        ("show runs/oen", "there is no run runs/oen (did you mean runs/one?)"),
        ("show runs", "runs does not hold a run: it has no run.json"),
        ("compare one", "to compare takes two runs or more, not one alone"),
        ("compare one begun", "begun has no results to compare: it was stopped before it began"),
        ("compare one other", "there is no run other"),
        ("export --out all.xlsx", "an export is a .csv or a .parquet file, not all.xlsx"),
        ("export --out nowhere/all.csv", "cannot write nowhere/all.csv: No such file or directory"),
        ("export runs/empty --out all.csv", "there is no run in runs/empty or below it"),
    ],
)
def test_what_a_person_can_get_wrong_is_one_sentence(words: str, sentence: str, engram: Callable[..., Any]) -> None:
    code, out, err = engram(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"engram: {sentence}")
    assert err.count("\n") == 1
