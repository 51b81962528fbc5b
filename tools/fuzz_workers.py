"""Feeding damaged files to a parser in a process of its own, under limits of time and memory."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuzz_mutations import mutate

from engram.common.errors import InputError

if TYPE_CHECKING:
    from fuzz_targets import Target

SECONDS = 5.0  # of computing; a reading that takes longer hangs
PATIENCE = 12  # times as long by the clock: a computer may be busy with others
MEMORY = 2**30  # more than a reading may take
LONGEST = 1000  # characters of a sentence
READY = -1


@dataclass(frozen=True)
class Fault:
    """A damaged file that was neither refused in one sentence nor read right."""

    target: str
    index: int
    file: str
    reason: str


@dataclass
class Tally:
    """What became of the files of one target."""

    refused: int = 0
    read: int = 0
    slowest: float = 0.0


def damaged(target: str, made: Target, seed: int, index: int) -> tuple[str, bytes]:
    """The damaged file of an index: of the same sound file the same for the same seed, in any order."""
    rng = random.Random(f"{seed}/{target}/{index}")
    name = rng.choice(made.damaged or sorted(made.files))
    return name, mutate(name, made.files[name], rng)


def place_files(folder: Path, made: Target, name: str, content: bytes) -> None:
    """The folder with its sound files and the damaged one, and nothing else."""
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for file, sound in {**made.files, name: content}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(sound)


def try_file(made: Target, folder: Path, name: str) -> tuple[bool, str]:
    """Whether the file was read, and what is wrong with how it was read or refused."""
    try:
        made.read(folder, name)
        return True, ""
    except InputError as refusal:
        return False, _not_one_sentence(str(refusal).replace(str(folder), "FOLDER"))
    except Exception:
        return False, traceback.format_exc()


def _not_one_sentence(message: str) -> str:
    if not message or len(message) > LONGEST or not message.isprintable() or re.search(r"\w\. [A-Z]", message):
        return f"the refusal is not one sentence: {message[:LONGEST]!r}, {len(message)} characters"
    return ""


def _work(target: str, make: Callable[[], Target], seed: int, indices: list[int], pipe: Connection, state: Any) -> None:
    """In the process: file after file, telling of each fault at once and of the rest in portions."""
    now, since, begun = state
    made = make()
    limit_memory()
    tally = Tally()
    scratch = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for count, index in enumerate(indices, start=1):
            name, content = damaged(target, made, seed, index)
            place_files(Path(folder), made, name, content)
            begun.value, since.value = time.process_time(), time.monotonic()
            now.value = index
            was_read, wrong = try_file(made, Path(folder), name)
            tally.slowest = max(tally.slowest, time.process_time() - begun.value)
            now.value = READY
            if wrong:
                pipe.send(Fault(target, index, name, wrong))
            elif was_read:
                tally.read += 1
            else:
                tally.refused += 1
            if count % 100 == 0 or count == len(indices):
                pipe.send((count, tally))
    pipe.close()


def limit_memory() -> None:
    """An allocation that would take the process more than `MEMORY` beyond what it has now fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _computed(pid: int | None) -> float:
    """Seconds for which a process has computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def feed(
    target: str, make: Callable[[], Target], seed: int, indices: list[int], seconds: float = SECONDS
) -> Iterator[Fault | Tally | int]:
    """Feed the files of these indices: yields faults, how many more are done, and what became of them in the end.

    A process that hangs is ended, one that died is mourned, and another goes on behind the file at which it stood.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    context = multiprocessing.get_context("spawn")
    whole = Tally()
    while indices:
        ours, theirs = context.Pipe(duplex=False)
        state = now, since, begun = context.Value("q", READY), context.Value("d", 0.0), context.Value("d", 0.0)
        process = context.Process(target=_work, args=(target, make, seed, indices, theirs, state), daemon=True)
        process.start()
        theirs.close()
        told, tally, hung = 0, Tally(), False
        while True:
            try:
                if ours.poll(0.2):
                    message = ours.recv()
                    if isinstance(message, Fault):
                        yield message
                    else:
                        count, tally = message
                        yield count - told
                        told = count
                    continue
            except EOFError:
                break
            by_clock = time.monotonic() - since.value
            if now.value != READY and (_computed(process.pid) - begun.value > seconds or by_clock > PATIENCE * seconds):
                hung = True
                process.kill()
                break
        process.join()
        whole.read, whole.refused = whole.read + tally.read, whole.refused + tally.refused
        whole.slowest = max(whole.slowest, tally.slowest)
        if not hung and process.exitcode == 0:
            break
        if now.value == READY:
            raise RuntimeError(f"the process of {target} ended with {process.exitcode} outside of any file")
        done = indices.index(now.value) + 1
        reason = f"it took more than {seconds:g} s" if hung else f"the process ended with {process.exitcode}"
        yield Fault(target, now.value, "", reason)
        yield done - told
        indices = indices[done:]
    yield whole
