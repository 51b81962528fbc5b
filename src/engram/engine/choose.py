"""Which program trains a stack, and how many models a stack may have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.config.settings import SETTINGS, Config, has_effect, names_of
from engram.data.batches import read_inputs
from engram.engine.cpu.program import OneByOne
from engram.engine.cpu.step import has_gradient_hooks, own_method
from engram.engine.draws import draws_numbers
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.section import Section
from engram.engine.learner import Learner
from engram.engine.memory import bytes_of, bytes_of_data
from engram.engine.program import Batches, Program, SideBySide
from engram.nn.dhp import DHPSoftmax
from engram.nn.heads import MatchedSoftmax, PlainSoftmax
from engram.penalties import NoPenalty

TRIAL_RATE = 0.1  # the learning rate of the step by which it is found out whether a model can be mapped
SHARE_OF_MEMORY = 0.8  # that a stack may take of what is free


def choose_program(learners: Sequence[Learner], batches: Batches, device: torch.device) -> tuple[Program, list[str]]:
    """The program for these learners, and what is to be said about the choice."""
    if device.type == "cpu":
        return OneByOne(learners, batches), []
    kernels = load_kernels(batches.dtype)
    notes = [] if kernels else ["Triton is missing or does not serve here: a stack is slower without it"]
    # As large as the batches to come: kernels that are compiled for the trial then serve the run too.
    first = batches.tasks(0)[0].train[slice(learners[0].config.batch_size)]
    example = (read_inputs(first.inputs, dtype=batches.dtype), first.targets)
    alike: list[list[Learner]] = []
    alone: list[Learner] = []
    for group in architectures(learners):
        reason = reason_against_mapping(group, example, kernels)
        if reason is None:
            alike.append(group)
        else:
            methods = ", ".join(dict.fromkeys(learner.config.method for learner in group))
            notes.append(f"{methods}: cannot be stacked and train one by one, since {reason}")
            alone += group
    programs: list[Program] = []
    if alike:
        programs.append(Mapped(alike, batches, kernels))
    if alone:
        programs.append(OneByOne(alone, batches))
    program: Program = programs[0] if len(programs) == 1 else SideBySide(programs)
    return program, notes


def architectures(learners: Sequence[Learner]) -> list[list[Learner]]:
    """Learners whose models and penalties can be called as one."""
    groups: dict[tuple, list[Learner]] = {}
    for learner in learners:
        groups.setdefault((*_architecture(learner.config), own_method(learner.penalty)), []).append(learner)
    return list(groups.values())


def _architecture(config: Config) -> tuple:
    """What models must have in common; a matched head has the shapes of a plastic one."""
    head = "dhp" if config.head == "matched" else config.head
    used = () if head in ("dhp", "plain") else HEADS.facts(head).get("settings", {}).values()  # by another package's
    names = [name for name in names_of(agree="section") if name != "baseline_head"]
    # What a matched head has no use for is as by default. eta_range is asked of all: it clamps a whole section.
    values = [getattr(config, n) if n == "eta_range" or has_effect(n, config) else SETTINGS[n].default for n in names]
    step = config.penalty_step if config.protect == "in-force" else None  # anchors that move do so at different moments
    return (head, *values, *(getattr(config, name) for name in used), step)


def load_kernels(dtype: torch.dtype) -> ModuleType | None:
    """The kernels for a GPU, where there is Triton and the type is one they know."""
    if dtype != torch.float32 or not torch.cuda.is_available():
        return None
    try:
        from engram.engine.gpu.kernels import kernels
    except ImportError:
        return None
    return kernels


def reason_against_mapping(
    group: Sequence[Learner], example: tuple[Tensor, Tensor], kernels: ModuleType | None
) -> str | None:
    """Why models cannot be trained as one, found out on copies; None if they can."""
    method = own_method(group[0].penalty)
    if method is not None:
        return f"{type(group[0].penalty).__name__} has a `{method}` of its own"
    for name, module in group[0].model.named_modules():
        if "forward" in vars(module):  # a function that knows this one module, and not its rows in a stack
            return f"the layer {name!r} has a `forward` that was set on it alone"
    if draws_numbers(group[0].model, *example):
        return "the model draws random numbers, which a stack would draw otherwise"
    if any(has_gradient_hooks(theta) for learner in group for theta in learner.model.parameters()):
        return "the model has hooks on its gradients"
    # Of a network that Engram builds, any two models are alike; those of one's own may each be another.
    tried = list(group) if _has_own_parts(group[0]) else [group[0], group[-1]]
    expected, twins = ([copy.deepcopy(learner.model) for learner in tried] for _ in range(2))
    try:
        configs = [learner.config.replace(learning_rate=TRIAL_RATE) for learner in tried]
        copies = [Learner(config, 0, twin, NoPenalty(twin)) for config, twin in zip(configs, twins, strict=True)]
        section = Section(copies, kernels)
        section.begin_task()
        before = {name: tensor.clone() for name, tensor in _state(section).items()}
        logits = section.logits(example[0], shared=True)
        inputs, targets = (tensor[None] for tensor in example)
        losses = section.step(inputs, targets, range(logits.shape[2]), slice(0, len(tried)))
    except (RuntimeError, InputError, NotImplementedError, TypeError, ValueError) as reason:
        return f"PyTorch cannot map the model ({str(reason).strip().splitlines()[0]})"
    for row, model in enumerate(expected):
        seen = Seen(logits[row], losses[row], *({n: t[row] for n, t in s.items()} for s in (before, _state(section))))
        difference = _difference(model, example, seen)
        if difference is not None:
            return difference
    return None


@dataclass(frozen=True)
class Seen:
    """What a model did as one of a stack: its logits, its loss, and its tensors before and after a step."""

    logits: Tensor
    loss: Tensor
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def _difference(model: nn.Module, example: tuple[Tensor, Tensor], seen: Seen) -> str | None:
    """In what a model alone differs from what was seen of it in a stack."""
    with torch.no_grad():
        logits = model.eval()(example[0])
    loss = nn.functional.cross_entropy(model.train()(*example), example[1])
    trained = {name: theta for name, theta in model.named_parameters() if theta.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for alone, mapped in ((logits, seen.logits), (loss.detach(), seen.loss)):
        if not _near(alone, mapped, 0.0):
            return "the model computes something else when it is mapped"
    largest = max((float(gradient.norm()) for gradient in gradients if gradient is not None), default=0.0)
    for name, gradient in zip(trained, gradients, strict=True):
        step = (seen.before[name] - seen.after[name]) / TRIAL_RATE
        if not _near(torch.zeros_like(step) if gradient is None else gradient, step, largest):
            return f"{name!r} gets another gradient when the model is mapped"
    for name, buffer in model.named_buffers():
        moved = not torch.equal(buffer, seen.before[name])
        if moved and torch.equal(seen.after[name], seen.before[name]):
            return f"the model replaces its buffer {name!r} rather than writing to it"
    return None


def _near(alone: Tensor, mapped: Tensor, largest: float) -> bool:
    """Equal but for rounding, by the norm of the difference; `largest` is that of the largest of several gradients.

    Coarse, where products are in TF32: rounding then turns a few activations over, each by its whole share.
    """
    if alone.dtype == torch.float64:
        tolerance = 1e-6
    else:
        tolerance = 0.2 if alone.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 1e-2
    return float((alone - mapped).norm()) <= tolerance * (float(alone.norm()) + 0.1 * largest) + 1e-5


def _state(section: Section) -> dict[str, Tensor]:
    return {**section.rows.parameters, **section.rows.buffers}


def _has_own_parts(learner: Learner) -> bool:
    head = getattr(learner.model, "head", None)
    return learner.config.network == "custom" or type(head) not in (DHPSoftmax, MatchedSoftmax, PlainSoftmax)


Build = Callable[[int], tuple[list[Learner], Batches]]  # the learners of one config in one trial


def largest_stack(configs: Sequence[Config], build: Build, device: torch.device) -> int | None:
    """How many models of the largest kind fit into memory together, beside the data; None for as many as one likes."""
    free = free_bytes(device)
    if free is None:
        return None
    largest, data = 1, 0
    for c in range(len(configs)):
        learners, batches = build(c)
        inputs = read_inputs(batches.tasks(0)[0].train[slice(2)].inputs, dtype=batches.dtype)
        largest = max(largest, bytes_of(learners[0], inputs))
        data = max(data, bytes_of_data(batches))
    if device.type == "cpu":
        data = 0  # they are there already
    return max(1, int(SHARE_OF_MEMORY * (free - data)) // largest)


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:  # what Linux could free counts too
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
