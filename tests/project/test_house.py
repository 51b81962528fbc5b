"""The shape of the package: thirteen rooms, imports in one direction, few and small modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import engram

ROOT = Path(engram.__file__).parent
# A room may import itself and the rooms of the lines above its own.
ORDER = [
    {"common"},
    {"config", "nn", "data"},
    {"penalties"},
    {"rehearsal"},
    {"engine"},
    {"runs", "sklearn", "integrations"},
    {"report"},
    {"reproduction"},
    {"cli"},
]
FIRST_HEAD = """
import sys
import torch
before = set(sys.modules)
import engram
engram.DHPSoftmax(10, 5)
print(*set(sys.modules) - before)
"""
# Methods that people expect of a class, made by a room above it. Such a room is loaded by name when one is called.
BY_NAME = {"runs.result": {"report"}}
# Imports inside functions that close a circle. People look for `save` and `load` at a result, and the modules that know
# folders are made of results.
LATE = {("runs.result", "runs.folder"), ("runs.result", "runs.run")}
MOST_LINES = 300
MOST_MODULES = 170  # without the `__init__.py` of packages


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, without the package's own."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def imported(path: Path, typing: bool = True) -> set[str]:
    """The names that a module imports from the package, at its top or inside a function; for typing only if asked."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return {name.removeprefix("engram.") for name in names if name.startswith("engram.")}


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports, at its top or inside a function."""
    return {name.split(".")[0] for name in imported(path)} & set().union(*ORDER)


def test_imports_go_in_one_direction() -> None:
    level = {room: place for place, rooms in enumerate(ORDER) for room in rooms}
    for name, path in modules().items():
        room = name.split(".")[0]
        if room not in level:
            continue
        for other in imported_rooms(path) - {room}:
            assert level[other] < level[room], f"{name} must not import {other}"


def test_modules_import_each_other_in_no_circle() -> None:
    paths = modules()
    graph = {
        name: {other if other in paths else other.rpartition(".")[0] for other in imported(path, typing=False)}
        for name, path in paths.items()
    }
    assert all(other in graph[name] for name, other in LATE), "a circle that is no longer there"
    for name, other in LATE:
        graph[name].remove(other)
    TopologicalSorter(graph).prepare()  # else a CycleError that names the modules


def named_rooms(path: Path) -> set[str]:
    """The rooms that a module loads by name, with `import_module`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "import_module"]
    names = {argument.value for argument in given if isinstance(argument, ast.Constant)}
    return {name.split(".")[1] for name in names if name.startswith("engram.")}


def test_only_the_methods_of_a_result_load_a_room_by_name() -> None:
    assert {name: rooms for name, path in modules().items() if (rooms := named_rooms(path))} == BY_NAME


def test_a_first_head_imports_two_rooms_and_no_more_of_pytorch_than_import_torch_does() -> None:
    """So it takes a few milliseconds. PyTorch's compiler alone, which a decorator can import, takes a second."""
    done = subprocess.run([sys.executable, "-c", FIRST_HEAD], check=True, capture_output=True, text=True)
    found = done.stdout.split()
    assert "engram.nn.dhp" in found
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names == {"engram"}
    assert {name.split(".")[1] for name in found if name.startswith("engram.")} == {"common", "nn"}


def test_the_package_holds_its_rooms_and_nothing_else() -> None:
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert entries == {"__init__.py", "__main__.py", "py.typed", *set().union(*ORDER)}


def test_modules_fit_in_a_sitting() -> None:
    for name, path in modules().items():
        if not name.startswith("engine.gpu.kernels."):
            assert len(path.read_text().splitlines()) <= MOST_LINES, name


def test_modules_are_few() -> None:
    assert len([path for path in modules().values() if path.name != "__init__.py"]) <= MOST_MODULES


def test_every_module_has_a_docstring() -> None:
    for path in ROOT.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
