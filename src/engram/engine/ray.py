"""The stacks of a run on a Ray cluster: each is a Ray task, and as many train together as there is room for.

Workers send their progress to a small actor, from which the driver takes it. Checkpoints are in the run's folder, which
all machines must see. When a worker dies, another one resumes its stack from the last checkpoint.
"""

from __future__ import annotations

import copy
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from engram.common.errors import InputError, Stopped, reason
from engram.common.files import locked
from engram.data.samples import Dataset
from engram.engine.in_process import InProcess, ReportOfStack, Stack, StackTraining
from engram.engine.learner import Outcomes, Progress, StopAsked
from engram.engine.stacks import Builder

RETRIES = 3  # for a stack whose worker died
SECONDS_TO_CONNECT = 10.0
SECONDS_BETWEEN_POLLS = 0.2  # by the driver
SECONDS_BETWEEN_MESSAGES = 0.5  # from a worker
TIME_FOR_MESSAGES = 0.1  # the fraction of a worker's time: the outcomes of a thousand tasks are large
SECONDS_FOR_ORPHANS = 60.0  # until the worker of a killed driver must have ended, before another takes its stack


def _import_ray() -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no statistics
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors are raised as one sentence
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed: pip install 'engram-cl[ray]'") from error
    return ray


@contextmanager
def start_ray(address: str | None) -> Iterator[RayEngine]:
    """An engine on the cluster at an address; by default at $RAY_ADDRESS, or on a new cluster of this machine."""
    ray = _import_ray()
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    try:
        _check_reachable(where)
        with _ignoring_interrupts():
            ray.init(where, log_to_driver=False, logging_level="error", **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise InputError(f"cannot reach a Ray cluster at {where}: {reason(error)}") from error
    try:
        yield RayEngine(ray)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise an OSError if nobody answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes started within this context ignore Ctrl-C: the driver handles it, and tells the workers to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


class RayEngine:
    """Stacks as Ray tasks. Each gets as many CPUs as this process uses threads, or a GPU if the cluster has any."""

    name = "ray"

    def __init__(self, ray: Any):
        self.ray = ray
        self.threads = torch.get_num_threads()
        self.datasets: dict[int, tuple[Dataset, Any]] = {}  # those that the cluster has, by identity

    @property
    def at_once(self) -> int:
        resources = self.ray.cluster_resources()
        return max(1, int(resources.get("GPU", 0) or resources.get("CPU", 1) // self.threads))

    def environment(self, device: str) -> dict[str, Any]:
        return self._call(device, InProcess().environment, self._device(device))

    def limit(self, builder: Builder) -> int | None:
        light, datasets = self._without_data(builder)
        return self._call(builder.device_name, _limit, light, *datasets)

    def train(self, stacks: Sequence[Stack], report: ReportOfStack, stop_asked: StopAsked) -> None:
        """Train all stacks, as many together as there is room for."""
        channel = self.ray.remote(_Channel).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        driver = _Driver(self, channel, report)
        try:
            driver.run(stacks, stop_asked)
        finally:
            for task in driver.pending:
                self.ray.cancel(task, force=True)
            self.ray.kill(channel)

    def submit(self, stack: Stack, attempt: int, channel: Any) -> Any:
        light, datasets = self._without_data(stack.builder)
        checkpoints = stack.checkpoints and replace(stack.checkpoints, path=stack.checkpoints.path.resolve())
        task = self.ray.remote(_call_with_threads).options(**self._resources(stack.builder.device_name))
        light_stack = replace(stack, builder=light, checkpoints=checkpoints)
        return task.remote(self.threads, _train, light_stack, attempt, channel, *datasets)

    def _device(self, device: str) -> str:
        """ "auto" means the GPUs of the cluster, if it has any. A worker sees one GPU, under any number."""
        if device == "auto":
            device = "cuda" if self.ray.cluster_resources().get("GPU", 0) else "cpu"
        return "cuda" if device.startswith("cuda") else device

    def _resources(self, device: str) -> dict[str, Any]:
        """What a worker needs. Ray does not restart one that died: the driver does, and reports it."""
        room = {"num_gpus": 1} if self._device(device) == "cuda" else {"num_cpus": self.threads}
        return {**room, "max_retries": 0}

    def _call(self, device: str, function: Any, *arguments: Any) -> Any:
        """Call a function on a worker, and wait for what it returns."""
        needed, available = self._resources(device), self.ray.cluster_resources()
        for option, resource in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
            there, amount = available.get(resource, 0), needed.get(option, 0)
            if amount > there:
                raise InputError(f"the Ray cluster has {there:g} {resource}s, and a stack needs {amount}")
        try:
            task = self.ray.remote(_call_with_threads).options(**needed)
            return self.ray.get(task.remote(self.threads, function, *arguments))
        except self.ray.exceptions.RayTaskError as failed:
            raise failed.cause from None
        except self.ray.exceptions.RayError as death:
            raise InputError(f"a worker of the Ray cluster died before it could start: {reason(death)}") from death

    def _without_data(self, builder: Builder) -> tuple[Builder, list[Any]]:
        """The builder as it is sent to workers; its datasets are sent once for all."""
        references = []
        for dataset in builder.source.datasets:
            if id(dataset) not in self.datasets:
                self.datasets[id(dataset)] = dataset, self.ray.put(dataset)
            references.append(self.datasets[id(dataset)][1])
        light = copy.copy(builder)
        light.source = replace(builder.source, datasets=())
        light.device_name = self._device(builder.device_name)
        return light, references


class _Channel:
    """The actor between workers and driver: holds messages, and whether to stop."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int, Progress]] = []
        self.stopping = False

    def put(self, number: int, attempt: int, progress: Progress) -> bool:
        """Leave a message for the driver; returns whether to stop."""
        self.messages.append((number, attempt, progress))
        return self.stopping

    def take(self, stop: bool) -> list[tuple[int, int, Progress]]:
        """Take all messages; `stop` tells the workers to stop."""
        self.stopping |= stop
        messages, self.messages = self.messages, []
        return messages


class _Driver:
    """Submits stacks, reports their progress, and submits a stack again when its worker died."""

    def __init__(self, engine: RayEngine, channel: Any, report: ReportOfStack):
        self.engine, self.channel, self.report = engine, channel, report
        self.pending: dict[Any, Stack] = {}
        self.deaths: Counter[int] = Counter()  # by the number of the stack
        self.tasks_ended: Counter[int] = Counter()
        self.stopped = False

    def run(self, stacks: Sequence[Stack], stop_asked: StopAsked) -> None:
        ray = self.engine.ray
        for stack in stacks:
            self._submit(stack)
        while self.pending:
            ended, _ = ray.wait(list(self.pending), timeout=SECONDS_BETWEEN_POLLS)
            for number, attempt, progress in ray.get(self.channel.take.remote(stop_asked())):
                if attempt == self.deaths[number]:  # otherwise it is from a worker that is dead by now
                    self._report(number, progress)
            for task in ended:
                self._end(task)
        if self.stopped:
            raise Stopped

    def _submit(self, stack: Stack) -> None:
        self.pending[self.engine.submit(stack, self.deaths[stack.number], self.channel)] = stack

    def _report(self, number: int, progress: Progress) -> None:
        """Report every task that ended since the last message, since a message may come after several."""
        ended = max((len(outcome.rows) for outcome in progress.outcomes.values()), default=0)
        for task in range(self.tasks_ended[number], ended):
            self.report(number, replace(progress, task=task, task_ended=True, note=None))
        self.tasks_ended[number] = max(self.tasks_ended[number], ended)
        self.report(number, progress)

    def _end(self, task: Any) -> None:
        stack = self.pending.pop(task)
        number, last_task, errors = stack.number, stack.builder.config.num_tasks - 1, self.engine.ray.exceptions
        try:
            outcomes = self.engine.ray.get(task)  # complete, even if messages were lost
            self._report(number, Progress(1.0, last_task, outcomes=outcomes, task_ended=True))
        except errors.RayTaskError as failed:
            if not isinstance(failed.cause, Stopped):
                raise failed.cause from None
            self.stopped = True  # but wait for the others, until they too have saved their stacks
        except errors.RayError as death:
            self.deaths[number] = times = self.deaths[number] + 1
            if times > RETRIES:
                what = f"the workers of stack {number + 1} died {times} times, the last one with: {reason(death)}"
                raise InputError(f"{what}; the run can be resumed from its last checkpoint") from death
            note = f"a worker of stack {number + 1} died: retrying ({times} of {RETRIES})"
            self.report(number, Progress(0, 0, note=note))
            self._submit(stack)


def _call_with_threads(threads: int, function: Any, *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    return function(*arguments)


def _limit(builder: Builder, *datasets: Dataset) -> int | None:
    builder.source = replace(builder.source, datasets=datasets)
    return builder.limit()


def _train(stack: Stack, attempt: int, channel: Any, *datasets: Dataset) -> Outcomes:
    """What a worker does."""
    stack.builder.source = replace(stack.builder.source, datasets=datasets)
    sender = _Sender(stack.number, attempt, channel)
    sender.report(Progress(0, 0))
    if sender.stopping:
        raise Stopped
    with _only_worker(stack):
        return StackTraining(stack, sender.report, lambda: sender.stopping).run()


class _Sender:
    """Sends a worker's progress to the driver, rarely enough to cost little time, however large outcomes become."""

    def __init__(self, number: int, attempt: int, channel: Any):
        self.number, self.attempt, self.channel = number, attempt, channel
        self.stopping = False  # as of the last message
        self.next_message = 0.0
        self.task_ended = False  # since the last message

    def report(self, progress: Progress) -> None:
        """Send progress if it is due, or if there is a note; outcomes only if a task ended since they were sent."""
        import ray

        began = time.monotonic()
        due = began >= self.next_message
        self.task_ended |= progress.task_ended
        if not (due or progress.note):
            return
        outcomes = progress.outcomes if due and self.task_ended else {}
        light = replace(progress, configs={}, outcomes=outcomes, task_ended=False)
        answer = self.channel.put.remote(self.number, self.attempt, light)
        if due:
            self.task_ended = False
            sent = time.monotonic()
            self.next_message = sent + max(SECONDS_BETWEEN_MESSAGES, (sent - began) / TIME_FOR_MESSAGES)
        self.stopping = ray.get(answer)


@contextmanager
def _only_worker(stack: Stack) -> Iterator[None]:
    """Lock the stack: the worker of a driver that was killed may still be writing to the same checkpoints."""
    if stack.checkpoints is None:
        yield
        return
    if not (folder := stack.checkpoints.path).is_dir():
        problem = f"the worker on {socket.gethostname()} does not see {folder}"
        raise InputError(f"{problem}: on a cluster, results go into a folder that all machines share")
    with locked(folder / f"stack-{stack.number}.lock", SECONDS_FOR_ORPHANS):
        yield
