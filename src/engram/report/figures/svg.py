"""A drawing as SVG inside a page: in the page's own ink and letters, with ids that are nobody else's."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from engram.report.figures.drawing import Drawing
from engram.report.figures.style import INK

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
REFERENCE = re.compile(r"#([\w.-]+)")


def to_svg(drawing: Drawing, prefix: str) -> str:
    """The figure as an <svg> element. `prefix` must be unique in its page: ids of two figures would collide."""
    root = xml.fromstring(drawing.to_bytes("svg"))
    wanted = {name for element in root.iter() for name in _references(element)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(SVG) in ("metadata", "style"):  # says where matplotlib is; rules for a whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        _rewrite(element, wanted, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": f"{drawing.title}. {drawing.caption}", "fill": "currentColor"}
    title = xml.Element("title")
    title.text = drawing.title
    root.insert(0, title)
    return xml.tostring(root, encoding="unicode")


def _references(element: xml.Element) -> list[str]:
    attributes = (element.get(name, "") for name in (f"{XLINK}href", "clip-path"))
    return [name for value in attributes for name in REFERENCE.findall(value)]


def _rewrite(element: xml.Element, wanted: set[str], prefix: str) -> None:
    attributes = dict(element.attrib)
    element.attrib.clear()
    for name, value in attributes.items():
        if name == "id":
            if value not in wanted:
                continue
            value = f"{prefix}-{value}"
        elif name == f"{XLINK}href":
            name, value = "href", re.sub("^#", f"#{prefix}-", value)  # an image holds its own bytes
        elif name == "clip-path":
            value = REFERENCE.sub(rf"#{prefix}-\1", value)
        elif name == "style":
            value = value.replace(INK, "currentColor")
            value = re.sub(r"(font: [^;]*?[\d.]+px) [^;]*", r"\1 var(--sans, sans-serif)", value)
        element.set(name, value)
