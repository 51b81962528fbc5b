"""A section of a stack: models of one architecture, called as one by `torch.func.vmap`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from engram.common.tensor_file import tensors_under
from engram.engine.gpu.heads import LateMoment, are_mixed, as_plastic, is_movable, writes_sums
from engram.engine.gpu.layers import Products, cross_entropy, gradient_of, prepare
from engram.engine.gpu.rows import Rows, Step, steps_of, take_step
from engram.engine.learner import DYNAMICS, Learner, read_dynamics
from engram.engine.optimizer import Optimizer
from engram.nn.dhp import DHPSoftmax

Tensors = dict[str, Tensor]
Factors = tuple[Tensor, Tensor]  # δ and x, of a gradient δ xᵀ


class Section:
    """Learners whose models are alike. Everything has their axis in front: parameters, batches, losses.

    Args:
        learners: of one architecture, trial after trial.
        kernels: the Triton kernels, if there are any.
        slot: (1,), which holds the number of the step in its piece; None for 0.
        patched: whether layers may use the kernels too, and not only steps.

    Example:
        >>> section = Section(learners, None)
        >>> section.begin_task()
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        kernels: ModuleType | None,
        slot: Tensor | None = None,
        patched: bool = True,
    ):
        self.learners = list(learners)
        self.kernels = kernels
        # A plastic head computes what a plain or a matched one does, with a constant trace; the reverse does not hold.
        one = max(self.learners, key=lambda learner: learner.config.plastic).model
        one = as_plastic(one) if are_mixed([learner.model for learner in self.learners]) else one
        self.skeleton = copy.deepcopy(one).train()
        self.products = Products()
        self.still = copy.deepcopy(one).eval()  # to evaluate
        self.rows = Rows([learner.model for learner in self.learners])
        self.moments: dict[str, LateMoment] = {}
        if patched and kernels is not None:
            heads = [name for name, module in self.skeleton.named_modules() if writes_sums(module)]
            moments = {name: self.rows.buffers.get(f"{name}.moment") for name in heads}
            slot = torch.zeros(1, dtype=torch.int64, device=self.device) if slot is None else slot
            self.moments = {name: LateMoment(m, slot, kernels) for name, m in moments.items() if m is not None}
            # With Adam it is faster to compute the gradient first, as measured.
            plain = Optimizer.of(self.learners[0].config).plain
            prepare(self.skeleton, kernels, self.products if plain else None, self.moments)
        traceless = [not read_dynamics(learner.model) for learner in self.learners]
        self.traceless = torch.tensor(traceless, device=self.device)[:, None]
        self.take_step = take_step if kernels is None else kernels.take_step
        self.steps: dict[str, Step] = {}

    def __len__(self) -> int:
        return len(self.learners)

    @property
    def device(self) -> torch.device:
        return next(iter((self.rows.parameters or self.rows.buffers).values())).device

    def begin_task(self) -> None:
        self.steps = {}  # free the last task's before this one's are made
        self.steps = steps_of(self.learners, self.rows)

    def step(self, inputs: Tensor, targets: Tensor, classes: Sequence[int], rows: slice) -> Tensor:
        """One step of the models in `rows`; returns their losses before it.

        Args:
            inputs: (T, B, ...), a batch of each trial; each trial has as many models, one trial after another.
            targets: (T, B).
            classes: the outputs that take part.
            rows: whose.
        """
        leaves, fixed, buffers = self.tensors_of_step(rows, (len(inputs), -1))
        for moment in self.moments.values():
            moment.begin_step(rows, inputs.shape[1])

        def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            logits = functional_call(self.skeleton, (parameters, buffers), (x, y))
            return cross_entropy(logits, y, classes, self.kernels)

        of_a_trial = vmap(loss, in_dims=(0, 0, None, None), randomness="different")
        losses = vmap(of_a_trial, randomness="different")({**leaves, **fixed}, buffers, inputs, targets)
        if not losses.requires_grad:  # heads that only remember: there is nothing to train
            return losses.flatten()
        self.descend(leaves, self.gradients(losses, leaves), rows)
        return losses.detach().flatten()

    def tensors_of_step(self, rows: slice, axes: tuple[int, int]) -> tuple[Tensors, Tensors, Tensors]:
        """What is trained, the other parameters, and the buffers, of the models in `rows`, by name.

        Args:
            rows: whose.
            axes: the number of trials, and of models of a trial.
        """
        # Leaves of their own graph: as views of all rows they would lead the gradient back to all rows.
        leaves = {n: self.rows.parameters[n][rows].detach().unflatten(0, axes).requires_grad_() for n in self.steps}
        fixed = {n: t[rows].unflatten(0, axes) for n, t in self.rows.parameters.items() if n not in self.steps}
        return leaves, fixed, {name: buffer[rows].unflatten(0, axes) for name, buffer in self.rows.buffers.items()}

    def gradients(self, losses: Tensor, leaves: Tensors) -> list[Tensor | Factors]:
        """Of each model's loss, for each of the leaves; zeros for one that is not used: a penalty pulls it too.

        The gradient of a linear layer's weight that was used once comes as the factors of a product.
        """
        # The sum of all losses: with a tensor of ones in its place PyTorch would import sympy, which takes seconds.
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        return [self._gradient(name, leaf, g) for (name, leaf), g in zip(leaves.items(), found, strict=True)]

    def _gradient(self, name: str, leaf: Tensor, gradient: Tensor | None) -> Tensor | Factors:
        factors = self.products.take(name)
        if len(factors) == 1 and gradient is None:
            return factors[0]
        if factors:
            product = gradient_of(factors).view(leaf.shape)
            return product if gradient is None else product + gradient
        return torch.zeros_like(leaf) if gradient is None else gradient

    def descend(self, leaves: Tensors, gradients: Sequence[Tensor | Factors], rows: slice) -> None:
        """Take the step of each parameter along its gradient."""
        if self.take_step is not take_step:  # which counts by itself
            self._tick(rows)
        proximal = self.learners[0].config.penalty_step == "proximal"
        if not proximal:  # the gradient's step starts from the weights that the loss was computed with
            self._move_anchors()
        for moving in (False, True):
            if moving and proximal:
                self._move_anchors()
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
                if (self.steps[name].moving is not None) != moving:
                    continue
                theta, step = leaf.detach().flatten(0, 1), self.steps[name][rows]
                if isinstance(gradient, tuple):
                    assert self.kernels is not None
                    self.kernels.take_product_step(theta, *gradient, step)
                else:
                    self.take_step(theta, gradient.flatten(0, 1), step)

    def catch_up(self, rows: slice, batch_size: int, num_steps: int) -> None:
        """Do what the last steps have left for later, after `BATCHES_KEPT` of them at the latest."""
        for moment in self.moments.values():
            moment.add(rows, batch_size, num_steps)

    def _tick(self, rows: slice) -> None:
        """Count the step, for the kernel of Adam."""
        slots = next((step.slots for step in self.steps.values()), None)
        if slots is not None and slots.clock is not None:
            slots.clock.tick(rows)

    @torch.no_grad()
    def _move_anchors(self) -> None:
        """The fast parts of weights that carry a trace, at its current value."""
        for step in self.steps.values():
            if step.moving is None:
                continue
            moving, name = step.moving, step.moving.layer
            layer = self.still.get_submodule(name)
            if self.kernels is not None and isinstance(layer, DHPSoftmax) and is_movable(layer):
                alpha, hebb = self.rows.parameters[f"{name}.alpha"], self.rows.buffers[f"{name}.hebb"]
                rows = (step.gain, moving.shift, step.shift, moving.models, moving.held)
                self.kernels.move_shift(alpha, hebb, *rows, moving.is_slope, layer.trace_scale)
            else:
                moving.move(step, self._fast_parts(name, moving.models))

    def _fast_parts(self, name: str, models: Tensor) -> Tensor:
        """What the layer of this name adds to its slow weights, in each of these models: (models, *shape)."""
        layer = self.still.get_submodule(name)
        tensors = {**self.rows.parameters, **self.rows.buffers}
        own = {n: tensor.detach()[models] for n, tensor in tensors_under(tensors, f"{name}.").items()}
        if type(layer) is DHPSoftmax:  # elementwise, so it needs no mapping
            return layer.fast_part_of(own["alpha"], own["hebb"])

        def fast_part(own: dict[str, Tensor]) -> Tensor:
            return functional_call(Called(layer, lambda head: head.fast_part()), own, ())

        return vmap(fast_part)({f"model.{n}": tensor for n, tensor in own.items()})

    @torch.no_grad()
    def logits(self, inputs: Tensor, shared: bool, rows: slice | None = None) -> Tensor:
        """(N, B, C) of inputs (N, B, ...), or of (B, ...) that all share; traces and statistics are only read."""
        call = Called(self.still, lambda model, x: model(x))
        return self.mapped(call, (inputs,), in_dims=(None if shared else 0,), rows=rows)

    @torch.no_grad()
    def dynamics(self) -> Tensor:
        """(N, 3): η, ‖Hebb‖ and ‖α‖, NaN without a trace."""
        if not read_dynamics(self.still):
            return torch.full((len(self), len(DYNAMICS)), float("nan"), device=self.device)
        seen = self.mapped(Called(self.still, read_dynamics))
        return torch.stack([seen[name] for name in DYNAMICS], dim=1).masked_fill(self.traceless, float("nan"))

    def mapped(
        self,
        call: Called,
        arguments: tuple[Any, ...] = (),
        in_dims: tuple[int | None, ...] = (),
        rows: Tensor | slice | None = None,
    ) -> Any:
        """`call` for every model of the section, or for some `rows`, as one."""

        def state_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {f"model.{n}": t.detach() if rows is None else t.detach()[rows] for n, t in tensors.items()}

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *own: Any) -> Any:
            return functional_call(call, (parameters, buffers), own)

        states = (state_of(self.rows.parameters), state_of(self.rows.buffers))
        return vmap(one, in_dims=(0, 0, *in_dims), randomness="different")(*states, *arguments)


class Called(nn.Module):
    """A function of a model as a module, so that the model's parameters can be replaced by those of a stack."""

    def __init__(self, model: nn.Module, work: Callable[..., Any]):
        super().__init__()
        self.model = model
        self.work = work

    def forward(self, *arguments: Any) -> Any:
        return self.work(self.model, *arguments)
