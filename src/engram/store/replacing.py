"""Writing a file that may be large, or need not outlive a power cut, so that it is never half a one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside this one, to be written to; it takes its place if all goes well and is gone if not."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.open("xb").close()
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
