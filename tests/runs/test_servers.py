"""MLflow and W&B have what the result files say, once, also of a run that was stopped; a dead server ends no run."""

from __future__ import annotations

import doctest
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wandb_server import StoredRun, WandBServer, wandb_server

import engram
from builders import small_digits
from engram import Progress, preset
from engram.common.errors import Divergence
from engram.engine.checkpoint import Checkpoints
from engram.engine.learner import Outcome, Record
from engram.engine.training import Runtime
from engram.runs import servers
from engram.runs.log import TAGS
from engram.runs.result import Result
from engram.runs.run import Run, read_run
from engram.runs.servers import MLflow, WandB
from engram.runs.start import resume_run, start_run

Curves = dict[str, list[tuple[int, float]]]
SETTINGS = {"dataset": "mnist-small", "num_tasks": 3, "trials": 2, "epochs": 2, "hidden": [8], "batch_size": 8}
METHODS = ("dhp+si", "finetune")
SERIES = [f"{method}/{name}" for method in METHODS for name in ("mean", "trial-0", "trial-1")]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages


def begin(folder: Path, log: str, **options: Any) -> dict[str, Result]:
    """Trials of unequal length, so that their steps differ."""
    configs = {method: preset("imbalanced-permuted-mnist", method, **SETTINGS) for method in METHODS}
    options = {"log": log, "seconds_between": 0, "runtime": Runtime("cpu")} | options
    return start_run(configs, [small_digits()], folder, **options).results


class Stop(Exception):
    """Stands for whatever ends a process."""


def begin_and_stop(folder: Path, log: str) -> None:
    """Stop well after the last checkpoint, so that some of what was logged is learned again."""

    def stop(progress: Progress) -> None:
        if progress.done > 0.6:
            patch.setattr(Checkpoints, "is_due", lambda *given: False)
        if progress.done > 0.9:
            raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        begin(folder, log, report=stop)


def resume(folder: Path) -> Run:
    return resume_run(folder, [small_digits()])


def curves_of(result: Result, place: int) -> Curves:
    """What is to be found of one trial: losses and traces by steps, accuracies and what follows from them by tasks."""
    rows = [row for row in result.dynamics if row["trial"] == result.trials[place]]
    ends = {row["task"]: row["step"] + 1 for row in rows}  # the last one's
    curves: Curves = {
        tag: [(int(sum(ends[n] for n in range(int(row["task"]))) + row["step"] + 1), row[name]) for row in rows]
        for name, tag in TAGS.items()
        if not np.isnan(rows[0][name])
    }
    accuracy = result.accuracy[place]
    for n in range(result.config.num_tasks):
        before = range(n)
        found = {f"accuracy/task_{j + 1}": accuracy[n, j] for j in range(n + 1)}
        found["accuracy/average"] = np.mean(accuracy[n, : n + 1])
        if n:
            found["transfer/bwt"] = np.mean([accuracy[n, j] - accuracy[j, j] for j in before])
            found["transfer/fwt"] = np.mean([accuracy[j, j + 1] - result.untrained[place, j + 1] for j in before])
            found["transfer/forgetting"] = np.mean([max(accuracy[j:n, j]) - accuracy[n, j] for j in before])
        for tag, value in found.items():
            curves.setdefault(tag, []).append((n + 1, float(value)))
    return curves


def assert_told(read: Callable[[str], Curves], results: dict[str, Result]) -> None:
    """Every number of the results, once, and none besides; and the means of all trials."""
    for label, result in results.items():
        wanted = [curves_of(result, place) for place in range(result.config.trials)]
        for place, curves in enumerate(wanted):
            assert_close(read(f"{label}/trial-{place}"), curves)
        means = {
            tag: [
                (round(np.mean([curves[tag][n][0] for curves in wanted])), np.mean([c[tag][n][1] for c in wanted]))
                for n in range(len(curve))
            ]
            for tag, curve in wanted[0].items()
        }
        assert_close(read(f"{label}/mean"), means)


def assert_close(found: Curves, wanted: Curves) -> None:
    assert found.keys() == wanted.keys()
    for tag, curve in wanted.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in curve], tag
        np.testing.assert_allclose([v for _, v in found[tag]], [v for _, v in curve], rtol=1e-9, atol=1e-12)


def lines_about(folder: Path, name: str) -> list[str]:
    lines = [line.partition("  ")[2] for line in (folder / "log.txt").read_text().splitlines()]
    return [line for line in lines if line.startswith(name)]


