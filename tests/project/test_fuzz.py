"""Damaged files of every kind are refused in one sentence or read right; and what the fuzzer found stays mended."""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_targets import TARGETS, Target
from fuzz_workers import SECONDS, Fault, Tally, damaged, feed, place_files, try_file

from dataset_files import FILE, assert_one_sentence
from engram import preset
from engram.common import files
from engram.common.errors import InputError, check_choice, printable, reason, shortened
from engram.common.files import parse_json, read_json
from engram.common.tensor_file import read_tensors, write_tensors
from engram.config import settings as config
from engram.config.settings import load_config
from engram.data import bounded, download, formats, matlab
from engram.data.bounded import gunzip
from engram.data.formats import parse_idx_labels, parse_svhn
from engram.data.matlab import read_arrays
from engram.engine import build
from engram.engine.checkpoint import FORMAT
from engram.runs import result as results
from engram.runs.result import read_run

FILES = {"page": 10, "command": 400, "run": 60, "selection": 60, "resume": 60, "model": 60, "idx": 200, "cifar": 200}


@cache
def made_of(name: str) -> Target:
    return TARGETS[name]()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_do_no_harm(name: str, tmp_path: Path) -> None:
    """A short portion of what `python tools/fuzz.py` does, in this process."""
    made = made_of(name)
    wrong = []
    for index in range(FILES.get(name, 80)):
        file, content = damaged(name, made, 20, index)
        place_files(tmp_path, made, file, content)
        started = time.process_time()
        _, reason = try_file(made, tmp_path, file)
        if reason or time.process_time() - started > SECONDS:
            wrong.append((index, reason or "too slow"))
    assert not wrong, wrong[0]


@pytest.mark.parametrize("name", TARGETS)
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    made = made_of(name)
    for file, content in list(made.files.items())[:4]:
        place_files(tmp_path, made, file, content)
        assert try_file(made, tmp_path, file) == (True, ""), file


def test_a_damaged_file_is_a_function_of_its_number() -> None:
    made = made_of("config")
    assert damaged("config", made, 0, 7) == damaged("config", made, 0, 7)
    assert len({damaged("config", made, 0, index)[1] for index in range(50)}) > 40


# --- the fuzzer itself sees every kind of fault


def _refuse(sentence: str) -> None:
    raise InputError(sentence)


def _hang() -> None:
    while True:
        pass


HARM: dict[str, tuple[Callable[[], Any], str]] = {
    "read": (lambda: None, ""),
    "refused": (lambda: _refuse("one sentence"), ""),
    "raises": (lambda: 1 // 0, "ZeroDivisionError"),
    "fills memory": (lambda: bytearray(2**31), "MemoryError"),
    "two sentences": (lambda: _refuse("Not one. But two."), "not one sentence"),
    "two lines": (lambda: _refuse("a line\nand another"), "not one sentence"),
    "colours": (lambda: _refuse("red \x1b[31m"), "not one sentence"),
    "endless": (lambda: _refuse("long" * 1000), "not one sentence"),
    "dies": (lambda: os._exit(7), "ended with 7"),
    "hangs": (_hang, "more than 0.5 s"),
}


def harmful() -> Target:
    """A parser with a fault for each of its files."""
    return Target(dict.fromkeys(HARM, b"content"), lambda folder, name: HARM[name][0]())


@pytest.mark.slow
def test_the_fuzzer_sees_every_kind_of_fault() -> None:
    names = [damaged("harmful", harmful(), 0, index)[0] for index in range(200)]
    indices = [names.index(name) for name in HARM]
    news = list(feed("harmful", harmful, 0, indices, seconds=0.5))
    found = {fault.index: fault.reason for fault in news if isinstance(fault, Fault)}
    for index, (name, (_, expected)) in zip(indices, HARM.items(), strict=True):
        assert (index in found) == bool(expected), name
        assert expected in found.get(index, ""), name
    assert sum(count for count in news if isinstance(count, int)) == len(indices)
    assert isinstance(news[-1], Tally)


# --- what the fuzzer found, and limits on what is declared


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as error:
        read()
    sentence = str(error.value)
    assert sentence.isprintable()
    assert len(sentence) < 1000
    assert "Error(" not in sentence
    return sentence


def test_a_value_in_a_sentence_is_short_and_moves_no_cursor() -> None:
    assert shortened("a" * 10**6) == "'" + "a" * 78 + "…"
    assert shortened("\x1b[2J\n") == repr("\x1b[2J\n")
    assert shortened(10**5000) == "a int that cannot be printed"
    assert shortened([0] * 10**6)[-1] == "…"
    assert printable("a\x1b[31m\ud800") == "a\\x1b[31m\\ud800"
    assert reason(KeyError("x" * 1000)) == "it has no '" + "x" * 78 + "…"
    assert reason(ValueError("First. Second.\nThird.")) == "First"
    assert reason(ValueError()) == "ValueError"


def test_a_word_of_megabytes_is_refused_at_once() -> None:
    started = time.process_time()
    assert len(refusal(lambda: check_choice("method", "dhp" * 10**7, ("dhp", "si")))) < 200
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
def test_settings_that_cannot_be_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'benchmark = "split-mnist"\nmethod = "dhp"\n{text}\n')
    started = time.process_time()
    assert words in refusal(lambda: load_config(path))
    assert time.process_time() - started < 1


