"""`engram data`, and the data that `engram run` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command, assert_is_refusal, idx_images, idx_labels

MNIST = ("run", "split-mnist", "--methods", "finetune", "--epochs", "1", "--trials", "1", "--tasks", "2")


def test_unpublished_data_are_used_and_noted(engram: Command, data: Path, out: Path) -> None:
    outcome = engram(*MNIST, "--data", data, "--out", out)
    assert outcome.code == 0
    assert "20 + 20 samples" in outcome.out.replace("\n", " ")
    assert json.loads((out / "run.json").read_text())["data"][0]["origin"] == "structure"


def test_data_folder_from_the_environment(
    engram: Command, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_DATA", str(data))
    assert engram(*MNIST, "--out", out).code == 0


def test_missing_data_folder_is_refused(engram: Command, tmp_path: Path, out: Path) -> None:
    assert str(tmp_path / "nowhere") in engram.refusal(*MNIST, "--data", tmp_path / "nowhere", "--out", out)
    assert not out.exists()
    assert not (tmp_path / "nowhere").exists()


def test_missing_data_folder_in_the_environment_is_refused(
    engram: Command, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_DATA", str(tmp_path / "nowhere"))
    assert "ENGRAM_DATA" in engram.refusal(*MNIST, "--out", out)
    assert not out.exists()


def test_file_as_data_folder_is_refused(engram: Command, tmp_path: Path, out: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in engram.refusal(*MNIST, "--data", tmp_path / "file", "--out", out)
    assert not out.exists()


def test_missing_dataset_is_named_with_the_command_that_fetches_it(engram: Command, data: Path, out: Path) -> None:
    line = engram.refusal(*MNIST, "--dataset", "fashion-mnist", "--data", data, "--out", out)
    assert "FashionMNIST" in line
    assert "engram data fetch fashion-mnist" in line
    assert not out.exists()


def test_missing_dataset_of_the_mixture_is_named(engram: Command, data: Path, out: Path) -> None:
    line = engram.refusal("run", "vision-mixture", "--data", data, "--out", out)
    assert "engram data fetch notmnist" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train-images-idx3-ubyte", idx_images(20)[:-1], ["truncated"]),
        ("train-images-idx3-ubyte", b"\x00\x00", ["truncated"]),
        ("train-images-idx3-ubyte", b"", ["truncated"]),
        ("t10k-images-idx3-ubyte", idx_labels(*range(10)) * 3, ["magic number", "2049", "2051"]),
        ("t10k-labels-idx1-ubyte", idx_images(1), ["magic number", "2051", "2049"]),
        ("train-labels-idx1-ubyte", idx_labels(*range(10), *range(9), 10), ["label 10", "position 19"]),
        ("train-labels-idx1-ubyte", idx_labels(*range(9)), ["20 images but 9 labels"]),
        ("t10k-labels-idx1-ubyte", idx_labels(*[0] * 20), ["empty"]),
        ("train-labels-idx1-ubyte.gz", b"not gzip at all", ["gzip"]),
    ],
    ids=[
        "one byte short",
        "no header",
        "nothing",
        "labels as images",
        "images as labels",
        "label 10",
        "too few",
        "no 1 to 9",
        "no gzip",
    ],
)
def test_damaged_data_file_is_named(
    engram: Command, data: Path, out: Path, name: str, content: bytes, words: list[str]
) -> None:
    (data / "MNIST" / "raw" / name).write_bytes(content)
    line = engram.refusal(*MNIST, "--data", data, "--out", out)
    for word in words:
        assert word in line
    if words != ["empty"]:  # that is no fault of the file, but of a task that gets nothing from it
        assert name in line
    assert not out.exists()


def test_check_counts_unusable_files(engram: Command, data: Path) -> None:
    assert engram("data", "check", "mnist", "--data", data).code == 0
    (data / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"damaged!")
    outcome = engram("data", "check", "mnist", "--data", data)
    assert_is_refusal(outcome)
    assert "1 file" in outcome.err
    assert "train-labels-idx1-ubyte" in outcome.err
    assert outcome.out.count(": usable, but not the published file") == 3


def test_list_says_which_datasets_are_present(engram: Command, data: Path) -> None:
    lines = engram("data", "list", "--data", data).out.splitlines()
    assert lines[0] == f"in {data}"
    states = dict(line.split() for line in lines[1:])
    assert states == {
        "mnist": "present",
        "fashion-mnist": "missing",
        "notmnist": "missing",
        "svhn": "missing",
        "cifar-10": "missing",
        "mnist-small": "present",
    }
