"""Every block of Python in the README and the docs runs as it is printed, and every command in them can be given."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import engram
from engram.cli.main import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^(?:<!-- before:\n(?P<before>.*?)^-->\n+)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^ *```(?!python)\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"\A(?:<!--.*?-->\n)*?<!-- needs: (.*?) -->")


def blocks_of(text: str) -> list[str]:
    """Programs in the order of a page, each with its hidden part in front and its lines where the page has them."""
    programs = []
    for found in BLOCK.finditer(text):
        lines = [""] * text.count("\n", 0, found.end())
        for part in ("before", "code"):
            if found[part] is not None:
                first = text.count("\n", 0, found.start(part))
                own = found[part].splitlines()
                lines[first : first + len(own)] = own
        programs.append("\n".join(lines))
    return programs


def skip_without_needs(text: str) -> None:
    """Skip a page whose first lines name a module that is not here."""
    needs = NEEDS.match(text)
    for module in needs[1].split(",") if needs else ():
        pytest.importorskip(module.strip())


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and benchmarks of one epoch with small networks: what is printed takes longer."""
    monkeypatch.chdir(tmp_path)
    small = {"epochs": 1, "hidden": [16]}

    def preset(benchmark: str, method: str, preset=engram.preset, **changes: object) -> engram.Config:
        return preset(benchmark, method, **{**changes, **(small if benchmark != "custom" else {})})

    monkeypatch.setattr(engram, "preset", preset)


def run_page(path: Path) -> list[dict]:
    """Run the blocks of a page in one namespace; returns what it held after each."""
    text = path.read_text(encoding="utf-8")
    skip_without_needs(text)
    names: dict = {"__name__": path.stem}
    after = []
    with torch.random.fork_rng():
        for program in blocks_of(text):
            exec(compile(program, str(path), "exec"), names)
            after.append(dict(names))
    return after


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- Python


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if p != README and "```python" in p.read_text()], ids=name_of)
@pytest.mark.usefixtures("quick")
def test_a_page_runs_as_it_is_printed(path: Path) -> None:
    assert run_page(path)


README_BLOCKS = {
    "loop": r"\[(?P<forgotten>0\.\d+), .*\]\n\[(?P<held>0\.\d+), .*\]\n",
    "classifier": r"(?P<accuracy>0\.\d+)\n",
    "experiment": r"finetune \[.*\nscaled\+si \[.*\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", README_BLOCKS)
def test_a_block_of_the_readme_runs_in_an_empty_file(name: str, tmp_path: Path) -> None:
    blocks = blocks_of(README.read_text(encoding="utf-8"))
    assert len(blocks) == len(README_BLOCKS)
    (tmp_path / "pasted.py").write_text(blocks[list(README_BLOCKS).index(name)])
    done = subprocess.run([sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(README_BLOCKS[name], done.stdout)
    assert found, done.stdout
    if name == "loop":
        assert float(found["held"]) > float(found["forgotten"]) + 0.1, "what is recommended holds the first task"
    if name == "classifier":
        assert float(found["accuracy"]) > 0.9


def test_the_readme_hides_no_code() -> None:
    assert "<!-- before:" not in README.read_text(encoding="utf-8")


def test_no_block_of_python_is_overlooked() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert len(blocks_of(text)) == len(re.findall(r"```[ \t]*py", text)), (
            f"{name_of(path)} has another kind of fence"
        )
        hidden = re.findall(r"^<!-- before:", text, re.MULTILINE)
        assert len(hidden) == len([found for found in BLOCK.finditer(text) if found["before"]]), name_of(path)


# --- commands


def commands_of(path: Path) -> list[str]:
    """Lines in blocks that begin with `engram`, and words in the text that do so and say more than a command's name."""
    text = path.read_text(encoding="utf-8")
    in_blocks = "\n".join(FENCED.findall(text)).replace("\\\n", " ")
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^(?:\$ )?(engram .*)$", in_blocks, re.MULTILINE)
    return lines + [" ".join(words.split()) for words in re.findall(r"`(engram \w+\s[^`]*)`", outside)]


COMMANDS = sorted({(name_of(path), command) for path in PAGES for command in commands_of(path)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_can_be_given(page: str, command: str) -> None:
    """Its subcommand and its options exist; nothing is run."""
    group = typer.main.get_command(app)
    words = shlex.split(command, comments=True)[1:]
    context = group.make_context("engram", words, obj=words)
    while hasattr(group, "resolve_command"):
        name, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        context = group.make_context(name, rest, parent=context)


def test_a_command_with_a_mistake_is_found() -> None:
    for mistake in ("engram walk", "engram run split-mnist --trails 3", "engram data fetsh"):
        with pytest.raises(Exception, match=r"No such (command|option)"):
            test_a_command_can_be_given("", mistake)


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(path)} names make {target}"


def test_tests_that_a_page_names_exist() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    defined = {name for text in files.values() for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`(test_\w+_\w+)`", text))
        assert named <= defined, f"{name_of(page)} names {sorted(named - defined)}"
        for path in re.findall(r"`((?:src|tests|tools|benchmarks|examples)/[\w./-]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
        for link in re.findall(r"\]\((?!https?:|#|data:)([^)#\s]+)", text):
            assert (page.parent / link).exists(), f"{name_of(page)} links to {link}"


# --- the site, by its sources; `test_site.py` looks at its pages


def test_the_sources_of_the_reference_name_every_public_name() -> None:
    reference = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    assert [name for name in engram.__all__ if not re.search(rf"\bengram\.{name}\b", reference)] == []


def test_the_menu_of_the_site_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    sources = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]
    pages = {path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in sources}
    assert pages == set(re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE))


# --- examples


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_says_what_it_shows_and_a_guide_names_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", ":"))
    guides = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "guides").glob("*.md")]
    assert any(f"examples/{path.name}" in guide for guide in guides), f"no guide names examples/{path.name}"
