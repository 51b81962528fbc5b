"""Make the embedded mnist-small from the published MNIST.

    python tools/make_mnist_small.py DATA_FOLDER

takes the first 1,000 training digits and the first 200 test digits of each class, in MNIST's own order, and
writes them as four gzipped IDX files into src/engram/data/mnist_small. The same MNIST gives the same files;
the lines that it prints are the md5 sums (of each file and of its content) that sources.py knows them by.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import torch

from engram.data.samples import Samples
from engram.data.sources import load

TARGET = Path(__file__).resolve().parent.parent / "src" / "engram" / "data" / "mnist_small"


def first_of_each_class(samples: Samples, count: int) -> Samples:
    """The first `count` samples of each class, in the order in which they stand."""
    chosen = [torch.nonzero(samples.targets == label).flatten()[:count] for label in range(10)]
    return samples[torch.cat(chosen).sort().values]


def idx_files(samples: Samples, split: str) -> dict[str, bytes]:
    """A split as the names and contents of its two IDX files."""
    images = struct.pack(">4I", 2051, len(samples), 28, 28) + samples.inputs.numpy().tobytes()
    labels = struct.pack(">2I", 2049, len(samples)) + samples.targets.to(torch.uint8).numpy().tobytes()
    return {f"{split}-images-idx3-ubyte.gz": images, f"{split}-labels-idx1-ubyte.gz": labels}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/make_mnist_small.py DATA_FOLDER")
    mnist = load("mnist", sys.argv[1])
    if mnist.origin != "published":
        sys.exit(f"the MNIST in {sys.argv[1]} is not the published one")
    train, test = first_of_each_class(mnist.train, 1000), first_of_each_class(mnist.test, 200)
    for name, content in (idx_files(train, "train") | idx_files(test, "t10k")).items():
        compressed = gzip.compress(content, compresslevel=9, mtime=0)
        (TARGET / name).write_bytes(compressed)
        print(hashlib.md5(compressed).hexdigest(), hashlib.md5(content).hexdigest(), name)


if __name__ == "__main__":
    main()
