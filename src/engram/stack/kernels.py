"""Triton kernels for a stack on a GPU: each does in one pass over memory what would be many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.stack.step import Step


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


# --- steps ------------------------------------------------------------------------------------------------------


@triton.jit
def _pull(t, g, a, s, held, rate, proximal):
    """θ after a step: gain (θ − lr g) + shift, or gain θ + shift − lr g, or without a penalty θ − lr g."""
    if held >= 0:
        if proximal != 0:
            new = s + a * (t - rate * g)
        else:
            new = s + a * t - rate * g
    else:
        new = t - rate * g
    return new


@triton.jit
def _step_dense(
    theta, gradient, gain, shift, path, held_of, followed_of, rate_of, proximal_of, size, BLOCK: tl.constexpr
):
    model = tl.program_id(1).to(tl.int64)
    held, followed = tl.load(held_of + model).to(tl.int64), tl.load(followed_of + model).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    t = tl.load(theta + model * size + place, mask=inside)
    g = tl.load(gradient + model * size + place, mask=inside)
    a = tl.load(gain + held * size + place, mask=inside & (held >= 0))
    s = tl.load(shift + held * size + place, mask=inside & (held >= 0))
    new = _pull(t, g, a, s, held, tl.load(rate_of + model), tl.load(proximal_of + model))
    if followed >= 0:
        where = path + followed * size + place
        tl.store(where, tl.load(where, mask=inside) - g * (new - t), mask=inside)
    tl.store(theta + model * size + place, new, mask=inside)


@triton.jit
def _step_product(
    theta, delta, entered, gain, shift, path, held_of, followed_of, rate_of, proximal_of, OUT, IN, BATCH, SHARING,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    held, followed = tl.load(held_of + model).to(tl.int64), tl.load(followed_of + model).to(tl.int64)
    tiles = tl.cdiv(IN, BLOCK_IN)
    o = (tl.program_id(0) // tiles) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    i = (tl.program_id(0) % tiles) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    place = o[:, None] * IN + i[None, :]
    inside = (o < OUT)[:, None] & (i < IN)[None, :]
    # The weights are asked for before the product, which then hides how long they take to come.
    t = tl.load(theta + model * OUT * IN + place, mask=inside)
    a = tl.load(gain + held * OUT * IN + place, mask=inside & (held >= 0))
    s = tl.load(shift + held * OUT * IN + place, mask=inside & (held >= 0))
    g = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        d = tl.load(
            delta + (model * OUT + o[:, None]) * BATCH + b[None, :],
            mask=(o < OUT)[:, None] & (b < BATCH)[None, :],
            other=0.0,
        )
        x = tl.load(
            entered + ((model // SHARING) * IN + i[:, None]) * BATCH + b[None, :],
            mask=(i < IN)[:, None] & (b < BATCH)[None, :],
            other=0.0,
        )
        g = tl.dot(d, tl.trans(x), g, input_precision=PRECISION)
    new = _pull(t, g, a, s, held, tl.load(rate_of + model), tl.load(proximal_of + model))
    if followed >= 0:
        where = path + followed * OUT * IN + place
        tl.store(where, tl.load(where, mask=inside) - g * (new - t), mask=inside)
    tl.store(theta + model * OUT * IN + place, new, mask=inside)


def step_dense(theta: Tensor, gradient: Tensor, step: Step) -> None:
    """θ after a step along a gradient (N, *shape), for all models of a stack."""
    size = theta[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    _step_dense[(triton.cdiv(size, block), len(theta))](
        theta, gradient.contiguous(), step.gain, step.shift, step.path, step.held, step.followed, step.rate,
        step.proximal, size, BLOCK=block,
    )  # fmt: skip


def step_product(theta: Tensor, entered: Tensor, delta: Tensor, step: Step) -> None:
    """The same along g = delta enteredᵀ, from (N, out, B) and (T, in, B): it is made tile by tile, and never kept.

    N / T models in a row share what entered.
    """
    num_models, outputs, inputs = theta.shape
    batch = entered.shape[-1]
    tile = {"BLOCK_OUT": 64, "BLOCK_IN": 64, "BLOCK_BATCH": max(16, min(64, triton.next_power_of_2(batch)))}
    grid = (triton.cdiv(outputs, tile["BLOCK_OUT"]) * triton.cdiv(inputs, tile["BLOCK_IN"]), num_models)
    _step_product[grid](
        theta, delta.contiguous(), entered.contiguous(), step.gain, step.shift, step.path, step.held, step.followed,
        step.rate, step.proximal, outputs, inputs, batch, num_models // len(entered), PRECISION=_precision(),
        num_stages=1, **tile,
    )  # fmt: skip


# --- the loss ---------------------------------------------------------------------------------------------------


@triton.jit
def _cross_entropy(
    logits, targets, others, losses, slopes, BATCH, CLASSES, BLOCK_BATCH: tl.constexpr, BLOCK_CLASSES: tl.constexpr
):
    model = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_CLASSES)
    taking_part = (c < CLASSES) & (tl.load(others + c, mask=c < CLASSES, other=1) == 0)
    total = tl.zeros((BLOCK_BATCH,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        place = (model * BATCH + b[:, None]) * CLASSES + c[None, :]
        z = tl.load(logits + place, mask=(b < BATCH)[:, None] & taking_part[None, :], other=float("-inf"))
        z = tl.where((b < BATCH)[:, None], z, 0.0)
        y = tl.load(targets + model * BATCH + b, mask=b < BATCH, other=0)
        z = z - tl.max(z, axis=1)[:, None]
        e = tl.exp(z)
        all_of_it = tl.sum(e, axis=1)
        own = tl.sum(tl.where(c[None, :] == y[:, None], z, 0.0), axis=1)
        total += tl.where(b < BATCH, tl.log(all_of_it) - own, 0.0)
        slope = (e / all_of_it[:, None] - tl.where(c[None, :] == y[:, None], 1.0, 0.0)) / BATCH
        tl.store(slopes + place, slope, mask=(b < BATCH)[:, None] & (c < CLASSES)[None, :])
    tl.store(losses + model, tl.sum(total) / BATCH)


def cross_entropy(logits: Tensor, targets: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of each model (N,) and its slopes by the logits (N, B, C); `others` (C,) take no part."""
    num_models, batch, classes = logits.shape
    losses, slopes = logits.new_empty(num_models), torch.empty_like(logits)
    _cross_entropy[(num_models,)](
        logits, targets, others, losses, slopes, batch, classes,
        BLOCK_BATCH=min(64, triton.next_power_of_2(batch)), BLOCK_CLASSES=max(2, triton.next_power_of_2(classes)),
    )  # fmt: skip
    return losses, slopes
