"""The shape of the house: imports go one way, and what looks at results needs no PyTorch."""

from __future__ import annotations

import ast
from pathlib import Path

import engram

ROOT = Path(engram.__file__).parent
# Each may import only from floors below its own.
FLOORS = [
    {
        *("errors", "seeding", "masking", "metrics", "version", "freezing", "mapping", "targets", "reading"),
        *("replacing", "holding", "interruption", "ranks", "wrapping"),
    },
    {"config", "presets", "data", "nn", "penalties", "layout", "cli_late"},
    {"evaluate", "learner", "results", "integrations"},
    {"build", "stack", "comparisons", "sheets", "tensorfile"},
    {"train", "shares", "tables", "verdicts", "modelfile", "export", "sklearn"},
    {"checkpoint", "figures", "claims", "store"},
    {"unit", "overview", "runfolder"},
    {"engines"},
    {"experiment"},
    {"news", "logs"},
    {"runs", "display", "cli_data", "bench", "report", "parts", "public"},
    {"cli_run", "cli_bench", "cli_results", "cli_runs_list", "reproduction", "sweep"},
    {"cli_reproduce", "cli_sweep", "cli_runs_show", "cli_runs_export", "cli_runs"},
    {"cli"},
]
SAME_FLOOR = {
    ("presets", "config"),
    ("targets", "errors"),
    ("reading", "errors"),
    ("holding", "errors"),
    ("interruption", "errors"),
    ("ranks", "errors"),
    ("ranks", "wrapping"),
}


def imports() -> dict[str, set[str]]:
    """For each module, by its place in the package, the top-level modules it imports: of Engram without a prefix."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        place = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "engram":
                names |= {f"engram.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        found[place] = names
    return found


def floor_of(room: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def test_imports_go_one_way() -> None:
    for place, names in imports().items():
        room = place.split(".")[0]
        if room in ("__init__", "__main__", "py"):
            continue
        for name in names:
            if not name.startswith("engram.") or name == "engram.__version__":
                continue
            other = name.split(".")[1]
            allowed = other == room or floor_of(other) < floor_of(room) or (room, other) in SAME_FLOOR
            assert allowed, f"{place} must not import {name}"


def test_data_nn_and_penalties_do_not_know_each_other() -> None:
    for place, names in imports().items():
        room = place.split(".")[0]
        if room in ("data", "nn", "penalties"):
            others = {"data", "nn", "penalties", "config"} - {room}
            assert not {name for name in names if name.split(".")[:1] == ["engram"] and name.split(".")[1] in others}


def test_what_looks_at_results_needs_no_torch() -> None:
    rooms = {"metrics", "config", "presets", "results", "sheets", "comparisons", "tables", "figures", "report", "store"}
    for place, names in imports().items():
        if place.split(".")[0] in rooms:
            assert not {name for name in names if name.split(".")[0] == "torch"}, place


def test_every_module_says_what_it_is_in_one_sentence() -> None:
    for path in ROOT.rglob("*.py"):
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text, f"{path} has no docstring"
