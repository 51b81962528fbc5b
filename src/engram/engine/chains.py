"""Layers of which it is certain, for any batch, how they are used: what a stack may run in a way of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from engram.nn.networks import Network


@dataclass(frozen=True)
class Link:
    """A layer of a chain; `sole` if it is called nowhere else, and nothing else has a hand in it."""

    name: str
    layer: nn.Module
    sole: bool


def chain_of(model: nn.Module) -> list[Link]:
    """The layers of a network's features in the order in which they are called, if that is plain to see.

    It is where they stand in an `nn.Sequential`, or in one within another. What a layer of another class does inside is
    not looked into: such a module is a link as a whole.
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
            sole = places[id(child)] == 1 and _is_as_made(child) and all(owners[id(p)] == 1 for p in own)
            links.append(Link(f"{prefix}.{name}", child, sole))

    follow("features", model.features)
    return links


def _is_sequential(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and _is_as_made(module)


def _is_as_made(module: nn.Module) -> bool:
    """Whether it does what its class says: no hooks, which may do anything, and no `forward` of this one's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and not {"forward", "_call_impl"} & set(vars(module)) and "__call__" not in vars(type(module))
