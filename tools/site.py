"""Hooks of MkDocs: notebooks become pages, links that leave docs/ plain text; equations and intervals stay whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import notebooks  # beside this file
from mkdocs.structure.files import File

from engram.report.layout import set_cell

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|#)[^)#]+)(?:#[^)]*)?\)")

NUMBERS = re.compile(r"(?<=<td style=\"text-align: right;\">)[^<]+(?=</td>)")
EQUATION = re.compile(r"<p>(?=[^<]*\S {3,}\S)")  # in a sentence, two spaces set a formula apart


def on_files(files: Any, config: Any) -> Any:
    """A page for each notebook; the notebook stays beside it, to be downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        content = notebooks.to_markdown(notebooks.read(Path(file.abs_src_path)), Path(file.src_uri).name)
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=content))
    return files


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """No page for addresses that lead nowhere: it would name its styles from the root of a server, and have none."""
    return "" if template_name == "404.html" else output_content


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository becomes its path; one to a notebook of the site leads to its page."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent

    def as_text(link: re.Match[str]) -> str:
        words, target = link.group(1), (here / link.group(2)).resolve()
        if target.is_relative_to(docs):
            own = target.with_suffix("") == (docs / page.file.src_uri).with_suffix("")  # a notebook to be downloaded
            return link.group(0) if own else link.group(0).replace(".ipynb)", ".md)")
        path = target.relative_to(docs.parent).as_posix()
        return f"`{path}`" if path.endswith(words.strip("`/")) else f"{words} (`{path}`)"

    return LINK.sub(as_text, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A cell of numbers breaks before an interval, not within; a paragraph set apart by spaces is an equation."""
    html = NUMBERS.sub(lambda cell: set_cell(cell.group()), html)
    return EQUATION.sub('<p class="equation">', html) if page.file.src_uri.startswith("api/") else html
