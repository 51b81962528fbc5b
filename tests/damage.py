"""Damaged files, made by Hypothesis from valid ones, and what every reader must do with them.

A reader returns a value or raises InputError with one printable sentence; never another exception, never more than
SECONDS of computing or MEMORY beyond what the process already uses. A long search: `pytest --hypothesis-profile=long`.
"""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings

from builders import assert_one_sentence
from engram import InputError
from engram.common.tensor_file import read_tensors, write_tensors

SECONDS, MEMORY = 5.0, 2**30
T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

EXTREMES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DEEP = 20_000
JSON_VALUES = (
    *("null", "true", "false", "0", "-1", "1", "0.5", "1.5", "-0.0", "1e308", "1e999", "-1e999", "NaN", "-Infinity"),
    *(str(2**31), str(2**63), str(2**64), str(10**30), "9" * 400, "9" * 5000),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"\\n\\u001b[31m"', '"<script>alert(1)</script>"', '"../../x"', '"dhp"'),
    *("[]", "{}", "[[]]", "[null]", '{"a": 1}', "[1, [2, 3]]", '"' + "x" * 100_000 + '"', "[" * 50 + "]" * 50),
    *("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" + "0," * 5000 + "0]"),
)
TOML_VALUES = (
    *("true", "0", "-1", "0.5", "inf", "nan", "1e400", "0x" + "f" * 30_000, "9" * 5000, str(2**63), '""', '"x"', "''"),
    *('"""\nx"""', '"\\u0000"', '"\\uD800"', '"\x1b[31m"', "[]", "[[]]", "[1, true]", "{}", "{a.b.c = 1}", "07:32:00"),
    *("[" * DEEP, "{a=" * 400 + "1" + "}" * 400, '"' + "x" * 100_000 + '"', "", "#", "1 2", "1979-05-27T07:32:00Z"),
)
LINES = ("[epochs]", "[[hidden]]", "a" + ".a" * 5000 + " = 1", "epochs.first = 1", "= 1", '"" = 1', "\x00", "\r", "é")
CELLS = ("", "nan", "inf", "-1", "1e999", "9" * 5000, "x" * 140_000, '"', '"a\nb"', "\x00", "é", "1,2", "0x1", "mean")
WORDS = ("x", "", "\n", "format", "label", "dhp", "0.model.x", "terms.x.y", "losses.99", "x" * 10_000)

# Examples are files: many are slow to make and to write, and none has a deadline of its own but SECONDS.
PATIENT = settings(deadline=None, suppress_health_check=list(HealthCheck))


def fuzz(test: Test) -> Test:
    """A slow test, with as many damaged files as the profile says."""
    return pytest.mark.slow(PATIENT(test))


