"""Triton kernels of heads, in one pass each: a plastic head's trace with all derivatives, and the sums of a memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engram.engine.gpu.kernels.ahead import Kernel


def dot_precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@Kernel
def _write_trace(
    hidden, targets, weight, alpha, eta_of, hebb, in_force, surprise, UNITS, CLASSES, BATCH, SHARING,
    MODEL_STRIDE, SAMPLE_STRIDE, UNIT_STRIDE, UNIT_RANGE: tl.constexpr, CENTRED: tl.constexpr, LITERAL: tl.constexpr,
    BLOCK_UNIT: tl.constexpr, BLOCK_CLASS: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_UNIT + tl.arange(0, BLOCK_UNIT)
    c = tl.arange(0, BLOCK_CLASS)
    total = tl.zeros((BLOCK_UNIT, BLOCK_CLASS), dtype=tl.float32)
    count = tl.zeros((BLOCK_CLASS,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        source = hidden + model * MODEL_STRIDE + b[None, :] * SAMPLE_STRIDE + unit[:, None] * UNIT_STRIDE
        h = tl.load(source, mask=(unit < UNITS)[:, None] & (b < BATCH)[None, :], other=0.0)
        y = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=-1)
        member = tl.where(y[:, None] == c[None, :], 1.0, 0.0)  # (B, C)
        total = tl.dot(h, member, total, input_precision=PRECISION)
        count += tl.sum(member, axis=0)
    eta = tl.load(eta_of + model)
    if UNIT_RANGE:
        eta = tl.minimum(tl.maximum(eta, 0.0), 1.0)
        tl.store(eta_of + model, eta)
    place = (model * CLASSES + c[None, :]) * UNITS + unit[:, None]
    inside = (unit < UNITS)[:, None] & (c < CLASSES)[None, :]
    trace = tl.load(hebb + place, mask=inside, other=0.0)
    mean = total / tl.maximum(count, 1.0)[None, :]
    if CENTRED:
        mean -= (tl.sum(mean, axis=1) / tl.maximum(tl.sum(tl.where(count > 0, 1.0, 0.0)), 1.0))[:, None]
    change = tl.where(count[None, :] > 0, mean - trace, 0.0)
    trace += eta * change
    tl.store(hebb + place, trace, mask=inside)
    if LITERAL:  # otherwise the trace is read by `_read_trace`, when all of it is written
        tl.store(surprise + place, change, mask=inside)
        slow = tl.load(weight + place, mask=inside, other=0.0)
        tl.store(in_force + place, slow + tl.load(alpha + place, mask=inside, other=0.0) * trace, mask=inside)


@triton.jit
def _scaled(trace, size, UNITS, SCALED: tl.constexpr):
    """The trace of one class, scaled to the root mean square `size`; as it is where SCALED is False."""
    if SCALED:
        own = tl.sqrt_rn(tl.sum(trace * trace) / UNITS)
        trace = trace * (size / tl.maximum(own, 1e-12))
    return trace


@Kernel
def _read_trace(weight, alpha, hebb, in_force, read, size, UNITS, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """θ + α Hebb for one class of one model, with its trace as it is read."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, BLOCK)
    place, inside = row * UNITS + unit, unit < UNITS
    trace = _scaled(tl.load(hebb + place, mask=inside, other=0.0), size, UNITS, SCALED)
    tl.store(read + place, trace, mask=inside)
    slow = tl.load(weight + place, mask=inside, other=0.0)
    tl.store(in_force + place, slow + tl.load(alpha + place, mask=inside, other=0.0) * trace, mask=inside)


