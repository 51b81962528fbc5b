"""What a run leaves behind is read back exactly, never overwritten, and never half there."""

from __future__ import annotations

import json
import math
import os
import resource
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.config.presets import preset
from engram.config.settings import Config
from engram.runs.result import (
    DYNAMICS,
    FORMAT,
    MAX_CSV_BYTES,
    NUMBER_BYTES,
    ROW_BYTES,
    Divergence,
    Result,
    check_readable,
    claim_folder,
    read_result,
    read_run,
    write_result,
)

NAN = math.nan


def make_result(method: str = "dhp+si", trials: int = 2, **changes: Any) -> Result:
    """Two tasks; the last trial diverged in its second task."""
    accuracy = np.array([[[0.9, 0.1 + 0.2], [1 / 3, 0.8]], [[0.7, 0.25], [NAN, NAN]]])[-trials:]
    rows = [
        {"trial": 0, "task": 0, "epoch": 0, "step": 7, "loss": 0.1, "eta": 1e-3, "hebb_norm": 1 / 3, "alpha_norm": 2.0},
        {"trial": 0, "task": 1, "epoch": 0, "step": 7, "loss": 1e-300, "eta": NAN, "hebb_norm": NAN, "alpha_norm": NAN},
    ]
    content: dict[str, Any] = {
        "config": preset("split-mnist", method, trials=trials, num_tasks=2, dataset="mnist-small"),
        "trials": tuple(range(trials)),
        "accuracy": accuracy,
        "untrained": np.array([[0.1, 0.2], [0.3, NAN]])[-trials:],
        "dynamics": rows,
        "diverged": [Divergence(trials - 1, 1, 12)],
        "data": [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}],
    }
    return Result(**(content | changes))


def assert_same(one: Result, other: Result) -> None:
    np.testing.assert_array_equal(one.accuracy, other.accuracy)  # NaN equals NaN here, and nothing else is close
    np.testing.assert_array_equal(one.untrained, other.untrained)
    assert (one.config, one.diverged, one.data) == (other.config, other.diverged, other.data)
    assert [_columns(row) for row in one.dynamics] == [_columns(row) for row in other.dynamics]


def _columns(row: dict[str, float]) -> list[str]:
    return [repr(row[name]) for name in DYNAMICS]


def make_run(folder: Path, *results: Result, **description: Any) -> Path:
    """A run's folder, as `engram run` would leave it."""
    folder.mkdir(parents=True)
    methods = [result.config.method for result in results]
    content = {"format": FORMAT, "benchmark": "split-mnist", "methods": methods} | description
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    for result in results:
        write_result(result, folder / result.config.method)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_result_is_read_back_exactly(tmp_path: Path) -> None:
    result = make_result()
    result.save(tmp_path / "a" / "b")
    assert_same(read_result(tmp_path / "a" / "b"), result)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), trials=st.integers(1, 3), tasks=st.integers(1, 3))
def test_any_numbers_are_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, trials: int, tasks: int
) -> None:
    values = st.floats(0, 1) | st.just(NAN)
    any_float = st.floats()
    row = st.fixed_dictionaries(
        dict.fromkeys(("trial", "task", "epoch", "step"), st.integers(0, 10**9))
        | dict.fromkeys(("loss", "eta", "hebb_norm", "alpha_norm"), any_float)
    )
    result = Result(
        config=preset("permuted-mnist", "dhp", num_tasks=tasks, trials=trials),
        trials=tuple(range(trials)),
        accuracy=data.draw(arrays(float, (trials, tasks, tasks), elements=values)),
        untrained=data.draw(arrays(float, (trials, tasks), elements=values)),
        dynamics=data.draw(st.lists(row, max_size=3)),
    )
    folder = tmp_path_factory.mktemp("any")
    write_result(result, folder)
    assert_same(read_result(folder), result)


