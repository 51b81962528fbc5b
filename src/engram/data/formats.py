"""The three file formats of the published datasets, from bytes to arrays.

The bytes come from anywhere, so nothing in them is believed: a declared size is compared with the bytes that
are there before any memory is taken, nothing is unpickled, and whatever is wrong becomes one sentence that
names the file. A split of a dataset is a list of parts (IDX keeps images and labels in two files, CIFAR-10
keeps five files of both), which `join` puts together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram.common.errors import InputError
from engram.data.matlab import read_arrays
from engram.data.samples import Samples

NUM_CLASSES = 10
MAX_LABELS = 10_000_000  # MNIST has 60,000


@dataclass(frozen=True)
class Part:
    """What one file adds to a split: images (N, C, H, W) as uint8, labels (N,) as int64, or both."""

    file: str
    images: NDArray[np.uint8] | None = None
    labels: NDArray[np.int64] | None = None


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


def parse_svhn(content: bytes, file: str) -> Part:
    """SVHN's cropped digits, a MATLAB file: X (32, 32, 3, N) as uint8, y (N, 1) with 10 for the digit 0."""
    arrays = read_arrays(content, file)
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


def join(parts: Sequence[Part]) -> Samples:
    """The parts of one split as samples; the only place where images meet labels from another file."""
    images = [part.images for part in parts if part.images is not None]
    labels = [part.labels for part in parts if part.labels is not None]
    num_images, num_labels = sum(map(len, images)), sum(map(len, labels))
    if num_images != num_labels:
        files = " and ".join(part.file for part in parts)
        raise InputError(f"{files} do not belong together: {num_images} images but {num_labels} labels")
    return Samples(torch.from_numpy(_concatenate(images)), torch.from_numpy(_concatenate(labels)))


def _concatenate(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


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
    return np.frombuffer(content, np.uint8, offset=start).copy()  # a copy is writable, as torch wants it


def _class_numbers(labels: NDArray[Any], file: str) -> NDArray[np.int64]:
    """Labels as int64, once each is known to be a whole number from 0 to 9."""
    wrong = np.flatnonzero(~np.isin(labels, np.arange(NUM_CLASSES)))
    if len(wrong):
        position = int(wrong[0])
        raise InputError(f"{file} has the label {labels[position]} at position {position}, outside 0 to 9")
    return labels.astype(np.int64)
