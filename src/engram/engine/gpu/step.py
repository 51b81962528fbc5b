"""What a step does to one parameter of every model of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.engine.learner import Learner
from engram.penalties import SI


@dataclass(frozen=True)
class Moving:
    """The anchors of weights beside a trace: their shift moves with its fast part f, as shift − (1 − gain) f."""

    layer: str  # the plastic one, by name
    models: Tensor  # whose, by their rows in the section
    held: Tensor  # and by their rows in `gain` and `shift`
    shift: Tensor  # without a fast part

    def move(self, step: Step, fast: Tensor) -> None:
        """Write the shift for a fast part (models, *shape)."""
        step.shift.index_copy_(0, self.held, torch.addcmul(self.shift, step.gain[self.held] - 1, fast))


@dataclass(frozen=True)
class Step:
    """For one named parameter: θ ← gain (θ − lr g) + shift where a model is held, and SI's path where it is followed.

    Only the models that need them have rows in `gain` and `shift` (K, *shape) and in `path` (J, *shape); `held` and
    `followed` say which row is whose, or −1.
    """

    rate: Tensor  # (N,) lr of each model, 0 where the parameter is not trained
    proximal: Tensor  # (N,) 1 where the penalty's step is proximal, 0 where it is the gradient's
    gain: Tensor
    shift: Tensor
    held: Tensor
    path: Tensor
    followed: Tensor
    moving: Moving | None = None

    def __getitem__(self, rows: slice) -> Step:
        """The step of some of the models."""
        return replace(
            self,
            rate=self.rate[rows],
            proximal=self.proximal[rows],
            held=self.held[rows],
            followed=self.followed[rows],
        )


@torch.no_grad()
def take_step(theta: Tensor, gradient: Tensor, step: Step) -> None:
    """Take it along a gradient (N, *shape), model after model, in plain PyTorch: where there are no kernels for it."""
    for row, (held, followed) in enumerate(zip(step.held.tolist(), step.followed.tolist(), strict=True)):
        t, g, rate = theta[row], gradient[row], step.rate[row]
        before = t.clone()
        if held < 0:
            t.sub_(rate * g)
        elif step.proximal[row]:
            t.copy_(step.shift[held] + step.gain[held] * (t - rate * g))
        else:
            t.copy_(step.shift[held] + step.gain[held] * t - rate * g)
        if followed >= 0:
            step.path[followed].sub_(g * (t - before))


def steps_of(learners: Sequence[Learner], parameters: dict[str, Tensor]) -> dict[str, Step]:
    """The steps of the next task, for each parameter that any model trains.

    SI's paths move into the stack, where they stay each model's.
    """
    trained = [{name for name, p in learner.model.named_parameters() if p.requires_grad} for learner in learners]
    proximal = [learner.config.penalty_step == "proximal" for learner in learners]
    pulls = [_pulls(learner, own) for learner, own in zip(learners, trained, strict=True)]
    paths = [learner.penalty.path if isinstance(learner.penalty, SI) else {} for learner in learners]
    steps = {}
    for name in sorted(set().union(*trained), key=list(parameters).index):
        theta = parameters[name]
        rates = [learner.config.learning_rate * (name in own) for learner, own in zip(learners, trained, strict=True)]
        held = [pull[name] for pull in pulls if name in pull]
        followed = [path[name] for path in paths if name in path]
        none = theta.new_empty(0)
        stacked_path = torch.stack(followed) if followed else none
        for row, path in zip(stacked_path, (path for path in paths if name in path), strict=True):
            path[name] = row
        step = Step(
            rate=torch.tensor(rates, dtype=theta.dtype, device=theta.device),
            proximal=torch.tensor(proximal, dtype=torch.int32, device=theta.device),
            gain=torch.stack([gain for gain, _ in held]) if held else none,
            shift=torch.stack([shift for _, shift in held]) if held else none,
            held=_rows([name in pull for pull in pulls], theta.device),
            path=stacked_path,
            followed=_rows([name in path for path in paths], theta.device),
        )
        steps[name] = replace(step, moving=_moving(name, learners, step))
    for learner in learners:
        learner.penalty.forget_pull()
    return steps


def _moving(name: str, learners: Sequence[Learner], step: Step) -> Moving | None:
    own = [i for i, learner in enumerate(learners) if name in learner.penalty.fast and int(step.held[i]) >= 0]
    if not own:
        return None
    models = torch.tensor(own, device=step.held.device)
    held = step.held[models].long()
    return Moving(name.rpartition(".")[0], models, held, step.shift[held].clone())


def _pulls(learner: Learner, trained: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gain and shift of each weight that a learner's penalty holds; one that was frozen since stays where it is."""
    pull = learner.penalty.pull(learner.config.learning_rate, learner.config.penalty_step)
    return {} if pull is None else {name: (pull.gain[name], pull.shift[name]) for name in pull.gain if name in trained}


def _rows(have: Sequence[bool], device: torch.device) -> Tensor:
    """The number of each among those that have one, and −1 for the others."""
    counted, rows = 0, []
    for has in have:
        rows.append(counted if has else -1)
        counted += has
    return torch.tensor(rows, dtype=torch.int32, device=device)