def test_accuracies_are_json_that_any_reader_takes(tmp_path: Path) -> None:
    make_result().save(tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((tmp_path / "accuracy.json").read_text(), parse_constant=refuse)
    assert content == {
        "format": 1,
        "accuracy": [[[0.9, 0.30000000000000004], [1 / 3, 0.8]], [[0.7, 0.25], [None, None]]],
        "untrained": [[0.1, 0.2], [0.3, None]],
        "diverged": [{"trial": 1, "task": 1, "step": 12}],
        "data": [{"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}],
    }


def test_dynamics_are_a_table_of_known_columns(tmp_path: Path) -> None:
    make_result().save(tmp_path)
    assert (tmp_path / "dynamics.csv").read_text().splitlines() == [
        "trial,task,epoch,step,loss,eta,hebb_norm,alpha_norm",
        "0,0,0,7,0.1,0.001,0.3333333333333333,2.0",
        "0,1,0,7,1e-300,nan,nan,nan",
    ]


def test_a_divergence_counts_from_one_for_a_person() -> None:
    sentence = "trial 2 diverged in task 3, step 4: its loss became NaN or infinite"
    assert str(Divergence(trial=1, task=2, step=3)) == sentence


def test_a_results_numbers_are_those_of_its_matrix() -> None:
    result = make_result()
    np.testing.assert_allclose(result.average_accuracy, [[0.9, (1 / 3 + 0.8) / 2], [0.7, NAN]])
    np.testing.assert_allclose(result.bwt, [1 / 3 - 0.9, NAN])
    np.testing.assert_allclose(result.forgetting, [0.9 - 1 / 3, NAN])
    np.testing.assert_allclose(result.forward_transfer, [0.1 + 0.2 - 0.2, NAN])
    np.testing.assert_allclose(result.first_task, [[0.9, 1 / 3], [0.7, NAN]])
    np.testing.assert_allclose(result.latest_task, [[0.9, 0.8], [0.7, NAN]])


def test_no_number_takes_more_bytes_than_is_reckoned_with(tmp_path: Path) -> None:
    """By which it is told, before a run, whether its results could be read again."""
    config = preset("split-mnist", "dhp", dataset="mnist-small", num_tasks=20, trials=3, epochs=10**6)
    random = np.random.default_rng(0)
    rows = [
        {"trial": 10**6, "task": 10**4, "epoch": 10**6, "step": 10**8, **dict.fromkeys(DYNAMICS[4:], value)}
        for value in (-1.2345678901234567e-300, 1.2345678901234567e300, NAN)
    ]
    result = Result(
        config, (0, 1, 2), random.random((3, 20, 20)) * 1e-5, random.random((3, 20)) * 1e-5, rows * 50, [], []
    )
    write_result(result, tmp_path)
    assert (tmp_path / "accuracy.json").stat().st_size < 3 * 20 * 21 * NUMBER_BYTES + 500
    assert (tmp_path / "dynamics.csv").stat().st_size < 150 * ROW_BYTES + 100


def test_results_that_could_not_be_read_again_are_refused(tmp_path: Path) -> None:
    many_tasks = preset("permuted-mnist", "si", dataset="mnist-small", num_tasks=1000, trials=10)
    with pytest.raises(InputError, match="10 trials of 1000 tasks and 20 epochs would be too large to be read again"):
        check_readable(many_tasks, 0)
    check_readable(many_tasks.replace(trials=2), 0)
    most = MAX_CSV_BYTES // ROW_BYTES
    check_readable(many_tasks.replace(trials=1), most)
    with pytest.raises(InputError, match="run fewer trials at a time"):
        check_readable(many_tasks.replace(trials=1), most + 1)
    result = make_result(dynamics=[make_result().dynamics[0]] * (most + 1))
    with pytest.raises(InputError, match="too large to be read again"):
        result.save(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert claim_folder(tmp_path, "run.json") == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_result_is_never_overwritten(tmp_path: Path) -> None:
    make_result().save(tmp_path / "x")
    before = files_in(tmp_path)
    with pytest.raises(InputError, match="never overwritten"):
        make_result("dhp").save(tmp_path / "x")
    assert files_in(tmp_path) == before


def test_of_two_claims_on_a_folder_one_is_refused(tmp_path: Path) -> None:
    def claim(_: int) -> str:
        try:
            return claim_folder(tmp_path / "run", "run.json").name
        except InputError as refusal:
            return str(refusal)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(claim, range(8)))
    assert outcomes.count("run") == 1
    assert sum("already holds a run" in outcome for outcome in outcomes) == 7


def test_a_claim_that_comes_between_looking_and_taking_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("theirs")
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(()))  # the folder as it was a moment ago
    with pytest.raises(InputError, match="already holds a run"):
        claim_folder(tmp_path, "run.json")
    assert (tmp_path / "run.json").read_text() == "theirs"


def test_another_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", make_result())
    with pytest.raises(InputError, match="already holds a run"):
        claim_folder(folder, "run.json")


def test_a_folder_with_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"it holds thesis.tex"):
        claim_folder(tmp_path, "run.json")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(InputError, match="cannot write to"):
            make_result().save(path)
    assert files_in(tmp_path) == {"file": b"mine"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot write to"):
        make_result().save(tmp_path)


def test_a_written_file_is_the_text_or_the_bytes(tmp_path: Path) -> None:
    write_atomically(tmp_path / "text", "η ← 1\n")
    write_atomically(tmp_path / "bytes", b"\x00\xff")
    assert files_in(tmp_path) == {"text": "η ← 1\n".encode(), "bytes": b"\x00\xff"}


def test_a_written_file_has_ordinary_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_write_that_fails_midway_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as on a disk that is full after 4096 bytes
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomically(path, "new" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(tmp_path) == {"accuracy.json": b"old"}


def test_a_write_onto_a_folder_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "accuracy.json").mkdir()
    with pytest.raises(OSError, match=r"accuracy.json"):
        write_atomically(tmp_path / "accuracy.json", "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["accuracy.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", ("a" * 100_000, "b" * 50_000)
    write_atomically(path, contents[0])

    def write_often() -> None:
        for k in range(40):
            write_atomically(path, contents[k % 2])

    writer = threading.Thread(target=write_often)
    writer.start()
    while writer.is_alive():
        assert path.read_text() in contents
    writer.join()


def test_a_result_is_written_anew_as_trials_come_in(tmp_path: Path) -> None:
    write_result(make_result(trials=1), tmp_path)
    write_result(make_result(trials=2), tmp_path)
    assert_same(read_result(tmp_path), make_result(trials=2))
    assert sorted(files_in(tmp_path)) == ["accuracy.json", "config.toml", "dynamics.csv"]


@pytest.mark.parametrize("name", ["accuracy.json", "config.toml", "dynamics.csv"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_result().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=name):
        read_result(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 30, 100, -3])
def test_truncated_accuracies_are_refused(tmp_path: Path, size: int) -> None:
    make_result().save(tmp_path)
    path = tmp_path / "accuracy.json"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"accuracy.json"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "one"},
        {"accuracy": None},
        {"accuracy": []},
        {"accuracy": "0.5"},
        {"accuracy": [[[0.5, 0.5]]]},
        {"accuracy": [[[0.5], [0.5, 0.5]]]},
        {"accuracy": [[0.5, 0.5], [0.5, 0.5]]},  # without the axis of trials
        {"accuracy": [[["a"]]]},
        {"accuracy": [[[0.5] * 3] * 3] * 2},  # three tasks, of a config that has two
        {"untrained": [0.1, 0.2]},
        {"untrained": {}},
        {"diverged": [3]},
        {"diverged": [{"trial": 1}]},
        {"diverged": None},
        {"data": None},
        {"data": [{}]},
        {"data": "mnist"},
    ],
    ids=lambda change: str(change)[:50],
)
def test_accuracies_of_the_wrong_form_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    make_result().save(tmp_path)
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as error:
        read_result(tmp_path)
    assert "accuracy.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["format", "accuracy", "untrained", "diverged", "data"])
