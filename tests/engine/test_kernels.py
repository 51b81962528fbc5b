"""The Triton kernels of steps, layers and memories: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engram
from builders import custom_stream
from engram import preset
from engram.config.settings import Config
from engram.data.batches import move_streams, read_many
from engram.engine.build import build_learner, precision_of
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu import heads
from engram.engine.gpu import program as program_of_a_gpu
from engram.engine.gpu.convolutions import channels_last
from engram.engine.gpu.heads import BATCHES_KEPT, LateMoment
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.rows import Moving, Rows, Step, steps_of, take_step
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches
from engram.nn.classes import mask_logits
from engram.nn.dhp import DHPSoftmax
from engram.nn.memory import class_sums, second_moment
from engram.nn.networks import Network
from engram.nn.trace import PlasticSoftmax

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 from the start: make test-kernels", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton: make test-kernels")

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

HEADS_IN_STACKS = [head for head in engram.heads.list() if head != "scaled"]  # which a run sizes before it is stacked


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with precision_of("float32"):
        yield


@pytest.fixture
def kernels() -> ModuleType:
    from engram.engine.gpu import kernels

    return kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """To within a part of the largest number that there is, on whatever device and in whatever precision."""
    assert found.shape == expected.shape
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    difference, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= tolerance * max(scale, 1e-3), f"{difference} of {scale}"


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
    monkeypatch.setattr(kernels.step, "ENOUGH", enough)
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


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("batch", "features", "classes"), [(10, 37, 2), (64, 130, 10), (200, 64, 20)])
def test_the_kernel_adds_a_batch_to_the_sums(
    kernels: ModuleType, batch: int, features: int, classes: int, keeps: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    num_models, sharing = 4, 2
    targets = torch.randint(classes, (num_models // sharing, batch), generator=random).to(DEVICE)
    count, total = torch.ones(num_models, classes).double(), torch.ones(num_models, classes, features).double()
    count, total, unread = count.to(DEVICE), total.to(DEVICE), torch.zeros(num_models, dtype=torch.bool, device=DEVICE)
    psi = torch.randn(num_models, features, batch, generator=random).to(DEVICE).mT  # as a layer of a stack leaves it
    kept = torch.zeros(num_models, features, 3, batch, device=DEVICE)
    where = (kept, torch.tensor([5], device=DEVICE)) if keeps else ()
    kernels.write_sums(psi, targets, count, total, unread, *where)
    for model in range(num_models):
        own = targets[model // sharing]
        number, sums = class_sums(psi[model], own, classes)
        assert torch.equal(count[model], 1 + number)
        torch.testing.assert_close(total[model], 1 + sums, rtol=1e-5, atol=1e-5)
    assert unread.all()
    assert torch.equal(kept[:, :, 2], psi.mT if keeps else torch.zeros_like(psi.mT))
    assert not kept[:, :, :2].any()


def test_second_moments_catch_up_with_the_steps(kernels: ModuleType) -> None:
    """After a full round of steps and after the last ones, of all models and of some, with batches of two sizes."""
    slot, moment = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(4, 9, 9, device=DEVICE).double()
    late, expected = LateMoment(moment, slot, kernels), torch.zeros_like(moment)
    for rows, batch, num_steps in ((slice(0, 4), 7, BATCHES_KEPT), (slice(0, 4), 7, 3), (slice(1, 3), 5, 2)):
        for step in range(num_steps):
            slot.fill_(step)
            late.begin_step(rows, batch)
            psi = torch.randn(rows.stop - rows.start, batch, 9, device=DEVICE)
            sums = [torch.zeros(len(psi), *shape, device=DEVICE).double() for shape in ((3,), (3, 9))]
            unread = torch.zeros(len(psi), dtype=torch.bool, device=DEVICE)
            late.write(psi, torch.zeros(1, batch, dtype=torch.int64, device=DEVICE), *sums, unread)
            for model, own in zip(range(4)[rows], psi, strict=True):
                expected[model] += second_moment(own)
        late.add(rows, batch, num_steps)
    torch.testing.assert_close(moment, expected, rtol=1e-5, atol=1e-5)


class CalledTwice(Network):
    """A network that gives its head two batches a step."""

    def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.features(inputs)
        return (self.head(hidden, target) + self.head(hidden / 2, target)) / 2 if self.training else self.head(hidden)


@pytest.mark.parametrize("case", ["long pieces", "unequal trials", "two calls a step"])
def test_second_moments_in_a_stack_are_those_of_each_model_alone(
    kernels: ModuleType, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (heads, program_of_a_gpu):  # so that a short piece is longer
        monkeypatch.setattr(module, "BATCHES_KEPT", 3)
    config = preset("custom", "slda").replace(
        learn_features=True, network="mlp", hidden=[5], epochs=1, num_tasks=1, trials=2, learning_rate=0.05,
        batch_size=2 if case == "long pieces" else 4,
    )  # fmt: skip
    whole = custom_stream(num_tasks=1, shape=(1, 4, 4), num_train=40 if case == "long pieces" else 24)
    sizes = (13, 23, 10) if case == "unequal trials" else (len(whole[0].train),) * 3
    trials = [
        replace(whole, tasks=(replace(whole[0], train=replace(whole[0].train, rows=torch.arange(size))),))
        for size in sizes
    ]
    batches = Batches([0, 1, 2], move_streams(trials, DEVICE), 0, torch.float32)

    def build_all() -> list[Learner]:
        learners = [build_learner(config, t, whole.input_shape, 3, DEVICE, torch.float32) for t in range(3)]
        for learner in learners if case == "two calls a step" else ():
            learner.model.__class__ = CalledTwice
        return learners

    together, alone = build_all(), build_all()
    program = Mapped([together], batches, kernels)
    run_stream(program, batches, config)
    run_stream(OneByOne(alone, batches), batches, config)
    assert len(program.sections[0].moments["head"].kept) == {"long pieces": 1, "two calls a step": 2}.get(case, 4)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.model.head.moment, other.model.head.moment, rtol=1e-4, atol=1e-4)


def test_batches_of_all_sizes_wait_in_the_same_memory(kernels: ModuleType) -> None:
    slot, moment = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(2, 9, 9, device=DEVICE).double()
    late = LateMoment(moment, slot, kernels)
    for size in (8, 3, 5):
        late.begin_step(slice(0, 2), size)
        sums = (torch.zeros(2, 3, device=DEVICE).double(), torch.zeros(2, 3, 9, device=DEVICE).double())
        targets = torch.zeros(1, size, dtype=torch.int64, device=DEVICE)
        late.write(
            torch.rand(2, size, 9, device=DEVICE), targets, *sums, torch.zeros(2, dtype=torch.bool, device=DEVICE)
        )
        late.add(slice(0, 2), size, 1)
    assert len({kept.data_ptr() for kept in late.kept.values()}) == 1


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: the interpreter rounds nothing")
def test_with_tf32_sums_and_moments_are_of_the_same_rounded_features(kernels: ModuleType) -> None:
    slot, moment = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(2, 65, 65, device=DEVICE).double()
    targets, number = torch.zeros(1, 64, dtype=torch.int64, device=DEVICE), 64 * BATCHES_KEPT
    count, total = torch.zeros(2, 1, device=DEVICE).double(), torch.zeros(2, 1, 65, device=DEVICE).double()
    unread = torch.zeros(2, dtype=torch.bool, device=DEVICE)
    psi = 100 + torch.randn(BATCHES_KEPT, 2, 64, 65, device=DEVICE)
    with precision_of("tf32"):
        late = LateMoment(moment, slot, kernels)
        for step, batch in enumerate(psi):
            slot.fill_(step)
            late.begin_step(slice(0, 2), 64)
            late.write(batch, targets, count, total, unread)
        late.add(slice(0, 2), 64, BATCHES_KEPT)
    kept = late.kept[64, 0].double()  # (N, k, batches, B)
    assert ((kept.permute(2, 0, 3, 1) - psi).abs() <= 2**-11 * psi).all()
    torch.testing.assert_close(total[:, 0], kept.sum(dim=(2, 3)), rtol=1e-6, atol=0)
    # What is lost is the rounding of a product's sum: here, with a mean of 100, some 1e-5 of the mean's square.
    covariance = moment / number - torch.einsum("ni,nj->nij", total[:, 0], total[:, 0]) / number**2
    for own, found in zip(kept.flatten(2), covariance, strict=True):
        torch.testing.assert_close(found, torch.cov(own, correction=0), rtol=0, atol=0.2)


@pytest.mark.parametrize("kind", ["proximal", "gradient"])
@pytest.mark.parametrize("method", ["steady+si", "steady+mas", *(f"{head}+online-ewc" for head in HEADS_IN_STACKS)])
def test_a_stack_of_heads_with_kernels_is_each_model_alone(kernels: ModuleType, method: str, kind: str) -> None:
    """Every head, in a network whose other layers have kernels; memories are on features that learn."""
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


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_parameter_that_is_not_trained_stays_though_its_gradient_is_infinite(
    kernels: ModuleType, optimizer: str
) -> None:
    """As the α that a plain head has in a stack: a step of 0 times infinity would not be none."""
    changes = {"momentum": 0.9} if optimizer == "momentum" else {"optimizer": optimizer}
    configs = [preset("custom", method).replace(**changes, trials=1, hidden=[9]) for method in ("linear", "dhp")]
    learners, _ = build(configs)
    rows = Rows([learner.model for learner in learners])
    alpha = rows.parameters["head.alpha"]
    kernels.take_step(alpha, torch.full_like(alpha, math.inf), steps_of(learners, rows)["head.alpha"])
    assert not alpha[0].any()
    assert not alpha[1].isfinite().all()


@pytest.mark.parametrize("methods", [("linear+si", "matched+si"), ("linear+mas", "dhp+mas", "matched+mas")])
def test_plain_matched_and_plastic_heads_in_one_section_with_kernels_are_each_alone(
    kernels: ModuleType, methods: tuple[str, ...]
) -> None:
    changes = {"epochs": 1, "batch_size": 7, "num_tasks": 2, "trials": 2, "hidden": [9], "network": "mlp"}
    configs = [preset("custom", method, strength=0.5).replace(**changes, learning_rate=0.05) for method in methods]
    together, batches = build(configs)
    run_stream(Mapped([together], batches, kernels), batches, configs[0])
    alone, _ = build(configs)
    run_stream(OneByOne(alone, batches), batches, configs[0])
    for one, other in zip(together, alone, strict=True):
        found, expected = one.model.state_dict(), other.model.state_dict()
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert_near(found[key], tensor, 1e-4)


@pytest.mark.parametrize("size", [None, 2.0])
@pytest.mark.parametrize("is_slope", [False, True])
def test_anchors_move_with_the_fast_part(kernels: ModuleType, is_slope: bool, size: float | None) -> None:
    """In some models of a section, in any order; the others' shifts stay."""
    layer = DHPSoftmax(5, 3, trace_scale=size)
    alpha, hebb, gain, shift = torch.randn(4, 4, 3, 5, device=DEVICE)
    models, held = torch.tensor([2, 0], device=DEVICE), torch.tensor([1, 3], device=DEVICE)
    moving = Moving("head", models, held, shift[held].clone(), is_slope)
    expected, found = shift.clone(), shift.clone()
    moving.move(SimpleNamespace(gain=gain, shift=expected), layer.fast_part_of(alpha[models], hebb[models]))
    kernels.move_shift(alpha, hebb, gain, moving.shift, found, models, held, is_slope, size)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[[0, 2]], shift[[0, 2]], rtol=0, atol=0)


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


