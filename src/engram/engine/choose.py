"""Which program trains a stack: one for a GPU if the models can be mapped, else one that trains them one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from engram.common.registry import HEADS, REHEARSALS, Registry
from engram.config.effect import has_effect
from engram.config.rules import OPTIMIZERS
from engram.config.settings import SETTINGS, Config, names_of
from engram.data.batches import read_inputs
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.heads import kind_of_head
from engram.engine.gpu.joint import JointMapped
from engram.engine.gpu.program import Mapped
from engram.engine.gpu.rehearsal import reason_against_rehearsal
from engram.engine.gpu.section import Section
from engram.engine.inspection import draws_numbers, has_gradient_hooks, is_finite
from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer
from engram.engine.program import Batches, Program, SideBySide
from engram.penalties import NoPenalty
from engram.penalties.quadratic import form_of

TRIAL_RATE = 0.1  # the learning rate of the step that shows whether a model can be mapped


def choose_program(learners: Sequence[Learner], batches: Batches, device: torch.device) -> tuple[Program, list[str]]:
    """The program for these learners, and notes about the choice.

    Args:
        learners: of one stack, trial after trial.
        batches: what they learn.
        device: where they train.

    Example:
        >>> program, notes = choose_program(learners, batches, torch.device("cpu"))
    """
    if device.type == "cpu":
        return OneByOne(learners, batches), []
    kernels = load_kernels(batches.dtype)
    notes = [] if kernels else ["Triton is missing or cannot be used here: a stack is slower without it"]
    # As large as the training batches, so that kernels compiled for this test are used in the run too.
    first = batches.tasks(0)[0].train[slice(learners[0].config.batch_size)]
    example = (read_inputs(first.inputs, dtype=batches.dtype), first.targets)
    sizes = _sizes(batches, len(first))
    alike: list[tuple[list[Learner], ModuleType | None]] = []  # with the kernels that they can use
    alone: list[Learner] = []
    for group in architectures(learners):
        methods = ", ".join(dict.fromkeys(learner.config.method for learner in group))
        usable = kernels
        reason = None if batches.share_inputs else "its trials do not share one tensor of inputs"
        reason = reason or reason_against_mapping(group, example, kernels, sizes)
        if reason and kernels and batches.share_inputs and reason_against_mapping(group, example, None) is None:
            notes.append(f"{methods}: train without Triton's kernels, which takes longer, because {reason}")
            usable, reason = None, None
        if reason is None and group[0].rehearsal is not None:
            reason = reason_against_rehearsal(group, batches)
        if reason is None:
            alike.append((group, usable))
        else:
            notes.append(f"{methods}: cannot be stacked and train one by one, because {reason}")
            alone += group
    programs: list[Program] = []
    for usable in dict.fromkeys(usable for _, usable in alike):
        groups = [group for group, own in alike if own is usable]
        # Rehearsals apart: if their steps cannot be captured, those of the others still are.
        usual = [group for group in groups if group[0].rehearsal is None]
        joint = [group for group in groups if group[0].rehearsal is not None and group[0].rehearsal.whole_stream]
        rehearsing = [group for group in groups if group not in (*usual, *joint)]
        programs += [Mapped(some, batches, usable) for some in (usual, rehearsing) if some]
        programs += [JointMapped([group], batches, usable) for group in joint]
    if alone:
        programs.append(OneByOne(alone, batches))
    program: Program = programs[0] if len(programs) == 1 else SideBySide(programs)
    return program, notes


def architectures(learners: Sequence[Learner]) -> list[list[Learner]]:
    """Groups of learners whose models and penalties can be called as one.

    Args:
        learners: of one stack.

    Example:
        >>> [len(group) for group in architectures(learners)]
        [80]
    """
    groups: dict[tuple, list[Learner]] = {}
    for learner in learners:
        verbs = None if form_of(learner.penalty) is not None else learner.penalty.custom_verbs
        own = None if learner.rehearsal is None else _rehearsal_of(learner.config)
        groups.setdefault((*_architecture(learner.config), verbs, own), []).append(learner)
    return list(groups.values())


def _rehearsal_of(config: Config) -> tuple:
    """What models with a rehearsal must share besides.

    A rehearsal remembers tensors by the names of the model's own, so those with heads of one kind are a group.
    """
    assert config.rehearsal is not None
    return (
        config.rehearsal,
        config.head,
        config.baseline_trace,
        *_foreign_settings(REHEARSALS, config.rehearsal, config),
    )


def _foreign_settings(registry: Registry, name: str, config: Config) -> list[object]:
    """The settings of a part of another package: it may use them for anything, so a section shares their values."""
    if registry[name].make.__module__.partition(".")[0] == "engram":
        return []
    return [getattr(config, setting) for setting in registry.facts(name).get("settings", {}).values()]


def _architecture(config: Config) -> tuple:
    """What models of a group must share; plain and matched heads can be computed as plastic ones (`as_plastic`)."""
    like_plastic = config.head == "matched" or (config.head == "linear" and not config.head_bias)
    head = "dhp" if like_plastic else config.head
    names = [name for name in names_of(agree="section") if name != "baseline_head"]
    # Settings without effect count as their defaults, except eta_range, which clamps a whole section, and the
    # optimizer's: a section also has room for what an optimizer remembers of weights that are never trained.
    kept = ("eta_range", "optimizer", *OPTIMIZERS[config.optimizer])
    values = [getattr(config, n) if n in kept or has_effect(n, config) else SETTINGS[n].default for n in names]
    step = config.penalty_step if config.protect == "in-force" else None  # each kind moves anchors at another moment
    plain = Optimizer.of(config).plain  # plain SGD has a kernel of its own
    return (head, *values, *_foreign_settings(HEADS, head, config), step, plain)


def load_kernels(dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernels, where there are a GPU and Triton, and the kernels support the type.

    Args:
        dtype: to compute in.

    Example:
        >>> load_kernels(torch.float64) is None
        True
    """
    if dtype != torch.float32 or not torch.cuda.is_available():
        return None
    try:
        from engram.engine.gpu import kernels
    except ImportError:
        return None
    return kernels


