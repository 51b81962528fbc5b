"""What every head of the family has: its two sizes, more classes on the way, and checks of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.nn.classes import check_targets, check_values, check_writable, grow_rows
from engram.nn.modules import shown_settings


class Head(nn.Module):
    """An output layer that is called as head(hidden, target).

    A head defines `reset_parameters`, `fold`, and what it computes: `write_then_read` of a training batch and `read`
    in evaluation. If not every tensor has a row per class, `class_rows` names those that have.

    Args:
        in_features: number m of features.
        out_features: number C of classes.

    Shape:
        hidden (B, m) and target (B,), or (B, T, m) and (B, T), → logits (B, C) or (B, T, C).

    Example:
        >>> class Scaled(Head):
        ...     def __init__(self, in_features, out_features):
        ...         super().__init__(in_features, out_features)
        ...         self.weight = nn.Parameter(torch.empty(out_features, in_features))
        ...         self.reset_parameters()
        ...     def reset_parameters(self):
        ...         nn.init.ones_(self.weight)
        ...     def read(self, hidden):
        ...         return 2 * hidden @ self.weight.T
        ...     def write_then_read(self, hidden, target):
        ...         return self.read(hidden)
    """

    plastic_parameters: tuple[str, ...] = ()  # those that no penalty protects
    sums: tuple[str, ...] = ()  # buffers that stay in double precision, whatever the model is moved to

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise InputError(f"a layer needs at least one feature and one class, not {in_features} and {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.check_values = True  # on a CPU, whether what is given is checked before it is written

    def grow(self, out_features: int) -> None:
        """Add classes: what is remembered of the old ones stays the same, bit for bit, and the new ones have nothing.

        Parameters become new tensors, so an existing optimizer does not know them: make a new one. Call
        `penalty.grow()` too if there is a penalty.

        Args:
            out_features: the new number of classes.

        Example:
            >>> head.grow(12)
        """
        grow_rows(self, out_features)

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {}

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits of hidden activations; in training mode, `target` is needed, and the memory is written."""
        self._check_hidden(hidden)
        if not self.training:
            return self.read(hidden)
        rows, target = self._checked_rows(hidden, target)
        if torch.is_autocast_enabled(hidden.device.type):
            with torch.autocast(hidden.device.type, enabled=False):  # a memory is a sum of small changes
                logits = self.write_then_read(rows.to(self._dtype), target)
        else:
            logits = self.write_then_read(rows, target)
        return logits.unflatten(0, hidden.shape[:-1])

    def read(self, hidden: Tensor) -> Tensor:
        """Logits (..., C) of features (..., m), by what is remembered now; changes nothing."""
        raise NotImplementedError

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Logits (B, C) of a training batch (B, m) with class numbers (B,), which is remembered."""
        raise NotImplementedError

    @property
    def changed_slowly(self) -> Iterable[Tensor]:
        """What a batch changes by a little, and half precision could not hold: all buffers but the sums."""
        return (buffer for name, buffer in self._buffers.items() if buffer is not None and name not in self.sums)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that the head computes in."""
        named = (*self.named_parameters(), *self.named_buffers())
        return next(t.dtype for name, t in named if t.is_floating_point() and name not in self.sums)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Sums stay in double precision when the model is moved to another type."""
        sums = {name: getattr(self, name) for name in self.sums}
        super()._apply(fn, recurse)
        for name, before in sums.items():
            if before is not None:
                now = getattr(self, name)
                setattr(self, name, now if now.dtype == torch.float64 else before.to(now.device))
        return self

    def extra_repr(self) -> str:
        return shown_settings(self)

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.ndim < 2 or hidden.shape[-1] != self.in_features:
            raise InputError(f"features must have shape (batch, {self.in_features}), not {tuple(hidden.shape)}")
        if hidden.dtype != self._dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise InputError(f"features must be {self._dtype} like the layer, not {hidden.dtype}")

    def _checked_rows(self, hidden: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features (rows, m) and class numbers (rows,) of a training batch, a sequence's steps as rows of their own."""
        if target is None:
            raise InputError(
                f"a {type(self).__name__} in training mode writes its memory and needs the batch's targets: "
                "call head(hidden, target), or head.eval() before predicting"
            )
        if isinstance(target, Tensor) and hidden.ndim > 2:
            if target.shape != hidden.shape[:-1]:
                raise InputError(
                    f"targets of features {tuple(hidden.shape)} must have shape {tuple(hidden.shape[:-1])}, "
                    f"not {tuple(target.shape)}"
                )
            target = target.flatten()
        hidden = hidden.flatten(0, -2)
        check_targets(target, len(hidden))
        check_writable(self, self.changed_slowly)
        if self.check_values:
            check_values(hidden, target, self.out_features)
        return hidden, target