# --- each kernel is what plain PyTorch computes


@pytest.mark.parametrize("shape", [(), (7,), (100,), (10, 33), (3, 5, 70), (41, 50)])
def test_a_step_of_many_models(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    gain, shift, path = (random(3, *shape, seed=seed) for seed in (1, 2, 3))
    step = Step(
        rate=torch.tensor([0.1, 0.2, 0.3, 0.0, 0.5, 0.6], device=DEVICE),
        proximal=torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.int32, device=DEVICE),
        gain=gain,
        shift=shift,
        held=torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32, device=DEVICE),
        path=path.clone(),
        followed=torch.tensor([-1, 0, -1, -1, 1, 2], dtype=torch.int32, device=DEVICE),
    )
    theta, gradient = random(6, *shape, seed=4), random(6, *shape, seed=5)
    taken, expected = theta.clone(), theta.clone()
    kernels.take_step(taken, gradient, step)
    found_path = step.path.clone()
    step.path.copy_(path)
    take_step(expected, gradient, step)
    assert_near(taken, expected)
    assert_near(found_path, step.path)
    assert torch.equal(taken[3], theta[3]), "at a rate of 0 it stays"

    some = theta.clone()
    kernels.take_step(some[1:3], gradient[1:3], step[1:3])
    assert torch.equal(some[1:3], taken[1:3])
    assert torch.equal(some[3:], theta[3:])
    assert torch.equal(some[0], theta[0])


