"""What a page is made of: text, tables, figures, notices. All text is escaped here, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NewType

from engram.report.figures import Drawing, to_svg
from engram.report.layout import Table

Html = NewType("Html", str)  # markup that is safe to put into a page

MANY_COLUMNS = 9  # more are printed in smaller letters
NUMBERS = re.compile(r"[-+−–±.,%/\[\]\d\s]+")


@dataclass(frozen=True)
class Section:
    """A part of a page, with an entry in its contents."""

    anchor: str
    title: str
    blocks: list[Html] = field(default_factory=list)


def paragraph(text: str, kind: str = "") -> Html:
    return Html(f"<p{_class(kind)}>{_sentence(text)}</p>")


def heading(text: str) -> Html:
    return Html(f"<h3>{escape(text)}</h3>")


def code(text: str) -> Html:
    return Html(f"<pre><code>{escape(text)}</code></pre>")


def facts(entries: Mapping[str, str]) -> Html:
    """Short values, each under its name."""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries.items())
    return Html(f'<dl class="facts">{"".join(items)}</dl>')


def notice(title: str, sentences: Sequence[str], kind: str = "missing") -> Html:
    """Something that a reader must not overlook; nothing at all where there is nothing to say."""
    if not sentences:
        return Html("")
    items = "".join(f"<li>{_sentence(sentence)}</li>" for sentence in sentences)
    return Html(f'<aside class="notice {escape(kind)}"><p>{escape(title)}</p><ul>{items}</ul></aside>')


def table(content: Table, kind: str = "") -> Html:
    """A table with its notes; on a narrow screen it scrolls by itself. The kind "words" breaks lines instead."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in content.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in row[1:])}</tr>'
        for row in content.rows
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in content.notes)
    return Html(
        f'<p class="title">{escape(content.title)}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(content.title)}">'
        f"<table{_class(kind or ('dense' if len(content.columns) > MANY_COLUMNS else ''))}>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def figure(drawing: Drawing, prefix: str) -> Html:
    """A figure, what it says, and its numbers to unfold. `prefix` is unique in the page."""
    return Html(
        f'<figure id="{escape(prefix)}"><h3>{escape(drawing.title)}</h3>{to_svg(drawing, prefix)}'
        f"<figcaption>{escape(drawing.caption)}</figcaption>"
        f"<details><summary>The numbers</summary>{table(drawing.numbers)}</details></figure>"
    )


def figures(drawings: Sequence[Drawing], prefix: str) -> Html:
    """Figures in two columns of about the same height, one below the other on a narrow screen."""
    if not drawings:
        return Html("")
    heights = [drawing.figure.get_figheight() + 1 for drawing in drawings]  # and about an inch of words
    split = min(range(1, len(drawings) + 1), key=lambda n: max(sum(heights[:n]), sum(heights[n:])))
    made = [figure(drawing, f"{prefix}-{drawing.name}") for drawing in drawings]
    return side_by_side(made[:split], made[split:])


def side_by_side(*parts: Sequence[Html]) -> Html:
    """Columns of blocks, one below the other on a narrow screen."""
    columns = "".join(f"<div>{''.join(part)}</div>" for part in parts if part)
    return Html(f'<div class="columns">{columns}</div>')


def _sentence(text: str) -> str:
    """What stands between backticks is to be typed."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _cell(text: str) -> str:
    """A number's minus is as wide as its plus, so that columns of them stay even."""
    return escape(text.replace("-", "−") if NUMBERS.fullmatch(text) else text)


def _class(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""
