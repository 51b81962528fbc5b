"""The Triton kernels of steps, layers and memories: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from builders import custom_stream
from engram import preset
from engram.config.settings import Config
from engram.data.batches import move_streams
from engram.engine.build import build_learner, precision_of
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.convolutions import channels_last
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.rows import Rows, Step, steps_of, take_step
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches
from engram.nn.memory import class_sums, second_moment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter does not multiply bfloat16
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.02},
    "momentum and decay": {"momentum": 0.8, "weight_decay": 0.02},
    "adam": {"optimizer": "adam", "learning_rate": 1e-3},
    "adam and decay": {"optimizer": "adam", "weight_decay": 0.02, "beta1": 0.7},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "beta2": 0.99, "adam_eps": 1e-4},
}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with precision_of("float32"):
        yield


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1 from the start")
    from engram.engine.gpu.kernels import step

    return step


def configs_of(settings: dict[str, Any]) -> list[Config]:
    """Models of one section: three rates, with and without a penalty, of either kind."""
    quick = {"epochs": 1, "batch_size": 7, "num_tasks": 2, "trials": 2, "hidden": [9], **settings}
    kinds = [("finetune", "proximal"), ("si", "proximal"), ("si", "gradient"), ("mas", "gradient")]
    return [
        preset("custom", method, **({} if method == "finetune" else {"strength": 10.0})).replace(
            **{**quick, "learning_rate": quick.get("learning_rate", 0.01) * (1 + place), "penalty_step": kind}
        )
        for place, (method, kind) in enumerate(kinds)
    ]


def build(configs: list[Config]) -> tuple[list[Learner], Batches]:
    stream = custom_stream(num_train=21, more=7, shape=(1, 4, 4))
    learners = [build_learner(c, t, stream.input_shape, 3, DEVICE, torch.float32) for t in (0, 1) for c in configs]
    return learners, Batches([0, 1], move_streams([stream] * 2, DEVICE), 0, torch.float32)


def steps_for(configs: list[Config]) -> tuple[Rows, dict[str, Step]]:
    """Models that have consolidated something, and their steps."""
    learners, _ = build(configs)
    random = torch.Generator().manual_seed(1)
    for learner in learners:
        if learner.config.penalty is not None:
            found = {n: torch.rand(t.shape, generator=random).to(DEVICE) for n, t in learner.penalty.parameters.items()}
            learner.penalty.remember(found)  # type: ignore[attr-defined]
    rows = Rows([learner.model for learner in learners])
    return rows, steps_of(learners, rows)


def tensors_of(theta: Tensor, step: Step) -> dict[str, Tensor]:
    slots = {} if step.slots is None else step.slots.tensors
    return {"theta": theta, "path": step.path, **slots}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_kernel_takes_the_steps_of_plain_pytorch(kernels: ModuleType, settings: dict[str, Any]) -> None:
    """Also where only some of the models take a step, as at the end of an epoch of unequal trials."""
    configs, random = configs_of(settings), torch.Generator().manual_seed(0)
    (expected, steps), (found, by_kernel) = steps_for(configs), steps_for(configs)
    for number in range(6):
        rows = slice(0, 8) if number % 2 == 0 else slice(4, 8)
        first = next(iter(by_kernel.values()))
        if first.slots is not None and first.slots.clock is not None:
            first.slots.clock.tick(rows)
        for name, theta in expected.parameters.items():
            gradient = torch.randn(theta.shape, generator=random).to(DEVICE)
            take_step(theta[rows], gradient[rows], steps[name][rows])
            kernels.take_step(found.parameters[name][rows], gradient[rows], by_kernel[name][rows])
            there = tensors_of(found.parameters[name], by_kernel[name])
            for key, tensor in tensors_of(theta, steps[name]).items():
                torch.testing.assert_close(there[key], tensor, rtol=5e-6, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("shared", [False, True], ids=["own inputs", "shared inputs"])
@pytest.mark.parametrize("enough", [1, 4096], ids=["tiles in a row", "a tile each"])
@pytest.mark.parametrize(("inputs", "batch"), [(16, 7), (68, 64), (130, 33), (70, 128)])
def test_a_step_along_a_product_is_that_along_its_gradient(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, inputs: int, batch: int, enough: int, shared: bool
) -> None:
    """With δ and x in place of g = δ xᵀ, for weights whose sizes are no multiples of a tile's."""
    monkeypatch.setattr(kernels, "ENOUGH", enough)
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE)  # noqa: E731
    size = (37, inputs)
    step = Step(
        rate=torch.tensor([0.1, 0.2, 0.0, 0.3], device=DEVICE),
        proximal=torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=DEVICE),
        gain=draw(3, *size),
        shift=draw(3, *size),
        held=torch.tensor([-1, 0, 1, 2], device=DEVICE),
        path=draw(2, *size),
        followed=torch.tensor([0, -1, -1, 1], device=DEVICE),
    )
    delta, entered = draw(4, 37, batch), draw(2 if shared else 4, inputs, batch)
    each = entered.repeat_interleave(2, dim=0) if shared else entered
    expected = draw(4, *size)
    found, other = expected.clone(), replace(step, path=step.path.clone())
    take_step(expected, delta @ each.mT, step)
    kernels.take_product_step(found, delta, entered, other)
    torch.testing.assert_close((found, other.path), (expected, step.path), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["plain", "momentum and decay", "adam and decay", "adamw"])
