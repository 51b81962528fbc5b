"""What Engram is compared with: the bare products of a step, loops as people write them, Avalanche's strategies."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timing import Take, synchronize, timed
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import Workload

from engram.common.errors import InputError
from engram.config.settings import Config
from engram.engine.build import build_features

Product = Callable[[], object]

# --- floors: what no program can beat


@dataclass(frozen=True)
class Layer:
    """What a layer multiplies for one sample: `out` numbers from `inner` each, at so many positions."""

    module: nn.Module
    side: int  # of the image that enters a convolution
    out: int
    inner: int
    positions: int  # 1 for a linear layer
    backward: bool  # whether the gradient with respect to its inputs is needed: not for the first layer

    @property
    def flops(self) -> int:
        """Of the forward pass and the gradients with respect to the weights and, where needed, the inputs."""
        return (3 if self.backward else 2) * 2 * self.out * self.inner * self.positions


def layers_of(workload: Workload) -> list[Layer]:
    layers = []
    side = workload.input_shape[-1]
    for number, layer in enumerate(workload.layers()):
        if isinstance(layer, nn.Conv2d):
            kernel = layer.kernel_size[0]
            left = side - kernel + 1
            layers.append(Layer(layer, side, layer.out_channels, layer.in_channels * kernel**2, left**2, number > 0))
            side = left // 2  # max-pooling
        else:
            assert isinstance(layer, nn.Linear)
            layers.append(Layer(layer, side, layer.out_features, layer.in_features, 1, number > 0))
    return layers


def has_convolutions(workload: Workload) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in workload.layers())


def flops_of(workload: Workload) -> int:
    """Floating-point operations of the products of one step of one model."""
    return workload.batch_size * sum(layer.flops for layer in layers_of(workload))


def traffic_of(workload: Workload, configs: Sequence[Config], itemsize: int) -> int:
    """Bytes that a step of these models must at least move.

    Each weight is read forward, read backward (but for the first layer's), and read and written as it is updated, and
    so is what its optimizer remembers of it: Adam's m and v. Where a penalty protects it, its gain and shift are read,
    and SI's path is read and written. Gradients and activations could stay on the chip and do not count.
    """
    layers = layers_of(workload)
    weights = sum(layer.out * layer.inner for layer in layers)
    plain = sum(layer.out * layer.inner * (4 if layer.backward else 3) for layer in layers)
    protected = sum(config.penalty is not None for config in configs)
    with_path = sum(config.penalty == "si" for config in configs)
    remembered = sum({"sgd": config.momentum > 0, "adam": 2, "adamw": 2}[config.optimizer] for config in configs)
    return itemsize * (plain * len(configs) + 2 * weights * (protected + with_path + remembered))


def floor_of_one(workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """The bare products of a step of one network, on memory that is allocated already."""
    work: list[Product] = []
    for layer in layers_of(workload):
        if isinstance(layer.module, nn.Conv2d):
            work += _convolutions(layer, workload.batch_size, device, dtype)
        else:
            work += _matrix_products(layer, (workload.batch_size,), (), device, dtype)
    return _repeated(work, device)


def floor_of_mlp(widths: Sequence[int], batch_sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Take:
    """The same for a perceptron with layers of these widths, from the inputs to the classes, and several batches."""
    sizes = list(enumerate(pairwise(widths)))
    layers = [Layer(nn.Identity(), 1, out, inner, 1, backward=number > 0) for number, (inner, out) in sizes]
    by_size = {
        size: [product for layer in layers for product in _matrix_products(layer, (size,), (), device, dtype)]
        for size in set(batch_sizes)
    }
    return _repeated([product for size in batch_sizes for product in by_size[size]], device)


def floor_of_stack(workload: Workload, size: int, device: torch.device, dtype: torch.dtype) -> Take:
    """The same for a whole stack of networks without convolutions, by batched products."""
    work: list[Product] = []
    for layer in layers_of(workload):
        work += _matrix_products(layer, (size, workload.batch_size), (size,), device, dtype)
    return _repeated(work, device)


def _matrix_products(
    layer: Layer, rows: tuple[int, ...], stack: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> list[Product]:
    shapes = ((*rows, layer.inner), (*stack, layer.out, layer.inner), (*rows, layer.out))
    entered, weight, delta = (torch.rand(shape, device=device, dtype=dtype) for shape in shapes)
    by_entered, gradient, output = (torch.empty_like(tensor) for tensor in (entered, weight, delta))
    work: list[Product] = [
        lambda: torch.matmul(entered, weight.mT, out=output),
        lambda: torch.matmul(delta.mT, entered, out=gradient),
    ]
    return [*work, lambda: torch.matmul(delta, weight, out=by_entered)] if layer.backward else work


def _convolutions(layer: Layer, batch_size: int, device: torch.device, dtype: torch.dtype) -> list[Product]:
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    entered = torch.rand(batch_size, conv.in_channels, layer.side, layer.side, device=device, dtype=dtype)
    weight = torch.rand(conv.weight.shape, device=device, dtype=dtype)
    delta = torch.rand_like(F.conv2d(entered, weight))
    needed = [layer.backward, True, False]

    def gradients() -> object:
        return torch.ops.aten.convolution_backward(
            delta, entered, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, needed
        )

    return [lambda: F.conv2d(entered, weight), gradients]


def _repeated(work: Sequence[Product], device: torch.device) -> Take:
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

    def many(num_steps: int, memory: Sequence[Product] = work) -> None:
        """`memory`: a graph uses the tensors that were captured, and does not keep them itself."""
        for _ in range(num_steps):
            again()

    return timed(many, device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of several large copies."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    take = timed(lambda num_steps: [target.copy_(source) for _ in range(num_steps)], device)
    take(2)
    return 2 * source.nbytes / min(take(5) / 5 for _ in range(5))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of the fastest of several large products."""
    side = 8192 if device.type == "cuda" else 1024
    a, b, c = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(3))
    take = timed(lambda num_steps: [torch.mm(a, b, out=c) for _ in range(num_steps)], device)
    take(2)
    return 2 * math.pow(side, 3) / min(take(5) / 5 for _ in range(5))


