"""Sums over samples of a function of each sample's own gradient, exact: Σ_b f(∂ o_b / ∂θ), f = square or abs.

The gradient of a linear layer for one sample is an outer product, d_j x_i, and f(d_j x_i) = f(d_j) f(x_i), so the
sum over a batch is one matrix product, f(D)ᵀ f(X): exact, at the price of a forward and a backward pass. A
convolution takes one small product per sample. That holds where a layer's own forward, called once on one row a
sample, is all that uses its parameters. Everything else goes through `torch.func.vmap`, or, where a module cannot
be mapped, through one backward pass per sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

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
    sums, left = _sum_by_products(model, parameters, objective, function, inputs, arguments)
    if left:
        sums |= _sum_by_mapping(model, left, objective, function, inputs, arguments)
    return {name: sums[name] for name in parameters}


def _sum_by_products(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    arguments: tuple[Tensor, ...],
) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """The sums of all parameters whose gradients are known in closed form, and the parameters that are left."""
    layers = {f"{name}." if name else "": layer for name, layer in model.named_modules() if _has_products(layer)}
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {prefix: [] for prefix in layers}

    def watch(prefix: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if args:  # an input passed by name is left to the mapping
                calls[prefix].append((args[0].detach(), output))
            return output.clone()  # so that an activation in place does not change the output that is kept

        return hook

    handles = [layer.register_forward_hook(watch(prefix)) for prefix, layer in layers.items()]
    try:
        with torch.enable_grad():
            total = objective(model(inputs), *arguments).sum()
    finally:
        for handle in handles:
            handle.remove()

    num_uses = _count_uses(total)
    once = {
        prefix: seen[0]
        for prefix, seen in calls.items()
        if len(seen) == 1 and seen[0][1].requires_grad and _is_row_a_sample(layers[prefix], seen[0][0], len(inputs))
    }
    deltas = torch.autograd.grad(total, [output for _, output in once.values()], allow_unused=True) if once else ()
    sums: dict[str, Tensor] = {}
    left = dict(parameters)
    for (prefix, (entered, _)), delta in zip(once.items(), deltas, strict=True):
        if delta is None:
            continue
        for name, value in _layer_sums(layers[prefix], entered, delta, function).items():
            if prefix + name in left and num_uses.get(left[prefix + name]) == 1:
                del left[prefix + name]
                sums[prefix + name] = value
    return sums, left


def _has_products(layer: nn.Module) -> bool:
    """Whether a layer's forward is known: a subclass with a forward of its own may do anything with the weight."""
    if isinstance(layer, nn.Conv2d):
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return plain and type(layer).forward is nn.Conv2d.forward
    return type(layer).forward is nn.Linear.forward or hasattr(layer, "weight_slopes")


def _is_row_a_sample(layer: nn.Module, entered: Tensor, num_samples: int) -> bool:
    """Of inputs with more axes one cannot know which is the sample's: a sequence may come first."""
    return len(entered) == num_samples and entered.ndim == (4 if isinstance(layer, nn.Conv2d) else 2)


def _count_uses(total: Tensor) -> dict[Tensor, int]:
    """How many operations of the graph behind `total` use each parameter: a tied weight has several."""
    uses: dict[Tensor, int] = {}
    seen = {total.grad_fn}
    open_nodes = [total.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        for following, _ in node.next_functions if node is not None else ():
            variable = getattr(following, "variable", None)  # the end of a path, where .grad is accumulated
            if variable is not None:
                uses[variable] = uses.get(variable, 0) + 1
            elif following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return uses


@torch.no_grad()
def _layer_sums(layer: nn.Module, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    """Σ_b function(gradient) of one layer's parameters, from its inputs x and its outputs' gradients d."""
    if isinstance(layer, nn.Conv2d):
        return _convolution_sums(layer, entered, delta, function)
    weight = function(delta).T @ function(entered)  # (B, out)ᵀ (B, in) -> (out, in)
    slopes = getattr(layer, "weight_slopes", None)
    if slopes is not None:
        return {name: function(slope) * weight for name, slope in slopes().items()}
    return {"weight": weight, "bias": function(delta).sum(dim=0)}


def _convolution_sums(layer: nn.Conv2d, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    assert not isinstance(layer.padding, str)  # `_has_products` saw to that
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
