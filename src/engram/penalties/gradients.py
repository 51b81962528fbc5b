"""What is in `.grad`: how much of a penalty's own gradient, and whether it is still what backward() left there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.penalties.terms import cost, gradient
from engram.penalties.watch import Watch, current_pass


@dataclass(frozen=True)
class Share:
    """One use of the penalty's loss in a backward pass."""

    scale: Tensor  # the factor by which the loss was multiplied
    fast: dict[str, Tensor]  # the fast parts at that time, multiplied by the same factor
    backward_pass: int  # its number


class Gradients:
    """The gradients of some weights, between one step and the next."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.watches: dict[str, Watch] = {}
        self.num_steps = 0  # of this task
        self.idle: list[Tensor] = []  # after a step in which nothing moved, whether its gradients were finite

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy watches the weights that were copied with it, whose gradients are not there yet."""
        watched = {name: theta for name, watch in self.watches.items() if (theta := watch.theta()) is not None}
        return _watching_from_the_start, (watched,)

    # --- from step to step

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these weights. An engine that takes the steps itself needs none of it, and calls `unwatch`."""
        for name, theta in parameters.items():
            if name not in self.watches or self.watches[name].theta() is not theta:
                self.watches[name] = Watch(theta)
        _watching.add(self)

    def unwatch(self) -> None:
        for watch in self.watches.values():
            watch.stop()
        self.watches = {}

    def begin_task(self) -> None:
        """Whatever changes the weights before the first step that is followed is none of the task's."""
        self.begin_step()
        self.num_steps, self.idle = 0, []
        for watch in self.watches.values():
            watch.followed, watch.inspects = False, True

    def end_step(self) -> None:
        """A step was followed. If no weight moved in it, what is in `.grad` may still be for the next one."""
        self.num_steps += 1
        stepped = [watch for watch in self.watches.values() if watch.has_stepped() is not None]
        if stepped and not any(watch.has_stepped() for watch in stepped):
            grads = [theta.grad for watch in stepped if (theta := watch.theta()) is not None]
            self.idle = [torch.isfinite(grad).all() for grad in grads if grad is not None]
            kept = [(watch, watch.passes, watch.others, watch.version) for watch in stepped]
        else:
            self.idle, self.shares, kept = [], [], []
        inspects = self.num_steps & (self.num_steps + 1) == 0  # the next step's number is a power of 2
        for watch in self.watches.values():
            watch.begin_step()
            theta = watch.theta()
            watch.left = watch.left if theta is None else theta._version
            watch.followed, watch.inspects = True, inspects
        for watch, passes, others, version in kept:
            watch.passes, watch.others, watch.version = passes, others, version

    def begin_step(self) -> None:
        self.shares = []
        for watch in self.watches.values():
            watch.begin_step()

    # --- the penalty's own gradient

    def note(self, parameters: Mapping[str, nn.Parameter], scale: Tensor, fast: dict[str, Tensor]) -> None:
        """The penalty's loss is in the backward pass that runs. The gradient of an earlier one may be discarded."""
        number = current_pass()
        own = [theta.grad for theta in parameters.values() if theta.requires_grad and theta.grad is not None]
        earlier = self.shares and self.shares[-1].backward_pass != number
        if earlier and (not own or (self.changed() and not any(grad.any() for grad in own))):
            self.shares = []  # it was discarded without a step
            for watch in self.watches.values():
                watch.passes, watch.version = [], None
        self.shares.append(Share(scale, fast, number))

    def held(self, name: str) -> list[Share]:
        """The shares that are in the `.grad` of a weight: torch.autograd.grad of the penalty's loss puts none there."""
        watch = self.watches.get(name)
        return [share for share in self.shares if watch is None or share.backward_pass in watch.passes]

    def of_others(self, name: str) -> list[Tensor]:
        """The gradients of other penalties that are in the `.grad` of a weight."""
        watch = self.watches.get(name)
        return [] if watch is None else [other for number, other in watch.others if number in watch.passes]

    @torch.no_grad()
    def scale(self) -> float:
        """The factor by which the penalty's loss was multiplied, over all passes."""
        passes = {number for watch in self.watches.values() for number in watch.passes}
        held = [share for share in self.shares if not self.watches or share.backward_pass in passes]
        return float(sum(share.scale for share in held))

    # --- what went wrong

    def changed(self) -> bool:
        return any(watch.sees_a_change() for watch in self.watches.values())

    def accept(self) -> None:
        """What was done to gradients in place has not changed their values, which are still compared now and then."""
        for watch in self.watches.values():
            theta = watch.theta()
            if watch.version is not None and theta is not None and theta.grad is not None:
                watch.version = theta.grad._version

    def changed_within(self) -> bool:
        """Whether a gradient was changed between two passes, so that it is unknown how much of a share it holds."""
        return bool(self.shares) and any(watch.mixed for watch in self.watches.values())

    def changed_unseen(self) -> bool:
        return any(watch.sees_a_hidden_change() for watch in self.watches.values())

    def moved(self) -> bool:
        return any(watch.moved for watch in self.watches.values())

    def followed_too_early(self) -> bool:
        """Whether the last step was followed before it was taken: nothing had moved, and then everything did."""
        if not self.idle:
            return False
        watches = [watch for watch in self.watches.values() if watch.passes]
        moved = all(watch.moved_before() for watch in watches)
        return bool(watches) and moved and all(self.idle)  # a GradScaler skips steps with infinities

    def not_followed(self) -> bool:
        """Whether weights moved since a backward pass, in a task of which no step was followed."""
        return any(
            not watch.followed and (watch.has_stepped() or watch.has_moved_unseen()) for watch in self.watches.values()
        )


