"""Every way in which a file of a published format can be wrong is one sentence that names the file."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_files import FILE, assert_sentence_names, cifar, idx_images, idx_labels, mat, svhn
from engram.common.errors import InputError
from engram.data import formats
from engram.data.formats import (
    Part,
    gunzip,
    join,
    parse_cifar,
    parse_idx_images,
    parse_idx_labels,
    parse_svhn,
    read_file,
)


def test_idx_images_keep_every_pixel() -> None:
    content = idx_images()
    images = parse_idx_images(content, FILE).images
    assert images is not None
    assert images.shape == (3, 1, 28, 28)
    assert images.tobytes() == content[16:]


def test_idx_labels_keep_every_label() -> None:
    labels = parse_idx_labels(idx_labels(7, 0, 9), FILE).labels
    assert labels is not None
    assert labels.dtype == np.int64
    assert labels.tolist() == [7, 0, 9]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["truncated"]),
        (idx_images()[:15], ["truncated"]),
        (idx_images()[:-1], ["truncated", "3 images", "2352", "2351"]),
        (idx_images() + b"ab", ["2 trailing bytes"]),
        (idx_images(magic=2049), ["magic", "2049", "2051"]),
        (idx_images(count=0), ["nothing"]),
        (idx_images(rows=32, columns=32), ["32 by 32", "28 by 28"]),
        (struct.pack(">4I", 2051, 2**32 - 1, 28, 28) + bytes(784), ["truncated", "4294967295 images"]),
        (struct.pack(">4I", 2051, 2**32 - 1, 2**32 - 1, 2**32 - 1), ["4294967295 by 4294967295"]),
    ],
)
def test_wrong_idx_images(content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse_idx_images(content, FILE)
    assert_sentence_names(error, *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx_labels(1, 2)[:7], ["truncated"]),
        (idx_labels(1, 2)[:-1], ["truncated", "2 labels"]),
        (idx_labels(1, 2) + b"\1", ["1 trailing bytes"]),
        (idx_images(), ["magic", "2051"]),
        (idx_labels(), ["nothing"]),
        (idx_labels(1, 2, 10, 11), ["label 10 ", "position 2"]),
    ],
)
def test_wrong_idx_labels(content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse_idx_labels(content, FILE)
    assert_sentence_names(error, *words)


@given(
    start=st.sampled_from([idx_images(count=2), idx_labels(1, 2, 3)]),
    changes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 20),
    tail=st.binary(max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_mutated_idx_parses_or_is_refused(start: bytes, changes: list[tuple[int, int]], cut: int, tail: bytes) -> None:
    content = bytearray(start)
    for position, value in changes:
        content[position % len(content)] = value
    mutated = bytes(content[: len(content) - cut]) + tail
    for parse in (parse_idx_images, parse_idx_labels):
        try:
            part = parse(mutated, FILE)
        except InputError:
            continue
        values = part.labels if part.images is None else part.images
        assert values is not None
        assert values.size == len(mutated) - (8 if part.images is None else 16)


def test_cifar_splits_records_into_labels_and_planes() -> None:
    content = bytearray(cifar(3, 9))
    content[1], content[1 + 1024], content[1 + 2048 + 33] = 200, 201, 202
    part = parse_cifar(bytes(content), FILE)
    assert part.images is not None
    assert part.labels is not None
    assert part.labels.tolist() == [3, 9]
    assert part.images[0, 0, 0, 0] == 200
    assert part.images[0, 1, 0, 0] == 201
    assert part.images[0, 2, 1, 1] == 202
    assert (part.images[1] == 180).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["no images"]),
        (cifar(1, 2)[:-1], ["truncated", "3073"]),
        (cifar(1, 2) + b"\0", ["trailing", "3073"]),
        (cifar(1, 2, 12), ["label 12 ", "position 2"]),
    ],
)
def test_wrong_cifar(content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse_cifar(content, FILE)
    assert_sentence_names(error, *words)


def test_svhn_turns_images_and_reads_ten_as_zero() -> None:
    part = parse_svhn(svhn(), FILE)
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3, 4), np.uint8)
    assert part.images is not None
    assert part.labels is not None
    assert part.labels.tolist() == [0, 1, 9, 5]
    assert part.images.shape == (4, 3, 32, 32)
    assert part.images[2, 1, 5, 30] == pixels[5, 30, 1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["MATLAB"]),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), ["MATLAB"]),
        (svhn()[:1000], ["truncated"]),
        (svhn()[:-30], ["truncated"]),
        (svhn() + b"abc", ["trailing bytes"]),
        (mat(y=np.ones((4, 1))), ["variable X"]),
        (mat(X=np.zeros((32, 32, 3, 4), np.uint8)), ["variable y"]),
        (svhn(X=np.zeros((32, 32, 3, 4))), ["float64"]),
        (svhn(X=np.zeros((28, 28, 3, 4), np.uint8)), ["(28, 28, 3, 4)"]),
        (svhn(X=np.zeros((32, 32, 3), np.uint8)), ["(32, 32, 3)"]),
        (svhn(X={"a": 1}), ["variable X"]),
        (svhn(y="text"), ["variable y"]),
        (svhn(y=np.ones((2, 2))), ["(2, 2)"]),
        (svhn(y=np.full((4, 1), 1 + 2j)), ["variable y"]),
        (svhn(X=np.zeros((32, 32, 3, 0), np.uint8), y=np.zeros((0, 1))), ["no images"]),
        (svhn(y=np.ones((3, 1), np.uint8)), ["4 images", "3 labels"]),
        (svhn(y=np.array([[1], [11], [2], [3]])), ["label 11 ", "position 1"]),
        (svhn(y=np.array([[1], [2], [2.5], [3]])), ["label 2.5 ", "position 2"]),
        (svhn(y=np.array([[1], [2], [np.nan], [3]])), ["label nan ", "position 2"]),
    ],
)
def test_wrong_svhn(content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse_svhn(content, FILE)
    assert_sentence_names(error, *words)


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_reads_what_matlab_writes(compressed: bool) -> None:
    stream = io.BytesIO()
    pixels = np.arange(32 * 32 * 3 * 2, dtype=np.uint8).reshape(32, 32, 3, 2)
    variables = {"note": "text", "X": pixels, "more": {"a": [1, 2]}, "y": np.array([[10.0], [3.0]])}
    scipy.io.savemat(stream, variables, do_compression=compressed)
    part = parse_svhn(stream.getvalue(), FILE)
    assert part.images is not None
    assert part.labels is not None
    assert (part.images == pixels.transpose(3, 2, 0, 1)).all()
    assert part.labels.tolist() == [0, 3]


def test_svhn_with_a_compression_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    scipy.io.savemat(stream, {"X": np.zeros((32, 32, 3, 9), np.uint8)}, do_compression=True)
    monkeypatch.setattr(formats, "MAX_BYTES", 9000)
    with pytest.raises(InputError) as error:
        parse_svhn(stream.getvalue(), FILE)
    assert_sentence_names(error, "more than 9000 bytes")


def test_svhn_declared_shape_is_compared_with_the_bytes() -> None:
    content = bytearray(svhn())
    at = content.index(struct.pack("<4I", 32, 32, 3, 4))
    content[at + 12 : at + 16] = struct.pack("<I", 2**30)
    with pytest.raises(InputError) as error:
        parse_svhn(bytes(content), FILE)
    assert_sentence_names(error, "1073741824", "12288 bytes")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_svhn_parses_or_is_refused(data: st.DataObject) -> None:
    content = bytearray(svhn(2))
    tags = st.one_of(st.integers(124, 200), st.integers(len(content) - 64, len(content) - 1))
    for position, value in data.draw(st.lists(st.tuples(tags, st.integers(0, 255)), max_size=4)):
        content[position] = value
    try:
        part = parse_svhn(bytes(content), FILE)
    except InputError:
        return
    assert part.images is not None
    assert part.images.shape == (2, 3, 32, 32)


def test_gunzip_undoes_gzip() -> None:
    assert gunzip(gzip.compress(b"digits" * 1000, mtime=0), FILE) == b"digits" * 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["truncated"]),
        (idx_images(), ["gzip"]),
        (gzip.compress(idx_images(), mtime=0)[:-1], ["truncated"]),
        (gzip.compress(idx_images(), mtime=0)[:100], ["truncated"]),
        (gzip.compress(b"digits", mtime=0)[:-8] + bytes(8), ["not valid gzip data"]),
        (gzip.compress(b"digits", mtime=0) + b"more", ["4 trailing bytes"]),
    ],
)
def test_wrong_gzip(content: bytes, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        gunzip(content, FILE)
    assert_sentence_names(error, *words)


def test_gunzip_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 10_000)
    assert len(gunzip(gzip.compress(bytes(10_000), mtime=0), FILE)) == 10_000
    with pytest.raises(InputError) as error:
        gunzip(gzip.compress(bytes(10_001), mtime=0), FILE)
    assert_sentence_names(error, "more than 10000 bytes")


def test_read_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_BYTES", 100)
    path = tmp_path / "large"
    path.write_bytes(bytes(100))
    assert read_file(path) == bytes(100)
    path.write_bytes(bytes(101))
    with pytest.raises(InputError) as error:
        read_file(path)
    assert_sentence_names(error, "larger than 100 bytes", file=str(path))


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_file(tmp_path)
    assert_sentence_names(error, "cannot be read", file=str(tmp_path))


def test_join_pairs_images_with_labels() -> None:
    samples = join([parse_idx_images(idx_images(), "images"), parse_idx_labels(idx_labels(4, 5, 6), "labels")])
    assert samples.inputs.shape == (3, 1, 28, 28)
    assert samples.inputs.dtype == torch.uint8
    assert samples.targets.tolist() == [4, 5, 6]


def test_join_keeps_the_order_of_batches() -> None:
    samples = join([parse_cifar(cifar(1, 2), "one"), parse_cifar(cifar(3), "two")])
    assert samples.targets.tolist() == [1, 2, 3]
    assert samples.inputs[:, 0, 0, 0].tolist() == [20, 40, 60]


def test_join_refuses_different_counts() -> None:
    parts: list[Part] = [
        parse_idx_images(idx_images(), FILE),
        parse_idx_labels(idx_labels(1, 2), "the-labels"),
    ]
    with pytest.raises(InputError) as error:
        join(parts)
    assert_sentence_names(error, "the-labels", "3 images", "2 labels")
