"""Many runs in a folder: listed, filtered, sorted and exported, whatever state they are in."""

from __future__ import annotations

import csv
import json
import math
import operator
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from builders import current, labelled, write_run
from engram import Config, Divergence, InputError, Result, preset
from engram.cli.main import main
from engram.config.presets import STEADY
from engram.config.settings import SETTINGS
from engram.report.listing import listing
from engram.runs import export as exporting
from engram.runs.export import columns, export, in_csv
from engram.runs.format import FORMAT
from engram.runs.store import Row, list_runs, parse_condition, parse_conditions, select

DATA = [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}]
TASKS = 3


def config_of(method: str = "si", **changes: Any) -> Config:
    return preset("split-mnist", method).replace(dataset="mnist-small", num_tasks=TASKS, **{"trials": 2, **changes})


def result_of(config: Config, level: float = 0.5, trials: int | None = None, **more: Any) -> Result:
    trials = config.trials if trials is None else trials
    noise = np.random.default_rng(config.seed).random((trials, config.num_tasks, config.num_tasks))
    untrained = np.full((trials, config.num_tasks), 0.1)
    numbers = tuple(range(config.first_trial, config.first_trial + trials))
    return Result(config, numbers, np.clip(level + 0.1 * noise, 0, 1), untrained, data=DATA, **more)


