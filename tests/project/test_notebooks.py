"""The notebooks of the documentation: they were run, they run, and what their text says is what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import notebooks
import pytest

from engram.runs.metrics import paired_difference

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


def cell(kind: str, *lines: str) -> dict[str, Any]:
    made: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": [f"{line}\n" for line in lines]}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def forms(notebook: notebooks.Notebook) -> list[list[list[str]]]:
    """The forms of each output of each cell: a stream, or the types of a value."""
    return [
        [sorted(output.get("data", {"stream": None})) for output in cell["outputs"]]
        for cell in notebooks.code_cells(notebook)
    ]


# --- what is kept in the files


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_its_first_cell_to_its_last(path: Path) -> None:
    cells = notebooks.code_cells(notebooks.read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert sum(bool(cell["outputs"]) for cell in cells) > 4


# --- what they show: each takes about a minute


def run_again(name: str) -> dict[str, Any]:
    """Run a notebook; it shows what the file holds, in form, and leaves these names."""
    notebook = notebooks.read(FOLDER / f"{name}.ipynb")
    kept = forms(notebook)
    names = notebooks.execute(notebook, name)
    assert forms(notebook) == kept
    return names


@pytest.mark.slow
def test_forgetting_is_seen_and_held() -> None:
    names = run_again("forgetting")
    finetune, si = names["finetune"], names["si"]
    assert finetune.bwt.max() < -0.1
    assert paired_difference(si.average_accuracy[:, -1], finetune.average_accuracy[:, -1]).low > 0.02
    assert si.first_task[:, -1].mean() > finetune.first_task[:, -1].mean() + 0.1
    assert si.latest_task[:, -1].mean() > finetune.latest_task[:, -1].mean() - 0.1, "a little accuracy is paid"
    averages = [result.average_accuracy[:, -1].mean() for result in names["results"]]
    assert averages.index(max(averages)) == 2, "less strength forgets, and more cannot learn"
    assert repr(names["penalty"]) == "SI(strength=1, 79,510 weights protected, 3 tasks consolidated)"


@pytest.mark.slow
def test_the_fair_comparison_says_what_its_text_says() -> None:
    names = run_again("fair-comparison")
    best, grids = names["best"], names["grids"]
    assert best["online-ewc"] >= 10 * best["si"]
    for method, strength in best.items():
        assert strength not in (grids[method][0], grids[method][-1]), "not at the edge of its grid"
    difference = paired_difference(names["ewc"].average_accuracy[:, -1], names["si"].average_accuracy[:, -1])
    assert -0.01 < difference.low < 0 < difference.high < 0.01
    assert difference.num_trials == 6


# --- how they are run and shown


def test_a_cell_shows_what_it_prints_and_its_last_value() -> None:
    source = [
        cell("markdown", "# Title", "", "Text with [a link](other.ipynb)."),
        cell("code", "x = 2", "print('printed')", "x + 1"),
        cell("code", "x + 2;"),
        cell("code", "x = x + 3"),
        cell("code", "x"),
        cell("code"),
    ]
    notebook = {"cells": source}
    assert notebooks.execute(notebook)["x"] == 5
    outputs = [cell["outputs"] for cell in source[1:]]
    assert [len(shown) for shown in outputs] == [2, 0, 0, 1, 0]
    assert outputs[0][0]["text"] == ["printed\n"]
    assert outputs[0][1]["data"] == {"text/plain": ["3"]}
    page = notebooks.to_markdown(notebook, "this.ipynb")
    assert page.startswith(
        "# Title\n\n*This page is a notebook with its outputs: [this.ipynb](this.ipynb).*\n\nText with"
    )
    assert "[a link](other.ipynb)" in page, "the site leads from page to page"
    assert "```python\nx = 2\nprint('printed')\nx + 1\n```" in page
    assert "```\nprinted\n```" in page


def test_an_error_in_a_cell_names_the_cell() -> None:
    notebook = {"cells": [cell("code", "1"), cell("code", "", "raise KeyError('here')")]}
    with pytest.raises(KeyError, match="here") as error:
        notebooks.execute(notebook, "mine")
    assert error.traceback[-1].path == "mine[2]"
    assert error.traceback[-1].lineno == 1


def test_a_page_has_pictures_at_their_size_and_tables_as_html() -> None:
    definitions = cell(
        "code",
        "class Picture:",
        "    _repr_png_ = lambda self: (b'png', {'width': 3, 'height': 4})",
        "    __repr__ = lambda self: '<a \"picture\">'",
        "class Box:",
        "    _repr_html_ = lambda self: '<b>bold</b>'",
    )
    notebook = {"cells": [cell("markdown", "# Title"), definitions, cell("code", "Picture()"), cell("code", "Box()")]}
    notebooks.execute(notebook)
    page = notebooks.to_markdown(notebook, "this.ipynb")
    assert '<img alt="a picture" width="3" height="4" src="data:image/png;base64,cG5n">' in page
    assert '<div class="output"><b>bold</b></div>' in page


def test_a_file_is_written_as_it_was_read(tmp_path: Path) -> None:
    """So that a change of one output is a change of a few lines."""
    for path in PATHS:
        notebooks.write(tmp_path / path.name, notebooks.read(path))
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
