"""A user's model in a file, with the state of its penalty, from which it can continue to learn."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram import __version__
from engram.common.errors import SHOWN, InputError, printable, reason, shortened
from engram.common.tensor_file import bytes_of, read_tensors, tensors_under, write_tensors
from engram.nn.baselines import MatchedSoftmax
from engram.nn.distributed import bare
from engram.penalties import Penalty

KIND, FORMAT = "model", 2  # format 1 wrote a MatchedSoftmax as a plastic layer with a constant trace


def save_model(
    path: str | Path, model: nn.Module, penalty: Penalty | None = None, about: dict[str, Any] | None = None
) -> None:
    """Write a model and the state of its penalty into one safetensors file, completely or not at all.

    The file holds the parameters and buffers of `model.state_dict()`, traces included, from any device; the
    penalty's kind, settings and state; and the `plastic_settings` of modules that have them, a dictionary of what they
    compute with besides tensors (for example `trace_scale` of a `DHPSoftmax`). It holds no code: to load it, you build
    the model and the penalty first. The optimizer's state (momentum) is not saved.

    Args:
        path: the file; an existing one is replaced once the new one is complete.
        model: any module.
        penalty: the penalty that protects it, if it should continue to learn.
        about: anything that JSON can hold, such as the names of the classes; `load_model` returns it.

    Example:
        >>> engram.save_model("model.safetensors", model, penalty, about={"classes": ["cat", "dog"]})
    """
    state = _state(model)
    tied = _tied(state)
    tensors = {f"model.{name}": tensor for name, tensor in state.items() if name not in tied}
    header: dict[str, Any] = {"engram": __version__, "about": _checked_about(about), "tied": tied, "penalty": None}
    header["modules"] = _module_settings(model)
    if penalty is not None:
        _check_of_model(penalty, model)
        header["penalty"] = {"kind": type(penalty).__name__, "settings": _settings(penalty)}
        tensors |= {f"penalty.{name}": tensor for name, tensor in penalty.state_dict().items()}
    write_tensors(Path(path), KIND, FORMAT, header, tensors)


def load_model(path: str | Path, model: nn.Module, penalty: Penalty | None = None) -> dict[str, Any]:
    """Restore a model and its penalty from a file of `save_model`; returns what was saved as `about`.

    The model must have the file's tensors, with the same names, shapes and types, on any device, and its plastic heads
    must have the same settings. A file that does not fit, or is damaged, is refused in one sentence, and the model and
    the penalty stay as they were.

    Args:
        path: the file.
        model: a model built like the one that was saved.
        penalty: a penalty of this model, of the same kind and settings. To continue with another strength, set
            `penalty.strength` afterwards. Without it only the model is read, which is enough to predict.

    Example:
        >>> engram.save_model("model.safetensors", model, engram.OnlineEWC(model, strength=100))
        >>> model = make_model()
        >>> penalty = engram.OnlineEWC(model, strength=100)
        >>> about = engram.load_model("model.safetensors", model, penalty)
    """
    path = Path(path)
    header, tensors = read_tensors(path, KIND, FORMAT)
    try:
        about, saved = _table(header["about"]), header["penalty"]
        tied = {name: _word(first) for name, first in _table(header["tied"]).items()}
        kind, settings = (None, {}) if saved is None else (_word(saved["kind"]), _table(saved["settings"]))
        modules = {name: _table(own) for name, own in header.get("modules", {}).items()}  # older files have none
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a model of Engram, or is damaged ({reason(error)})") from error
    if header["format"] == 1:
        tensors, tied, modules = _from_format_1(model, tensors, tied, modules)
    state = tensors_under(tensors, "model.")
    _check_model(path, own := _state(model), state, tied)
    _check_modules(path, _module_settings(model), modules)
    if penalty is not None:
        _check_of_model(penalty, model)
        _check_penalty(path, penalty, kind, settings)
    with _restored_on_failure(model):
        _load_state(path, model, {name: state[tied.get(name, name)] for name in own})
        if penalty is not None:
            try:
                penalty.load_state_dict(tensors_under(tensors, "penalty."))  # all or nothing
            except InputError as error:
                raise InputError(f"{path} does not fit this penalty: {error}") from error
    return about


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{shortened(value)} is not a table")
    return dict(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shortened(value)} is not a name")
    return value


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors of a model by name, without the prefixes that torch.compile adds."""
    state = bare(model).state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"a model file can hold only tensors, and {name!r} of this model is a {type(value).__name__}"
            )
    return dict(state)


