"""Damaged files of datasets are refused in one sentence or read right, in bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.io
from hypothesis import given

from builders import refusal
from damage import damaged_bytes, damaged_gzip, damaged_mat, fuzz, read_or_refuse
from dataset_files import FILE, cifar, idx_images, idx_labels, svhn
from engram.data import formats
from engram.data.catalogue import File
from engram.data.download import _extract
from engram.data.formats import gunzip, parse_idx_labels, parse_svhn, read_matlab
from engram.data.sources import _read


def packed_svhn() -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3, 2), np.uint8)
    scipy.io.savemat(stream, {"X": pixels, "y": np.array([[10], [3]], np.uint8)}, do_compression=True)
    return stream.getvalue()


def read_part(name: str, content: bytes, parse: Callable[[bytes, str], formats.Part]) -> formats.Part | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        found = read_or_refuse(lambda: _read(File(name, "0" * 32, parse), path))
    if found is None:
        return None
    part, published = found
    assert not published
    return part


@fuzz
@given(content=damaged_bytes(idx_images()) | damaged_gzip(gzip.compress(idx_images(), mtime=0)))
def test_damaged_idx_images(content: bytes) -> None:
    part = read_part("images-idx3-ubyte", content, formats.parse_idx_images)
    if part is not None:
        raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        assert part.images.shape[1:] == (1, 28, 28)
        assert part.images.tobytes() == raw[16:]


@fuzz
@given(content=damaged_bytes(idx_labels(3, 1, 4)) | damaged_gzip(gzip.compress(idx_labels(3, 1, 4), mtime=0)))
def test_damaged_idx_labels(content: bytes) -> None:
    part = read_part("labels-idx1-ubyte", content, formats.parse_idx_labels)
    if part is not None:
        raw = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        assert part.labels.astype(np.uint8).tobytes() == raw[8:]


@fuzz
@given(content=damaged_bytes(cifar(3, 1, 4)))
def test_damaged_cifar_batch(content: bytes) -> None:
    part = read_part("data_batch_1.bin", content, formats.parse_cifar)
    if part is not None:
        again = (bytes([label]) + image.tobytes() for label, image in zip(part.labels, part.images, strict=True))
        assert b"".join(again) == content


@fuzz
@given(content=st.one_of(damaged_mat(svhn(2)), damaged_mat(packed_svhn())))
def test_damaged_matlab_file(content: bytes) -> None:
    part = read_part("train_32x32.mat", content, formats.parse_svhn)
    if part is not None:
        assert part.images.shape == (len(part.labels), 3, 32, 32)
        assert (part.images.dtype, part.labels.dtype) == (np.uint8, np.int64)
        assert set(part.labels.tolist()) <= set(range(10))


MEMBERS = {"made/readme.html": b"hello", "made/train.bin": cifar(3, 1, 4), "made/test.bin": cifar(1)}


def archive() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name, content in MEMBERS.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@fuzz
@given(content=damaged_gzip(archive()))
def test_damaged_archive(content: bytes) -> None:
    """As if its checksum had been verified, so that the damage gets as far as the unpacking."""
    wanted = list(MEMBERS.items())[1:]
    files = [File(name, hashlib.md5(member).hexdigest(), formats.parse_cifar) for name, member in wanted]
    with tempfile.TemporaryDirectory() as folder:
        path, staging = Path(folder) / "all.tar.gz", Path(folder) / "staging"
        path.write_bytes(content)
        staging.mkdir()
        found = read_or_refuse(lambda: _extract(path, files, staging))
        assert {entry.name for entry in staging.rglob("*")} <= {"member-0", "member-1"}
        assert {entry.name for entry in Path(folder).iterdir()} == {"all.tar.gz", "staging"}
        if found is not None:
            assert [taken.read_bytes() for taken in found.values()] == [member for _, member in wanted]


# --- found by earlier searches


def test_labels_are_counted_before_memory_is_allocated() -> None:
    """Labels are eight times as large in memory as in the file."""
    packer = zlib.compressobj(9, wbits=31)
    packed = packer.compress(struct.pack(">2I", 2049, 20 * 2**20))
    packed += b"".join(packer.compress(bytes(2**20)) for _ in range(20)) + packer.flush()
    sentence = refusal(parse_idx_labels, gunzip(packed, FILE), FILE)
    assert "20971520 labels" in sentence
    assert "10000000" in sentence


MAT = b" " * 124 + b"\0\1IM"


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<2I", kind, len(data)) + data + bytes(-len(data) % 8 if kind != 15 else 0)


def variable(sizes: tuple[int, ...], numbers: bytes = b"", kind: int = 2) -> bytes:
    flags, shape = element(6, struct.pack("<2I", 9, 0)), element(5, struct.pack(f"<{len(sizes)}I", *sizes))
    return element(14, flags + shape + element(1, b"X") + element(kind, numbers))


@pytest.mark.parametrize("sizes", [(0, *(2**32 - 1,) * 3), (*(2**32 - 1,) * 15, 0)])
def test_empty_variable_with_huge_sizes_is_refused(sizes: tuple[int, ...]) -> None:
    assert "4294967295" in refusal(parse_svhn, MAT + variable(sizes), FILE)


def test_many_small_bombs_are_refused_like_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 10_000)
    packed = element(15, zlib.compress(variable((1, 4000), bytes(4000))))
    assert read_matlab(MAT + packed * 2, FILE)["X"].size == 4000
    assert "10000 bytes" in refusal(read_matlab, MAT + packed * 3, FILE)


def test_too_many_variables_are_refused() -> None:
    assert read_matlab(MAT + variable((1, 1), b"a") * 100, FILE)
    assert "100 variables" in refusal(read_matlab, MAT + variable((1, 1), b"a") * 101, FILE)
