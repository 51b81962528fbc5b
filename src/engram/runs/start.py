"""Start and resume runs: train configs by label into a folder, so that a kill at any moment loses next to nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from engram.common.errors import InputError, reason
from engram.common.files import locked, remove_unfinished
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.engine import Engine, InProcess
from engram.engine.checkpoint import SECONDS_BETWEEN, CheckpointFolder
from engram.engine.learner import Progress, Report, StopAsked, never_stop, no_report
from engram.engine.loop import RECORDS_PER_EPOCH
from engram.engine.stacks import Source, digest
from engram.engine.training import Runtime, Training, check_learned, check_together
from engram.runs.display import ProgressLines
from engram.runs.experiment import results_of
from engram.runs.folder import LOG, RunFolder, changes_since, check_unclaimed, claimed, logged_lines, now, versions
from engram.runs.format import DAMAGE, RUN, check_size, read_description
from engram.runs.log import check_log
from engram.runs.result import Result
from engram.runs.run import Run, check_started, has_started, read_run
from engram.runs.servers import start_log

CHECKPOINTS = "checkpoints"


def check_run(
    configs: Mapping[str, Config], runtime: Runtime, *, log: str | None = None, dynamics: bool = True
) -> dict[str, Any]:
    """Refuse what cannot be run at all, or not on this machine, as far as that can be told without the data.

    Returns:
        The environment, as `Runtime.environment` describes it.
    """
    check_log(log)
    environment = runtime.environment()
    check_together(configs)
    check_size(configs, RECORDS_PER_EPOCH if dynamics else 0)
    return environment


def start_run(
    configs: Mapping[str, Config],
    datasets: Sequence[Dataset],
    path: str | Path,
    *,
    command: str = "",
    runtime: Runtime | None = None,
    log: str | None = None,
    about: Mapping[str, Any] | None = None,
    dynamics: bool = True,
    one_of_many: bool = False,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = no_report,
    stop_asked: StopAsked = never_stop,
) -> Run:
    """Train configs into a new folder. Bad input is refused before the folder is made.

    Args:
        configs: the settings by label. They agree on benchmark and dataset, and may differ in everything else.
        datasets: what they learn.
        path: a new or empty folder.
        command: saved, so that it can be run again.
        runtime: where and how to compute.
        log: "tensorboard" to write event files into the folder too; "mlflow" or "wandb" to log there.
        about: more to save in `run.json`, such as the part of a reproduction.
        dynamics: whether to write `dynamics.csv`.
        one_of_many: whether a run in which every trial fails at once is kept, and not refused: the others go on.
        seconds_between: the time between two checkpoints.
        report: called with each `Progress`.
        stop_asked: asked often; when it returns True everything is saved, and `Stopped` is raised.

    Returns:
        The finished run.

    Example:
        >>> run = start_run({"mine": config}, load_datasets(config, None), "runs/mine")
        >>> run.results["mine"].bwt.shape
        (2,)
    """
    runtime = Runtime() if runtime is None else runtime
    environment = check_run(configs, runtime, log=log, dynamics=dynamics)
    runtime = replace(runtime, device=environment["device"])
    training = Training(configs, Source(tuple(datasets)), runtime)
    path = Path(path)
    with claimed(path) as file:
        description = {
            "command": command,
            **(about or {}),
            "started": now(),
            "runtime": {
                "device": runtime.device,
                "precision": runtime.precision,
                "max_stack": runtime.max_stack,
                "engine": runtime.engine.name,
            },
            "environment": environment,
            "versions": versions(),
            "log": log,
            "log_id": None if log is None else uuid4().hex[:12],  # names the run in MLflow and W&B
            "dynamics": dynamics,
            "settings": digest(configs),
            "data": [dataset.provenance() for dataset in datasets],
            "fingerprints": [dataset.fingerprint() for dataset in datasets],
        }
        folder = RunFolder(path, file, configs, description, dynamics)
        folder.describe()
        folder.log(f"{command} on {runtime.device}")
        try:
            run = _train(folder, training, seconds_between, report, stop_asked)
            if not one_of_many:
                check_learned(training.outcomes)
            return run
        except InputError:
            if not any(outcome.rows for outcome in training.outcomes.values()):
                folder.discard()  # what was given cannot be used, and nothing was learned
            raise


def resume_run(
    path: str | Path,
    datasets: Sequence[Dataset],
    *,
    engine: Engine | None = None,
    device: str | None = None,
    seconds_between: float = SECONDS_BETWEEN,
    report: Report = no_report,
    stop_asked: StopAsked = never_stop,
) -> Run:
    """Resume a run that was stopped or killed, with the same results as if it had never been.

    Args:
        path: the folder.
        datasets: the same data as at the start; others are refused.
        engine: what trains the stacks; by default this process.
        device: by default that of the start. On another one, and with other versions or threads, last digits of the
            results may differ: that is reported and logged, and `run.json` keeps what it recorded at the start.
        seconds_between: the time between two checkpoints.
        report: called with each `Progress`.
        stop_asked: asked often; when it returns True everything is saved, and `Stopped` is raised.

    Example:
        >>> resume_run("runs/stopped", load_datasets(config, None)).finished
        True
    """
    path = Path(path)
    read_unfinished(path)  # refuse a folder without a run before its log is touched
    with locked(path / LOG) as file:  # so that one process works on it
        configs, about = read_unfinished(path)
        runtime = _recorded_runtime(path, about, engine or InProcess(), device)
        dynamics = about.get("dynamics") is not False
        environment = check_run(configs, runtime, log=about.get("log"), dynamics=dynamics)
        runtime = replace(runtime, device=environment["device"])
        _check_unchanged(path, configs, about, datasets)
        training = Training(configs, Source(tuple(datasets)), runtime)
        remove_unfinished(path)
        folder = RunFolder(path, file, configs, about, dynamics)
        folder.log(f"engram run --resume {path} on {runtime.device}")
        notes = []
        if not CheckpointFolder(path / CHECKPOINTS).any_saved:
            notes.append("nothing was saved yet when the run was stopped: it starts again")
        if warning := changes_since({**about["environment"], **about["versions"]}, {**environment, **versions()}):
            notes.append(warning)
        for note in notes:
            folder.log(note)
            report(Progress(0, 0, note=note))
        return _train(folder, training, seconds_between, report, stop_asked)


def complete_run(
    configs: Mapping[str, Config],
    datasets: Sequence[Dataset],
    path: str | Path,
    *,
    command: str = "",
    runtime: Runtime | None = None,
    about: Mapping[str, Any] | None = None,
    dynamics: bool = True,
    report: Report = no_report,
    stop_asked: StopAsked = never_stop,
) -> Run:
    """Start a run, resume it if it was stopped, or read it if it is finished; the arguments are those of `start_run`.

    A folder that holds a run of other settings is refused.
    """
    path = Path(path)
    runtime = Runtime() if runtime is None else runtime
    if not has_started(path):
        check_unclaimed(path)
        return start_run(
            configs,
            datasets,
            path,
            command=command,
            runtime=runtime,
            about=about,
            dynamics=dynamics,
            one_of_many=True,
            report=report,
            stop_asked=stop_asked,
        )
    there, found = read_description(path)
    if there != dict(configs):
        raise InputError(f"{path} holds a run of other settings: remove it, or name another folder with --out")
    if found.get("finished"):
        return read_finished(path)
    precision = found["runtime"].get("precision") if isinstance(found.get("runtime"), dict) else None
    if precision != runtime.precision:
        raise InputError(f"{path} was started with the precision {precision}: resume it with that")
    return resume_run(
        path, datasets, engine=runtime.engine, device=runtime.device, report=report, stop_asked=stop_asked
    )


def read_finished(path: Path) -> Run:
    """A finished run, all of whose results can be read."""
    CheckpointFolder(path / CHECKPOINTS).remove()  # left by a process that was killed at the very end
    run = read_run(path)
    for problem in run.problems.values():
        raise InputError(f"{problem}; remove {run.path} to run it again")
    return run


def read_unfinished(path: Path) -> tuple[dict[str, Config], dict[str, Any]]:
    """The configs and the description of a run that can be resumed."""
    check_started(path)
    configs, about = read_description(path)
    if about.get("finished"):
        CheckpointFolder(path / CHECKPOINTS).remove()  # left by a process that was killed at the very end
        raise InputError(f"the run in {path} is finished; `engram table {path}` shows it")
    return configs, about


def _recorded_runtime(path: Path, about: Mapping[str, Any], engine: Engine, device: str | None) -> Runtime:
    try:
        recorded = about["runtime"]
        found = Runtime(device or recorded["device"], recorded["precision"], recorded["max_stack"], engine)
        if not all(isinstance(about[name], dict) for name in ("environment", "versions")):
            raise ValueError("its environment is damaged")
        float(about.get("seconds", 0))
    except DAMAGE as error:
        raise InputError(f"{path / RUN} does not say enough to resume ({reason(error)})") from error
    return found


def _check_unchanged(
    path: Path, configs: Mapping[str, Config], about: Mapping[str, Any], datasets: Sequence[Dataset]
) -> None:
    """Refuse to resume with settings or data other than those of the start."""
    if about.get("settings") != digest(configs):
        raise InputError(f"the settings in {path} were changed since the run started")
    data = [dataset.provenance() for dataset in datasets], [dataset.fingerprint() for dataset in datasets]
    if data != (about["data"], about.get("fingerprints")):
        raise InputError(f"the data are not those that the run in {path} started with")


def _train(folder: RunFolder, training: Training, seconds_between: float, report: Report, stop_asked: StopAsked) -> Run:
    """From the folder's checkpoints, if there are any, to the end."""
    lines = ProgressLines(logged_lines(folder.path))
    data = folder.about["data"]
    notes: list[str] = []
    log = start_log(folder.about.get("log"), folder.path, str(folder.about.get("log_id")), notes.append)

    def results() -> dict[str, Result]:
        return results_of(folder.configs, training.outcomes, data)

    def on_progress(progress: Progress) -> None:
        for line in (*lines.task_lines(progress), *lines.warnings(progress)):
            folder.log(line)
        problem = folder.save(results, new=progress.task_ended)
        log(progress)
        report(progress)
        notes.extend([problem] if problem else [])
        while notes:
            on_progress(replace(progress, task_ended=False, note=notes.pop(0)))

    checkpoints = CheckpointFolder(folder.path / CHECKPOINTS)
    try:
        training.run(checkpoints.path, seconds_between, on_progress, stop_asked)
    except BaseException:
        folder.stop(results)
        log.close()
        for note in notes:
            folder.log(note)
        raise
    found = results()
    folder.finish(found)
    checkpoints.remove()
    folder.log(f"finished after {folder.about['seconds']:.1f} s")
    return Run(folder.path, dict(folder.configs), found, folder.about)
