"""One step of one model on Eq. 4, with the gradients of linear layers left as products.

A linear layer's gradient is a product, g = dᵀ x, of its input and the loss's gradient with respect to its output.
So θ − lr g is one product that is added to θ in place: the gradient itself, as large as the weights, is never computed
unless the penalty follows the path of the weights, or the optimizer is not plain SGD. The penalty's part of the step is
an affine map of each weight.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.engine.cpu.chain import Slopes, known_chain
from engram.engine.inspection import chain_of, has_gradient_hooks
from engram.engine.learner import Learner
from engram.engine.weight_step import OptimizedStep, prepare_state, weight_step
from engram.nn.classes import mask_logits
from engram.penalties.per_sample import find_product_layers
from engram.penalties.quadratic import Quadratic, form_of
from engram.penalties.step import WeightStep, moved_shift


class Descent(Protocol):
    """How one learner takes its steps."""

    def begin_task(self, classes: Sequence[int]) -> None: ...

    def steps(self) -> Any: ...  # a context in which steps are taken

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor: ...  # the loss before it


class FactoredDescent:
    """Steps for the penalties of the quadratic form.

    Args:
        learner: whose model.
        penalty: its penalty.
        factored: the names of the linear layers whose gradients stay products.

    Example:
        >>> descent = FactoredDescent(learner, form_of(learner.penalty), ["features.1"])
        >>> descent.begin_task(classes=(0, 1))
        >>> with descent.steps():
        ...     loss = descent.step(inputs, targets)
    """

    def __init__(self, learner: Learner, penalty: Quadratic, factored: Sequence[str]):
        self.learner = learner
        self.penalty = penalty
        self.factored = {f"{name}.": learner.model.get_submodule(name) for name in factored}
        self.seen: dict[str, tuple[Tensor, Tensor, int]] = {}  # what entered, what came out, and its version

    def begin_task(self, classes: Sequence[int]) -> None:
        self.classes = tuple(classes)
        # What is trained may change from task to task: a layer may be frozen when a task has been learned.
        trained = {n: theta for n, theta in self.learner.model.named_parameters() if theta.requires_grad}
        self.layers = {prefix: layer for prefix, layer in self.factored.items() if _is_trained_linear(layer)}
        deferred = {prefix + name for prefix, layer in self.layers.items() for name in ("weight", "bias")}
        self.direct = {n: theta for n, theta in trained.items() if n not in deferred}
        config, penalty = self.learner.config, self.penalty
        self.optimizer = prepare_state(self.learner, trained)
        pull = self.optimizer.pull_of(penalty, config.penalty_step)
        pulls = {} if pull is None else {name: (pull.gain[name], pull.shift[name]) for name in pull.gain}
        # The anchors of weights that carry a trace move with it: their shift is computed at every step.
        self.moving = {name: pulls[name][1].clone() for name in penalty.fast if name in pulls}
        pulls |= {name: (pulls[name][0], shift) for name, shift in self.moving.items()}
        paths = {} if penalty.path_group is None else penalty.group(penalty.path_group)
        steps = {}
        for name, theta in trained.items():
            slots = self.optimizer.slots_of(name, self.learner.optimizer_state)
            of_penalty = (config.penalty_step, pulls.get(name), paths.get(name))
            steps[name] = weight_step(theta, self.optimizer, slots, *of_penalty)
        self.layer_steps = {prefix: (steps[prefix + "weight"], steps.get(prefix + "bias")) for prefix in self.layers}
        self.direct_steps = {name: steps[name] for name in self.direct}
        self.chain = known_chain(self.learner.model, self.layers)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within the `with` block, the factored layers are watched, and autograd does not make their gradients."""
        if self.chain is not None:
            yield
            return

        def watch(prefix: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if not output.requires_grad:
                output.requires_grad_()
            self.seen[prefix] = (args[0], output, output._version)
            return output.view_as(output)  # so that hooks of others on the output come after this one

        hooks = [layer.register_forward_hook(partial(watch, prefix)) for prefix, layer in self.layers.items()]
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
        if self.chain is None:
            slopes = self._slopes(inputs, targets)
        else:
            with torch.no_grad():
                slopes = self.chain.slopes(inputs, targets, self.classes)
        if not (slopes.products or slopes.direct):  # a head that only remembers: there is nothing to train
            return slopes.loss
        with torch.no_grad():
            proximal = self.learner.config.penalty_step == "proximal"
            if not proximal:  # the gradient's step starts from the weights that the loss was computed with
                self._move_anchors()
            for prefix, delta, entered in slopes.products:
                weight, bias = self.layer_steps[prefix]
                if delta is None:  # the output was not used; a penalty still pulls
                    _take(weight, None)
                else:
                    weight.take_product(delta, entered)
                if bias is not None:
                    _take(bias, None if delta is None else delta.sum(dim=0))
            for name, step in self.direct_steps.items():
                if name not in self.moving:
                    _take(step, slopes.direct[name])
            if proximal:
                self._move_anchors()
            for name, step in self.direct_steps.items():
                if name in self.moving:
                    _take(step, slopes.direct[name])
        return slopes.loss

    def _slopes(self, inputs: Tensor, targets: Tensor) -> Slopes:
        """By autograd, for any model."""
        logits = mask_logits(self.learner.model(inputs, targets), self.classes)
        loss = F.cross_entropy(logits, targets)
        if not loss.requires_grad:
            return Slopes(loss, (), {})
        for prefix, (_, output, version) in self.seen.items():
            if output._version != version:
                raise InputError(f"the output of {prefix.removesuffix('.')!r} was changed in place")
        outputs = [output for _, output, _ in self.seen.values()]
        gradients = torch.autograd.grad(loss, [*outputs, *self.direct.values()], allow_unused=True)
        products = [
            (prefix, delta, entered)
            for (prefix, (entered, _, _)), delta in zip(self.seen.items(), gradients, strict=False)
        ]
        return Slopes(loss.detach(), products, dict(zip(self.direct, gradients[len(outputs) :], strict=True)))

    def _move_anchors(self) -> None:
        for name, shift in self.moving.items():
            pull = self.optimizer.pull_of(self.penalty, self.learner.config.penalty_step)
            assert pull is not None
            shift.copy_(moved_shift(pull, name, self.penalty.fast))


def _take(step: WeightStep | OptimizedStep, gradient: Tensor | None) -> None:
    """A step along the gradient; a penalty also pulls a weight that the loss does not depend on."""
    step.take(torch.zeros_like(step.theta) if gradient is None else gradient)


def descent_of(learner: Learner, inputs: Tensor, targets: Tensor) -> Descent:
    """How a learner takes its steps: by the quadratic form, or by its penalty's own verbs.

    Args:
        learner: any.
        inputs: a small batch, on which its model is tried.
        targets: its targets.

    Example:
        >>> descent = descent_of(learner, inputs, targets)
    """
    form = form_of(learner.penalty)
    if form is None:
        return ContractDescent(learner)
    return FactoredDescent(learner, form, factored_layers(learner.model, inputs, targets))


class ContractDescent:
    """Steps by a penalty's own verbs, called as in a custom loop."""

    def __init__(self, learner: Learner):
        self.learner = learner

    def begin_task(self, classes: Sequence[int]) -> None:
        self.classes = tuple(classes)
        parameters = dict(self.learner.model.named_parameters())
        optimizer = prepare_state(self.learner, parameters)
        self.weight_steps = [
            weight_step(
                theta, optimizer, optimizer.slots_of(name, self.learner.optimizer_state), "proximal", None, None
            )
            for name, theta in parameters.items()
        ]

    @contextmanager
    def steps(self) -> Iterator[None]:
        yield

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        learner = self.learner
        logits = mask_logits(learner.model(inputs, targets), self.classes)
        loss = F.cross_entropy(logits, targets)
        if not loss.requires_grad:
            return loss
        learner.model.zero_grad()
        learner.penalty.before_backward(logits, targets)
        in_gradient = learner.config.penalty_step == "gradient"
        (loss + learner.penalty.loss() if in_gradient else loss).backward()
        learner.penalty.after_backward()
        self._take_steps()
        if not in_gradient:
            learner.penalty.proximal_step(learner.config.learning_rate)
        learner.penalty.after_step()
        return loss.detach()

    @torch.no_grad()
    def _take_steps(self) -> None:
        for step in self.weight_steps:
            if step.theta.grad is not None:
                step.take(step.theta.grad)


def factored_layers(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """The names of the linear layers whose gradients may stay products, tried on a small batch.

    Args:
        model: any.
        inputs: a small batch.
        targets: its targets.

    Example:
        >>> factored_layers(Network(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), head), inputs, targets)
        ['features.0']
    """
    names = [link.name for link in chain_of(model) if link.sole and _is_trained_linear(link.layer)]
    twin = copy.deepcopy(model).train()
    found = find_product_layers(twin, inputs, targets)  # not those that see more than one row per sample
    names = [name for name in names if f"{name}." in found]
    return names if _outputs_stay(twin, names, inputs, targets) else []


def _is_trained_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and all(
        theta.requires_grad and not has_gradient_hooks(theta) for theta in layer.parameters()
    )


def _outputs_stay(model: nn.Module, names: Sequence[str], inputs: Tensor, targets: Tensor) -> bool:
    """Whether nothing changes the outputs of the layers in place, as some activations do."""
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
