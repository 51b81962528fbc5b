"""Sums over samples of a function of each sample's own gradient, exact: Σ_b f(∂ o_b / ∂θ), f = square or abs.

The gradient of a linear layer for one sample is an outer product, d_j x_i, and f(d_j x_i) = f(d_j) f(x_i), so the
sum over a batch is one matrix product, f(D)ᵀ f(X): exact, at the price of a forward and a backward pass. A
convolution takes one small product per sample. Parameters of any other module go through `torch.func.vmap`, or,
where a module cannot be mapped, through one backward pass per sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Objective = Callable[..., Tensor]  # (outputs (B, C), *per-sample arguments (B, ...)) -> (B,)
Function = Callable[[Tensor], Tensor]  # torch.square or torch.abs: f(ab) = f(a) f(b)


def sum_per_sample(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    *arguments: Tensor,
) -> dict[str, Tensor]:
    """Σ_b function(∂ objective_b / ∂θ) for each named parameter; the model must be in evaluation mode."""
    layers = _layers_with_products(model, parameters)
    sums, slow = _sum_by_products(model, layers, parameters, objective, function, inputs, arguments)
    if slow:
        sums |= _sum_by_mapping(model, slow, objective, function, inputs, arguments)
    return {name: sums[name] for name in parameters}


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which traces and BatchNorm statistics are only read; each module's own mode returns."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _layers_with_products(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Module]:
    """The modules, by prefix, whose per-sample gradients are known in closed form."""
    return {
        f"{prefix}." if prefix else "": module
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear) or hasattr(module, "weight_slopes") or _is_plain_convolution(module)
    }


def _is_plain_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _sum_by_products(
    model: nn.Module,
    layers: dict[str, nn.Module],
    parameters: dict[str, nn.Parameter],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    arguments: tuple[Tensor, ...],
) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """The sums of all parameters in `layers`, and the parameters that are left."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {prefix: [] for prefix in layers}

    def watch(prefix: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen[prefix].append((args[0].detach(), output))
            return output.clone()  # so that an activation in place does not change the output that is kept

        return hook

    handles = [layer.register_forward_hook(watch(prefix)) for prefix, layer in layers.items()]
    try:
        with torch.enable_grad():
            outputs = model(inputs)
            total = objective(outputs, *arguments).sum()
    finally:
        for handle in handles:
            handle.remove()

    # A layer that was called twice, or not at all, has no single outer product: it is left to the mapping.
    called = {prefix: calls[0] for prefix, calls in seen.items() if len(calls) == 1 and calls[0][1].requires_grad}
    deltas = torch.autograd.grad(total, [output for _, output in called.values()], allow_unused=True) if called else ()
    sums: dict[str, Tensor] = {}
    left = dict(parameters)
    owners = _count_owners(model)
    for (prefix, (entered, _)), delta in zip(called.items(), deltas, strict=True):
        if delta is None or len(entered) != len(inputs):
            continue
        for name, value in _layer_sums(layers[prefix], entered, delta, function).items():
            if prefix + name in left and owners[left[prefix + name]] == 1:
                del left[prefix + name]
                sums[prefix + name] = value
    return sums, left


def _count_owners(model: nn.Module) -> dict[nn.Parameter, int]:
    """In how many places each parameter stands: tied weights get gradient from all of them."""
    owners: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    return owners


@torch.no_grad()
def _layer_sums(layer: nn.Module, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    """Σ_b function(gradient) of one layer's parameters, from its inputs x and its outputs' gradients d."""
    if isinstance(layer, nn.Conv2d):
        return _convolution_sums(layer, entered, delta, function)
    if entered.ndim == 2:
        weight = function(delta).T @ function(entered)  # (B, out)ᵀ (B, in) -> (out, in)
        bias = function(delta).sum(dim=0)
    else:  # positions (a sequence, say) share the weights: they add up within a sample, before f
        x, d = entered.flatten(1, -2), delta.flatten(1, -2)  # (B, T, in), (B, T, out)
        weight = function(torch.einsum("bto,bti->boi", d, x)).sum(dim=0)
        bias = function(d.sum(dim=1)).sum(dim=0)
    slopes = getattr(layer, "weight_slopes", None)
    if slopes is not None:
        return {name: function(slope) * weight for name, slope in slopes().items()}
    return {"weight": weight, "bias": bias}


def _convolution_sums(layer: nn.Conv2d, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    assert not isinstance(layer.padding, str)  # `_is_plain_convolution` saw to that
    patches = F.unfold(entered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (B, in·k·k, L)
    patches = patches.unflatten(1, (layer.groups, -1))  # (B, G, in/G·k·k, L)
    d = delta.flatten(2).unflatten(1, (layer.groups, -1))  # (B, G, out/G, L)
    per_sample = torch.einsum("bgol,bgil->bgoi", d, patches)
    return {
        "weight": function(per_sample).sum(dim=0).reshape(layer.weight.shape),
        "bias": function(delta.flatten(2).sum(dim=2)).sum(dim=0),
    }


def _sum_by_mapping(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    arguments: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    def of_one(values: dict[str, Tensor], sample: Tensor, *own: Tensor) -> Tensor:
        outputs = functional_call(model, values, (sample[None],))
        return objective(outputs, *(argument[None] for argument in own)).sum()

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    try:
        every = vmap(grad(of_one), in_dims=(None, 0, *(0 for _ in arguments)), chunk_size=64)
        return {name: function(g).sum(dim=0) for name, g in every(values, inputs, *arguments).items()}
    except RuntimeError as reason:
        warnings.warn(
            f"importances take a backward pass for each sample, as the model cannot be mapped over samples ({reason})",
            RuntimeWarning,
            stacklevel=2,
        )
    sums = {name: torch.zeros_like(value) for name, value in values.items()}
    for sample in zip(inputs, *arguments, strict=True):
        tracked = {name: value.clone().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(of_one(tracked, *sample), list(tracked.values()), allow_unused=True)
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += function(gradient) if gradient is not None else 0
    return sums
