"""Optimizers: how the gradient of a weight becomes its step. Each is a function of tensors, written as PyTorch has it.

What an optimizer remembers of a weight is a few tensors, so that stacks and checkpoints need no knowledge of it.
`gpu/kernels/step.py` has the same equations in Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engram.config.settings import Config
from engram.engine.learner import Learner
from engram.penalties.quadratic import Quadratic
from engram.penalties.step import SCRATCH
from engram.penalties.terms import Pull

State = dict[str, Tensor]  # what an optimizer remembers; a tensor of one weight is called "SLOT.NAME OF THE WEIGHT"
Slots = Mapping[str, Tensor]  # of one weight, by slot


def sgd(
    theta: Tensor, gradient: Tensor, velocity: Tensor | None, *, rate: float, momentum: float, weight_decay: float
) -> None:
    """SGD with momentum μ and weight decay, in place:

    d = g + decay θ        v ← μ v + d        θ ← θ − lr v

    Args:
        theta: θ.
        gradient: g.
        velocity: v, 0 at first; None without momentum, where v is d.
        rate: lr.
        momentum: μ.
        weight_decay: decay.

    Example:
        >>> sgd(theta, gradient, velocity, rate=0.01, momentum=0.9, weight_decay=0.0)
    """
    move = _decayed(theta, gradient, weight_decay)
    if velocity is not None:
        move = velocity.mul_(momentum).add_(move)
    theta.add_(move, alpha=-rate)


def adam(
    theta: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Adam (Kingma & Ba 2015), in place:

    d = g + decay θ        m ← β₁ m + (1 − β₁) d        v ← β₂ v + (1 − β₂) d²
    θ ← θ − lr m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)

    Args:
        theta: θ.
        gradient: g.
        mean: m, 0 at first.
        square: v, 0 at first.
        step: t, 1 for the first step.
        rate: lr.
        beta1: β₁.
        beta2: β₂.
        eps: ε.
        weight_decay: decay.

    Example:
        >>> adam(theta, g, mean, square, 1, rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    """
    move = _decayed(theta, gradient, weight_decay)
    mean.lerp_(move, 1 - beta1)
    square.mul_(beta2).addcmul_(move, move, value=1 - beta2)
    divisor = torch.sqrt(square, out=SCRATCH.like(theta, "divisor"))
    divisor.div_((1 - beta2**step) ** 0.5).add_(eps)
    theta.addcdiv_(mean, divisor, value=-rate / (1 - beta1**step))


def adamw(
    theta: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, *, weight_decay: float, **adams: float
) -> None:
    """AdamW (Loshchilov & Hutter 2019), in place: the decay is apart from the gradient.

    θ ← (1 − lr decay) θ,  then Adam's step without decay. The arguments are those of `adam`.

    Example:
        >>> adamw(theta, g, mean, square, 1, rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    """
    if weight_decay:
        theta.mul_(1 - adams["rate"] * weight_decay)
    adam(theta, gradient, mean, square, step, weight_decay=0.0, **adams)


def _decayed(theta: Tensor, gradient: Tensor, weight_decay: float) -> Tensor:
    if not weight_decay:
        return gradient
    return torch.add(gradient, theta, alpha=weight_decay, out=SCRATCH.like(theta, "decayed"))


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with its settings; what it remembers is a `State` apart from it.

    Args:
        name: "sgd", "adam" or "adamw".
        rate: the learning rate.
        momentum: of SGD.
        weight_decay: of every weight that it moves.
        beta1: of Adam and AdamW.
        beta2: the same.
        eps: the same.

    Example:
        >>> optimizer = Optimizer("adam", rate=1e-3)
        >>> state = optimizer.state_for({"weight": theta})
        >>> optimizer.step(theta, gradient, optimizer.slots_of("weight", state))
    """

    name: str
    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @classmethod
    def of(cls, config: Config) -> Optimizer:
        """The optimizer that a config names."""
        c = config
        return cls(c.optimizer, c.learning_rate, c.momentum, c.weight_decay, c.beta1, c.beta2, c.adam_eps)

    @property
    def plain(self) -> bool:
        """Whether it is plain SGD:  θ ← θ − lr g."""
        return self.name == "sgd" and not self.momentum and not self.weight_decay

    @property
    def slots(self) -> tuple[str, ...]:
        """What is remembered of each weight; all of its shape, except for the number of steps."""
        if self.name == "sgd":
            return ("velocity",) if self.momentum else ()
        return ("mean", "square", "steps")

    def state_for(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor] | None = None) -> State:
        """A state for these weights: what `state` has of them, and zeros for the others.

        Args:
            parameters: weights by name.
            state: an earlier state, if there is one.
        """
        state = {} if state is None else state
        made: State = {}
        for name, theta in parameters.items():
            for slot in self.slots:
                key = f"{slot}.{name}"
                if key in state:
                    made[key] = state[key]
                elif slot == "steps":
                    made[key] = torch.zeros((), dtype=torch.float64)  # on the CPU, where it can be read at once
                else:
                    made[key] = torch.zeros_like(theta, requires_grad=False, memory_format=torch.contiguous_format)
        return made

    def slots_of(self, name: str, state: Mapping[str, Tensor]) -> Slots:
        """The tensors of one weight, by slot."""
        return {slot: state[f"{slot}.{name}"] for slot in self.slots}

    def step(self, theta: Tensor, gradient: Tensor, slots: Slots) -> None:
        """Take a step of one weight, in place. It changes the slots, and not the gradient.

        Args:
            theta: θ.
            gradient: g.
            slots: what is remembered of this weight.
        """
        if self.name == "sgd":
            numbers = {"rate": self.rate, "momentum": self.momentum, "weight_decay": self.weight_decay}
            sgd(theta, gradient, slots.get("velocity"), **numbers)
            return
        slots["steps"].add_(1)
        numbers = {"rate": self.rate, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}
        mean, square, step = slots["mean"], slots["square"], int(slots["steps"])
        if self.name == "adam":
            adam(theta, gradient, mean, square, step, weight_decay=self.weight_decay, **numbers)
        else:
            adamw(theta, gradient, mean, square, step, weight_decay=self.weight_decay, **numbers)

    def pull_of(self, penalty: Quadratic, penalty_step: str) -> Pull | None:
        """A penalty's part of a step: for plain SGD with the rate in it, otherwise apart from the optimizer's.

        "gradient" adds the penalty's gradient to g, before the optimizer. "proximal" pulls the weight after the
        optimizer's step, by the learning rate alone: Adam's division does not reach it.

        Args:
            penalty: whose.
            penalty_step: "proximal" or "gradient".
        """
        if penalty_step == "gradient" and not self.plain:
            return penalty.pull(1.0, "slope")
        return penalty.pull(self.rate, penalty_step)


def check_state(learner: Learner, state: Mapping[str, Tensor]) -> State:
    """A state that was read from a file, on the learner's device, if it can be one of this learner.

    Args:
        learner: whose.
        state: what the file has.

    Example:
        >>> learner.optimizer_state = check_state(learner, state)
    """
    parameters = dict(learner.model.named_parameters())
    expected = Optimizer.of(learner.config).state_for(parameters)
    saved = {name for name in parameters if any(key.partition(".")[2] == name for key in state)}
    needed = {key for key in expected if key.partition(".")[2] in saved}
    if set(state) != needed or any(tensor.shape != expected[key].shape for key, tensor in state.items()):
        raise ValueError("its optimizers have different tensors")
    return {key: tensor.to(expected[key]) for key, tensor in state.items()}
