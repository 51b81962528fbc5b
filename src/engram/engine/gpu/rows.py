"""Models of one architecture as rows of tensors, and the step that one parameter takes in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.engine.gpu.heads import are_mixed, as_plastic
from engram.engine.gpu.slots import Slots, stack_slots
from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer
from engram.engine.weight_step import weight_step
from engram.penalties.quadratic import Quadratic, form_of


class Rows:
    """Parameters and buffers of N models: one tensor (N, *shape) for each name. Model i is in row i.

    A model's own tensors become views of its row: changing the rows changes the models, and vice versa.

    Args:
        models: their parameters and buffers must have the same names and shapes, except that plain, matched and plastic
            heads may be mixed: see `as_plastic`.

    Example:
        >>> rows = Rows([nn.Linear(4, 2) for _ in range(3)])
        >>> rows.parameters["weight"].shape
        torch.Size([3, 2, 4])
    """

    def __init__(self, models: Sequence[nn.Module]):
        alike = [as_plastic(model) for model in models] if are_mixed(models) else models
        check_alike(alike)
        # for each model, the names that its own parameters have in the rows
        self.names = [_names(own, model) for own, model in zip(models, alike, strict=True)]
        self.parameters = _stack([dict(model.named_parameters()) for model in alike])
        self.buffers = _stack([dict(model.named_buffers()) for model in alike])

    @torch.no_grad()
    def finite(self) -> Tensor:
        """(N,): whether all tensors of a model are finite."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        return torch.stack([tensor.isfinite().reshape(len(tensor), -1).all(dim=1) for tensor in tensors]).all(dim=0)


def _names(own: nn.Module, model: nn.Module) -> dict[str, str]:
    names = {id(theta): name for name, theta in model.named_parameters()}
    return {name: names[id(theta)] for name, theta in own.named_parameters()}


