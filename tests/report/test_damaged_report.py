"""A report of a damaged run is refused in one sentence, or is a page in which nothing runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders import short_run
from damage import damaged_csv, damaged_json, fuzz_a_little, read_or_refuse
from engram.report.html import make_page
from engram.report.tables import tables_of
from engram.runs.run import read_run

DAMAGED = {"run.json": damaged_json, "results.json": damaged_json, "dynamics.csv": damaged_csv}


@pytest.mark.parametrize("name", DAMAGED)
@fuzz_a_little
@given(data=st.data())
def test_damaged_report(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = short_run(Path(folder))
        (path / name).write_bytes(data.draw(DAMAGED[name]((path / name).read_bytes())))
        text = read_or_refuse(lambda: make_page(path))
        if text is not None:
            check(text)
            tables_of(read_run(path).results)


def check(text: str) -> None:
    """No scripts, and nothing that a terminal or a browser would obey."""
    assert "<script" not in text
    assert not {*map(chr, range(32)), "\x7f"} & set(text) - {"\n", "\t"}
    assert text.encode()
