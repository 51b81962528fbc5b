"""Log a run to MLflow or to Weights & Biases, which may be servers that fail."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from uuid import uuid4

from engram.common.errors import printable, reason
from engram.engine.learner import Progress
from engram.runs.log import OFFLINE, NoLog, Point, ProgressPoints, Series, TensorBoard, Update, check_log

SECONDS_TO_RETRY = 30.0  # after a server failed
SECONDS_TO_WAIT = 30.0  # at the end, for a server that takes nothing
FRACTION_OF_TIME = 0.1  # the part of a run's time in which points are sent
Tell = Callable[[str], None]


def start_log(name: str | None, folder: Path, identity: str, tell: Tell) -> NoLog | TensorBoard | MLflow | WandB:
    """The log of a run in a folder. The identity of the run stays the same when it is resumed."""
    if name is None:
        return NoLog()
    if name == "tensorboard":  # event files start again, from what the checkpoints hold
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        return TensorBoard(folder / "tensorboard")
    return (MLflow if name == "mlflow" else WandB)(folder.resolve().name, identity=identity, tell=tell)


def print_sentence(sentence: str) -> None:
    """Print to stderr, where nothing else shows sentences to the user."""
    print(printable(f"engram: {sentence}"), file=sys.stderr)


class _Server(ABC):
    """Sends points from a thread, so that training never waits for a network.

    What a server did not take is kept and sent later. The user is told about the first failure, and at the end if
    something is still missing.
    """

    def __init__(self, name: str, identity: str | None, tell: Tell):
        self.name, self.identity, self.tell = name, identity or uuid4().hex[:12], tell
        self.points = ProgressPoints()
        self.left: defaultdict[Series, Update] = defaultdict(Update)  # to be sent
        self.lock = Lock()  # of `left`
        self.unfinished: dict[Series, None] = {}
        self.thread: Thread | None = None
        self.num_sent = 0  # updates, by the thread
        self.next_send = 0.0
        self.sentences: list[str] = []  # from the thread, to be told
        self.problem, self.num_failures, self.closed = "", 0, False

    @abstractmethod
    def send(self, series: Series, points: Sequence[Point]) -> None:
        """Send those points that the server does not have."""

    @abstractmethod
    def end(self, series: Series, how: str) -> None:
        """Say that a series is "finished", "diverged" or "stopped"."""

    def __call__(self, progress: Progress) -> None:
        """Send what is new. When all trials have ended, wait until everything has arrived."""
        with self.lock:
            for series, update in self.points.updates(progress).items():
                self.unfinished |= {series: None, series.mean: None}
                self._add(series, update)
        if self.points.ended:
            self.close()
        elif self.left and not self._sending() and time.monotonic() >= self.next_send:
            self._start()
        self._tell()

    def close(self) -> None:
        """Send what is left, and say of trials that have not ended that they were stopped."""
        if self.closed:
            return
        self.closed = True
        with self.lock:
            for series in list(self.unfinished):
                self._add(series, Update(ended="stopped"))
        failures = self.num_failures
        self._wait()
        if self.left and not self._sending() and self.num_failures == failures:
            self._start()
            self._wait()
        if self.left:
            why = f"it took nothing for {SECONDS_TO_WAIT:.0f} seconds" if self._sending() else self.problem
            self.sentences.append(f"{self.name} does not have everything about the run: {why}")
        self._tell()

    def _add(self, series: Series, update: Update) -> None:
        self.left[series].points += update.points
        if update.ended:
            self.left[series].ended = update.ended
            del self.unfinished[series]

    def _sending(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def _start(self) -> None:
        self.thread = Thread(target=self._send, daemon=True)  # a dead server does not keep a program open
        self.thread.start()

    def _wait(self) -> None:
        """Until the thread has sent everything, or nothing for too long."""
        sent = -1
        while self.thread is not None and self.thread.is_alive() and sent < self.num_sent:
            sent = self.num_sent
            self.thread.join(SECONDS_TO_WAIT)

    def _send(self) -> None:
        """Send what is left, series by series. One that fails goes to the end, so that the others come first."""
        started = time.monotonic()
        for series in list(self.left):
            with self.lock:
                points, ended = list(self.left[series].points), self.left[series].ended
            try:
                if points:
                    self.send(series, points)
                with self.lock:
                    del self.left[series].points[: len(points)]
                if ended:
                    self.end(series, ended)
            except Exception as error:  # of a package or its server: training goes on
                with self.lock:
                    self.left[series] = self.left.pop(series)
                self.problem = reason(error)
                if not self.num_failures and not self.closed:
                    self.sentences.append(f"{self.name} fails ({self.problem}); the run continues, and tries again")
                self.num_failures += 1
                self.next_send = time.monotonic() + SECONDS_TO_RETRY
                return
            with self.lock:
                if not self.left[series].points and self.left[series].ended == ended:
                    del self.left[series]
            self.num_sent += 1
        now = time.monotonic()
        self.next_send = now + (now - started) / FRACTION_OF_TIME

    def _tell(self) -> None:
        while self.sentences:
            self.tell(re.sub(r"//[^/@\s]*@", "//", self.sentences.pop(0)))  # an address may hold a password


class MLflow(_Server):
    """Logs to MLflow: a run for the mean of each label's trials, and below it one for each trial. It is a `report`.

    MLFLOW_TRACKING_URI says where. A dead server does not stop the training.

    Args:
        experiment: its name, unless MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID is set.
        identity: with that of an earlier log, its runs are continued.
        tell: called with sentences for the user.

    Example:
        >>> result = engram.run(config, report=MLflow("mine"))
    """

    def __init__(self, experiment: str, *, identity: str | None = None, tell: Tell = print_sentence):
        check_log("mlflow")
        super().__init__("MLflow", identity, tell)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for each run
        self.experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        self.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.experiment_id or experiment
        self.client: Any = None
        self.runs: dict[Series, tuple[str, dict[str, int]]] = {}  # their ids, and the last step of two metrics

    def send(self, series: Series, points: Sequence[Point]) -> None:
        """Accuracies have the number of tasks as their step, losses and traces the number of training steps."""
        from mlflow.entities import Metric

        run, last = self._run(series)
        now, metrics = round(1000 * time.time()), []
        for point in points:
            key, step = ("training/loss", point.step) if point.task is None else ("accuracy/average", point.task)
            if step > last[key]:
                metrics += [Metric(tag, value, now, step) for tag, value in point.values.items()]
        del self.runs[series]  # if this fails, some of it may have arrived: the server is asked again
        if metrics:
            self.client.log_batch(run, metrics)
        for metric in metrics:
            if metric.key in last:
                last[metric.key] = metric.step
        self.runs[series] = run, last

    def end(self, series: Series, how: str) -> None:
        status = {"finished": "FINISHED", "diverged": "FAILED", "stopped": "KILLED"}[how]
        self.client.set_terminated(self._run(series)[0], status)

    def _run(self, series: Series) -> tuple[str, dict[str, int]]:
        """Open or continue the MLflow run of a series."""
        import mlflow

        if series in self.runs:
            return self.runs[series]
        if self.client is None:
            client = mlflow.MlflowClient()
            if self.experiment_id is None:
                found = client.get_experiment_by_name(self.experiment)
                self.experiment_id = found.experiment_id if found else client.create_experiment(self.experiment)
            self.client = client
            self.sentences.append(f"MLflow logs to the experiment {self.experiment} at {client.tracking_uri}")
        tags = {"engram.run": self.identity, "engram.series": f"{series.index}/{series.name}"}
        same = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        earlier = self.client.search_runs([self.experiment_id], same)
        if earlier:
            run = earlier[0].info.run_id
            self.client.update_run(run, status="RUNNING")
        else:
            if series.trial is not None:
                tags["mlflow.parentRunId"] = self._run(series.mean)[0]
            run = self.client.create_run(self.experiment_id, tags=tags, run_name=series.full_name).info.run_id
        params = [mlflow.entities.Param(name, str(value)) for name, value in series.settings.items()]
        self.client.log_batch(run, params=params)
        last = {
            key: max((metric.step for metric in self.client.get_metric_history(run, key)), default=-1)
            for key in ("training/loss", "accuracy/average")
        }
        self.runs[series] = run, last
        return run, last


class WandB(_Server):
    """Logs to Weights & Biases: a run for each trial, and one for the mean of a label's trials. It is a `report`.

    WANDB_MODE=offline needs no account: `wandb sync` uploads later. A dead server does not stop the training.

    Args:
        project: its name, unless WANDB_PROJECT is set. The label is the group, unless WANDB_RUN_GROUP is set.
        identity: with that of an earlier log, its runs are continued.
        tell: called with sentences for the user.

    Example:
        >>> result = engram.run(config, report=WandB("mine"))
    """

    def __init__(self, project: str, *, identity: str | None = None, tell: Tell = print_sentence):
        check_log("wandb")
        super().__init__("wandb", identity, tell)
        self.project = os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", project)[:128]
        self.runs: dict[Series, Any] = {}
        self.opened = False  # any run, ever

    def send(self, series: Series, points: Sequence[Point]) -> None:
        """A row for each point, with the point's number, so that a run that is continued says what it has."""
        run = self.runs.get(series) or self._open(series)
        for point in points:
            if point.number >= run.starting_step:
                axis = {"step": point.step} if point.task is None else {"task": point.task}
                run.log({**axis, **point.values}, step=point.number, commit=True)

    def end(self, series: Series, how: str) -> None:
        if series in self.runs:  # what cannot be uploaded in time is still on the disk
            self.runs.pop(series).finish(exit_code=0 if how == "finished" else 1)

    def _open(self, series: Series) -> Any:
        """Open or continue the W&B run of a series."""
        import wandb

        shared = wandb.setup().settings
        offline = shared.mode in OFFLINE
        run = wandb.init(
            project=self.project,
            id=f"{self.identity}-{series.index}-{series.name}",
            name=series.full_name,
            group=os.environ.get("WANDB_RUN_GROUP") or series.label,
            job_type="mean" if series.trial is None else "trial",
            config=series.settings,
            # Offline nothing tells how far it came, so it is written again from its start.
            resume=None if offline else "allow",
            reinit="create_new",  # beside the others
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,  # the machine is the same for all
                init_timeout=min(shared.init_timeout, 0.8 * SECONDS_TO_WAIT),  # it is tried again
                finish_timeout=shared.finish_timeout or SECONDS_TO_WAIT,
                finish_timeout_raises=True,
            ),
        )
        for tags, axis in {"training/*": "step", "trace/*": "step", "accuracy/*": "task", "transfer/*": "task"}.items():
            run.define_metric(tags, step_metric=axis)
        for folder in Path(run.settings.wandb_dir).glob(f"offline-run-*-{run.id}"):
            if folder != Path(run.settings.sync_dir):
                shutil.rmtree(folder, ignore_errors=True)
        if not self.opened:
            self.opened = True
            where = f"{run.settings.wandb_dir}, for `wandb sync`" if offline else run.project_url
            self.sentences.append(f"wandb logs to {where}")
        self.runs[series] = run
        return run
