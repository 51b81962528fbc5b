"""Triton kernels. Only where Triton is there can this be imported, so it is imported where they are used."""

from engram.engine.gpu.kernels.ahead import compiled_ahead
from engram.engine.gpu.kernels.head import move_shift, read_back, write_sums, write_trace
from engram.engine.gpu.kernels.layers import (
    activate,
    convolve,
    image_slopes,
    multiply,
    multiply_back,
    pass_back,
    weight_slopes,
)
from engram.engine.gpu.kernels.step import LARGEST_BATCH, cross_entropy, gather, take_product_step, take_step

__all__ = [
    "LARGEST_BATCH",
    "activate",
    "compiled_ahead",
    "convolve",
    "cross_entropy",
    "gather",
    "image_slopes",
    "move_shift",
    "multiply",
    "multiply_back",
    "pass_back",
    "read_back",
    "take_product_step",
    "take_step",
    "weight_slopes",
    "write_sums",
    "write_trace",
]
