"""Synaptic Intelligence: importance is how much a weight's own path lowered the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import PENALTIES
from engram.nn.distributed import ranks_of, take_from_first_rank
from engram.penalties.checks import check_converging
from engram.penalties.gradients import Gradients, task_gradient
from engram.penalties.importance import check_temperature
from engram.penalties.quadratic import Quadratic
from engram.penalties.step import add_to_path, zeros_for_sums
from engram.penalties.terms import Batches, Classes, Settings, State, Weights
from engram.penalties.watch import is_captured

LARGEST_SHARE = 100  # if the penalty is in the loss more often than this, the loss was scaled for mixed precision


@PENALTIES.register(
    "si", settings="xi temperature", strength=1.0, words="holds each weight by how much it lowered the loss"
)
class SI(Quadratic):
    """SI (Zenke et al. 2017). Importance is summed while a task is learned. `strength` is its c: 1 is a good start.

    path_k ← path_k − g_k Δθ_k            after each step, g the gradient of the task's loss alone
    Ω_k ← Ω_k + max(path_k, 0) / ((θ_k − θ_start,k)² + ξ)        θ* ← θ        when the task ends

    With a temperature T, g is the gradient of the loss of z / T, where z are the logits (Bricken et al. 2023, with
    β = 1/T); Δθ is still the step that the plain loss led to. So the path does not end when the loss is near 0. g then
    takes a backward pass of its own: call `before_backward` in a custom loop. In a run, such models train one by one.

    Four traps are avoided here. The penalty's own gradient is not part of g: where `loss()` went into the backward
    pass, it is taken out again. Nor is g what clipping or a GradScaler makes of the gradient: where there is either,
    call `after_backward` before it; a loop that forgets to gets an error. A path that raised the loss makes a weight
    unimportant, not of negative importance. What is remembered of the weights is copies, never views of the live ones.

    `model`, `strength`, `regularize_alpha` and `protect` are as for `Penalty`.

    Args:
        xi: ξ > 0, which keeps the importance of weights that hardly moved finite.
        temperature: T > 0, by which the logits are divided for g.

    Example:
        >>> penalty = engram.SI(model)
        >>> loss.backward(); optimizer.step(); penalty.after_step()
        >>> penalty.consolidate()
    """

    _custom_verbs = ()  # `after_backward` and `after_step` are for custom loops: an engine sums the path itself
    path_group = "path"

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float = 1.0,
        xi: float = 0.1,
        temperature: float = 1.0,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(model, strength=strength, regularize_alpha=regularize_alpha, protect=protect)
        if not (math.isfinite(xi) and xi > 0):
            raise InputError(f"xi must be a positive number, not {xi}")
        self.xi = xi
        self.temperature = check_temperature(temperature)
        self.task_gradient: dict[str, Tensor] = {}  # g, where it was taken before the gradient was changed
        self.gradients = Gradients()  # what is known of .grad
        self.trusted_scale: float | None = None  # the last that was found to be right
        self.gradients.watch(self.parameters)
        self.gradients.begin_task()
        self.started = False  # whether `after_step` has followed a step of this task

    # --- what is remembered

    @classmethod
    def initial_state(cls, parameters: Mapping[str, Tensor]) -> State:
        """The path so far, 0; θ when the task started; and θ before the current step, at first the same tensor."""
        state: State = {}
        for name, theta in parameters.items():
            state[f"path.{name}"] = zeros_for_sums(theta)
            state[f"start.{name}"] = state[f"before.{name}"] = theta.detach().clone()
        return state

    @classmethod
    @torch.no_grad()
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches = (),
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        """max(path, 0) / ((θ − θ_start)² + ξ). SI needs no data for it."""
        return {
            name: state[f"path.{name}"].clamp(min=0) / ((theta - state[f"start.{name}"]).square() + settings["xi"])
            for name, theta in parameters.items()
        }

    def remember(self, importance: dict[str, Tensor]) -> None:
        super().remember(importance)
        self.state |= self.initial_state(self.parameters)  # for the next task
        self.started = False
        self.gradients.begin_task()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        starts, befores = self.group("start"), self.group("before")
        self.started = any(not torch.equal(starts[name], befores[name]) for name in starts)
        self._forget_step()

    def grow(self) -> None:
        super().grow()
        self._forget_step()

    def _forget_step(self) -> None:
        self.task_gradient, self.trusted_scale = {}, None
        if self.gradients.watches:
            self.gradients.watch(self.parameters)  # of which some may be new
        self.gradients.begin_task()

    @property
    def custom_verbs(self) -> tuple[str, ...]:
        """With a temperature, g is not the gradient that an engine steps along: it must call the verbs."""
        return super().custom_verbs if self.temperature == 1 else ("after_step",)

    # --- in a custom loop

    def consolidate(self, batches: Batches = (), classes: Classes = None) -> None:
        """As `Quadratic.consolidate`; SI has all it needs when a task ends.

        Args:
            batches: ignored, as `classes` is.

        Example:
            >>> penalty.consolidate()
        """
        if self.gradients.not_followed():
            raise InputError(
                "SI has followed no step of this task, and would find every weight unimportant: "
                "call penalty.after_step() after every optimizer.step()"
            )
        self._refuse_early()
        super().consolidate(batches, classes)

    def unwatch(self) -> None:
        self.gradients.unwatch()

    def before_backward(self, logits: Tensor, targets: Tensor, scale: float = 1.0) -> None:
        """With a temperature, take g from the loss of logits / T. Call it before backward(), which needs their graph.

        Args:
            logits: (B, C), those that the loss is computed from.
            targets: (B,).
            scale: the factor of this batch in the loss, where several batches make one step.

        Example:
            >>> logits = model(inputs)
            >>> penalty.before_backward(logits, targets)
            >>> cross_entropy(logits, targets).backward()
        """
        if self.temperature == 1:
            return
        if ranks_of(self.model) is not None:
            raise InputError("SI with a temperature follows one model in one process, not DistributedDataParallel")
        trained = {name: theta for name, theta in self.parameters.items() if theta.requires_grad}
        loss = scale * F.cross_entropy(logits / self.temperature, targets)
        found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        for name, g in zip(trained, found, strict=True):
            if g is not None:
                self.task_gradient[name] = self.task_gradient[name] + g if name in self.task_gradient else g

    @torch.no_grad()
    def after_backward(self, scale: float = 1.0) -> None:
        """Take g from `.grad` before it is unscaled or clipped. Call it once, after the last backward() of a step.

        Args:
            scale: the factor by which the loss was multiplied: `scaler.get_scale()` with a GradScaler.

        Example:
            >>> loss.backward()
            >>> penalty.after_backward()
            >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"the scale of the loss must be a positive number, not {scale}")
        if self.temperature != 1:  # g was taken before
            return
        if scale != self.trusted_scale:  # not each time, since it makes a GPU wait
            self._refuse_forgotten(scale)
        self._take_up_changes()
        self._refuse_changed("SI.after_backward() must come directly after backward(), before unscale_() and clipping")
        found = task_gradient(self, self.gradients)
        self.task_gradient = found if scale == 1 else {name: g / scale for name, g in found.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Follow the step just taken. Call it while `.grad` still holds the gradient of that step.

        Example:
            >>> loss.backward()
            >>> optimizer.step()
            >>> penalty.after_step()
        """
        if all(theta.grad is None for theta in self.parameters.values()):
            raise InputError("SI.after_step() found no gradients: call it after optimizer.step(), before zero_grad()")
        self.check_alive()
        if self.gradients.moved():
            raise InputError(
                "the weights moved between two backward passes of one step, so SI cannot follow their path: "
                "call after_step() after every step, and use neither LBFGS nor, with a head that writes into its "
                "weights, several passes"
            )
        if self.temperature != 1 and not self.task_gradient:
            raise InputError("SI with a temperature needs logits: call before_backward(logits, targets) at each step")
        self._take_up_changes()
        if not self.task_gradient:
            self._refuse_changed(
                "the gradients were changed after backward(), by clipping, a GradScaler or the optimizer itself: "
                "call penalty.after_backward(), with a GradScaler's scale, before that"
            )
        found = self.task_gradient or task_gradient(self, self.gradients)
        if not self.started:
            self._start_following()
        for name, theta in self.parameters.items():
            before = self.state[f"before.{name}"]
            if name in found:
                move = theta - before
                # a weight that did not move adds nothing, even where a GradScaler skipped a step with infinities
                add_to_path(self.state[f"path.{name}"], found[name].masked_fill(move == 0, 0), move)
            before.copy_(theta)
        self.task_gradient = {}
        self.gradients.watch(self.parameters)
        self.gradients.end_step()

    def _start_following(self) -> None:
        ranks = ranks_of(self.model)
        if ranks is not None:  # made before DistributedDataParallel gave the model the first rank's weights
            take_from_first_rank(self.group("start").values(), ranks)
        self.state |= {f"before.{name}": start.clone() for name, start in self.group("start").items()}
        self.started = True

    def _take_up_changes(self) -> None:
        """A weight that something else than a step has changed starts this step where it was found."""
        self._refuse_early()
        for name, watch in self.gradients.watches.items():
            found, before = watch.found, self.state[f"before.{name}"]
            if found is None and watch.entered is not None and not is_captured(before):
                found = None if torch.equal(watch.entered, before) else watch.entered
                if found is not None and watch.followed:
                    check_converging(name, found)  # NaN is not equal to itself
                    raise InputError(
                        f"{name!r} was changed through .data since the last step, so that SI cannot follow its path: "
                        "change it in place within torch.no_grad()"
                    )
            watch.found = watch.entered = None
            if found is not None:
                self.state[f"before.{name}"] = found
                if not self.started:
                    self.state[f"start.{name}"] = found

    def _refuse_early(self) -> None:
        if self.gradients.followed_too_early():
            raise InputError(
                "SI.after_step() was called before the step that it is to follow: call it after optimizer.step()"
            )

    def _note_backward(self, scale: Tensor) -> None:
        fast = {name: scale * part().detach() for name, part in self.fast.items()}
        self.gradients.note(self.parameters, scale, fast)

    def _refuse_forgotten(self, scale: float) -> None:
        """`loss` knows by how much it was multiplied; a factor far above `scale` comes from a GradScaler."""
        share = self.gradients.scale()
        if math.isfinite(share) and share / scale > LARGEST_SHARE:
            raise InputError(
                f"the loss was multiplied by {share:g} before backward(): "
                "call penalty.after_backward(scale=scaler.get_scale())"
            )
        if share:
            self.trusted_scale = scale

    def _refuse_changed(self, sentence: str) -> None:
        """A gradient that was changed in place since backward() is not g."""
        if self.gradients.changed() or self.gradients.changed_unseen():
            raise InputError(sentence)
        if self.gradients.changed_within():
            raise InputError(
                "the gradients were changed between two backward passes of one step, so that SI cannot take its own "
                "part out of them: clip after the last pass, and discard gradients with zero_grad(set_to_none=True)"
            )
