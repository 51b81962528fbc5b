"""The files of a run: read back exactly, never overwritten, and refused in one sentence when they are damaged."""

from __future__ import annotations

import csv
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from builders import assert_one_sentence, assert_results_equal, current, files_in, refusal, write_run
from engram import Divergence, InputError, Result, preset
from engram.runs import format as formats
from engram.runs.folder import claim_folder
from engram.runs.format import FORMAT, MAX_CSV_BYTES, NUMBER_BYTES, ROW_BYTES, check_size
from engram.runs.result import DYNAMICS, MEAN
from engram.runs.run import read_run

NAN = math.nan


def make_result(method: str = "dhp+si", **changes: Any) -> Result:
    """Two tasks; trials 4 and 7 of ten, of which the last diverged in its second task."""
    rows = [
        {"trial": 4, "task": 0, "epoch": 0, "step": 7, "loss": 0.1, "eta": 1e-3, "hebb_norm": 1 / 3, "alpha_norm": 2.0},
        {"trial": 4, "task": 1, "epoch": 0, "step": 7, "loss": 1e-300, "eta": NAN, "hebb_norm": NAN, "alpha_norm": NAN},
    ]
    content: dict[str, Any] = {
        "config": preset("split-mnist", method, num_tasks=2, dataset="mnist-small"),
        "trials": (4, 7),
        "accuracy": np.array([[[0.9, 0.1 + 0.2], [1 / 3, 0.8]], [[0.7, 0.25], [NAN, NAN]]]),
        "untrained": np.array([[0.1, 0.2], [0.3, NAN]]),
        "dynamics": rows,
        "diverged": [Divergence(7, 1, 12)],
        "data": [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}],
    }
    return Result(**(content | changes))


# --- read back


def test_saved_result_is_read_back_exactly(tmp_path: Path) -> None:
    result = make_result()
    result.save(tmp_path / "a" / "b")
    assert_results_equal(Result.load(tmp_path / "a" / "b"), result)
    assert Result.load(tmp_path / "a" / "b").data == result.data
    assert sorted(files_in(tmp_path / "a" / "b")) == ["dynamics.csv", "results.json", "run.json"]


def test_why_a_trial_failed_is_read_back(tmp_path: Path) -> None:
    result = make_result(diverged=[Divergence(7, 1, 12, "its moment is singular")])
    result.save(tmp_path)
    assert Result.load(tmp_path).diverged == result.diverged
    assert str(result.diverged[0]) == "trial 8 failed in task 2, step 13: its moment is singular"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), tasks=st.integers(1, 3), labels=st.sets(st.text(min_size=1), min_size=1, max_size=3))
def test_any_numbers_and_labels_are_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tasks: int, labels: set[str]
) -> None:
    values = st.floats(0, 1) | st.just(NAN)
    row = st.fixed_dictionaries(
        {"trial": st.integers(0, 10**9) | st.just(MEAN)}
        | dict.fromkeys(("task", "epoch", "step"), st.integers(0, 10**9))
        | dict.fromkeys(("loss", "eta", "hebb_norm", "alpha_norm"), st.floats())
    )
    results = {}
    for label in sorted(label for label in labels if label.isprintable()):
        trials = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
        rows = data.draw(st.lists(row, max_size=3))
        results[label] = Result(
            config=preset("permuted-mnist", "dhp", num_tasks=tasks),
            trials=tuple(trials),
            accuracy=data.draw(arrays(float, (len(trials), tasks, tasks), elements=values)),
            untrained=data.draw(arrays(float, (len(trials), tasks), elements=values)),
            dynamics=[{name: made[name] for name in DYNAMICS} for made in rows],
        )
    if results:
        folder = write_run(tmp_path_factory.mktemp("any"), results)
        run = read_run(folder)
        assert run.problems == {}
        assert_results_equal(run.results, results)


def test_results_are_json_with_one_line_for_each_label(tmp_path: Path) -> None:
    write_run(tmp_path, {"one": make_result(), "two": make_result("si")})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "results.json").read_text()
    content = json.loads(text, parse_constant=refuse)
    assert content["format"] == FORMAT
    assert content["results"][0] == {
        "label": "one",
        "trials": [4, 7],
        "accuracy": [[[0.9, 0.30000000000000004], [1 / 3, 0.8]], [[0.7, 0.25], [None, None]]],
        "untrained": [[0.1, 0.2], [0.3, None]],
        "diverged": [{"trial": 7, "task": 1, "step": 12}],
    }
    assert [line[:15] for line in text.splitlines()[1:3]] == ['{"label": "one"', '{"label": "two"']