def check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be rows of the same tensors.

    Args:
        models: any.

    Example:
        >>> check_alike([nn.Linear(4, 2), nn.Linear(4, 2)])
    """
    first = _shapes(models[0])
    for model in models[1:]:
        if _shapes(model) != first:
            raise InputError("the models differ in the names or shapes of their parameters")


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def _stack(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    stacked = {}
    for name in states[0]:
        stacked[name] = torch.stack([state[name].detach() for state in states])
        for row, state in enumerate(states):
            state[name].data = stacked[name][row]
    return stacked


@dataclass(frozen=True)
class Moving:
    """The anchors of weights that carry a trace: their shift moves with its fast part f, as in `moved_shift`."""

    layer: str  # the plastic one, by name
    models: Tensor  # whose, by their rows in the section
    held: Tensor  # and by their rows in `gain` and `shift`
    shift: Tensor  # without the fast part
    is_slope: bool  # whether gain and shift are the penalty's gradient

    def move(self, step: Step, fast: Tensor) -> None:
        """Set the shift for a fast part (models, *shape)."""
        moved = self.shift - fast if self.is_slope else torch.addcmul(self.shift, step.gain[self.held] - 1, fast)
        step.shift.index_copy_(0, self.held, moved)


@dataclass(frozen=True)
class Step:
    """The step of one named parameter, as in `weight_step`, for all models of a section.

    Only the models that need them have rows in `gain` and `shift` (K, *shape) and in `path` (J, *shape); `held` and
    `followed` hold the row of each model, or −1.
    """

    rate: Tensor  # (N,) lr of each model, 0 where the parameter is not trained
    proximal: Tensor  # (N,) 1 where the penalty's step is proximal, 0 where it is the gradient's
    gain: Tensor
    shift: Tensor
    held: Tensor
    path: Tensor
    followed: Tensor
    moving: Moving | None = None
    slots: Slots | None = None  # None for plain SGD

    def __getitem__(self, rows: slice) -> Step:
        """The step of some of the models."""
        return replace(
            self,
            rate=self.rate[rows],
            proximal=self.proximal[rows],
            held=self.held[rows],
            followed=self.followed[rows],
            slots=None if self.slots is None else self.slots[rows],
        )


@torch.no_grad()
def take_step(theta: Tensor, gradient: Tensor, step: Step) -> None:
    """Take a step along a gradient (N, *shape), model by model, in plain PyTorch: where there are no kernels for it.

    Args:
        theta: θ (N, *shape), changed in place.
        gradient: of the same shape.
        step: of these models.

    Example:
        >>> take_step(rows.parameters["head.weight"], gradient, steps["head.weight"])
    """
    numbers = (step.held, step.followed, step.rate, step.proximal)
    for row, (held, followed, rate, proximal) in enumerate(zip(*(n.tolist() for n in numbers), strict=True)):
        if rate == 0:  # it is not trained; a step of 0 would not be none where the gradient is infinite
            continue
        pull = (step.gain[held], step.shift[held]) if held >= 0 else None
        path = step.path[followed] if followed >= 0 else None
        optimizer, slots = Optimizer("sgd", rate), {}
        if step.slots is not None:
            optimizer, slots = replace(step.slots.optimizers[row], rate=rate), step.slots.of(row)
        kind = "proximal" if proximal else "gradient"
        weight_step(theta[row], optimizer, slots, kind, pull, path).take(gradient[row])


def steps_of(learners: Sequence[Learner], rows: Rows) -> dict[str, Step]:
    """The steps of the next task, for each parameter that any model trains.

    Paths that penalties sum move into the stack; each penalty's state then holds views of them.

    Args:
        learners: those of a section, whose penalties all take the steps of the quadratic form.
        rows: their models.

    Example:
        >>> steps = steps_of(learners, Rows([learner.model for learner in learners]))
    """
    parameters, names = rows.parameters, rows.names
    trained = [
        {own[name] for name, p in learner.model.named_parameters() if p.requires_grad}
        for learner, own in zip(learners, names, strict=True)
    ]
    proximal = [learner.config.penalty_step == "proximal" for learner in learners]
    forms = [form_in_stack(learner) for learner in learners]
    pulls = [
        _pulls(form, learner, own, among)
        for form, learner, own, among in zip(forms, learners, names, trained, strict=True)
    ]
    # for each model, by the names in the rows: the key of the path in the penalty's state
    paths = [
        {own[name]: f"{form.path_group}.{name}" for name in form.parameters} if form.path_group is not None else {}
        for form, own in zip(forms, names, strict=True)
    ]
    steps = {}
    in_order = sorted(set().union(*trained), key=list(parameters).index)
    slots = stack_slots(learners, names, {name: parameters[name] for name in in_order})
    for name in in_order:
        theta = parameters[name]
        rates = [learner.config.learning_rate * (name in own) for learner, own in zip(learners, trained, strict=True)]
        held = [pull[name] for pull in pulls if name in pull]
        none = theta.new_empty(0)
        followed = [(form.state, path[name]) for form, path in zip(forms, paths, strict=True) if name in path]
        stacked_path = torch.stack([state[key] for state, key in followed]) if followed else none
        for row, (state, key) in zip(stacked_path, followed, strict=True):
            state[key] = row
        step = Step(
            rate=torch.tensor(rates, dtype=theta.dtype, device=theta.device),
            proximal=torch.tensor(proximal, dtype=torch.int32, device=theta.device),
            gain=torch.stack([gain for gain, _ in held]) if held else none,
            shift=torch.stack([shift for _, shift in held]) if held else none,
            held=_rows([name in pull for pull in pulls], theta.device),
            path=stacked_path,
            followed=_rows([name in path for path in paths], theta.device),
        )
        steps[name] = replace(step, moving=_moving(name, learners, step), slots=slots.get(name))
    for form in forms:
        form.forget_pull()
    return steps


def form_in_stack(learner: Learner) -> Quadratic:
    """A learner's penalty: only those of the quadratic form train in a stack.

    Args:
        learner: of a section.

    Example:
        >>> pull = form_in_stack(learner).pull(0.01)
    """
    form = form_of(learner.penalty)
    assert form is not None  # others train one by one
    return form


def _moving(name: str, learners: Sequence[Learner], step: Step) -> Moving | None:
    own = [i for i, learner in enumerate(learners) if name in learner.penalty.fast and int(step.held[i]) >= 0]
    if not own:
        return None
    models = torch.tensor(own, device=step.held.device)
    held = step.held[models].long()
    config = learners[own[0]].config  # the kind of step is the same for all whose anchors move
    is_slope = config.penalty_step == "gradient" and not Optimizer.of(config).plain
    return Moving(name.rpartition(".")[0], models, held, step.shift[held].clone(), is_slope)


def _pulls(
    form: Quadratic, learner: Learner, names: dict[str, str], trained: set[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gain and shift of each weight that a learner's penalty pulls; a weight that was frozen since stays the same."""
    pull = Optimizer.of(learner.config).pull_of(form, learner.config.penalty_step)
    if pull is None:
        return {}
    return {names[n]: (gain, pull.shift[n]) for n, gain in pull.gain.items() if names[n] in trained}


def _rows(have: Sequence[bool], device: torch.device) -> Tensor:
    """The number of each among those that have one, and −1 for the others."""
    counted, rows = 0, []
    for has in have:
        rows.append(counted if has else -1)
        counted += has
    return torch.tensor(rows, dtype=torch.int32, device=device)
