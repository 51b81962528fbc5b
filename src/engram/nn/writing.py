"""How a memory is written: what a batch brings, at what rate, through which gate. Small functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.nn.distributed import Ranks, SumOverRanks

# --- what a batch brings


def batch_sums(hidden: Tensor, target: Tensor, num_classes: int, ranks: Ranks | None = None) -> tuple[Tensor, Tensor]:
    """S_c = Σ_{y = c} h and k_c = #{y = c} of a batch, that of all ranks together: (C, m) and (C, 1).

    It is differentiable in h.

    Args:
        hidden: h (B, m).
        target: class numbers (B,).
        num_classes: C.
        ranks: those that share the batch, if it is shared.

    Example:
        >>> batch_sums(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), num_classes=2)
        (tensor([[4.], [0.]]), tensor([[2.], [0.]]))
    """
    numbers = torch.arange(num_classes, device=target.device)
    member = torch.eq(target.unsqueeze(-1), numbers).to(hidden.dtype)  # (B, C)
    sums, counts = member.mT @ hidden, member.sum(dim=0).unsqueeze(-1)
    return (sums, counts) if ranks is None else SumOverRanks.apply(sums, counts, ranks)


def batch_mean(values: Tensor, ranks: Ranks | None = None) -> Tensor:
    """The mean over a batch, that of all ranks together: (); 0 for an empty one.

    Args:
        values: (B,).
        ranks: those that share the batch, if it is shared.

    Example:
        >>> batch_mean(torch.tensor([1.0, 3.0]))
        tensor(2.)
    """
    if ranks is None:
        # not `len`, which a compiled model with a variable batch size may take as a 32-bit float
        return values.sum() / torch.ones_like(values).sum().clamp(min=1)
    count = values.new_full((1, 1), len(values))
    total, number = SumOverRanks.apply(values.sum().reshape(1, 1), count, ranks)
    return (total / number.clamp(min=1)).squeeze()


def modulator(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """m(h) = tanh(wᵀh + b): whether a sample is written, and with which sign (B,).

    Args:
        hidden: h (B, m).
        weight: w (m,).
        bias: b ().

    Example:
        >>> modulator(torch.zeros(2, 3), torch.ones(3), torch.tensor(0.0))
        tensor([0., 0.])
    """
    return torch.tanh(hidden @ weight + bias)


# --- at what rate, through which gate


def running_rate(added: Tensor, count: Tensor, slowest: float = 0.0) -> Tensor:
    """λ_c = max(k_c / n_c, γ): that of a mean over all samples so far, with a floor; 0 for a class that is not there.

    Args:
        added: k (C, 1), the samples of the batch.
        count: n (C, 1), all samples, those of the batch among them.
        slowest: γ.

    Example:
        >>> running_rate(torch.tensor([[1.0], [0.0]]), torch.tensor([[4.0], [4.0]]))
        tensor([[0.2500], [0.0000]])
    """
    rate = (added / count.clamp(min=1)).clamp(min=slowest)
    return torch.where(added > 0, rate, 0)


def while_rare(rate: Tensor, count: Tensor, limit: Tensor | float) -> Tensor:
    """λ_c while n_c < T, then 0: a class that was seen often is left to the gradient.

    Args:
        rate: λ (C, 1).
        count: n (C, 1).
        limit: T.

    Example:
        >>> while_rare(torch.tensor([[0.5], [0.5]]), torch.tensor([[3.0], [30.0]]), limit=10)
        tensor([[0.5000], [0.0000]])
    """
    return torch.where(count < limit, rate, 0)


# --- what is written


def blend(memory: Tensor, mean: Tensor, rate: Tensor) -> Tensor:
    """M_c ← (1 − λ_c) M_c + λ_c h̄_c, for each class; where λ is 0, M stays the same bit for bit.

    Args:
        memory: M (C, m).
        mean: h̄ (C, m).
        rate: λ (C, 1), or ().

    Example:
        >>> blend(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor(0.5))
        tensor([[0.5000, 0.5000]])
    """
    return memory + rate * (mean - memory)


def clipped_sum(memory: Tensor, change: Tensor, largest: float = 1.0) -> Tensor:
    """M ← Clip(M + Δ) to [−largest, largest].

    Args:
        memory: M (C, m).
        change: Δ (C, m).
        largest: the bound.

    Example:
        >>> clipped_sum(torch.tensor([0.5]), torch.tensor([0.7]))
        tensor([1.])
    """
    return (memory + change).clamp(-largest, largest)