def dead_address() -> str:
    """Where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


# --- MLflow


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests, since it takes seconds to make."""
    pytest.importorskip("mlflow", reason="needs MLflow: make test-frameworks")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def mlflow(database: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow, to read with."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    return MlflowClient()


def mlflow_runs(client: Any, experiment: str) -> dict[str, Any]:
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    by_name = {run.info.run_name: run for run in found}
    assert len(by_name) == len(found), "each run is there once"
    return by_name


def mlflow_curves(client: Any, runs: dict[str, Any]) -> Callable[[str], Curves]:
    def read(name: str) -> Curves:
        run = runs[name]
        return {
            key: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }

    return read


def test_mlflow_has_what_the_results_say(tmp_path: Path, mlflow: Any) -> None:
    folder = tmp_path / "whole"
    results = begin(folder, "mlflow")
    runs = mlflow_runs(mlflow, "whole")
    assert sorted(runs) == sorted(SERIES)
    assert_told(mlflow_curves(mlflow, runs), results)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    for name, run in runs.items():
        method, _, trial = name.partition("/")
        settings = {key: str(value) for key, value in results[method].config.to_dict().items() if value is not None}
        assert run.data.params == {**settings, "label": method, "trial": trial}
        parent = None if trial == "mean" else runs[f"{method}/mean"].info.run_id
        assert run.data.tags.get("mlflow.parentRunId") == parent
    (where,) = lines_about(folder, "MLflow")
    assert where.startswith("MLflow logs to the experiment whole at sqlite:///")


def test_a_stopped_run_goes_on_in_the_same_mlflow_runs(tmp_path: Path, mlflow: Any) -> None:
    folder = tmp_path / "stopped"
    begin_and_stop(folder, "mlflow")
    before = mlflow_runs(mlflow, "stopped")
    assert sorted(before) == sorted(SERIES)
    assert {run.info.status for run in before.values()} == {"KILLED"}
    logged = mlflow_curves(mlflow, before)("finetune/trial-0")
    assert len(logged["accuracy/average"]) == 2
    results = resume(folder).results
    after = mlflow_runs(mlflow, "stopped")
    assert {name: run.info.run_id for name, run in after.items()} == {n: run.info.run_id for n, run in before.items()}
    assert {run.info.status for run in after.values()} == {"FINISHED"}
    assert_told(mlflow_curves(mlflow, after), results)


def test_a_killed_process_is_continued_too(tmp_path: Path, mlflow: Any, database: str) -> None:
    """Nothing could be marked or flushed then."""
    folder = tmp_path / "killed"
    program = f"""
import os, sys, time
from pathlib import Path
sys.path[:0] = {sys.path!r}
import mlflow
from test_servers import begin
def end(progress):
    if progress.done > 0.9:
        time.sleep(3)  # in which the thread sends what it began with
        os._exit(9)
begin(Path({str(folder)!r}), "mlflow", report=end)
"""
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "MLFLOW_TRACKING_URI": database})
    assert done.returncode == 9
    before = mlflow_runs(mlflow, "killed")
    assert {run.info.status for run in before.values()} == {"RUNNING"}
    assert mlflow_curves(mlflow, before)("dhp+si/trial-0")["training/loss"]
    results = resume(folder).results
    runs = mlflow_runs(mlflow, "killed")
    assert sorted(runs) == sorted(SERIES)
    assert_told(mlflow_curves(mlflow, runs), results)