def fuzz_a_little(test: Test) -> Test:
    """`fuzz` with a tenth of the files, for what is slow to read."""
    return pytest.mark.slow(settings(PATIENT, max_examples=max(1, PATIENT.max_examples // 10))(test))


def read_or_refuse(read: Callable[[], T]) -> T | None:
    """What was read, or None where it was refused in one sentence."""
    start = time.process_time()
    try:
        with limited_memory():
            found = read()
    except InputError as error:
        assert_one_sentence(str(error))
        found = None
    assert time.process_time() - start < SECONDS
    return found


@contextmanager
def limited_memory() -> Iterator[None]:
    """An allocation that would take the process beyond MEMORY more than it has now fails, where that can be limited."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(pages.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- bytes


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """One to three blind changes, half of them near the start, where headers are."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, min(len(data), 256)) | st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((1, 4, 8, 64, 512, 4096))))
        kind = draw(st.sampled_from(("flip", "extreme", "truncate", "extend", "repeat", "remove", "replace")))
        if kind == "flip" and start < end:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "extreme":
            size = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from(EXTREMES)) % 2 ** (8 * size)
            start -= start % size
            data[start : start + size] = number.to_bytes(size, draw(st.sampled_from(("big", "little"))))
        elif kind == "truncate":
            del data[start:]
        elif kind == "extend":
            data += draw(st.binary(min_size=1, max_size=100) | st.just(bytes(data)))
        elif kind == "repeat":
            data[end:end] = data[start:end]
        elif kind == "remove":
            del data[start:end]
        elif kind == "replace":
            data[start:end] = draw(st.binary(max_size=end - start))
    return bytes(data)


@st.composite
def damaged_gzip(draw: st.DrawFn, content: bytes) -> bytes:
    """Damage behind a right checksum, or to the compressed bytes."""
    if draw(st.booleans()):
        return draw(damaged_bytes(content))
    return gzip.compress(draw(damaged_bytes(gzip.decompress(content))), compresslevel=1, mtime=0)


@st.composite
def damaged_mat(draw: st.DrawFn, content: bytes) -> bytes:
    """Damage to a MATLAB file, or to what is compressed in one of its elements."""
    elements = []
    position = 128
    while position < len(content):
        kind, size = struct.unpack_from("<2I", content, position)
        elements.append((kind, content[position + 8 : position + 8 + size]))
        position += 8 + size
    if draw(st.booleans()) or all(kind != 15 for kind, _ in elements):
        return draw(damaged_bytes(content))
    chosen = draw(st.integers(0, len(elements) - 1))
    elements[chosen] = (15, zlib.compress(draw(damaged_bytes(zlib.decompress(elements[chosen][1]))), 1))
    elements += elements[:1] * draw(st.sampled_from((0, 0, 1, 2000)))
    return content[:128] + b"".join(struct.pack("<2I", kind, len(data)) + data for kind, data in elements)


# --- text


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """One value replaced by any other, removed or repeated, or a key renamed or given twice; or bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    return draw(damaged_tree(json.loads(content))).encode(errors="surrogatepass")


@st.composite
def damaged_tree(draw: st.DrawFn, tree: Any) -> str:
    """JSON text of the tree, which is changed."""
    positions = list(_positions(tree))
    among = draw(st.sampled_from((positions[:40], positions)))  # most of a tree are the numbers at its leaves
    parent, key = draw(st.sampled_from(among)) if among else ([tree], 0)
    value = draw(st.sampled_from(JSON_VALUES) | json_values().map(json.dumps))
    kind = draw(st.sampled_from(("replace", "replace", "remove", "repeat", "rename", "twice")))
    if kind == "remove":
        del parent[key]
    elif kind == "repeat" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(WORDS) | st.text(max_size=10))] = parent.pop(key)
    elif kind == "twice" and isinstance(parent, dict):
        name = f"{json.dumps(key)}: "
        return json.dumps(tree).replace(name, f"{name}{value}, {name}", 1)
    else:
        parent[key] = "replace me"
    return json.dumps(tree).replace('"replace me"', value)


def json_values() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))


def _positions(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value's position as its container and its key; upper ones first."""
    level = [tree] if isinstance(tree, dict | list) else []
    while level:
        found = [(node, key) for node in level for key in (node if isinstance(node, dict) else range(len(node)))]
        yield from found
        level = [node[key] for node, key in found if isinstance(node[key], dict | list)]


@st.composite
def damaged_toml(draw: st.DrawFn, content: bytes) -> bytes:
    """A line `name = value` with another value or name, removed, repeated, or with another line before it; or bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    lines = content.decode().splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    name, _, value = lines[at].partition(" = ")
    kind = draw(st.sampled_from(("value", "value", "name", "remove", "insert")))
    if kind == "value":
        lines[at] = f"{name} = {draw(st.sampled_from(TOML_VALUES) | json_values().map(json.dumps))}"
    elif kind == "name":
        lines[at] = f"{draw(st.sampled_from((*WORDS, 'seed', 'a.b')) | st.text(max_size=10))} = {value}"
    elif kind == "remove":
        del lines[at]
    else:
        lines.insert(at, draw(st.sampled_from((lines[at], *LINES))))
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


@st.composite
def damaged_csv(draw: st.DrawFn, content: bytes) -> bytes:
    """A cell replaced, added or removed; or bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = draw(st.sampled_from(rows))
    at = draw(st.integers(0, len(row) - 1))
    kept = draw(st.sampled_from(([], [], row[at : at + 1])))
    row[at : at + 1] = [*draw(st.lists(st.sampled_from(CELLS) | st.text(max_size=10), max_size=1)), *kept]
    return "\n".join(map(",".join, rows)).encode(errors="surrogatepass")


# --- tensors


@st.composite
def damaged_tensors(draw: st.DrawFn, path: Path, kind: str, format: int) -> bytes:
    """A file of `write_tensors` with its bytes, its header or a tensor changed; the last two with a right checksum."""
    content = path.read_bytes()
    how = draw(st.sampled_from(("bytes", "safetensors", "header", "header", "tensors")))
    if how == "bytes":
        return draw(damaged_bytes(content))
    if how == "safetensors":
        (size,) = struct.unpack_from("<Q", content)
        header = draw(damaged_tree(json.loads(content[8 : 8 + size]))).encode(errors="surrogatepass")
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    header, tensors = read_tensors(path, kind, format)
    if how == "header":
        try:
            header = json.loads(draw(damaged_tree(header)))
        except (ValueError, RecursionError):
            return draw(damaged_bytes(content))
    else:
        name = draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(name)
        changed = {
            "remove": {},
            "rename": {draw(st.sampled_from(WORDS)): tensor},
            "dtype": {name: tensor.double()},
            "shape": {name: tensor.reshape(1, *tensor.shape).contiguous()},
            "nan": {name: (tensor.double() * float("nan")).to(tensor.dtype)},
        }
        tensors |= changed[draw(st.sampled_from(sorted(changed)))]
    forged = path.with_name("forged.safetensors")
    try:
        write_tensors(forged, kind, format, header if isinstance(header, dict) else {"header": header}, tensors)
        return forged.read_bytes()
    except (ValueError, TypeError, RecursionError):  # the header is no JSON
        return draw(damaged_bytes(content))
    finally:
        forged.unlink(missing_ok=True)