def _module_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The `plastic_settings` of the modules by their paths, as JSON gives them back."""
    found = {}
    for name, module in bare(model).named_modules():
        settings = getattr(module, "plastic_settings", None)
        if settings is not None:
            try:
                found[name] = dict(json.loads(json.dumps(settings, allow_nan=False)))
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(
                    f"the plastic_settings of {name!r} must be a dictionary that JSON can hold: {error}"
                ) from error
    return found


def _load_state(path: Path, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load as PyTorch does, with the hooks of the modules, and check that the model then has the file's values."""
    model = bare(model)
    try:
        model.load_state_dict(state)
    except Exception as error:
        why = str(error).splitlines()[-1].strip().split(". ")[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be loaded into this {type(model).__name__}: {why}") from error
    for name, tensor in _state(model).items():
        if bytes_of(tensor.detach().cpu().contiguous()) != bytes_of(state[name]):
            raise InputError(
                f"{path} cannot be loaded: {name!r} of this {type(model).__name__} does not have the loaded value"
            )


@contextmanager
def _restored_on_failure(model: nn.Module) -> Iterator[None]:
    """If anything fails inside, give the model's tensors the values that they had."""
    live = [*model.parameters(), *model.buffers(), *_state(model).values()]
    copies = [tensor.detach().clone() for tensor in live]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, before in zip(live, copies, strict=True):
                with suppress(RuntimeError):  # a tensor that cannot be written was not changed
                    tensor.copy_(before)
        raise


def _from_format_1(
    model: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str], modules: dict[str, dict[str, Any]]
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, dict[str, Any]]]:
    """Rename what format 1 says of matched heads: θ′ was alpha, its constant factor a trace, and eta was 0."""
    for path, module in bare(model).named_modules():
        trace = tensors.get(f"model.{path}.hebb" if path else "model.hebb")
        if isinstance(module, MatchedSoftmax) and trace is not None and trace.numel():
            prefix = f"{path}." if path else ""
            unused = {prefix + name for name in ("hebb", "eta")}
            now = partial(_renamed, old=f"{prefix}alpha", new=f"{prefix}extra")
            tensors = {now(name): tensor for name, tensor in tensors.items() if name[len("model.") :] not in unused}
            tied = {now(name): now(first) for name, first in tied.items() if name not in unused}
            modules = {**modules, path: {"trace": trace.flatten()[0].item()}}
    return tensors, tied, modules


def _renamed(name: str, old: str, new: str) -> str:
    """The name of a tensor, or of what a penalty remembers of it, with its new ending."""
    return name.removesuffix(old) + new if name == old or name.endswith(f".{old}") else name


def _tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """For tensors with several names: the first name for each of the others."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: first[id(tensor)] for name, tensor in state.items() if first[id(tensor)] != name}


def _check_model(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Refuse a file of another model, and name the first tensor that differs."""

    def refuse(name: str, what: str) -> InputError:
        return InputError(f"{path} is of another model: its tensor {shortened(name)} {what}")

    for name, tensor in own.items():
        found = state.get(tied.get(name, name))
        if found is None:
            raise refuse(name, "is missing")
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise InputError(f"{path} cannot be loaded yet: the tensor {name!r} of this model has no memory")
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise InputError(
                f"{path} cannot be loaded: elements of {name!r} share their memory, as in an expanded tensor"
            )
        if found.shape != tensor.shape:
            raise refuse(name, f"has the shape {tuple(found.shape)}, not {tuple(tensor.shape)}")
        if found.dtype != tensor.dtype:
            raise refuse(name, f"is of {found.dtype}, not {tensor.dtype}")
    for name in [*state, *tied]:
        if name not in own:
            raise refuse(name, "is not in this one")
    ours = _tied(own)
    for name in own:
        if tied.get(name) != ours.get(name):
            other = tied.get(name, ours.get(name))
            raise refuse(
                name,
                f"{'shares' if name in tied else 'does not share'} its memory with {shortened(other)}, unlike here",
            )


def _check_modules(path: Path, own: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a file whose modules had other settings: with the same tensors they compute another function."""
    for name, settings in saved.items():
        place = f"the module {shortened(name)}" if name else "the model"
        for setting, value in settings.items():
            there = f"{path} is of another model: {place} has {printable(setting[:SHOWN])}={shortened(value)} there"
            if setting not in own.get(name, {}):
                raise InputError(f"{there}, and none here")
            if own[name][setting] != value:
                raise InputError(f"{there}, not {shortened(own[name][setting])}")


def _check_of_model(penalty: Penalty, model: nn.Module) -> None:
    """Refuse a penalty that protects weights of another model, or those that this one had before it grew."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in penalty.parameters.items():
        if id(parameter) not in own:
            raise InputError(
                f"this {type(penalty).__name__} belongs to another model: "
                f"the weight {name!r} that it protects is not in this one"
            )


def _settings(penalty: Penalty) -> dict[str, Any]:
    """The settings of a penalty that are numbers or words, as they are now."""
    given = {name: getattr(penalty, name, None) for name in inspect.signature(type(penalty)).parameters}
    settings = {name: value for name, value in given.items() if isinstance(value, bool | int | float | str)}
    return settings | {"protect": "in-force" if penalty.fast else "slow"}


def _check_penalty(path: Path, penalty: Penalty, kind: str | None, settings: Mapping[str, Any]) -> None:
    """Refuse the state of a penalty of another kind or with other settings: it would mean something else here."""
    if kind is None:
        raise InputError(f"{path} holds no state of a penalty for this {type(penalty).__name__}")
    if kind != type(penalty).__name__:
        raise InputError(f"{path} holds the state of {printable(kind[:SHOWN])}, not of {type(penalty).__name__}")
    defaults = inspect.signature(type(penalty)).parameters
    for name, value in _settings(penalty).items():
        # an older file may lack a newer setting
        saved = settings[name] if name in settings else defaults[name].default
        if saved != value:
            raise InputError(f"{path} is of {kind} with {name}={shortened(saved)}, not {value!r}")


def _checked_about(about: dict[str, Any] | None) -> dict[str, Any]:
    """What the user says about the model, if JSON gives it back as it was: a key 0 would come back as "0"."""
    if about is None:
        return {}
    try:
        returned = json.loads(json.dumps(about, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"about must be something that JSON can hold: {error}") from error
    if not isinstance(about, dict) or returned != about:
        raise InputError(
            "about must be a dictionary that JSON gives back as it was: with text keys, and lists for tuples"
        )
    return about
