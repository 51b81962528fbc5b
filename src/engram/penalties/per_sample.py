"""Sums over samples of a function of each sample's own gradient, exact: Σ_b f(∂ o_b / ∂θ), f = square or abs.

The gradient of a linear layer for one sample is an outer product, d_j x_i, and f(d_j x_i) = f(d_j) f(x_i). So the sum
over a batch is one matrix product, f(D)ᵀ f(X): exact, at the price of a forward and a backward pass. A convolution
takes one small product per sample. That holds where a layer's own forward, called once on one row per sample, is all
that uses its parameters. All else goes through `torch.func.vmap`; or one backward pass per sample, if it must.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from engram.nn.modules import call_with, is_mapped
from engram.penalties.step import at_least_single, zeros_for_sums
from engram.penalties.task_checks import check_no_hidden_uses, check_rows

Objective = Callable[..., Tensor]  # (outputs (B, C), *per-sample arguments (B, ...)) -> (B,)
Function = Callable[[Tensor], Tensor]  # torch.square or torch.abs: f(ab) = f(a) f(b)
FEW = 8  # samples that show which layers are called once, with a row for each sample
MAPPED = 2**24  # numbers in the gradients of the samples that are mapped at once, if these are 64 or more


@dataclass(frozen=True)
class ProductLayer:
    """A layer whose gradient for a sample is an outer product, and the shape of its output for one sample."""

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    parameters: frozenset[str]  # the names, in the model, of those that only the layer's own call uses


Layers = dict[str, ProductLayer]  # by the prefix of the layer's parameters


def sum_per_sample(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    *arguments: Tensor,
) -> dict[str, Tensor]:
    """Σ_b function(∂ objective_b / ∂θ) for each named parameter.

    Args:
        model: in evaluation mode.
        parameters: by name.
        objective: a function of the outputs (B, C) and the arguments, with one value for each sample.
        function: torch.square or torch.abs.
        inputs: a batch.
        arguments: further arguments of `objective`, one row for each sample.

    Example:
        >>> norm = lambda outputs: outputs.square().sum(dim=1)
        >>> sums = sum_per_sample(model.eval(), dict(model.named_parameters()), norm, torch.abs, inputs)
    """
    known = _known.get(model, {})
    kind = inputs.shape[1:]
    is_first = kind not in known
    if is_first:
        known[kind] = find_product_layers(model, inputs[:FEW])
    sums = _sum_by_products(model, known[kind], objective, function, inputs, arguments)
    if sums is None:  # what the model does depends on the batch
        sums = _sum_by_products(model, find_product_layers(model, inputs), objective, function, inputs, arguments) or {}
    left = {name: parameter for name, parameter in parameters.items() if name not in sums}
    if left:
        sums |= _sum_by_mapping(model, left, objective, function, inputs, arguments)
        if is_first and not is_mapped():
            check_no_hidden_uses(model, left, inputs)
    return {name: sums[name] for name in parameters}


_known: WeakKeyDictionary[nn.Module, dict[torch.Size, Layers]] = WeakKeyDictionary()


@contextmanager
def known_layers(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, product layers are searched for once for each shape of a sample.

    Args:
        model: any.

    Example:
        >>> with known_layers(model):
        ...     sums = sum_per_sample(model, parameters, objective, torch.square, inputs)
    """
    _known[model] = {}
    try:
        yield
    finally:
        _known.pop(model, None)


