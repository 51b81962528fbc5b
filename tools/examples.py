"""Examples in docstrings as code: Markdown would read `>>>` as quotations, and other lines as sentences."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from griffe import Extension

# From "Example:" to the first line that is not indented further, in a docstring whose indentation was removed.
EXAMPLE = re.compile(r"^Example:\n(?P<code>(?:[ ]{4}.*\n|\n)*(?:[ ]{4}.*))", re.MULTILINE)


class FencedExamples(Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """The docstring with its examples between fences."""

    def with_fences(example: re.Match[str]) -> str:
        code = f"```python\n{textwrap.dedent(example['code'])}\n```"
        return "Example:\n" + textwrap.indent(code, "    ")

    return EXAMPLE.sub(with_fences, inspect.cleandoc(docstring))