@Kernel
def _move_shift(
    alpha, hebb, gain, fixed, shift, models, held, size, CLASSES, UNITS,
    SLOPE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The shift of one class of one model, whose anchor moves with its fast part f = α Hebb."""
    which, c, unit = tl.program_id(1), tl.program_id(0), tl.arange(0, BLOCK)
    model, own = tl.load(models + which).to(tl.int64), tl.load(held + which).to(tl.int64)
    inside = unit < UNITS
    place = (model * CLASSES + c) * UNITS + unit
    trace = _scaled(tl.load(hebb + place, mask=inside, other=0.0), size, UNITS, SCALED)
    fast = tl.load(alpha + place, mask=inside, other=0.0) * trace
    moved = tl.load(fixed + (which * CLASSES + c).to(tl.int64) * UNITS + unit, mask=inside, other=0.0)
    place = (own * CLASSES + c) * UNITS + unit
    if SLOPE:
        moved -= fast
    else:
        moved += (tl.load(gain + place, mask=inside, other=0.0) - 1) * fast
    tl.store(shift + place, moved, mask=inside)


@Kernel
def _read_back(
    delta, hidden, targets, alpha, eta_of, hebb, in_force, surprise, by_weight, by_alpha, by_eta, by_hidden,
    UNITS, CLASSES, BATCH, SHARING, MODEL_STRIDE, SAMPLE_STRIDE, UNIT_STRIDE,
    BLOCK_UNIT: tl.constexpr, BLOCK_CLASS: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK_UNIT + tl.arange(0, BLOCK_UNIT)
    c = tl.arange(0, BLOCK_CLASS)
    slope = tl.zeros((BLOCK_UNIT, BLOCK_CLASS), dtype=tl.float32)  # D of `PlasticSoftmax`, turned
    count = tl.zeros((BLOCK_CLASS,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        source = hidden + model * MODEL_STRIDE + b[None, :] * SAMPLE_STRIDE + unit[:, None] * UNIT_STRIDE
        h = tl.load(source, mask=(unit < UNITS)[:, None] & (b < BATCH)[None, :], other=0.0)
        where = delta + (model * BATCH + b[:, None]) * CLASSES + c[None, :]
        d = tl.load(where, mask=(b < BATCH)[:, None] & (c < CLASSES)[None, :], other=0.0)
        slope = tl.dot(h, d, slope, input_precision=PRECISION)
        y = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=-1)
        count += tl.sum(tl.where(y[:, None] == c[None, :], 1.0, 0.0), axis=0)
    place = (model * CLASSES + c[None, :]) * UNITS + unit[:, None]
    inside = (unit < UNITS)[:, None] & (c < CLASSES)[None, :]
    fast = slope * tl.load(alpha + place, mask=inside, other=0.0)
    tl.store(by_weight + place, slope, mask=inside)
    tl.store(by_alpha + place, slope * tl.load(hebb + place, mask=inside, other=0.0), mask=inside)
    slope_of_eta = tl.sum(fast * tl.load(surprise + place, mask=inside, other=0.0))
    tl.store(by_eta + model * tl.num_programs(0) + tl.program_id(0), slope_of_eta)
    force = tl.load(in_force + place, mask=inside, other=0.0)
    fast = tl.load(eta_of + model) * fast / tl.maximum(count, 1.0)[None, :]
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        where = delta + (model * BATCH + b[:, None]) * CLASSES + c[None, :]
        d = tl.load(where, mask=(b < BATCH)[:, None] & (c < CLASSES)[None, :], other=0.0)
        y = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=-1)
        member = tl.where(y[:, None] == c[None, :], 1.0, 0.0)
        result = tl.dot(force, tl.trans(d), input_precision=PRECISION)
        result = tl.dot(fast, tl.trans(member), result, input_precision=PRECISION)
        where = by_hidden + (model * UNITS + unit[:, None]) * BATCH + b[None, :]
        tl.store(where, result, mask=(unit < UNITS)[:, None] & (b < BATCH)[None, :])


def _head_tile(classes: int, batch: int, units: tuple[int, int], warps: tuple[int, int]) -> dict[str, int]:
    """Sizes of the tiles, as measured: `units` and `warps` for few classes (one tensor-core tile), and for more."""
    many = classes > 16
    return {
        "BLOCK_UNIT": units[many],
        "BLOCK_CLASS": max(16, triton.next_power_of_2(classes)),
        "BLOCK_BATCH": max(16, min(64, triton.next_power_of_2(batch))),
        "num_warps": warps[many],
    }


def write_trace(
    hidden: Tensor, targets: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor, bounded: bool,
    form: tuple[bool, float | None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Eq. 3 for hidden activations (N, B, m) in any layout; η and the trace change in place.

    Returns the weight in force and the surprise h̃ − Hebb, both (N, C, m). With a `form`, whether the trace is centred
    and the size at which it is read (None: as written), returns the trace as it was read in place of the surprise.
    """
    num_models, classes, units = weight.shape
    batch = hidden.shape[1]
    in_force, surprise = torch.empty_like(weight), torch.empty_like(weight)
    tile = _head_tile(classes, batch, units=(64, 32), warps=(1, 2))
    _write_trace[(triton.cdiv(units, tile["BLOCK_UNIT"]), num_models)](
        hidden, targets, weight, alpha, eta, hebb, in_force, surprise, units, classes, batch,
        num_models // len(targets), *hidden.stride(), UNIT_RANGE=bounded,
        CENTRED=form is not None and form[0], LITERAL=form is None, PRECISION=dot_precision(), **tile,
    )  # fmt: skip
    if form is not None:
        _read_trace[(num_models * classes,)](
            weight, alpha, hebb, in_force, surprise, form[1] or 0.0, units,
            SCALED=form[1] is not None, BLOCK=triton.next_power_of_2(units),
        )  # fmt: skip
    return in_force, surprise


def move_shift(
    alpha: Tensor, hebb: Tensor, gain: Tensor, fixed: Tensor, shift: Tensor, models: Tensor, held: Tensor,
    is_slope: bool, size: float | None,
) -> None:  # fmt: skip
    """The shift of weights whose anchors move with α Hebb, as `Moving.move` computes it; it changes in place.

    α and Hebb are (N, C, m); `fixed` is the shift without the fast part, of the models in `models` alone, whose rows in
    gain and shift are `held`; the trace is read at this size (None: as written).
    """
    classes, units = alpha.shape[1:]
    _move_shift[(classes, len(models))](
        alpha, hebb, gain, fixed, shift, models, held, size or 0.0, classes, units,
        SLOPE=is_slope, SCALED=size is not None, BLOCK=triton.next_power_of_2(units),
    )  # fmt: skip


def read_back(
    delta: Tensor, hidden: Tensor, targets: Tensor, alpha: Tensor, eta: Tensor, hebb: Tensor, in_force: Tensor,
    surprise: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The derivatives of `PlasticSoftmax` with respect to θ, α (N, C, m), η (N,) and h (N, m, B)."""
    num_models, classes, units = alpha.shape
    batch = hidden.shape[1]
    by_weight, by_alpha = torch.empty_like(alpha), torch.empty_like(alpha)
    by_hidden = alpha.new_empty(num_models, units, batch)
    tile = _head_tile(classes, batch, units=(32, 64), warps=(1, 4))
    blocks = triton.cdiv(units, tile["BLOCK_UNIT"])
    by_eta = alpha.new_empty(num_models, blocks)
    _read_back[(blocks, num_models)](
        delta, hidden, targets, alpha, eta, hebb, in_force, surprise, by_weight, by_alpha, by_eta, by_hidden,
        units, classes, batch, num_models // len(targets), *hidden.stride(), PRECISION=dot_precision(), **tile,
    )  # fmt: skip
    return by_weight, by_alpha, by_eta.sum(dim=1), by_hidden


# --- the sums of a memory ---------------------------------------------------------------------------------------
#
#     n_c += #{y = c}        S_c += Σ_{y = c} ψ
#
# The sums are in double precision; what a batch adds is summed in single precision.

TILE = 32  # features


@Kernel
def _write_sums(
    psi, targets, count, total, unread, kept, slot, FEATURES, CLASSES, BATCH, SHARING, BATCHES,
    MODEL_STRIDE, SAMPLE_STRIDE, FEATURE_STRIDE, KEEPS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_CLASS: tl.constexpr, BLOCK_BATCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    model, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, BLOCK_CLASS)
    sums = tl.zeros((TILE, BLOCK_CLASS), dtype=tl.float32)
    number = tl.zeros((BLOCK_CLASS,), dtype=tl.float32)
    for first in range(0, BATCH, BLOCK_BATCH):
        b = first + tl.arange(0, BLOCK_BATCH)
        inside = (i < FEATURES)[:, None] & (b < BATCH)[None, :]
        source = psi + model * MODEL_STRIDE + b[None, :] * SAMPLE_STRIDE + i[:, None] * FEATURE_STRIDE
        x = tl.load(source, mask=inside, other=0.0)
        if PRECISION == "tf32":  # to the nearest number of ten bits, which any product then takes as it is
            rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            x = tl.where(x == x, rounded, x)  # NaN stays NaN
        if KEEPS:
            place = (model * FEATURES + i[:, None]) * BATCHES * BATCH + (tl.load(slot) % BATCHES) * BATCH + b[None, :]
            tl.store(kept + place, x, mask=inside)
        label = tl.load(targets + (model // SHARING) * BATCH + b, mask=b < BATCH, other=-1)
        member = tl.where(label[:, None] == c[None, :], 1.0, 0.0)  # (B, C)
        sums = tl.dot(x, member, sums, input_precision=PRECISION)
        number += tl.sum(member, axis=0)
    where = total + (model * CLASSES + c[None, :]) * FEATURES + i[:, None]
    inside = (i < FEATURES)[:, None] & (c < CLASSES)[None, :]
    tl.store(where, tl.load(where, mask=inside) + sums.to(tl.float64), mask=inside)
    if tl.program_id(0) == 0:
        own = count + model * CLASSES + c
        tl.store(own, tl.load(own, mask=c < CLASSES) + number.to(tl.float64), mask=c < CLASSES)
        tl.store(unread + model, 1)


def write_sums(
    psi: Tensor, targets: Tensor, count: Tensor, total: Tensor, unread: Tensor, kept: Tensor | None = None,
    slot: Tensor | None = None,
) -> None:  # fmt: skip
    """Add a batch to the sums of N models, which change in place, and keep its features.

    With TF32 the features are rounded first. A covariance, the difference of a second moment and a product of sums, is
    then that of the rounded features, up to the rounding of sums in float32.

    Args:
        psi: ψ (N, B, k), in any layout.
        targets: class numbers (T, B), each for N / T models.
        count: n (N, C).
        total: S (N, C, k).
        unread: (N,), set to True.
        kept: (N, k, batches, B), where the features are kept; None for nowhere.
        slot: (1,), the number of the step: its features are kept at this place, modulo the number of batches.
    """
    num_models, classes, features = total.shape
    batch, keeps, batches = psi.shape[1], kept is not None, 1 if kept is None else kept.shape[2]
    _write_sums[(triton.cdiv(features, TILE), num_models)](
        psi, targets, count, total, unread.view(torch.uint8), kept if keeps else psi, slot if keeps else targets,
        features, classes, batch, num_models // len(targets), batches, *psi.stride(),
        KEEPS=keeps, TILE=TILE, BLOCK_CLASS=max(16, triton.next_power_of_2(classes)),
        BLOCK_BATCH=max(16, min(64, triton.next_power_of_2(batch))), PRECISION=dot_precision(),
        num_warps=1, num_stages=1,
    )  # fmt: skip