def find_product_layers(model: nn.Module, inputs: Tensor, *arguments: Tensor) -> Layers:
    """The layers that are called once, with one row per sample, and whose parameters nothing else uses.

    Args:
        model: any.
        inputs: a batch.
        arguments: further arguments of the model.

    Example:
        >>> list(find_product_layers(nn.Sequential(nn.Linear(3, 2)), torch.ones(4, 3)))
        ['0.']
    """
    candidates = {f"{name}." if name else "": layer for name, layer in model.named_modules() if _has_products(layer)}
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {prefix: [] for prefix in candidates}

    def watch(prefix: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if args:  # an input passed by name is left to vmap
                calls[prefix].append((args[0], output))
            return output.clone()  # so that an activation in place does not change the output that is kept

        return hook

    with _hooked(candidates, watch), torch.enable_grad():
        outputs = model(inputs, *arguments)
    check_rows(outputs, len(inputs))
    num_uses, nodes = _count_uses(outputs)
    found = {}
    for prefix, seen in calls.items():
        layer = candidates[prefix]
        if len(seen) != 1 or not seen[0][1].requires_grad or not _is_row_a_sample(layer, seen[0][0], len(inputs)):
            continue
        if seen[0][1].grad_fn not in nodes:  # its output is not used, though its weights may be
            continue
        own = {prefix + name for name, theta in layer.named_parameters(recurse=False) if num_uses.get(theta) == 1}
        if own:
            found[prefix] = ProductLayer(layer, seen[0][1].shape[1:], seen[0][1].dtype, frozenset(own))
    return found


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], hook: Callable[[str], Callable]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook(prefix)) for prefix, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sum_by_products(
    model: nn.Module,
    layers: Layers,
    objective: Objective,
    function: Function,
    inputs: Tensor,
    arguments: tuple[Tensor, ...],
) -> dict[str, Tensor] | None:
    """The sums of all parameters whose gradients are known in closed form; None if a layer is used in another way."""
    if not layers:
        return {}

    def total(nudges: dict[str, Tensor]) -> tuple[Tensor, dict[str, list[Tensor]]]:
        """The objective as a function of something added to each layer's output: its gradient there is d."""
        entered: dict[str, list[Tensor]] = {prefix: [] for prefix in layers}

        def nudge(prefix: str) -> Callable:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
                if output.shape != nudges[prefix].shape:  # of other rows than before: as if it was not called
                    return None
                entered[prefix].append(args[0] if args else output)
                return output + nudges[prefix]

            return hook

        with _hooked({prefix: found.layer for prefix, found in layers.items()}, nudge):
            return objective(model(inputs), *arguments).sum(), entered

    nudges = {p: inputs.new_zeros((len(inputs), *found.shape), dtype=found.dtype) for p, found in layers.items()}
    # Not by `torch.func.grad`: that imports PyTorch's compiler, which takes seconds.
    with torch.enable_grad():
        value, entered = total({prefix: nudge.requires_grad_() for prefix, nudge in nudges.items()})
    uses, _ = _count_uses(value)
    once = all(len(seen) == 1 for seen in entered.values())
    if not once or any(uses.get(model.get_parameter(n)) != 1 for found in layers.values() for n in found.parameters):
        return None
    deltas = torch.autograd.grad(value, list(nudges.values()), materialize_grads=True)
    return {
        prefix + name: slopes
        for (prefix, product), delta in zip(layers.items(), deltas, strict=True)
        for name, slopes in _layer_sums(product.layer, entered[prefix][0], delta, function).items()
        if prefix + name in product.parameters
    }


def _has_products(layer: nn.Module) -> bool:
    """Whether a layer's forward is known: a subclass that overrides it may do anything with the weight."""
    if isinstance(layer, nn.Conv2d):
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return plain and type(layer).forward is nn.Conv2d.forward
    return type(layer).forward is nn.Linear.forward or hasattr(layer, "weight_slopes")


def _is_row_a_sample(layer: nn.Module, entered: Tensor, num_samples: int) -> bool:
    """Whether each row is a sample: with more axes that is uncertain, since a sequence may come first."""
    return len(entered) == num_samples and entered.ndim == (4 if isinstance(layer, nn.Conv2d) else 2)


