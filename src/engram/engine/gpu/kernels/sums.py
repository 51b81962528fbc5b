"""Triton kernel of heads with a memory: a batch is added to their sums in one pass.

    n_c += #{y = c}        S_c += Σ_{y = c} ψ        G += Σ ψ ψᵀ

G is symmetric: only its lower half is read and written, tile by tile. The sums are in double precision; what a batch
adds is summed in single precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # of G


def sum_precision() -> str:
    """Products are exact to single precision in either mode: a covariance is a small difference of large sums."""
    return "tf32x3" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def _write_sums(
    psi, targets, count, total, moment, unread, FEATURES, CLASSES, BATCH, SHARING,
    MODEL_STRIDE, SAMPLE_STRIDE, FEATURE_STRIDE, TILES, HAS_MOMENT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_CLASS: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    if HAS_MOMENT:
        row, column = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    else:
        row, column = tl.program_id(0), tl.program_id(0)
    i, j = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    source = psi + model * MODEL_STRIDE
    if HAS_MOMENT:  # noqa: SIM102 - decided when the kernel is compiled
        if column <= row:
            added = tl.zeros((TILE, TILE), dtype=tl.float32)
            for first in range(0, BATCH, BLOCK_BATCH):
                b = first + tl.arange(0, BLOCK_BATCH)
                left = source + b[None, :] * SAMPLE_STRIDE + i[:, None] * FEATURE_STRIDE
                right = source + b[:, None] * SAMPLE_STRIDE + j[None, :] * FEATURE_STRIDE
                x = tl.load(left, mask=(i < FEATURES)[:, None] & (b < BATCH)[None, :], other=0.0)
                y = tl.load(right, mask=(b < BATCH)[:, None] & (j < FEATURES)[None, :], other=0.0)
                added = tl.dot(x, y, added, input_precision=PRECISION)
            where = moment + (model * FEATURES + i[:, None]) * FEATURES + j[None, :]
            inside = (i < FEATURES)[:, None] & (j <= i[:, None])
            tl.store(where, tl.load(where, mask=inside) + added.to(tl.float64), mask=inside)
    if row == column:
        c = tl.arange(0, BLOCK_CLASS)
        sums = tl.zeros((TILE, BLOCK_CLASS), dtype=tl.float32)
        number = tl.zeros((BLOCK_CLASS,), dtype=tl.float32)
        for first in range(0, BATCH, BLOCK_BATCH):
            b = first + tl.arange(0, BLOCK_BATCH)
            left = source + b[None, :] * SAMPLE_STRIDE + i[:, None] * FEATURE_STRIDE
            x = tl.load(left, mask=(i < FEATURES)[:, None] & (b < BATCH)[None, :], other=0.0)
            label = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=-1)
            member = tl.where(label[:, None] == c[None, :], 1.0, 0.0)  # (B, C)
            sums = tl.dot(x, member, sums, input_precision=PRECISION)
            number += tl.sum(member, axis=0)
        where = total + (model * CLASSES + c[None, :]) * FEATURES + i[:, None]
        inside = (i < FEATURES)[:, None] & (c < CLASSES)[None, :]
        tl.store(where, tl.load(where, mask=inside) + sums.to(tl.float64), mask=inside)
        if row == 0:
            own = count + model * CLASSES + c
            tl.store(own, tl.load(own, mask=c < CLASSES) + number.to(tl.float64), mask=c < CLASSES)
            tl.store(unread + model, 1)


def write_sums(
    psi: Tensor, targets: Tensor, count: Tensor, total: Tensor, moment: Tensor | None, unread: Tensor
) -> None:
    """Add a batch to the sums of N models, which change in place; of G only the lower half.

    Args:
        psi: ψ (N, B, k), in any layout.
        targets: class numbers (T, B), each for N / T models.
        count: n (N, C).
        total: S (N, C, k).
        moment: G (N, k, k); None if the head has none.
        unread: (N,), set to True.
    """
    num_models, classes, features = total.shape
    batch, tiles = psi.shape[1], triton.cdiv(features, TILE)
    _write_sums[(tiles if moment is None else tiles**2, num_models)](
        psi, targets, count, total, total if moment is None else moment, unread.view(torch.uint8),
        features, classes, batch, num_models // len(targets), *psi.stride(), tiles,
        HAS_MOMENT=moment is not None, TILE=TILE, BLOCK_CLASS=max(16, triton.next_power_of_2(classes)),
        BLOCK_BATCH=max(16, min(64, triton.next_power_of_2(batch))), PRECISION=sum_precision(),
        num_stages=1,  # the batch is mostly one block, and more stages need more registers than there are
    )  # fmt: skip


def mirror(moment: Tensor) -> None:
    """Copy the lower half of G (N, k, k) to its upper half.

    Args:
        moment: of N models; it changes in place.
    """
    moment.copy_(moment.tril() + moment.tril(-1).mT)
