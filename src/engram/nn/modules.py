"""What is done with any module: freeze it for a moment, find its slow weights and fast parts, call it for a stack."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the `with` block; afterwards each module has its own mode again.

    Traces and BatchNorm statistics are only read in evaluation mode.

    Args:
        model: any module.

    Example:
        >>> with frozen(model), torch.no_grad():
        ...     logits = model(inputs)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], *arguments: Any) -> Any:
    """`torch.func.functional_call`, which leaves a model as it was even where one module is used in several places.

    PyTorch's own replaces the tensors of such a module twice, and then gives back the replacement.

    Args:
        model: any module.
        tensors: by the names of `named_parameters`, which names a tensor once wherever it is used.
        arguments: of the call.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> twice = nn.Sequential(layer, layer)
        >>> call_with(twice, {name: 0 * theta for name, theta in twice.named_parameters()}, torch.ones(1, 2)).tolist()
        [[0.0, 0.0]]
    """
    given = {id(theta): tensors[name] for name, theta in model.named_parameters() if name in tensors}
    of_each_module = {
        f"{prefix}.{name}" if prefix else name: given[id(theta)]
        for prefix, module in model.named_modules()
        for name, theta in module.named_parameters(recurse=False)
        if id(theta) in given
    }
    buffers = {name: tensor for name, tensor in tensors.items() if name not in of_each_module}
    return functional_call(model, {**buffers, **of_each_module}, arguments, tie_weights=False)


def slow_parameters(model: nn.Module, with_alpha: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model by name, without those of the plastic component (Eq. 4).

    Args:
        model: any module.
        with_alpha: include the plasticity coefficients α.

    Example:
        >>> list(slow_parameters(engram.DHPSoftmax(4, 3)))
        ['weight']
    """
    plastic = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "plastic_parameters", ())
        if not (with_alpha and name == "alpha")
    }
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in plastic}


def fast_parts(model: nn.Module, slow: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """For each slow weight that carries a trace, a function that returns what the trace adds to it.

    Args:
        model: any module.
        slow: its slow weights by name.

    Example:
        >>> list(fast_parts(head, slow_parameters(head)))
        ['weight']
    """
    found = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        fast_part = getattr(module, "fast_part", None)
        if weight in slow and hasattr(module, "plastic_parameters") and callable(fast_part):
            found[weight] = fast_part
    return found


def as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer that has copies of this weight and bias. No random numbers are drawn.

    Args:
        weight: (out_features, in_features).
        bias: (out_features,); None for none.

    Example:
        >>> as_linear(torch.ones(2, 3))
        Linear(in_features=3, out_features=2, bias=False)
    """
    rows, columns = weight.shape
    like = {"device": weight.device, "dtype": weight.dtype}
    linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=bias is not None, **like)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def shown_settings(layer: nn.Module, **more: Any) -> str:
    """What a layer was made with, as `print` shows it: what has no default, and what differs from its default.

    Values are the layer's attributes of these names, or its `plastic_settings`. A parameter that is learned is shown
    as it started, if `initial_NAME` holds that.

    Args:
        layer: any module.
        more: values that are no attributes, by name.

    Example:
        >>> shown_settings(engram.heads.create("cope", 8, 3, rate=0.1))
        'in_features=8, out_features=3, rate=0.1'
    """
    known = {**vars(layer), **getattr(layer, "plastic_settings", {}), **more}
    shown = []
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        value = known.get(f"initial_{name}", known.get(name, parameter.default))
        if repr(value) != repr(parameter.default):  # some values, such as arrays, cannot be compared
            shown.append(f"{name}={value!r}")
    return ", ".join(shown)


def constant_for_compiler(function: Function) -> Function:
    """A decorator: a compiler calls the function once, takes its result for a constant, and does not trace it.

    It leaves the mark that `torch.compiler.assume_constant_result` leaves. That one imports the compiler too, which
    takes a second, and most programs that use a head compile nothing.

    Args:
        function: any.

    Example:
        >>> @constant_for_compiler
        ... def number_of_processes() -> int: ...
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_compiler
def is_mapped() -> bool:
    """Whether this call is mapped or differentiated by `torch.func`, where values cannot be looked at.

    Example:
        >>> is_mapped()
        False
    """
    # PyTorch has no public name for this question. `torch.autograd.Function.apply` asks it in the same words.
    return bool(torch._C._are_functorch_transforms_active())


def is_exported() -> bool:
    """Whether `torch.export` traces this call; always False for PyTorch 2.6, which does not tell.

    Example:
        >>> is_exported()
        False
    """
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def mapped(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply an autograd function that accepts leading axes; within `torch.func.vmap`, call it once for all models.

    Args:
        function: its tensors may have further axes in front, the same for all.
        inputs: its arguments, as for one model.

    Example:
        >>> logits, hebb = mapped(PlasticSoftmax, hidden, target, weight, alpha, eta, hebb)
    """
    if is_mapped():
        return _Mapped.apply(function, *inputs)
    return function.apply(*inputs)


class _Mapped(torch.autograd.Function):
    """`torch.func.vmap` calls its `vmap` once for all models; it moves the mapped axis to the front of each tensor."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise NotImplementedError("this function is only called within vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Any, *inputs: Any) -> tuple[Any, int]:
        def in_front(value: Any, axis: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)

        return mapped(function, *map(in_front, inputs, in_dims[1:])), 0
