"""The fast version of the trace: for whole batches, with explicit derivatives, compiled, and over several ranks.

`engram.nn.dhp.algorithm_1` is the plain version of what is computed here, and the tests compare the two in float64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engram.nn.distributed import Ranks, SumOverRanks

SMALLEST_TRACE = 1e-12  # root mean square below which a trace counts as empty


def plastic_weight(weight: Tensor, alpha: Tensor, hebb: Tensor) -> Tensor:
    """The weight in force, slow plus fast (the bracket of Eq. 2):  θ + α Hebb.

    Args:
        weight: θ (..., C, m).
        alpha: α, of the same shape, or a scalar.
        hebb: Hebb, of the same shape.

    Example:
        >>> plastic_weight(torch.ones(2, 3), torch.tensor(0.5), torch.ones(2, 3))[0]
        tensor([1.5000, 1.5000, 1.5000])
    """
    return torch.addcmul(weight, alpha, hebb)


def write_trace(hebb: Tensor, eta: Tensor, mean: Tensor, present: Tensor) -> Tensor:
    """Eq. 3:  Hebb + η (h̃ − Hebb), for the classes that are present in the batch.

    Args:
        hebb: Hebb (C, m).
        eta: η ().
        mean: h̃ (C, m), the mean activation of each class.
        present: (C, 1), 1 for the classes of the batch, else 0.

    Example:
        >>> mean, present = class_means(hidden, target, num_classes=3)
        >>> hebb = write_trace(hebb, eta, mean, present)
    """
    return hebb + eta * present * (mean - hebb)


def scale_trace(hebb: Tensor, size: float) -> Tensor:
    """The trace with the root mean square `size` in each class; a class that was never seen stays empty.

    The factor is a constant of the gradient.

    Args:
        hebb: Hebb (..., C, m).
        size: the root mean square.

    Example:
        >>> scale_trace(torch.tensor([[3.0, 3.0], [0.0, 0.0]]), 1.0)
        tensor([[1., 1.], [0., 0.]])
    """
    own = hebb.detach().square().mean(dim=-1, keepdim=True).sqrt()
    return hebb * (size / own.clamp(min=SMALLEST_TRACE))


def class_shares(target: Tensor, num_classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each sample's share in the mean of its class: 1/s if the batch has s samples of that class, 0 for other classes.

    So h̃ = shareᵀ h is the mean activation of every class (Algorithm 1, lines 3 to 6). Returns the shares
    (…, B, C), and which classes are present (…, C, 1) as ones and zeros.

    Args:
        target: class numbers (…, B).
        num_classes: C.
        dtype: of what is returned.

    Example:
        >>> class_shares(torch.tensor([0, 0, 1]), 3, torch.float32)[0]
        tensor([[0.5000, 0.0000, 0.0000],
                [0.5000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000]])
    """
    member = _membership(target, num_classes, dtype)  # (…, B, C)
    count = member.sum(dim=-2, keepdim=True)  # (…, 1, C)
    return member.div_(count.clamp(min=1)), count.clamp(max=1).mT


def class_means(hidden: Tensor, target: Tensor, num_classes: int, ranks: Ranks | None = None) -> tuple[Tensor, Tensor]:
    """h̃ (C, m), 0 for absent classes, and which classes are present (C, 1).

    With ranks, the batch is that of all of them together:  h̃_c = Σ_ranks Σ_{y = c} h / Σ_ranks #{y = c}.

    Args:
        hidden: activations (B, m).
        target: class numbers (B,).
        num_classes: C.
        ranks: those that share the batch, if it is shared.

    Example:
        >>> class_means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), num_classes=2)
        (tensor([[2.], [0.]]), tensor([[1.], [0.]]))
    """
    if ranks is None:
        share, present = class_shares(target, num_classes, hidden.dtype)
        return share.mT @ hidden, present
    member = _membership(target, num_classes, hidden.dtype)  # (B, C)
    sums, counts = SumOverRanks.apply(member.mT @ hidden, member.sum(dim=0).unsqueeze(-1), ranks)
    return sums / counts.clamp(min=1), counts.clamp(max=1)


