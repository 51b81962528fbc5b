"""Settings and measures as SQLite has them, and as CSV has them."""

from __future__ import annotations

import json
import math
from typing import Any


def as_cell(value: Any) -> int | float | str | None:
    """A value as SQLite has it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair can be in a damaged file
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(value) if abs(value) < 1e308 else math.copysign(math.inf, value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def from_cell(value: Any, kind: type) -> Any:
    """A setting as `Config` has it, from what SQLite made of it."""
    if value is None:
        return None
    if kind is bool:
        return bool(value)
    return json.loads(value) if kind is tuple else value


def in_csv(value: Any) -> Any:
    """Numbers to their last digit, nothing for none, and JSON's words for the rest."""
    return json.dumps(value) if isinstance(value, bool | list) else value
