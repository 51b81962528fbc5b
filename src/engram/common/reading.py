"""Text and JSON from files of anybody: bounded before they are read, so that none can fill memory or take minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, said

# A matrix of 1,000 tasks has some 8 MB. In memory a number is up to 10 times its text, a list or a word up to 24 times.
MAX_JSON_BYTES = 48 * 2**20
MAX_JSON_PARTS = 1_000_000  # lists, tables and words


def read_text(path: Path, most_bytes: int) -> str:
    """A file's text in UTF-8, unless there is more of it than there can be; who asks says of which file that was."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as reason:  # a ValueError for a path that there cannot be
        raise InputError(said(reason)) from reason
    if len(content) > most_bytes:
        raise InputError(f"it is larger than {most_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as reason:
        raise InputError(f"it is not text in UTF-8 ({said(reason)})") from reason


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_text(path, MAX_JSON_BYTES))
    except InputError as reason:
        raise InputError(f"cannot read {path}: {reason}") from reason


def parse_json(text: str) -> Any:
    """What JSON text says, if it says it once: of a name that a table has twice, nobody knows which was meant."""
    if text.count("[") + text.count("{") + text.count('"') // 2 > MAX_JSON_PARTS:
        raise InputError(f"it has more than {MAX_JSON_PARTS} lists, tables and words")
    try:
        return json.loads(text, object_pairs_hook=_table)
    except (ValueError, RecursionError) as reason:
        raise InputError(said(reason)) from reason


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name stands twice in one table")
    return table
