"""Pages: the blocks that they are made of, and the frame around them.

All text is escaped here, that of tables by `Table.to_html`, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NewType

from engram import __version__
from engram.common.errors import printable
from engram.report.figures import Drawing, to_svg
from engram.report.layout import Table

Html = NewType("Html", str)  # markup that is safe to put into a page

# Nothing may be fetched and nothing may run, no matter what a result folder holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # not allowed in a page, but possible in a file
PAPER_ADDRESS = "https://arxiv.org/abs/2006.16558"

STYLE = """
:root {
  color-scheme: light dark;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --faint: #f6f8fa;
  --accent: #0b61a4; --warn: #9a6700; --warn-paper: #fff8e6; --shade: rgb(0 0 0 / 32%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e6e9ed; --soft: #a3adb8; --line: #333a42; --faint: #1c2026;
    --accent: #6cb6ff; --warn: #e3b341; --warn-paper: #262214; --shade: rgb(255 255 255 / 38%);
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.6 var(--sans); }
main, header, footer { max-width: 70rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 2.5rem); }
header { padding-top: clamp(2rem, 6vw, 4rem); }
header .kind { margin: 0; color: var(--soft); font-size: .8125rem; letter-spacing: .08em; text-transform: uppercase; }
h1 { margin: .25rem 0 .5rem; font-size: clamp(1.75rem, 5vw, 2.5rem); font-weight: 650; line-height: 1.15;
  letter-spacing: -.02em; overflow-wrap: anywhere; text-wrap: balance; }
.lead { margin: 0 0 1.5rem; max-width: 42rem; color: var(--soft); font-size: 1.0625rem; overflow-wrap: anywhere; }
h2 { margin: 4rem 0 1.25rem; padding-bottom: .5rem; border-bottom: 1px solid var(--line);
  font-size: 1.5rem; font-weight: 650; line-height: 1.25; letter-spacing: -.01em; }
h3 { margin: 0 0 .5rem; font-size: 1.0625rem; font-weight: 600; line-height: 1.35; }
p { max-width: 42rem; }
.verdict { margin: 1.5rem 0; max-width: 48rem; font-size: 1.125rem; overflow-wrap: anywhere; }
.verdict + .verdict { margin-top: -.5rem; }
.verdict code { font-size: 1em; }
a { color: var(--accent); text-underline-offset: .15em; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0; padding: 0; list-style: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 1rem 1.5rem;
  margin: 2.25rem 0 1.75rem; }
.facts dt { color: var(--soft); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.0625rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.notice { margin: 1.5rem 0; padding: .875rem 1.125rem; border-left: 3px solid var(--warn); border-radius: 0 6px 6px 0;
  background: var(--warn-paper); }
.notice p { max-width: none; margin: 0 0 .25rem; font-weight: 600; }
.notice ul { margin: 0; padding-left: 1.125rem; overflow-wrap: anywhere; }
.notice.quick p { color: var(--warn); font-size: 1.125rem; }
.scroll { overflow-x: auto; margin: 0 0 2.25rem;
  /* shaded where there is more to scroll to: the upper two layers move with the table, and cover the others */
  background: linear-gradient(to right, var(--paper) 40%, transparent) left / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--paper) 40%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to right, var(--shade), transparent) left / .8rem 100% no-repeat scroll,
    linear-gradient(to left, var(--shade), transparent) right / .8rem 100% no-repeat scroll; }
.scroll:has(+ .notes) { margin-bottom: .75rem; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums lining-nums; }
.title { margin: 0 0 .375rem; font-weight: 600; line-height: 1.4; }
th, td { padding: .375rem 0 .375rem 1.5rem; text-align: right; font-weight: 400;
  vertical-align: top; }
