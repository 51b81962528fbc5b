"""One step of one model: plain SGD on Eq. 4, with what autograd would do at a greater price written down.

A linear layer's gradient is a product, g = dᵀ x, of what entered the layer and the loss's gradient by what came out.
So θ − lr g is one product that adds to θ in place: the gradient itself, as large as the weights, is never made unless
Synaptic Intelligence needs it. The penalty's part of the step is an affine map of each weight.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.engine.chains import chain_of
from engram.engine.learner import Learner
from engram.nn.classes import mask_logits
from engram.penalties import SI, Penalty
from engram.penalties.base import moved_shift
from engram.penalties.per_sample import find_product_layers


class Descent(Protocol):
    """How one learner takes its steps."""

    def begin_task(self, classes: Sequence[int]) -> None: ...

    def steps(self) -> Any: ...  # a context in which steps are taken

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor: ...  # the loss before it


def own_method(penalty: Penalty) -> str | None:
    """The name of a method by which a penalty steps otherwise than the quadratic form; None if there is none."""
    kind = type(penalty)
    for name in ("loss", "gradient", "pull", "proximal_step", "after_backward", "after_step"):
        usual = {getattr(Penalty, name), getattr(SI, name)}
        if getattr(kind, name) not in usual or name in vars(penalty):
            return name
    return None


def check_step(penalty: Penalty, step: str) -> None:
    """Refuse a loss of a penalty's own that the proximal step, made for the quadratic form, would pass over."""
    kind = type(penalty)

    def is_own(name: str) -> bool:
        return getattr(kind, name) is not getattr(Penalty, name) or name in vars(penalty)

    own = [name for name in ("loss", "gradient") if is_own(name)]
    if own and step == "proximal" and not is_own("proximal_step"):
        raise InputError(
            f"{kind.__name__} has a `{own[0]}` of its own but not a `proximal_step`: set penalty_step to gradient"
        )


class Scratch(threading.local):
    """Memory for what is between two results of one step; each thread has its own, for all its models."""

    def __init__(self) -> None:
        self.kept: dict[tuple, Tensor] = {}

    def like(self, theta: Tensor, use: str) -> Tensor:
        key = (use, theta.shape, theta.dtype, theta.device)
        if key not in self.kept:
            self.kept[key] = torch.empty_like(theta, memory_format=torch.contiguous_format)
        return self.kept[key]


SCRATCH = Scratch()


GainAndShift = tuple[Tensor, Tensor]


class ParameterStep:
    """A step of one parameter:  θ ← gain (θ − lr g) + shift, the proximal one; or  θ ← gain θ + shift − lr g."""

    def __init__(self, theta: Tensor, rate: float, kind: str, pull: GainAndShift | None, path: Tensor | None):
        self.theta = theta
        self.rate = rate
        self.pull_before = pull if kind == "gradient" else None
        self.pull_after = pull if kind == "proximal" else None
        self.pulled = pull is not None
        self.path = path

    def take(self, gradient: Tensor) -> None:
        theta, path = self.theta, self.path
        if path is None:
            self._descend(gradient)
        elif not self.pulled:  # Δθ = −lr g
            path.addcmul_(gradient, gradient, value=self.rate)
            self._descend(gradient)
        else:
            before = SCRATCH.like(theta, "before").copy_(theta)
            self._descend(gradient)
            path.addcmul_(gradient, before.sub_(theta))  # path ← path − g Δθ

    def take_product(self, delta: Tensor, entered: Tensor) -> None:
        """The step with g = δᵀ x."""
        if self.path is not None:
            self.take(torch.mm(delta.t(), entered, out=SCRATCH.like(self.theta, "gradient")))
            return
        self._pull(self.pull_before)
        self.theta.addmm_(delta.t(), entered, alpha=-self.rate)
        self._pull(self.pull_after)

    def _descend(self, gradient: Tensor) -> None:
        self._pull(self.pull_before)
        self.theta.add_(gradient, alpha=-self.rate)
        self._pull(self.pull_after)

    def _pull(self, pull: GainAndShift | None) -> None:
        if pull is not None:
            gain, shift = pull
            torch.addcmul(shift, self.theta, gain, out=self.theta)


