"""Datasets are found, verified and loaded; whatever is missing or wrong is said in one sentence."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset_files import assert_sentence_names, cifar, idx_images, idx_labels, svhn
from engram.common.errors import InputError
from engram.data.catalogue import SOURCES, File, Source
from engram.data.formats import parse_cifar
from engram.data.sources import check, chosen_folder, existing_folder, is_present, is_usable, load

COUNTS = {
    "mnist": (60000, 10000),
    "fashion-mnist": (60000, 10000),
    "notmnist": (11829, 10000),
    "svhn": (73255, 26032),
    "cifar-10": (50000, 10000),
}
SPLITS = ("train", "t10k")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGRAM_DATA", raising=False)


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A data folder with small made-up versions of all five datasets."""
    for folder in ("MNIST", "FashionMNIST", "notMNIST"):
        raw = tmp_path / folder / "raw"
        raw.mkdir(parents=True)
        for split in SPLITS:
            (raw / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_images(3), mtime=0))
            (raw / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_labels(1, 2, 9), mtime=0))
    for split in ("train", "test"):
        (tmp_path / f"{split}_32x32.mat").write_bytes(svhn())
    batches = tmp_path / "cifar-10-batches-bin"
    batches.mkdir()
    for number in range(1, 6):
        (batches / f"data_batch_{number}.bin").write_bytes(cifar(number, 0))
    (batches / "test_batch.bin").write_bytes(cifar(7, 8, 9))
    return tmp_path


def mnist_small_content(name: str) -> bytes:
    return resources.files("engram.data").joinpath("mnist_small", f"{name}.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "shape", "train", "test"),
    [
        ("mnist", (1, 28, 28), [1, 2, 9], [1, 2, 9]),
        ("fashion-mnist", (1, 28, 28), [1, 2, 9], [1, 2, 9]),
        ("notmnist", (1, 28, 28), [1, 2, 9], [1, 2, 9]),
        ("svhn", (3, 32, 32), [0, 1, 9, 5], [0, 1, 9, 5]),
        ("cifar-10", (3, 32, 32), [1, 0, 2, 0, 3, 0, 4, 0, 5, 0], [7, 8, 9]),
    ],
)
def test_right_structure_loads(
    made_up: Path, name: str, shape: tuple[int, ...], train: list[int], test: list[int]
) -> None:
    dataset = load(name, made_up)
    assert dataset.origin == "structure"
    assert dataset.train.targets.tolist() == train
    assert dataset.test.targets.tolist() == test
    assert dataset.train.inputs.shape == (len(train), *shape)
    assert dataset.train.inputs.dtype == torch.uint8
    assert dataset.train.inputs.is_contiguous()
    record = {"name": name, "origin": "structure", "train": len(train), "test": len(test)}
    assert json.loads(json.dumps(dataset.provenance())) == record
    assert {found.state for found in check(name, made_up)} == {"structure"}


def test_mnist_small_is_inside_the_package() -> None:
    dataset = load("mnist-small")
    assert dataset.provenance() == {"name": "mnist-small", "origin": "published", "train": 10000, "test": 2000}
    assert dataset.train.targets.bincount().tolist() == [1000] * 10
    assert dataset.test.targets.bincount().tolist() == [200] * 10
    assert dataset.train.inputs.shape == (10000, 1, 28, 28)
    assert is_present("mnist-small")
    assert [found.state for found in check("mnist-small")] == ["published"] * 4


def test_published_by_the_md5_of_the_file_or_of_its_content(tmp_path: Path) -> None:
    content = cifar(1, 2)
    published = gzip.compress(content, 9, mtime=0)
    md5, content_md5 = (hashlib.md5(data).hexdigest() for data in (published, content))
    file = File("a.bin.gz", md5, parse_cifar, content_md5)
    source = Source("one file", train=(file,), test=(file,), mirrors=("nowhere",))
    place = tmp_path / file.path

    def state() -> tuple[str, bool]:
        return check(source, tmp_path)[0].state, is_usable(file, tmp_path)

    assert state() == ("missing", False)
    place.write_bytes(published)
    assert state() == ("published", True)
    place.write_bytes(gzip.compress(content, 1, mtime=7))
    assert state() == ("published", True)
    place.unlink()
    place.with_suffix("").write_bytes(content)
    assert state() == ("published", True)
    place.with_suffix("").write_bytes(cifar(1, 3))
    assert state() == ("structure", True)
    place.with_suffix("").write_bytes(content[:-1])
    assert not is_usable(file, tmp_path)


def test_same_size_with_other_bytes_is_structure(tmp_path: Path) -> None:
    md5 = hashlib.md5(cifar(1, 2)).hexdigest()
    source = Source("own", (File("a.bin", md5, parse_cifar),), (File("b.bin", md5, parse_cifar),))
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(cifar(1, 2))
    assert load(source, tmp_path).origin == "published"
    (tmp_path / "b.bin").write_bytes(cifar(2, 1))
    assert load(source, tmp_path).origin == "structure"
    assert [found.state for found in check(source, tmp_path)] == ["published", "structure"]