def test_a_step_of_models_without_a_penalty(kernels: ModuleType) -> None:
    none = torch.empty(0, device=DEVICE)
    nobody = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    step = Step(torch.tensor([0.1, 0.2], device=DEVICE), torch.zeros_like(nobody), none, none, nobody, none, nobody)
    theta, gradient = random(2, 7, 33), random(33, 7, 2, seed=1).permute(2, 1, 0)
    expected = theta - step.rate[:, None, None] * gradient
    kernels.take_step(theta, gradient, step)
    assert_near(theta, expected)


@pytest.mark.parametrize("batch", [1, 5, 33, 64, 70])
@pytest.mark.parametrize("classes", [2, 10, 50, 100])
def test_the_loss(kernels: ModuleType, classes: int, batch: int) -> None:
    for own in (range(classes), range(0, classes, 2), range(1, 2)):
        logits = (3 * random(6, batch, classes)).requires_grad_()
        targets = torch.tensor(list(own), device=DEVICE)[numbers(len(own), 3, batch)]  # each for two models in a row
        others = torch.ones(classes, dtype=torch.bool, device=DEVICE)
        others[list(own)] = False
        losses, slopes = kernels.cross_entropy(logits.detach(), targets, others)
        each = [
            F.cross_entropy(mask_logits(z, tuple(own)), y)
            for z, y in zip(logits.double(), targets.repeat_interleave(2, dim=0), strict=True)
        ]
        (expected,) = torch.autograd.grad(torch.stack(each).sum(), logits)
        assert_near(losses, torch.stack(each))
        assert_near(slopes, expected)
        assert not slopes[:, :, others].any()


