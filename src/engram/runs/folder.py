"""The folder of a run while a process works on it: claimed, locked, logged to, and written so that nothing is lost."""

from __future__ import annotations

import errno
import itertools
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from engram import __version__
from engram.common.errors import InputError, reason
from engram.common.files import is_file_at, locked, read_json, read_text, write_atomically
from engram.config.settings import Config
from engram.runs.format import (
    FORMAT,
    RESULTS,
    RUN,
    check_format,
    check_written_size,
    write_description,
    write_results,
)
from engram.runs.result import Result

LOG = "log.txt"
MAX_LOG_BYTES = 2**24  # a longer log is not searched for earlier lines
SECONDS_TO_RETRY = 1.0  # after results could not be written
FRACTION_OF_TIME = 0.1  # the part of a run's time that writing results may take: those of a thousand tasks are large
SECONDS_BETWEEN_TIMES = 10.0  # in which a kill loses what it adds to `seconds`


def default_folder(benchmark: str) -> Path:
    """A folder below `runs` that does not exist yet, even after the clock was set back."""
    name = f"{benchmark}-{datetime.now():%Y%m%d-%H%M%S}"
    free = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
    return next(folder for folder in free if not folder.exists())


@dataclass
class RunFolder:
    """A run's folder, whose log is locked by this process."""

    path: Path
    file: IO[str]  # the log
    configs: Mapping[str, Config] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # what `run.json` says besides the configs
    dynamics: bool = True  # whether to write them
    next_write: float = 0.0
    behind: bool = False  # whether there are results that have not been written

    def __post_init__(self) -> None:
        self.opened = self.timed = time.monotonic()
        self.seconds_before = float(self.about.get("seconds", 0))

    def log(self, line: str) -> None:
        """Add a line with the time to the log. A run does not end because its log cannot be written."""
        with suppress(OSError):
            self.file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")
            self.file.flush()

    def describe(self, **changes: Any) -> None:
        """Write `run.json` with the seconds so far, over all times that the run was resumed, and with changes."""
        self.timed = time.monotonic()
        self.about |= {"seconds": round(self.seconds_before + self.timed - self.opened, 1), **changes}
        write_description(self.path, self.configs, self.about)

    def save(self, results: Callable[[], Mapping[str, Result]], new: bool = True) -> str | None:
        """Write results while the run continues, if there are new ones and it is time to.

        Args:
            results: makes the results; called only if they are written.
            new: whether there are new ones since the last call.

        Returns:
            A sentence if they could not be written; a later call tries again.
        """
        self.behind = self.behind or new
        started = time.monotonic()
        if started - self.timed > SECONDS_BETWEEN_TIMES:
            with suppress(OSError):  # a full disk does not end a run
                self.check()
                self.describe()
        if not self.behind or started < self.next_write:
            return None
        problem = None
        try:
            self._write(results())
            self.behind = False
        except OSError as error:
            problem = f"the results so far cannot be written to {self.path}: {reason(error)}; the run continues"
        took = time.monotonic() - started
        self.next_write = started + max(took / FRACTION_OF_TIME, 0.0 if problem is None else SECONDS_TO_RETRY)
        return problem

    def stop(self, results: Callable[[], Mapping[str, Result]]) -> None:
        """Write what there is, as far as possible: the run was stopped, or failed."""
        with suppress(OSError):
            self.check()
            self.describe()
            if self.behind:
                self._write(results())

    def finish(self, results: Mapping[str, Result]) -> None:
        """Write everything that a finished run leaves; in another folder if it cannot be written to this one."""
        try:
            self._write(results)
            self.describe(finished=now())
        except OSError as error:
            problem = f"the results cannot be written to {self.path}: {reason(error)}"
            rescued = self._rescue(results)
            if rescued is None:
                how = f"`engram run --resume {self.path}` resumes at the last checkpoint"
                raise InputError(f"{problem}, nor anywhere else, so they are lost; {how}") from error
            raise InputError(f"{problem}; they are in {rescued}, and `engram table {rescued}` shows them") from error

    def discard(self) -> None:
        """Remove the folder of a new run that has nothing to keep."""
        with suppress(OSError):
            self.check()
            shutil.rmtree(self.path)

    def check(self) -> None:
        """Refuse to write into a folder that was removed or replaced: what is there now belongs to others."""
        if not is_file_at(self.file, self.path / LOG):
            raise FileNotFoundError(errno.ENOENT, "the folder was removed", str(self.path))

    def _write(self, results: Mapping[str, Result]) -> None:
        self.check()
        write_results(self.path, results, self.dynamics)

    def _rescue(self, results: Mapping[str, Result]) -> Path | None:
        """Write to a folder for temporary files, or at home; None if that fails too."""
        for parent in (Path(tempfile.gettempdir()), Path.home()):
            try:
                folder = Path(tempfile.mkdtemp(prefix=f"engram-{self.path.name}-", dir=parent))
            except OSError:
                continue
            try:
                write_results(folder, results, self.dynamics)
                write_description(folder, self.configs, {**self.about, "finished": now()})
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            return folder
        return None