def reason_against_mapping(
    group: Sequence[Learner], example: tuple[Tensor, Tensor], kernels: ModuleType | None, sizes: Sequence[int] = ()
) -> str | None:
    """Why models cannot be trained as one, tried on copies; None if they can.

    Args:
        group: learners of one architecture.
        example: a batch of inputs and targets.
        kernels: those to be used, if any; they are compiled here.
        sizes: of the batches to come.

    Example:
        >>> reason_against_mapping(learners, (inputs, targets), None)
        'the model draws random numbers, which differ in a stack'
    """
    penalty = group[0].penalty
    if form_of(penalty) is None:
        verbs = [verb for verb in penalty.custom_verbs if verb != "consolidate"]
        return f"{type(penalty).__name__} defines its own `{verbs[0]}`"
    for name, module in group[0].model.named_modules():
        if "forward" in vars(module):  # a function of this one module, and not of its rows in a stack
            return f"the layer {name!r} has a `forward` that was set on it alone"
    if draws_numbers(group[0].model, *example):
        return "the model draws random numbers, which differ in a stack"
    if any(has_gradient_hooks(theta) for learner in group for theta in learner.model.parameters()):
        return "the model has hooks on its gradients"
    # One that diverged, as may be found on a resume, has numbers that cannot be compared.
    tried = [learner for learner in group if learner.learning and is_finite(learner.model)]
    if not tried:
        return "all of its trials have diverged"
    # Any two networks that Engram builds are alike if their heads are of one kind; custom ones may all differ.
    if not _is_custom(group[0]):
        kinds = {kind_of_head(learner.model): learner for learner in reversed(tried)}
        tried = [*kinds.values(), tried[-1]]
    expected = [copy.deepcopy(learner.model) for learner in tried]
    inputs, targets = (tensor[None] for tensor in example)
    try:
        section = _section_of_copies(tried, kernels)
        before = {name: tensor.clone() for name, tensor in _state(section).items()}
        logits = section.logits(example[0], shared=True)
        how = (range(logits.shape[2]), slice(0, len(tried)))
        if kernels is not None:
            with kernels.compiled_ahead(), suppress(Exception):  # without results, anything may go wrong
                for size in sizes:
                    part = (inputs[:, :size].contiguous(), targets[:, :size].contiguous())
                    _section_of_copies(tried, kernels).step(*part, *how)
        losses = section.step(inputs, targets, *how)
        section.catch_up(how[1], inputs.shape[1], 1)
    except torch.cuda.OutOfMemoryError:  # which says nothing about the model
        raise
    except Exception as reason:  # of PyTorch, of Triton's compiler, or of the model itself
        return f"PyTorch cannot map the model ({(str(reason).strip() or type(reason).__name__).splitlines()[0]})"
    for row, model in enumerate(expected):
        names = dict(section.rows.names[row]) | {name: name for name, _ in model.named_buffers()}
        states = ({own: state[name][row] for own, name in names.items()} for state in (before, _state(section)))
        seen = Seen(logits[row], losses[row], *states)
        difference = _difference(model, example, seen)
        if difference is not None:
            return difference
    return None


