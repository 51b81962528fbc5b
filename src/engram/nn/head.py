"""What every head of the family has: its two sizes, more classes on the way, and checks of what it is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError
from engram.nn.classes import check_range, check_targets, grow_rows


class Head(nn.Module):
    """An output layer that is called as head(hidden, target).

    A head defines `reset_parameters`, `forward` and `fold`, and `class_rows` if not every tensor has a row per class.

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
        ...     def forward(self, hidden, target=None):
        ...         return 2 * hidden @ self.weight.T
    """

    plastic_parameters: tuple[str, ...] = ()  # those that no penalty protects

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

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.ndim < 2 or hidden.shape[-1] != self.in_features:
            raise InputError(f"features must have shape (batch, {self.in_features}), not {tuple(hidden.shape)}")

    def _checked_rows(self, hidden: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features (rows, m) and class numbers (rows,) of a training batch, a sequence's steps as rows of their own."""
        if target is None:
            raise InputError(
                f"a {type(self).__name__} in training mode writes its memory and needs the batch's targets: "
                "call head(hidden, target), or head.eval() before predicting"
            )
        hidden, target = hidden.flatten(0, -2), target.flatten() if isinstance(target, Tensor) else target
        check_targets(target, len(hidden))
        # Checking values makes an accelerator wait, and cannot be traced: there the caller is responsible.
        if self.check_values and hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            check_range(target, self.out_features)
            if not torch.isfinite(hidden).all():
                raise NotFiniteError("the features hold NaN or infinity, which would stay in the memory")
        return hidden, target