@pytest.mark.parametrize("batch", [1, 5, 33, 64, 70])
@pytest.mark.parametrize("units", [7, 100, 400])
def test_bias_and_activation(kernels: ModuleType, units: int, batch: int) -> None:
    out, bias = random(3, units, batch), random(3, units, seed=1)
    expected = F.leaky_relu(out + bias[:, :, None], 0.2)
    kernels.activate(out, bias, 0.2)
    assert_near(out, expected, 1e-6)
    for gradient in (random(3, batch, units, seed=2), random(3, units, batch, seed=2).mT):
        delta, by_bias = kernels.pass_back(gradient, out, 0.2)
        passed = gradient.mT * torch.where(out > 0, 1.0, 0.2)
        assert_near(delta, passed, 1e-6)
        assert_near(by_bias, passed.sum(dim=2))


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("batch", [1, 5, 33, 64, 70])
@pytest.mark.parametrize("classes", [2, 10, 50, 100])
@pytest.mark.parametrize("units", [7, 100, 400])
def test_the_plastic_head(kernels: ModuleType, units: int, classes: int, batch: int, turned: bool) -> None:
    hidden = random(6, units, batch).mT if turned else random(6, batch, units)
    targets = numbers(classes, 3, batch)
    weight, alpha, hebb = (random(6, classes, units, seed=seed) for seed in (1, 2, 3))
    delta = random(6, batch, classes, seed=4)
    start = torch.tensor([0.0, 0.3, 1.0, -0.2, 1.7, 0.001], device=DEVICE)
    for bounded in (True, False):
        eta = start.clamp(0, 1) if bounded else start
        tensors = [tensor.double().requires_grad_() for tensor in (hidden, weight, alpha, eta)]
        logits, trace = PlasticSoftmax.apply(
            tensors[0], targets.repeat_interleave(2, dim=0), *tensors[1:], hebb.double()
        )
        by_hidden, *expected = torch.autograd.grad(logits, tensors, delta.double())

        written, rate = hebb.clone(), start.clone()
        in_force, surprise = kernels.write_trace(hidden, targets, weight, alpha, rate, written, bounded)
        assert torch.equal(rate, eta)
        assert_near(written, trace)
        assert_near(in_force, weight + alpha * trace)
        assert_near(torch.bmm(hidden, in_force.mT), logits)
        found = kernels.read_back(delta, hidden, targets, alpha, rate, written, in_force, surprise)
        for value, wanted in zip(found[:3], expected, strict=True):
            assert_near(value, wanted, 1e-4)
        assert_near(found[3].mT, by_hidden, 1e-4)