def _membership(target: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """1 where a sample is of a class, else 0."""
    if torch.compiler.is_compiling():  # a compiler has its own way to cache the numbers
        numbers = torch.arange(num_classes, device=target.device)
    else:
        numbers = _class_numbers(num_classes, target.device)
    return torch.eq(target.unsqueeze(-1), numbers).to(dtype)


@lru_cache(maxsize=16)
def _class_numbers(num_classes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is used in training too
        return torch.arange(num_classes, device=device)


@torch.library.custom_op("engram::copy_for_backward", mutates_args=())
def copy_for_backward(tensor: Tensor) -> Tensor:
    """A copy for the backward pass: a compiler would otherwise read the trace there after it was overwritten.

    Args:
        tensor: the trace before the batch.

    Example:
        >>> before = copy_for_backward(head.hebb)
    """
    return tensor.clone()


@copy_for_backward.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def before_batch(memory: Tensor) -> Tensor:
    """A memory as it is before a batch: take it from here wherever a gradient depends on it and it is written after.

    A compiler may compute a value a second time in the backward pass instead of keeping it. If it starts again from the
    memory itself, that holds the batch by then: the batch is written twice, and the gradient is wrong. `clone` is
    computed again too; `copy_for_backward` is not, because the compiler cannot look into it.

    Args:
        memory: what the batch is written into.

    Example:
        >>> written = before_batch(head.hebb) + mean
        >>> head.hebb.copy_(written.detach())
    """
    return copy_for_backward(memory) if torch.compiler.is_compiling() else memory


Saved = tuple[Tensor, ...]  # what the backward pass needs of the forward pass


def write_and_read(
    hidden: Tensor, target: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor
) -> tuple[Tensor, Tensor, Saved]:
    """Write a batch into the trace, then read it. Returns the logits, the trace, and what `slopes_of` needs.

    Eq. 3:  Hebb′ = Hebb + η (h̃ − Hebb), for the classes of the batch        Eq. 2:  z = (θ + α Hebb′) h

    All tensors may have further axes in front, the same for all: so one call serves a whole stack of models.

    Args:
        hidden: h (B, m).
        target: class numbers (B,).
        weight: θ (C, m).
        alpha: α (C, m) or ().
        eta: η ().
        hebb: Hebb (C, m) before the batch, which is not changed.

    Example:
        >>> logits, written, saved = write_and_read(hidden, target, head.weight, head.alpha, head.eta, head.hebb)
    """
    share, present = class_shares(target, weight.shape[-2], hidden.dtype)
    surprise = (share.mT @ hidden).sub_(hebb).mul_(present)  # h̃ − Hebb (…, C, m), 0 for absent classes
    # a copy of η, since the optimizer may change it before the backward pass
    rate = eta.clone().unsqueeze(-1).unsqueeze(-1)
    # Eq. 3 again, and not by `write_trace`: this fused operation rounds once where that one rounds twice, so about
    # one value in 600 differs in its last digit. To share a line would change the results of one or the other.
    written = torch.addcmul(hebb, rate, surprise)
    in_force = plastic_weight(weight, as_matrix(alpha, weight), written)
    return hidden @ in_force.mT, written, (hidden, weight, alpha, written, in_force, share, rate, surprise)


def slopes_of(d: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The derivatives of the loss with respect to h, θ, α and η. With D = dᵀ h, that by the weight in force:

        ∂L/∂θ = D      ∂L/∂α = D Hebb′      ∂L/∂Hebb′ = D α =: F      ∂L/∂η = Σ F (h̃ − Hebb)
        ∂L/∂h = d (θ + α Hebb′) + η share F

    Args:
        d: ∂L/∂z (B, C).
        saved: what `write_and_read` returned.

    Example:
        >>> by_hidden, by_weight, by_alpha, by_eta = slopes_of(d, saved)
    """
    hidden, weight, alpha, written, in_force, share, rate, surprise = saved
    slope = d.mT @ hidden  # D (…, C, m)
    fast = slope * as_matrix(alpha, weight)  # F
    by_alpha = slope * written
    if alpha.ndim < weight.ndim:
        by_alpha = by_alpha.sum(dim=(-2, -1))
    by_eta = (fast * surprise).sum(dim=(-2, -1))
    # d (θ + α Hebb′) + η share F, as one product
    by_hidden = torch.cat([d, rate * share], dim=-1) @ torch.cat([in_force, fast], dim=-2)
    return by_hidden, slope, by_alpha, by_eta


class PlasticSoftmax(torch.autograd.Function):
    """`write_and_read` for autograd, with the derivatives of `slopes_of`, which are faster than autograd's own.

    They can be differentiated again (`create_graph=True`): then everything is computed once more from the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, target: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, written, saved = write_and_read(hidden, target, weight, alpha, eta, hebb)
        ctx.mark_non_differentiable(written)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.eta = eta  # not saved: the next batch may change it, in place, before this one's backward pass
        return logits, written

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d = gradients[0]
        if d is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        by_hidden, by_weight, by_alpha, by_eta = slopes_of(
            d, _again(saved, ctx.eta) if torch.is_grad_enabled() else saved
        )
        return by_hidden, None, by_weight, by_alpha, by_eta, None


def _again(saved: Saved, eta: Tensor) -> Saved:
    """What `write_and_read` saved, as a function of h, θ, α and η that autograd knows. Hebb is a constant, as there."""
    hidden, weight, alpha, written, _, share, rate, surprise = saved
    present = share.sum(dim=-2).unsqueeze(-1) > 0
    rate = rate + (eta - eta.detach()).unsqueeze(-1).unsqueeze(-1)  # the value that was used, with the slope of η
    mean = share.mT @ hidden
    hebb = torch.where(present, mean.detach() - surprise, written)
    surprise = (mean - hebb) * present
    written = torch.addcmul(hebb, rate, surprise)
    in_force = plastic_weight(weight, as_matrix(alpha, weight), written)
    return hidden, weight, alpha, written, in_force, share, rate, surprise


def as_matrix(alpha: Tensor, weight: Tensor) -> Tensor:
    """α with an axis for every axis of θ, also where all synapses share one α.

    Args:
        alpha: α (..., C, m), or (...) where all synapses share it.
        weight: θ (..., C, m).

    Example:
        >>> as_matrix(torch.tensor(0.5), torch.ones(2, 3)).shape
        torch.Size([1, 1])
    """
    return alpha if alpha.ndim == weight.ndim else alpha.unsqueeze(-1).unsqueeze(-1)