def test_a_network_beyond_memory_is_refused_before_it_is_made() -> None:
    wide = preset("split-mnist", "dhp", hidden=[2**20, 2**20])
    assert "1048576" in refusal(lambda: build.build_model(wide, 0, (1, 28, 28), 10))


def test_a_name_twice_in_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"benchmark": "split-mnist", "method": "dhp", "epochs": 1, "epochs": 2}')
    assert "twice" in refusal(lambda: load_config(path))


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_ITEMS", 100)
    assert parse_json("[" + "[]," * 98 + "[]]") == [[]] * 99
    for text in ("[" + "[]," * 100 + "[]]", "[" + "{}," * 100 + "{}]", "[" + '"ab",' * 100 + '"ab"]'):
        assert "more than 100" in refusal(lambda text=text: parse_json(text))
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)
    assert "larger than" in refusal(lambda: read_json(path))


def test_dynamics_are_bounded_before_they_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of("run")
    place_files(tmp_path, made, "si/dynamics.csv", made.files["si/dynamics.csv"] + b"\n" * 1_000_001)
    assert "1000000 rows" in refusal(lambda: read_run(tmp_path))
    monkeypatch.setattr(results, "MAX_CSV_BYTES", 1000)
    assert "larger than 1000 bytes" in refusal(lambda: read_run(tmp_path))


