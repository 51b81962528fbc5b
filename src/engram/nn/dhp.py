"""The DHP Softmax: an output layer whose slow weights carry a fast Hebbian trace (Eq. 2, Eq. 3, Algorithm 1)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import InputError, NotFiniteError, check_choice
from engram.targets import check_targets


def class_means(hidden: Tensor, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean hidden activation of every class in the batch (Algorithm 1, lines 3 to 6), all classes at once.

    Returns h̃ (C, m), zero for absent classes, and which classes are present (C,).
    """
    is_class = target[:, None] == torch.arange(num_classes, device=target.device)  # (B, C)
    member = is_class.to(hidden.dtype)
    count = member.sum(dim=0)  # (C,)
    total = member.T @ hidden  # (C, m)
    return total / count.clamp(min=1)[:, None], count > 0


def write_trace(hebb: Tensor, hidden: Tensor, target: Tensor, eta: Tensor) -> Tensor:
    """The trace after one batch; classes that are absent from the batch keep theirs.

    Eq. 3:  Hebb ← (1 − η) Hebb + η h̃
    """
    mean, present = class_means(hidden, target, hebb.shape[0])
    rate = eta * present[:, None].to(hidden.dtype)  # (C, 1): η where the class is present, else 0
    return (1 - rate) * hebb + rate * mean


def plastic_weight(weight: Tensor, alpha: Tensor, hebb: Tensor) -> Tensor:
    """The weight that is in force, slow plus fast (the bracket of Eq. 2):  θ + α Hebb."""
    return weight + alpha * hebb


class DHPSoftmax(nn.Module):
    """A softmax output layer with Differentiable Hebbian Plasticity.

    Eq. 2:  z = (θ + α Hebb) h        Eq. 3:  Hebb_c ← (1 − η) Hebb_c + η h̃_c  for each class c of the batch

    In training a call first writes the trace from the batch, then reads it, so that the loss is
    differentiable in θ, α, η and, by two paths, in h. The trace before the batch is a constant. In
    evaluation the trace is only read.

    η stays where Eq. 3 is a weighted mean, in [0, 1]: before each training batch it is projected back onto that
    interval, should the optimizer have stepped over its edge (until then `.eta` shows where it stepped).
    `eta_range="unbounded"` is the paper's literal form, without that projection.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        eta: initial rate η at which the trace takes up new activations.
        alpha: "synapse" for a plasticity coefficient α per synapse, "uniform" for one that all share.
        eta_range: "unit" or "unbounded".

    Shape:
        hidden (B, m) and target (B,) of class numbers → logits (B, C). Like the paper's, the layer has no
        bias.

    Example:
        >>> head = DHPSoftmax(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
        >>> logits = head.eval()(torch.rand(64, 512))
    """

    plastic_parameters = (
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
        self.in_features = in_features
        self.out_features = out_features
        self.eta_range = eta_range
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(shape if alpha == "synapse" else (), device=device, dtype=dtype))
        self.eta = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.register_buffer("hebb", torch.empty(shape, device=device, dtype=dtype))
        self.initial_eta = eta
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as in `torch.nn.Linear`, α = 0.01 · U(0, 1), η as given, and an empty trace."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.uniform_(self.alpha, 0, 0.01)
        nn.init.constant_(self.eta, self.initial_eta)
        nn.init.zeros_(self.hebb)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        self._check_hidden(hidden)
        hebb = self.hebb
        if self.training:
            target = self._check_target(hidden, target)
            hebb = self._write(hidden, target)
        return F.linear(hidden, plastic_weight(self.weight, self.alpha, hebb))

    def _write(self, hidden: Tensor, target: Tensor) -> Tensor:
        if self.eta_range == "unit":
            # Through .data, because another batch's graph may still hold η for its own backward pass.
            self.eta.data.clamp_(0, 1)
        # The copy is what η's gradient needs later, once the buffer itself has moved on.
        hebb = write_trace(self.hebb.clone(), hidden, target, self.eta)
        self.hebb.copy_(hebb.detach())
        return hebb

    def weight_slopes(self) -> dict[str, Tensor]:
        """Derivative of the weight in force by each parameter of its shape: 1 for θ, Hebb for α."""
        slopes = {"weight": torch.ones_like(self.weight)}
        if self.alpha.shape == self.weight.shape:
            slopes["alpha"] = self.hebb
        return slopes

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for when learning is over: its weight is θ + α Hebb."""
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            bias=False,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        linear.weight.copy_(plastic_weight(self.weight, self.alpha, self.hebb))
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
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_values(hidden, target)
        return target

    def _check_values(self, hidden: Tensor, target: Tensor) -> None:
        if len(target):
            low, high = (int(bound) for bound in target.aminmax())
            if low < 0 or high >= self.out_features:
                raise InputError(f"targets must lie in 0..{self.out_features - 1}, not {low}..{high}")
        if not torch.isfinite(hidden).all():
            raise NotFiniteError("the hidden activations hold NaN or infinity, which would stay in the trace")