def test_settings_that_all_labels_share_are_written_once(tmp_path: Path) -> None:
    write_run(tmp_path, {"one": make_result(), "two": make_result("si")})
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["configs"] == {
        "one": {"method": "dhp+si", "head_init": "published"},
        "two": {"method": "si", "head_init": "linear"},
    }
    assert content["common"]["num_tasks"] == 2
    assert "method" not in content["common"]


def test_dynamics_are_a_table_of_known_columns(tmp_path: Path) -> None:
    mean = [{**make_result().dynamics[0], "trial": MEAN}]
    write_run(tmp_path, {"a, b": make_result(), "means": make_result(dynamics=mean)})
    with (tmp_path / "dynamics.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["label", *DYNAMICS],
        ["a, b", "4", "0", "0", "7", "0.1", "0.001", "0.3333333333333333", "2.0"],
        ["a, b", "4", "1", "0", "7", "1e-300", "nan", "nan", "nan"],
        ["means", "mean", "0", "0", "7", "0.1", "0.001", "0.3333333333333333", "2.0"],
    ]


def test_labels_without_trials_are_not_written(tmp_path: Path) -> None:
    nothing = make_result(trials=(), accuracy=np.zeros((0, 2, 2)), untrained=np.zeros((0, 2)), dynamics=[], diverged=[])
    run = read_run(write_run(tmp_path, {"one": make_result(), "two": nothing}, finished=None))
    assert list(run.configs) == ["one", "two"]
    assert list(run.results) == ["one"]
    assert (run.finished, run.state("one"), run.state("two")) == (False, "unfinished", "unfinished")


def test_dynamics_are_read_only_when_wanted(tmp_path: Path) -> None:
    write_run(tmp_path, {"one": make_result()})
    assert read_run(tmp_path, dynamics=False).results["one"].dynamics == []
    (tmp_path / "dynamics.csv").unlink()
    run = read_run(tmp_path)
    assert (run.results["one"].dynamics, run.problems) == ([], {}), "not every run saves them"


# --- size


def test_no_number_takes_more_bytes_than_are_expected(tmp_path: Path) -> None:
    """By which a run is refused, before it starts, whose files could not be read again."""
    config = preset("split-mnist", "dhp", dataset="mnist-small", num_tasks=20, trials=3, epochs=10**6)
    random = np.random.default_rng(0)
    rows = [
        {"trial": 10**6, "task": 10**4, "epoch": 10**6, "step": 10**8, **dict.fromkeys(DYNAMICS[4:], value)}
        for value in (-1.2345678901234567e-300, 1.2345678901234567e300, NAN)
    ]
    small = random.random((3, 20, 20)) * 1e-5
    write_run(tmp_path, {"x": Result(config, (0, 1, 2), small, random.random((3, 20)) * 1e-5, rows * 50)})
    assert (tmp_path / "results.json").stat().st_size < 3 * 20 * 21 * NUMBER_BYTES + 500
    assert (tmp_path / "dynamics.csv").stat().st_size < 150 * ROW_BYTES + 100


def test_results_that_could_not_be_read_again_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = preset("permuted-mnist", "si", dataset="mnist-small", num_tasks=1000, trials=10)
    assert "would be too large to be read again" in refusal(check_size, {"si": many}, 0)
    check_size({"si": many.replace(trials=5)}, 0)
    assert "run fewer methods or trials" in refusal(check_size, dict.fromkeys("ab", many.replace(trials=5)), 0)
    long = preset("split-mnist", "dhp", epochs=10**5)
    assert "too large" in refusal(check_size, {"dhp": long}, 4)
    monkeypatch.setattr(formats, "MAX_CSV_BYTES", 1000)
    result = make_result(dynamics=make_result().dynamics * 20)
    assert "too large to be read again" in refusal(result.save, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    assert MAX_CSV_BYTES > 1000


# --- claimed


def test_empty_folder_is_claimed(tmp_path: Path) -> None:
    assert claim_folder(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_saved_result_is_never_overwritten(tmp_path: Path) -> None:
    make_result().save(tmp_path / "x")
    before = files_in(tmp_path)
    assert "already holds a run, and results are never overwritten" in refusal(make_result("dhp").save, tmp_path / "x")
    assert files_in(tmp_path) == before


def test_only_one_of_several_claims_succeeds(tmp_path: Path) -> None:
    def claim(_: int) -> str:
        try:
            return claim_folder(tmp_path / "run").name
        except InputError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(claim, range(8)))
    assert outcomes.count("run") == 1
    assert sum("already holds a run" in outcome for outcome in outcomes) == 7


def test_claim_between_looking_and_creating_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("theirs")
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(()))  # the folder as it was a moment ago
    assert "already holds a run" in refusal(claim_folder, tmp_path)
    assert (tmp_path / "run.json").read_text() == "theirs"


