"""Reports in a real browser: light and dark, on a desk, on a phone and on paper, and without any network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import PROGRAM, Browser, start_browser
from pages import PARTS, make_part, make_reproduction, make_result, run_of
from test_sweeps import write_sweep

from engram.config.paper import PAPER_METHODS
from engram.report.html import run_page
from engram.report.html.page import table
from engram.report.layout import Table
from engram.reproduction.page import reproduction_page
from engram.runs.run import read_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]

PHONE = {"width": 390, "height": 844}
A4 = {"width": 680, "height": 962}  # what is left of the sheet inside its margins, in CSS pixels
READABLE = 4.5  # the contrast that WCAG's level AA asks for

# Every piece of text with its colour and that of what lies behind it. Numbers in coloured cells are left to the eye.
TEXTS = """
[...document.querySelectorAll("body *")].filter(e =>
  [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length
).map(e => {
  const style = getComputedStyle(e), inSvg = e.closest("svg") !== null;
  const inCell = e.closest("[id$=matrices] svg") !== null && style.fill !== style.color;
  if (e.tagName === "title" || inCell) return null;
  let behind = e;
  while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  return [e.textContent.trim(), inSvg ? style.fill : style.color, getComputedStyle(behind).backgroundColor];
}).filter(entry => entry !== null)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module", params=["run", "sweep", "reproduction"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    if request.param == "run":
        command = "engram run split-mnist --out " + "a-long-name/" * 30
        run = run_of(*(make_result(method) for method in PAPER_METHODS), command=command, finished=None)
        text = run_page(replace(run, path=Path("x" * 200)))
    elif request.param == "sweep":
        run = read_run(write_sweep(path.parent / "sweep"))
        axes = [
            "strength=0.1,1,10",
            "learning_rate=0.001",
            "hidden=[256, 256]",
            "batch_size=64",
            "penalty_step=proximal",
        ]
        run.about.update({"axes": axes, "command": "engram sweep split-mnist --out " + "a-long-name/" * 30})
        text = run_page(run)
    else:
        runs = {("split-mnist", part): make_part(part, quick=True) for part in PARTS}
        runs["permuted-mnist", "table"] = make_part("table", "permuted-mnist", quick=True)
        text = reproduction_page(make_reproduction(runs, ["vision-mixture was not run"]))
    path.write_text(text, encoding="utf-8")
    return path


def luminance(colour: str) -> float:
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_nothing_is_fetched_and_nothing_is_amiss(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.requests()[0] == page.resolve().as_uri()
    assert all(address.startswith("data:") for address in browser.requests()[1:])
    assert browser.complaints() == []


def test_the_policy_of_the_page_stops_what_gets_into_it(browser: Browser, page: Path, tmp_path: Path) -> None:
    intruder = '<img src="http://127.0.0.1:9/x.png"><script>document.title = "intruder"</script></main>'
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(page.read_text(encoding="utf-8").replace("</main>", intruder), encoding="utf-8")
    browser.open(spoiled)
    assert browser.evaluate("document.title") != "intruder"
    assert sum("Content Security Policy" in text for text in browser.complaints()) == 2


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_is_never_wider_than_the_screen(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    beyond = """[...document.querySelectorAll("body *")]
        .filter(e => !e.closest(".scroll") && !e.closest("svg") && e.getBoundingClientRect().right > innerWidth + 1)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert browser.evaluate(beyond) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_every_figure_is_there_and_its_words_can_be_read(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    boxes = browser.evaluate(
        """[...document.querySelectorAll("figure svg")].map(svg => {
            const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
            const words = [...svg.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize));
            const shown = svg.viewBox.baseVal;
            return {label: svg.getAttribute("aria-label"), width: box.width, height: box.height,
                    scale: box.width / shown.width, smallest: Math.min(...words), words: words.length,
                    inside: drawn.x >= -1 && drawn.x + drawn.width <= shown.width + 1};
        })"""
    )
    assert len(boxes) >= 5
    for box in boxes:
        assert box["label"]
        assert box["width"] > 300
        assert box["height"] > 100
        assert box["words"] > 3
        assert box["inside"], box
        assert box["smallest"] * box["scale"] >= 6.5, box


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    background = browser.evaluate("getComputedStyle(document.documentElement.querySelector('body')).backgroundColor")
    assert (luminance(background) < 0.05) == dark
    texts = browser.evaluate(TEXTS)
    assert len(texts) > 200
    faint = [entry for entry in texts if contrast(entry[1], entry[2]) < READABLE]
    assert faint == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_of_figures_stand_out_from_the_page(browser: Browser, page: Path, dark: bool) -> None:
    """But for cells of heat maps, which have colours of their own."""
    browser.open(page, dark=dark)
    strokes = browser.evaluate(
        """[...new Set([...document.querySelectorAll("figure:not([id$=matrices]) svg :is(path, use)")]
            .map(e => getComputedStyle(e))
            .filter(s => s.stroke.startsWith("rgb") && s.strokeOpacity === "1").map(s => s.stroke))]"""
    )
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert len(strokes) >= 2
    assert [stroke for stroke in strokes if contrast(stroke, background) < 3] == []


def test_the_numbers_of_a_figure_unfold(browser: Browser, page: Path) -> None:
    browser.open(page)
    height = "[...document.querySelectorAll('details')].map(d => d.getBoundingClientRect().height)"
    before = browser.evaluate(height)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert all(after > folded + 50 for folded, after in zip(before, browser.evaluate(height), strict=True))


def test_intervals_stand_below_their_means_where_a_table_is_too_wide(browser: Browser, tmp_path: Path) -> None:
    columns = ("", "paper", "1: as published", "2: each its own strength", "3: one initialisation", "4: one budget")
    rows = [("Imbalanced Permuted MNIST: dhp+online-ewc", "+0.25", *["-3.62 [-6.70, -0.54]"] * 4)]
    run = run_of(make_result("si"))
    (tmp_path / "report.html").write_text(
        run_page(run).replace("</main>", f"<section>{table(Table('rungs', columns, rows))}</section></main>"), "utf-8"
    )
    browser.open(tmp_path / "report.html", width=1300)
    scroll = "[...document.querySelectorAll('.scroll')].at(-1)"
    assert browser.evaluate(f"{scroll}.scrollWidth <= {scroll}.clientWidth")
    assert browser.evaluate("[...document.querySelectorAll('td')].at(-1).getBoundingClientRect().height") > 45, (
        "two lines"
    )


def test_a_wide_table_scrolls_by_itself_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, **PHONE)
    widths = browser.evaluate(
        "[...document.querySelectorAll('main > section > .scroll')].map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert any(whole > shown for whole, shown in widths)
    assert all(shown <= PHONE["width"] for _, shown in widths)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_table_shows_on_a_phone_that_it_scrolls(browser: Browser, page: Path, dark: bool, tmp_path: Path) -> None:
    """The edge behind which there is more is shaded; at the end of the table it is not."""
    browser.open(page, **PHONE, dark=dark)
    wide = "[...document.querySelectorAll('main > section > .scroll')].find(e => e.scrollWidth > e.clientWidth + 40)"
    at_start = edge_of(browser, wide, tmp_path)
    browser.evaluate(f"{wide}.scrollLeft = 10000")
    at_end = edge_of(browser, wide, tmp_path)
    assert at_start != at_end
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert contrast(f"rgb{at_start}", background) > 1.3
    assert contrast(f"rgb{at_end}", background) < 1.05


def edge_of(browser: Browser, element: str, folder: Path) -> tuple[int, ...]:
    """The colour of the lowest pixel at the right edge of an element, where no letter is."""
    from matplotlib.image import imread

    browser.evaluate(f"{element}.scrollIntoView({{block: 'end', behavior: 'instant'}})")
    x, y = browser.evaluate(f"(box => [box.right - 1, box.bottom - 2])({element}.getBoundingClientRect())")
    path = folder / "screen.png"
    path.write_bytes(browser.screenshot())
    return tuple(int(255 * value) for value in imread(path)[int(2 * y), int(2 * x)][:3])


def test_on_paper_every_table_is_unfolded_and_none_is_cut(browser: Browser, page: Path) -> None:
    browser.open(page, **A4, dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tables = browser.evaluate(
        """[...document.querySelectorAll("table")].map(t => {
            const box = t.getBoundingClientRect(), room = t.closest("details, section").getBoundingClientRect();
            const shown = t.checkVisibility() && box.bottom <= room.bottom + 1;
            return [shown, t.querySelectorAll("tr").length, box.height, box.right, t.textContent.slice(0, 60)];
        })"""
    )
    assert tables
    for shown, num_rows, height, right, start in tables:
        assert shown, start
        assert height >= 8 * num_rows, start
        assert right <= A4["width"] + 1, start
    assert set(browser.evaluate("[...document.querySelectorAll('tr')].map(r => getComputedStyle(r).breakInside)")) == {
        "avoid"
    }
    heights = browser.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)")
    assert max(heights) < A4["height"]


def test_it_prints_on_sheets_of_a4(browser: Browser, page: Path) -> None:
    browser.open(page)
    printed = browser.print_to_pdf()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type /Page\b", printed)) >= 4
    for width, height in re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", printed):
        assert (float(width), float(height)) == pytest.approx((595, 842), abs=1)