def test_uncompressed_files_load_as_well(made_up: Path) -> None:
    compressed = load("mnist", made_up)
    for path in (made_up / "MNIST" / "raw").iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = load("mnist", made_up)
    assert torch.equal(plain.train.inputs, compressed.train.inputs)
    assert torch.equal(plain.test.targets, compressed.test.targets)


def test_missing_file_names_the_command(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = made_up / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz"
    missing.unlink()
    assert not is_present("mnist", made_up)
    assert is_present("svhn", made_up)
    with pytest.raises(InputError) as error:
        load("mnist", made_up)
    assert_sentence_names(error, f"`engram data fetch mnist --data {made_up}`", file=str(missing))
    monkeypatch.setenv("ENGRAM_DATA", str(made_up))
    with pytest.raises(InputError) as error:
        load("mnist")
    assert_sentence_names(error, "`engram data fetch mnist`", file=str(missing))
    assert [found.state for found in check("mnist", made_up)] == ["structure"] * 3 + ["missing"]


@pytest.mark.parametrize(
    ("path", "content", "word"),
    [
        ("MNIST/raw/train-images-idx3-ubyte.gz", idx_images(3), "gzip"),
        ("MNIST/raw/train-images-idx3-ubyte.gz", gzip.compress(idx_images(3), mtime=0)[:-9], "truncated"),
        ("MNIST/raw/t10k-labels-idx1-ubyte.gz", gzip.compress(idx_labels(1, 2, 11), mtime=0), "label 11"),
        ("MNIST/raw/t10k-labels-idx1-ubyte.gz", gzip.compress(idx_labels(1, 2), mtime=0), "3 images but 2 labels"),
    ],
)
def test_wrong_file_is_named_by_load_and_check(made_up: Path, path: str, content: bytes, word: str) -> None:
    (made_up / path).write_bytes(content)
    with pytest.raises(InputError) as error:
        load("mnist", made_up)
    assert_sentence_names(error, word, file=str(made_up / path))
    (problem,) = (found for found in check("mnist", made_up) if found.state != "structure")
    assert problem.path == made_up / path
    assert problem.bytes == len(content)
    assert problem.state == str(error.value)


def test_folder_in_place_of_a_file_is_refused(made_up: Path) -> None:
    path = made_up / "train_32x32.mat"
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError) as error:
        load("svhn", made_up)
    assert_sentence_names(error, "cannot be read", file=str(path))


def test_unknown_dataset_is_refused() -> None:
    with pytest.raises(InputError, match=r"no dataset 'CIFAR10' \(did you mean cifar-10\?\), only mnist, ") as error:
        load("CIFAR10")
    assert_sentence_names(error, *SOURCES, file="CIFAR10")
    with pytest.raises(InputError, match="no dataset 'words', only mnist, "):
        check("words")


def test_data_folder_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = tmp_path / "given", tmp_path / "named"
    given.mkdir()
    named.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert existing_folder() == tmp_path / "cache" / "engram"
    monkeypatch.setenv("ENGRAM_DATA", str(named))
    assert existing_folder() == named
    assert existing_folder(str(given)) == given
    monkeypatch.delenv("ENGRAM_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert existing_folder() == tmp_path / ".cache" / "engram"
    assert chosen_folder("~/given") == given


def test_named_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as error:
        existing_folder(tmp_path / "nowhere")
    assert_sentence_names(error, "does not exist", file=str(tmp_path / "nowhere"))
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("ENGRAM_DATA", str(file))
    with pytest.raises(InputError) as error:
        load("mnist")
    assert_sentence_names(error, "$ENGRAM_DATA", "is not a folder", file=str(file))


def test_import_stays_cheap() -> None:
    code = "import sys, engram.data.sources; print({'scipy', 'pooch', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


REAL_DATA = os.environ.get("ENGRAM_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="$ENGRAM_DATA names no folder with the full datasets")


@needs_real_data
@pytest.mark.parametrize("name", COUNTS)
def test_real_datasets(name: str) -> None:
    assert REAL_DATA
    if not is_present(name, REAL_DATA):
        pytest.skip(f"{name} is not in $ENGRAM_DATA")
    dataset = load(name, REAL_DATA)
    if dataset.origin == "published" and name == "notmnist":
        assert len(dataset.train) == 60000
    else:
        assert (len(dataset.train), len(dataset.test)) == COUNTS[name]
    assert set(dataset.test.targets.tolist()) == set(range(10))


@needs_real_data
def test_mnist_small_is_the_start_of_mnist() -> None:
    assert REAL_DATA
    if not is_present("mnist", REAL_DATA):
        pytest.skip("mnist is not in $ENGRAM_DATA")
    full, small = load("mnist", REAL_DATA).train, load("mnist-small").train
    seen = np.zeros(10, int)
    chosen = []
    for index, label in enumerate(full.targets.tolist()):
        seen[label] += 1
        if seen[label] <= 1000:
            chosen.append(index)
    assert torch.equal(full.inputs[torch.tensor(chosen)], small.inputs)
    assert torch.equal(full.targets[torch.tensor(chosen)], small.targets)
