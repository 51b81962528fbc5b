"""Damaged settings, in files and typed, are refused in one sentence or read right."""

from __future__ import annotations

import tempfile
import time
import tomllib
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders import refusal
from damage import JSON_VALUES, TOML_VALUES, damaged_bytes, damaged_json, damaged_toml, fuzz, read_or_refuse
from engram import preset
from engram.cli.run import configs_of
from engram.common.errors import check_choice, printable, reason, shortened
from engram.config.presets import load_config, parse_setting
from engram.config.settings import Config, from_dict
from engram.runs.store import parse_condition

VALID = preset("split-mnist", "dhp+online-ewc", trials=2, max_samples=100)
TYPED = ("", "=", "!=", "<", ">=", "=>", " = ", "none", "null", "method", "epochs", "x", "é", "\x1b[31m", "9" * 5000)
SETTINGS = ("epochs=3", "eta=0.5", "hidden=[3, 4]", "alpha=uniform", "learn_eta=false", "max_samples=null")
CONDITIONS = ("strength>=0.5", "method!=si", "hidden = [256, 256]", "max_samples=none")


def check(config: Config) -> None:
    """It can be written and read again."""
    assert from_dict(tomllib.loads(config.to_toml())) == config
    assert all(type(width) is int for width in config.hidden)


@pytest.mark.parametrize("ending", ["toml", "json"])
@fuzz
@given(data=st.data())
def test_damaged_settings_file(ending: str, data: st.DataObject) -> None:
    damaged = damaged_toml(VALID.to_toml().encode()) if ending == "toml" else damaged_json(VALID.to_json().encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config.{ending}"
        path.write_bytes(data.draw(damaged))
        found = read_or_refuse(lambda: load_config(path))
    if found is not None:
        check(found)


@st.composite
def typed(draw: st.DrawFn, valid: tuple[str, ...]) -> str:
    """A name, a comparison and a value as they might be typed."""
    text = draw(st.sampled_from(valid))
    if draw(st.booleans()):
        return draw(damaged_bytes(text.encode())).decode(errors="surrogateescape")
    name = text[: len(text) - len(text.lstrip("abcdefghijklmnopqrstuvwxyz_"))]
    parts = [st.just(name) | st.sampled_from(TYPED), st.just("=") | st.sampled_from(TYPED)]
    parts.append(st.sampled_from((*TYPED, *JSON_VALUES, *TOML_VALUES)) | st.text(max_size=20))
    return "".join(draw(part) for part in parts)


@fuzz
@given(text=typed(SETTINGS))
def test_damaged_setting_on_the_command_line(text: str) -> None:
    for config in read_or_refuse(lambda: configs_of("split-mnist", "si,dhp+si", parse_setting(text))) or ():
        check(config)


@fuzz
@given(text=typed(CONDITIONS))
def test_damaged_condition_on_the_command_line(text: str) -> None:
    condition = read_or_refuse(lambda: parse_condition(text))
    assert condition is None or condition.value is None or isinstance(condition.value, int | float | str | list)


# --- found by earlier searches


def test_values_in_sentences_are_short_and_printable() -> None:
    assert shortened("a" * 10**6) == "'" + "a" * 78 + "…"
    assert shortened("\x1b[2J\n") == repr("\x1b[2J\n")
    assert shortened(10**5000) == "a int that cannot be printed"
    assert shortened([0] * 10**6)[-1] == "…"
    assert printable("a\x1b[31m\ud800") == "a\\x1b[31m\\ud800"
    assert reason(KeyError("x" * 1000)) == "it has no '" + "x" * 78 + "…"
    assert reason(ValueError("First. Second.\nThird.")) == "First"
    assert reason(ValueError()) == "ValueError"


def test_word_of_megabytes_is_refused_at_once() -> None:
    started = time.process_time()
    assert len(refusal(check_choice, "method", "dhp" * 10**7, ("dhp", "si"))) < 200
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = 0x" + "f" * 5000, "seed must be a whole number"),  # could be read, but not written again
        ("xi = 0x" + "f" * 5000, "xi must be a number"),
        ("hidden = [0x" + "f" * 5000 + "]", "hidden must be a list"),
        ('dataset = "' + "x" * 5000 + '"', "there is no dataset"),
        ('learn_eta = "\\u001b[31m"', "learn_eta must be true or false"),
        ("a" + ".a" * 40_000 + " = 1", "larger than 16384 bytes"),  # took 20 s, and four times as long when doubled
        ("trials = 1000000000000", "at most 1000000"),  # would have been counted out in memory
        ("num_tasks = 1000000", "at most 10000"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'benchmark = "split-mnist"\nmethod = "dhp"\n{text}\n')
    started = time.process_time()
    assert words in refusal(load_config, path)
    assert time.process_time() - started < 1


def test_name_given_twice_in_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"benchmark": "split-mnist", "method": "dhp", "epochs": 1, "epochs": 2}')
    assert "twice" in refusal(load_config, path)
