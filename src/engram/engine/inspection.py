"""Inspect a model before it trains: which layers it calls in a plain chain, and whether it draws random numbers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engram.common.seeding import derive_seed
from engram.nn.networks import Network

# --- layers that are certain to be used in one way, for any batch: a stack may run them in a faster way


@dataclass(frozen=True)
class Link:
    """A layer of a chain; `sole` if it is called nowhere else, and nothing else changes what it does."""

    name: str
    layer: nn.Module
    sole: bool


def chain_of(model: nn.Module) -> list[Link]:
    """The layers of a network's features in the order in which they are called, if that is certain.

    It is certain in an `nn.Sequential`, or in one within another. A module of another class is one link: what it does
    inside is not inspected.

    Args:
        model: any module; only a `Network` has a chain.

    Example:
        >>> [link.name for link in chain_of(Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), head))]
        ['features.0', 'features.1']
    """
    if not isinstance(model, Network) or not _is_sequential(model.features):
        return []
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    links: list[Link] = []

    def follow(prefix: str, module: nn.Module) -> None:
        for name, child in module._modules.items():
            if child is None:
                continue
            if _is_sequential(child):
                follow(f"{prefix}.{name}", child)
                continue
            own = [p for p in child._parameters.values() if p is not None]
            sole = places[id(child)] == 1 and is_as_made(child) and all(owners[id(p)] == 1 for p in own)
            links.append(Link(f"{prefix}.{name}", child, sole))

    follow("features", model.features)
    return links


def _is_sequential(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and is_as_made(module)


def is_as_made(module: nn.Module) -> bool:
    """Whether it does what its class says: it has no hooks, which may do anything, and no `forward` set on it alone.

    Args:
        module: any.

    Example:
        >>> is_as_made(nn.Linear(2, 2))
        True
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not {"forward", "_call_impl"} & set(vars(module)) and "__call__" not in vars(type(module))


def has_gradient_hooks(theta: Tensor) -> bool:
    """Whether hooks are called with the gradient that autograd makes; an engine must then leave it to autograd.

    Args:
        theta: a parameter.

    Example:
        >>> has_gradient_hooks(nn.Linear(2, 2).weight)
        False
    """
    return bool(theta._backward_hooks or getattr(theta, "_post_accumulate_grad_hooks", None))


# --- modules that draw random numbers while they train, as dropout does: each draw depends on its position alone


def draws_numbers(model: nn.Module, inputs: Tensor, targets: Tensor) -> bool:
    """Whether a training pass draws from PyTorch's generators, tried on a copy of the model.

    Args:
        model: any.
        inputs: a small batch.
        targets: its targets.

    Example:
        >>> draws_numbers(Network(nn.Dropout(), head), inputs, targets)
        True
    """
    with own_generators(inputs.device), torch.no_grad():
        before = _states(inputs.device)
        copy.deepcopy(model).train()(inputs, targets)
        return not all(torch.equal(a, b) for a, b in zip(before, _states(inputs.device), strict=True))


@contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """Within the `with` block, draws and seeds leave the generators outside as they were.

    Args:
        device: where numbers may be drawn, besides the CPU.

    Example:
        >>> with own_generators(torch.device("cpu")):
        ...     torch.manual_seed(0)
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def seed_draws(seed: int, *position: int) -> None:
    """Make the next draws depend on nothing but their position.

    Args:
        seed: of the experiment.
        position: trial, task, epoch, step.

    Example:
        >>> seed_draws(0, 2, 1, 0, 17)
    """
    torch.manual_seed(derive_seed(seed, "draws", *position))


def _states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def is_finite(model: nn.Module) -> bool:
    """Whether all parameters and buffers are finite.

    Args:
        model: any.

    Example:
        >>> is_finite(nn.Linear(4, 2))
        True
    """
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
