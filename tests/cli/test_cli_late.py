"""A command imports what it needs and no more; and what is imported late is there all the same."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_store import config_of, make_run, result_of

import engram

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "matplotlib", "pandas", "scipy.stats", "pooch", "pyarrow"}
LOADED = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
from engram.cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two methods that can be paired, so that the table of them has intervals."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", result_of(config_of("si")), result_of(config_of("dhp+si"), 0.8))
    return folder


def loaded(*arguments: str | Path) -> set[str]:
    """The modules that a process has at its end."""
    words = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", ["--version", "runs list {runs}", "runs show {run}", "table {run}", "runs --help"])
def test_a_command_that_only_looks_imports_nothing_heavy(words: str, runs: Path) -> None:
    found = loaded(*words.format(runs=runs, run=runs / "one").split())
    assert "engram.cli.main" in found
    assert found & HEAVY == set()


def test_a_list_of_runs_that_are_known_does_without_numpy(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram.runs.store import index

    assert "scipy" not in loaded("runs", "list", runs), "to read a run takes NumPy alone"
    monkeypatch.setattr(index, "SETTLED_NS", 0)
    index.Index(runs)
    found = loaded("runs", "list", runs)
    assert "engram.runs.store.index" in found
    assert found & {"numpy", "scipy", "rich.live", "rich.progress"} == set()


@pytest.mark.slow
def test_the_help_names_every_command_with_its_first_sentence() -> None:
    done = subprocess.run([sys.executable, "-m", "engram", "--help"], capture_output=True, encoding="utf-8", check=True)
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 3}
    for name, words in {"run": "Run methods", "table": "Print a run", "data": "Find", "runs": "List"}.items():
        assert words in lines[name]


def test_a_command_with_a_mistake_is_told_its_name() -> None:
    done = subprocess.run([sys.executable, "-m", "engram", "rums"], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("engram: No such command 'rums'")
    assert "torch" not in done.stderr


# --- the package's own names


def test_importing_engram_is_no_more_than_a_promise() -> None:
    code = (
        "import sys, engram; print(sorted(n for n in sys.modules if n.split('.')[0] in ('torch', 'numpy', 'engram')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert ast.literal_eval(done.stdout) == ["engram"]


def test_every_public_name_is_there_and_no_other() -> None:
    tree = ast.parse((ROOT / "src" / "engram" / "public.py").read_text(encoding="utf-8"))
    given = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*given, "__version__"} == set(engram.__all__)
    assert all(getattr(engram, name) is not None for name in engram.__all__)
    assert set(engram.__all__) <= set(dir(engram))


@pytest.mark.slow
def test_a_module_is_an_attribute_and_what_is_not_there_is_said() -> None:
    code = "import engram; print(engram.metrics.__name__, hasattr(engram, 'nothing'), engram.penalties.SI.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["engram.runs.metrics", "False", "SI"]
    with pytest.raises(AttributeError, match="module 'engram' has no attribute 'nothing'"):
        engram.nothing  # noqa: B018
