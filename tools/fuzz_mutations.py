"""Damage done to sound files: blindly to their bytes, and knowingly to the fields of each format."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

Mutate = Callable[[bytes, random.Random], bytes]

EXTREMES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DEEP = 20_000
BOMB_BYTES = 300 * 2**20  # more than any content may have

# Values as JSON writes them, for the place of any other
JSON_VALUES = (
    *("null", "true", "false", "0", "-1", "1", "0.5", "1.5", "-0.0", "1e308", "1e999", "-1e999", "NaN", "-Infinity"),
    *(str(2**31), str(2**63), str(2**64), str(10**30), "9" * 400, "9" * 5000),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"\\n\\u001b[31m"', '"<script>alert(1)</script>"', '"../../x"', '"dhp"'),
    *("[]", "{}", "[[]]", "[null]", '{"a": 1}', "[1, [2, 3]]", '"' + "x" * 100_000 + '"', "[" * 50 + "]" * 50),
    *("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" + "0," * 5000 + "0]"),
)
TOML_VALUES = (
    *("true", "0", "-1", "1", "0.5", "inf", "nan", "-inf", "1e400", "0x" + "f" * 30_000, "0b1", "9" * 5000),
    *(
        str(2**31),
        str(2**63),
        str(2**64),
        '""',
        '"x"',
        "''",
        '"""\nx"""',
        '"\\u0000"',
        '"\\uD800"',
        '"dhp"',
        '"\x1b[31m"',
    ),
    *("[]", "[[]]", "[1, true]", "{}", "{a = 1}", "{a.b.c = 1}", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"),
    *("[" * DEEP, "[" * 50 + "]" * 50, "{a=" * 400 + "1" + "}" * 400, '"' + "x" * 100_000 + '"', "", "#", "1 2"),
)
TOML_LINES = ("[epochs]", "[[hidden]]", "a" + ".a" * 5000 + " = 1", "epochs.first = 1", "= 1", '"" = 1', "\x00", "\r")
CSV_CELLS = (
    "",
    "nan",
    "inf",
    "-1",
    "1e999",
    "9" * 5000,
    "x" * 140_000,
    '"',
    '"a\nb"',
    "\x00",
    "é",
    "1,2",
    "0x1",
    "1_0",
)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to three blind changes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(BLIND)(data, rng)
    return bytes(data)


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _substitute(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        data[_place(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.choice((bytes(rng.randrange(1, 9)), rng.randbytes(rng.randrange(1, 5000)), bytes(data)))


def _duplicate(data: bytearray, rng: random.Random) -> None:
    start, end = _block(data, rng)
    data[end:end] = data[start:end]


def _remove(data: bytearray, rng: random.Random) -> None:
    start, end = _block(data, rng)
    del data[start:end]


def _swap(data: bytearray, rng: random.Random) -> None:
    (a, b), (c, d) = sorted((_block(data, rng), _block(data, rng)))
    if b <= c:
        data[a:d] = data[c:d] + data[b:c] + data[a:b]


def _extreme(data: bytearray, rng: random.Random) -> None:
    """A whole number of 1, 2, 4 or 8 bytes, where a header may have one."""
    size = rng.choice((1, 2, 4, 4, 4, 8))
    start = _place(data, rng) // size * size
    value = rng.choice(EXTREMES) % 2 ** (8 * size)
    data[start : start + size] = value.to_bytes(size, rng.choice(("big", "little")))


def _place(data: bytearray, rng: random.Random) -> int:
    """Anywhere, but half of the time near the start, where headers are."""
    if not data:
        return 0
    return rng.randrange(min(len(data), 256)) if rng.random() < 0.5 else rng.randrange(len(data))


def _block(data: bytearray, rng: random.Random) -> tuple[int, int]:
    start = _place(data, rng)
    return start, min(len(data), start + rng.choice((1, 4, 8, 64, 512, 4096)))


BLIND = (_flip, _substitute, _truncate, _extend, _duplicate, _remove, _swap, _extreme)


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """A value, a key or an entry of the tree; or bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    return mutate_tree(json.loads(content), rng).encode(errors="surrogatepass")