def _sizes(batches: Batches, largest: int) -> list[int]:
    """A size of each kind of batch that is to come: kernels are compiled for powers of two, multiples of 16, and 1."""
    samples = {len(task.train) for stream in batches.streams for task in stream}
    sizes = sorted({largest} | {number % largest for number in samples} - {0})
    return list({((size - 1).bit_length(), size % 16 == 0, size == 1): size for size in sizes}.values())


def _section_of_copies(learners: Sequence[Learner], kernels: ModuleType | None) -> Section:
    """Copies of these models without their penalties, about to take a step of plain SGD."""
    plain = {"learning_rate": TRIAL_RATE, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    twins = [copy.deepcopy(learner.model) for learner in learners]
    configs = [learner.config.replace(**plain) for learner in learners]
    copies = [Learner(config, 0, twin, NoPenalty(twin)) for config, twin in zip(configs, twins, strict=True)]
    section = Section(copies, kernels)
    section.begin_task()
    return section


@dataclass(frozen=True)
class Seen:
    """What a model did in a stack: its logits, its loss, and its tensors before and after a step."""

    logits: Tensor
    loss: Tensor
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def _difference(model: nn.Module, example: tuple[Tensor, Tensor], seen: Seen) -> str | None:
    """How a model alone differs from what was seen of it in a stack; None if it does not."""
    with torch.no_grad():
        logits = model.eval()(example[0])
    trained = {name: theta for name, theta in model.named_parameters() if theta.requires_grad}
    held = {name: theta.detach().clone() for name, theta in trained.items()}
    loss = nn.functional.cross_entropy(model.train()(*example), example[1])
    learns = loss.requires_grad  # a head may only remember
    gradients = (
        torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if learns else [None] * len(trained)
    )
    tolerance = _tolerance(logits)
    for alone, mapped in ((logits, seen.logits), (loss.detach(), seen.loss)):
        if not _near(alone, mapped, tolerance):
            return "the model computes something else when it is mapped"
    largest = max((float(gradient.norm()) for gradient in gradients if gradient is not None), default=0.0)
    for name, gradient in zip(trained, gradients, strict=True):
        written = held[name] - trained[name].detach()  # by the pass itself, as a head may do
        step = (seen.before[name] - seen.after[name] - written) / TRIAL_RATE
        if not _near(torch.zeros_like(step) if gradient is None else gradient, step, tolerance, largest):
            return f"{name!r} gets another gradient when the model is mapped"
    for name, buffer in model.named_buffers():
        moved = not torch.equal(buffer, seen.before[name])
        if moved and torch.equal(seen.after[name], seen.before[name]):
            return f"the model replaces its buffer {name!r} rather than writing to it"
        if buffer.is_floating_point() and not _near(buffer, seen.after[name], tolerance):
            return f"the model writes something else into its buffer {name!r} when it is mapped"
    return None


def _near(alone: Tensor, mapped: Tensor, tolerance: float, largest: float = 0.0) -> bool:
    """Equal up to rounding, by the norm of the difference; `largest` is that of the largest of several gradients."""
    return float((alone - mapped).norm()) <= tolerance * (float(alone.norm()) + 0.1 * largest) + 1e-5


def _tolerance(logits: Tensor) -> float:
    """What rounding may change, relative to the size of a tensor, in a model with these logits.

    A buffer may be more precise than what is written into it, so its own type says nothing. The tolerance is coarse
    where products are in TF32: rounding then changes the sign of a few activations.
    """
    if logits.dtype == torch.float64:
        return 1e-6
    return 0.2 if logits.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 1e-2


def _state(section: Section) -> dict[str, Tensor]:
    return {**section.rows.parameters, **section.rows.buffers}


def _is_custom(learner: Learner) -> bool:
    head = getattr(learner.model, "head", None)
    return learner.config.network == "custom" or not type(head).__module__.startswith("engram.")
