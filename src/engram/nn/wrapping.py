"""What is around a model, and the model within."""

from __future__ import annotations

import gc
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_seen: WeakSet[DistributedDataParallel] = WeakSet()


def bare(model: nn.Module) -> nn.Module:
    """The model itself, whose weights have their own names, within torch.compile or DistributedDataParallel or both."""
    while True:
        within = getattr(model, "_orig_mod", model)
        if isinstance(within, DistributedDataParallel):
            note(within)
            within = within.module
        if within is model:
            return model
        model = within


def note(wrapper: DistributedDataParallel) -> None:
    """Remember one, while it lives, so that it need not be searched for."""
    _seen.add(wrapper)


def parallel_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around a model, or around a larger one of which it is a part.

    A model does not know what is around it. So, unless it was seen before, all that there is in memory is looked at,
    which takes about a tenth of a second.
    """
    if _among_seen(model) is None:
        # by the type: some objects answer isinstance() with work
        for wrapper in [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]:
            note(wrapper)
    return _among_seen(model)


def _among_seen(model: nn.Module) -> DistributedDataParallel | None:
    return next((wrapper for wrapper in _seen if any(part is model for part in wrapper.modules())), None)