th:first-child { padding-left: 0; text-align: left; }
thead th { border-bottom: 1px solid var(--ink); color: var(--soft); font-size: .8125rem; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { font-weight: 500; white-space: nowrap; }
.notes { margin: 0 0 2.25rem; padding: 0; max-width: 48rem; color: var(--soft); font-size: .875rem; list-style: none;
  overflow-wrap: anywhere; }
.words th, .words td { text-align: left; white-space: normal; overflow-wrap: break-word; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 3.5rem; }
.columns > div { min-width: 0; }
figure { margin: 2rem 0 2.75rem; max-width: 36rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible;
  stroke-linejoin: round; stroke-linecap: butt; }
figcaption { margin-top: .75rem; color: var(--soft); font-size: .875rem; line-height: 1.5; }
details { margin-top: .5rem; font-size: .875rem; }
details.folded { margin: 1rem 0; font-size: 1rem; }
.folded > summary { font-weight: 600; }
summary { color: var(--accent); cursor: pointer; }
details .title { margin-top: .75rem; }
details table { font-size: .8125rem; }
details th, details td { padding-left: 1rem; }
pre { overflow-x: auto; padding: .75rem 1rem; border-radius: 6px; background: var(--faint); }
code { font: .875rem/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 4rem; padding-bottom: 3rem; color: var(--soft); font-size: .875rem; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 40rem) {
  h2 { margin-top: 3rem; }
  th, td { padding-left: 1rem; }
  tbody th { position: sticky; left: 0; background: var(--paper); padding-right: .5rem; white-space: normal;
    min-width: 7rem; max-width: 45vw; overflow-wrap: anywhere; }
  .words td:last-child:nth-child(n+4) { min-width: 18rem; }
}
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --soft: #444444; --line: #cccccc; --faint: #f5f5f5;
    --accent: #000000; --warn: #7a5200; --warn-paper: #faf6ea; }
  @page { size: A4; margin: 16mm 15mm; }
  body { font-size: 10pt; }
  main, header, footer { max-width: none; padding: 0; }
  nav, summary { display: none; }
  h2 { margin-top: 10mm; }
  h2, h3, .title { break-after: avoid; }
  .columns { display: block; }
  figure { max-width: none; margin: 0 0 8mm; }
  figure svg { max-width: 120mm; max-height: 215mm; }
  figcaption { break-before: avoid; }
  figure svg, tr, .notice, .facts { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; background: none; }
  details::details-content { content-visibility: visible; display: block; height: auto; }
  table, details table { font-size: 8pt; }
  thead th { font-size: inherit; }
  tbody th { white-space: normal; }
  table.dense { font-size: 6pt; }
  th, td, details th, details td { padding: .7mm 0 .7mm 2.2mm; }
}
"""


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
    head = f"<p>{escape(title)}</p>" if title else ""
    return Html(f'<aside class="notice {escape(kind)}">{head}<ul>{items}</ul></aside>')


def table(content: Table, kind: str = "") -> Html:
    """A table with its notes; on a narrow screen it scrolls by itself. The kind "words" breaks lines instead."""
    return Html(content.to_html(kind))


def figure(drawing: Drawing, prefix: str) -> Html:
    """A figure, what it says, and its numbers to unfold. `prefix` is unique in the page."""
    return Html(
        f'<figure id="{escape(prefix)}"><h3>{escape(drawing.title)}</h3>{to_svg(drawing, prefix)}'
        f"<figcaption>{escape(drawing.caption)}</figcaption>"
        f"<details><summary>The numbers</summary>{table(drawing.numbers)}</details></figure>"
    )


def folded(title: str, blocks: Sequence[Html]) -> Html:
    """Blocks that are long and seldom read, to unfold; on paper they are unfolded."""
    return Html(f'<details class="folded"><summary>{escape(title)}</summary>{"".join(blocks)}</details>')


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
    """Text between backticks is something to type, shown as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _class(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""


def render(kind: str, title: str, lead: str, opening: Sequence[Html], sections: Sequence[Section]) -> str:
    """The whole page. It holds no date, so that the same results give the same bytes."""
    entries = "".join(
        f'<li><a href="#{escape(section.anchor)}">{escape(section.title)}</a></li>' for section in sections
    )
    body = "\n".join(
        f'<section id="{escape(section.anchor)}"><h2>{escape(section.title)}</h2>\n'
        + "\n".join(block for block in section.blocks if block)
        + "\n</section>"
        for section in sections
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="Engram {escape(__version__)}">
<title>{escape(title)}: Engram</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="kind">{escape(kind)}</p>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
<nav aria-label="Contents"><ul>{entries}</ul></nav>
</header>
<main>
{chr(10).join(block for block in opening if block)}
{body}
</main>
<footer>
<p>Made by Engram {escape(__version__)}, an implementation of Differentiable Hebbian Consolidation
(<a href="{PAPER_ADDRESS}">Thangarasa, Miconi and Taylor, 2020</a>). The page needs no network.</p>
</footer>
</body>
</html>
"""
    return CONTROLS.sub(lambda found: printable(found[0]), page)
