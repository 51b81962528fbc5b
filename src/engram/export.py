"""A trained model for use elsewhere: its plastic heads folded into plain layers, written as ONNX or by torch.export."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import InputError
from engram.nn.heads import PlainSoftmax
from engram.tensorfile import write_whole

Inputs = Tensor | Sequence[Tensor]


def fold(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode, whose plastic heads are plain layers: what it computes stays the same.

    Every module with a `fold` method (`DHPSoftmax`, `MatchedSoftmax`, one of your own) gives way to what that returns.
    A `torch.nn.Linear` is then called as the head was: it takes a target too, and ignores it. The model itself stays as
    it is, and can go on learning.
    """
    folded: dict[int, nn.Module] = {}  # one that is registered twice stays one

    def plain(module: nn.Module) -> nn.Module:
        module = getattr(module, "_orig_mod", module)  # compiled: what it was before
        if id(module) not in folded:
            folded[id(module)] = _as_layer(module)
            if folded[id(module)] is module:
                for name, child in module._modules.items():
                    module._modules[name] = None if child is None else plain(child)
        return folded[id(module)]

    return plain(copy.deepcopy(getattr(model, "_orig_mod", model))).eval()


def _as_layer(module: nn.Module) -> nn.Module:
    """What stands for a module once learning is over: most of all, itself."""
    if not callable(getattr(module, "fold", None)):
        return module
    layer = module.fold()  # type: ignore[operator]
    if not isinstance(layer, nn.Module):
        raise InputError(f"{type(module).__name__}.fold() must return a module, not a {type(layer).__name__}")
    if type(layer) is not nn.Linear:
        return layer
    with torch.device("meta"):  # without drawing weights that are not used
        head = PlainSoftmax(layer.in_features, layer.out_features)
    head.weight, head.bias = layer.weight, layer.bias
    return head


def export_onnx(model: nn.Module, path: str | Path, inputs: Inputs) -> None:
    """Write the folded model as an ONNX file, whose answers have been seen to be the model's.

    `inputs` is a batch as the model takes it, a tensor or several; the file then takes batches of any size, as "inputs"
    (several as "inputs_0", "inputs_1", …), and gives "outputs". onnxruntime runs it on these inputs before it is
    written: one that answers otherwise than the model is refused, and no file is left. An ONNX file is data: reading it
    runs no code of its author.

    Needs `pip install engram[onnx]`.

    Example:
        >>> engram.export_onnx(model, "model.onnx", inputs)
        >>> onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs.numpy()})
    """
    onnxruntime = [_installed(package) for package in ("onnx", "onnxscript", "onnxruntime")][-1]
    model, batch = _on_host(model), _as_batch(inputs)
    names = ["inputs"] if len(batch) == 1 else [f"inputs_{i}" for i in range(len(batch))]

    def write() -> bytes:
        example, axes = _any_batch(batch)
        program = torch.onnx.export(
            fold(model),
            example,
            dynamic_shapes=axes,
            input_names=names,
            output_names=["outputs"],
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        content: bytes = program.model_proto.SerializeToString()
        return content

    content = _attempt(model, write)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(*given: Tensor) -> Tensor:
        return torch.as_tensor(session.run(None, {n: x.numpy() for n, x in zip(names, given, strict=True)})[0])

    _check_same(model, run, batch)
    write_whole(Path(path), content)


def export_program(model: nn.Module, path: str | Path, inputs: Inputs) -> None:
    """Write the folded model by `torch.export`: a program of PyTorch's own operations, for `torch.export.load`.

    It needs neither Engram nor the model's code, and takes batches of any size; it is read back and compared with the
    model on `inputs` before it is written. Unlike a safetensors or an ONNX file, such a file can run code when it is
    loaded, since PyTorch may unpickle parts of it and evaluates expressions in it: load only what comes from somebody
    you trust.

    Example:
        >>> engram.export_program(model, "model.pt2", inputs)
        >>> torch.export.load("model.pt2").module()(inputs)
    """
    model, batch = _on_host(model), _as_batch(inputs)

    def write() -> bytes:
        example, axes = _any_batch(batch)
        stream = io.BytesIO()
        torch.export.save(torch.export.export(fold(model), example, dynamic_shapes=axes), stream)
        return stream.getvalue()

    content = _attempt(model, write)
    with _quiet():
        program = torch.export.load(io.BytesIO(content)).module()
    _check_same(model, program, batch)
    write_whole(Path(path), content)


def _installed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as reason:
        raise InputError(f"{package} is not installed: pip install engram[onnx]") from reason


def _on_host(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode on the CPU, where a model and its file can be compared digit by digit."""
    return copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().eval()


def _as_batch(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs as several, each of at least one sample, and all of as many."""
    batch = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not batch or not all(isinstance(x, Tensor) and x.ndim for x in batch):
        raise InputError(
            "inputs must be a batch as the model takes it: a tensor with an axis for the samples, or several"
        )
    sizes = sorted({len(x) for x in batch})
    if len(sizes) > 1 or sizes[0] == 0:
        raise InputError(f"inputs must hold at least one sample, and each as many, not {' and '.join(map(str, sizes))}")
    return tuple(x.detach().cpu() for x in batch)


def _any_batch(batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """What to trace a model with, and that its first axis may be of any length: PyTorch would fix one of length 1."""
    size = torch.export.Dim("batch")
    return tuple(torch.cat([x, x]) for x in batch), tuple({0: size} for _ in batch)


def _attempt(model: nn.Module, write: Callable[[], bytes]) -> bytes:
    """The file, or one sentence on why there can be none: what the exporters raise is of many kinds and many lines."""
    try:
        with _quiet():
            return write()
    except Exception as reason:
        first: BaseException = reason
        while first.__cause__ is not None:
            first = first.__cause__
        said = next((line.strip() for line in str(first).splitlines() if line.strip()), type(first).__name__)
        raise InputError(f"{type(model).__name__} cannot be exported: {said}") from reason


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of packages that are not there and of their own future."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@torch.no_grad()
def _check_same(model: nn.Module, exported: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> None:
    """Refuse what answers otherwise than the model: on the batch, one sample of it, and twice the batch."""
    for given in (batch, tuple(x[:1] for x in batch), tuple(torch.cat([x, x]) for x in batch)):
        expected, answered = model(*given), exported(*given)
        if not isinstance(expected, Tensor):
            raise InputError(f"a model that is exported gives one tensor, not a {type(expected).__name__}")
        if answered.shape != expected.shape:
            raise InputError(f"the exported model gives shape {tuple(answered.shape)}, not {tuple(expected.shape)}")
        # half of the digits: the sums of another library are in another order
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0
        apart = float((answered.double() - expected.double()).abs().max())
        if not apart <= tolerance * max(1.0, float(expected.double().abs().max())):
            raise InputError(f"the exported model answers otherwise than the model: its outputs are {apart:.3g} apart")