def test_what_arrived_although_the_server_failed_is_not_logged_twice(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = type(mlflow)
    log_batch, calls = client.log_batch, []

    def fail_at_times(self: Any, run: str, metrics: Any = (), **others: Any) -> None:
        log_batch(self, run, metrics, **others)
        calls.append(run)
        if len(calls) % 5 == 0:
            raise OSError("the connection was lost")

    monkeypatch.setattr(client, "log_batch", fail_at_times)
    monkeypatch.setattr(servers, "SECONDS_TO_RETRY", 0.0)
    monkeypatch.setattr(servers, "FRACTION_OF_TIME", 1.0)
    log = MLflow("lossy", tell=(sentences := []).append)
    configs = [preset("split-mnist", "finetune", **SETTINGS | {"trials": 1, "epochs": 4})]
    (result,) = engram.run_many(configs, report=log)
    while log.left:  # the last attempt may have failed as well
        log._send()
    assert_told(mlflow_curves(mlflow, mlflow_runs(mlflow, "lossy")), {"finetune": result})
    failures = [sentence for sentence in sentences if "continues" in sentence]
    assert failures == ["MLflow fails (the connection was lost); the run continues, and tries again"]


def test_a_dead_mlflow_server_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: make test-frameworks")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead_address().replace("//", "//me:secret@"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(servers, "SECONDS_TO_RETRY", 0.0)
    folder = tmp_path / "dead"
    results = begin(folder, "mlflow")
    assert np.isfinite(results["dhp+si"].average_accuracy).all()
    assert read_run(folder).finished
    told = lines_about(folder, "MLflow")
    assert [line.split(" (")[0].split(":")[0] for line in told] == [
        "MLflow fails",
        "MLflow does not have everything about the run",
    ]
    assert "API request to http://127.0.0.1:" in told[0]
    assert "secret" not in (folder / "log.txt").read_text()


def test_a_server_that_never_answers_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: make test-frameworks")
    monkeypatch.setattr(servers, "SECONDS_TO_WAIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
        begin(tmp_path / "silent", "mlflow")
    assert lines_about(tmp_path / "silent", "MLflow") == [
        "MLflow does not have everything about the run: it took nothing for 0 seconds"
    ]


def test_the_experiment_can_be_named_in_the_environment(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "all of mine")
    log = MLflow("mine", identity="first", tell=print)
    log(progress_of(Outcome(rows=[[0.5]], records=[Record(0, 0, 0, 3, 1.5)])))
    assert sorted(mlflow_runs(mlflow, "all of mine")) == ["finetune/mean", "finetune/trial-0"]
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    number = mlflow.create_experiment("by its id")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", number)
    log = MLflow("mine", identity="second", tell=(sentences := []).append)
    log(progress_of(Outcome(rows=[[0.5]], records=[Record(0, 0, 0, 3, 1.5)])))
    assert sorted(mlflow_runs(mlflow, "by its id")) == ["finetune/mean", "finetune/trial-0"]
    assert sentences[0].startswith(f"MLflow logs to the experiment {number} at ")


def progress_of(*outcomes: Outcome) -> Progress:
    """Of a run with one task."""
    config = preset("split-mnist", "finetune", **SETTINGS | {"trials": len(outcomes), "num_tasks": 1})
    keys = {("finetune", trial): outcome for trial, outcome in enumerate(outcomes)}
    return Progress(1.0, 0, {"finetune": config}, keys)


def test_mlflow_says_which_trials_diverged(mlflow: Any) -> None:
    log = MLflow("diverged", tell=print)
    sound = Outcome(rows=[[0.5]], records=[Record(0, 0, 0, 3, 1.5)])
    lost = Outcome(records=[Record(1, 0, 0, 3, 9.5)], diverged=Divergence(1, 0, 5))
    log(progress_of(sound, lost, Outcome(diverged=Divergence(2, 0, 0))))
    status = {name: run.info.status for name, run in mlflow_runs(mlflow, "diverged").items()}
    trials = {"finetune/trial-0": "FINISHED", "finetune/trial-1": "FAILED", "finetune/trial-2": "FAILED"}
    assert status == {"finetune/mean": "FINISHED", **trials}


# --- W&B


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandBServer]:
    """A server, and an environment in which wandb logs to it."""
    package = pytest.importorskip("wandb", reason="needs wandb: make test-frameworks")
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            (tmp_path / "w").mkdir(exist_ok=True)
            monkeypatch.setenv(name, str(tmp_path / "w"))
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
            monkeypatch.delenv(name, raising=False)
        package.teardown()  # what an earlier test set up
        yield server
        package.teardown()


def wandb_runs(server: WandBServer) -> dict[str, StoredRun]:
    by_name = {run.name: run for run in server.runs.values()}
    assert len(by_name) == len(server.runs), "each run is there once"
    return by_name


def wandb_curves(runs: dict[str, StoredRun]) -> Callable[[str], Curves]:
    """Each row has one point, which is of the training if it has a step."""

    def read(name: str) -> Curves:
        curves: Curves = {}
        for number, row in enumerate(runs[name].rows):
            assert row["_step"] == number
            for tag in row:
                if "/" in tag:
                    axis = "step" if tag.startswith(("training/", "trace/")) else "task"
                    curves.setdefault(tag, []).append((row[axis], row[tag]))
        return curves

    return read


def test_wandb_has_what_the_results_say(tmp_path: Path, wandb: WandBServer) -> None:
    results = begin(tmp_path / "whole", "wandb")
    runs = wandb_runs(wandb)
    assert sorted(runs) == sorted(SERIES)
    assert_told(wandb_curves(runs), results)
    for name, run in runs.items():
        method, _, trial = name.partition("/")
        assert (run.project, run.group, run.job) == ("whole", method, trial.partition("-")[0])
        assert run.exit_code == 0
        config = {key: value["value"] for key, value in run.config.items() if key != "_wandb"}
        settings = {key: value for key, value in results[method].config.to_dict().items() if value is not None}
        assert config == {**settings, "label": method, "trial": trial}
    assert lines_about(tmp_path / "whole", "wandb") == [f"wandb logs to {wandb.url}/me/whole"]


def test_a_stopped_run_goes_on_in_the_same_wandb_runs(tmp_path: Path, wandb: WandBServer) -> None:
    folder = tmp_path / "stopped"
    begin_and_stop(folder, "wandb")
    before = {name: len(run.rows) for name, run in wandb_runs(wandb).items()}
    assert sorted(before) == sorted(SERIES)
    assert {run.exit_code for run in wandb.runs.values()} == {1}
    for run in wandb.runs.values():
        run.offsets.clear()
    results = resume(folder).results
    runs = wandb_runs(wandb)
    assert_told(wandb_curves(runs), results)
    assert {run.exit_code for run in runs.values()} == {0}
    assert {name: min(run.offsets) for name, run in runs.items()} == before, "only what is new is sent"


def test_wandb_works_offline_without_an_account(
    tmp_path: Path, wandb: WandBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("WANDB_API_KEY")
        begin_and_stop(tmp_path / "offline", "wandb")
        results = resume(tmp_path / "offline").results
    assert not wandb.runs
    (where, again) = lines_about(tmp_path / "offline", "wandb")
    assert where == again == f"wandb logs to {tmp_path}/w/wandb, for `wandb sync`"
    folders = sorted((tmp_path / "w" / "wandb").glob("offline-run-*"))
    assert len(folders) == len(SERIES), "what was written before the run was stopped is replaced"
    command = [str(Path(sys.executable).parent / "wandb"), "sync", *map(str, folders)]
    subprocess.run(command, check=True, capture_output=True)
    runs = wandb_runs(wandb)
    assert sorted(runs) == sorted(SERIES)
    assert_told(wandb_curves(runs), results)
    assert {run.exit_code for run in runs.values()} == {0}


def test_a_wandb_server_that_breaks_during_a_run_does_not_end_it(
    wandb: WandBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")
    log = WandB("broken", tell=(sentences := []).append)
    outcome = Outcome(records=[Record(0, 0, 0, 3, 1.5)])
    log(progress_of(outcome))
    log._wait()
    assert wandb_runs(wandb)["finetune/trial-0"].exit_code is None
    wandb.broken = True
    outcome.rows.append([0.5])
    log(progress_of(outcome))  # the end of the run
    where, problem = sentences
    assert where == f"wandb logs to {wandb.url}/me/broken"
    assert problem.startswith("wandb does not have everything about the run: ")


def test_a_wandb_server_that_is_not_there_does_not_end_a_run(
    tmp_path: Path, wandb: WandBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", dead_address())
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    monkeypatch.setattr(servers, "SECONDS_TO_WAIT", 5.0)
    results = begin(tmp_path / "dead", "wandb")
    assert np.isfinite(results["dhp+si"].average_accuracy).all()
    told = lines_about(tmp_path / "dead", "wandb")
    assert told[-1].startswith("wandb does not have everything about the run: ")
    assert len(told) <= 2


def test_wandb_does_not_ask_for_a_key(tmp_path: Path, wandb: WandBServer) -> None:
    """A program of its own, since a session keeps a key that it has found."""
    without = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    arguments = ["run", "split-mnist", "--dataset", "mnist-small", "--out", tmp_path / "run", "--log", "wandb"]
    command = [sys.executable, "-m", "engram", *map(str, arguments)]
    done = subprocess.run(command, env=without, capture_output=True, text=True)
    assert done.returncode == 2
    assert "engram: wandb has no API key: `wandb login` stores one, and WANDB_MODE=offline needs none" in done.stderr
    assert not (tmp_path / "run").exists()


def test_project_and_group_can_be_named_in_the_environment(wandb: WandBServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "all-of-mine")
    monkeypatch.setenv("WANDB_RUN_GROUP", "today")
    WandB("a/b", tell=print)(progress_of(Outcome(rows=[[0.5]], records=[Record(0, 0, 0, 3, 1.5)])))
    assert {(run.project, run.group) for run in wandb.runs.values()} == {("all-of-mine", "today")}


@pytest.mark.usefixtures("mlflow", "wandb")
def test_examples_in_docstrings_run() -> None:
    config = preset("split-mnist", "finetune", **SETTINGS)
    found = doctest.testmod(servers, extraglobs={"engram": engram, "config": config})
    assert (found.attempted, found.failed) == (2, 0)
