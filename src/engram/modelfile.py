"""A model of one's own in a file, with what its penalty remembers: to go on learning where it stood."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import SHOWN, InputError, in_brief, plain, said
from engram.penalties import Penalty
from engram.tensorfile import read_tensors, write_tensors
from engram.version import __version__

KIND, FORMAT = "model", 1


def save_model(
    path: str | Path, model: nn.Module, penalty: Penalty | None = None, about: dict[str, Any] | None = None
) -> None:
    """Write a model, and what its penalty remembers, into one safetensors file: whole or not at all.

    Kept are the parameters and buffers of `model.state_dict()`, the traces among them, on whatever device they are; of
    the penalty its kind, its settings and its memory. No code is kept, and none can be: who reads the file makes the
    model and the penalty first. The optimizer's own state (momentum) is not part of it.

    Args:
        path: the file. One that is there is replaced once the new one is complete.
        model: any module.
        penalty: what protects it, if it is to go on learning.
        about: anything of yours that JSON can hold, such as the names of the classes; `load_model` returns it.

    Example:
        >>> engram.save_model("model.safetensors", model, penalty, about={"classes": ["cat", "dog"]})
    """
    state = _state(model)
    tied = _tied(state)
    tensors = {f"model.{name}": tensor for name, tensor in state.items() if name not in tied}
    header: dict[str, Any] = {"engram": __version__, "about": _checked_about(about), "tied": tied, "penalty": None}
    if penalty is not None:
        header["penalty"] = {"kind": type(penalty).__name__, "settings": _settings(penalty)}
        tensors |= {f"penalty.{name}": tensor for name, tensor in penalty.state_dict().items()}
    write_tensors(Path(path), KIND, FORMAT, header, tensors)


def load_model(path: str | Path, model: nn.Module, penalty: Penalty | None = None) -> dict[str, Any]:
    """Bring a model and its penalty to where `save_model` found them; returns what was said `about` them.

    The model must have the file's tensors: the same names, shapes and types, on any device. The penalty must be of the
    same kind and settings, none of which is changed by this: set `penalty.strength` afterwards to go on with another.
    Without a penalty the model alone is read, which is enough to predict. A file that does not fit, or is damaged, is
    refused in one sentence, and the model and the penalty are then as they were.

    Example:
        >>> model = make_model()
        >>> penalty = engram.OnlineEWC(model, strength=100)
        >>> about = engram.load_model("model.safetensors", model, penalty)
    """
    path = Path(path)
    header, tensors = read_tensors(path, KIND, FORMAT)
    try:
        about, tied, kept = dict(header["about"]), dict(header["tied"]), header["penalty"]
        kind, settings = (None, {}) if kept is None else (str(kept["kind"]), dict(kept["settings"]))
    except (KeyError, TypeError, ValueError) as reason:
        raise InputError(f"{path} is not a model of Engram, or is damaged ({said(reason)})") from reason
    own = _state(model)
    state = _part(tensors, "model.")
    _check_model(path, own, state, tied)
    if penalty is not None:
        _check_penalty(path, penalty, kind, settings)
        try:
            penalty.load_state_dict(_part(tensors, "penalty."))  # whole, or not at all
        except InputError as reason:
            raise InputError(f"{path} does not fit this penalty: {reason}") from reason
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[tied.get(name, name)])
    return about


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of a model by name; those of a compiled one by the names that they had before."""
    state = getattr(model, "_orig_mod", model).state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"a model file holds tensors alone, and {name!r} of this model is a {type(value).__name__}"
            )
    return dict(state)


def _tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """For each further name of a tensor that has several, its first."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in state.items() if first[id(tensor)] != name}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _check_model(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Refuse a file that is of another model, and name the first tensor by which that is seen."""

    def refuse(name: str, what: str) -> InputError:
        return InputError(f"{path} is of another model: its tensor {in_brief(name)} {what}")

    for name, tensor in own.items():
        found = state.get(tied.get(name, name))
        if found is None:
            raise refuse(name, "is missing")
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise InputError(f"{path} cannot be loaded yet: the tensor {name!r} of this model has no memory")
        if found.shape != tensor.shape:
            raise refuse(name, f"has shape {tuple(found.shape)}, not {tuple(tensor.shape)}")
        if found.dtype != tensor.dtype:
            raise refuse(name, f"is of {found.dtype}, not {tensor.dtype}")
    for name in [*state, *tied]:
        if name not in own:
            raise refuse(name, "is unknown to this one")
    ours = _tied(own)
    for name in own:
        if tied.get(name) != ours.get(name):
            other = tied.get(name, ours.get(name))
            raise refuse(
                name, f"{'shares' if name in tied else 'does not share'} its memory with {in_brief(other)}, unlike here"
            )


def _settings(penalty: Penalty) -> dict[str, Any]:
    """The numbers and words that a penalty was made with, as they are now; its memory says what it protects."""
    given = {name: getattr(penalty, name, None) for name in inspect.signature(type(penalty)).parameters}
    settings = {name: value for name, value in given.items() if isinstance(value, bool | int | float | str)}
    return settings | {"protect": "in-force" if penalty.fast else "slow"}


def _check_penalty(path: Path, penalty: Penalty, kind: str | None, settings: Mapping[str, Any]) -> None:
    """Refuse a memory that another penalty made: what it remembers would not mean here what it meant there."""
    if kind is None:
        raise InputError(f"{path} holds no penalty's memory, for a {type(penalty).__name__} to go on with")
    if kind != type(penalty).__name__:
        raise InputError(f"{path} holds the memory of {plain(kind[:SHOWN])}, not of {type(penalty).__name__}")
    usual = inspect.signature(type(penalty)).parameters
    for name, value in _settings(penalty).items():
        # an older file may be without a setting that came later
        kept = settings[name] if name in settings else usual[name].default
        if kept != value:
            raise InputError(f"{path} is of {kind} with {name}={in_brief(kept)}, not {value!r}")


def _checked_about(about: dict[str, Any] | None) -> dict[str, Any]:
    """What the user says of the model, if JSON gives it back as it was: a key 0 would return as "0"."""
    if about is None:
        return {}
    try:
        returned = json.loads(json.dumps(about, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as reason:
        raise InputError(f"about must be what JSON can hold: {reason}") from reason
    if not isinstance(about, dict) or returned != about:
        raise InputError(
            "about must be a dictionary of text keys that JSON gives back as it was, with lists for tuples"
        )
    return about