def test_a_missing_entry_is_refused(tmp_path: Path, key: str) -> None:
    make_result().save(tmp_path)
    path = tmp_path / "accuracy.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="damaged"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"x"', "[" * 100_000], ids=["list", "number", "null", "word", "deep"]
)
def test_accuracies_that_are_no_table_are_refused(tmp_path: Path, content: str) -> None:
    make_result().save(tmp_path)
    (tmp_path / "accuracy.json").write_text(content)
    with pytest.raises(InputError, match=r"accuracy.json"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "trial,task\n0,0\n",
        "trial,task,epoch,step,loss,eta,hebb_norm,alpha_norm\n0,0,0,7,0.1\n",
        "a\n1\n",
        "",
        "trial,ta",
    ],
)
def test_damaged_dynamics_are_refused(tmp_path: Path, text: str) -> None:
    make_result().save(tmp_path)
    (tmp_path / "dynamics.csv").write_text(text)
    with pytest.raises(InputError, match=r"dynamics.csv"):
        read_result(tmp_path)


def test_a_newer_format_is_said_to_be_newer(tmp_path: Path) -> None:
    make_result().save(tmp_path)
    path = tmp_path / "accuracy.json"
    path.write_text(path.read_text().replace('"format": 1', f'"format": {FORMAT + 1}'))
    with pytest.raises(InputError, match="newer version of Engram"):
        read_result(tmp_path)


def test_a_run_of_a_newer_format_is_said_to_be_newer(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", make_result(), format=FORMAT + 1)
    with pytest.raises(InputError, match="newer version of Engram"):
        read_run(folder)


def test_a_run_is_read_in_its_own_order(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", make_result("si"), make_result("finetune"), make_result("dhp"))
    description, results = read_run(folder)
    assert description["benchmark"] == "split-mnist"
    assert [result.config.method for result in results] == ["si", "finetune", "dhp"]


def test_an_unfinished_run_has_the_results_that_are_there(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", make_result("si"), methods=["si", "dhp"])
    _, results = read_run(folder)
    assert [result.config.method for result in results] == ["si"]


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results yet"):
        read_run(make_run(tmp_path / "x", methods=["si"]))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"methods": "si"}', '{"methods": [3]}', '{"methods": [null]}']
)
def test_a_damaged_description_is_refused(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "x", make_result())
    (folder / "run.json").write_text(content)
    with pytest.raises(InputError, match=r"run.json"):
        read_run(folder)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run.json"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        read_run(tmp_path / "missing")


def test_a_config_file_of_a_result_can_be_run_again(tmp_path: Path) -> None:
    result = make_result()
    result.save(tmp_path)
    text = (tmp_path / "config.toml").read_text()
    assert 'method = "dhp+si"\n' in text
    assert isinstance(read_result(tmp_path).config, Config)
    assert text == result.config.to_toml()
