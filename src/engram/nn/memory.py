"""What a head with a memory is put together from: small functions of tensors, one for each part of

    z = (θ + g R(M)) ψ(h) + b(M)

ψ takes what is used of the features, M holds what is remembered of each class, and R reads it as the weights of a
linear layer. Sums are remembered rather than means: sums over batches or ranks can be added, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.common.errors import InputError, SingularError

SMALLEST_NORM = 1e-12
UNSEEN = -1e15  # the bias of a class that was never seen: any other class has a larger logit, and its square is finite
LARGEST_SHARE = 0.5  # the fraction of this machine's memory that one second moment may take
SHRINKAGE_PER_FEATURE = 0.15  # chosen on validation samples of MNIST and mnist-small, with 2,000 and 5,000 features
SMALLEST_PIVOT = 1e-13  # of a Cholesky factor, relative to the largest: below it a matrix counts as singular

Reading = tuple[Tensor, Tensor]  # weight (C, k) and bias (C,) of a linear layer


# --- ψ: what of the features is used


def normalise(hidden: Tensor) -> Tensor:
    """ψ(h) = h / ‖h‖.

    Args:
        hidden: h (..., m).

    Example:
        >>> normalise(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    return hidden / hidden.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)


def top_k(hidden: Tensor, k: int) -> Tensor:
    """ψ(h) keeps the k largest features of each sample and sets the others to 0.

    Args:
        hidden: h (..., m).
        k: how many.

    Example:
        >>> top_k(torch.tensor([1.0, 3.0, 2.0]), 2)
        tensor([0., 3., 2.])
    """
    kept = hidden.topk(k, dim=-1)
    return torch.zeros_like(hidden).scatter(-1, kept.indices, kept.values)


# --- M: what is remembered


def class_sums(psi: Tensor, target: Tensor, num_classes: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """n_c = Σ w and S_c = Σ w ψ over the samples of each class: (C,) and (C, k), in double precision.

    Args:
        psi: ψ (B, k).
        target: class numbers (B,).
        num_classes: C.
        weight: w (B,), of each sample; None for 1.

    Example:
        >>> class_sums(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), num_classes=2)
        (tensor([2., 0.], dtype=torch.float64), tensor([[4.], [0.]], dtype=torch.float64))
    """
    member = (target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)).double()  # (B, C)
    member = member if weight is None else member * weight.double().unsqueeze(-1)
    return member.sum(dim=0), member.mT @ psi.double()


def second_moment(psi: Tensor, weight: Tensor | None = None) -> Tensor:
    """G = Σ w ψ ψᵀ over the batch (k, k), in double precision.

    Args:
        psi: ψ (B, k).
        weight: w (B,), of each sample; None for 1.

    Example:
        >>> second_moment(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.],
                [2., 4.]], dtype=torch.float64)
    """
    wide = psi.double()
    return (wide if weight is None else wide * weight.double().unsqueeze(-1)).mT @ wide


def class_means(count: Tensor, total: Tensor) -> Tensor:
    """μ_c = S_c / n_c (C, k), 0 for a class that was never seen.

    Args:
        count: n (C,).
        total: S (C, k).

    Example:
        >>> class_means(torch.tensor([2.0, 0.0]), torch.tensor([[4.0], [0.0]]))
        tensor([[2.], [0.]])
    """
    return total / torch.where(count > 0, count, 1).unsqueeze(-1)


def within_class_covariance(count: Tensor, total: Tensor, moment: Tensor) -> Tensor:
    """Σ = (G − Σ_c n_c μ_c μ_cᵀ) / n, the covariance that all classes share.

    Args:
        count: n_c (C,).
        total: S_c (C, k).
        moment: G (k, k).

    Example:
        >>> covariance = within_class_covariance(head.count, head.total, head.moment)
    """
    number = count.sum()  # of weighted samples, so it may be less than 1
    return (moment - total.mT @ class_means(count, total)) / torch.where(number > 0, number, 1)


# --- R: how it is read


def read_nearest_mean(mean: Tensor) -> Reading:
    """The class with the nearest mean:  −‖ψ − μ‖² = 2 μᵀψ − ‖μ‖² − ‖ψ‖², and the last term is the same for all.

    Args:
        mean: μ (C, k).

    Example:
        >>> weight, bias = read_nearest_mean(mean)
    """
    return 2 * mean, -mean.square().sum(dim=-1)


