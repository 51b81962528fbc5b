"""The stacks of an experiment on a Ray cluster: as many at once as it has room for, each a task of its own.

A worker tells the driver how far it has come by way of a small actor, the post. Checkpoints lie in the run's folder,
which all machines must see. A worker that dies is replaced by another, which goes on from the last checkpoint.
"""

from __future__ import annotations

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
from engram.engine.in_process import TellOf, surroundings
from engram.engine.letters import Letter, News, Post, with_news
from engram.engine.stacks import Outcomes
from engram.engine.unit import Asked, Told, Unit, find_limit, train_unit

RETRIES = 3  # of a unit whose worker died
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LETTERS = 0.5  # of a worker that only moved
SECONDS_BETWEEN_QUESTIONS = 0.5  # whether to stop
SECONDS_TO_LET_GO = 60.0  # that the worker of a driver that was killed has before another takes its place


def _import_ray() -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what is run here
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what went wrong is said in a sentence
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed: pip install 'engram-cl[ray]'") from error
    return ray


@contextmanager
def start_ray(address: str | None) -> Iterator[RayEngine]:
    """An engine on the cluster at an address; without one on $RAY_ADDRESS, or on a cluster of this machine's own."""
    ray = _import_ray()
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    try:
        with _deaf_children():
            ray.init(where, log_to_driver=False, logging_level="error", **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise InputError(f"there is no Ray cluster to be reached at {where}: {reason(error)}") from error
    try:
        yield RayEngine(ray)
    finally:
        ray.shutdown()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that are started within it do not hear Ctrl-C: the driver does, and tells the workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


class RayEngine:
    """Units as Ray tasks. Each has as many CPUs as this process would use threads, or a GPU where there are any."""

    name = "ray"

    def __init__(self, ray: Any):
        self.ray = ray
        self.threads = torch.get_num_threads()
        self.datasets: dict[int, tuple[Dataset, Any]] = {}  # that the cluster has, by identity

    @property
    def at_once(self) -> int:
        there = self.ray.cluster_resources()
        return max(1, int(there.get("GPU", 0) or there.get("CPU", 1) // self.threads))

    def surroundings(self, device: str) -> dict[str, Any]:
        return self._ask(_surroundings, device, self._device(device), self.threads)

    def limit(self, unit: Unit) -> int | None:
        light, refs = self._without_data(unit)
        return self._ask(_limit, unit.device, light, self.threads, *refs)

    def _device(self, device: str) -> str:
        """ "auto" is the cluster's GPUs where it has any, not this machine's; a worker sees one of them, whichever."""
        if device != "auto":
            return "cuda" if device.startswith("cuda") else device
        return "cuda" if self.ray.cluster_resources().get("GPU", 0) else "cpu"

    def _needs(self, device: str) -> dict[str, Any]:
        """What a worker is to have. One that dies is noticed here, and not started again behind our back."""
        room = {"num_gpus": 1} if self._device(device).startswith("cuda") else {"num_cpus": self.threads}
        return {**room, "max_retries": 0}

    def _ask(self, function: Any, device: str, *given: Any) -> Any:
        needs = self._needs(device)
        there = self.ray.cluster_resources()
        for resource, amount in (("GPU", needs.get("num_gpus", 0)), ("CPU", needs.get("num_cpus", 0))):
            if amount > there.get(resource, 0):
                raise InputError(
                    f"the Ray cluster has {there.get(resource, 0):g} {resource}s, and a stack needs {amount}"
                )
        try:
            return self.ray.get(self.ray.remote(function).options(**needs).remote(*given))
        except self.ray.exceptions.RayTaskError as failed:
            raise failed.cause from None
        except self.ray.exceptions.RayError as death:
            raise InputError(f"a worker of the Ray cluster died before it could begin: {reason(death)}") from death

    def _without_data(self, unit: Unit) -> tuple[Unit, list[Any]]:
        """The unit as it travels; its datasets travel once for all units."""
        refs = []
        for dataset in unit.source.datasets:
            if id(dataset) not in self.datasets:
                self.datasets[id(dataset)] = dataset, self.ray.put(dataset)
            refs.append(self.datasets[id(dataset)][1])
        checkpoints = unit.checkpoints and replace(unit.checkpoints, run=unit.checkpoints.run.resolve())
        source = replace(unit.source, datasets=())
        return replace(unit, source=source, checkpoints=checkpoints, device=self._device(unit.device)), refs

    def train(self, units: Sequence[Unit], tell: TellOf, stop_asked: Asked) -> None:
        """All units at once, as far as there is room."""
        post = self.ray.remote(Post).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        pending: dict[Any, Unit] = {}
        try:
            _Training(self, post, tell, pending).run(units, stop_asked)
        finally:
            for ref in pending:
                self.ray.cancel(ref, force=True)
            self.ray.kill(post)

    def submit(self, unit: Unit, attempt: int, post: Any) -> Any:
        light, refs = self._without_data(unit)
        task = self.ray.remote(_train).options(**self._needs(unit.device))
        return task.remote(light, attempt, self.threads, post, *refs)


class _Training:
    """Units on their way: who is at work, who died, and what all have told so far."""

    def __init__(self, engine: RayEngine, post: Any, tell: TellOf, pending: dict[Any, Unit]):
        self.engine = engine
        self.post = post
        self.tell = tell
        self.pending = pending
        self.deaths: Counter[int] = Counter()
        self.stopped = False
        self.outcomes: dict[int, Outcomes] = {}  # by unit

    def run(self, units: Sequence[Unit], stop_asked: Asked) -> None:
        ray = self.engine.ray
        for unit in units:
            self._submit(unit)
        while self.pending:
            if stop_asked():  # said again and again: a post that was started anew has forgotten it
                ray.get(self.post.stop.remote())
            done, _ = ray.wait(list(self.pending), timeout=SECONDS_BETWEEN_LOOKS)
            self._deliver()
            for ref in done:
                self._end(ref)
        if self.stopped:
            raise Stopped

    def _submit(self, unit: Unit) -> None:
        self.outcomes[unit.number] = {}
        self.pending[self.engine.submit(unit, self.deaths[unit.number], self.post)] = unit

    def _deliver(self) -> None:
        for letter in self.engine.ray.get(self.post.take.remote()):
            if letter.attempt == self.deaths[letter.number]:  # else of a worker that is dead by now
                whole = with_news(self.outcomes[letter.number], letter)
                self.tell(letter.number, replace(letter.told, outcomes=whole))

    def _end(self, ref: Any) -> None:
        unit = self.pending.pop(ref)
        errors = self.engine.ray.exceptions
        try:
            outcomes = self.engine.ray.get(ref)  # whole, whatever letters may have been lost
            self.tell(unit.number, Told(1.0, unit.configs[0].num_tasks - 1, outcomes))
        except errors.RayTaskError as failed:
            if not isinstance(failed.cause, Stopped):
                raise failed.cause from None
            self.stopped = True  # the others are still to be waited for, until they too have kept where they stand
        except errors.RayError as death:
            self.deaths[unit.number] += 1
            times = self.deaths[unit.number]
            if times > RETRIES:
                told = f"the workers of stack {unit.number + 1} died {times} times"
                how = "what was kept stays, and the run can go on"
                raise InputError(f"{told}, the last of it: {reason(death)}; {how}") from death
            note = f"a worker of stack {unit.number + 1} died: it is tried again ({times} of {RETRIES})"
            self.tell(unit.number, Told(0, 0, {}, note=note))
            self._submit(unit)


def _surroundings(device: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return surroundings(device)


def _limit(unit: Unit, threads: int, *datasets: Dataset) -> int | None:
    torch.set_num_threads(threads)
    return find_limit(replace(unit, source=replace(unit.source, datasets=datasets)))


def _train(unit: Unit, attempt: int, threads: int, post: Any, *datasets: Dataset) -> Outcomes:
    """What a worker does."""
    import ray

    torch.set_num_threads(threads)
    unit = replace(unit, source=replace(unit.source, datasets=datasets))
    news = News()
    last_letter = last_question = 0.0
    stopping = False

    def tell(told: Told) -> None:
        nonlocal last_letter
        moved_only = not (told.learned or told.note or told.done == 1)
        if moved_only and time.monotonic() - last_letter < SECONDS_BETWEEN_LETTERS:
            return
        last_letter = time.monotonic()
        since = news.sent
        outcomes = {} if moved_only else news.of(told.outcomes)
        post.bring.remote(Letter(unit.number, attempt, replace(told, outcomes=outcomes), since))

    def stop_asked() -> bool:
        nonlocal last_question, stopping
        if time.monotonic() - last_question > SECONDS_BETWEEN_QUESTIONS:
            last_question = time.monotonic()
            stopping = ray.get(post.is_stopping.remote())
        return stopping

    if stop_asked():  # before it could begin
        raise Stopped
    with _sole_worker(unit):
        outcomes = train_unit(unit, tell, stop_asked)
    ray.get(post.is_stopping.remote())  # letters arrive in order: when this is answered they are all there
    return outcomes


@contextmanager
def _sole_worker(unit: Unit) -> Iterator[None]:
    """A driver that was killed may have left a worker that does not know it yet, at work on the same checkpoints."""
    if unit.checkpoints is None:
        yield
        return
    folder = unit.checkpoints.folder
    if not folder.is_dir():
        raise InputError(
            f"the worker on {socket.gethostname()} does not see {folder}: "
            "on a cluster, results go into a folder that all machines share"
        )
    with locked(folder / f"stack-{unit.number}.lock", SECONDS_TO_LET_GO):
        yield
