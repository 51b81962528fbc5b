"""docs/security.md: its promises name tests that exist, its limits are the real ones, and nothing is unpickled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from engram.common import files
from engram.config import presets, rules
from engram.data import download, formats
from engram.engine import build
from engram.runs import format as run_format

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_promise_names_an_existing_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert named - set(re.findall(r"^def (test_\w+)", tests, re.M)) == set()
    assert len(named) > 20


@pytest.mark.parametrize(
    "limit",
    [
        *(formats.MAX_BYTES, formats.MAX_VARIABLES, formats.MAX_LABELS, download.MAX_MEMBERS, presets.MAX_BYTES),
        *(files.MAX_JSON_BYTES, files.MAX_JSON_ITEMS, run_format.MAX_RESULTS_BYTES),
        *(run_format.MAX_CSV_BYTES, run_format.MAX_CSV_ROWS, rules.MAX_TRIALS, rules.MAX_TASKS, build.MAX_WEIGHTS),
    ],
)
def test_limits_on_the_page_are_the_real_ones(limit: int) -> None:
    assert f"{limit:,}" in PAGE


def test_nothing_is_unpickled() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("yaml", "load")}, path