def _count_uses(end: Tensor) -> tuple[dict[Tensor, int], set]:
    """How many operations of the graph behind `end` use each parameter: a tied weight has several. And all nodes."""
    uses: dict[Tensor, int] = {}
    seen, open_nodes = {end.grad_fn}, [end.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        for following, _ in node.next_functions if node is not None else ():
            variable = getattr(following, "variable", None)  # the end of a path, where .grad is accumulated
            if variable is not None:
                uses[variable] = uses.get(variable, 0) + 1
            elif following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return uses, seen


@torch.no_grad()
def _layer_sums(layer: nn.Module, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    """Σ_b function(gradient) of one layer's parameters, from its inputs x and its outputs' gradients d."""
    entered, delta = (tensor.to(at_least_single(tensor.dtype)) for tensor in (entered, delta))
    if isinstance(layer, nn.Conv2d):
        return _convolution_sums(layer, entered, delta, function)
    weight = function(delta).T @ function(entered)  # (B, out)ᵀ (B, in) -> (out, in)
    slopes = getattr(layer, "weight_slopes", None)
    sums = {"weight": weight} if slopes is None else {n: function(slope) * weight for n, slope in slopes().items()}
    if isinstance(layer, nn.Linear):
        sums["bias"] = function(delta).sum(dim=0)
    return sums


def _convolution_sums(layer: nn.Conv2d, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    assert not isinstance(layer.padding, str)  # `_has_products` saw to that
    patches = _patches(layer, entered)  # (B, in·k·k, L)
    patches = patches.unflatten(1, (layer.groups, -1))  # (B, G, in/G·k·k, L)
    d = delta.flatten(2).unflatten(1, (layer.groups, -1))  # (B, G, out/G, L)
    per_sample = torch.einsum("bgol,bgil->bgoi", d, patches)
    return {
        "weight": function(per_sample).sum(dim=0).reshape(layer.weight.shape),
        "bias": function(delta.flatten(2).sum(dim=2)).sum(dim=0),
    }


def _patches(layer: nn.Conv2d, entered: Tensor) -> Tensor:
    """What the kernel of a convolution sees, a column for each place.

    As a view that is copied once: `F.unfold` calls a GPU once for every sample, which takes most of the time.
    """
    assert not isinstance(layer.padding, str)
    if layer.dilation != (1, 1):
        return F.unfold(entered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    (rows, columns), (down, across) = layer.kernel_size, layer.stride
    padded = F.pad(entered, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]))
    windows = padded.unfold(2, rows, down).unfold(3, columns, across)  # (B, in, H′, W′, k, k)
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(entered), -1, windows.shape[2] * windows.shape[3])


def _sum_by_mapping(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    objective: Objective,
    function: Function,
    inputs: Tensor,
    arguments: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    def of_one(values: dict[str, Tensor], sample: Tensor, *own: Tensor) -> Tensor:
        outputs = call_with(model, values, sample[None])
        check_rows(outputs, 1)
        return objective(outputs, *(argument[None] for argument in own)).sum()

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    at_once = max(64, MAPPED // sum(value.numel() for value in values.values()))
    try:
        every = vmap(grad(of_one), in_dims=(None, *(0 for _ in (inputs, *arguments))), chunk_size=at_once)
        found = every(values, inputs, *arguments)
        return {name: function(g.to(at_least_single(g.dtype))).sum(dim=0) for name, g in found.items()}
    except RuntimeError as reason:
        warnings.warn(
            f"importances take one backward pass per sample, since the model cannot be mapped over samples ({reason})",
            RuntimeWarning,
            stacklevel=2,
        )
    sums = {name: zeros_for_sums(value) for name, value in values.items()}
    for sample in zip(inputs, *arguments, strict=True):
        tracked = {name: value.clone().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            gradients = torch.autograd.grad(of_one(tracked, *sample), list(tracked.values()), allow_unused=True)
        for name, gradient in zip(sums, gradients, strict=True):
            sums[name] += function(gradient.to(sums[name].dtype)) if gradient is not None else 0
    return sums
