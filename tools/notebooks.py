"""The notebooks of the documentation: run them, keep what they show, and turn them into pages. Needs no Jupyter.

    python tools/notebooks.py docs/notebooks/*.ipynb

runs the cells of each notebook in order and writes their outputs into the file. `make docs` shows what is in the file.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]
Output = dict[str, Any]


def read(path: Path) -> Notebook:
    """A notebook as its file holds it."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, notebook: Notebook) -> None:
    """As Jupyter writes it: indented by one, with a newline at the end."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def execute(notebook: Notebook, name: str = "notebook") -> dict[str, Any]:
    """Run the cells of code one after the other, keep what they show in the notebook, and return their names.

    A cell shows what it prints and the value of its last line, if that is an expression without a semicolon.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run(source_of(cell), f"{name}[{number}]", names)
        outputs: list[Output] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
        if value is not None:
            outputs.append(_result(value, number))
        cell["execution_count"], cell["outputs"] = number, outputs
    return names


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    """The cells that can be run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(cell: dict[str, Any]) -> str:
    """The text of a cell, which a file holds as one string or as its lines."""
    return "".join(cell["source"])


def to_markdown(notebook: Notebook, file: str) -> str:
    """A page: text as it is, code in fences, and outputs as Jupyter shows them.

    Args:
        notebook: with its outputs.
        file: its name, for a link below the title.
    """
    parts = []
    for cell in notebook["cells"]:
        text = source_of(cell).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    title, *rest = parts
    head, _, body = title.partition("\n")
    link = f"*This page is a notebook with its outputs: [{file}]({file}).*"
    return "\n\n".join([head, link, *([body.strip()] if body.strip() else []), *rest]) + "\n"


def _run(source: str, where: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value that it shows."""
    tree = ast.parse(source, where)
    last = tree.body[-1] if tree.body and not source.rstrip().endswith(";") else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, where, "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), where, "exec"), names)
    return eval(compile(ast.Expression(last.value), where, "eval"), names)


def _result(value: Any, number: int) -> Output:
    """A value as a notebook keeps it, in each form that it has."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if hasattr(value, "_repr_png_"):
        png, metadata["image/png"] = value._repr_png_()
        data["image/png"] = base64.b64encode(png).decode()
    if hasattr(value, "_repr_html_") and (html := value._repr_html_()):
        data["text/html"] = _lines(html)
    data["text/plain"] = _lines(repr(value))
    return {"data": data, "execution_count": number, "metadata": metadata, "output_type": "execute_result"}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _shown(output: Output) -> str:
    """An output in a page: the picture, else the HTML, else the text."""
    if output["output_type"] == "stream":
        return _fenced("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        size = output["metadata"]["image/png"]
        about = re.sub(r"[\"<>]", "", "".join(data["text/plain"]))
        picture = f"data:image/png;base64,{data['image/png']}"
        return f'<img alt="{about}" width="{size["width"]}" height="{size["height"]}" src="{picture}">'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return _fenced("".join(data["text/plain"]))


def _fenced(text: str) -> str:
    return f'<div class="output" markdown>\n\n```\n{text.rstrip()}\n```\n\n</div>'


def main(paths: list[str]) -> None:
    """Run the notebooks and write their outputs into them."""
    for path in map(Path, paths):
        notebook = read(path)
        execute(notebook, path.stem)
        write(path, notebook)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
