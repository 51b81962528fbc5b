"""Files are written whole or not at all, locked by one process at a time, and bounded when they are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from builders import refusal
from engram.common import files
from engram.common.errors import InputError
from engram.common.files import (
    is_file_at,
    keep_previous,
    locked,
    parse_json,
    read_json,
    read_text,
    remove_unfinished,
    replacement,
    write_atomically,
    write_or_refuse,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text("old")
    return path


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs a program and has printed its first line."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


# --- writing


@pytest.mark.parametrize("content", ["new", b"new"])
def test_written_file_replaces_the_old_one(path: Path, content: str | bytes) -> None:
    write_atomically(path, content)
    assert path.read_text() == "new"
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_failed_write_leaves_the_old_file_alone(path: Path) -> None:
    def fail() -> None:
        with replacement(path) as new:
            new.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(path: Path) -> None:
    with replacement(path) as new:
        new.write_text("half")
        assert path.read_text() == "old"
    assert path.read_text() == "half"


def test_folder_is_not_replaced_by_a_file(path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(path.parent, "new")


def test_path_that_cannot_be_written_is_refused_by_name(path: Path) -> None:
    for wrong in (path.parent, path / "below", path.parent / "missing" / "file"):
        assert refusal(write_or_refuse, wrong, b"new").startswith(f"{wrong} cannot be written: ")


def test_killed_process_leaves_a_half_that_can_be_removed(path: Path) -> None:
    process = started(
        """
        import sys, time
        from pathlib import Path
        from engram.common.files import replacement
        with replacement(Path(sys.argv[1])) as new:
            new.write_text("half")
            print("ready", flush=True)
            time.sleep(60)
        """,
        path,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 2
    remove_unfinished(path.parent, "another.json")
    assert len(list(path.parent.iterdir())) == 2
    remove_unfinished(path.parent, path.name)
    assert list(path.parent.iterdir()) == [path]


def test_other_files_are_not_taken_for_unfinished_ones(tmp_path: Path) -> None:
    names = {".hidden", ".a.json", "a.json.12345678", ".folder.x", ".a.json.123456789"}
    for name in names:
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize("has_links", [True, False])
def test_previous_file_stays_when_the_first_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    previous = path.with_name("previous.json")
    keep_previous(path, previous)
    write_atomically(path, "new")
    assert (path.read_text(), previous.read_text()) == ("new", "old")
    keep_previous(path, previous)
    assert previous.read_text() == "new"


def test_missing_file_has_no_previous_one(tmp_path: Path) -> None:
    keep_previous(tmp_path / "missing", tmp_path / "previous")
    assert list(tmp_path.iterdir()) == []


# --- locking

LOCK = """
    import sys, time
    from pathlib import Path
    from engram.common.files import locked
    with locked(Path(sys.argv[1])):
        print("ready", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def test_locked_file_is_refused_to_another_process_until_that_one_is_killed(path: Path) -> None:
    process = started(LOCK, path, 60)
    try:
        with pytest.raises(InputError, match=f"^another process is using the run in {path.parent}$"), locked(path):
            pass
    finally:
        process.kill()
        process.wait()
    with locked(path) as file:
        file.write(" and more")
    assert path.read_text() == "old and more"


def test_lock_is_awaited_until_the_other_process_ends(path: Path) -> None:
    process = started(LOCK, path, 0.5)
    with locked(path, timeout_s=60):
        assert process.wait(timeout=60) == 0


def test_file_is_created_to_be_locked(tmp_path: Path) -> None:
    with locked(tmp_path / "log.txt"):
        assert (tmp_path / "log.txt").exists()


def test_file_system_without_locks_is_used_without_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with locked(path), locked(path):
        pass


def test_open_file_knows_whether_it_is_still_at_its_path(path: Path) -> None:
    with path.open() as file:
        assert is_file_at(file, path)
        write_atomically(path, "new")
        assert not is_file_at(file, path)
        path.unlink()
        assert not is_file_at(file, path)


# --- reading


def test_text_is_read_up_to_a_limit(path: Path) -> None:
    assert read_text(path, 3) == "old"
    assert refusal(read_text, path, 2) == "it is larger than 2 bytes"


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    assert refusal(read_text, tmp_path / "latin", 100) == "it is not text in UTF-8"
    assert "directory" in refusal(read_text, tmp_path, 100)
    assert "null" in refusal(read_text, Path("a\0b"), 100)


def test_json_is_read(path: Path) -> None:
    path.write_text('{"a": [1, null, {"b": "c"}]}')
    assert read_json(path) == {"a": [1, None, {"b": "c"}]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "same name twice"),
        ("[" * 100_000 + "]" * 100_000, "recursion"),
        ("{", "it is not valid JSON"),
        ("9" * 5000, "digits"),
    ],
)
def test_bad_json_is_refused_by_the_name_of_its_file(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    sentence = refusal(read_json, path)
    assert sentence.startswith(f"{path} is damaged (")
    assert words in sentence


def test_items_of_json_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_ITEMS", 3)
    assert parse_json('[{"a": 1}]') == [{"a": 1}]
    assert refusal(parse_json, '[{"a": "b"}]') == "it has more than 3 lists, objects and strings"