def make_run(folder: Path, *results: Result, **about: Any) -> Path:
    described = {
        "command": "engram run",
        "started": "2026-02-03T04:05:06+00:00",
        "finished": "2026-02-03T05:05:06+00:00",
        "versions": {"engram": "0.1.0"},
        "fingerprints": ["f5"],
    }
    return write_run(folder, labelled(results), **described | about)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs in every state, at several depths, a saved result, a sweep and a part of a reproduction."""
    folder = tmp_path / "runs"
    make_run(folder / "one", result_of(config_of("si")), result_of(config_of("dhp+si"), 0.8))
    make_run(folder / "deep" / "er" / "two", result_of(config_of("mas", seed=3, epochs=2)))
    make_run(folder / "going", result_of(config_of("si", trials=4), trials=2), finished=None)
    diverged = result_of(config_of("ewc", strength=1e6), diverged=[Divergence(0, 1, 7)])
    diverged.accuracy[0, 1:] = math.nan
    make_run(folder / "lost", diverged)
    result_of(config_of("finetune", seed=4), 0.3).save(folder / "single")
    make_run(folder / "paper" / "split-mnist" / "table", result_of(config_of("dhp", seed=9)), part="table")
    (folder / "paper" / "reproduction.json").write_text(current())
    for first, number in ((0, 1), (1, 2)):
        some = result_of(config_of("mas", first_trial=first, trials=number, seed=6))
        write_run(folder / "swept" / "runs" / f"1-{first + number}", {"mas: xi 1": some})
    swept = {"axes": ["xi=1"], "bases": [{"method": "mas", "trials": 3}]}
    (folder / "swept" / "sweep.json").write_text(current(finished="2026-02-03T05:05:06+00:00", **swept))
    (folder / "empty").mkdir()
    (folder / "begun").mkdir()
    (folder / "begun" / "run.json").touch()
    broken = make_run(folder / "broken", result_of(config_of("si")), result_of(config_of("mas")))
    text = (broken / "results.json").read_text()
    (broken / "results.json").write_text(text.replace('"trials": [0, 1]', '"trials": [0, 0]', 1))
    return folder


def states(folder: Path) -> dict[tuple[str, str], str]:
    return {(row["run"], row["label"]): row["state"] for row in list_runs(folder).rows}


# --- listed


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
        ("paper/split-mnist/table", "dhp"): "finished",
        ("single", "finetune"): "finished",
        ("swept", "mas: xi 1"): "finished",
    }


def test_row_has_the_numbers_and_settings_of_its_result(runs: Path) -> None:
    row = next(row for row in list_runs(runs).rows if row["label"] == "dhp+si")
    result = result_of(config_of("dhp+si"), 0.8)
    final = result.average_accuracy[:, -1]
    assert row["accuracy"] == final.mean()
    assert row["sem"] == pytest.approx(final.std(ddof=1) / math.sqrt(2))
    assert row["bwt"] == pytest.approx(result.bwt.mean())
    assert (row["done"], row["trials"], row["tasks"], row["started"]) == (2, 2, 3, "2026-02-03T04:05:06+00:00")
    assert {name: row[name] for name in SETTINGS} == result.config.to_dict()


def test_sweep_is_one_run_with_the_trials_of_all_its_runs(runs: Path) -> None:
    row = next(row for row in list_runs(runs).rows if row["run"] == "swept")
    assert (row["kind"], row["done"], row["trials"], row["first_trial"]) == ("sweep", 3, 3, 0)


def test_folder_itself_may_be_the_run(runs: Path) -> None:
    assert [row["run"] for row in list_runs(runs / "one").rows] == [".", "."]


def test_listing_leaves_the_folder_as_it_was(runs: Path) -> None:
    before = sorted(runs.rglob("*"))
    list_runs(runs)
    assert sorted(runs.rglob("*")) == before


def test_name_that_is_no_text_is_listed(tmp_path: Path) -> None:
    try:
        make_run(tmp_path / os.fsdecode(b"caf\xe9"), result_of(config_of()))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert [row["state"] for row in list_runs(tmp_path).rows] == ["finished"]


def test_unreadable_folder_is_named_and_the_others_are_listed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    listing = list_runs(runs)
    assert listing.unreadable == [runs / "deep"]
    assert "one" in {row["run"] for row in listing.rows}


def test_reading_is_reported(runs: Path) -> None:
    seen: list[tuple[int, int]] = []
    list_runs(runs, lambda done, total: seen.append((done, total)))
    assert seen == [(k, 9) for k in range(9)]


# --- damaged


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "binary": lambda text: "\x00\x01",
    "surrogates": lambda text: current(configs={"\ud800": {}}, common={}, started="\ud800"),
    "a newer format": lambda text: text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
}


@pytest.mark.parametrize("name", ["run.json", "results.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_a_damaged_row_and_no_other_run_suffers(damage: str, name: str, tmp_path: Path) -> None:
    make_run(tmp_path / "sound", result_of(config_of()))
    folder = make_run(tmp_path / "hurt", result_of(config_of()), result_of(config_of("mas")))
    sound = [row for row in list_runs(tmp_path).rows if row["run"] == "sound"]
    (folder / name).write_text(DAMAGE[damage]((folder / name).read_text()))
    rows = list_runs(tmp_path).rows
    assert [row for row in rows if row["run"] == "sound"] == sound
    hurt = {row["label"]: row["state"] for row in rows if row["run"] == "hurt"}
    expected = "unfinished" if (name, damage) == ("run.json", "empty") else "damaged"
    assert hurt == ({"": expected} if name == "run.json" else {"si": "damaged", "mas": "damaged"})
    problems = [row["problem"] for row in rows if row["problem"]]
    assert len(problems) == len(hurt)
    assert "\n" not in problems[0]


@pytest.mark.parametrize("wrong", [None, 3, "yesterday", [], "0001-01-01T00:00:00+23:59", "\ud800"])
def test_time_that_is_none_is_left_empty(wrong: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run", result_of(config_of()), started=wrong)
    assert [(row["started"], row["state"]) for row in list_runs(tmp_path).rows] == [(None, "finished")]


def test_seed_beyond_sixty_four_bits_is_listed_and_exported(tmp_path: Path) -> None:
    make_run(tmp_path / "run", result_of(config_of(seed=2**70)))
    rows = select(list_runs(tmp_path).rows, [parse_condition(f"seed={2**70}")])
    assert [row["run"] for row in rows] == ["run"]
    export(tmp_path, rows, tmp_path / "all.csv")
    assert str(2**70) in (tmp_path / "all.csv").read_text()


@pytest.mark.parametrize("bad", ["\x1b[2J", "[/b]", "[red]x", "\ud800", "a\rb"])
def test_text_of_a_run_does_not_control_the_terminal(
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


# --- filtered and sorted


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
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], list[Config]]:
    folder, dice = tmp_path_factory.mktemp("grid"), random.Random(1)
    configs = []
    for number in range(40):
        chosen = {name: dice.choice(values) for name, values in GRID.items()}
        config = config_of("si", seed=number, **chosen)
        make_run(folder / f"{number:02}", result_of(config, dice.random() / 2))
        configs.append(config)
    return list_runs(folder).rows, configs


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
    wanted: list[tuple[str, str, Any]], by: str, grid: tuple[list[Row], list[Config]]
) -> None:
    listed, configs = grid
    words = [f"{n} {c} {v if isinstance(v, str) else json.dumps(v)}" for n, c, v in wanted]
    rows = select(listed, parse_conditions({}, words), sort=by)
    expected = [config.seed for config in configs if all(holds(config, *each) for each in wanted)]
    assert sorted(row["seed"] for row in rows) == expected
    name, sign = by.removeprefix("-"), -1 if by.startswith("-") else 1
    keys = [(row[name] is None, sign * (row[name] or 0), row["seed"]) for row in rows]
    assert keys == sorted(keys)


def test_a_limit_cuts_off_the_end(grid: tuple[list[Row], list[Config]]) -> None:
    every = select(grid[0], sort="-accuracy")
    assert select(grid[0], sort="-accuracy", limit=7) == every[:7]
    accuracies = [row["accuracy"] for row in every]
    assert accuracies == sorted(accuracies, reverse=True)


def test_none_can_be_asked_for_in_two_ways(grid: tuple[list[Row], list[Config]]) -> None:
    listed, configs = grid
    expected = sum(config.max_samples is None for config in configs)
    for words in ("max_samples=none", "max_samples = null", "max_samples==none"):
        assert len(select(listed, [parse_condition(words)])) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("epoch=3", "there is no setting 'epoch' (did you mean epochs?); `engram run --help-settings` lists"),
        ("epochs", "a condition is written SETTING=VALUE (or <, <=, >, >=, !=), not 'epochs'"),
        ("epochs=many", "epochs must be a whole number, not 'many'"),
        ("epochs=1.5", "epochs must be a whole number, not 1.5"),
        ("epochs=null", "epochs must be a whole number, not None"),
        ("alpha<uniform", "alpha is not a number, so it can be = or != but not <, as in 'alpha<uniform'"),
        ("hidden>[3]", "hidden is not a number"),
        ("max_samples<none", "nothing is more or less than none, as in 'max_samples<none'"),
        ("=3", "a condition is written"),
    ],
)
def test_a_condition_that_cannot_be_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        parse_condition(words)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


# --- exported


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_an_export_has_every_trial_with_all_settings(runs: Path, tmp_path: Path) -> None:
    rows = list_runs(runs).rows
    written, without = export(runs, rows, tmp_path / "all.csv")
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
    rows = list_runs(runs).rows
    export(runs, select(rows, parse_conditions({"method": "ewc"})), tmp_path / "all.csv", matrix=True)
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
    rows = list_runs(runs).rows
    for name in ("all.csv", "all.parquet"):
        export(runs, rows, tmp_path / name, matrix=matrix)
    table = parquet.read_table(tmp_path / "all.parquet")
    assert table.column_names == list(columns(matrix))
    text = [{name: "" if v is None else str(in_csv(v)) for name, v in row.items()} for row in table.to_pylist()]
    assert text == read_csv(tmp_path / "all.csv")


def test_a_value_that_parquet_cannot_hold_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    make_run(tmp_path / "run", result_of(config_of(seed=2**70)))
    rows = list_runs(tmp_path).rows
    with pytest.raises(InputError, match=r"does not fit into Parquet .*; a \.csv file takes it"):
        export(tmp_path, rows, tmp_path / "all.parquet")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_without_pyarrow_there_is_one_sentence(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    rows = list_runs(runs).rows
    with pytest.raises(InputError, match=r"^pyarrow is not installed: pip install 'engram-cl\[parquet\]'$"):
        export(runs, rows, tmp_path / "all.parquet")
    assert not (tmp_path / "all.parquet").exists()


def test_an_export_that_fails_leaves_the_old_file(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all.csv").write_text("old")

    def fail(path: Path, dynamics: bool) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "read_run", fail)
    rows = list_runs(runs).rows
    with pytest.raises(InputError, match=r"cannot write .*all\.csv: No space left on device"):
        export(runs, rows, tmp_path / "all.csv")
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
    assert out.splitlines()[0] == "6 labels of 4 runs in runs"
    assert " ".join(lines[1]) == "run label benchmark dataset tasks trials state epochs ACC % ± SEM BWT started"
    assert lines[3][:8] == ["one", "dhp+si", "split-mnist", "mnist-small", "3", "2", "finished", "10"]
    assert ["going", "si", "split-mnist", "mnist-small", "3", "2/4", "unfinished"] in [line[:7] for line in lines]
    assert len({line.index("  split-mnist") for line in out.splitlines()[3:9]}) == 1, "columns are aligned"


def widths(out: str) -> int:
    return max(map(cell_len, out.splitlines()))


def test_a_list_fits_its_terminal(engram: Callable[..., Any], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "imbalanced-permuted-mnist-20260203-040506"
    make_run(runs / name, result_of(config_of("dhp+online-ewc")), result_of(config_of("dhp+si", eta=0.5)))
    whole = engram("list", "--state", "finished")[1]
    assert name in whole
    assert widths(whole) > 100
    for width in (100, 80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = engram("list", "--state", "finished")
        assert (code, err) == (0, "")
        assert widths(out) <= width, out
        assert out.splitlines()[1] == "split-mnist, mnist-small, 3 tasks, finished", "what all rows share"
        heading = next(line for line in out.splitlines() if line.startswith("run "))
        assert heading.split()[:2] == ["run", "label"]
        assert "ACC %" in heading
        assert len([line for line in out.splitlines() if "dhp+online-ewc" in line]) == 1
    assert "…" in out
    assert "Left out: started, trials. A wider terminal" in " ".join(out.split())


def test_short_names_still_tell_methods_and_settings_apart(runs: Path) -> None:
    row = list_runs(runs).rows[0]
    heads, strengths = ("linear", "matched"), ("0.011", "0.033")
    labels = [f"{head}+online-ewc, published: strength {value}" for head in heads for value in strengths]
    made = listing([{**row, "label": label} for label in labels], [], runs, 56)
    short = [row[1] for row in made.rows]
    assert short[0] == "lin+onli-ewc, publ: stre 0.011"
    assert len(set(short)) == 4
    assert "The words of long labels are cut." in " ".join(made.notes)


def test_without_a_terminal_a_list_has_eighty_columns(
    engram: Callable[..., Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS")
    make_run(runs / ("long-" * 12), result_of(config_of("dhp+si")))
    assert 60 < widths(engram("list", "--state", "finished")[1]) <= 80


def test_a_setting_that_was_asked_for_is_never_left_out(
    engram: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = engram("list", "--state", "finished", "--settings", "batch_size,learning_rate")[1]
    assert "batch_size  learning_rate" in out
    assert widths(out) <= 80


def test_a_list_tells_the_forms_of_a_head_apart(engram: Callable[..., Any], runs: Path) -> None:
    forms = {
        "paper": config_of("dhp+si"),
        "steady": config_of("dhp+si", **STEADY),
        "steady-eta": config_of("dhp+si", **STEADY | {"eta": 0.002}),
        "eta": config_of("dhp+si", eta=0.5),
        "matched": config_of("si"),
        "linear": config_of("si", baseline_head="linear", eta=0.5),  # η has no effect without a trace
    }
    for name, config in forms.items():
        make_run(runs / "forms" / name, result_of(config))
    swept = config_of("dhp+si", **STEADY | {"eta": 0.002})
    write_run(runs / "forms" / "swept", {"dhp+si: eta=0.002": result_of(swept)})
    rows = {row["run"]: row["form"] for row in list_runs(runs / "forms").rows}
    assert rows == {
        "paper": "",
        "steady": "steady",
        "steady-eta": "steady, eta=0.002",
        "eta": "eta=0.5",
        "matched": "",
        "linear": "baseline_head=linear",
        "swept": "steady",
    }
    out = engram("list", "runs/forms")[1]
    for label in ("dhp+si (steady) ", "dhp+si (steady, eta=0.002) ", "dhp+si (eta=0.5) ", "si (baseline_head=linear) "):
        assert label in out


@pytest.mark.parametrize("command", ["list", "show", "compare", "export"])
def test_a_command_leaves_what_it_reads_as_it_was(
    command: str, engram: Callable[..., Any], runs: Path, tmp_path: Path
) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (runs, *runs.rglob("*"))}

    arguments = {
        "list": ["runs"],
        "show": ["runs"],
        "compare": ["one", "going"],
        "export": ["runs", "--out", str(tmp_path / "out.csv")],
    }
    before = state()
    assert engram(command, *arguments[command])[0] == 0
    assert state() == before
    assert {path.name for path in tmp_path.iterdir()} == {"runs", *(["out.csv"] if command == "export" else [])}


@pytest.mark.parametrize(
    ("written", "words"), [(FORMAT - 1, f"has the old format {FORMAT - 1}"), (FORMAT + 1, "a newer version of Engram")]
)
def test_a_list_says_why_runs_cannot_be_read(written: int, words: str, runs: Path, engram: Callable[..., Any]) -> None:
    for name, file in (("one", "results.json"), ("deep/er/two", "run.json")):
        path = runs / name / file
        path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {written}'))
    code, out, err = engram("list", "--state", "damaged")
    assert (code, err) == (0, "")
    title, _, _, *rows, broken, two, one = out.splitlines()
    assert (title, len(rows)) == ("4 labels of 3 runs in runs", 4)
    assert broken.startswith(f"broken: its entry in {Path('runs/broken/results.json')} is damaged")
    assert two.startswith(f"deep/er/two: {Path('runs/deep/er/two/run.json')} ")
    assert one.startswith(f"one: {Path('runs/one/results.json')} "), "once for both of its labels"
    assert words in two
    assert words in one


def test_a_list_for_programs(engram: Callable[..., Any], runs: Path) -> None:
    code, out, _ = engram("list", "--format", "json", "--state", "damaged")
    (row,) = json.loads(out)
    assert (code, row["run"], row["method"], row["accuracy"]) == (0, "broken", "si", None)
    assert row["problem"].startswith(f"its entry in {Path('runs/broken/results.json')} is damaged")
    code, out, _ = engram("list", "runs", "--format", "csv", "--settings", "hidden", "--dataset", "mnist-small")
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["hidden"] for row in rows] == ["[256, 256]"] * 10
    assert engram("list", "--format", "json", "--method", "dhp+mas")[:2] == (0, "[]\n")
    assert engram("list", "--format", "csv", "--method", "dhp+mas")[1].startswith("run,label,method,benchmark")


def test_show_says_all_that_is_known(engram: Callable[..., Any], runs: Path) -> None:
    code, out, err = engram("show", "one")
    assert (code, err) == (0, "")
    for words in ("runs/one", "finished", "engram run", "60 min", "dhp+si", "num_tasks", "mnist-small", "0.1.0"):
        assert words in out
    assert "si: its entry in runs/broken/results.json is damaged" in engram("show", "runs/broken")[1]
    assert "was stopped before it started" in engram("show", "begun")[2]
    assert "finetune" in engram("show", "single")[1]
    assert "dhp" in engram("show", "runs/paper")[1]
    assert "mas: xi 1" in engram("show", "swept")[1]


def test_compare_sets_runs_side_by_side(engram: Callable[..., Any], runs: Path) -> None:
    make_run(runs / "three", result_of(config_of("si", epochs=3), 0.7))
    code, out, err = engram("compare", "one", "three", "deep/er/two", "broken")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "epochs 10 3 2 10" in lines
    assert "three si +20.00 [+20.00, +20.00] +0.000 [+0.000, +0.000] 2" in lines
    assert "mas of deep/er/two has no pair: one did not run it." in lines
    assert any(line.startswith("si of broken is left out: its entry in") for line in lines)
    refused = engram("compare", "three", "deep/er/two")[1]
    assert "mas of deep/er/two is not paired with si of three: their seed differs (3 and 0)." in refused
    assert "What differs" not in refused, "there is no table without a pair"


def test_compare_finds_the_run_of_the_same_benchmark_in_a_folder_of_runs(
    engram: Callable[..., Any], runs: Path
) -> None:
    make_run(runs / "mine", result_of(config_of("si"), 0.7))
    for name in ("first", "second"):
        make_run(runs / name / "split-mnist" / "table", result_of(config_of("si"), 0.5))
        make_run(runs / name / "split-mnist" / "other", result_of(config_of("mas"), 0.5))
    code, out, err = engram("compare", "first", "mine")
    assert (code, err) == (0, "")
    assert "first/split-mnist/table" in out
    assert "first/split-mnist/other" not in out, "it has no label in common"
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "mine si +20.00 [+20.00, +20.00] +0.000 [+0.000, +0.000] 2" in lines
    code, out, err = engram("compare", "first", "second")
    assert (code, err) == (0, "")
    assert "second split-mnist/table: si +0.00" in "\n".join(" ".join(line.split()) for line in out.splitlines())


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
        ("list --where epoch=3", "there is no setting 'epoch' (did you mean epochs?);"),
        ("list --sort accurracy", "there is no column 'accurracy' (did you mean accuracy?), only run, label, method,"),
        ("list --settings etta", "there is no setting 'etta' (did you mean eta?);"),
        ("list --limit 0", "the limit must be at least 1, not 0"),
        ("list --format yaml", "there is no format 'yaml', only table, json, csv"),
        ("show oen", "there is no run oen (did you mean runs/one?)"),
        ("show runs/oen", "there is no run runs/oen (did you mean runs/one?)"),
        ("show runs/empty", "there is no run in runs/empty or below it"),
        ("compare one", "name two different runs to compare"),
        ("compare one runs/one", "name two different runs to compare"),
        ("compare one begun", "the run in runs/begun was stopped before it started"),
        ("compare one other", "there is no run other"),
        ("export --out all.xlsx", "an export is a .csv or a .parquet file, not all.xlsx"),
        ("export --out nowhere/all.csv", "cannot write nowhere/all.csv: No such file or directory"),
        ("export runs/empty --out all.csv", "there is no run in runs/empty or below it"),
    ],
)
def test_mistakes_of_a_user_are_one_sentence(words: str, sentence: str, engram: Callable[..., Any]) -> None:
    code, out, err = engram(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"engram: {sentence}")
    assert err.count("\n") == 1