def test_a_stack_with_kernels_is_each_model_alone(kernels: ModuleType, name: str) -> None:
    configs = configs_of({**SETTINGS[name], "learning_rate": 1e-3, "reset_optimizer": False})
    together, batches = build(configs)
    program = Mapped([together], batches, kernels)
    run_stream(program, batches, configs[0])
    alone, _ = build(configs)
    run_stream(OneByOne(alone, batches), batches, configs[0])
    for one, other in zip(together, alone, strict=True):
        assert list(one.optimizer_state) == list(other.optimizer_state)
        for key, tensor in {**other.model.state_dict(), **other.optimizer_state}.items():
            found = {**one.model.state_dict(), **one.optimizer_state}[key]
            torch.testing.assert_close(
                found.cpu(), tensor.cpu(), rtol=1e-3, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("has_moment", [True, False])
@pytest.mark.parametrize(("batch", "features", "classes"), [(10, 37, 2), (64, 130, 10), (200, 64, 20)])
def test_the_kernel_adds_a_batch_to_the_sums(
    kernels: ModuleType, batch: int, features: int, classes: int, has_moment: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    num_models, sharing = 4, 2
    targets = torch.randint(classes, (num_models // sharing, batch), generator=random).to(DEVICE)
    count, total = torch.ones(num_models, classes).double(), torch.ones(num_models, classes, features).double()
    start = torch.randn(num_models, features, features, generator=random).double()
    moment = (start + start.mT).to(DEVICE) if has_moment else None
    before = None if moment is None else moment.clone()
    count, total, unread = count.to(DEVICE), total.to(DEVICE), torch.zeros(num_models, dtype=torch.bool, device=DEVICE)
    psi = torch.randn(num_models, features, batch, generator=random).to(DEVICE).mT  # as a layer of a stack leaves it
    kernels.write_sums(psi, targets, count, total, moment, unread)
    for model in range(num_models):
        own = targets[model // sharing]
        number, sums = class_sums(psi[model], own, classes)
        assert torch.equal(count[model], 1 + number)
        torch.testing.assert_close(total[model], 1 + sums, rtol=1e-5, atol=1e-5)
        if moment is not None and before is not None:
            expected = before[model] + second_moment(psi[model])
            torch.testing.assert_close(moment[model].tril(), expected.tril(), rtol=1e-5, atol=1e-5)
    assert unread.all()
    if moment is not None:
        kernels.mirror(moment)
        assert torch.equal(moment, moment.mT)


@pytest.mark.parametrize("method", ["steady+si", "steady+mas", "slda+si", "ncm+online-ewc"])
@pytest.mark.parametrize("kind", ["proximal", "gradient"])
def test_a_stack_of_heads_with_kernels_is_each_model_alone(kernels: ModuleType, method: str, kind: str) -> None:
    """A steady trace that is protected in force, and memories on features that learn."""
    base = preset("custom", method, strength=0.5)
    changes = {"epochs": 1, "batch_size": 7, "num_tasks": 2, "trials": 2, "hidden": [9], "network": "mlp"}
    configs = [
        base.replace(**changes, penalty_step=kind, learning_rate=rate, strength=strength)
        for rate, strength in ((0.01, 0.5), (0.05, 2.0))
    ]
    together, batches = build(configs)
    run_stream(Mapped([together], batches, kernels), batches, configs[0])
    alone, _ = build(configs)
    run_stream(OneByOne(alone, batches), batches, configs[0])
    for one, other in zip(together, alone, strict=True):
        for key, tensor in other.model.state_dict().items():
            found = one.model.state_dict()[key]
            torch.testing.assert_close(
                found.cpu(), tensor.cpu(), rtol=1e-3, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


def test_kernels_that_are_compiled_ahead_compute_nothing(kernels: ModuleType) -> None:
    out, bias = torch.full((2, 3, 5), -2.0, device=DEVICE), torch.ones(2, 3, device=DEVICE)
    with kernels.compiled_ahead():
        kernels.activate(out, bias, 0.5)
    assert (out == -2).all()
    kernels.activate(out, bias, 0.5)
    assert (out == -0.5).all()


@pytest.mark.parametrize(("batch", "outputs", "inputs"), [(7, 9, 13), (70, 65, 130)])
def test_products_of_any_size(kernels: ModuleType, batch: int, outputs: int, inputs: int) -> None:
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(DEVICE)  # noqa: E731
    weight, bias, delta = draw(4, outputs, inputs), draw(4, outputs), draw(4, outputs, batch)
    for groups in (2, 4):
        entered = draw(groups, inputs, batch)
        each = entered.repeat_interleave(4 // groups, dim=0)
        expected = F.leaky_relu(weight @ each + bias[..., None], 0.2)
        torch.testing.assert_close(kernels.multiply(weight, entered, bias, 0.2), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernels.multiply_back(weight, delta), weight.mT @ delta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("groups", "sharing", "batch", "images", "channels", "kernel"),
    [
        (2, 3, 2, (3, 9, 8), 5, (3, 2)),
        (3, 1, 2, (4, 10, 11), 6, (5, 5)),
        (1, 2, 33, (1, 6, 6), 20, (3, 3)),
        (1, 4, 2, (2, 4, 5), 33, (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_convolution_with_pooling_and_its_gradients(
    kernels: ModuleType,
    groups: int,
    sharing: int,
    batch: int,
    images: tuple,
    channels: int,
    kernel: tuple,
    dtype: torch.dtype,
) -> None:
    random = torch.Generator().manual_seed(0)
    # Numbers that both types can hold, and a slope that is a power of two, so that products are exact.
    draw = lambda *shape: torch.randn(*shape, generator=random).to(dtype).float().to(DEVICE)  # noqa: E731
    entered = draw(groups, batch, *images)
    weight = draw(groups * sharing, channels, images[0], *kernel).requires_grad_()
    bias = draw(groups * sharing, channels).requires_grad_()
    each = entered.repeat_interleave(sharing, dim=0).requires_grad_()
    expected = torch.stack(
        [F.leaky_relu(F.max_pool2d(F.conv2d(x, w, b), 2), 0.25) for x, w, b in zip(each, weight, bias, strict=True)]
    )
    theta, seen = channels_last(weight.detach(), dtype), channels_last(entered, dtype)
    pooled, codes = kernels.convolve(seen, theta, bias.detach(), 0.25, False)
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-4)
    inner, same = kernels.convolve(seen, theta, bias.detach(), 0.25, True)
    torch.testing.assert_close(inner, pooled.movedim(-3, -1).to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(same, codes, rtol=0, atol=0)
    delta = draw(*expected.shape)
    gradients = torch.autograd.grad(expected, (weight, bias, each), delta)
    delta = channels_last(delta, dtype)
    slopes = kernels.weight_slopes(delta, codes, seen, theta, images[0], 0.25)
    torch.testing.assert_close(slopes, gradients[:2], rtol=1e-4, atol=1e-4)
    first = kernels.weight_slopes(delta, codes, seen, theta, 1, 0.25)[0]
    torch.testing.assert_close(first, slopes[0][:, :, :1], rtol=0, atol=0)
    by_images = kernels.image_slopes(delta, codes, theta, channels_last(each, dtype).shape, 0.25)
    # A window of the images is rounded to their type before it is added to its neighbours.
    near = 1e-4 if dtype == torch.float32 else 0.03 * float(gradients[2].std())
    torch.testing.assert_close(by_images.movedim(-1, -3).float(), gradients[2], rtol=near, atol=near)


def test_images_with_three_channels_get_a_fourth() -> None:
    maps = torch.rand(2, 5, 3, 4, 6)
    wider = channels_last(maps, torch.float32, padded=True)
    torch.testing.assert_close(wider[..., :3], maps.movedim(2, -1), rtol=0, atol=0)
    assert wider.is_contiguous()
    assert wider.shape == (2, 5, 4, 6, 4)
    assert not wider[..., 3].any()
    assert channels_last(maps[:, :, :2], torch.float32, padded=True).shape == (2, 5, 4, 6, 2)
