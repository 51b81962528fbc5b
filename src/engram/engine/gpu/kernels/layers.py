"""Triton kernels of layers: linear with LeakyReLU, and convolutions with LeakyReLU and 2×2 max-pooling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.engine.gpu.kernels.ahead import Kernel
from engram.engine.gpu.kernels.head import dot_precision

# Tiles, as measured for the paper's networks.
MULTIPLY = {"OUTS": 64, "INS": 32, "num_warps": 2, "num_stages": 3}
MULTIPLY_BACK = {"OUTS": 16, "INS": 64, "num_warps": 2, "num_stages": 2}
# Rows of weights, cells of the pooling, values of a patch:
CONVOLVE = {"ROWS": 64, "CELLS": 64, "VALUES": 64, "num_warps": 4, "num_stages": 2}
CONVOLVE_SMALL = {**CONVOLVE, "VALUES": 128, "num_stages": 1}  # for patches of at most 128 values
WEIGHT_SLOPES = {"ROWS": 64, "CELLS": 32, "VALUES": 128, "num_warps": 4, "num_stages": 2}
SPREAD = {"ROWS": 128, "CELLS": 64, "VALUES": 64, "num_warps": 4, "num_stages": 2}
FEW = 256  # programs that leave much of a GPU idle: a batch is then divided
SPLITS = 8  # into so many parts, each with a sum of its own
BLOCK = 512


# --- linear layers, LeakyReLU(θ x + b), whose samples are the last axis -----------------------------------------


@Kernel
def _multiply(
    weight, entered, bias, out, slope, BATCH, SHARING,
    OUT: tl.constexpr, IN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, BLOCK_BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    b = tl.program_id(1) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    z = tl.zeros((OUTS, BLOCK_BATCH), dtype=tl.float32)
    for first in range(0, IN, INS):
        i = first + tl.arange(0, INS)
        where = weight + (model * OUT + o[:, None]) * IN + i[None, :]
        w = tl.load(where, mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
        where = entered + ((model // SHARING) * IN + i[:, None]) * BATCH + b[None, :]
        x = tl.load(where, mask=(i < IN)[:, None] & (b < BATCH)[None, :], other=0.0)
        z = tl.dot(w, x, z, input_precision=PRECISION)
    z += tl.load(bias + model * OUT + o, mask=o < OUT, other=0.0)[:, None]
    where = out + (model * OUT + o[:, None]) * BATCH + b[None, :]
    tl.store(where, tl.where(z > 0, z, slope * z), mask=(o < OUT)[:, None] & (b < BATCH)[None, :])


@Kernel
def _multiply_back(
    weight, delta, by_entered, BATCH,
    OUT: tl.constexpr, IN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, BLOCK_BATCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * INS + tl.arange(0, INS)
    b = tl.program_id(1) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)
    total = tl.zeros((INS, BLOCK_BATCH), dtype=tl.float32)
    for first in range(0, OUT, OUTS):
        o = first + tl.arange(0, OUTS)
        where = weight + (model * OUT + o[:, None]) * IN + i[None, :]
        w = tl.load(where, mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
        where = delta + (model * OUT + o[:, None]) * BATCH + b[None, :]
        d = tl.load(where, mask=(o < OUT)[:, None] & (b < BATCH)[None, :], other=0.0)
        total = tl.dot(tl.trans(w), d, total, input_precision=PRECISION)
    where = by_entered + (model * IN + i[:, None]) * BATCH + b[None, :]
    tl.store(where, total, mask=(i < IN)[:, None] & (b < BATCH)[None, :])


@Kernel
def _activate(out, bias, slope, UNITS, BATCH, BLOCK: tl.constexpr):
    model = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < UNITS * BATCH
    b = tl.load(bias + model * UNITS + place // BATCH, mask=inside)
    where = out + model * UNITS * BATCH + place
    value = tl.load(where, mask=inside) + b
    tl.store(where, tl.where(value > 0, value, slope * value), mask=inside)


@Kernel
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
    _multiply[(triton.cdiv(outputs, MULTIPLY["OUTS"]), triton.cdiv(batch, block), num_models)](
        weight, entered.contiguous(), bias, out, slope, batch, num_models // len(entered),
        OUT=outputs, IN=inputs, BLOCK_BATCH=block, PRECISION=dot_precision(), **MULTIPLY,
    )  # fmt: skip
    return out


def multiply_back(weight: Tensor, delta: Tensor) -> Tensor:
    """θᵀ δ (N, in, B), for weights (N, out, in) of any size and δ (N, out, B)."""
    num_models, outputs, inputs = weight.shape
    batch = delta.shape[2]
    by_entered = delta.new_empty(num_models, inputs, batch)
    block = _block_of(batch)
    _multiply_back[(triton.cdiv(inputs, MULTIPLY_BACK["INS"]), triton.cdiv(batch, block), num_models)](
        weight, delta, by_entered, batch,
        OUT=outputs, IN=inputs, BLOCK_BATCH=block, PRECISION=dot_precision(), **MULTIPLY_BACK,
    )  # fmt: skip
    return by_entered


def _block_of(batch: int) -> int:
    return max(16, min(64, triton.next_power_of_2(batch)))


# --- convolutions -----------------------------------------------------------------------------------------------
#
# A convolution is a product of its weights with the patches of its inputs. The kernels read a patch where it is in
# the image, whose channels are the last axis, so that a row of a patch lies in one piece. The four outputs of a cell of
# the pooling are computed together, and only the largest is stored, with its place: a code of 0 to 3, plus 4 where
# LeakyReLU has the slope of negative numbers.
#
# Images and weights are of one type, float32 or bfloat16, in which they are multiplied; sums are always in float32.
# Images (X, B, H, W, in) are those of X trials or models; each is seen by SHARING models, whose rows of weights, one
# for each output channel, lie one after another.


@Kernel
def _convolve(
    images, weight, bias, pooled, codes, slope, SAMPLES, SHARING, INNER: tl.constexpr, CIN: tl.constexpr,
    COUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    known, there = row < SHARING * COUT, cell < SAMPLES * PH * PW
    theta = weight + (which * SHARING * COUT + row) * (KH * KW * CIN)
    corner = images + _corner(cell, which * SAMPLES, H, W, PH, PW) * CIN
    z0 = tl.zeros((CELLS, ROWS), dtype=tl.float32)
    z1 = tl.zeros((CELLS, ROWS), dtype=tl.float32)
    z2 = tl.zeros((CELLS, ROWS), dtype=tl.float32)
    z3 = tl.zeros((CELLS, ROWS), dtype=tl.float32)
    for first in range(0, KH * KW * CIN, VALUES):
        k = first + tl.arange(0, VALUES)
        inside = k < KH * KW * CIN
        w = tl.trans(tl.load(theta[:, None] + k[None, :], mask=known[:, None] & inside[None, :], other=0.0))
        source = corner[:, None] + _place_of(k, W, KW, CIN)[None, :]
        seen = there[:, None] & inside[None, :]
        z0 = tl.dot(tl.load(source, mask=seen, other=0.0), w, z0, input_precision=PRECISION)
        z1 = tl.dot(tl.load(source + CIN, mask=seen, other=0.0), w, z1, input_precision=PRECISION)
        z2 = tl.dot(tl.load(source + W * CIN, mask=seen, other=0.0), w, z2, input_precision=PRECISION)
        z3 = tl.dot(tl.load(source + (W + 1) * CIN, mask=seen, other=0.0), w, z3, input_precision=PRECISION)
    best, code = z0, tl.zeros((CELLS, ROWS), dtype=tl.int32)
    code = tl.where(z1 > best, 1, code)
    best = tl.maximum(best, z1)
    code = tl.where(z2 > best, 2, code)
    best = tl.maximum(best, z2)
    code = tl.where(z3 > best, 3, code)
    best = tl.maximum(best, z3)
    best += tl.load(bias + which * SHARING * COUT + row, mask=known, other=0.0)[None, :]
    place = _cells_of(row, cell, which * SHARING, SAMPLES, COUT, PH, PW)
    inside = there[:, None] & known[None, :]
    tl.store(codes + place, tl.where(best > 0, code, code + 4).to(tl.int8), mask=inside)
    if not INNER:  # channels first
        own = (which * SHARING + row // COUT) * SAMPLES * COUT + row % COUT
        place = (own[None, :] + (cell // (PH * PW))[:, None] * COUT) * (PH * PW) + (cell % (PH * PW))[:, None]
    tl.store(pooled + place, tl.where(best > 0, best, slope * best), mask=inside)


@triton.jit
def _corner(cell, first, H: tl.constexpr, W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    """The pixel at which the patches of a cell begin, for cells of all samples from `first` on."""
    sample, i, j = cell // (PH * PW), (cell % (PH * PW)) // PW, cell % PW
    return (first + sample) * (H * W) + 2 * i * W + 2 * j


@triton.jit
def _place_of(k, W: tl.constexpr, KW: tl.constexpr, CIN: tl.constexpr):
    """Where value k of a patch is in the image, from the patch's corner on."""
    return (k // (KW * CIN)) * (W * CIN) + k % (KW * CIN)


@triton.jit
def _cells_of(row, cell, model, SAMPLES, COUT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    """Where (cells, rows) of pooled maps are, for rows of all models from `model` on."""
    own = (model + row // COUT) * SAMPLES * (PH * PW) * COUT + row % COUT
    return own[None, :] + cell[:, None] * COUT


@Kernel
def _weight_slopes(
    delta, codes, images, by_weight, by_bias, slope, SAMPLES, SHARING, GROUPS, CHANNELS: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, CELLS: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    which, part = (tl.program_id(2) // SPLITS).to(tl.int64), tl.program_id(2) % SPLITS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    known, inside = row < SHARING * COUT, k < KH * KW * CIN
    values = _place_of(k, W, KW, CIN)
    total = tl.zeros((ROWS, VALUES), dtype=tl.float32)
    of_bias = tl.zeros((ROWS,), dtype=tl.float32)
    share = tl.cdiv(SAMPLES * PH * PW, SPLITS * CELLS) * CELLS  # the cells of a part
    for first in range(part * share, min((part + 1) * share, SAMPLES * PH * PW), CELLS):
        cell = first + tl.arange(0, CELLS)
        there = cell < SAMPLES * PH * PW
        place = _cells_of(row, cell, which * SHARING, SAMPLES, COUT, PH, PW)
        d = tl.load(delta + place, mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)
        code = tl.load(codes + place, mask=there[:, None] & known[None, :], other=0).to(tl.int32)
        d = tl.where(code >= 4, slope * d, d)
        of_bias += tl.sum(d, axis=0)
        source = images + (_corner(cell, which * SAMPLES, H, W, PH, PW) * CIN)[:, None] + values[None, :]
        seen = there[:, None] & inside[None, :]
        for of_cell in tl.static_range(4):
            x = tl.load(source + ((of_cell // 2) * W + of_cell % 2) * CIN, mask=seen, other=0.0)
            some = tl.where(code % 4 == of_cell, d, 0.0).to(x.dtype)
            total = tl.dot(tl.trans(some), x, total, input_precision=PRECISION)
    own = (part * GROUPS + which) * SHARING * COUT + row
    # Parameters have the channels first, and only as many as there are.
    target = by_weight + own[:, None] * (CHANNELS * KH * KW) + ((k % CIN) * (KH * KW) + k // CIN)[None, :]
    tl.store(target, total, mask=known[:, None] & (inside & (k % CIN < CHANNELS))[None, :])
    if tl.program_id(0) == 0:
        tl.store(by_bias + own, of_bias, mask=known)


@Kernel
def _spread(
    delta, codes, weight, windows, slope, SAMPLES, CIN: tl.constexpr, COUT: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ROWS: tl.constexpr, CELLS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of each cell's window: the pixels that any of its four patches covers, (kernel + 1)²."""
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # a value of the window
    cell = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    known, there = row < (KH + 1) * (KW + 1) * CIN, cell < SAMPLES * PH * PW
    u, v = row // ((KW + 1) * CIN), (row // CIN) % (KW + 1)
    own = delta + (model * SAMPLES * (PH * PW) + cell) * COUT
    own_codes = codes + (model * SAMPLES * (PH * PW) + cell) * COUT
    theta = weight + model * COUT * (KH * KW * CIN) + (u * KW + v) * CIN + row % CIN
    total = tl.zeros((CELLS, ROWS), dtype=tl.float32)
    for first in range(0, COUT, VALUES):
        c = first + tl.arange(0, VALUES)
        inside = there[:, None] & (c < COUT)[None, :]
        d = tl.load(own[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
        code = tl.load(own_codes[:, None] + c[None, :], mask=inside, other=0).to(tl.int32)
        d = tl.where(code >= 4, slope * d, d)
        for of_cell in tl.static_range(4):
            i, j = u - of_cell // 2, v - of_cell % 2
            covered = known & (i >= 0) & (i < KH) & (j >= 0) & (j < KW)
            source = theta[None, :] + (c[:, None] * (KH * KW) - (of_cell // 2) * KW - of_cell % 2) * CIN
            w = tl.load(source, mask=(c < COUT)[:, None] & covered[None, :], other=0.0)
            some = tl.where(code % 4 == of_cell, d, 0.0).to(w.dtype)
            total = tl.dot(some, w, total, input_precision=PRECISION)
    target = windows + (model * SAMPLES * (PH * PW) + cell[:, None]) * ((KH + 1) * (KW + 1) * CIN) + row[None, :]
    tl.store(target, total, mask=there[:, None] & known[None, :])


@Kernel
def _collect(
    windows, images, CIN: tl.constexpr, COUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over the windows that contain a pixel."""
    sample = tl.program_id(1).to(tl.int64)  # of all models
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = value < H * W * CIN
    y, x, channel = value // (W * CIN), (value // CIN) % W, value % CIN
    source = windows + sample * (PH * PW) * ((KH + 1) * (KW + 1) * CIN) + channel
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(KH // 2 + 1):
        for t in tl.static_range(KW // 2 + 1):
            i, j, u, v = y // 2 - s, x // 2 - t, y % 2 + 2 * s, x % 2 + 2 * t
            there = inside & (i >= 0) & (i < PH) & (j >= 0) & (j < PW) & (u <= KH) & (v <= KW)
            place = (((i * PW + j) * (KH + 1) + u) * (KW + 1) + v) * CIN
            total += tl.load(source + place, mask=there, other=0.0).to(tl.float32)
    tl.store(images + sample * (H * W * CIN) + value, total, mask=inside)


def convolve(images: Tensor, weight: Tensor, bias: Tensor, slope: float, inner: bool) -> tuple[Tensor, Tensor]:
    """LeakyReLU and 2×2 max-pooling of the convolution of each model, and the code of each cell.

    Args:
        images: (X, B, H, W, in), each of the X for N / X consecutive models.
        weight: (N, out, kernel height, kernel width, in), of the same type.
        bias: (N, out).
        slope: of LeakyReLU, at least 0.
        inner: whether another convolution gets the result.

    Returns:
        The pooled maps (N, B, H′/2, W′/2, out) in the type of the images if they are inner, else (N, B, out, H′/2,
        W′/2) in float32; and the codes (N, B, H′/2, W′/2, out).
    """
    groups, samples = images.shape[:2]
    models, channels = weight.shape[:2]
    facts = _facts(images.shape, weight)
    size = (facts["PH"], facts["PW"])
    codes = torch.empty(models, samples, *size, channels, dtype=torch.int8, device=images.device)
    pooled = torch.empty_like(codes, dtype=images.dtype) if inner else bias.new_empty(models, samples, channels, *size)
    sharing, cells = models // groups, samples * facts["PH"] * facts["PW"]
    tile = CONVOLVE_SMALL if weight[0, 0].numel() <= CONVOLVE_SMALL["VALUES"] else CONVOLVE
    _convolve[(triton.cdiv(cells, tile["CELLS"]), triton.cdiv(sharing * channels, tile["ROWS"]), groups)](
        images, weight, bias, pooled, codes, slope, samples, sharing, inner, **facts,
        PRECISION=dot_precision(), **tile,
    )  # fmt: skip
    return pooled, codes


def weight_slopes(
    delta: Tensor, codes: Tensor, images: Tensor, weight: Tensor, channels: int, slope: float
) -> tuple[Tensor, Tensor]:
    """The gradients with respect to weight and bias, in float32, from that with respect to the pooled maps.

    Args:
        delta: (N, B, H′/2, W′/2, out).
        codes: of the same shape.
        images: as in `convolve`.
        weight: as in `convolve`.
        channels: how many of the images' channels have a gradient.
        slope: of LeakyReLU.

    Returns:
        (N, out, channels, kernel height, kernel width), and (N, out).
    """
    groups, samples = images.shape[:2]
    models, outputs, kh, kw = weight.shape[:4]
    facts = _facts(images.shape, weight)
    sharing, values, tile = models // groups, weight[0, 0].numel(), WEIGHT_SLOPES
    grid = (triton.cdiv(values, tile["VALUES"]), triton.cdiv(sharing * outputs, tile["ROWS"]), groups)
    splits = SPLITS if grid[0] * grid[1] * grid[2] < FEW else 1
    by_weight = torch.empty(splits, models, outputs, channels, kh, kw, device=delta.device)
    by_bias = torch.empty(splits, models, outputs, device=delta.device)
    _weight_slopes[(*grid[:2], groups * splits)](
        delta, codes, images, by_weight, by_bias, slope, samples, sharing, groups, channels, **facts,
        SPLITS=splits, PRECISION=dot_precision(), **tile,
    )  # fmt: skip
    return (by_weight[0], by_bias[0]) if splits == 1 else (by_weight.sum(dim=0), by_bias.sum(dim=0))


def image_slopes(delta: Tensor, codes: Tensor, weight: Tensor, shape: torch.Size, slope: float) -> Tensor:
    """The gradient with respect to the images of N models, of the weights' type.

    Args:
        delta: as in `weight_slopes`.
        codes: of the same shape.
        weight: (N, out, kernel height, kernel width, in).
        shape: of the images, (N, B, H, W, in).
        slope: of LeakyReLU.
    """
    models, samples = shape[:2]
    facts = _facts(shape, weight)
    cells, values = samples * facts["PH"] * facts["PW"], (facts["KH"] + 1) * (facts["KW"] + 1) * facts["CIN"]
    windows = weight.new_empty(models, cells, values)
    _spread[(triton.cdiv(cells, SPREAD["CELLS"]), triton.cdiv(values, SPREAD["ROWS"]), models)](
        delta, codes, weight, windows, slope, samples, **facts, PRECISION=dot_precision(), **SPREAD
    )
    images = weight.new_empty(shape)
    _collect[(triton.cdiv(images[0, 0].numel(), BLOCK), models * samples)](windows, images, **facts, BLOCK=BLOCK)
    return images


def _facts(images: torch.Size, weight: Tensor) -> dict[str, int]:
    """Sizes for which the kernels are compiled, of images (X, B, H, W, in)."""
    (height, width, inputs), (channels, kh, kw) = images[2:], weight.shape[1:4]
    sizes = (inputs, channels, height, width, kh, kw, (height - kh + 1) // 2, (width - kw + 1) // 2)
    return dict(zip(("CIN", "COUT", "H", "W", "KH", "KW", "PH", "PW"), sizes, strict=True))
