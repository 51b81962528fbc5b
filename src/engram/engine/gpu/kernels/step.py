"""Triton kernels of a step: the batch is read, the loss computed, weights and path updated, in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.engine.gpu.kernels.ahead import Kernel
from engram.engine.gpu.kernels.head import dot_precision
from engram.engine.gpu.rows import Step

# The tile of a weight that takes its step, and how many tiles ahead are asked for; where rows of weights begin at
# addresses that are multiples of 16 bytes, and where they do not.
ALIGNED = {"BLOCK_OUT": 32, "BLOCK_IN": 32, "STAGES": 2, "num_warps": 2}
UNALIGNED = {"BLOCK_OUT": 32, "BLOCK_IN": 64, "STAGES": 2, "num_warps": 4}
ENOUGH = 4096  # programs for a whole GPU: where there are more tiles, a program takes several in a row
LARGEST_BATCH = 128  # of a step along a product, whose factors must fit beside the tiles


# --- reading ----------------------------------------------------------------------------------------------------


@Kernel
def _gather(
    store, labels, order, cursor, permutation, inputs, targets, PIXELS, BATCH, LONGEST, LABELS,
    PERMUTED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, trial = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < PIXELS
    row = tl.load(order + trial * LONGEST + tl.load(cursor) + sample)
    source = tl.load(permutation + trial * PIXELS + pixel, mask=inside, other=0) if PERMUTED else pixel
    value = tl.load(store + row * PIXELS + source, mask=inside, other=0).to(tl.float32)
    if SCALED:
        value = tl.div_rn(value, 255.0)
    tl.store(inputs + (trial * BATCH + sample) * PIXELS + pixel, value, mask=inside)
    tl.store(targets + trial * BATCH + sample, tl.load(labels + trial * LABELS + row), mask=tl.program_id(0) == 0)


def gather(
    store: Tensor, labels: Tensor, order: Tensor, cursor: Tensor, permutations: Tensor | None, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The next batch of every trial: rows order[:, cursor : cursor + B] of a store of samples that all share.

    `labels` are those of all trials (N,), or a row for each (T, N).
    """
    num_trials, longest = order.shape
    pixels = store[0].numel()
    inputs = torch.empty(num_trials, batch_size, *store.shape[1:], dtype=torch.float32, device=store.device)
    targets = torch.empty(num_trials, batch_size, dtype=torch.int64, device=store.device)
    block = min(1024, triton.next_power_of_2(pixels))
    _gather[(triton.cdiv(pixels, block), batch_size, num_trials)](
        store, labels, order, cursor, order if permutations is None else permutations, inputs, targets, pixels,
        batch_size, longest, 0 if labels.ndim == 1 else labels.stride(0),
        PERMUTED=permutations is not None, SCALED=store.dtype == torch.uint8, BLOCK=block,
    )  # fmt: skip
    return inputs, targets


# --- steps ------------------------------------------------------------------------------------------------------


@triton.jit
def _after(
    t, g, a, s, m, v, held, proximal, rate, numbers, left,
    PLAIN: tl.constexpr, ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """θ after a step along g, and what the optimizer then remembers, m and v.

    A penalty pulls by gain a and shift s:  a (θ − lr g) + s, or a θ + s − lr g  with plain SGD. With another optimizer
    the first is the same, with its own step in place of − lr g; the second is  d = g + a (θ − s)  in place of g.
    """
    if PLAIN:
        if held >= 0:
            if proximal != 0:  # noqa: SIM108 - Triton has no such expression
                new = s + a * (t - rate * g)
            else:
                new = s + a * t - rate * g
        else:
            new = t - rate * g
    else:
        decay = tl.load(numbers + 1)
        d = g
        if (held >= 0) & (proximal == 0):
            d += a * (t - s)
        if DECOUPLED:
            new = t * (1 - rate * decay)
        else:
            d += decay * t
            new = t
        if ADAM:  # m ← m + (1 − β₁)(d − m),  v ← β₂ v + (1 − β₂) d²,  θ ← θ − lr m / (1 − β₁ᵗ) / (√v / √(1 − β₂ᵗ) + ε)
            m += tl.load(numbers + 2) * (d - m)
            v = tl.load(numbers + 3) * v + tl.load(numbers + 4) * d * d
            left1, left2 = tl.load(left), tl.load(left + 1)
            divisor = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(left2)) + tl.load(numbers + 5)
            new -= tl.div_rn(rate, left1) * tl.div_rn(m, divisor)
        elif MOMENTUM:  # m ← μ m + d,  θ ← θ − lr m
            m = tl.load(numbers) * m + d
            new -= rate * m
        else:
            new -= rate * d
        if (held >= 0) & (proximal != 0):
            new = s + a * new
    # A rate of 0: it is not trained. A step of 0 would not be none where the gradient is infinite.
    return tl.where(rate == 0, t, new), m, v