def test_folder_with_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert "it holds thesis.tex" in refusal(claim_folder, tmp_path)


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        assert "cannot write to" in refusal(make_result().save, path)
    assert files_in(tmp_path) == {"file": b"mine"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot write to" in refusal(make_result().save, tmp_path)


# --- damaged


def damage_entry(folder: Path, label: str, **changes: Any) -> None:
    path = folder / "results.json"
    content = json.loads(path.read_text())
    for entry in content["results"]:
        if entry["label"] == label:
            entry |= changes
            for name in [name for name, value in changes.items() if value == "missing"]:
                del entry[name]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": None},
        {"accuracy": []},
        {"accuracy": "0.5"},
        {"accuracy": [[[0.5, 0.5]]]},
        {"accuracy": [[[0.5], [0.5, 0.5]]]},
        {"accuracy": [[0.5, 0.5], [0.5, 0.5]]},  # without the axis of trials
        {"accuracy": [[["a"]]]},
        {"accuracy": [[[0.5] * 3] * 3] * 2},  # three tasks, of a config that has two
        {"accuracy": [[[2.0] * 2] * 2] * 2},
        {"accuracy": [[[10**400] * 2] * 2] * 2},
        {"untrained": [0.1, 0.2]},
        {"untrained": {}},
        {"diverged": [3]},
        {"diverged": [{"trial": 1}]},
        {"diverged": [{"trial": 5, "task": 0, "step": 0}]},  # a trial that it does not have
        {"diverged": None},
        {"trials": None},
        {"trials": [4]},
        {"trials": [4, 4]},
        {"trials": [4, 10]},  # there are ten
        {"trials": [4, -1]},
        {"trials": [4, 7.0]},
        {"trials": []},
        {"trials": "47"},
        *({name: "missing"} for name in ("trials", "accuracy", "untrained", "diverged")),
    ],
    ids=lambda change: str(change)[:50],
)
def test_damaged_entry_loses_only_its_label(tmp_path: Path, change: dict[str, Any]) -> None:
    write_run(tmp_path, {"hurt": make_result(), "sound": make_result("si")})
    damage_entry(tmp_path, "hurt", **change)
    run = read_run(tmp_path)
    assert list(run.results) == ["sound"]
    assert list(run.problems) == ["hurt"]
    assert_one_sentence(run.problems["hurt"])
    assert "results.json is damaged" in run.problems["hurt"]
    assert (run.state("hurt"), run.state("sound")) == ("damaged", "unfinished")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "3",
        "null",
        '"x"',
        "[" * 100_000,
        current(),
        current(results=3),
        current(results=[{}]),
        current(results=[{"label": ["x"]}]),
        '{"format": "two", "results": []}',
        current(results=[{"label": "hurt"}, {"label": "hurt"}]),
    ],
    ids=lambda content: content[:30],
)
def test_damaged_results_are_a_problem_of_every_label(tmp_path: Path, content: str) -> None:
    write_run(tmp_path, {"hurt": make_result(), "too": make_result("si")})
    (tmp_path / "results.json").write_text(content)
    run = read_run(tmp_path)
    assert (run.results, list(run.problems)) == ({}, ["hurt", "too"])
    assert_one_sentence(run.problems["hurt"])
    assert "results.json" in run.problems["hurt"]


def test_finished_run_lacks_a_label(tmp_path: Path) -> None:
    write_run(tmp_path, {"one": make_result(), "two": make_result("si")})
    text = (tmp_path / "results.json").read_text().replace('"two"', '"three"')
    (tmp_path / "results.json").write_text(text)
    assert read_run(tmp_path).problems == {
        "two": f"it has no entry in {tmp_path / 'results.json'}, though the run is finished"
    }


