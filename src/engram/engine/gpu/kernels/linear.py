"""Triton kernels of a linear layer with LeakyReLU, LeakyReLU(θ x + b), whose samples are the last axis."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engram.engine.gpu.kernels.head import dot_precision

TILE = 64  # of a weight


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