class FactoredDescent:
    """Steps for the penalties of the quadratic form."""

    def __init__(self, learner: Learner, factored: Sequence[str]):
        self.learner = learner
        self.factored = {f"{name}.": learner.model.get_submodule(name) for name in factored}
        self.seen: dict[str, tuple[Tensor, Tensor, int]] = {}  # what entered, what came out, and its version

    def begin_task(self, classes: Sequence[int]) -> None:
        self.classes = tuple(classes)
        # What is trained may change from task to task: a person may freeze a layer when a task has been learned.
        trained = {n: theta for n, theta in self.learner.model.named_parameters() if theta.requires_grad}
        self.layers = {prefix: layer for prefix, layer in self.factored.items() if _is_trained_linear(layer)}
        deferred = {prefix + name for prefix, layer in self.layers.items() for name in ("weight", "bias")}
        self.direct = {n: theta for n, theta in trained.items() if n not in deferred}
        config, penalty = self.learner.config, self.learner.penalty
        pull = penalty.pull(config.learning_rate, config.penalty_step)
        pulls = {} if pull is None else {name: (pull.gain[name], pull.shift[name]) for name in pull.gain}
        # The anchors of weights beside a trace move with it: their shift is written anew at every step.
        self.moving = {name: pulls[name][1].clone() for name in penalty.fast if name in pulls}
        pulls |= {name: (pulls[name][0], shift) for name, shift in self.moving.items()}
        paths = penalty.path if isinstance(penalty, SI) else {}
        steps = {
            name: ParameterStep(theta, config.learning_rate, config.penalty_step, pulls.get(name), paths.get(name))
            for name, theta in trained.items()
        }
        self.layer_steps = {prefix: (steps[prefix + "weight"], steps.get(prefix + "bias")) for prefix in self.layers}
        self.direct_steps = [steps[name] for name in self.direct]

    def _watch(self, prefix: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:
                output.requires_grad_()
            self.seen[prefix] = (args[0], output, output._version)
            return output.view_as(output)  # hooks that others put on what came out are then theirs, behind ours

        return hook

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within it, the factored layers are watched, and autograd need not make their gradients."""
        hooks = [layer.register_forward_hook(self._watch(prefix)) for prefix, layer in self.layers.items()]
        weights = [theta for layer in self.layers.values() for theta in layer.parameters(recurse=False)]
        for theta in weights:
            theta.requires_grad_(False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.seen.clear()
            for theta in weights:
                theta.requires_grad_(True)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = mask_logits(self.learner.model(inputs, targets), self.classes)
        loss = F.cross_entropy(logits, targets)
        outputs = []
        for prefix, (_, output, version) in self.seen.items():
            if output._version != version:
                raise InputError(f"what came out of {prefix.removesuffix('.')!r} was changed in place")
            outputs.append(output)
        gradients = torch.autograd.grad(loss, [*outputs, *self.direct.values()], allow_unused=True)
        with torch.no_grad():
            proximal = self.learner.config.penalty_step == "proximal"
            if not proximal:  # the gradient's step is of the weights that the loss was of
                self._move_anchors()
            for prefix, delta in zip(self.seen, gradients, strict=False):
                self._step_layer(prefix, delta)
            direct = list(zip(self.direct, self.direct_steps, gradients[len(outputs) :], strict=True))
            for _, step, gradient in [entry for entry in direct if entry[0] not in self.moving]:
                step.take(torch.zeros_like(step.theta) if gradient is None else gradient)
            if proximal:
                self._move_anchors()
            for _, step, gradient in [entry for entry in direct if entry[0] in self.moving]:
                step.take(torch.zeros_like(step.theta) if gradient is None else gradient)
        return loss.detach()

    def _move_anchors(self) -> None:
        config, penalty = self.learner.config, self.learner.penalty
        for name, shift in self.moving.items():
            pull = penalty.pull(config.learning_rate, config.penalty_step)
            assert pull is not None
            shift.copy_(moved_shift(pull, name, penalty.fast))

    def _step_layer(self, prefix: str, delta: Tensor | None) -> None:
        weight, bias = self.layer_steps[prefix]
        if delta is None:  # nothing was made of what came out; a penalty pulls all the same
            weight.take(torch.zeros_like(weight.theta))
        else:
            weight.take_product(delta, self.seen[prefix][0])
        if bias is not None:
            bias.take(torch.zeros_like(bias.theta) if delta is None else delta.sum(dim=0))


class ContractDescent:
    """Steps by a penalty's own methods, called as in anybody's loop."""

    def __init__(self, learner: Learner):
        self.learner = learner
        self.optimizer = torch.optim.SGD(learner.model.parameters(), lr=learner.config.learning_rate)

    def begin_task(self, classes: Sequence[int]) -> None:
        self.classes = tuple(classes)

    @contextmanager
    def steps(self) -> Iterator[None]:
        yield

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        learner = self.learner
        logits = mask_logits(learner.model(inputs, targets), self.classes)
        loss = F.cross_entropy(logits, targets)
        self.optimizer.zero_grad()
        if learner.config.penalty_step == "gradient":
            (loss + learner.penalty.loss()).backward()
            learner.penalty.after_backward()
            self.optimizer.step()
        else:
            loss.backward()
            learner.penalty.after_backward()
            self.optimizer.step()
            learner.penalty.proximal_step(learner.config.learning_rate)
        learner.penalty.after_step()
        return loss.detach()


def factored_layers(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """The names of the linear layers whose gradients may stay products; tried out on a small batch."""
    names = [link.name for link in chain_of(model) if link.sole and _is_trained_linear(link.layer)]
    twin = copy.deepcopy(model).train()
    found = find_product_layers(twin, inputs, targets)  # not those that see more than one row a sample
    names = [name for name in names if f"{name}." in found]
    return names if _outputs_stay(twin, names, inputs, targets) else []


def _is_trained_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and all(
        theta.requires_grad and not has_gradient_hooks(theta) for theta in layer.parameters()
    )


def has_gradient_hooks(theta: Tensor) -> bool:
    """Whether something is to be done with a gradient as autograd makes it; it is then not for us to make."""
    return bool(theta._backward_hooks or getattr(theta, "_post_accumulate_grad_hooks", None))


def _outputs_stay(model: nn.Module, names: Sequence[str], inputs: Tensor, targets: Tensor) -> bool:
    """Whether what comes out of the layers is left as it is: an activation in place would change it under our hands."""
    kept: list[tuple[Tensor, int]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_()
        kept.append((output, output._version))

    for name in names:
        model.get_submodule(name).requires_grad_(False).register_forward_hook(keep)
    try:
        model(inputs, targets).sum().backward()
    except RuntimeError:
        return False
    return all(output._version == version for output, version in kept)
