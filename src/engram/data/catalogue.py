"""The published datasets: their files, checksums and mirrors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engram.data import formats
from engram.data.formats import Part


@dataclass(frozen=True)
class File:
    """A published file: its path in the data folder (a `.gz` may be there decompressed) and its md5 sums."""

    path: str
    md5: str
    parse: Callable[[bytes, str], Part]
    content_md5: str | None = None


@dataclass(frozen=True)
class Archive:
    """A published archive that holds a source's files, under the paths that they have in the data folder."""

    path: str
    md5: str


@dataclass(frozen=True)
class Source:
    """A dataset as published: the files of its splits, and the addresses that serve them."""

    name: str
    train: tuple[File, ...]
    test: tuple[File, ...]
    mirrors: tuple[str, ...] = ()
    archive: Archive | None = None
    embedded: bool = False

    @property
    def files(self) -> tuple[File, ...]:
        return self.train + self.test


def _idx(name: str, folder: str, sums: str, *mirrors: str) -> Source:
    """A dataset in four files as MNIST's. `sums` has a line for each: its md5 sum and, if known, its content's."""
    files: list[File] = []
    for line, split in zip(sums.strip().splitlines(), ("train", "train", "t10k", "t10k"), strict=True):
        md5, *content_md5 = line.split()
        if len(files) % 2 == 0:
            kind, parse = "images-idx3", formats.parse_idx_images
        else:
            kind, parse = "labels-idx1", formats.parse_idx_labels
        files.append(File(f"{folder}/{split}-{kind}-ubyte.gz", md5, parse, *content_md5))
    return Source(name, tuple(files[:2]), tuple(files[2:]), mirrors, embedded=not mirrors)


_MNIST_SUMS = """
f68b3c2dcbeaaa9fbdd348bbdeb94873 6bbc9ace898e44ae57da46a324031adb
d53e105ee54ea40749a09fcbcd1e9432 a25bea736e30d166cdddb491f175f624
9fb629c4189551a2d022fa330f9573f3 2646ac647ad5339dbf082846283269ea
ec29112dd5afa0611ce80d1b7f02629c 27ae3e4e09519cfbb04c329615203637
"""
_FASHION_SUMS = """
8d4fb7e6c68d591d4c3dfef9ec88bf0d f4a8712d7a061bf5bd6d2ca38dc4d50a
25c81989df183df01b3e8a0aad5dffbe 9018921c3c673c538a1fc5bad174d6f9
bef4ecab320f06d8554ea6380940ec79 8181f5470baa50b63fa0f6fddb340f0a
bb300cfdad3c16e7a12a480ee83cd310 15d484375f8d13e6eb1aabb0c3f46965
"""
_NOTMNIST_SUMS = """
d916d7283fce4d08db9867c640ec0042
eab59f88903339e01dac19deed3824c0
2c87c839a4ef9b238846600eec8c35b7 1e78b07d677d6e4de2c8857bafff012e
7ea9118cbafd0f6e3ee2ad771d782a01 b10b3ef34b4e468313a7b24c216c6a53
"""
_MNIST_SMALL_SUMS = """
098a1c4a7e752f507fd838bdd5ca3e75 d2442bc08bd5ff7a07250f72c4d51549
1100135b993716e31025065b02dfa7bd 2367398df9813ee76715953f5039d74b
fc1ba1fa53f109086b3b40f4086d547f 1f443774e7b4ecd912fe34f30bda774b
8bb9c13695edb031bfafc69718c702c6 371e95c47744df5b9d47f13e64d2d7a9
"""


def _cifar(name: str, md5: str) -> File:
    return File(f"cifar-10-batches-bin/{name}.bin", md5, formats.parse_cifar)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _idx(
            "mnist",
            "MNIST/raw",
            _MNIST_SUMS,
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        _idx(
            "fashion-mnist",
            "FashionMNIST/raw",
            _FASHION_SUMS,
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        _idx(
            "notmnist",
            "notMNIST/raw",
            _NOTMNIST_SUMS,
            "https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/",
        ),
        Source(
            "svhn",
            train=(File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", formats.parse_svhn),),
            test=(File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", formats.parse_svhn),),
            mirrors=("http://ufldl.stanford.edu/housenumbers/",),
        ),
        Source(
            "cifar-10",
            train=(
                _cifar("data_batch_1", "5dd7e06a14cb22eb9f671a540d1b7c25"),
                _cifar("data_batch_2", "5ea93a67294ea407fff1d09f752e9692"),
                _cifar("data_batch_3", "942cd6a4bcdd0dd3c604fbe906cb4421"),
                _cifar("data_batch_4", "ae636b3ba5c66a11e91e8cb52e771fcb"),
                _cifar("data_batch_5", "53f37980c15c3d472c316c40844f3f0d"),
            ),
            test=(_cifar("test_batch", "803d5f7f4d78ea53de84dbe85f74fb6d"),),
            mirrors=("https://www.cs.toronto.edu/~kriz/",),
            archive=Archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        _idx("mnist-small", "mnist_small", _MNIST_SMALL_SUMS),
    )
}