def logged_lines(folder: Path) -> set[str]:
    """The lines in the log of a run, without their times; none if it cannot be read."""
    try:
        text = read_text(folder / LOG, MAX_LOG_BYTES)
    except InputError:
        return set()
    return {line.partition("  ")[2] for line in text.splitlines()}


def save_result(result: Result, path: Path) -> None:
    """Write one result as a finished run, whose label is the method."""
    label = result.config.method
    check_written_size({label: result})
    folder = claim_folder(path)
    about = {"command": "", "finished": now(), "versions": versions(), "data": result.data}
    write_results(folder, {label: result})
    write_description(folder, {label: result.config}, about)


@contextmanager
def claimed(path: str | Path) -> Iterator[IO[str]]:
    """A new folder, an empty one, or one whose run was killed before it started; with its locked log."""
    path = Path(path)
    if not _never_started(path):
        claim_folder(path)
    with locked(path / LOG) as file:  # so that one process works on it
        if not _never_started(path):
            raise InputError(_taken(path))
        yield file


def claim_folder(path: str | Path) -> Path:
    """Make a folder for a run, or take an empty one, and create its `run.json`: of two claims one is refused."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = next(folder.iterdir(), None)
        if there is None:
            (folder / RUN).open("x").close()
            return folder
    except FileExistsError:  # a file in place of the folder, or another claim a moment ago
        there = folder / RUN if folder.is_dir() else None
        if there is None:
            raise InputError(f"cannot write to {folder}: it is not a folder") from None
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    if (folder / RUN).exists():
        raise InputError(_taken(folder))
    raise InputError(
        f"{folder} is not empty (it holds {there.name}), and results are never overwritten: name another folder"
    )


def check_unclaimed(folder: Path) -> None:
    """Refuse the folder of one run of several that has lost its `run.json`, and say what to do."""
    there = next(folder.iterdir(), None) if folder.is_dir() else None
    if there is not None and not _never_started(folder):
        raise InputError(f"{folder} holds {there.name} but no {RUN} that can be read: remove {folder} to run it again")


def _taken(folder: Path) -> str:
    return f"{folder} already holds a run, and results are never overwritten: name another folder"


def _never_started(path: Path) -> bool:
    """Whether the folder was claimed for a run that then trained nothing."""
    first = path / RUN
    return first.is_file() and first.stat().st_size == 0 and not (path / RESULTS).exists()


def claim_group(path: Path, identity: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """Write the file that makes a folder of runs a sweep or a reproduction; refuse a folder that is something else.

    Args:
        path: the file, `sweep.json` or `reproduction.json`.
        identity: what must be the same when it is resumed.
        about: `command`, `arguments` and `environment`. The environment of the start is kept.

    Returns:
        A warning if the environment has changed since the start.
    """
    identity = json.loads(json.dumps(identity))
    content = {"format": FORMAT, "started": now(), **about, **identity}
    warning = None
    if path.exists():
        there = read_json(path)
        check_format(there, path)
        if lacking := [name for name in identity if name not in there]:
            raise InputError(f"{path} is damaged: it has no {lacking[0]!r}")
        changed = [name for name, value in identity.items() if there[name] != value]
        if changed:
            kinds = {"sweep": "of other methods or settings", "reproduction": "of the other kind, quick or in full"}
            what = "of other data" if changed == ["fingerprints"] else kinds.get(path.stem, "of other settings")
            raise InputError(f"{path.parent} holds a {path.stem} {what}: name another folder with --out")
        warning = changes_since(there.get("environment"), about["environment"])
        content |= {name: there[name] for name in ("started", "finished", "environment") if name in there}
    else:
        other = next((entry for entry in path.parent.iterdir() if entry.name != LOG), None)
        if other is not None:
            raise InputError(f"{path.parent} is not empty (it holds {other.name}): name another folder with --out")
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return warning


def changes_since(then: Any, here: Mapping[str, Any]) -> str | None:
    """A warning if versions, device or threads are not those that a run started with."""
    if not isinstance(then, Mapping):
        return None
    changed = [f"{name} {then.get(name)} is now {value}" for name, value in here.items() if then.get(name) != value]
    if not changed:
        return None
    return f"the results may differ in last digits from those of an uninterrupted run: {'; '.join(changed)}"


def now() -> str:
    """The time of day, for people to read. No duration is computed from it, since a clock may be changed."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of everything that the numbers may depend on."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "engram": __version__,
        # As a package itself says, which may name its build too; asking does not import it.
        **{
            name: str(sys.modules[name].__version__) if name in sys.modules else metadata.version(name)
            for name in ("torch", "numpy", "scipy")
        },
    }
