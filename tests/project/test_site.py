"""The site of the documentation: it builds without a warning, is whole, and loads nothing from anywhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import PROGRAM, Browser, start_browser

import engram

for needed in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(needed)
pytestmark = pytest.mark.slow  # `test_docs.py` has what can be seen without building the site

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"(?:https?:)?//")


@dataclass
class Page(HTMLParser):
    """What a page of the site refers to."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    menu: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # by the page itself: scripts, styles, images

    def __post_init__(self) -> None:
        super().__init__()
        self.depth_in_menu = 0
        self.text = self.path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.anchors.add(given["id"])
        self.depth_in_menu += tag == "nav"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if self.depth_in_menu:
                self.menu.append(given["href"])
        elif tag == "link" and "href" in given:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])

    def handle_endtag(self, tag: str) -> None:
        self.depth_in_menu -= tag == "nav"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages, by their paths."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    outcome = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert outcome.returncode == 0, outcome.stderr.decode()
    return {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


def test_every_public_name_is_in_the_reference(site: dict[str, Page]) -> None:
    reference = [page for name, page in site.items() if name.startswith("api/")]
    described = {anchor for page in reference for anchor in page.anchors}
    for name in engram.__all__:
        own = {f"engram.{name}", *(anchor for anchor in described if anchor.startswith(f"engram.{name}."))}
        named = any(f"<code>engram.{name}</code>" in page.text for page in reference)
        assert named or own & described, f"engram.{name} is in no page of docs/api"


def test_every_page_is_in_the_menu(site: dict[str, Page]) -> None:
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in sources}
    assert pages == set(site)
    assert pages <= set(site["index.html"].menu) | {"index.html"}


def test_links_and_images_lead_somewhere(site: dict[str, Page]) -> None:
    num_followed = 0
    for name, page in site.items():
        for reference in [*page.links, *page.loaded]:
            if ELSEWHERE.match(reference) or reference.startswith("data:"):
                continue
            path, _, anchor = reference.partition("#")
            target = (page.path.parent / path).resolve() if path else page.path
            assert target.exists() or path == ".", f"{name} refers to {reference}"
            if anchor and not anchor.startswith("__"):  # the theme's own, which scripts answer
                there = next(other for other in site.values() if other.path == target)
                assert anchor in there.anchors, f"{name} refers to {reference}"
            num_followed += 1
    assert num_followed > 100


def test_nothing_is_loaded_from_the_network(site: dict[str, Page]) -> None:
    for name, page in site.items():
        assert [reference for reference in page.loaded if ELSEWHERE.match(reference)] == [], name
        assert 'class="mermaid' not in page.text, f"{name} has a diagram, whose script the theme would fetch"
    folder = site["index.html"].path.parent
    for path in folder.rglob("*.css"):
        fetched = re.findall(
            r"(?:url\(|@import)\s*['\"]?(https?:[^)'\"]*|//[^)'\"]*)", path.read_text(encoding="utf-8")
        )
        assert fetched == [], path.name


def test_no_link_leaves_for_the_repository(site: dict[str, Page]) -> None:
    """Files of the repository are named by their paths, as code."""
    assert "<code>src/engram/penalties/terms.py</code>" in site["method.html"].text
    assert not [link for page in site.values() for link in page.links if link.endswith((".py", ".md"))]


def test_examples_of_the_reference_are_code(site: dict[str, Page]) -> None:
    """Markdown would turn `>>>` into quotations of quotations."""
    reference = "".join(page.text for name, page in site.items() if name.startswith("api/"))
    assert "<blockquote>" not in reference
    examples = re.findall(r'<details class="example".*?</details>', reference, re.DOTALL)
    assert len(examples) > 50
    assert all("<code>" in example for example in examples)


def test_equations_of_the_reference_are_set_as_they_stand_and_sentences_are_not(site: dict[str, Page]) -> None:
    equations = re.findall('<p class="equation">(.*?)</p>', site["api/penalties.html"].text, re.DOTALL)
    assert any(equation.startswith("Ω ← γ Ω + Ω_task        θ* ← θ") for equation in equations)
    assert not any("derives from" in equation for equation in equations)


