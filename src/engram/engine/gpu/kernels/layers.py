"""Triton kernels of layers: linear with LeakyReLU, and convolutions with LeakyReLU and 2×2 max-pooling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.engine.gpu.kernels.head import dot_precision

TILE = 64  # of a linear layer's weight
ROWS, CELLS, VALUES = 64, 32, 32  # the tile of a product: rows of weights, cells of the pooling, values of a patch
FEW = 512  # programs that leave most of a GPU idle: a batch is then divided
SPLITS = 8  # into so many parts, each with a sum of its own
BLOCK = 512


# --- linear layers, LeakyReLU(θ x + b), whose samples are the last axis -----------------------------------------


@triton.jit
def _multiply(
    weight, entered, bias, out, slope, OUT, IN, BATCH, SHARING,
    TILE: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b = tl.program_id(1) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    z = tl.zeros((TILE, BLOCK_BATCH), dtype=tl.float32)
    for first in range(0, IN, TILE):
        i = first + tl.arange(0, TILE)
        where = weight + (model * OUT + o[:, None]) * IN + i[None, :]
        w = tl.load(where, mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
        where = entered + ((model // SHARING) * IN + i[:, None]) * BATCH + b[None, :]
        x = tl.load(where, mask=(i < IN)[:, None] & (b < BATCH)[None, :], other=0.0)
        z = tl.dot(w, x, z, input_precision=PRECISION)
    z += tl.load(bias + model * OUT + o, mask=o < OUT, other=0.0)[:, None]
    where = out + (model * OUT + o[:, None]) * BATCH + b[None, :]
    tl.store(where, tl.where(z > 0, z, slope * z), mask=(o < OUT)[:, None] & (b < BATCH)[None, :])


@triton.jit
def _multiply_back(
    weight, delta, by_entered, OUT, IN, BATCH,
    TILE: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b = tl.program_id(1) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    total = tl.zeros((TILE, BLOCK_BATCH), dtype=tl.float32)
    for first in range(0, OUT, TILE):
        o = first + tl.arange(0, TILE)
        where = weight + (model * OUT + o[:, None]) * IN + i[None, :]
        w = tl.load(where, mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
        where = delta + (model * OUT + o[:, None]) * BATCH + b[None, :]
        d = tl.load(where, mask=(o < OUT)[:, None] & (b < BATCH)[None, :], other=0.0)
        total = tl.dot(tl.trans(w), d, total, input_precision=PRECISION)
    where = by_entered + (model * IN + i[:, None]) * BATCH + b[None, :]
    tl.store(where, total, mask=(i < IN)[:, None] & (b < BATCH)[None, :])


@triton.jit
def _activate(out, bias, slope, UNITS, BATCH, BLOCK: tl.constexpr):
    model = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < UNITS * BATCH
    b = tl.load(bias + model * UNITS + place // BATCH, mask=inside)
    where = out + model * UNITS * BATCH + place
    value = tl.load(where, mask=inside) + b
    tl.store(where, tl.where(value > 0, value, slope * value), mask=inside)


@triton.jit
def _pass_back(
    gradient, out, delta, by_bias, slope, UNITS, BATCH, MODEL_STRIDE, SAMPLE_STRIDE, UNIT_STRIDE,
    BLOCK_UNIT: tl.constexpr, BLOCK_BATCH: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_UNIT + tl.arange(0, BLOCK_UNIT)
    total = tl.zeros((BLOCK_UNIT,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        inside = (unit < UNITS)[:, None] & (b < BATCH)[None, :]
        source = gradient + model * MODEL_STRIDE + b[None, :] * SAMPLE_STRIDE + unit[:, None] * UNIT_STRIDE
        g = tl.load(source, mask=inside, other=0.0)
        place = (model * UNITS + unit[:, None]) * BATCH + b[None, :]
        d = tl.where(tl.load(out + place, mask=inside, other=0.0) > 0, g, slope * g)
        tl.store(delta + place, d, mask=inside)
        total += tl.sum(d, axis=1)
    tl.store(by_bias + model * UNITS + unit, total, mask=unit < UNITS)


def activate(out: Tensor, bias: Tensor, slope: float) -> None:
    """LeakyReLU(out + bias), in place, for out (N, units, B) and bias (N, units)."""
    num_models, units, batch = out.shape
    block = min(1024, triton.next_power_of_2(units * batch))
    _activate[(triton.cdiv(units * batch, block), num_models)](out, bias, slope, units, batch, BLOCK=block)


def pass_back(gradient: Tensor, out: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the layer's input (N, units, B) and bias, from that with respect to its output.

    The latter is (N, B, units), in any layout.
    """
    num_models, units, batch = out.shape
    delta, by_bias = out.new_empty(out.shape), out.new_empty(num_models, units)
    tile = {"BLOCK_UNIT": 32, "BLOCK_BATCH": min(64, triton.next_power_of_2(batch))}
    _pass_back[(triton.cdiv(units, 32), num_models)](
        gradient, out, delta, by_bias, slope, units, batch, *gradient.stride(), **tile
    )
    return delta, by_bias


