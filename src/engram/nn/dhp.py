"""The DHP Softmax: an output layer whose slow weights carry a fast Hebbian trace (Eq. 2, Eq. 3, Algorithm 1)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError, check_choice
from engram.common.registry import HEADS
from engram.nn.distributed import Ranks, SumOverRanks, ranks_of_call
from engram.nn.growth import grow_rows
from engram.nn.mapping import mapped
from engram.nn.targets import check_targets

SMALLEST_TRACE = 1e-12  # root mean square below which a trace counts as none


def class_shares(target: Tensor, num_classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each sample's share in the mean of its class: 1/s if the batch has s samples of that class, 0 in all others.

    So h̃ = shareᵀ h is the mean activation of every class at once (Algorithm 1, lines 3 to 6). Returns the shares
    (…, B, C), and which classes are present (…, C, 1) as ones and zeros.
    """
    member = _membership(target, num_classes, dtype)  # (…, B, C)
    count = member.sum(dim=-2, keepdim=True)  # (…, 1, C)
    return member.div_(count.clamp(min=1)), count.clamp(max=1).mT


def class_means(hidden: Tensor, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """h̃ (C, m), 0 for absent classes, and which are present (C, 1), of one batch."""
    share, present = class_shares(target, num_classes, hidden.dtype)
    return share.mT @ hidden, present


def class_means_over_ranks(hidden: Tensor, target: Tensor, num_classes: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The same, of the batch that all ranks have together:  h̃_c = Σ_ranks Σ_{y = c} h / Σ_ranks #{y = c}."""
    member = _membership(target, num_classes, hidden.dtype)  # (B, C)
    sums, counts = SumOverRanks.apply(member.mT @ hidden, member.sum(dim=0).unsqueeze(-1), ranks)
    return sums / counts.clamp(min=1), counts.clamp(max=1)


def _membership(target: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """1 where a sample is of a class, else 0."""
    return torch.eq(target.unsqueeze(-1), _class_numbers(num_classes, target.device)).to(dtype)


def _class_numbers(num_classes: int, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():  # a compiler keeps it in its own way
        return torch.arange(num_classes, device=device)
    return _kept_class_numbers(num_classes, device)


@lru_cache(maxsize=16)
def _kept_class_numbers(num_classes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is kept for training too
        return torch.arange(num_classes, device=device)


@torch.library.custom_op("engram::kept", mutates_args=())
def _kept(tensor: Tensor) -> Tensor:
    """A copy, for the backward pass: a compiler would else read the trace there when it has been written over."""
    return tensor.clone()


@_kept.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def plastic_weight(weight: Tensor, alpha: Tensor, hebb: Tensor) -> Tensor:
    """The weight that is in force, slow plus fast (the bracket of Eq. 2):  θ + α Hebb."""
    return torch.addcmul(weight, alpha, hebb)


class PlasticSoftmax(torch.autograd.Function):
    """Writes the trace from a batch, then reads it; with the derivatives written down, which is faster.

    Eq. 3:  Hebb′ = Hebb + η (h̃ − Hebb), for the classes of the batch        Eq. 2:  z = (θ + α Hebb′) h

    With D = (∂L/∂z)ᵀ h, the derivative by the weight in force:

        ∂L/∂θ = D      ∂L/∂α = D Hebb′      ∂L/∂Hebb′ = D α =: F      ∂L/∂η = Σ F (h̃ − Hebb)
        ∂L/∂h = (∂L/∂z) (θ + α Hebb′) + η share F

    All tensors may have further axes in front, the same for all: so one call serves a whole stack of models.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor
    ) -> tuple[Tensor, Tensor]:
        share, present = class_shares(target, weight.shape[-2], hidden.dtype)
        surprise = (share.mT @ hidden).sub_(hebb).mul_(present)  # h̃ − Hebb (…, C, m), 0 for absent classes
        # η as it is now, however the optimizer changes it before the backward pass
        rate = eta.clone().unsqueeze(-1).unsqueeze(-1)
        written = torch.addcmul(hebb, rate, surprise)
        in_force = plastic_weight(weight, _as_matrix(alpha, weight), written)
        ctx.mark_non_differentiable(written)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, alpha, written, in_force, share, rate, surprise)
        return hidden @ in_force.mT, written

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, alpha, written, in_force, share, rate, surprise = ctx.saved_tensors
        d = gradients[0]
        if d is None:
            return (None,) * 6
        slope = d.mT @ hidden  # D (…, C, m)
        fast = slope * _as_matrix(alpha, weight)  # F
        by_alpha = slope * written
        if alpha.ndim < weight.ndim:
            by_alpha = by_alpha.sum(dim=(-2, -1))
        by_eta = (fast * surprise).sum(dim=(-2, -1))
        # (∂L/∂z) (θ + α Hebb′) + η share F, as one product
        by_hidden = torch.cat([d, rate * share], dim=-1) @ torch.cat([in_force, fast], dim=-2)
        return by_hidden, None, slope, by_alpha, by_eta, None


def _as_matrix(alpha: Tensor, weight: Tensor) -> Tensor:
    """α with an axis for every axis of θ, also where all synapses share one."""
    return alpha if alpha.ndim == weight.ndim else alpha.unsqueeze(-1).unsqueeze(-1)


@HEADS.register(
    "dhp",
    settings={
        "eta": "eta",
        "alpha": "alpha",
        "eta_range": "eta_range",
        "alpha_init": "alpha_init",
        "learn_eta": "learn_eta",
        "trace_gradient": "trace_gradient",
        "trace_scale": "trace_scale",
        "trace_centred": "trace_centred",
    },
)
class DHPSoftmax(nn.Module):
    """A softmax output layer with Differentiable Hebbian Plasticity.

    Eq. 2:  z = (θ + α Hebb) h        Eq. 3:  Hebb_c ← (1 − η) Hebb_c + η h̃_c  for each class c of the batch

    In training a call first writes the trace from the batch, then reads it, so that the loss is
    differentiable in θ, α, η and, by two paths, in h. The trace before the batch is a constant. In
    evaluation the trace is only read.

    Within DistributedDataParallel a batch is that of all ranks together: the trace is the same on each of them, and so
    is every gradient, as if one process had seen the whole.

    η stays where Eq. 3 is a weighted mean, in [0, 1]: before each training batch it is projected back onto that
    interval, should the optimizer have stepped over its edge (until then `.eta` shows where it stepped).
    `eta_range="unbounded"` is the paper's literal form, without that projection.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        eta: initial rate η at which the trace takes up new activations.
        alpha: "synapse" for a plasticity coefficient α per synapse, "uniform" for one that all share.
        eta_range: "unit" or "unbounded".
        alpha_init: α starts at alpha_init · U(0, 1).
        learn_eta: whether η is learned, or stays as given.
        trace_gradient: whether the loss is differentiated through what a batch writes into the trace: else h has one
            path, and η learns nothing.
        trace_scale: the root mean square at which the trace of each class is read, whatever that of the activations;
            None reads it as it was written (Eq. 2).
        trace_centred: whether each class writes its mean activation less the mean over the classes of the batch.

    Shape:
        hidden (B, m) and target (B,) of class numbers → logits (B, C). Like the paper's, the layer has no
        bias.

    Example:
        >>> head = DHPSoftmax(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
        >>> logits = head.eval()(torch.rand(64, 512))
    """

    plastic_parameters: tuple[str, ...] = (
        "alpha",
        "eta",
    )  # what consolidation leaves free: it protects slow weights only (Eq. 4)

    weight: nn.Parameter  # θ (C, m)
    alpha: nn.Parameter  # α (C, m) or ()
    eta: nn.Parameter  # η ()
    hebb: Tensor  # Hebb (C, m), a buffer

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise InputError(
                f"DHPSoftmax needs at least one feature and one class, not {in_features} and {out_features}"
            )
        check_choice("alpha", alpha, ("synapse", "uniform"))
        check_choice("eta_range", eta_range, ("unit", "unbounded"))
        if not math.isfinite(eta):
            raise InputError(f"eta must be a number, not {eta}")
        if eta_range == "unit" and not 0 <= eta <= 1:
            raise InputError(f"eta must lie in [0, 1], where the trace is a weighted mean, not {eta}")
        if trace_scale is not None and not (math.isfinite(trace_scale) and trace_scale > 0):
            raise InputError(f"trace_scale must be above 0, not {trace_scale}")
        if not (math.isfinite(alpha_init) and alpha_init >= 0):
            raise InputError(f"alpha_init must be at least 0, not {alpha_init}")
        self.in_features = in_features
        self.out_features = out_features
        self.eta_range = eta_range
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(shape if alpha == "synapse" else (), device=device, dtype=dtype))
        self.eta = nn.Parameter(torch.empty((), device=device, dtype=dtype), requires_grad=learn_eta)
        self.register_buffer("hebb", torch.empty(shape, device=device, dtype=dtype))
        self.initial_eta = eta
        self.alpha_init = alpha_init
        self.trace_gradient = trace_gradient
        self.trace_scale = trace_scale
        self.trace_centred = trace_centred
        self.check_values = True  # whether a batch's values are looked at before the trace is written, on a CPU
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as in `torch.nn.Linear`, α = alpha_init · U(0, 1), η as given, and an empty trace."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.uniform_(self.alpha, 0, self.alpha_init)
        nn.init.constant_(self.eta, self.initial_eta)
        nn.init.zeros_(self.hebb)

    def grow(self, out_features: int) -> None:
        """Take up more classes: old rows of θ, α and Hebb stay as they are, and so does η; new traces are empty.

        θ and α become new parameters, which an optimizer made before does not know: make it anew. A penalty follows
        with `penalty.grow()`.

            head.grow(12)
            penalty.grow()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        """
        grow_rows(self, out_features)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        self._check_hidden(hidden)
        if not self.training:
            return F.linear(hidden, plastic_weight(self.weight, self.alpha, self.read(self.hebb)))
        target = self._check_target(hidden, target)
        if torch.is_autocast_enabled(hidden.device.type):
            with torch.autocast(hidden.device.type, enabled=False):  # the trace sums up small changes
                return self._write_then_read(hidden.to(self.weight.dtype), target)
        return self._write_then_read(hidden, target)

    def _write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        weight, alpha, eta, hebb = self.weight, self.alpha, self.eta, self.hebb
        if self.eta_range == "unit":
            eta.detach().copy_(eta.detach().clamp(0, 1))  # `clamp_` cannot be mapped
        ranks = ranks_of_call(self)
        # written down are the derivatives of one rank's batch; a compiler finds them itself
        if self.literal and ranks is None and not torch.compiler.is_compiling():
            logits, written = mapped(PlasticSoftmax, hidden, target, weight, alpha, eta, hebb)
        else:
            written = self._written(hidden if self.trace_gradient else hidden.detach(), target, ranks)
            logits = F.linear(hidden, plastic_weight(weight, alpha, self.read(written)))
        with torch.no_grad():
            hebb.copy_(written)
        return logits

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """What the layer computes by, besides its tensors: a file of it fits only a layer with the same."""
        names = ("eta_range", "trace_gradient", "trace_scale", "trace_centred")
        return {name: getattr(self, name) for name in names}

    @property
    def literal(self) -> bool:
        """Whether the trace is written, read and differentiated as the paper says."""
        return self.trace_gradient and self.trace_scale is None and not self.trace_centred

    def _written(self, hidden: Tensor, target: Tensor, ranks: Ranks | None) -> Tensor:
        """Eq. 3, with the choices that this layer offers."""
        if ranks is None:
            mean, present = class_means(hidden, target, self.out_features)
        else:
            self._check_gradients()
            mean, present = class_means_over_ranks(hidden, target, self.out_features, ranks)
        if self.trace_centred:
            mean = mean - mean.sum(dim=-2, keepdim=True) / present.sum(dim=-2, keepdim=True).clamp(min=1)
        eta = self.eta if self.trace_gradient else self.eta.detach()
        before = _kept(self.hebb) if torch.compiler.is_compiling() else self.hebb
        return before + eta * present * (mean - before)

    def read(self, hebb: Tensor) -> Tensor:
        """The trace as Eq. 2 sees it: of the root mean square `trace_scale` in each class, or as it was written.

        The factor that brings it there is a constant for the gradient. A class never seen has no trace to scale.
        """
        if self.trace_scale is None:
            return hebb
        size = hebb.detach().square().mean(dim=-1, keepdim=True).sqrt()
        return hebb * (self.trace_scale / size.clamp(min=SMALLEST_TRACE))

    def fast_part(self) -> Tensor:
        """What the trace adds to the slow weights now:  α Hebb."""
        return self.fast_part_of(self.alpha, self.hebb)

    def fast_part_of(self, alpha: Tensor, hebb: Tensor) -> Tensor:
        """The same of other tensors, also of a stack of layers like this one."""
        return _as_matrix(alpha, hebb) * self.read(hebb)

    def weight_slopes(self) -> dict[str, Tensor]:
        """Derivative of the weight in force by each parameter of its shape: 1 for θ, Hebb for α."""
        slopes = {"weight": torch.ones_like(self.weight)}
        if self.alpha.shape == self.weight.shape:
            slopes["alpha"] = self.read(self.hebb)
        return slopes

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for when learning is over: its weight is θ + α Hebb."""
        linear = nn.utils.skip_init(  # no weights are drawn: who goes on learning draws what they would have drawn
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=False,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        linear.weight.copy_(plastic_weight(self.weight, self.alpha, self.read(self.hebb)))
        return linear.train(self.training)

    @torch.no_grad()
    def dynamics(self) -> dict[str, Tensor]:
        """The paper's view on the layer as it learns: η, ‖Hebb‖ and ‖α‖ (Frobenius)."""
        eta = self.eta.clamp(0, 1) if self.eta_range == "unit" else self.eta.clone()  # as the next batch will use it
        return {"eta": eta, "hebb_norm": self.hebb.norm(), "alpha_norm": self.alpha.norm()}

    def extra_repr(self) -> str:
        alpha = "synapse" if self.alpha.ndim else "uniform"
        return f"{self.in_features}, {self.out_features}, alpha={alpha!r}, eta_range={self.eta_range!r}"

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
        # Looking at values would make an accelerator wait, and cannot be traced: there it is the caller's part.
        if self.check_values and hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_values(hidden, target)
        return target

    def _check_gradients(self) -> None:
        if self.eta.requires_grad and not self.trace_gradient:
            raise InputError(
                "without trace_gradient η learns nothing, and DistributedDataParallel would wait for its gradient: "
                "make DHPSoftmax(..., learn_eta=False)"
            )

    def _check_values(self, hidden: Tensor, target: Tensor) -> None:
        if len(target):
            low, high = (int(bound) for bound in target.aminmax())
            if low < 0 or high >= self.out_features:
                raise InputError(f"targets must lie in 0..{self.out_features - 1}, not {low}..{high}")
        if not torch.isfinite(hidden).all():
            raise NotFiniteError("the hidden activations hold NaN or infinity, which would stay in the trace")