def mutate_tree(tree: Any, rng: random.Random) -> str:
    """JSON text of the tree with something in it exchanged, removed, repeated, renamed or moved."""
    nodes = list(_nodes(tree))
    among = nodes[:40] if rng.random() < 0.5 else nodes  # most of a tree are the numbers at its leaves
    parent, key = rng.choice(among) if nodes else ([tree], 0)
    raw = rng.choice(JSON_VALUES)
    what = rng.randrange(8)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif what == 2:
        other, place = rng.choice(nodes) if nodes else (parent, key)
        parent[key], other[place] = other[place], parent[key]
        if _is_cyclic(tree):  # a branch that was moved into itself
            return raw
    elif what == 3 and isinstance(parent, dict):
        parent[rng.choice(("x" * 10_000, "", "\n", "format", "label", "dhp"))] = parent.pop(key)
    elif what == 4 and isinstance(parent, dict):  # the same key twice
        return json.dumps(tree).replace(f"{json.dumps(key)}: ", f"{json.dumps(key)}: {raw}, {json.dumps(key)}: ", 1)
    else:
        parent[key] = "exchange me"
    return json.dumps(tree).replace('"exchange me"', raw)


def _nodes(tree: Any) -> Any:
    """Every place of a value, as its container and its key; upper ones first."""
    level = [tree]
    while level:
        found = [(node, key) for node in level for key in (node if isinstance(node, dict) else range(len(node)))]
        yield from found
        level = [node[key] for node, key in found if isinstance(node[key], dict | list)]


def _is_cyclic(tree: Any) -> bool:
    try:
        json.dumps(tree)
    except (ValueError, RecursionError):
        return True
    return False


def mutate_toml(content: bytes, rng: random.Random) -> bytes:
    """Lines of `name = value` with other values, names and company; or bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    lines = content.decode().splitlines()
    place = rng.randrange(len(lines))
    what = rng.randrange(6)
    if what == 0:
        lines.insert(place, rng.choice((lines[place], *TOML_LINES)))
    elif what == 1:
        del lines[place]
    elif what == 2:
        lines[place] = re.sub("^[a-z_]+", rng.choice(("x", "x" * 10_000, '"a.b"', "seed", "a.b", "é")), lines[place])
    else:
        lines[place] = f"{lines[place].split(' = ')[0]} = {rng.choice(TOML_VALUES)}"
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def mutate_csv(content: bytes, rng: random.Random) -> bytes:
    """Cells exchanged, added or taken away; or bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    what = rng.randrange(5)
    if what == 0:
        row.insert(place, rng.choice(CSV_CELLS))
    elif what == 1:
        del row[place]
    else:
        row[place] = rng.choice(CSV_CELLS)
    return "\n".join(map(",".join, rows)).encode()


def mutate_gzip(content: bytes, rng: random.Random) -> bytes:
    """What is compressed, so that the damage is behind a right checksum; or the compressed bytes; or a bomb."""
    choice = rng.random()
    if choice < 0.002:
        return _bomb(16 + zlib.MAX_WBITS)
    if choice < 0.4:
        return mutate_bytes(content, rng)
    return gzip.compress(mutate_bytes(gzip.decompress(content), rng), compresslevel=1, mtime=0)


