"""Reading and decompressing files from anywhere, never into more memory than a dataset can need."""

from __future__ import annotations

import zlib
from importlib.resources.abc import Traversable

from engram.common.errors import InputError

MAX_BYTES = 256 * 2**20  # the largest published content is SVHN's training images, 215 MiB


def read_file(path: Traversable) -> bytes:
    """The bytes of a file, unless it is larger than any dataset could be."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES} bytes, as no dataset is")
    return content


def gunzip(content: bytes, file: str) -> bytes:
    """Decompress a gzip file, verifying gzip's own checksum."""
    return decompress(content, zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), file, "gzip")


def decompress(content: bytes | memoryview, stream: zlib._Decompress, file: str, kind: str) -> bytes:
    """One whole compressed stream, never beyond `MAX_BYTES`: a small file can otherwise fill the memory."""
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
