"""Triton kernels for a stack on a GPU: steps in one pass over the weights, and convolutions of many models at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from engram.stack.step import Step


def fits_convolution(layer: nn.Conv2d) -> bool:
    """Whether `convolve` can take the place of the layer's own forward."""
    return (
        type(layer).forward is nn.Conv2d.forward
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and layer.groups == 1
        and set(layer.stride) == set(layer.dilation) == {1}
        and layer.weight.dtype == torch.float32
    )


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def _move(t, g, place, gain, shift, path, held, followed, rate, proximal, size, inside):
    """θ after a step, for one tile of one model; SI's path is followed on the way."""
    if held >= 0:
        a = tl.load(gain + held * size + place, mask=inside)
        s = tl.load(shift + held * size + place, mask=inside)
        if proximal != 0:
            new = s + a * (t - rate * g)
        else:
            new = s + a * t - rate * g
    else:
        new = t - rate * g
    if followed >= 0:
        where = path + followed * size + place
        tl.store(where, tl.load(where, mask=inside) - g * (new - t), mask=inside)
    return new


@triton.jit
def _step_dense(
    theta, gradient, gain, shift, path, held, followed, rate, proximal, size, BLOCK: tl.constexpr
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    t = tl.load(theta + model * size + place, mask=inside)
    g = tl.load(gradient + model * size + place, mask=inside)
    new = _move(
        t, g, place, gain, shift, path, tl.load(held + model).to(tl.int64), tl.load(followed + model).to(tl.int64),
        tl.load(rate + model), tl.load(proximal + model), size, inside,
    )  # fmt: skip
    tl.store(theta + model * size + place, new, mask=inside)


@triton.jit
def _step_product(
    theta, delta, entered, gain, shift, path, held, followed, rate, proximal, OUT, IN, BATCH,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(IN, BLOCK_IN)
    o = (tl.program_id(0) // tiles) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i = (tl.program_id(0) % tiles) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    g = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        d = tl.load(
            delta + (model * BATCH + b[:, None]) * OUT + o[None, :],
            mask=(b < BATCH)[:, None] & (o < OUT)[None, :],
            other=0.0,
        )
        x = tl.load(
            entered + (model * BATCH + b[:, None]) * IN + i[None, :],
            mask=(b < BATCH)[:, None] & (i < IN)[None, :],
            other=0.0,
        )
        g = tl.dot(tl.trans(d), x, g, input_precision=PRECISION)
    size = OUT * IN
    place = o[:, None] * IN + i[None, :]
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    t = tl.load(theta + model * size + place, mask=inside)
    new = _move(
        t, g, place, gain, shift, path, tl.load(held + model).to(tl.int64), tl.load(followed + model).to(tl.int64),
        tl.load(rate + model), tl.load(proximal + model), size, inside,
    )  # fmt: skip
    tl.store(theta + model * size + place, new, mask=inside)


def step_dense(theta: Tensor, gradient: Tensor, step: Step) -> None:
    """θ ← θ after a step along a gradient (N, *shape), for all models of a stack."""
    size = theta[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    _step_dense[(triton.cdiv(size, block), len(theta))](
        theta, gradient.contiguous(), step.gain, step.shift, step.path, step.held, step.followed, step.rate,
        step.proximal, size, BLOCK=block,
    )  # fmt: skip


def step_product(theta: Tensor, delta: Tensor, entered: Tensor, step: Step) -> None:
    """The same along g = deltaᵀ entered, which is made tile by tile and never kept."""
    num_models, outputs, inputs = theta.shape
    batch = entered.shape[1]
    tile = {"BLOCK_OUT": 64, "BLOCK_IN": 64, "BLOCK_BATCH": max(16, min(64, triton.next_power_of_2(batch)))}
    grid = (triton.cdiv(outputs, tile["BLOCK_OUT"]) * triton.cdiv(inputs, tile["BLOCK_IN"]), num_models)
    _step_product[grid](
        theta, delta.contiguous(), entered.contiguous(), step.gain, step.shift, step.path, step.held, step.followed,
        step.rate, step.proximal, outputs, inputs, batch, PRECISION=_precision(), **tile,
    )  # fmt: skip


@triton.jit
def _convolve(
    entered, weight, bias, out, SAMPLES,
    CIN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, COUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_PIXEL: tl.constexpr, BLOCK_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a model's outputs (channels, pixels of all samples): a product with patches that are never stored."""
    model = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK_PIXEL + tl.arange(0, BLOCK_PIXEL)
    sample = pixel // (OH * OW)
    row = (pixel % (OH * OW)) // OW
    column = pixel % OW
    channel = tl.arange(0, BLOCK_OUT)
    total: tl.constexpr = CIN * KH * KW
    images = entered + model * SAMPLES * CIN * H * W
    result = tl.zeros((BLOCK_OUT, BLOCK_PIXEL), dtype=tl.float32)
    for first in range(0, total, BLOCK_SUM):
        k = first + tl.arange(0, BLOCK_SUM)
        i = (row - PH)[None, :] + ((k % (KH * KW)) // KW)[:, None]
        j = (column - PW)[None, :] + (k % KW)[:, None]
        inside = (pixel < SAMPLES * OH * OW)[None, :] & (k < total)[:, None]
        if PH > 0 or PW > 0:
            inside = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        place = (sample * CIN)[None, :] + (k // (KH * KW))[:, None]
        patch = tl.load(images + place * (H * W) + i * W + j, mask=inside, other=0.0)
        w = tl.load(
            weight + (model * COUT + channel[:, None]) * total + k[None, :],
            mask=(channel < COUT)[:, None] & (k < total)[None, :],
            other=0.0,
        )
        result = tl.dot(w, patch, result, input_precision=PRECISION)
    if HAS_BIAS:
        result += tl.load(bias + model * COUT + channel, mask=channel < COUT, other=0.0)[:, None]
    place = (model * SAMPLES + sample)[None, :] * (COUT * OH * OW) + channel[:, None] * (OH * OW)
    tl.store(
        out + place + (pixel % (OH * OW))[None, :],
        result,
        mask=(channel < COUT)[:, None] & (pixel < SAMPLES * OH * OW)[None, :],
    )


@triton.jit
def _correlate(
    entered, delta, partial, SAMPLES, PIXELS_EACH,
    CIN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, COUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_PIXEL: tl.constexpr, BLOCK_SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a model's weight gradient, over a part of the pixels; column CIN·KH·KW is the bias's."""
    model = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    channel = tl.arange(0, BLOCK_OUT)
    k = tl.program_id(0) * BLOCK_SUM + tl.arange(0, BLOCK_SUM)
    total: tl.constexpr = CIN * KH * KW
    images = entered + model * SAMPLES * CIN * H * W
    slopes = delta + model * SAMPLES * COUT * OH * OW
    result = tl.zeros((BLOCK_OUT, BLOCK_SUM), dtype=tl.float32)
    last = tl.minimum((part + 1) * PIXELS_EACH, SAMPLES * OH * OW)
    for first in range(part * PIXELS_EACH, last, BLOCK_PIXEL):
        pixel = first + tl.arange(0, BLOCK_PIXEL)
        sample = pixel // (OH * OW)
        i = ((pixel % (OH * OW)) // OW - PH)[None, :] + ((k % (KH * KW)) // KW)[:, None]
        j = (pixel % OW - PW)[None, :] + (k % KW)[:, None]
        inside = (pixel < last)[None, :] & (k < total)[:, None]
        if PH > 0 or PW > 0:
            inside = inside & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        place = (sample * CIN)[None, :] + (k // (KH * KW))[:, None]
        patch = tl.load(images + place * (H * W) + i * W + j, mask=inside, other=0.0)
        patch = tl.where((k == total)[:, None], 1.0, patch)
        d = tl.load(
            slopes + (sample * COUT)[None, :] * (OH * OW) + channel[:, None] * (OH * OW) + (pixel % (OH * OW))[None, :],
            mask=(channel < COUT)[:, None] & (pixel < last)[None, :],
            other=0.0,
        )
        result = tl.dot(d, tl.trans(patch), result, input_precision=PRECISION)
    columns: tl.constexpr = total + 1
    place = ((part * tl.num_programs(1) + model) * COUT + channel[:, None]) * columns + k[None, :]
    tl.store(partial + place, result, mask=(channel < COUT)[:, None] & (k < columns)[None, :])


def _shape_of(entered: Tensor, channels: int, kernel: tuple[int, int], padding: tuple[int, int]) -> dict[str, int]:
    _, _, inputs, height, width = entered.shape
    return {
        "CIN": inputs, "H": height, "W": width, "COUT": channels, "KH": kernel[0], "KW": kernel[1],
        "PH": padding[0], "PW": padding[1],
        "OH": height + 2 * padding[0] - kernel[0] + 1, "OW": width + 2 * padding[1] - kernel[1] + 1,
    }  # fmt: skip


def convolve(entered: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """(N, B, in, H, W) with weights (N, out, in, kh, kw) of each model -> (N, B, out, H′, W′)."""
    num_models, num_samples = entered.shape[:2]
    shape = _shape_of(entered, weight.shape[1], (weight.shape[3], weight.shape[4]), padding)
    out = entered.new_empty(num_models, num_samples, shape["COUT"], shape["OH"], shape["OW"])
    tile = {"BLOCK_OUT": max(16, triton.next_power_of_2(shape["COUT"])), "BLOCK_PIXEL": 128, "BLOCK_SUM": 32}
    grid = (triton.cdiv(num_samples * shape["OH"] * shape["OW"], tile["BLOCK_PIXEL"]), num_models)
    _convolve[grid](
        entered, weight, out if bias is None else bias.contiguous(), out, num_samples,
        HAS_BIAS=bias is not None, PRECISION=_precision(), **shape, **tile,
    )  # fmt: skip
    return out


def correlate(
    entered: Tensor, delta: Tensor, weight_shape: torch.Size, padding: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The gradients by weights and biases, (N, out, in, kh, kw) and (N, out)."""
    num_models, num_samples = entered.shape[:2]
    _, channels, inputs, *kernel = weight_shape
    shape = _shape_of(entered, channels, (kernel[0], kernel[1]), padding)
    columns = inputs * kernel[0] * kernel[1] + 1
    tile = {"BLOCK_OUT": max(16, triton.next_power_of_2(channels)), "BLOCK_PIXEL": 64, "BLOCK_SUM": 128}
    tiles = triton.cdiv(columns, tile["BLOCK_SUM"])
    pixels = num_samples * shape["OH"] * shape["OW"]
    # Enough programs to fill a GPU, whose parts are then summed in a fixed order: the same bits each time.
    parts = max(1, min(triton.cdiv(2048, num_models * tiles), triton.cdiv(pixels, 4 * tile["BLOCK_PIXEL"])))
    each = triton.cdiv(triton.cdiv(pixels, parts), tile["BLOCK_PIXEL"]) * tile["BLOCK_PIXEL"]
    parts = triton.cdiv(pixels, each)
    partial = entered.new_empty(parts, num_models, channels, columns)
    _correlate[(tiles, num_models, parts)](
        entered, delta, partial, num_samples, each, PRECISION=_precision(), **shape, **tile
    )
    summed = partial.sum(dim=0)
    return summed[..., :-1].reshape(weight_shape), summed[..., -1]