@pytest.mark.parametrize("shape", [(1, 5, 7), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("permuted", [False, True], ids=["as it is", "permuted"])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.float64])
def test_reading_a_batch(kernels: ModuleType, kind: torch.dtype, permuted: bool, shape: tuple[int, ...]) -> None:
    store = numbers(256, 90, *shape).to(kind) if kind == torch.uint8 else random(90, *shape).to(kind)
    labels, order = numbers(10, 90), torch.stack([torch.randperm(90, device=DEVICE) for _ in range(3)])
    pixels = store[0].numel()
    permutations = torch.stack([torch.randperm(pixels, device=DEVICE) for _ in range(3)]) if permuted else None
    for first, batch_size in ((0, 5), (20, 70), (57, 33)):
        cursor = torch.tensor(first, device=DEVICE)
        inputs, targets = kernels.gather(store, labels, order, cursor, permutations, batch_size)
        chosen = order[:, first : first + batch_size]
        assert torch.equal(inputs, as_on_the_cpu(store, chosen, permutations))
        assert torch.equal(targets, labels[chosen])
        own = numbers(10, 3, 90, seed=1)  # the labels of each trial
        _, targets = kernels.gather(store, own, order, cursor, permutations, batch_size)
        assert torch.equal(targets, own.gather(1, chosen))
    some = order[1:]  # of some trials
    inputs, _ = kernels.gather(store, labels, some, cursor, None if permutations is None else permutations[1:], 5)
    wanted = None if permutations is None else permutations[1:]
    assert torch.equal(inputs, as_on_the_cpu(store, some[:, 57:62], wanted))


def as_on_the_cpu(store: Tensor, chosen: Tensor, permutations: Tensor | None) -> Tensor:
    """Where pixels are divided by 255; PyTorch's own division on a GPU multiplies by 1/255, which rounds otherwise."""
    there = None if permutations is None else permutations.cpu()
    return read_many(store.cpu(), chosen.cpu(), there, torch.float32).to(DEVICE)
