"""Export a trained model: fold its plastic heads into plain layers, and write it as ONNX or by torch.export."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.files import write_or_refuse
from engram.nn.baselines import LinearSoftmax
from engram.nn.distributed import bare

Inputs = Tensor | Sequence[Tensor]
Made = TypeVar("Made")


def fold(model: nn.Module) -> nn.Module:
    """A copy of a model in evaluation mode, whose plastic heads are plain layers; it computes the same function.

    Every module that lists `plastic_parameters` and has a `fold` method (`DHPSoftmax`, `MatchedSoftmax`, a custom head)
    is replaced by what `fold()` returns; `fold` methods of other modules are ignored. A `torch.nn.Linear` in place of a
    head accepts a target, as the head did, and ignores it. The model itself is unchanged, and can continue to learn.

    Args:
        model: any module.

    Example:
        >>> plain = engram.fold(model)
        >>> logits = plain(inputs)
    """
    folded: dict[int, nn.Module] = {}  # a module that is registered twice stays one

    def plain(module: nn.Module) -> nn.Module:
        module = bare(module)
        if id(module) not in folded:
            folded[id(module)] = _as_layer(module)
            if folded[id(module)] is module:
                for name, child in module._modules.items():
                    module._modules[name] = None if child is None else plain(child)
        return folded[id(module)]

    return plain(_copy_of(model)).eval()


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model, without what torch.compile put around it; refuses what cannot be copied."""
    model = bare(model)
    try:
        return copy.deepcopy(model)
    except Exception as reason:
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and not value.is_leaf:
                    place = f"{path}.{name}".removeprefix(".")
                    raise InputError(
                        f"{type(model).__name__} cannot be copied: its {place!r} is the result of a computation; "
                        "store its detach() instead"
                    ) from reason
        raise InputError(f"{type(model).__name__} cannot be copied: {_first_line(reason)}") from reason


def _as_layer(module: nn.Module) -> nn.Module:
    """What replaces a module after learning: itself, unless it can be folded."""
    if not (hasattr(module, "plastic_parameters") and callable(getattr(module, "fold", None))):
        return module
    layer = module.fold()  # type: ignore[operator]
    if not isinstance(layer, nn.Module):
        raise InputError(f"{type(module).__name__}.fold() must return a module, not a {type(layer).__name__}")
    if type(layer) is not nn.Linear:
        return layer
    with torch.device("meta"):  # draws no weights
        head = LinearSoftmax(layer.in_features, layer.out_features)
    head.weight, head.bias = layer.weight, layer.bias
    return head


def export_onnx(model: nn.Module, path: str | Path, inputs: Inputs) -> None:
    """Write the folded model as an ONNX file, after checking that its outputs are the model's.

    onnxruntime runs it on `inputs` before it is written: if the outputs differ, it is refused and no file is written.
    An ONNX file is data: reading it runs no code of its author. Needs `pip install 'engram-cl[onnx]'`.

    Args:
        model: any module.
        path: the file; an existing one is replaced.
        inputs: an example batch, a tensor or several. The file then accepts batches of any size, as "inputs" (several
            as "inputs_0", "inputs_1", …), and returns "outputs".

    Example:
        >>> engram.export_onnx(model, "model.onnx", inputs)
        >>> (logits,) = onnxruntime.InferenceSession("model.onnx").run(None, {"inputs": inputs.numpy()})
    """
    onnxruntime = [installed(package) for package in ("onnx", "onnxscript", "onnxruntime")][-1]
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
    # onnxruntime does not support all of ONNX, for example much of bfloat16
    session = _attempt(model, lambda: onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]))

    def run(*given: Tensor) -> Tensor:
        named = zip(names, given, strict=True)
        return _attempt(model, lambda: torch.as_tensor(session.run(None, {n: x.numpy() for n, x in named})[0]))

    _check_same(model, run, batch)
    write_or_refuse(Path(path), content)


def export_program(model: nn.Module, path: str | Path, inputs: Inputs) -> None:
    """Write the folded model by `torch.export`: a program of PyTorch's own operations, for `torch.export.load`.

    It needs neither Engram nor the model's code, and accepts batches of any size. Before it is written, it is read back
    and compared with the model on `inputs`. Unlike a safetensors or an ONNX file, such a file can run code when it is
    loaded, since PyTorch may unpickle parts of it and evaluates expressions in it: load only files from people you
    trust.

    Args:
        model: any module.
        path: the file; an existing one is replaced.
        inputs: an example batch, a tensor or several.

    Example:
        >>> engram.export_program(model, "model.pt2", inputs)
        >>> logits = torch.export.load("model.pt2").module()(inputs)
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
    write_or_refuse(Path(path), content)


def installed(package: str) -> Any:
    """A package of the extra `onnx`, or a sentence on how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as reason:
        raise InputError(f"{package} is not installed: pip install 'engram-cl[onnx]'") from reason


def _on_host(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode on the CPU, where a model and its file can be compared exactly."""
    return _copy_of(model).cpu().eval()


def _as_batch(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs as a tuple of tensors with the same number of samples, at least one."""
    batch = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not batch or not all(isinstance(x, Tensor) and x.ndim for x in batch):
        raise InputError("inputs must be an example batch: a tensor with an axis for the samples, or several")
    sizes = sorted({len(x) for x in batch})
    if len(sizes) > 1 or sizes[0] == 0:
        raise InputError(
            f"inputs must all have the same number of samples, at least one, not {' and '.join(map(str, sizes))}"
        )
    return tuple(x.detach().cpu() for x in batch)


def _any_batch(batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Inputs to trace a model with, and a first axis of any length: PyTorch would fix one of length 1."""
    size = torch.export.Dim("batch")
    return tuple(torch.cat([x, x]) for x in batch), tuple({0: size} for _ in batch)


def _attempt(model: nn.Module, make: Callable[[], Made]) -> Made:
    """What `make` returns; its errors, of many kinds and many lines, become one sentence."""
    try:
        with _quiet():
            return make()
    except InputError:
        raise
    except Exception as reason:
        first: BaseException = reason
        while first.__cause__ is not None:
            first = first.__cause__
        raise InputError(f"{type(model).__name__} cannot be exported: {_first_line(first)}") from reason


def _first_line(reason: BaseException) -> str:
    return next((line.strip() for line in str(reason).splitlines() if line.strip()), type(reason).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' messages about packages that are missing and about their own future."""
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
    """Refuse a file whose outputs differ from the model's: on the batch, one sample of it, and twice the batch."""
    for given in (batch, tuple(x[:1] for x in batch), tuple(torch.cat([x, x]) for x in batch)):
        expected, found = model(*given), exported(*given)
        if not isinstance(expected, Tensor):
            raise InputError(f"an exported model must return one tensor, not a {type(expected).__name__}")
        if found.shape != expected.shape:
            raise InputError(f"the exported model returns the shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        # half of the digits: other libraries sum in another order
        tolerance = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0
        # equal infinities, e.g. of masked outputs, have no difference
        apart = _largest((found.double() - expected.double()).masked_fill(found == expected, 0))
        if not apart <= tolerance * max(1.0, _largest(expected[expected.isfinite()].double())):
            raise InputError(f"the exported model does not compute the same: its outputs differ by {apart:.3g}")


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0
