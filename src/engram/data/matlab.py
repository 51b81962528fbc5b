"""Numeric arrays out of MATLAB files of version 5, as SVHN is published in."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram.common.errors import InputError
from engram.data import bounded
from engram.data.bounded import decompress

# Types of elements, NumPy's names of their numbers, classes and a flag of variables
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC = range(6, 16)
COMPLEX = 0x0800
MAX_VARIABLES = 100  # SVHN's files have two


def read_arrays(content: bytes, file: str) -> dict[str, NDArray[Any]]:
    """The real numeric variables of a file, as views of its bytes where it is not compressed.

    Read here and not by scipy, whose reader crashes the whole process on some damaged files (one byte, the
    type of a variable's numbers, is enough). After a header of 128 bytes come elements, each a variable or a
    compressed one.
    """
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(content[124:128])
    if order is None:
        raise InputError(f"{file} is not a MATLAB file of version 5")
    arrays: dict[str, NDArray[Any]] = {}
    size = 0
    for number, (kind, data) in enumerate(_elements(memoryview(content)[128:], order, file), start=1):
        if kind == COMPRESSED:
            variable = decompress(data, zlib.decompressobj(), file, "zlib")
            size += len(variable)
            kind, data = next(_elements(memoryview(variable), order, file), (0, data))
        if number > MAX_VARIABLES or size > bounded.MAX_BYTES:
            raise InputError(f"{file} holds more than {MAX_VARIABLES} variables or {bounded.MAX_BYTES} bytes of them")
        if kind == MATRIX and (named := _variable(data, order, file)):
            arrays.update([named])
    return arrays


def _elements(data: memoryview, order: str, file: str) -> Iterator[tuple[int, memoryview]]:
    """Each element's type and content, which follow upon each other as type, size, content and padding."""
    position = 0
    while position < len(data):
        if len(data) < position + 8:
            raise InputError(f"{file} is truncated, or has trailing bytes")
        kind, size = struct.unpack_from(f"{order}2I", data, position)
        start = position + 8
        padding = 0 if kind == COMPRESSED else -size % 8
        if kind >> 16:  # a content of up to four bytes, after a single word that holds both size and type
            kind, size, start = kind & 0xFFFF, kind >> 16, position + 4
            padding = -size % 4
        if size > len(data) - start:
            raise InputError(f"{file} is truncated: it declares {size} bytes where {len(data) - start} are left")
        yield kind, data[start : start + size]
        position = start + size + padding


def _variable(data: memoryview, order: str, file: str) -> tuple[str, NDArray[Any]] | None:
    """A variable's name and value, from its flags, sizes, name and numbers; None if it is no real array."""
    elements = list(islice(_elements(data, order, file), 4))
    if len(elements) < 4:
        return None
    (_, flags), (_, sizes), (_, name), (kind, numbers) = elements
    if kind not in NUMBERS or len(flags) != 8 or len(sizes) % 4 or not 8 <= len(sizes) <= 64:
        return None
    (flag,) = struct.unpack_from(f"{order}I", flags)
    if flag & 0xFF not in NUMERIC or flag & COMPLEX:
        return None
    shape = struct.unpack(f"{order}{len(sizes) // 4}I", sizes)
    dtype = np.dtype(order + NUMBERS[kind])
    if math.prod(shape) * dtype.itemsize != len(numbers):
        raise InputError(f"{file} declares a variable of {shape} but holds {len(numbers)} bytes of it")
    try:
        return bytes(name).decode("latin-1"), np.frombuffer(numbers, dtype).reshape(shape, order="F")
    except ValueError as reason:  # of no bytes, but with another size that is beyond counting
        raise InputError(f"{file} declares a variable of {shape}, which cannot be") from reason
