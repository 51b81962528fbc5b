"""The DHP Softmax: an output layer whose slow weights carry a fast Hebbian trace (Eq. 2, Eq. 3, Algorithm 1).

`algorithm_1` follows the paper literally. The layer computes the same, faster, with the functions of `engram.nn.trace`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import HEADS
from engram.nn import trace
from engram.nn.classes import check_targets, check_values, check_writable, draw_slow_weights, grow_rows
from engram.nn.distributed import Ranks, ranks_of_call
from engram.nn.modules import as_linear, mapped, shown_settings
from engram.nn.typed import typed


def algorithm_1(
    hidden: Tensor, target: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor
) -> tuple[Tensor, Tensor]:
    """One training batch as the paper describes it: write the trace, then read it. Returns the logits and the trace.

    Args:
        hidden: h (B, m).
        target: class numbers (B,).
        weight: θ (C, m).
        alpha: α (C, m) or ().
        eta: η ().
        hebb: Hebb (C, m) before the batch, a constant of the gradient.

    Example:
        >>> logits, hebb = algorithm_1(hidden, target, weight, alpha, eta, hebb)
    """
    written = hebb.detach().clone()
    for c in target.unique():
        mean = hidden[target == c].mean(dim=0)  # h̃_c, over the samples of class c
        written[c] = (1 - eta) * hebb[c].detach() + eta * mean  # Eq. 3
    logits = hidden @ (weight + alpha * written).T  # Eq. 2
    return logits, written


@HEADS.register(
    "dhp",
    settings="eta alpha eta_range alpha_init learn_eta trace_gradient trace_scale trace_centred trace_write head_init",
    words="the paper's output layer, slow weights with a Hebbian trace of each class",
)
class DHPSoftmax(nn.Module):
    """A softmax output layer with Differentiable Hebbian Plasticity.

    Eq. 2:  z = (θ + α Hebb) h        Eq. 3:  Hebb_c ← (1 − η) Hebb_c + η h̃_c  for each class c of the batch

    In training, a call first writes the trace from the batch, then reads it, so the loss is differentiable in θ, α, η
    and, by two paths, in h. The trace before the batch is a constant. In evaluation, the trace is only read.

    Within DistributedDataParallel a batch is that of all ranks together: the trace is the same on each rank, and so is
    every gradient, as if one process had seen the whole batch.

    Eq. 3 is a weighted mean where η lies in [0, 1]: if the optimizer has stepped outside, η is projected back onto that
    interval before the next training batch (until then `.eta` shows it). `eta_range="unbounded"` leaves it.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        eta: initial rate η at which the trace takes up new activations.
        alpha: "synapse" for a plasticity coefficient α per synapse, "uniform" for one that all share.
        eta_range: "unit" or "unbounded".
        alpha_init: α starts at alpha_init · U(0, 1).
        learn_eta: whether η is learned; otherwise it stays as given.
        trace_gradient: whether the loss is differentiated through what a batch writes into the trace; otherwise h has
            one path, and η learns nothing.
        trace_scale: the root mean square to which the trace of each class is scaled when it is read; None reads it as
            it was written (Eq. 2).
        trace_centred: whether each class writes its mean activation minus the mean over the classes of the batch.
        trace_write: "before" the logits, as in the paper; or "after" them: then no batch reads its own targets, and no
            gradient goes through what it writes.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Shape:
        hidden (B, m) and target (B,) of class numbers → logits (B, C). Like the paper's, the layer has no bias.

    Example:
        >>> head = DHPSoftmax(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
        >>> logits = head.eval()(torch.rand(64, 512))
    """

    # what consolidation leaves free: it protects slow weights only (Eq. 4)
    plastic_parameters: tuple[str, ...] = ("alpha", "eta")

    weight: nn.Parameter  # θ (C, m)
    alpha: nn.Parameter  # α (C, m) or ()
    eta: nn.Parameter  # η ()
    hebb: Tensor  # Hebb (C, m), a buffer

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eta: float = 1e-3,
        alpha: str = "synapse",
        eta_range: str = "unit",
        alpha_init: float = 0.01,
        learn_eta: bool = True,
        trace_gradient: bool = True,
        trace_scale: float | None = None,
        trace_centred: bool = False,
        trace_write: str = "before",
        head_init: str = "linear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise InputError(f"a layer needs at least one feature and one class, not {in_features} and {out_features}")
        check_choice("alpha", alpha, ("synapse", "uniform"))
        check_choice("eta_range", eta_range, ("unit", "unbounded"))
        check_choice("trace_write", trace_write, ("before", "after"))
        if eta_range == "unit" and not 0 <= eta <= 1:
            raise InputError(f"eta must lie in [0, 1], where the trace is a weighted mean, not {eta}")
        if trace_scale is not None and trace_scale <= 0:
            raise InputError(f"trace_scale must be above 0, not {trace_scale}")
        if alpha_init < 0:
            raise InputError(f"alpha_init must be at least 0, not {alpha_init}")
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(shape if alpha == "synapse" else (), device=device, dtype=dtype))
        self.eta = nn.Parameter(torch.empty((), device=device, dtype=dtype), requires_grad=learn_eta)
        self.register_buffer("hebb", torch.empty(shape, device=device, dtype=dtype))
        self.initial_eta, self.eta_range = eta, eta_range
        self.alpha_init = alpha_init
        self.trace_gradient = trace_gradient
        self.trace_scale, self.trace_centred = trace_scale, trace_centred
        self.trace_write = trace_write
        self.head_init = head_init
        self.check_values = True  # on a CPU, whether a batch's values are checked before the trace is written
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as `head_init` says, α = alpha_init · U(0, 1), η as given, and an empty trace."""
        draw_slow_weights(self.weight, self.head_init)
        nn.init.uniform_(self.alpha, 0, self.alpha_init)
        nn.init.constant_(self.eta, self.initial_eta)
        nn.init.zeros_(self.hebb)

    def grow(self, out_features: int) -> None:
        """Add classes: the old rows of θ, α and Hebb keep their values, and so does η; new traces are empty.

        θ and α become new parameters, so an existing optimizer does not know them: make a new one. Call
        `penalty.grow()` too if there is a penalty.

        Args:
            out_features: the new number of classes.

        Example:
            >>> head.grow(12)
            >>> penalty.grow()
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        """
        grow_rows(self, out_features)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (B, C) of hidden activations (B, m); in training mode, `target` (B,) is needed."""
        self._check_hidden(hidden)
        if not self.training:
            return F.linear(hidden, trace.plastic_weight(self.weight, self.alpha, self.read(self.hebb)))
        target = self._check_target(hidden, target)
        if torch.is_autocast_enabled(hidden.device.type):
            with torch.autocast(hidden.device.type, enabled=False):  # the trace is a sum of small changes
                return self._learn(hidden.to(self.weight.dtype), target)
        return self._learn(hidden, target)

    def _learn(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The logits of a training batch. A layer that changes what goes in or what comes out overrides this."""
        return self._write_then_read(hidden, target)

    def _write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        weight, alpha, eta, hebb = self.weight, self.alpha, self.eta, self.hebb
        if self.eta_range == "unit":
            eta.detach().copy_(eta.detach().clamp(0, 1))  # `clamp_` cannot be mapped
        ranks = ranks_of_call(self)
        # the explicit derivatives are those of one rank's batch; a compiler derives its own
        if self.literal and ranks is None and not torch.compiler.is_compiling():
            logits, written = mapped(trace.PlasticSoftmax, hidden, target, weight, alpha, eta, hebb)
        else:
            written = self._written(hidden if self.differentiable else hidden.detach(), target, ranks)
            read = written if self.trace_write == "before" else trace.before_batch(hebb).clone()
            logits = F.linear(hidden, trace.plastic_weight(weight, alpha, self.read(read)))
        with torch.no_grad():
            hebb.copy_(written)
        return logits

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        names = ("eta_range", "trace_gradient", "trace_scale", "trace_centred", "trace_write")
        return {name: getattr(self, name) for name in names}

    @property
    def literal(self) -> bool:
        """Whether the trace is written, read and differentiated exactly as in the paper."""
        as_written = self.trace_scale is None and type(self).read is DHPSoftmax.read
        return self.differentiable and as_written and not self.trace_centred

    @property
    def differentiable(self) -> bool:
        """Whether the loss is differentiated through what a batch writes."""
        return self.trace_gradient and self.trace_write == "before"

    def _written(self, hidden: Tensor, target: Tensor, ranks: Ranks | None) -> Tensor:
        """The trace after a batch (Eq. 3), with the options of this layer."""
        if ranks is not None and self.eta.requires_grad and not self.differentiable:
            raise InputError(
                "without a gradient through the trace η learns nothing, and DistributedDataParallel would wait for it: "
                "make DHPSoftmax(..., learn_eta=False)"
            )
        mean, present = trace.class_means(hidden, target, self.out_features, ranks)
        if self.trace_centred:
            mean = mean - mean.sum(dim=-2, keepdim=True) / present.sum(dim=-2, keepdim=True).clamp(min=1)
        eta = self.eta if self.differentiable else self.eta.detach()
        return trace.write_trace(trace.before_batch(self.hebb), eta, mean, present)

    def read(self, hebb: Tensor) -> Tensor:
        """The trace as Eq. 2 uses it: scaled to the root mean square `trace_scale` in each class, or as written.

        The scaling factor is a constant of the gradient. A class that was never seen has no trace to scale.

        Args:
            hebb: the trace of this layer, or of a stack of such layers.

        Example:
            >>> fast = head.alpha * head.read(head.hebb)
        """
        return hebb if self.trace_scale is None else trace.scale_trace(hebb, self.trace_scale)

    def fast_part(self) -> Tensor:
        """What the trace adds to the slow weights now, α Hebb: `head.weight + head.fast_part()` is in force."""
        return self.fast_part_of(self.alpha, self.hebb)

    def fast_part_of(self, alpha: Tensor, hebb: Tensor) -> Tensor:
        """The same for another α and Hebb, also for those of a stack of layers like this one."""
        return trace.as_matrix(alpha, hebb) * self.read(hebb)

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to each parameter of its shape: 1 for θ, Hebb for α."""
        slopes = {"weight": torch.ones_like(self.weight)}
        if self.alpha.shape == self.weight.shape:
            slopes["alpha"] = self.read(self.hebb)
        return slopes

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for use after training: its weight is θ + α Hebb.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(trace.plastic_weight(self.weight, self.alpha, self.read(self.hebb))).train(self.training)

    @torch.no_grad()
    def dynamics(self) -> dict[str, Tensor]:
        """What the paper plots of the layer during training: η, ‖Hebb‖ and ‖α‖ (Frobenius norms).

        Example:
            >>> head.dynamics()["eta"]
            tensor(0.0010)
        """
        eta = self.eta.clamp(0, 1) if self.eta_range == "unit" else self.eta.clone()  # as the next batch will use it
        return {"eta": eta, "hebb_norm": self.hebb.norm(), "alpha_norm": self.alpha.norm()}

    def extra_repr(self) -> str:
        alpha = "synapse" if self.alpha.ndim else "uniform"
        return shown_settings(self, alpha=alpha, learn_eta=self.eta.requires_grad)

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.ndim != 2 or hidden.shape[1] != self.in_features:
            raise InputError(
                f"hidden activations must have shape (batch, {self.in_features}), not {tuple(hidden.shape)}"
            )
        if hidden.dtype != self.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise InputError(f"hidden activations must be {self.weight.dtype} like the layer, not {hidden.dtype}")

    def _check_target(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        if target is None:
            raise InputError(
                "a DHPSoftmax in training mode writes its trace and needs the batch's targets: "
                "call head(hidden, target), or head.eval() before predicting"
            )
        check_targets(target, len(hidden))
        check_writable(self, (self.hebb,))
        if self.check_values:
            check_values(hidden, target, self.out_features)
        return target