def _watching_from_the_start(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    gradients = Gradients()
    gradients.watch(parameters)
    gradients.begin_task()
    return gradients


_watching: weakref.WeakSet[Gradients] = weakref.WeakSet()


def note_for_others(penalty: Any, slopes: Sequence[Tensor]) -> None:
    """Tell penalties that follow the same weights which part of their gradients is this one's."""
    for gradients in _watching:
        if gradients is not getattr(penalty, "gradients", None) and gradients.watches:
            watches = {id(watch.theta()): watch for watch in gradients.watches.values()}
            for theta, slope in zip(penalty.parameters.values(), slopes, strict=True):
                if id(theta) in watches:
                    watches[id(theta)].others.append((current_pass(), slope.detach()))


def task_gradient(penalty: Any, gradients: Gradients) -> dict[str, Tensor]:
    """`.grad` of each weight without what the penalty's `loss` added to it, and without what other penalties did.

    Args:
        penalty: of quadratic form, which remembers its weights before the step in the group "before".
        gradients: those of its weights.

    Example:
        >>> g = task_gradient(penalty, penalty.gradients)["head.weight"]
    """
    slopes: dict[str, Tensor] = {}
    found = {}
    for name, theta in penalty.parameters.items():
        if theta.grad is None:
            continue
        held = gradients.held(name) if penalty.terms else []
        if held and not slopes:
            slopes = gradient(penalty.terms, penalty.in_force(penalty.group("before")), penalty.strength)
        found[name] = theta.grad - _added(penalty, name, slopes[name], held) if held else theta.grad.clone()
        for other in gradients.of_others(name):
            found[name] = found[name] - other
    return found


def _added(penalty: Any, name: str, slope: Tensor, held: list[Share]) -> Tensor:
    """What `loss` added to `.grad`: at the weight before the step, and with the fast part of that time."""
    share = torch.stack([part.scale for part in held]).sum()
    added = share * slope
    if name in penalty.fast:
        then = torch.stack([part.fast[name] for part in held]).sum(dim=0)
        for term in penalty.terms:
            moved = 2 * penalty.strength * term.importance[name] * (then - share * penalty.fast[name]().detach())
            added = added + moved
    return added


class QuadraticForm(torch.autograd.Function):
    """`Quadratic.loss` with its explicit gradient: an elementwise pass instead of a graph over all weights.

    Its first input is the penalty, and the others are its weights.
    """

    @staticmethod
    def forward(ctx: Any, penalty: Any, *theta: Tensor) -> Tensor:
        ctx.penalty, ctx.num_inputs = penalty, 1 + len(theta)
        # Without a term nothing depends on the weights, and a head may change them at its first training batch.
        ctx.save_for_backward(*(theta if penalty.terms else ()))
        weights = penalty.in_force(dict(zip(penalty.parameters, theta, strict=True)))
        return cost(penalty.terms, weights, penalty.strength)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        penalty, (scale,) = ctx.penalty, outer
        penalty._note_backward(scale.detach())  # SI must later take this part out of .grad again
        if not ctx.saved_tensors:
            return (None,) * ctx.num_inputs
        weights = penalty.in_force(dict(zip(penalty.parameters, ctx.saved_tensors, strict=True)))
        slopes = [scale * slope for slope in gradient(penalty.terms, weights, penalty.strength).values()]
        note_for_others(penalty, slopes)
        return None, *slopes
