"""Heads that remember their classes as sums, and have no weights to learn: nearest mean, streaming LDA, ridge.

    n_c = #{y = c}        S_c = Σ_{y = c} ψ(h)        G = Σ ψ(h) ψ(h)ᵀ

All three read the same sums. They forget nothing, need one pass, and give the same in any order of the samples.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import HEADS
from engram.nn import memory
from engram.nn.classes import HEAD_INITS, draw_slow_weights
from engram.nn.distributed import add_over_ranks, ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear, is_exported, is_mapped
from engram.nn.psi import Psi, Readout
from engram.nn.typed import typed

READINGS = ("nearest-mean", "lda", "ridge")


class MemoryHead(Head):
    """What the memory heads share: ψ, the sums, and when they are written and read.

    In training, a call adds the batch to the sums. In evaluation, the sums are read: `settle` solves for the weights of
    a linear layer, once, and keeps them until more is written.

    With `learn_features` the head also has slow weights θ. Training then returns θ ψ(h), whose loss trains the
    features in front of the head; evaluation reads the memory all the same. Without it there is nothing to train:
    training returns the logits of the last reading, without a gradient. Further arguments are those of `Psi`.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        read: "nearest-mean", "lda" or "ridge".
        shrinkage: ε in [0, 1], of "lda" and "ridge"; None for `memory.usual_shrinkage`, which falls as samples come.
        learn_features: whether θ is there, to train the features in front.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).
    """

    sums = ("count", "total", "moment")
    weight: nn.Parameter | None  # θ (C, k)
    count: Tensor  # n (C,)
    total: Tensor  # S (C, k)
    moment: Tensor | None  # G (k, k)
    read_weight: Tensor  # (C, k), the last reading
    read_bias: Tensor  # (C,)
    unread: Tensor  # (), whether anything was written since

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        read: str,
        shrinkage: float | None = None,
        learn_features: bool = False,
        head_init: str = "linear",
        **psi: Any,
    ):
        super().__init__(in_features, out_features)
        check_choice("read", read, READINGS)
        check_choice("head_init", head_init, HEAD_INITS)
        if shrinkage is not None and not 0 <= shrinkage <= 1:
            raise InputError(f"shrinkage must be a number in [0, 1], not {shrinkage!r}")
        self.kind, self.shrinkage, self.learn_features = read, shrinkage, learn_features
        self.head_init = head_init
        self.settled = False  # as `unread` says it, for an exporter, who cannot look into a tensor
        self.psi = Psi(in_features, **psi)
        k = self.psi.out_features
        if has_moment := read != "nearest-mean":
            memory.check_moment_fits(k)
        shape = (out_features, k)
        self.register_parameter("weight", nn.Parameter(torch.empty(shape)) if learn_features else None)
        self.register_buffer("count", torch.empty(out_features, dtype=torch.float64))
        self.register_buffer("total", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("moment", torch.empty(k, k, dtype=torch.float64) if has_moment else None)
        self.register_buffer("read_weight", torch.empty(shape))
        self.register_buffer("read_bias", torch.empty(out_features))
        self.register_buffer("unread", torch.empty((), dtype=torch.bool))
        self.reset_parameters()

    @property
    def class_rows(self) -> tuple[str, ...]:
        """The tensors with a row for each class."""
        return ("count", "total", "read_weight", "read_bias", *(("weight",) if self.weight is not None else ()))

    @property
    def changed_slowly(self) -> tuple[Tensor, ...]:
        """Nothing: the last reading is computed anew from the sums."""
        return ()

    def reset_parameters(self) -> None:
        """An empty memory, and θ as `head_init` says. R stays as it was drawn."""
        if self.weight is not None:
            draw_slow_weights(self.weight, self.head_init)
        for name in ("count", "total", "moment", "read_weight", "unread"):
            if getattr(self, name) is not None:
                getattr(self, name).zero_()
        self.read_bias.fill_(memory.UNSEEN)

    # --- writing

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits of hidden activations; in training mode, `target` is needed, and is written."""
        self._check_hidden(hidden)
        psi = self.psi(hidden)
        if not self.training:
            self._settle_if_needed()
            return F.linear(psi, self.read_weight, self.read_bias)
        self._write(psi, target)
        if self.weight is not None:
            return F.linear(psi, self.weight)
        logits = F.linear(psi.detach(), self.read_weight, self.read_bias)
        lowest = logits.masked_fill(logits <= memory.UNSEEN, torch.inf).amin(dim=-1, keepdim=True)
        return torch.maximum(logits, torch.where(lowest.isfinite(), lowest, 0))  # so that a loss stays finite

    def write(self, hidden: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """Add samples to the memory, in either mode.

        Args:
            hidden: features (B, m) or (B, T, m).
            target: class numbers (B,) or (B, T).
            sample_weight: one for each, at least 0; 2 counts as two samples.

        Example:
            >>> head.write(features, labels)
        """
        self._check_hidden(hidden)
        if sample_weight is not None:
            memory.check_sample_weight(sample_weight, hidden.shape[:-1])
            sample_weight = sample_weight.flatten()
        self._write(self.psi(hidden), target, sample_weight)

    @torch.no_grad()
    def _write(self, psi: Tensor, target: Tensor | None, sample_weight: Tensor | None = None) -> None:
        psi, target = self._checked_rows(psi.detach(), target)
        parts = [*memory.class_sums(psi, target, self.out_features, sample_weight)]
        parts += [] if self.moment is None else [memory.second_moment(psi, sample_weight)]
        if (ranks := ranks_of_call(self)) is not None:
            add_over_ranks(parts, ranks)
        for remembered, part in zip((self.count, self.total, self.moment), parts, strict=False):
            assert remembered is not None
            remembered.add_(part)
        self.unread.copy_(torch.ones_like(self.unread))
        self.settled = False

    # --- reading

    def reading(self) -> memory.Reading:
        """Weight and bias that the sums stand for, in double precision.

        Example:
            >>> weight, bias = head.reading()
        """
        mean = memory.class_means(self.count, self.total)
        if self.moment is None:
            return memory.read_nearest_mean(mean)
        usual, given = memory.usual_shrinkage(len(self.moment), self.count.sum()), self.shrinkage
        shrinkage = usual if given is None else given
        if self.kind == "lda":
            covariance = memory.within_class_covariance(self.count, self.total, self.moment)
            return memory.read_lda(mean, covariance, shrinkage)
        # one-hot targets: Σ ψ yᵀ = Sᵀ, and Σ y = n
        num_samples, total = self.count.sum(), self.total.sum(dim=0)
        spread = (self.moment.diagonal() - total.square() / num_samples).mean()
        penalty = torch.where(spread > 0, shrinkage * spread, 1)  # all samples alike: there is nothing but the counts
        sums = (self.moment, self.total.mT, total, self.count, num_samples)
        return memory.read_ridge(*sums, ridge=penalty, setting="shrinkage")

    @torch.no_grad()
    def settle(self) -> None:
        """Read the memory: solve for the weights that evaluation uses. It is called when needed.

        What all classes share is left out: it changes no probability, and may be far larger than their differences.

        Example:
            >>> head.settle()
        """
        if not self.count.any():
            raise InputError("nothing was written into this head yet: call it in training mode, with targets, first")
        weight, bias = self.reading()
        seen = self.count > 0
        weight, bias = weight - weight[seen].mean(dim=0), bias - bias[seen].mean()
        self.read_weight.copy_(torch.where(seen.unsqueeze(-1), weight, 0))
        self.read_bias.copy_(torch.where(seen, bias, memory.UNSEEN))
        self.unread.fill_(False)
        self.settled = True

    def _settle_if_needed(self) -> None:  # in a stack the engine settles each model; an exporter sees the last reading
        if is_exported() and not self.settled:
            raise InputError("call settle() before this head is exported: it holds what was not read yet, or nothing")
        if not is_exported() and not is_mapped():
            settle = self._settle_if_unread  # at each call, also of a compiled model; a decorator imports the compiler
            (torch.compiler.disable(settle) if torch.compiler.is_compiling() else settle)()

    def _settle_if_unread(self) -> None:
        if self.unread or (self.check_values and not self.count.any()):
            self.settle()
        self.settled = True

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """The same function as a plain linear layer, with ψ in front of it where there is one.

        Example:
            >>> linear = head.fold()
        """
        self._settle_if_needed()
        linear = as_linear(self.read_weight, self.read_bias)
        return linear if self.psi.is_identity else Readout(copy.deepcopy(self.psi), linear)

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        of_psi = {"normalised": self.psi.normalised, "top_k": self.psi.top_k}
        return {"read": self.kind, "shrinkage": self.shrinkage, **of_psi}


@HEADS.register(
    "ncm",
    memory=True,
    listed=False,
    settings="learn_features normalised random_features random_window top_k head_init",
    words="an output layer that picks the class with the nearest mean",
)
def ncm(in_features: int, out_features: int, **psi: Any) -> MemoryHead:
    """The class with the nearest mean, as in iCaRL:  z_c = 2 μ_cᵀ ψ − ‖μ_c‖².

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        psi: the settings of `MemoryHead`.

    Example:
        >>> head = engram.heads.create("ncm", 512, 10)
    """
    return MemoryHead(in_features, out_features, read="nearest-mean", **psi)


@HEADS.register(
    "slda",
    memory=True,
    listed=False,
    settings="learn_features normalised random_features random_window top_k shrinkage head_init",
    words="an output layer by linear discriminant analysis, from running sums",
)
def slda(in_features: int, out_features: int, **settings: Any) -> MemoryHead:
    """Streaming linear discriminant analysis (Hayes & Kanan 2020):  z_c = μ_cᵀ Λ ψ − ½ μ_cᵀ Λ μ_c.

    Λ is the inverse of the covariance within classes, which all classes share, shrunk towards the identity.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        settings: those of `MemoryHead`.

    Example:
        >>> head = engram.heads.create("slda", 784, 10, random_features=2000)
    """
    return MemoryHead(in_features, out_features, read="lda", **settings)


@HEADS.register(
    "ridge",
    memory=True,
    listed=False,
    settings="learn_features normalised random_features random_window top_k shrinkage head_init",
    words="an output layer by ridge regression, from running sums",
)
def ridge(in_features: int, out_features: int, **settings: Any) -> MemoryHead:
    """Ridge regression to one-hot targets, with an intercept, as in RanPAC (2023):  z = ȳ + Wᵀ (ψ − ψ̄).

    λ is `shrinkage` times the mean variance of the features, summed over the samples, so that its meaning does not
    depend on their size and number.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        settings: those of `MemoryHead`.

    Example:
        >>> head = engram.heads.create("ridge", 784, 10, random_features=2000)
    """
    return MemoryHead(in_features, out_features, read="ridge", **settings)
