"""Tensors in a file: what is written comes back, and what was damaged never does."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import assert_tensors_equal, refusal
from engram.common.errors import InputError
from engram.common.tensor_file import read_tensors, tensors_under, write_tensors

KIND = "model"
HEADER = {"about": {"classes": ["cat", "dög"]}, "rate": 0.1, "none": None}


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "float": torch.randn(3, 4),
        "double": torch.randn(2, dtype=torch.float64),
        "bf16": torch.randn(5).bfloat16(),
        "half": torch.randn(2, 2).half(),
        "bool": torch.tensor([True, False, True]),
        "int": torch.arange(4),
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.safetensors"
    write_tensors(path, KIND, 1, HEADER, some_tensors())
    return path


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "file"
    write_tensors(path, KIND, 1, HEADER, some_tensors())
    return path.read_bytes()


def refused(path: Path, kind: str = KIND, newest: int = 1) -> str:
    """The sentence that refuses a file and names it."""
    sentence = refusal(read_tensors, path, kind, newest)
    assert str(path) in sentence
    return sentence


def test_written_tensors_read_back(path: Path) -> None:
    header, tensors = read_tensors(path, KIND, 1)
    assert header == {**HEADER, "kind": KIND, "format": 1}
    assert_tensors_equal(tensors, some_tensors())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool]),
    name=st.text(max_size=5).filter(lambda name: name != "__metadata__"),
    said=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4),
)
def test_any_tensor_name_and_header_read_back(tmp_path: Path, shape, dtype, name: str, said) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    write_tensors(tmp_path / "file", KIND, 1, {"said": said}, {name: tensor})
    header, tensors = read_tensors(tmp_path / "file", KIND, 1)
    assert header["said"] == said
    assert_tensors_equal(tensors, {name: tensor})


def test_views_and_shared_memory_become_separate_tensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": whole,
        "again": whole,
        "row": whole[1],
        "turned": whole.T,
        "strided": whole[:, ::2],
        "wide": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(whole),
        "none": whole[:0],
    }
    write_tensors(tmp_path / "file", KIND, 1, {}, tensors)
    found = read_tensors(tmp_path / "file", KIND, 1)[1]
    assert_tensors_equal(found, {name: tensor.detach() for name, tensor in tensors.items()})
    found["whole"].zero_()
    assert torch.equal(found["again"], whole), "what was one tensor is two when it is read"


def test_old_file_stays_if_the_new_one_cannot_be_written(path: Path) -> None:
    before = path.read_bytes()
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(InputError, match="cannot be saved"):
            write_tensors(path, KIND, 1, {}, {"odd": tensor})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


# --- refused


def test_another_kind_or_a_newer_format_is_refused(path: Path) -> None:
    assert "is not a checkpoint of Engram" in refused(path, kind="checkpoint")
    assert "is of the kind 'model'" in refused(path, kind="checkpoint")
    assert "written by a newer version of Engram: this one reads formats up to 0" in refused(path, newest=0)


def test_missing_file_or_folder_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "other") == f"there is no file {tmp_path / 'other'}"
    assert "cannot be read: Is a directory" in refused(tmp_path)
    assert "cannot be read: Not a directory" in refused(path / "below")
    assert "cannot be read: File name too long" in refused(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything is readable here")
def test_unreadable_file_is_refused_by_name(path: Path) -> None:
    path.chmod(0)
    assert "cannot be read: Permission denied" in refused(path)


def test_path_that_cannot_be_written_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    for place, said in ((tmp_path, "Is a dir"), (tmp_path / "no" / "file", "No such"), (path / "below", "Not a dir")):
        with pytest.raises(InputError) as error:
            write_tensors(place, KIND, 1, {}, {})
        assert str(error.value).startswith(f"{place} cannot be written: {said}")
    assert os.listdir(tmp_path) == [path.name]


def test_truncated_file_is_refused(path: Path, content: bytes) -> None:
    assert len(content) > 500
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refused(path)
    path.write_bytes(content + b"\0")
    refused(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bit_is_refused_or_harmless(path: Path, content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    place = data.draw(st.integers(0, len(content) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        header, tensors = read_tensors(path, KIND, 1)
    except InputError:
        refused(path)
    else:  # such as a blank between two words of the header that became a line's end
        assert header == {**HEADER, "kind": KIND, "format": 1}
        assert_tensors_equal(tensors, some_tensors())


def test_flipped_bit_of_a_value_is_refused(path: Path, content: bytes) -> None:
    first = 8 + struct.unpack("<Q", content[:8])[0]
    for place in range(first, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert "checksum" in refused(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200))
def test_noise_is_refused(path: Path, noise: bytes) -> None:
    path.write_bytes(noise)
    refused(path)


def raw(entries: dict, values: bytes = b"") -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + values


@pytest.mark.parametrize(
    "crafted",
    [
        struct.pack("<Q", 2**62) + b"{}",
        raw({"x": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]}}),
        raw({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}}, b"1234"),
        raw({"__metadata__": {"engram": "{}"}}),
        raw({"__metadata__": {"engram": "[1]"}}),
        raw({"__metadata__": {"engram": "7"}}),
        raw({"__metadata__": {"engram": "[" * 100_000}}),
        raw({"__metadata__": {"engram": '{"kind": "model", "format": 1e999}'}}),
        raw({"__metadata__": {"engram": '{"kind": "model", "format": null}'}}),
        raw({"__metadata__": {"engram": '{"kind": "model", "format": "\\n"}'}}),
        raw({"__metadata__": {"engram": '{"kind": "a\\nb", "format": 1}'}}),
        raw({"__metadata__": {"engram": '{"kind": "model", "format": 1, "checksum": "?"}'}}),
    ],
)
def test_crafted_files_are_refused_without_allocating_memory(path: Path, crafted: bytes) -> None:
    path.write_bytes(
        crafted
    )  # had a declared size been allocated, it would be a MemoryError, or the end of the process
    refused(path)


def test_a_part_of_the_tensors_has_names_without_its_prefix() -> None:
    one, two = torch.zeros(2), torch.ones(3)
    tensors = {"model.model.weight": one, "model.bias": two, "models": one, "penalty.model.path": one}
    part = tensors_under(tensors, "model.")
    assert list(part) == ["model.weight", "bias"]
    assert part["model.weight"] is one
    assert part["bias"] is two
    assert tensors_under(tensors, "sums.") == {}
