"""Small made-up files in the formats of the published datasets, and what their refusal must look like."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import scipy.io

from builders import assert_one_sentence
from engram.common.errors import InputError

FILE = "some/folder/file-ubyte"


def idx_images(count: int = 3, rows: int = 28, columns: int = 28, magic: int = 2051) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, count * rows * columns, np.uint8)
    return struct.pack(">4I", magic, count, rows, columns) + pixels.tobytes()


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + bytes(labels)


def cifar(*labels: int) -> bytes:
    return b"".join(bytes([label]) + bytes([label * 20]) * 3072 for label in labels)


def mat(**variables: object) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables)
    return stream.getvalue()


def svhn(count: int = 4, **changes: object) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3, count), np.uint8)
    labels = np.array([[10], [1], [9], [5]], np.uint8)[:count]
    return mat(**({"X": pixels, "y": labels} | changes))


def assert_sentence_names(error: pytest.ExceptionInfo[InputError], *words: str, file: str = FILE) -> None:
    """The error is one sentence that names a file and holds these words."""
    message = str(error.value)
    assert file in message
    for word in words:
        assert word in message
    assert_one_sentence(message)