@pytest.mark.parametrize(
    "text",
    [
        "label,trial,task\nx,0,0\n",
        f"label,{','.join(DYNAMICS)}\nx,0,0,0,7,0.1\n",
        f"label,{','.join(DYNAMICS)}\nx,many,0,0,7,0.1,1,1,1\n",
        "a\n1\n",
        "",
        "trial,ta",
    ],
)
def test_damaged_dynamics_are_named_and_the_accuracies_stay(tmp_path: Path, text: str) -> None:
    write_run(tmp_path, {"x": make_result()})
    (tmp_path / "dynamics.csv").write_text(text)
    run = read_run(tmp_path)
    assert_one_sentence(run.problems["x"])
    assert "dynamics.csv" in run.problems["x"]
    assert_results_equal(run.results["x"], replace(make_result(), dynamics=[]))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        current(),
        current(common={}, configs={}),
        current(common={}, configs={"si": {"method": "si"}}),
        current(common=3, configs={"si": {}}),
        current(common={}, configs=["si"]),
    ],
)
def test_damaged_description_is_refused(tmp_path: Path, content: str) -> None:
    write_run(tmp_path, {"si": make_result("si")})
    (tmp_path / "run.json").write_text(content)
    assert "run.json" in refusal(read_run, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": [{}]}, "damaged"),
        ({"data": "mnist"}, "damaged"),
        ({"configs": {"\x1b[2J": {"method": "si"}}}, "damaged"),
        ({"configs": {"": {"method": "si"}}}, "damaged"),
        ({"configs": {"si": {"method": "sgd"}}}, "there is no method 'sgd'"),
        ({"configs": {"si": {"method": "si", "shape": 3}}}, "there is no setting 'shape'"),
        ({"configs": {"a": {"method": "si"}, "b": {"method": "si", "dataset": "mnist"}}}, "several benchmarks or data"),
    ],
)
def test_forged_description_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write_run(tmp_path, {"si": make_result("si")}) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in refusal(read_run, tmp_path)


@pytest.mark.parametrize("name", ["run.json", "results.json"])
@pytest.mark.parametrize(("version", "words"), [(FORMAT + 1, "newer version of Engram"), (1, "old format 1")])
def test_other_formats_are_refused_by_what_they_are(tmp_path: Path, name: str, version: int, words: str) -> None:
    path = write_run(tmp_path, {"x": make_result()}) / name
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {version}', 1))
    assert words in refusal(Result.load, tmp_path)


def test_result_is_loaded_only_from_a_run_with_one_label(tmp_path: Path) -> None:
    write_run(tmp_path / "two", {"one": make_result(), "two": make_result("si")})
    assert "holds several results (one, two)" in refusal(Result.load, tmp_path / "two")
    assert "there is no folder" in refusal(Result.load, tmp_path / "missing")


# --- what a Result says


def test_divergence_counts_from_one_in_its_sentence() -> None:
    sentence = "trial 2 diverged in task 3, step 4: its loss became NaN or infinite"
    assert str(Divergence(trial=1, task=2, step=3)) == sentence


def test_measures_are_those_of_the_matrix() -> None:
    result = make_result()
    np.testing.assert_allclose(result.average_accuracy, [[0.9, (1 / 3 + 0.8) / 2], [0.7, NAN]])
    np.testing.assert_allclose(result.bwt, [1 / 3 - 0.9, NAN])
    np.testing.assert_allclose(result.forgetting, [0.9 - 1 / 3, NAN])
    np.testing.assert_allclose(result.forward_transfer, [0.1 + 0.2 - 0.2, NAN])
    np.testing.assert_allclose(result.first_task, [[0.9, 1 / 3], [0.7, NAN]])
    np.testing.assert_allclose(result.latest_task, [[0.9, 0.8], [0.7, NAN]])


def test_tasks_learned_finds_the_diverged_trial_by_its_number() -> None:
    assert make_result().tasks_learned == 2, "trial 7, the second row, is the one that diverged"
    assert make_result(diverged=[Divergence(4, 1, 12)]).tasks_learned == 1
    assert make_result(diverged=[]).tasks_learned == 1


def test_every_row_has_a_trial_number() -> None:
    assert "2 trials need as many trial numbers, not 1" in refusal(make_result, trials=(4,))
