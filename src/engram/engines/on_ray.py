"""The stacks of an experiment on a Ray cluster: as many at once as it has room for, each a task of its own.

A worker tells the driver how far it has come by way of a small actor, the post. Checkpoints lie in the run's folder,
which all machines must see. A worker that dies is replaced by another, which goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from engram.data.samples import Dataset
from engram.engines.in_process import TellOf, surroundings
from engram.errors import InputError, said
from engram.holding import held
from engram.unit import Asked, Told, Unit, find_limit, train_unit

RETRIES = 3  # of a unit whose worker died
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LETTERS = 0.5  # of a worker that only moved
SECONDS_TO_LET_GO = 60.0  # that the worker of a driver that was killed has before another takes its place


def _import_ray() -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what is run here
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray
    except ImportError as reason:
        raise InputError("Ray is not installed: pip install engram[ray]") from reason
    return ray


@contextmanager
def start_ray(address: str | None) -> Iterator[RayEngine]:
    """An engine on the cluster at an address; without one on $RAY_ADDRESS, or on a cluster of this machine's own."""
    ray = _import_ray()
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    try:
        ray.init(where, log_to_driver=False, logging_level="error", **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as reason:
        raise InputError(f"there is no Ray cluster to be reached at {where}: {said(reason)}") from reason
    try:
        yield RayEngine(ray)
    finally:
        ray.shutdown()


class _Post:
    """Where workers leave word for the driver, and learn whether they are to stop."""

    def __init__(self) -> None:
        self.letters: list[tuple[int, Told]] = []
        self.stopping = False

    def bring(self, number: int, told: Told) -> None:
        self.letters.append((number, told))

    def take(self) -> list[tuple[int, Told]]:
        letters, self.letters = self.letters, []
        return letters

    def stop(self) -> None:
        self.stopping = True

    def is_stopping(self) -> bool:
        return self.stopping


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
        """ "auto" is the cluster's GPUs where it has any, not this machine's."""
        if device != "auto":
            return device
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

    def _without_data(self, unit: Unit) -> tuple[Unit, list[Any]]:
        """The unit as it travels; its datasets travel once for all units."""
        refs = []
        for dataset in unit.source.datasets:
            if id(dataset) not in self.datasets:
                self.datasets[id(dataset)] = dataset, self.ray.put(dataset)
            refs.append(self.datasets[id(dataset)][1])
        checkpoints = unit.checkpoints and replace(unit.checkpoints, run=unit.checkpoints.run.resolve())
        return replace(unit, source=replace(unit.source, datasets=()), checkpoints=checkpoints), refs

    def train(self, units: Sequence[Unit], tell: TellOf, stop_asked: Asked) -> None:
        """All units at once, as far as there is room."""
        ray = self.ray
        post = ray.remote(_Post).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        by_number = {unit.number: unit for unit in units}
        deaths: Counter[int] = Counter()

        def submit(unit: Unit) -> Any:
            light, refs = self._without_data(unit)
            return ray.remote(_train).options(**self._needs(unit.device)).remote(light, self.threads, post, *refs)

        def deliver() -> None:
            for number, told in ray.get(post.take.remote()):
                tell(number, told)

        pending = {submit(unit): unit.number for unit in units}
        stopping = False
        try:
            while pending:
                if stop_asked() and not stopping:
                    stopping = True
                    ray.get(post.stop.remote())
                done, _ = ray.wait(list(pending), timeout=SECONDS_BETWEEN_LOOKS)
                deliver()
                for ref in done:
                    number = pending.pop(ref)
                    try:
                        ray.get(ref)
                    except ray.exceptions.RayTaskError as failed:
                        raise failed.cause from None
                    except ray.exceptions.RayError as death:
                        deaths[number] += 1
                        if deaths[number] > RETRIES:
                            told = f"the workers of stack {number + 1} died {deaths[number]} times"
                            raise InputError(f"{told}, the last of it: {said(death)}") from death
                        tell(number, Told(0, 0, {}, note=f"a worker of stack {number + 1} died: it is tried again"))
                        pending[submit(by_number[number])] = number
            deliver()
        finally:
            for ref in pending:
                ray.cancel(ref, force=True)
            ray.kill(post)


def _surroundings(device: str, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return surroundings(device)


def _limit(unit: Unit, threads: int, *datasets: Dataset) -> int | None:
    torch.set_num_threads(threads)
    return find_limit(replace(unit, source=replace(unit.source, datasets=datasets)))


def _train(unit: Unit, threads: int, post: Any, *datasets: Dataset) -> None:
    """What a worker does."""
    import ray

    torch.set_num_threads(threads)
    unit = replace(unit, source=replace(unit.source, datasets=datasets))
    last = 0.0

    def tell(told: Told) -> None:
        nonlocal last
        moved_only = not (told.learned or told.note or told.done == 1)
        if moved_only and time.monotonic() - last < SECONDS_BETWEEN_LETTERS:
            return
        last = time.monotonic()
        post.bring.remote(unit.number, replace(told, outcomes={}) if moved_only else told)

    def stop_asked() -> bool:
        return bool(ray.get(post.is_stopping.remote()))

    with _sole_worker(unit):
        train_unit(unit, tell, stop_asked)
    stop_asked()  # letters arrive in order: when this is answered they are all there


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
    with held(folder / f"stack-{unit.number}.lock", SECONDS_TO_LET_GO):
        yield
