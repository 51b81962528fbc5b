"""The file formats of the published datasets, from bytes to arrays: gzip, IDX, CIFAR-10's binary version, MATLAB 5.

Files can come from anywhere, so nothing in them is trusted. A declared size is compared with the bytes that are there
before any memory is allocated, decompression is bounded, nothing is unpickled, and every fault is reported in one
sentence that names the file. A split of a dataset is a list of parts (IDX keeps images and labels in two files,
CIFAR-10 keeps five files of both), which `join` puts together.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram.common.errors import InputError
from engram.data.samples import Samples

NUM_CLASSES = 10
MAX_BYTES = 256 * 2**20  # in a file or its content; the largest published one is SVHN's training images, 215 MiB
MAX_LABELS = 10_000_000  # MNIST has 60,000
MAX_VARIABLES = 100  # in a MATLAB file; SVHN's have two


@dataclass(frozen=True)
class Part:
    """What one file adds to a split: images (N, C, H, W) as uint8, labels (N,) as int64, or both."""

    file: str
    images: NDArray[np.uint8] | None = None
    labels: NDArray[np.int64] | None = None


def join(parts: Sequence[Part]) -> Samples:
    """The parts of one split as samples. Only here do images meet labels from another file."""
    images = [part.images for part in parts if part.images is not None]
    labels = [part.labels for part in parts if part.labels is not None]
    num_images, num_labels = sum(map(len, images)), sum(map(len, labels))
    if num_images != num_labels:
        files = " and ".join(part.file for part in parts)
        raise InputError(f"{files} do not belong together: {num_images} images but {num_labels} labels")
    return Samples(torch.from_numpy(_concatenate(images)), torch.from_numpy(_concatenate(labels)))


def _concatenate(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


# --- Bytes, compressed or not


def read_file(path: Traversable) -> bytes:
    """The bytes of a file, unless it is larger than any dataset."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES} bytes, as no dataset is")
    return content


def gunzip(content: bytes, file: str) -> bytes:
    """Decompress a gzip file, and verify gzip's own checksum."""
    return _decompress(content, zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), file, "gzip")


def _decompress(content: bytes | memoryview, stream: zlib._Decompress, file: str, kind: str) -> bytes:
    """One whole compressed stream, at most `MAX_BYTES`: otherwise a small file could fill the memory."""
    try:
        result = stream.decompress(content, MAX_BYTES + 1)
    except zlib.error as error:
        raise InputError(f"{file} is not valid {kind} data: {error}") from error
    if len(result) > MAX_BYTES:
        raise InputError(f"{file} decompresses to more than {MAX_BYTES} bytes, as no dataset does")
    if not stream.eof:
        raise InputError(f"{file} is truncated: its {kind} stream has no end")
    if stream.unused_data:
        raise InputError(f"{file} has {len(stream.unused_data)} trailing bytes after its {kind} stream")
    return result


# --- IDX: MNIST, Fashion-MNIST, notMNIST


def parse_idx_images(content: bytes, file: str) -> Part:
    """IDX images: the numbers 2051, count, rows and columns, big-endian, then one byte per pixel."""
    count, rows, columns = _idx_header(content, file, magic=2051, num_sizes=3)
    if (rows, columns) != (28, 28):
        raise InputError(f"{file} holds images of {rows} by {columns} pixels instead of 28 by 28")
    pixels = _idx_body(content, file, start=16, size=count * 28 * 28, what=f"{count} images")
    return Part(file, images=pixels.reshape(count, 1, 28, 28))


def parse_idx_labels(content: bytes, file: str) -> Part:
    """IDX labels: the numbers 2049 and count, big-endian, then one byte per label."""
    (count,) = _idx_header(content, file, magic=2049, num_sizes=1)
    if count > MAX_LABELS:  # in memory a label is eight times as large as in the file
        raise InputError(f"{file} declares {count} labels, more than the {MAX_LABELS} that a dataset may have")
    labels = _idx_body(content, file, start=8, size=count, what=f"{count} labels")
    return Part(file, labels=_class_numbers(labels, file))


def _idx_header(content: bytes, file: str, *, magic: int, num_sizes: int) -> tuple[int, ...]:
    header_size = 4 * (1 + num_sizes)
    if len(content) < header_size:
        raise InputError(f"{file} is truncated: {len(content)} bytes are too few for an IDX header")
    found, *sizes = struct.unpack_from(f">{1 + num_sizes}I", content)
    if found != magic:
        raise InputError(f"{file} has the wrong magic number: {found} instead of IDX's {magic}")
    if sizes[0] == 0:
        raise InputError(f"{file} declares that it holds nothing")
    return tuple(sizes)


def _idx_body(content: bytes, file: str, *, start: int, size: int, what: str) -> NDArray[np.uint8]:
    found = len(content) - start
    if found < size:
        raise InputError(f"{file} is truncated: it declares {what}, {size} bytes, but holds {found}")
    if found > size:
        raise InputError(f"{file} has {found - size} trailing bytes after the {what} that it declares")
    return np.frombuffer(content, np.uint8, offset=start).copy()  # torch needs a writable array