@triton.jit
def _keep(
    theta, first, second, path, t, g, new, m, v, followed, size, place, inside,
    ADAM: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Write what a step has changed: θ, what the optimizer remembers, and SI's path,  path − g Δθ."""
    if ADAM or MOMENTUM:
        tl.store(first, m, mask=inside)
    if ADAM:
        tl.store(second, v, mask=inside)
    if followed >= 0:
        where = path + followed * size + place
        tl.store(where, tl.load(where, mask=inside) - g * (new - t), mask=inside)
    tl.store(theta, new, mask=inside)


@Kernel
def _step(
    theta, gradient, first, second, gain, shift, path, held_of, followed_of, rate_of, proximal_of, numbers_of, left_of,
    size, PLAIN: tl.constexpr, ADAM: tl.constexpr, DECOUPLED: tl.constexpr, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each tensor is read once and written once: θ, g, what the optimizer remembers, and the penalty's part."""
    model = tl.program_id(1).to(tl.int64)
    held, followed = tl.load(held_of + model).to(tl.int64), tl.load(followed_of + model).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    own = model * size + place
    t = tl.load(theta + own, mask=inside)
    g = tl.load(gradient + own, mask=inside)
    a = tl.load(gain + held * size + place, mask=inside & (held >= 0), other=0.0)
    s = tl.load(shift + held * size + place, mask=inside & (held >= 0), other=0.0)
    m = tl.load(first + own, mask=inside) if ADAM or MOMENTUM else t
    v = tl.load(second + own, mask=inside) if ADAM else t
    new, m, v = _after(
        t, g, a, s, m, v, held, tl.load(proximal_of + model), tl.load(rate_of + model), numbers_of + 6 * model,
        left_of + 2 * model, PLAIN, ADAM, DECOUPLED, MOMENTUM,
    )  # fmt: skip
    _keep(theta + own, first + own, second + own, path, t, g, new, m, v, followed, size, place, inside, ADAM, MOMENTUM)


@Kernel
def _product_step(
    theta, delta, entered, gain, shift, path, held_of, followed_of, rate_of, proximal_of, BATCH, SHARING, SPAN,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_BATCH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Plain SGD for a linear layer's weight, tile after tile; the gradient g = δ xᵀ is computed here, never stored."""
    model = tl.program_id(2).to(tl.int64)
    held, followed = tl.load(held_of + model).to(tl.int64), tl.load(followed_of + model).to(tl.int64)
    rate, proximal = tl.load(rate_of + model), tl.load(proximal_of + model)
    o = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    b = tl.arange(0, BLOCK_BATCH)
    left = delta + (model * OUT + o[:, None]) * BATCH + b[None, :]
    d = tl.load(left, mask=(o < OUT)[:, None] & (b < BATCH)[None, :], other=0.0)
    begin = tl.program_id(0) * SPAN
    for start in tl.range(begin, min(begin + SPAN, IN), BLOCK_IN, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_IN)
        inside = (o < OUT)[:, None] & (i < IN)[None, :]
        place = o[:, None] * IN + i[None, :]
        own = theta + model * (OUT * IN) + place
        t = tl.load(own, mask=inside)
        a = tl.load(gain + held * (OUT * IN) + place, mask=inside & (held >= 0), other=0.0)
        s = tl.load(shift + held * (OUT * IN) + place, mask=inside & (held >= 0), other=0.0)
        right = entered + ((model // SHARING) * IN + i[:, None]) * BATCH + b[None, :]
        x = tl.load(right, mask=(i < IN)[:, None] & (b < BATCH)[None, :], other=0.0)
        g = tl.dot(d, tl.trans(x), input_precision=PRECISION)
        new, m, v = _after(t, g, a, s, t, t, held, proximal, rate, rate_of, rate_of, True, False, False, False)
        _keep(own, own, own, path, t, g, new, m, v, followed, OUT * IN, place, inside, False, False)


def take_step(theta: Tensor, gradient: Tensor, step: Step) -> None:
    """θ after a step along a gradient (N, *shape), for all models of a stack. Adam's clock has ticked before."""
    size = theta[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    tensors, kind = _of_step(theta, step)
    _step[(triton.cdiv(size, block), len(theta))](theta, gradient.contiguous(), *tensors, size, **kind, BLOCK=block)


def take_product_step(theta: Tensor, delta: Tensor, entered: Tensor, step: Step) -> None:
    """The step of plain SGD of linear layers' weights θ (N, out, in) along their gradients δ xᵀ.

    δ is (N, out, B), with at most `LARGEST_BATCH` samples. x is (N, in, B), or (T, in, B) where N / T consecutive
    models share it.
    """
    num_models, outputs, inputs = theta.shape
    batch = delta.shape[2]
    tile = ALIGNED if inputs % 4 == 0 else UNALIGNED
    rows, columns = triton.cdiv(outputs, tile["BLOCK_OUT"]), triton.cdiv(inputs, tile["BLOCK_IN"])
    in_a_row = max(1, columns // max(1, triton.cdiv(ENOUGH, rows * num_models)))
    _product_step[(triton.cdiv(columns, in_a_row), rows, num_models)](
        theta, delta.contiguous(), entered.contiguous(), step.gain, step.shift, step.path, step.held, step.followed,
        step.rate, step.proximal, batch, num_models // len(entered), in_a_row * tile["BLOCK_IN"], outputs, inputs,
        BLOCK_BATCH=max(16, triton.next_power_of_2(batch)), PRECISION=dot_precision(), **tile,
    )  # fmt: skip


def _of_step(theta: Tensor, step: Step) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
    """What the kernel of a step needs besides θ and its gradient: tensors, and which kind of step it is."""
    pull = (step.gain, step.shift, step.path, step.held, step.followed, step.rate, step.proximal)
    if step.slots is None:  # the last two tensors, and the first two, are not read
        plain = {"PLAIN": True, "ADAM": False, "DECOUPLED": False, "MOMENTUM": False}
        return (theta, theta, *pull, step.rate, step.rate), plain
    slots, name = step.slots.tensors, step.slots.optimizers[0].name
    first, second = slots.get("velocity", slots.get("mean", theta)), slots.get("square", theta)
    left = step.rate if step.slots.left is None else step.slots.left
    kind = {"PLAIN": False, "ADAM": name != "sgd", "DECOUPLED": name == "adamw", "MOMENTUM": "velocity" in slots}
    return (first, second, *pull, step.slots.numbers, left), kind


# --- the loss ---------------------------------------------------------------------------------------------------


@Kernel
def _cross_entropy(
    logits, targets, others, losses, slopes, BATCH, CLASSES, SHARING,
    BLOCK_BATCH: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_CLASSES)
    taking_part = (c < CLASSES) & (tl.load(others + c, mask=c < CLASSES, other=1) == 0)
    total = tl.zeros((BLOCK_BATCH,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        place = (model * BATCH + b[:, None]) * CLASSES + c[None, :]
        z = tl.load(logits + place, mask=(b < BATCH)[:, None] & taking_part[None, :], other=float("-inf"))
        z = tl.where((b < BATCH)[:, None], z, 0.0)
        y = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=0)
        z = z - tl.max(z, axis=1)[:, None]
        e = tl.exp(z)
        all_of_it = tl.sum(e, axis=1)
        own = tl.sum(tl.where(c[None, :] == y[:, None], z, 0.0), axis=1)
        total += tl.where(b < BATCH, tl.log(all_of_it) - own, 0.0)
        slope = (e / all_of_it[:, None] - tl.where(c[None, :] == y[:, None], 1.0, 0.0)) / BATCH
        tl.store(slopes + place, slope, mask=(b < BATCH)[:, None] & (c < CLASSES)[None, :])
    tl.store(losses + model, tl.sum(total) / BATCH)


def cross_entropy(logits: Tensor, targets: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of each model (N,), and its gradient with respect to the logits (N, B, C), without `others` (C,).

    Each row of the targets (T, B) is shared by N / T consecutive models.
    """
    num_models, batch, classes = logits.shape
    losses, slopes = logits.new_empty(num_models), torch.empty_like(logits)
    _cross_entropy[(num_models,)](
        logits, targets, others, losses, slopes, batch, classes, num_models // len(targets),
        BLOCK_BATCH=min(64, triton.next_power_of_2(batch)), BLOCK_CLASSES=max(2, triton.next_power_of_2(classes)),
    )  # fmt: skip
    return losses, slopes
