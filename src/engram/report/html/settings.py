"""With what the numbers were made: settings, versions, data, times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from engram.config.presets import changes_from_preset
from engram.report.layout import Table
from engram.runs.result import Result

NOT_SETTINGS = ("benchmark", "method")


def settings_table(results: Sequence[Result], title: str = "Settings") -> Table:
    """Every setting, with the preset's value where it was changed; a value that not all share names its methods."""
    rows = []
    for name in results[0].config.to_dict():
        if name in NOT_SETTINGS:
            continue
        here = _gather((r.config.method, r.config.to_dict()[name]) for r in results)
        usual = _gather(
            (r.config.method, changes_from_preset(r.config)[name][1])
            for r in results
            if name in changes_from_preset(r.config)
        )
        rows.append((name, here, usual))
    if not any(usual for _, _, usual in rows):
        return Table(title, ("setting", "value"), [row[:2] for row in rows])
    return Table(title, ("setting", "value", "the preset's, where changed"), rows)


def changes_table(results: Sequence[Result], title: str = "Settings that are not the preset's") -> Table | None:
    """Of the settings those that were changed, and the preset's; None if there are none."""
    rows = [row for row in settings_table(results).rows if len(row) == 3 and row[2]]
    return Table(title, ("setting", "value", "the preset's"), rows) if rows else None


def versions_table(about: Mapping[str, Any], title: str = "Versions") -> Table | None:
    """What the numbers may depend on besides settings; None where it was not kept."""
    rows = []
    for part in ("versions", "surroundings"):
        content = about.get(part)
        rows += [(str(name), str(value)) for name, value in content.items()] if isinstance(content, dict) else []
    rows += [
        (name, str(about[name])) for name in ("device", "gpu", "threads", "precision") if about.get(name) is not None
    ]
    return Table(title, ("what", "version"), rows) if rows else None


def data_table(results: Sequence[Result], title: str = "Data") -> Table | None:
    """Which files the tasks were made of, and whether they are the published ones."""
    words = {"published": "the published files", "structure": "other files of the published form"}
    rows = [
        (
            str(record["name"]),
            words.get(record["origin"], str(record["origin"])),
            f"{record['train']} + {record['test']}",
        )
        for record in results[0].data
    ]
    return Table(title, ("dataset", "files", "training + test samples"), rows) if rows else None


def time_taken(about: Mapping[str, Any]) -> str:
    """From start to finish, in words; empty where it was not kept, or the clock on the wall was set back."""
    try:
        taken = datetime.fromisoformat(about["finished"]) - datetime.fromisoformat(about["started"])
    except (KeyError, TypeError, ValueError):
        return ""
    return in_words(taken.total_seconds()) if taken.total_seconds() >= 0 else ""


def in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _gather(values: Iterable[tuple[str, Any]]) -> str:
    """One value if all methods have it, else each with its methods."""
    by_value: dict[str, list[str]] = {}
    for method, value in values:
        by_value.setdefault("none" if value is None else str(value), []).append(method)
    if len(by_value) <= 1:
        return "".join(by_value)
    return "; ".join(f"{value} ({', '.join(dict.fromkeys(methods))})" for value, methods in by_value.items())
