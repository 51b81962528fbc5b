"""Tensors with a JSON header in one safetensors file: it can hold no code, and damage is detected.

Engram saves networks (checkpoints of a run, a user's models) in such files. The header is under `engram` in the file's
metadata, which every reader of safetensors can show. It names the kind of the file and its format version, and holds a
checksum of everything in it.
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
    """Write a file, whole or not at all.

    Args:
        path: the file, which is replaced if it exists.
        kind: what the file holds, in words: "model".
        form: the version of its format.
        header: anything that JSON can hold.
        tensors: by name.

    Example:
        >>> write_tensors(Path("a.engram"), "model", 1, {"classes": 10}, {"weight": torch.zeros(10, 3)})
    """
    described = {**header, "kind": kind, "format": form}
    on_host = _on_host(tensors)
    with_sum = json.dumps({**described, "checksum": _checksum(described, on_host)}, allow_nan=False)
    try:
        content = save(on_host, {"engram": with_sum})
    except KeyError as error:  # a type that safetensors does not have
        raise InputError(f"{error} cannot be saved in a file of tensors") from error
    write_or_refuse(path, content)


def read_tensors(path: Path, kind: str, newest: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a file. A file of another kind, a damaged one or one of a later format is refused.

    Args:
        path: a file that `write_tensors` wrote.
        kind: what the file must hold.
        newest: the newest version of the format that can be read.

    Example:
        >>> write_tensors(Path("a.engram"), "model", 1, {"classes": 10}, {"weight": torch.zeros(10, 3)})
        >>> header, tensors = read_tensors(Path("a.engram"), "model", newest=1)
        >>> header["classes"], tensors["weight"].shape
        (10, torch.Size([10, 3]))
    """
    article = "an" if kind[0] in "aeiou" else "a"
    try:
        path.open("rb").close()  # safetensors reports every file that it cannot open as missing
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["engram"])
            # Cloned, because tensors in the file may not be aligned, and sums over unaligned memory round differently.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dictionary
        if header["kind"] != kind:
            raise ValueError(f"it is of the kind {shortened(header['kind'])}")
        if int(header["format"]) > newest:
            raise InputError(f"{path} was written by a newer version of Engram: this one reads formats up to {newest}")
        if header.pop("checksum") != _checksum(header, tensors):
            raise ValueError("its checksum does not match")
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{path} is not {article} {kind} of Engram, or is damaged ({reason(error)})") from error
    return header, tensors


def kind_of(path: Path) -> str:
    """What a file says it holds, as `write_tensors` was told; its tensors are not read.

    Args:
        path: a file that `write_tensors` wrote.

    Example:
        >>> write_tensors(Path("a.engram"), "model", 1, {}, {"weight": torch.zeros(10, 3)})
        >>> kind_of(Path("a.engram"))
        'model'
    """
    try:
        path.open("rb").close()
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {})["engram"])["kind"])
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a file of Engram, or is damaged ({reason(error)})") from error


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names.

    Args:
        tensors: by name, such as those of a file.
        prefix: of one part of them.

    Example:
        >>> tensors_under({"model.weight": torch.zeros(2), "penalty.path": torch.ones(2)}, "model.")
        {'weight': tensor([0., 0.])}
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in main memory, each its own: a file has no views, and two names of one tensor become two tensors."""
    on_host: dict[str, Tensor] = {}
    taken = set()
    for name, tensor in tensors.items():
        try:
            found = tensor.detach().cpu().contiguous()
        except (RuntimeError, ValueError) as error:  # sparse, on the meta device, or uninitialised
            raise InputError(f"the tensor {name!r} cannot be saved in a file: {reason(error)}") from error
        address = found.untyped_storage().data_ptr()
        on_host[name] = found.clone() if address in taken else found
        taken.add(address)
    return on_host


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        described = f"{name} {tensors[name].dtype} {list(tensors[name].shape)}"
        value = zlib.crc32(bytes_of(tensors[name]), zlib.crc32(described.encode(), value))
    return value


def bytes_of(tensor: Tensor) -> bytes:
    """The values as they are in memory, also for types that NumPy does not have."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
