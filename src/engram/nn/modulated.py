"""Traces whose writing is gated by the network itself (Backpropamine: Miconi et al. 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn import trace, writing
from engram.nn.classes import draw_slow_weights
from engram.nn.distributed import ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear
from engram.nn.typed import typed

LARGEST = 1.0  # the bound of the trace, in Clip


class ModulatedTrace(Head):
    """What both heads share: slow weights, a bounded trace, coefficients α, and the signal m(h) that gates the writing.

        z = (θ + α M) h        m(h) = tanh(wᵀh + b)

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        alpha_init: α starts at alpha_init · U(0, 1).
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).
    """

    plastic_parameters: tuple[str, ...] = ("alpha", "gate", "gate_bias")
    class_rows: tuple[str, ...] = ("weight", "alpha", "hebb")
    weight: nn.Parameter  # θ (C, m)
    alpha: nn.Parameter  # α (C, m)
    gate: nn.Parameter  # w (m,)
    gate_bias: nn.Parameter  # b ()
    hebb: Tensor  # M (C, m)

    def __init__(self, in_features: int, out_features: int, alpha_init: float, head_init: str):
        super().__init__(in_features, out_features)
        if alpha_init < 0:
            raise InputError(f"alpha_init must be at least 0, not {alpha_init}")
        self.alpha_init = alpha_init
        self.head_init = head_init
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.alpha = nn.Parameter(torch.empty(out_features, in_features))
        self.gate = nn.Parameter(torch.empty(in_features))
        self.gate_bias = nn.Parameter(torch.empty(()))
        self.register_buffer("hebb", torch.empty(out_features, in_features))

    def reset_parameters(self) -> None:
        """θ as `head_init` says, α = alpha_init · U(0, 1), w as a row of `torch.nn.Linear`, b = 0, an empty trace."""
        draw_slow_weights(self.weight, self.head_init)
        nn.init.uniform_(self.alpha, 0, self.alpha_init)
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.gate, -bound, bound)
        nn.init.zeros_(self.gate_bias)
        nn.init.zeros_(self.hebb)

    def written(self, hidden: Tensor, target: Tensor) -> Tensor:
        """M (C, m) after a batch."""
        raise NotImplementedError

    def signal(self, hidden: Tensor) -> Tensor:
        """m(h) (B,)."""
        return writing.modulator(hidden, self.gate, self.gate_bias)

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, trace.plastic_weight(self.weight, self.alpha, self.hebb))

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        written = self.written(hidden, target)
        logits = F.linear(hidden, trace.plastic_weight(self.weight, self.alpha, written))
        with torch.no_grad():
            self.hebb.copy_(written)
        return logits

    def fast_part(self) -> Tensor:
        """What the trace adds to the slow weights now, α M: `head.weight + head.fast_part()` is in force."""
        return self.alpha * self.hebb

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to each parameter of its shape: 1 for θ, M for α."""
        return {"weight": torch.ones_like(self.weight), "alpha": self.hebb}

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for use after training: its weight is θ + α M.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(trace.plastic_weight(self.weight, self.alpha, self.hebb)).train(self.training)


@HEADS.register(
    "neuromodulated",
    listed=False,
    settings="alpha_init head_init",
    words="an output layer with a trace that a learned signal gates",
)
class Neuromodulated(ModulatedTrace):
    """A trace that the network gates with a signal of its own (simple neuromodulation).

        z = (θ + α M) h        M_c ← Clip(M_c + 1/s_c Σ_{y = c} m(h) h)        m(h) = tanh(wᵀh + b)

    The s_c samples of class c in a batch are written before the logits, so the loss is differentiable in θ, α, w, b
    and h; the trace before the batch is a constant. Clip bounds the trace to [−1, 1].

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        alpha_init: α starts at alpha_init · U(0, 1).
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = Neuromodulated(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    @typed
    def __init__(self, in_features: int, out_features: int, *, alpha_init: float = 0.01, head_init: str = "linear"):
        super().__init__(in_features, out_features, alpha_init, head_init)
        self.reset_parameters()

    def written(self, hidden: Tensor, target: Tensor) -> Tensor:
        gated = self.signal(hidden).unsqueeze(-1) * hidden
        mean, _ = trace.class_means(gated, target, self.out_features, ranks_of_call(self))
        return writing.clipped_sum(trace.before_batch(self.hebb), mean, LARGEST)


@HEADS.register(
    "retroactive",
    listed=False,
    settings="alpha_init eta head_init",
    words="an output layer with a trace that a learned signal writes from the recent past",
)
class Retroactive(ModulatedTrace):
    """A trace that is written from an eligibility trace, so that the network's signal gates what was before it.

        z = (θ + α M) h      E_c ← (1 − η) E_c + η h̃_c      M ← Clip(M + m E),   m = 1/B Σ tanh(wᵀh + b)

    h̃_c is the mean of class c in a batch, 0 for a class that it does not have: the eligibility of a class that is not
    seen fades. The batch is written before the logits, so η is learned too; it is kept in [0, 1].

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        alpha_init: α starts at alpha_init · U(0, 1).
        eta: the initial rate η of the eligibility trace.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = Retroactive(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    plastic_parameters = ("alpha", "gate", "gate_bias", "eta")
    class_rows = ("weight", "alpha", "hebb", "eligibility")
    eta: nn.Parameter  # η ()
    eligibility: Tensor  # E (C, m)

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        alpha_init: float = 0.01,
        eta: float = 1e-3,
        head_init: str = "linear",
    ):
        super().__init__(in_features, out_features, alpha_init, head_init)
        if not 0 <= eta <= 1:
            raise InputError(f"eta must lie in [0, 1], not {eta}")
        self.initial_eta = eta
        self.eta = nn.Parameter(torch.empty(()))
        self.register_buffer("eligibility", torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `ModulatedTrace`, with η as given and no eligibility."""
        super().reset_parameters()
        nn.init.constant_(self.eta, self.initial_eta)
        nn.init.zeros_(self.eligibility)

    def written(self, hidden: Tensor, target: Tensor) -> Tensor:
        self.eta.detach().copy_(self.eta.detach().clamp(0, 1))  # `clamp_` cannot be mapped
        ranks = ranks_of_call(self)
        signal = writing.batch_mean(self.signal(hidden), ranks)  # m ()
        mean, _ = trace.class_means(hidden, target, self.out_features, ranks)
        eligibility = writing.blend(trace.before_batch(self.eligibility), mean, self.eta)
        with torch.no_grad():
            self.eligibility.copy_(eligibility)
        return writing.clipped_sum(trace.before_batch(self.hebb), signal * eligibility, LARGEST)

    @torch.no_grad()
    def dynamics(self) -> dict[str, Tensor]:
        """What is plotted of the layer during training: η, ‖M‖ and ‖α‖ (Frobenius norms).

        Example:
            >>> head.dynamics()["eta"]
            tensor(0.0010)
        """
        return {"eta": self.eta.clamp(0, 1), "hebb_norm": self.hebb.norm(), "alpha_norm": self.alpha.norm()}