def read_lda(mean: Tensor, covariance: Tensor, shrinkage: float | Tensor) -> Reading:
    """Linear discriminant analysis:  z_c = μ_cᵀ Λ ψ − ½ μ_cᵀ Λ μ_c,  Λ = ((1 − ε) Σ + ε (tr Σ / k) I)⁻¹.

    The identity is scaled to the variance of the features, so ε means the same whatever their size.

    Args:
        mean: μ (C, k).
        covariance: Σ (k, k), within the classes.
        shrinkage: ε in [0, 1].

    Example:
        >>> weight, bias = read_lda(mean, covariance, shrinkage=0.01)
    """
    size = covariance.diagonal().mean()
    if size <= 0:  # a single sample of each class: there is nothing but the means
        size, shrinkage = torch.ones_like(size), 1.0
    shrunk = (1 - shrinkage) * covariance
    shrunk.diagonal().add_(shrinkage * size)
    weight = solve(shrunk, mean.mT, "shrinkage").mT
    return weight, -0.5 * (weight * mean).sum(dim=-1)


def usual_shrinkage(num_features: int, num_samples: Tensor) -> Tensor:
    """ε = min(1, 0.15 k / n): a covariance of many features from few samples is mostly noise, and is shrunk more.

    Args:
        num_features: k.
        num_samples: n ().

    Example:
        >>> usual_shrinkage(1000, torch.tensor(5000.0))
        tensor(0.0300)
    """
    return (SHRINKAGE_PER_FEATURE * num_features / num_samples.clamp(min=1)).clamp(max=1)


def read_ridge(
    moment: Tensor,
    products: Tensor,
    total: Tensor,
    of_targets: Tensor,
    count: Tensor,
    ridge: float | Tensor,
    setting: str = "ridge",
) -> Reading:
    """Ridge regression with an intercept, from sums alone:

        W = (G − n ψ̄ ψ̄ᵀ + λ I)⁻¹ (Q − n ψ̄ ȳᵀ)        z = ȳ + Wᵀ (ψ − ψ̄)

    Args:
        moment: G = Σ ψ ψᵀ (k, k).
        products: Q = Σ ψ yᵀ (k, C).
        total: Σ ψ (k,).
        of_targets: Σ y (C,).
        count: n (), the number of samples, or the sum of their weights.
        ridge: λ ≥ 0.
        setting: the name of what sets it, for the message about a singular moment.

    Example:
        >>> weight, bias = read_ridge(moment, products, total, of_targets, count, ridge=1.0)
    """
    mean, goal = total / count, of_targets / count
    centred = moment - count * torch.outer(mean, mean)
    centred.diagonal().add_(ridge)
    weight = solve(centred, products - count * torch.outer(mean, goal), setting)
    return weight.mT, goal - weight.mT @ mean


def solve(matrix: Tensor, right: Tensor, setting: str) -> Tensor:
    """matrix⁻¹ right, for a symmetric positive definite matrix; a singular one is refused.

    Args:
        matrix: (k, k).
        right: (k, C).
        setting: the name of what would make the matrix regular, for the message.

    Example:
        >>> solve(torch.eye(2), torch.ones(2, 1), "ridge")
        tensor([[1.], [1.]])
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    if int(failed) or not pivots.min() > SMALLEST_PIVOT * pivots.max():
        raise SingularError(
            f"the second moment of the {len(matrix)} features is singular, since some of them depend on others, there "
            f"are fewer samples than features, or they are far from 0: raise {setting}, or subtract their means first"
        )
    return torch.cholesky_solve(right, factor)


def check_moment_fits(num_features: int) -> None:
    """Refuse a second moment that would take more than half of this machine's memory.

    Args:
        num_features: k.

    Example:
        >>> check_moment_fits(2000)
    """
    check_fits(8 * num_features**2, f"the second moment of {num_features} features")


def check_fits(needed: int, what: str, advice: str = "use fewer features", device: torch.device | None = None) -> None:
    """Refuse a tensor that would take more than half of this machine's memory, or of its GPU's.

    Args:
        needed: bytes.
        what: the tensor, for the message.
        advice: what helps, for the message.
        device: where the tensor would be; None for the CPU.

    Example:
        >>> check_fits(8 * 2000**2, "the second moment")
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    owner = "this machine"
    if device is not None and device.type == "cuda":
        owner, there = "the GPU", torch.cuda.get_device_properties(device).total_memory
    if there is not None and needed > LARGEST_SHARE * there:
        raise InputError(f"{what} takes {needed:,} bytes, and {owner} has {there:,}: {advice}")


def check_sample_weight(weight: Tensor, shape: Sequence[int]) -> None:
    """Refuse weights of samples that are not one finite number of at least 0 for each.

    Args:
        weight: w, as it was given.
        shape: (B,), or (B, T) for sequences.

    Example:
        >>> check_sample_weight(torch.tensor([1.0, 2.0]), (2,))
    """
    if not isinstance(weight, Tensor):
        raise InputError(f"weights of samples must be a tensor, not a {type(weight).__name__}")
    if tuple(weight.shape) != tuple(shape):
        raise InputError(f"weights must have shape {tuple(shape)}, one for each sample, not {tuple(weight.shape)}")
    if not (torch.isfinite(weight) & (weight >= 0)).all():
        raise InputError("weights of samples must be finite and at least 0")