def mutate_mat(content: bytes, rng: random.Random) -> bytes:
    """Bytes of the file, or what is compressed in its elements; or an element that is a bomb."""
    choice = rng.random()
    if choice < 0.002:
        bomb = _bomb(zlib.MAX_WBITS)
        return content[:128] + struct.pack("<2I", 15, len(bomb)) + bomb + content[128:]
    elements = []
    position = 128
    while position < len(content):
        kind, size = struct.unpack_from("<2I", content, position)
        elements.append((kind, content[position + 8 : position + 8 + size]))
        position += 8 + size
    if choice < 0.4 or all(kind != 15 for kind, _ in elements):
        return mutate_bytes(content, rng)
    chosen = rng.randrange(len(elements))
    kind, data = elements[chosen]
    elements[chosen] = (kind, zlib.compress(mutate_bytes(zlib.decompress(data), rng), 1))
    if rng.random() < 0.1:
        elements += [rng.choice(elements)] * rng.choice((1, 3, 2000))
    return content[:128] + b"".join(struct.pack("<2I", kind, len(data)) + data for kind, data in elements)


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Bytes; safetensors' own header; or Engram's, sealed again with the checksum that belongs to it."""
    from safetensors.torch import load, save

    from engram.common.tensor_file import _checksum

    choice = rng.random()
    if choice < 0.25:
        return mutate_bytes(content, rng)
    (size,) = struct.unpack_from("<Q", content)
    entries, values = json.loads(content[8 : 8 + size]), content[8 + size :]
    if choice < 0.5:
        header = mutate_tree(entries, rng).encode(errors="surrogatepass")
        return struct.pack("<Q", len(header)) + header + values
    tensors = load(content)
    described = json.loads(entries["__metadata__"]["engram"])
    described.pop("checksum")
    if choice < 0.65:
        _mutate_tensors(tensors, rng)
        text = json.dumps(described)
    else:
        text = mutate_tree(described, rng)
    try:
        header = json.loads(text)
        text = json.dumps({**header, "checksum": _checksum(header, tensors)})
    except (ValueError, TypeError, RecursionError):
        pass  # it is no table, or no JSON: it goes without
    return save(tensors, {"engram": text.encode(errors="replace").decode()})


def _mutate_tensors(tensors: dict[str, Any], rng: random.Random) -> None:
    """One of them gone, renamed, of another type, of another shape, or of other numbers."""
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    what = rng.randrange(5)
    if what == 1:
        tensors[rng.choice(("x", "", "0.model.x", "terms.x.y", "penalty.terms.9.anchor.x", "losses.99"))] = tensor
    elif what == 2:
        tensors[name] = tensor.double() if rng.random() < 0.5 else tensor.to(dtype=rng.choice(_types()))
    elif what == 3:
        tensors[name] = tensor.reshape(rng.choice(((-1,), (1, *tensor.shape), (*tensor.shape, 1)))).contiguous()
    elif what == 4:
        tensors[name] = (tensor.double() * rng.choice((-1, 0, float("nan"), float("inf"), 1e300))).to(tensor.dtype)


def _types() -> tuple[Any, ...]:
    import torch

    return (torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.complex64)


@cache
def _bomb(wbits: int) -> bytes:
    packer = zlib.compressobj(1, wbits=wbits)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(BOMB_BYTES >> 20)) + packer.flush()


TYPED = (
    *("", "=", "==", "!=", "<", ">=", "=>", " = ", "none", "null", "method", "epochs", "hidden", "x", "é", "\x1b[31m"),
    *("x" * 100_000, "9" * 400, "9" * 5000, "-0", "1_000", "0x10", "1e400", "NaN", "'", '"', "\x00", "\n", "%s", "{0}"),
)


def mutate_typed(content: bytes, rng: random.Random) -> bytes:
    """The name, the comparison or the value of `name=value` exchanged for others; or bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(content, rng)
    name, comparison, value = re.fullmatch(r"(\w+)(\W*?[=<>]+\s*)(.*)", content.decode()).groups()  # type: ignore[union-attr]
    what = rng.randrange(4)
    if what == 0:
        name = rng.choice((*TYPED, *JSON_VALUES))
    elif what == 1:
        comparison = rng.choice(TYPED)
    else:
        value = rng.choice((*TYPED, *JSON_VALUES, *TOML_VALUES))
    return (name + comparison + value).encode(errors="surrogatepass")


def mutate_index(content: bytes, rng: random.Random) -> bytes:
    """Bytes, half of the time sealed again with the checksum that belongs to them."""
    size = hashlib.sha256().digest_size
    hurt = mutate_bytes(content[:-size], rng)
    return hurt + (hashlib.sha256(hurt).digest() if rng.random() < 0.5 else content[-size:])


BY_ENDING: dict[str, Mutate] = {
    ".json": mutate_json,
    ".toml": mutate_toml,
    ".csv": mutate_csv,
    ".gz": mutate_gzip,
    ".mat": mutate_mat,
    ".safetensors": mutate_safetensors,
    ".set": mutate_typed,
    ".where": mutate_typed,
    ".sqlite": mutate_index,
}


def mutate(name: str, content: bytes, rng: random.Random) -> bytes:
    """A damaged copy of a file, in the way of its format."""
    ending = name[name.rfind(".") :] if "." in name else ""
    return BY_ENDING.get(ending, mutate_bytes)(content, rng)
