"""What no program can beat: the products of a step, and on a GPU the way of the weights through its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.bench.timing import Take, timed
from engram.bench.workload import Workload
from engram.config.settings import Config

Products = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """A layer as what it multiplies for one sample: `out` numbers from `inner` each, at so many places."""

    out: int
    inner: int
    places: int  # 1 for a linear layer
    backward: bool  # whether the gradient goes on to what entered it

    @property
    def flops(self) -> int:
        """Of forward pass, gradient by the weights and, but for the first layer, gradient by the inputs."""
        return (3 if self.backward else 2) * 2 * self.out * self.inner * self.places


def products_of(workload: Workload) -> list[Product]:
    found = []
    side = workload.input_shape[-1]
    for number, layer in enumerate(workload.layers()):
        if isinstance(layer, nn.Conv2d):
            kernel = layer.kernel_size[0]
            side = side - kernel + 1
            found.append(Product(layer.out_channels, layer.in_channels * kernel**2, side**2, number > 0))
            side //= 2  # max-pooling
        else:
            assert isinstance(layer, nn.Linear)
            found.append(Product(layer.out_features, layer.in_features, 1, number > 0))
    return found


def flops_of(workload: Workload) -> int:
    """Floating-point operations of the products of one step of one model."""
    return workload.batch_size * sum(product.flops for product in products_of(workload))


def one_network(workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """The bare products of a step of one network, on memory that is there already."""
    work: list[Products] = []
    side = workload.input_shape[-1]
    for number, layer in enumerate(workload.layers()):
        if isinstance(layer, nn.Conv2d):
            work += _convolutions(layer, side, workload.batch_size, number > 0, device, dtype)
            side = (side - layer.kernel_size[0] + 1) // 2
        else:
            assert isinstance(layer, nn.Linear)
            work += _matrix_products(layer, (workload.batch_size,), (), number > 0, device, dtype)
    return _repeated(work, device)


def batched(workload: Workload, size: int, device: torch.device, dtype: torch.dtype) -> Take:
    """The same for a whole stack of networks without convolutions, by batched products."""
    work: list[Products] = []
    for number, layer in enumerate(workload.layers()):
        assert isinstance(layer, nn.Linear)
        work += _matrix_products(layer, (size, workload.batch_size), (size,), number > 0, device, dtype)
    return _repeated(work, device)


def _matrix_products(
    layer: nn.Linear,
    rows: Sequence[int],
    stack: Sequence[int],
    backward: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Products]:
    def made(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype)

    entered, weight, delta = (
        made(*rows, layer.in_features),
        made(*stack, *layer.weight.shape),
        made(*rows, layer.out_features),
    )
    by_entered, gradient, output = torch.empty_like(entered), torch.empty_like(weight), torch.empty_like(delta)
    work: list[Products] = [
        lambda: torch.matmul(entered, weight.mT, out=output),
        lambda: torch.matmul(delta.mT, entered, out=gradient),
    ]
    return [*work, lambda: torch.matmul(delta, weight, out=by_entered)] if backward else work


def _convolutions(
    layer: nn.Conv2d, side: int, batch_size: int, backward: bool, device: torch.device, dtype: torch.dtype
) -> list[Products]:
    entered = torch.rand(batch_size, layer.in_channels, side, side, device=device, dtype=dtype)
    weight = torch.rand(layer.weight.shape, device=device, dtype=dtype)
    delta = torch.rand_like(F.conv2d(entered, weight))
    wanted = [backward, True, False]

    def gradients() -> object:
        return torch.ops.aten.convolution_backward(
            delta, entered, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
        )

    return [lambda: F.conv2d(entered, weight), gradients]


def _repeated(work: Sequence[Products], device: torch.device) -> Take:
    """All products, so many times; on a GPU as one graph, so that nothing waits for Python."""

    def once() -> None:
        for product in work:
            product()

    again: Callable[[], object] = once
    if device.type == "cuda":
        once()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        again = graph.replay

    def many(num_steps: int, kept: Sequence[Products] = work) -> None:
        """`kept`: a graph reads and writes the memory of what was captured, and does not hold it itself."""
        for _ in range(num_steps):
            again()

    return timed(many, device)


def traffic_of(workload: Workload, configs: Sequence[Config], itemsize: int) -> int:
    """Bytes that a step of these models must at least move: each weight is read forward, read backward (but for the
    first layer's), and read and written as it is updated; where a penalty holds it, its gain and shift are read, and
    SI's path is read and written. Gradients and activations could stay on the chip and do not count.
    """
    sizes = [product.out * product.inner for product in products_of(workload)]
    passes = [4 if product.backward else 3 for product in products_of(workload)]
    plain = sum(size * times for size, times in zip(sizes, passes, strict=True))
    held, followed = (2 * sum(sizes) * count(configs) for count in (_num_held, _num_followed))
    return itemsize * (plain * len(configs) + held + followed)


def _num_held(configs: Sequence[Config]) -> int:
    return sum(config.penalty is not None for config in configs)


def _num_followed(configs: Sequence[Config]) -> int:
    return sum(config.penalty == "si" for config in configs)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of the fastest of several large copies."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    take = timed(lambda num_steps: [target.copy_(source) for _ in range(num_steps)], device)
    take(2)
    return 2 * source.numel() * source.element_size() / min(take(5) / 5 for _ in range(5))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of the fastest of several large products."""
    side = 8192 if device.type == "cuda" else 1024
    a, b, c = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(3))
    take = timed(lambda num_steps: [torch.mm(a, b, out=c) for _ in range(num_steps)], device)
    take(2)
    return 2 * math.pow(side, 3) / min(take(5) / 5 for _ in range(5))
