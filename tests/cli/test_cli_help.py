"""Help texts, the version, and what a command imports before it does anything."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from command import COMMANDS, Command, Finished, environment

import engram as package
from engram.cli.main import app
from engram.config.settings import SETTINGS

REPOSITORY = Path(__file__).parents[2]
SLOW = {"torch", "numpy", "scipy", "matplotlib", "pandas", "pooch", "pyarrow", "ray", "optuna", "sklearn"}
LOADED = """
import json, sys
from engram.cli.main import main
found, seen = [], set()
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        found.append((ended.code or 0, sorted(set(sys.modules) - seen)))
        seen.update(sys.modules)
print(json.dumps(found), file=sys.stderr)
"""


def loaded(commands: Sequence[str], *more: str) -> dict[str, tuple[int, set[str]]]:
    """How each `engram ...` ends, and the modules that none before it had imported, all in one other process."""
    words = [sys.executable, "-c", LOADED, json.dumps([[*command.split(), *more] for command in commands])]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", env=environment())
    found = json.loads(done.stderr.splitlines()[-1])
    assert "engram.cli.main" in found[0][1]
    return {command: (code, set(names)) for command, (code, names) in zip(commands, found, strict=True)}


def slow_of(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} & SLOW


# --- help


def test_help_imports_nothing_slow() -> None:
    found = loaded(["", "data", "runs", *COMMANDS], "--help")
    assert [code for code, _ in found.values()] == [0] * (3 + len(COMMANDS))
    assert {command: slow_of(names) for command, (_, names) in found.items() if slow_of(names)} == {}


def test_version_and_refused_arguments_import_nothing_slow() -> None:
    found = loaded(["--version", "rums", "run no-such-benchmark", "run --trials many"])
    assert [code for code, _ in found.values()] == [0, 2, 2, 2]
    assert {command: slow_of(names) for command, (_, names) in found.items() if slow_of(names)} == {}


def test_commands_that_read_results_do_without_pytorch(finished: Finished) -> None:
    found = loaded(["table", "runs list", "runs show"], str(finished[0]))
    for command, (code, names) in found.items():
        assert (code, slow_of(names) - {"numpy", "scipy"}) == (0, set()), command
        assert "scipy.stats" not in names, command


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_has_no_doubled_brackets_or_dots(command: str, engram: Command) -> None:
    usage = next(line for line in engram(*command.split(), "--help").out.splitlines() if "Usage:" in line)
    assert not any(doubled in usage for doubled in ("[[", "]]", "...}...", "...]..."))


def test_help_lists_every_command_with_its_first_sentence(engram: Command) -> None:
    lines = engram("--help").out.splitlines()
    first_words = {line.split()[1]: " ".join(line.split()[2:4]) for line in lines if len(line.split()) > 3}
    expected = {"run": "Run methods", "sweep": "Try many", "reproduce": "Run the", "table": "Print the"}
    expected |= {"figures": "Draw the", "report": "Write one", "data": "List, download", "runs": "List, show,"}
    assert {name: first_words.get(name) for name in expected} == expected


def test_unknown_command_is_refused_with_a_suggestion(engram: Command) -> None:
    assert engram.refusal("rums").startswith("engram: No such command 'rums'")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["data", "nonsense"], "nonsense"),
        (["data", "check", "mnits"], "mnits"),
        (["data", "fetch", "mnits"], "mnits"),
        (["data", "fetch"], "NAME"),
        (["data", "list", "--data", "no/such"], "no/such"),
        (["data", "check", "--data", "no/such"], "no/such"),
        (["table"], "DIR"),
        (["table", "no/such"], "no/such"),
        (["figures", "no/such"], "no/such"),
        (["report", "no/such"], "no/such"),
        (["table", ".", "--format", "latex"], "latex"),
        (["figures", ".", "--format", "png,gif"], "gif"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments_of_other_commands_are_refused(engram: Command, arguments: list[str], word: str) -> None:
    assert word in engram.refusal(*arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("arguments", [(), ("data",)])
def test_bare_command_shows_its_help(engram: Command, arguments: tuple[str, ...]) -> None:
    outcome = engram(*arguments)
    assert "Usage" in outcome.out + outcome.err
    assert outcome.err.strip() != "engram:"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_an_example(engram: Command, command: str) -> None:
    outcome = engram(*command.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example: engram {command}" in " ".join(outcome.out.split())


def test_every_command_is_tested() -> None:
    found = set()
    for name, command in typer.main.get_command(app).commands.items():
        found |= {f"{name} {inner}".strip() for inner in getattr(command, "commands", {"": command})}
    assert found == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    """In the README or a guide, and not only in the list that the command line shows."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs" / "guides").glob("*.md")]
    assert any(f"engram {command}" in page.read_text(encoding="utf-8") for page in pages)


def test_version(engram: Command) -> None:
    from engram import __version__

    outcome = engram("--version")
    assert (outcome.code, outcome.out) == (0, f"{__version__}\n")


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment(), check=True).stdout


def test_import_engram_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import engram; print(*sorted(set(sys.modules) - before))"
    assert [name for name in python(code).split() if name.startswith("engram")] == ["engram"]


def test_public_names_for_type_checkers_are_those_of_the_table() -> None:
    tree = ast.parse((REPOSITORY / "src" / "engram" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: str(n.module) for n in checked.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    modules = {name: module.rpartition(".")[0] for name, module in package._MODULES.items()}
    assert homes == package._HOME | modules


def test_every_public_name_exists() -> None:
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.slow
def test_folders_of_the_package_are_attributes() -> None:
    code = "import engram; print(engram.penalties.SI.__name__, engram.heads.__name__, hasattr(engram, 'nothing'))"
    assert python(code).split() == ["SI", "engram.nn.heads", "False"]
    with pytest.raises(AttributeError, match="module 'engram' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_the_settings_are_listed_with_what_they_may_be_and_their_defaults(engram: Command) -> None:
    listed = engram("run", "--help-settings").out
    for name in SETTINGS:
        assert re.search(rf"^  {name} ", listed, re.MULTILINE), name
    for line in (
        r"momentum +a number at least 0 and below 1  \[default: 0.0\]",
        r"head_init +linear or published  \[default: \"linear\"\]",
        r"hidden +a list of widths of at least 1  \[default: \[400, 400\]\]",
        r"trace_scale +a number above 0; or null",
    ):
        assert re.search(rf"^  {line}$", listed, re.MULTILINE), line