def _class_numbers(labels: NDArray[Any], file: str) -> NDArray[np.int64]:
    """Labels as int64, if each is a whole number from 0 to 9."""
    wrong = np.flatnonzero(~np.isin(labels, np.arange(NUM_CLASSES)))
    if len(wrong):
        position = int(wrong[0])
        raise InputError(f"{file} has the label {labels[position]} at position {position}, outside 0 to 9")
    return labels.astype(np.int64)


# --- CIFAR-10


def parse_cifar(content: bytes, file: str) -> Part:
    """CIFAR-10's binary version: records of one label byte, then 32 x 32 red, green and blue bytes."""
    record_size = 1 + 3 * 32 * 32
    count, rest = divmod(len(content), record_size)
    if rest:
        raise InputError(
            f"{file} is truncated or has trailing bytes: {len(content)} bytes are not a whole number of "
            f"records of {record_size} bytes"
        )
    if count == 0:
        raise InputError(f"{file} holds no images")
    records = np.frombuffer(content, np.uint8).reshape(count, record_size)
    images = records[:, 1:].copy().reshape(count, 3, 32, 32)
    return Part(file, images, _class_numbers(records[:, 0], file))


# --- MATLAB 5: SVHN

# Types of elements, NumPy's names of their numbers, classes and a flag of variables
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
NUMERIC = range(6, 16)
COMPLEX = 0x0800


def parse_svhn(content: bytes, file: str) -> Part:
    """SVHN's cropped digits, a MATLAB file: X (32, 32, 3, N) as uint8, y (N, 1) with 10 for the digit 0."""
    arrays = read_matlab(content, file)
    for name in ("X", "y"):
        if name not in arrays:
            raise InputError(f"{file} has no numeric variable {name}")
    pixels, labels = arrays["X"], arrays["y"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise InputError(f"{file} holds X as {pixels.dtype} of {pixels.shape}, not uint8 of (32, 32, 3, N)")
    if labels.ndim != 2 or 1 not in labels.shape:
        raise InputError(f"{file} holds y as an array of {labels.shape}, not of (N, 1)")
    if pixels.shape[3] != labels.size:
        raise InputError(f"{file} holds {pixels.shape[3]} images but {labels.size} labels")
    if labels.size == 0:
        raise InputError(f"{file} holds no images")
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))  # (32, 32, 3, N) -> (N, 3, 32, 32)
    return Part(file, images, _class_numbers(np.where(labels == 10, 0, labels).ravel(), file))


def read_matlab(content: bytes, file: str) -> dict[str, NDArray[Any]]:
    """The real numeric variables of a file, as views of its bytes where it is not compressed.

    scipy's reader is not used, because some damaged files crash the whole process in it (one wrong byte, the type of
    a variable's numbers, is enough). After a header of 128 bytes come elements, each a variable or a compressed one.
    """
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(content[124:128])
    if order is None:
        raise InputError(f"{file} is not a MATLAB file of version 5")
    arrays: dict[str, NDArray[Any]] = {}
    size = 0
    for number, (kind, data) in enumerate(_elements(memoryview(content)[128:], order, file), start=1):
        if kind == COMPRESSED:
            variable = _decompress(data, zlib.decompressobj(), file, "zlib")
            size += len(variable)
            kind, data = next(_elements(memoryview(variable), order, file), (0, data))
        if number > MAX_VARIABLES or size > MAX_BYTES:
            raise InputError(f"{file} holds more than {MAX_VARIABLES} variables or {MAX_BYTES} bytes of them")
        if kind == MATRIX and (named := _variable(data, order, file)):
            arrays.update([named])
    return arrays


def _elements(data: memoryview, order: str, file: str) -> Iterator[tuple[int, memoryview]]:
    """The type and content of each element, which is stored as type, size, content and padding."""
    position = 0
    while position < len(data):
        if len(data) < position + 8:
            raise InputError(f"{file} is truncated, or has trailing bytes")
        kind, size = struct.unpack_from(f"{order}2I", data, position)
        start = position + 8
        padding = 0 if kind == COMPRESSED else -size % 8
        if kind >> 16:  # up to four bytes of content, after a single word that holds both size and type
            kind, size, start = kind & 0xFFFF, kind >> 16, position + 4
            padding = -size % 4
        if size > len(data) - start:
            raise InputError(f"{file} is truncated: it declares {size} bytes where {len(data) - start} are left")
        yield kind, data[start : start + size]
        position = start + size + padding


def _variable(data: memoryview, order: str, file: str) -> tuple[str, NDArray[Any]] | None:
    """A variable's name and value, from its flags, sizes, name and numbers; None if it is not a real array."""
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
    except ValueError as error:  # no bytes, since one size is 0 and others are too large for NumPy
        raise InputError(f"{file} declares a variable of the impossible shape {shape}") from error
