"""The index: a table of all runs below a folder, brought up to date whenever it is opened.

It is one SQLite file in the folder, which is read into memory, worked on there, and put back whole: so two processes
cannot harm it, and where it cannot be written, memory is enough. It is never the truth. What it says of a run counts
only as long as the run's files are as they were; a file that is damaged, or of another version, is made anew.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from engram.common.errors import InputError
from engram.common.files import replacement
from engram.config.settings import SETTINGS
from engram.runs.store.survey import Known, changed_between, signature, survey

NAME = ".engram-index.sqlite"
VERSION = 1  # raised when the same files are to be read into other values
MEASURES = ("position", "label", "state", "problem", "started", "done", "accuracy", "sem", "bwt")
COLUMNS = ("place", "kind", *MEASURES, *SETTINGS)
SCHEMA = (
    "CREATE TABLE run (place BLOB PRIMARY KEY, kind, files, signature)",
    f"CREATE TABLE entry ({', '.join(COLUMNS)})",
    "CREATE INDEX entries_of_run ON entry (place, position)",
)
# A file may be written twice within one tick of a coarse clock. What changed less than this before it was read, or
# while it was, or less than this later by its own account, is read again the next time. Any other time is as good as
# any other, also one to come, as after a clock was put back: it is only ever compared for being the same.
SETTLED_NS = 2_000_000_000
DIGEST = hashlib.sha256().digest_size

Report = Callable[[int, int], None]  # how many of how many runs have been read


class Index:
    """What is known of the runs below a folder, at the moment when it was opened."""

    def __init__(self, folder: str | Path, report: Report = lambda done, total: None):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"there is no folder {self.folder}")
        self.table, known = _load(self.folder / NAME) or (_empty(), {})
        self.closed: list[str] = []  # folders that could not be looked into
        if self._bring_up_to_date(known, report):
            self._keep()
        if self.table.execute("SELECT place FROM run LIMIT 1").fetchone() is None:
            raise InputError(f"there is no run in {self.folder} or below it")

    def places(self) -> dict[str, str]:
        """All runs by their places below the folder, with their kinds."""
        return {os.fsdecode(place): kind for place, kind in self.table.execute("SELECT place, kind FROM run")}

    def _bring_up_to_date(self, known: Mapping[str, Known], report: Report) -> bool:
        """Read what is new or has changed, forget what is gone; whether there was any of it."""
        found = survey(str(self.folder), known)
        self.closed = found.closed
        if not found.unchanged:  # also where the table came with a copy of its runs: nothing that it says is used
            self.table = _empty()
        outdated = known.keys() - set(found.unchanged)
        with self.table:
            self._forget(outdated)
            for done, (place, kind) in enumerate(found.stale.items()):
                report(done, len(found.stale))
                self._read(place, kind)
        return bool(outdated or found.stale)

    def _forget(self, places: Iterable[str]) -> None:
        for table in ("run", "entry"):
            self.table.executemany(f"DELETE FROM {table} WHERE place = ?", [(os.fsencode(place),) for place in places])

    def _read(self, place: str, kind: str) -> None:
        from engram.runs.store.rows import (
            read_rows,  # late: NumPy takes longer than to see that there is nothing to read
        )

        path, begun = self.folder / place, time.time_ns()
        files, rows = read_rows(path, kind)
        signed = signature(str(path), files)
        if changed_between(str(path), files, begun - SETTLED_NS, time.time_ns() + SETTLED_NS):
            signed = ""
        key = os.fsencode(place)
        self.table.execute("INSERT INTO run VALUES (?, ?, ?, ?)", (key, kind, "\n".join(files), signed))
        cells = [(key, kind, *row) for row in rows]
        self.table.executemany(f"INSERT INTO entry VALUES ({', '.join('?' * len(COLUMNS))})", cells)

    def _keep(self) -> None:
        """Put the table back into the folder, if that can be; an empty one, or a run's own folder, is left alone."""
        places, path = self.places(), self.folder / NAME
        with suppress(OSError):
            for left in self.folder.glob(f".{NAME}.*"):  # by a process that was killed in the act
                if time.time() - left.stat().st_mtime > 60:
                    left.unlink()
            if not places:
                path.unlink(missing_ok=True)
            elif "" not in places:
                content = self.table.serialize()
                with replacement(path) as beside:
                    beside.write_bytes(content + hashlib.sha256(content).digest())


def _load(path: Path) -> tuple[sqlite3.Connection, dict[str, Known]] | None:
    """The table as it was kept, and the runs in it; None where there is none that is whole and of this version."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    content = kept[:-DIGEST]  # SQLite leaves what follows its pages alone, and has no checksums of its own
    if hashlib.sha256(content).digest() != kept[-DIGEST:]:
        return None
    table = sqlite3.connect(":memory:")
    try:  # the checksum shows damage, not forgery
        table.execute("PRAGMA trusted_schema = OFF")
        table.deserialize(content)
        made = tuple(sql for (sql,) in table.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))
        (version,) = table.execute("PRAGMA user_version").fetchone()
        if (made, version) != (SCHEMA, VERSION) or table.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            return None
        known = {
            os.fsdecode(place): Known(kind, tuple(files.split("\n")), signed)
            for place, kind, files, signed in table.execute("SELECT * FROM run")
        }
    except (sqlite3.Error, TypeError, AttributeError, ValueError, MemoryError):  # the last for a table of no bytes
        return None
    return table, known


def _empty() -> sqlite3.Connection:
    table = sqlite3.connect(":memory:")
    for statement in (*SCHEMA, f"PRAGMA user_version = {VERSION}"):
        table.execute(statement)
    return table
