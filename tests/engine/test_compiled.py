"""Steps in one pass by a compiled function: PyTorch's to the last digit, and never needed."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from builders import assert_results_equal, assert_tensors_equal, run_on, small_digits
from engram import preset
from engram.data.batches import read_inputs
from engram.engine.cpu import compiled, fused, pixels
from engram.engine.cpu.compiled import Unavailable
from engram.engine.cpu.fused import ClippedStep, FusedStep, can_fuse, compiled_clip, why_not_fused
from engram.engine.cpu.pixels import read_chosen
from engram.engine.learner import Progress
from engram.engine.optimizer import Optimizer
from engram.engine.weight_step import weight_step
from engram.penalties.step import WeightStep

needs_compiler = pytest.mark.skipif(why_not_fused() is not None, reason=f"not fused: {why_not_fused()}")
SHAPES = [(), (1,), (7,), (33,), (5, 3), (40, 101), (3, 2, 5, 5)]
CASES = list(itertools.product(["proximal", "gradient"], [True, False]))
Arguments = tuple[Tensor, float, str, tuple[Tensor, Tensor] | None, Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As if nothing had been compiled or tried; returns the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    for known in (compiled._library, fused._checked_step, fused.compiled_clip, pixels._compiled_read):
        known.cache_clear()


def arguments(kind: str, pulled: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Arguments:
    """The same ones at each call."""
    draw = torch.Generator().manual_seed(0)
    theta, gain, shift, path = (torch.randn(shape, generator=draw, dtype=dtype) for _ in range(4))
    return theta, 0.0371, kind, (gain, shift) if pulled else None, path


def assert_equal_steps(mine: WeightStep, theirs: WeightStep, gradients: list[Tensor]) -> None:
    """Both take the same steps; weights and paths are then equal bit for bit."""
    for gradient in gradients:
        kept = gradient.clone()
        mine.take(gradient)
        theirs.take(gradient)
        assert torch.equal(gradient, kept)
    assert torch.equal(mine.theta, theirs.theta)
    assert mine.path is not None
    assert theirs.path is not None
    assert torch.equal(mine.path, theirs.path)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "pulled"), CASES)
def test_steps_are_those_of_pytorch_to_the_last_digit(
    kind: str, pulled: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    mine, theirs = (arguments(kind, pulled, shape, dtype) for _ in range(2))
    assert can_fuse(mine[0], mine[3], mine[4])
    assert not can_fuse(mine[0], mine[3], None), "without a path PyTorch is as fast"
    gradients = [torch.randn(shape, dtype=dtype) * 10.0**power for power in range(-6, 7)]
    assert_equal_steps(FusedStep(*mine), WeightStep(*theirs), gradients)


@needs_compiler
@pytest.mark.parametrize("special", [float("inf"), float("nan"), 0.0, -0.0, 1e-42, 3e38])
def test_special_values_are_those_of_pytorch(special: float) -> None:
    mine, theirs = (arguments("proximal", True, (40, 3), torch.float32) for _ in range(2))
    gradient = torch.randn(40, 3)
    gradient[::3] = special
    FusedStep(*mine).take(gradient)
    WeightStep(*theirs).take(gradient)
    for a, b in ((mine[0], theirs[0]), (mine[4], theirs[4])):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num().view(torch.int32), b.nan_to_num().view(torch.int32))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "every second column": lambda g: torch.stack([g, g], dim=-1).flatten(1)[:, ::2],
    "expanded": lambda g: g[:1].expand_as(g),
}


@needs_compiler
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(("kind", "pulled"), CASES)
def test_gradients_that_are_not_contiguous(kind: str, pulled: bool, name: str) -> None:
    mine, theirs = (arguments(kind, pulled, (9, 5), torch.float32) for _ in range(2))
    gradient = GRADIENTS[name](torch.randn(9, 5))
    assert not gradient.is_contiguous()
    assert_equal_steps(FusedStep(*mine), WeightStep(*theirs), [gradient])


def test_tensors_without_plain_memory_are_left_to_pytorch() -> None:
    theta, _, _, pull, path = arguments("proximal", True, (6, 4), torch.float32)
    assert pull is not None
    assert not can_fuse(theta.t(), (pull[0].t(), pull[1].t()), path.t())
    assert not can_fuse(theta, (pull[0].double(), pull[1].double()), path)
    assert not can_fuse(theta, (pull[0][:, :1], pull[1]), path)
    assert not can_fuse(theta, None, path.t().contiguous().t())
    assert not can_fuse(theta.bfloat16(), None, path.bfloat16())


@needs_compiler
def test_a_weight_at_an_odd_place_in_memory() -> None:
    mine, theirs = (arguments("proximal", True, (1, 33), torch.float32) for _ in range(2))
    memory = torch.zeros(67)
    theta = memory[1:34].view(1, 33).copy_(mine[0])  # not aligned to the size of a vector
    assert_equal_steps(FusedStep(theta, *mine[1:]), WeightStep(*theirs), [torch.randn(1, 33)])
    assert not memory[0]
    assert not memory[34:].any()


@needs_compiler
def test_autograd_notices_that_weights_have_changed() -> None:
    theta, *others = arguments("proximal", True, (4,), torch.float32)
    theta.requires_grad_()
    loss = theta.square().sum()
    with torch.no_grad():
        FusedStep(theta, *others).take(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
def test_threads_take_steps_of_different_models() -> None:
    mine = [arguments("proximal", True, (50, 60), torch.float32) for _ in range(4)]
    gradients = [torch.randn(50, 60) for _ in range(30)]
    steps = [FusedStep(*one) for one in mine]
    threads = [threading.Thread(target=lambda s=step: [s.take(g) for g in gradients]) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = WeightStep(*arguments("proximal", True, (50, 60), torch.float32))
    for gradient in gradients:
        reference.take(gradient)
    for step in steps:
        assert_equal_steps(step, reference, [])


# --- reading batches


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("shape", [(1, 5, 7), (33,), (3, 2, 2)], ids=str)
def test_pixels_are_read_as_pytorch_reads_them(shape: tuple[int, ...], permuted: bool, dtype: torch.dtype) -> None:
    inputs = torch.randint(0, 256, (60, *shape), dtype=torch.uint8)
    inputs.view(-1)[:256] = torch.arange(256).to(torch.uint8)
    permutation = torch.randperm(inputs[0].numel()) if permuted else None
    chosen = torch.randint(0, 60, (40,))
    assert pixels._fits(inputs, chosen, permutation)
    found = read_chosen(inputs, chosen, permutation, dtype)
    assert_tensors_equal({"": found}, {"": read_inputs(inputs[chosen], permutation, dtype)})


def test_inputs_that_c_cannot_read_are_left_to_pytorch() -> None:
    inputs, chosen = torch.randint(0, 256, (9, 4, 4), dtype=torch.uint8), torch.tensor([1, 8])
    order = torch.randperm(16)
    assert not pixels._fits(inputs.float(), chosen, None)
    assert not pixels._fits(inputs.mT, chosen, None)
    assert not pixels._fits(inputs, chosen.int(), None)
    assert not pixels._fits(inputs, chosen, order.int())
    assert not pixels._fits(inputs, chosen[:0], None)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(read_chosen(inputs.mT, chosen, order, dtype), read_inputs(inputs.mT[chosen], order, dtype))
        assert read_chosen(inputs, chosen[:0], order, dtype).shape == (0, 4, 4)
    for wrong in (torch.tensor([9]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            read_chosen(inputs, wrong, None, torch.float32)
        with pytest.raises((IndexError, RuntimeError)):
            read_chosen(inputs, chosen, order.index_fill(0, torch.tensor([3]), int(wrong) * 16), torch.float32)


# --- gradients of limited norm


def clipped_weights(shapes: list[tuple[int, ...]], scale: float) -> list[torch.nn.Parameter]:
    """The same ones at each call, with gradients."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    for theta in weights:
        theta.grad = scale * torch.randn(theta.shape, generator=draw)
    return weights


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("shapes", [[(40, 101), (40,), (3, 40)], SHAPES, [(3,)] * 9], ids=["mlp", "all", "nine"])
def test_clipped_steps_are_those_of_pytorch(
    shapes: list[tuple[int, ...]], scale: float, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(fused, "compiled_clip", lambda: None)
    mine, theirs = (clipped_weights(shapes, scale) for _ in range(2))
    ClippedStep(mine, rate=0.0371, largest=0.7).take()
    torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    torch.optim.SGD(theirs, lr=0.0371).step()
    for one, other in zip(mine, theirs, strict=True):
        assert_tensors_equal({"theta": one, "gradient": one.grad}, {"theta": other, "gradient": other.grad})


@needs_compiler
def test_clipped_steps_are_compiled_where_c_is_no_slower() -> None:
    assert ClippedStep(clipped_weights([(5, 3)], 1.0), 0.1, 1.0).fused is not None
    assert ClippedStep([torch.randn(5, 3).t()], 0.1, 1.0).fused is None
    assert ClippedStep([torch.randn(3, dtype=torch.float64)], 0.1, 1.0).fused is None
    torch.set_num_threads(2)
    assert ClippedStep(clipped_weights([(300, 400)], 1.0), 0.1, 1.0).fused is None
    assert ClippedStep(clipped_weights([(30, 40)], 1.0), 0.1, 1.0).fused is not None


def test_a_weight_without_a_gradient_stays_where_it_is() -> None:
    (first, second), (other, _) = clipped_weights([(4,), (2,)], 1.0), clipped_weights([(4,), (2,)], 1.0)
    second.grad, kept = None, second.detach().clone()
    ClippedStep([first, second], 0.1, 1.0).take()
    ClippedStep([other], 0.1, 1.0).take()
    assert torch.equal(first, other)
    assert torch.equal(second, kept)


# --- where there is no compiler


def no_compiler(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    return "there is no C compiler"


def broken_compiler(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    monkeypatch.setenv("CC", "false")
    return "cannot compile kernels.c"


def cache_that_is_a_file(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    cache.write_text("")
    return ""


def no_home(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    return "the user has no cache folder"


def others_may_write(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    (cache / "engram" / "compiled").mkdir(parents=True)
    (cache / "engram" / "compiled").chmod(0o777)
    return "others can write to"


def other_pytorch(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    changed = cache.with_name("kernels.c")
    changed.write_text(compiled.SOURCE.read_text().replace("FMA(", "NOT_FUSED(") + "")
    monkeypatch.setattr(compiled, "SOURCE", changed)
    monkeypatch.setattr(compiled, "FLAGS", [*compiled.FLAGS, "-DNOT_FUSED(a,b,c)=((a)*(b)+(c))"])
    return "differs from PyTorch's in its last digits"


def damaged_library(monkeypatch: pytest.MonkeyPatch, cache: Path) -> str:
    monkeypatch.setattr(compiled, "_compile", lambda library, flags: library.write_bytes(b"no library"))
    return ""


OBSTACLES = [
    no_compiler,
    broken_compiler,
    cache_that_is_a_file,
    no_home,
    others_may_write,
    other_pytorch,
    damaged_library,
]


@needs_compiler
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_whatever_goes_wrong_pytorch_takes_the_steps(
    obstacle: Callable[[pytest.MonkeyPatch, Path], str], monkeypatch: pytest.MonkeyPatch, fresh_process: Path
) -> None:
    why = obstacle(monkeypatch, fresh_process)
    found = why_not_fused()
    assert found is not None
    assert why in found
    assert obstacle is other_pytorch or compiled_clip() is None
    theta, rate, kind, pull, path = arguments("proximal", True, (5,), torch.float32)
    assert type(weight_step(theta, Optimizer("sgd", rate=rate), {}, kind, pull, path)) is WeightStep


@needs_compiler
def test_the_library_is_compiled_once_and_leaves_nothing_else(
    fresh_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_fused() is None
    (library,) = [path for path in fresh_process.rglob("*") if path.is_file()]
    assert library.suffix == ".so"
    forget()
    no_compiler(monkeypatch, fresh_process)
    assert why_not_fused() is None, "it is there already"


@needs_compiler
@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_cache_that_cannot_be_written(fresh_process: Path) -> None:
    fresh_process.mkdir(mode=0o500)
    assert why_not_fused() is not None


@needs_compiler
def test_a_run_is_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch, fresh_process: Path) -> None:
    digits, quick = small_digits(200, 40), {"num_tasks": 2, "trials": 2, "epochs": 1, "batch_size": 16}
    configs = [
        preset("split-mnist", method, dataset=digits.name, **quick) for method in ("si", "dhp+si", "dhp+online-ewc")
    ]
    configs += [config.replace(penalty_step="gradient") for config in configs]
    notes: list[str] = []

    def report(progress: Progress) -> None:
        notes.append(progress.note or "")

    with_compiler = run_on(configs, [digits])
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_library", lambda: Unavailable("there is no C compiler"))
        plain = run_on(configs, [digits], report=report)
    for mine, theirs in zip(with_compiler, plain, strict=True):
        assert_results_equal(mine, theirs)
    assert sum("no C compiler" in note for note in notes) == 1


def test_what_c_reads_lives_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that fill a cache at once, one has an answer that nobody else holds."""
    made: list[weakref.ref] = []

    def values(dtype: torch.dtype) -> torch.Tensor:
        fresh = torch.zeros(256, dtype=dtype)
        made.append(weakref.ref(fresh))
        return fresh

    def read(*arguments: object) -> None:
        assert made[-1]() is not None

    monkeypatch.setattr(pixels, "_values", values)
    monkeypatch.setattr(pixels, "_compiled_read", lambda dtype: read)
    inputs = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    pixels.read_chosen(inputs, torch.tensor([1, 2]), None, torch.float32)
    assert made
