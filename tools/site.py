"""Hooks of MkDocs: links that leave docs/ become plain text, and equations in docstrings stay as they are set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#)[^)#]+)(?:#[^)]*)?\)")

EQUATION = re.compile(r"<p>(?=[^<]*\S {2,}\S)")  # the docstrings' sentences have no two spaces in a row


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository becomes its path; one to a page of the site stays a link."""
    docs = Path(config.docs_dir).resolve()
    here = Path(page.file.abs_src_path).parent

    def as_text(link: re.Match[str]) -> str:
        words, target = link.group(1), (here / link.group(2)).resolve()
        if target.is_relative_to(docs):
            return link.group(0)
        path = target.relative_to(docs.parent).as_posix()
        return f"`{path}`" if path.endswith(words.strip("`/")) else f"{words} (`{path}`)"

    return LINK.sub(as_text, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A paragraph whose words were set apart by spaces is an equation."""
    return EQUATION.sub('<p class="equation">', html) if page.file.src_uri.startswith("api/") else html