def multiply(weight: Tensor, entered: Tensor, bias: Tensor, slope: float) -> Tensor:
    """LeakyReLU(θ x + b) (N, out, B) for weights (N, out, in) of any size: PyTorch's products need multiples of 4.

    x is (N, in, B), or (T, in, B) where N / T consecutive models share it; b is (N, out).
    """
    num_models, outputs, inputs = weight.shape
    batch = entered.shape[2]
    out = entered.new_empty(num_models, outputs, batch)
    block = _block_of(batch)
    _multiply[(triton.cdiv(outputs, TILE), triton.cdiv(batch, block), num_models)](
        weight, entered.contiguous(), bias, out, slope, outputs, inputs, batch, num_models // len(entered),
        TILE=TILE, BLOCK_BATCH=block, PRECISION=dot_precision(),
    )  # fmt: skip
    return out


def multiply_back(weight: Tensor, delta: Tensor) -> Tensor:
    """θᵀ δ (N, in, B), for weights (N, out, in) of any size and δ (N, out, B)."""
    num_models, outputs, inputs = weight.shape
    batch = delta.shape[2]
    by_entered = delta.new_empty(num_models, inputs, batch)
    block = _block_of(batch)
    _multiply_back[(triton.cdiv(inputs, TILE), triton.cdiv(batch, block), num_models)](
        weight, delta, by_entered, outputs, inputs, batch, TILE=TILE, BLOCK_BATCH=block, PRECISION=dot_precision()
    )
    return by_entered


def _block_of(batch: int) -> int:
    return max(16, min(64, triton.next_power_of_2(batch)))


# --- convolutions -----------------------------------------------------------------------------------------------
#
# A convolution is a product of its weights with the patches of its inputs. The kernels read a patch where it is in
# the image. The four outputs of a cell of the pooling are computed together, and only the largest is stored, with its
# place: a code of 0 to 3, plus 4 where LeakyReLU has the slope of negative numbers.
#
# Images (X, B, in, H, W) are those of X trials or models; each is seen by SHARING models, whose rows of weights, one
# for each output channel, lie one after another.