def changed(name: str, file: str, change: Callable[[Any], None], folder: Path) -> Path:
    """The folder of a target, with one of its JSON files changed."""
    made = made_of(name)
    content = json.loads(made.files[file])
    change(content)
    place_files(folder, made, file, json.dumps(content).encode())
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["accuracy"][0][0].__setitem__(0, 7.5), "[0, 1]"),
        (lambda c: c["accuracy"][0][0].__setitem__(0, 10**400), "damaged"),
        (lambda c: c["accuracy"][0].__setitem__(0, [0]), "damaged"),
        (lambda c: c["untrained"][0].__setitem__(0, -1), "[0, 1]"),
        (lambda c: c.update(diverged=[{"trial": "0", "task": 0, "step": 0}]), "diverged"),
        (lambda c: c.update(diverged=[{"trial": 0, "task": 0, "x" * 5000: 0}]), "diverged"),
        (lambda c: c["data"][0].update(train="60"), "data"),
        (lambda c: c["data"][0].update(name="\x1b[2J"), "data"),
    ],
)
def test_results_that_cannot_be_are_refused(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    folder = changed("run", "si/accuracy.json", change, tmp_path)
    assert words in refusal(lambda: read_run(folder))


@pytest.mark.parametrize("methods", [["si", "si"], ["si", ["dhp"]], [], ["../si"]])
def test_a_run_of_methods_that_cannot_be_is_refused(tmp_path: Path, methods: list[Any]) -> None:
    folder = changed("run", "run.json", lambda c: c.update(methods=methods), tmp_path)
    assert "damaged" in refusal(lambda: read_run(folder))


def test_a_method_in_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    made = made_of("run")
    place_files(tmp_path, made, "si/config.toml", made.files["dhp+si/config.toml"])
    assert "another method" in refusal(lambda: read_run(tmp_path))


def test_a_cell_of_megabytes_is_refused(tmp_path: Path) -> None:
    made = made_of("run")
    content = made.files["si/dynamics.csv"] + b"0,0,0,0," + b"1" * 200_000 + b",1,1,1\n"
    place_files(tmp_path, made, "si/dynamics.csv", content)
    assert "field" in refusal(lambda: read_run(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("device"), "device"),
        (lambda c: c.update(device=10**400), "device"),
        (lambda c: c.update(device=[0]), "device"),
        (lambda c: c.update(max_stack="\ud800"), "at least one model"),
        (lambda c: c.update(log=[0] * 5000), "log"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    folder = changed("resume", "run.json", change, tmp_path)
    assert words in refusal(lambda: made_of("resume").read(folder, "run.json"))


SOUND = [0, 1, [0.1, 0.1], [], None]  # the outcome of trial 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"place": [0, "x", 0, 0.0, 0, 0]}, "'x'"),
        ({"place": [99, 0, 0, 0.0, 0, 0]}, "99"),
        ({"place": [0, 0, 0, 1e300, 0, 0]}, "1e+300"),
        ({"place": [0, 1, 0, 0.0, 0, 0]}, "no run can stand in epoch 2"),
        ({"place": [0, 0, 999, 0.0, 0, 0]}, "after piece 999"),
        ({"place": [0, 0, 0, 0.0, 1, 0]}, "with such losses"),
        ({"place": [0, 0, 0, 0.0, 0, 99]}, "dynamics."),
        ({"finished": 1}, "1 does not say"),
        ({"outcomes": [[0, 0, [0.1], [], None], SOUND]}, "trial 0"),
        ({"outcomes": [[0, 0, [0.1, 0.1], [["0.5"]], None], SOUND]}, "trial 0"),
        ({"outcomes": [[0, 0, [0.1, 7.0], [], None], SOUND]}, "[0, 1]"),
        ({"outcomes": [[0, 0, [0.1, 0.1], [[0.5] * 3], None], SOUND]}, "trial 0"),
        ({"outcomes": [[0, 0, [0.1, 0.1], [], ["x", 0]], SOUND]}, "diverged"),
        ({"outcomes": [[9, 0, [0.1, 0.1], [], None], SOUND]}, "another stack"),
        ({"outcomes": []}, "another stack"),
    ],
)
def test_a_forged_checkpoint_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """Its checksum is right, since anybody can work it out."""
    made = made_of("checkpoint")
    ((name, content),) = made.files.items()
    (tmp_path / name).write_bytes(content)
    header, tensors = read_tensors(tmp_path / name, "checkpoint", FORMAT)
    write_tensors(tmp_path / name, "checkpoint", FORMAT, header | change, tensors)
    assert words in refusal(lambda: made.read(tmp_path, name))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("losses.0", torch.zeros(2, 999)), ("losses.0", torch.zeros(3)), ("records", torch.zeros(4)), ("0.model.x", None)],
)
def test_a_checkpoint_with_forged_tensors_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor | None) -> None:
    made = made_of("checkpoint")
    ((file, content),) = made.files.items()
    (tmp_path / file).write_bytes(content)
    header, tensors = read_tensors(tmp_path / file, "checkpoint", FORMAT)
    assert name in tensors or tensor is None
    forged = tensors | {name: torch.zeros(1) if tensor is None else tensor}
    write_tensors(tmp_path / file, "checkpoint", FORMAT, header, forged)
    refusal(lambda: made.read(tmp_path, file))


