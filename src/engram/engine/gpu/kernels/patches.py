"""Triton kernels around a convolution: its patches as columns of a matrix, and the pooling after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _unfold(
    images, columns, SAMPLES, CIN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1)
    which = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < SAMPLES * OH * OW
    corner = (pixel // (OH * OW)) * (CIN * H * W) + ((pixel % (OH * OW)) // OW) * W + pixel % OW
    source = images + which * SAMPLES * CIN * H * W + corner
    target = columns + which * ROWS * SAMPLES * OH * OW + pixel
    if channel < CIN:
        for k in tl.static_range(KH * KW):
            value = tl.load(source + channel * (H * W) + (k // KW) * W + k % KW, mask=inside)
            tl.store(target + (channel * (KH * KW) + k) * (SAMPLES * OH * OW), value, mask=inside)
    else:
        for row in tl.static_range(CIN * KH * KW, ROWS):
            one = tl.full((BLOCK,), 1.0 if row == CIN * KH * KW else 0.0, tl.float32)
            tl.store(target + row * (SAMPLES * OH * OW), one, mask=inside)


@triton.jit
def _fold(
    columns, images, SAMPLES, CIN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1)
    which = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < SAMPLES * H * W
    sample, i, j = pixel // (H * W), (pixel % (H * W)) // W, pixel % W
    source = columns + which * ROWS * SAMPLES * OH * OW + sample * (OH * OW)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(KH * KW):
        row, column = i - k // KW, j - k % KW
        there = inside & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
        place = (channel * (KH * KW) + k) * (SAMPLES * OH * OW) + row * OW + column
        total += tl.load(source + place, mask=there, other=0.0)
    place = ((which * SAMPLES + sample) * CIN + channel) * (H * W) + pixel % (H * W)
    tl.store(images + place, total, mask=inside)


@triton.jit
def _pool(
    maps, pooled, winners, slope, SAMPLES, CHANNELS, OH: tl.constexpr, OW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < SAMPLES * PH * PW
    sample, i, j = cell // (PH * PW), (cell % (PH * PW)) // PW, cell % PW
    source = maps + ((model * CHANNELS + channel) * SAMPLES + sample) * (OH * OW) + 2 * i * OW + 2 * j
    best = tl.load(source, mask=inside, other=0.0)
    winner = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(source + (k // 2) * OW + k % 2, mask=inside, other=0.0)
        winner = tl.where(value > best, k, winner)
        best = tl.maximum(best, value)
    place = ((model * SAMPLES + sample) * CHANNELS + channel) * (PH * PW) + cell % (PH * PW)
    tl.store(pooled + place, tl.where(best > 0, best, slope * best), mask=inside)
    tl.store(winners + place, winner.to(tl.int8), mask=inside)


@triton.jit
def _unpool(
    delta, pooled, winners, maps, slope, SAMPLES, CHANNELS, OH: tl.constexpr, OW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    # Two pixels of a row for each cell, one above the other, so that neighbours in memory are written together.
    half = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = half < SAMPLES * PH * 2 * PW
    sample, i, column = half // (PH * 2 * PW), (half % (PH * 2 * PW)) // (2 * PW), half % (2 * PW)
    place = ((model * SAMPLES + sample) * CHANNELS + channel) * (PH * PW) + i * PW + column // 2
    d = tl.load(delta + place, mask=inside)
    d = tl.where(tl.load(pooled + place, mask=inside) > 0, d, slope * d)
    winner = tl.load(winners + place, mask=inside)
    target = maps + ((model * CHANNELS + channel) * SAMPLES + sample) * (OH * OW) + 2 * i * OW + column
    tl.store(target, tl.where(winner == column % 2, d, 0.0), mask=inside)
    tl.store(target + OW, tl.where(winner == 2 + column % 2, d, 0.0), mask=inside)


def num_rows(channels: int, kernel: tuple[int, int]) -> int:
    """The rows of a matrix of patches: one per value, one of ones for the bias, zeros up to a multiple of 4."""
    return triton.cdiv(channels * kernel[0] * kernel[1] + 1, 4) * 4


def unfold(images: Tensor, kernel: tuple[int, int]) -> Tensor:
    """The patches of images (T, B, in, H, W) as columns (T, rows, B · H′ · W′)."""
    num, samples, channels, height, width = images.shape
    oh, ow = height - kernel[0] + 1, width - kernel[1] + 1
    rows = num_rows(channels, kernel)
    columns = images.new_empty(num, rows, samples * oh * ow)
    _unfold[(triton.cdiv(samples * oh * ow, BLOCK), channels + 1, num)](
        images, columns, samples, channels, height, width, *kernel, oh, ow, rows, BLOCK=BLOCK
    )
    return columns


def fold(columns: Tensor, shape: torch.Size, kernel: tuple[int, int]) -> Tensor:
    """Each patch added where it was taken from; `shape` is that of the images (N, B, in, H, W)."""
    num, samples, channels, height, width = shape
    oh, ow = height - kernel[0] + 1, width - kernel[1] + 1
    images = columns.new_empty(shape)
    _fold[(triton.cdiv(samples * height * width, 256), channels, num)](
        columns, images, samples, channels, height, width, *kernel, oh, ow, columns.shape[1], BLOCK=256
    )
    return images


def pool(maps: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """LeakyReLU and 2×2 max-pooling of maps (N, out, B, H, W) -> (N, B, out, H/2, W/2), and the winner of each cell."""
    models, channels, samples, oh, ow = maps.shape
    pooled = maps.new_empty(models, samples, channels, oh // 2, ow // 2)
    winners = torch.empty_like(pooled, dtype=torch.int8)
    grid = (triton.cdiv(samples * (oh // 2) * (ow // 2), BLOCK), channels, models)
    _pool[grid](maps, pooled, winners, slope, samples, channels, oh, ow, oh // 2, ow // 2, BLOCK=BLOCK)
    return pooled, winners


def unpool(delta: Tensor, pooled: Tensor, winners: Tensor, shape: tuple[int, ...], slope: float) -> Tensor:
    """The gradient with respect to the maps (N, out, B, H, W), from that with respect to the pooled maps."""
    models, channels, samples, oh, ow = shape
    even = oh % 2 == 0 and ow % 2 == 0
    maps = delta.new_empty(shape) if even else delta.new_zeros(shape)  # pooling never sees an odd last row or column
    grid = (triton.cdiv(samples * (oh // 2) * 2 * (ow // 2), BLOCK), channels, models)
    _unpool[grid](
        delta.contiguous(), pooled, winners, maps, slope, samples, channels, oh, ow, oh // 2, ow // 2, BLOCK=BLOCK
    )
    return maps