def test_a_link_to_a_notebook_leads_to_its_page_which_offers_the_file(site: dict[str, Page]) -> None:
    assert "notebooks/forgetting.html" in site["quickstart.html"].links
    assert "fair-comparison.html" in site["notebooks/forgetting.html"].links
    assert "forgetting.ipynb" in site["notebooks/forgetting.html"].links


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def wait_until(browser: Browser, condition: str) -> None:
    until = time.monotonic() + 30
    while not browser.evaluate(condition):
        assert time.monotonic() < until, condition
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["index.html", "guides/runs.html"])
def test_search_works_from_a_folder(site: dict[str, Page], browser: Browser, name: str) -> None:
    browser.open(site[name].path)
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    wait_until(browser, "document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    browser.send("Input.insertText", text="forgettin")
    for kind in ("keyDown", "keyUp"):  # the page listens to keys
        browser.send("Input.dispatchKeyEvent", type=kind, key="g", text="g" if kind == "keyDown" else "")
    wait_until(browser, "document.querySelectorAll('.md-search-result__link').length > 3")
    links = browser.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any(link.startswith(site["notebooks/forgetting.html"].path.as_uri()) for link in links)
    assert browser.complaints() == []
    assert all(address.startswith(("file:", "data:")) for address in browser.requests())


def test_a_page_of_more_than_six_screens_has_a_table_of_contents(site: dict[str, Page], browser: Browser) -> None:
    num_long = 0
    for name, page in site.items():
        browser.open(page.path, width=1280, height=800)
        if browser.evaluate("document.documentElement.scrollHeight") > 6 * 800:
            num_long += 1
            links = "[...document.querySelectorAll('.md-sidebar--secondary .md-nav__link')]"
            assert browser.evaluate(f"{links}.filter(link => link.checkVisibility()).length") >= 2, name
    assert num_long > 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_of_the_site_are_dark_in_the_dark(site: dict[str, Page], browser: Browser, dark: bool) -> None:
    for name in ("reproduction.html", "notebooks/forgetting.html"):
        browser.open(site[name].path, dark=dark)
        filters = browser.evaluate(
            "[...document.querySelectorAll('.md-typeset img')].map(image => getComputedStyle(image).filter)"
        )
        assert filters, name
        assert all(("invert" in each) == dark for each in filters), name


def test_tables_of_intervals_fit_into_the_page(site: dict[str, Page], browser: Browser) -> None:
    """They scrolled, and their last columns, of the fairest comparisons, were not seen."""
    browser.open(site["reproduction.html"].path, width=1280)
    boxes = "[...document.querySelectorAll('.md-typeset__table')]"
    assert browser.evaluate(f"{boxes}.length") >= 5
    assert browser.evaluate(f"{boxes}.filter(box => box.scrollWidth > box.parentElement.clientWidth + 1).length") == 0
    texts = browser.evaluate("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
    assert "10\u00a0of\u00a010\u00a0diverged" in texts


def test_words_in_a_table_have_room_on_a_phone(site: dict[str, Page], browser: Browser) -> None:
    """With a word in each line, one row of what was tried was as high as the screen."""
    browser.open(site["reproduction/settings.html"].path, width=390, height=844)
    heights = browser.evaluate("[...document.querySelectorAll('tbody tr')].map(row => row.clientHeight)")
    assert len(heights) > 50
    assert max(heights) < 844 / 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_wide_table_of_the_site_shows_on_a_phone_that_it_scrolls(
    site: dict[str, Page], browser: Browser, dark: bool
) -> None:
    browser.open(site["reproduction/table-one.html"].path, width=390, height=844, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    shadows = browser.evaluate(
        """[...document.querySelectorAll('.md-typeset__table, .md-typeset__scrollwrap, .output .scroll')]
            .filter(box => box.scrollWidth > box.clientWidth + 1)
            .map(box => getComputedStyle(box).backgroundImage)"""
    )
    assert len(shadows) > 1
    assert all("gradient" in shadow for shadow in shadows)