@pytest.mark.parametrize("setting", ["x" * 100_000, [0] * 10_000, "\x1b[31m"])
def test_a_model_of_other_settings_is_refused_in_brief(tmp_path: Path, setting: Any) -> None:
    made = made_of("model")
    path = tmp_path / "model.safetensors"
    path.write_bytes(made.files[path.name])
    header, tensors = read_tensors(path, "model", 1)
    header["penalty"]["settings"]["protect"] = setting
    write_tensors(path, "model", 1, header, tensors)
    assert "protect=" in refusal(lambda: made.read(tmp_path, path.name))


@pytest.mark.parametrize(
    "modules",
    [
        {"head": {"\n": True}},
        {"head": {"x" * 100_000: 1}},
        {"head": {"eta_range": "y" * 100_000}},
        {"z" * 9999: {"a": 1}},
    ],
    ids=["newline", "long name", "long value", "long module"],
)
def test_modules_of_other_settings_are_refused_in_brief(tmp_path: Path, modules: dict[str, Any]) -> None:
    made = made_of("model")
    path = tmp_path / "model.safetensors"
    path.write_bytes(made.files[path.name])
    header, tensors = read_tensors(path, "model", 1)
    header["modules"] |= modules
    write_tensors(path, "model", 1, header, tensors)
    assert "is of another model" in refusal(lambda: made.read(tmp_path, path.name))


def idx_bomb() -> bytes:
    """Labels that would be eight times as large in memory."""
    packer = zlib.compressobj(9, wbits=31)
    packed = packer.compress(struct.pack(">2I", 2049, 20 * 2**20))
    return packed + b"".join(packer.compress(bytes(2**20)) for _ in range(20)) + packer.flush()


def test_labels_are_counted_before_memory_is_taken() -> None:
    content = gunzip(idx_bomb(), FILE)
    with pytest.raises(InputError) as error:
        parse_idx_labels(content, FILE)
    assert_one_sentence(error, "20971520 labels", "10000000")


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<2I", kind, len(data)) + data + bytes(-len(data) % 8 if kind != 15 else 0)


def variable(sizes: tuple[int, ...], numbers: bytes = b"", kind: int = 2) -> bytes:
    flags, shape = element(6, struct.pack("<2I", 9, 0)), element(5, struct.pack(f"<{len(sizes)}I", *sizes))
    return element(14, flags + shape + element(1, b"X") + element(kind, numbers))


MAT = b" " * 124 + b"\0\1IM"


@pytest.mark.parametrize("sizes", [(0, *(2**32 - 1,) * 3), (*(2**32 - 1,) * 15, 0)])
def test_an_empty_variable_of_monstrous_sizes_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as error:
        parse_svhn(MAT + variable(sizes), FILE)
    assert_one_sentence(error, "4294967295")


def test_many_small_bombs_are_refused_like_one_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_BYTES", 10_000)
    packed = element(15, zlib.compress(variable((1, 4000), bytes(4000))))
    assert read_arrays(MAT + packed * 2, FILE)["X"].size == 4000
    with pytest.raises(InputError) as error:
        read_arrays(MAT + packed * 3, FILE)
    assert_one_sentence(error, "10000 bytes")


def test_variables_without_end_are_refused() -> None:
    assert read_arrays(MAT + variable((1, 1), b"a") * 100, FILE)
    with pytest.raises(InputError) as error:
        read_arrays(MAT + variable((1, 1), b"a") * 101, FILE)
    assert_one_sentence(error, "100 variables")


# --- the page about it


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_promise_names_a_test_that_there_is() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    there = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py")), re.M))
    assert named - there == set()
    assert len(named) > 20


@pytest.mark.parametrize(
    "limit",
    [
        *(bounded.MAX_BYTES, matlab.MAX_VARIABLES, formats.MAX_LABELS, download.MAX_MEMBERS, config.MAX_BYTES),
        *(files.MAX_JSON_BYTES, files.MAX_JSON_ITEMS, results.MAX_CSV_BYTES, results.MAX_CSV_ROWS),
        *(*config.MOST.values(), build.MAX_WEIGHTS),
    ],
)
def test_the_limits_on_the_page_are_those_in_force(limit: int) -> None:
    assert f"{limit:,}" in PAGE


def test_nothing_is_unpickled() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & set(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("yaml", "load")}, path
