"""Tensors with a JSON header in one safetensors file: no code can be hidden in it, and damage does not go unseen.

What Engram keeps of a network (checkpoints of a run, models of one's own) is such a file. Its header is under
`engram` in the metadata of the file, which every reader of safetensors can show; it says of what kind the file is, by
which format it was written, and holds a checksum of all that is in it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engram.common.errors import InputError, reason, shortened
from engram.common.files import write_or_refuse


def write_tensors(path: Path, kind: str, form: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of a kind, whole or not at all. `header` is anything that JSON can hold."""
    described = {**header, "kind": kind, "format": form}
    on_host = _apart({name: _on_host(name, tensor) for name, tensor in tensors.items()})
    with_sum = json.dumps({**described, "checksum": _checksum(described, on_host)}, allow_nan=False)
    try:
        content = save(on_host, {"engram": with_sum})
    except KeyError as error:  # of a type that safetensors does not have
        raise InputError(f"{error} cannot be kept in a file of tensors") from error
    write_or_refuse(path, content)


def read_tensors(path: Path, kind: str, newest: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of a kind; one that is another, damaged, or of a later format is refused whole."""
    article = "an" if kind[0] in "aeiou" else "a"
    try:
        path.open("rb").close()  # safetensors would say of every file that it cannot open that there is none
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["engram"])
            # cloned, since they lie in the file as they come, and sums over memory that is not aligned round otherwise
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dictionary
        if header["kind"] != kind:
            raise ValueError(f"it is of the kind {shortened(header['kind'])}")
        if int(header["format"]) > newest:
            raise InputError(f"{path} was written by a newer version of Engram: this one reads formats up to {newest}")
        if header.pop("checksum") != _checksum(header, tensors):
            raise ValueError("its checksum is another")
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{path} is not {article} {kind} of Engram, or is damaged ({reason(error)})") from error
    return header, tensors


def _on_host(name: str, tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().cpu().contiguous()
    except (RuntimeError, ValueError) as error:  # sparse, without values, or not yet of any shape
        raise InputError(f"the tensor {name!r} cannot be kept in a file: {reason(error)}") from error


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own: a file has no views, and two names of one tensor are two in it."""
    apart: dict[str, Tensor] = {}
    taken = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return apart


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        described = f"{name} {tensors[name].dtype} {list(tensors[name].shape)}"
        value = zlib.crc32(bytes_of(tensors[name]), zlib.crc32(described.encode(), value))
    return value


def bytes_of(tensor: Tensor) -> bytes:
    """Its values as they lie in memory, also of types that NumPy does not have."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