@triton.jit
def _place_of(k, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """Where value k of a patch is in the image, from the patch's corner on."""
    return (k // (KH * KW)) * (H * W) + (k % (KH * KW)) // KW * W + k % KW


@triton.jit
def _convolve(
    images, weight, bias, pooled, codes, slope, SAMPLES, SHARING, CIN: tl.constexpr, COUT: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ROWS: tl.constexpr, CELLS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    known, there = row < SHARING * COUT, cell < SAMPLES * PH * PW
    sample, i, j = cell // (PH * PW), (cell % (PH * PW)) // PW, cell % PW
    corner = images + (which * SAMPLES + sample) * (CIN * H * W) + 2 * i * W + 2 * j
    theta = weight + (which * SHARING * COUT + row) * (CIN * KH * KW)
    z0 = tl.zeros((ROWS, CELLS), dtype=tl.float32)
    z1 = tl.zeros((ROWS, CELLS), dtype=tl.float32)
    z2 = tl.zeros((ROWS, CELLS), dtype=tl.float32)
    z3 = tl.zeros((ROWS, CELLS), dtype=tl.float32)
    for first in range(0, CIN * KH * KW, VALUES):
        k = first + tl.arange(0, VALUES)
        inside = k < CIN * KH * KW
        w = tl.load(theta[:, None] + k[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        source = corner[None, :] + _place_of(k, H, W, KH, KW)[:, None]
        seen = inside[:, None] & there[None, :]
        z0 = tl.dot(w, tl.load(source, mask=seen, other=0.0), z0, input_precision=PRECISION)
        z1 = tl.dot(w, tl.load(source + 1, mask=seen, other=0.0), z1, input_precision=PRECISION)
        z2 = tl.dot(w, tl.load(source + W, mask=seen, other=0.0), z2, input_precision=PRECISION)
        z3 = tl.dot(w, tl.load(source + W + 1, mask=seen, other=0.0), z3, input_precision=PRECISION)
    best, code = z0, tl.zeros((ROWS, CELLS), dtype=tl.int32)
    code = tl.where(z1 > best, 1, code)
    best = tl.maximum(best, z1)
    code = tl.where(z2 > best, 2, code)
    best = tl.maximum(best, z2)
    code = tl.where(z3 > best, 3, code)
    best = tl.maximum(best, z3)
    best += tl.load(bias + which * SHARING * COUT + row, mask=known, other=0.0)[:, None]
    model = which * SHARING + row // COUT
    place = ((model[:, None] * SAMPLES + sample[None, :]) * COUT + (row % COUT)[:, None]) * (PH * PW)
    place += (cell % (PH * PW))[None, :]
    inside = known[:, None] & there[None, :]
    tl.store(pooled + place, tl.where(best > 0, best, slope * best), mask=inside)
    tl.store(codes + place, tl.where(best > 0, code, code + 4).to(tl.int8), mask=inside)


@triton.jit
def _weight_slopes(
    delta, codes, images, by_weight, by_bias, slope, SAMPLES, SHARING, GROUPS, CIN: tl.constexpr, COUT: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which, part = (tl.program_id(2) // SPLITS).to(tl.int64), tl.program_id(2) % SPLITS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    known, inside = row < SHARING * COUT, k < CIN * KH * KW
    model, values = which * SHARING + row // COUT, _place_of(k, H, W, KH, KW)
    total = tl.zeros((ROWS, VALUES), dtype=tl.float32)
    of_bias = tl.zeros((ROWS,), dtype=tl.float32)
    some = tl.cdiv(SAMPLES * PH * PW, SPLITS * CELLS) * CELLS  # the cells of a part
    for first in range(part * some, min((part + 1) * some, SAMPLES * PH * PW), CELLS):
        cell = first + tl.arange(0, CELLS)
        there = cell < SAMPLES * PH * PW
        sample, i, j = cell // (PH * PW), (cell % (PH * PW)) // PW, cell % PW
        place = ((model[:, None] * SAMPLES + sample[None, :]) * COUT + (row % COUT)[:, None]) * (PH * PW)
        place += (cell % (PH * PW))[None, :]
        d = tl.load(delta + place, mask=known[:, None] & there[None, :], other=0.0)
        code = tl.load(codes + place, mask=known[:, None] & there[None, :], other=0).to(tl.int32)
        d = tl.where(code >= 4, slope * d, d)
        of_bias += tl.sum(d, axis=1)
        corner = images + (which * SAMPLES + sample) * (CIN * H * W) + 2 * i * W + 2 * j
        source, seen = corner[:, None] + values[None, :], there[:, None] & inside[None, :]
        for k_of_cell in tl.static_range(4):
            x = tl.load(source + (k_of_cell // 2) * W + k_of_cell % 2, mask=seen, other=0.0)
            total = tl.dot(tl.where(code % 4 == k_of_cell, d, 0.0), x, total, input_precision=PRECISION)
    own = (part * GROUPS + which) * SHARING * COUT + row
    tl.store(by_weight + own[:, None] * (CIN * KH * KW) + k[None, :], total, mask=known[:, None] & inside[None, :])
    if tl.program_id(0) == 0:
        tl.store(by_bias + own, of_bias, mask=known)


@triton.jit
def _unpool(
    delta, codes, maps, slope, SAMPLES, CHANNELS, OH: tl.constexpr, OW: tl.constexpr, PH: tl.constexpr,
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
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    d = tl.where(code >= 4, slope * d, d)
    target = maps + ((model * CHANNELS + channel) * SAMPLES + sample) * (OH * OW) + 2 * i * OW + column
    tl.store(target, tl.where(code % 4 == column % 2, d, 0.0), mask=inside)
    tl.store(target + OW, tl.where(code % 4 == 2 + column % 2, d, 0.0), mask=inside)


@triton.jit
def _fold(
    columns, images, SAMPLES, CIN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < SAMPLES * H * W
    sample, i, j = pixel // (H * W), (pixel % (H * W)) // W, pixel % W
    source = columns + model * (CIN * KH * KW) * SAMPLES * OH * OW + sample * (OH * OW)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(KH * KW):
        row, column = i - k // KW, j - k % KW
        there = inside & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
        place = (channel * (KH * KW) + k) * (SAMPLES * OH * OW) + row * OW + column
        total += tl.load(source + place, mask=there, other=0.0)
    place = ((model * SAMPLES + sample) * CIN + channel) * (H * W) + pixel % (H * W)
    tl.store(images + place, total, mask=inside)


def convolve(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """LeakyReLU and 2×2 max-pooling of the convolution of each model, and the code of each cell.

    Args:
        images: (X, B, in, H, W), each of the X for N / X consecutive models.
        weight: (N, out, in, kernel height, kernel width).
        bias: (N, out).
        slope: of LeakyReLU, at least 0.

    Returns:
        (N, B, out, H′/2, W′/2) as floats and as codes.
    """
    groups, samples = images.shape[:2]
    models, channels = weight.shape[:2]
    facts = _facts(images, weight)
    shape = (models, samples, channels, facts["PH"], facts["PW"])
    pooled = images.new_empty(shape)
    codes = torch.empty(shape, dtype=torch.int8, device=images.device)
    sharing, cells = models // groups, samples * facts["PH"] * facts["PW"]
    _convolve[(triton.cdiv(cells, CELLS), triton.cdiv(sharing * channels, ROWS), groups)](
        images, weight, bias, pooled, codes, slope, samples, sharing, **facts,
        ROWS=ROWS, CELLS=CELLS, VALUES=VALUES, PRECISION=dot_precision(),
    )  # fmt: skip
    return pooled, codes


def weight_slopes(delta: Tensor, codes: Tensor, images: Tensor, weight: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """The gradients with respect to weight and bias, from that with respect to the pooled maps.

    Args:
        delta: (N, B, out, H′/2, W′/2).
        codes: of the same shape.
        images: as in `convolve`.
        weight: of whose shape the first gradient is.
        slope: of LeakyReLU.
    """
    groups, samples = images.shape[:2]
    models, channels = weight.shape[:2]
    facts = _facts(images, weight)
    sharing, values = models // groups, weight[0, 0].numel()
    grid = (triton.cdiv(values, VALUES), triton.cdiv(sharing * channels, ROWS), groups)
    splits = SPLITS if grid[0] * grid[1] * grid[2] < FEW else 1
    by_weight, by_bias = delta.new_empty(splits, *weight.shape), delta.new_empty(splits, models, channels)
    _weight_slopes[(*grid[:2], groups * splits)](
        delta, codes, images, by_weight, by_bias, slope, samples, sharing, groups, **facts,
        SPLITS=splits, ROWS=ROWS, CELLS=CELLS, VALUES=VALUES, PRECISION=dot_precision(),
    )  # fmt: skip
    return (by_weight[0], by_bias[0]) if splits == 1 else (by_weight.sum(dim=0), by_bias.sum(dim=0))


def image_slopes(delta: Tensor, codes: Tensor, weight: Tensor, shape: torch.Size, slope: float) -> Tensor:
    """The gradient with respect to the images of N models (N, B, in, H, W), which is also `shape`.

    Args:
        delta: as in `weight_slopes`.
        codes: of the same shape.
        weight: (N, out, in, kernel height, kernel width).
        shape: of the images.
        slope: of LeakyReLU.
    """
    models, samples, inputs, height, width = shape
    channels, (kh, kw), (ph, pw) = weight.shape[1], weight.shape[-2:], delta.shape[-2:]
    oh, ow = height - kh + 1, width - kw + 1
    even = oh % 2 == 0 and ow % 2 == 0
    make = delta.new_empty if even else delta.new_zeros  # pooling never sees an odd last row or column
    maps = make(models, channels, samples, oh, ow)
    _unpool[(triton.cdiv(samples * ph * 2 * pw, BLOCK), channels, models)](
        delta, codes, maps, slope, samples, channels, oh, ow, ph, pw, BLOCK=BLOCK
    )
    columns = torch.bmm(weight.flatten(2).mT, maps.view(models, channels, -1))  # (N, in · kernel, B · H′ · W′)
    images = delta.new_empty(shape)
    _fold[(triton.cdiv(samples * height * width, 256), inputs, models)](
        columns, images, samples, inputs, height, width, kh, kw, oh, ow, BLOCK=256
    )
    return images


def _facts(images: Tensor, weight: Tensor) -> dict[str, int]:
    """Sizes for which the kernels are compiled."""
    (height, width), (kh, kw) = images.shape[-2:], weight.shape[-2:]
    sizes = (images.shape[2], weight.shape[1], height, width, kh, kw, (height - kh + 1) // 2, (width - kw + 1) // 2)
    return dict(zip(("CIN", "COUT", "H", "W", "KH", "KW", "PH", "PW"), sizes, strict=True))