# --- plain loops


def plain_model(workload: Workload, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The network with an ordinary softmax layer."""
    config = workload.config("linear", "none")
    head = nn.Linear(config.hidden[-1], workload.num_classes, bias=config.head_bias)
    return nn.Sequential(build_features(config, workload.input_shape), head).to(device=device, dtype=dtype)


def plain_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's own, with the workload's settings."""
    config = workload.config("linear", "none")
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[config.optimizer]
    return kind(model.parameters(), lr=config.learning_rate)


def plain_loop(
    workload: Workload, device: torch.device, dtype: torch.dtype, *, ewc: bool = False, compiled: bool = False
) -> Take:
    """Autograd and PyTorch's optimizer on inputs that are floats already.

    Args:
        workload: the network and its batches.
        device: where it trains.
        dtype: of its weights.
        ewc: add λ Σ F (θ − θ*)² to the loss.
        compiled: give the loss and the optimizer's step to `torch.compile`, which compiles the backward pass too. Of
            the usual ways this was the fastest. Compiling happens here, before anything is timed.
    """
    model = plain_model(workload, device, dtype)
    fisher = [0.01 * torch.rand_like(theta) for theta in model.parameters()] if ewc else []
    anchors = [theta.detach().clone() for theta in model.parameters()] if ewc else []
    inputs, targets = workload.floats(device, dtype)
    optimizer = plain_optimizer(workload, model)
    batches = cycle(torch.randperm(len(inputs)).to(device).split(workload.batch_size))

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    if compiled:
        torch.compiler.reset()  # after eight networks in one process it would give up and compile nothing
    learn, step = (torch.compile(loss_of), torch.compile(optimizer.step)) if compiled else (loss_of, optimizer.step)

    def steps(num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = next(batches)
            loss = learn(inputs[chosen], targets[chosen])
            for f, theta, anchor in zip(fisher, model.parameters() if ewc else (), anchors, strict=True):
                loss = loss + 100 * (f * (theta - anchor) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            step()

    if compiled:
        try:
            steps(3)
        except Exception as error:  # a compiler, a library or a kind of processor may be missing
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"cannot compile here: {lines[0].rstrip(':.')}") from error
    return timed(steps, device)


# --- Avalanche's own strategies, with its cheapest access to the data

STRATEGIES = ("Naive", "EWC", "SynapticIntelligence", "MAS")


def avalanche_is_installed() -> bool:
    return importlib.util.find_spec("avalanche") is not None


class TimedBatches:
    """Batches made in advance, with the time from the first until the last has been used."""

    def __init__(self, batches: list[tuple[Tensor, ...]], device: torch.device):
        self.batches = batches
        self.device = device
        self.seconds = 0.0

    def __iter__(self) -> Iterator[list[Tensor]]:
        synchronize(self.device)
        start = time.perf_counter()
        for batch in self.batches:
            yield list(batch)
        synchronize(self.device)
        self.seconds = time.perf_counter() - start


def avalanche_loop(name: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """Each take learns one more experience, so that the strategy's penalty acts from the second on.

    Only the steps count, not what the strategy does before and after an experience.
    """
    try:
        from avalanche.benchmarks import benchmark_from_datasets
        from avalanche.benchmarks.utils import as_classification_dataset
    except Exception as reason:
        raise InputError(f"avalanche-lib is installed, but cannot be imported: {reason}") from reason
    size = workload.batch_size
    inputs, targets = workload.floats(device, dtype)
    one_batch = TensorDataset(inputs[:size].cpu(), targets[:size].cpu())
    one_batch.targets = targets[:size].tolist()  # type: ignore[attr-defined]
    (experience,) = benchmark_from_datasets(train=[as_classification_dataset(one_batch)]).train_stream
    strategy = _strategy(name, workload, device, dtype)
    no_task = torch.zeros(size, dtype=torch.int64, device=device)
    ready: list[tuple[Tensor, ...]] = [
        (x, y, no_task) for x, y in zip(inputs.split(size), targets.split(size), strict=True)
    ]

    def take(num_steps: int) -> float:
        batches = TimedBatches(ready[:num_steps], device)
        strategy.make_train_dataloader = lambda **options: setattr(strategy, "dataloader", batches)
        strategy.train(experience)
        return batches.seconds

    take(1)  # the experience that it then remembers
    return take


def _strategy(name: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Any:
    from avalanche.training.plugins import EvaluationPlugin, MASPlugin
    from avalanche.training.supervised import EWC, Naive, SynapticIntelligence

    model = plain_model(workload, device, dtype)
    common: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "criterion": torch.nn.CrossEntropyLoss(),
        "train_mb_size": workload.batch_size,
        "train_epochs": 1,
        "device": device,
        "evaluator": EvaluationPlugin(),
    }
    make: dict[str, Callable[[], Any]] = {
        "Naive": lambda: Naive(**common),
        "EWC": lambda: EWC(ewc_lambda=1.0, mode="online", decay_factor=1.0, **common),
        "SynapticIntelligence": lambda: SynapticIntelligence(si_lambda=0.1, **common),
        "MAS": lambda: Naive(plugins=[MASPlugin(lambda_reg=0.1)], **common),
    }
    return make[name]()
