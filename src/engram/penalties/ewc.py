"""Elastic Weight Consolidation: importance is the diagonal of the Fisher information."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import PENALTIES
from engram.nn.classes import CLASS_NUMBER_TYPES, check_targets, mask_logits
from engram.nn.distributed import rank_of, ranks_of
from engram.nn.modules import frozen
from engram.penalties.importance import check_temperature, mean_per_sample, unpack
from engram.penalties.quadratic import Quadratic
from engram.penalties.task_checks import check_logits, check_rows, looks_like_activations
from engram.penalties.terms import Batches, Classes, Settings, Weights

LOOKED_AT = 64  # samples of a task, to see whether outputs are logits


@PENALTIES.register(
    "ewc",
    settings={"labels": "fisher_labels", "temperature": "temperature"},
    draws="fisher",
    words="holds each weight by its Fisher information, with a term for every task",
)
class EWC(Quadratic):
    """EWC (Kirkpatrick et al. 2017), with its own term for every task.

    Ω_k = mean over samples of (∂ log p(y | x) / ∂θ_k)²        loss = λ Σ_tasks Σ_k Ω_k (θ_k − θ*_k)²

    p(y | x) = softmax(z / T)_y, with the logits z and the temperature T, usually 1. The better a task is fitted, the
    smaller are its gradients, and at T = 1 its importances fade. A large T prevents that (Bricken et al. 2023, who
    multiply z by β = 1/T = 0.005). Ω then has a factor 1/T², so that λ must be larger. T has no effect on training.

    Each sample's gradient is squared before the mean. The square of a batch's mean gradient is another,
    smaller quantity, for which published strengths do not hold.

    `model`, `strength`, `regularize_alpha` and `protect` are as for `Penalty`.

    Args:
        labels: whose y. "true": the data's (the empirical Fisher); "predicted": the model's most likely class;
            "sampled": one drawn from its p(y | x); "exact": the expectation over all classes under p(y | x).
        temperature: T > 0, by which the logits are divided in the importance pass.
        seed: for the draws of "sampled".

    Example:
        >>> penalty = engram.EWC(model, strength=100, labels="exact")
        >>> penalty.consolidate(loader)
    """

    keeps_every_term = True

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        labels: str = "true",
        temperature: float = 1.0,
        seed: int = 0,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(model, strength=strength, regularize_alpha=regularize_alpha, protect=protect)
        check_choice("labels", labels, ("true", "predicted", "sampled", "exact"))
        self.temperature = check_temperature(temperature)
        self.labels = labels
        self.seed = seed
        self.warned: set[str] = set()

    @classmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches,
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        """The diagonal of the Fisher information of the weights as they are now."""
        random = torch.Generator().manual_seed(settings["seed"] + rank_of(ranks_of(model)))  # each rank its own draws

        def tempered(outputs: Tensor) -> Tensor:
            return mask_logits(outputs / settings["temperature"], classes)

        def log_likelihood(outputs: Tensor, label: Tensor, weight: Tensor) -> Tensor:
            log_p = tempered(outputs).log_softmax(dim=1)
            return weight * log_p.gather(1, label[:, None])[:, 0]

        def labelled(inputs: Tensor, targets: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
            """The labels to take the gradient for, each with the root of its weight, since the gradient is squared."""
            if settings["labels"] == "true":
                yield torch.as_tensor(targets).long(), torch.ones(len(inputs), device=inputs.device)
                return
            p = tempered(model(inputs)).softmax(dim=1)
            if settings["labels"] == "predicted":
                yield p.argmax(dim=1), torch.ones_like(p[:, 0])
                return
            if settings["labels"] == "sampled":
                drawn = torch.multinomial(p.cpu(), 1, generator=random)[:, 0].to(p.device)
                yield drawn, torch.ones_like(p[:, 0])
                return
            for c in range(p.shape[1]) if classes is None else classes:
                yield torch.full((len(inputs),), c, device=p.device), p[:, c].sqrt()

        return mean_per_sample(model, parameters, log_likelihood, torch.square, batches, labelled)

    def checked(self, batches: Batches, classes: Classes) -> Iterator[Any]:
        """The batches, whose labels are checked to be among the model's classes."""
        for number, batch in enumerate(batches):
            if number == 0:
                self._warn_once(batch)
            if self.labels == "true":
                self._check_labels(batch, classes)
            yield batch

    @torch.no_grad()
    def _warn_once(self, batch: Any) -> None:
        """Warn, once for each penalty, of outputs that are no logits, and of a third part that may be the targets."""
        inputs, _ = unpack(batch)
        device = next(iter(self.parameters.values())).device
        with frozen(self.model):
            outputs = self.model(inputs[:LOOKED_AT].to(device))
        check_rows(outputs, len(inputs[:LOOKED_AT]))
        may_grow = any(hasattr(module, "grow") for module in self.model.modules())  # it may have one class so far
        check_logits(outputs, fewest=1 if may_grow else 2)
        sentences = {
            "outputs": "every output of the model is at least 0, as those of a ReLU or a softmax, and EWC takes them "
            "for logits: make the penalty for the whole model, and let it return logits",
            "parts": "batches have more than two parts, of which the first is taken for the inputs and the second for "
            "the targets: yield (inputs, targets)",
        }
        found = {"outputs"} if looks_like_activations(outputs) else set()
        if self.labels == "true" and not isinstance(batch, Tensor) and len(batch) > 2 and _may_be_targets(batch):
            found.add("parts")
        for one in sorted(found - self.warned):
            warnings.warn(sentences[one], UserWarning, stacklevel=5)
        self.warned |= found

    @torch.no_grad()
    def _check_labels(self, batch: Any, classes: Classes) -> None:
        inputs, targets = unpack(batch)
        if targets is None:
            raise InputError("importances by true labels need them: batches must yield (inputs, targets)")
        check_targets(targets, len(inputs))
        if classes is None:
            device = next(iter(self.parameters.values())).device
            with frozen(self.model):
                own: Sequence[int] = range(self.model(inputs[:1].to(device)).shape[1])
        else:
            own = classes
        stray = set(targets.unique().tolist()) - set(own)
        if stray:
            raise InputError(f"the label {min(stray)} is not among the classes {', '.join(map(str, own))}")


def _may_be_targets(batch: Any) -> bool:
    """Whether a further part of a batch could be its targets as well."""
    return any(isinstance(part, Tensor) and part.dtype in CLASS_NUMBER_TYPES and part.ndim == 1 for part in batch[2:])


@PENALTIES.register(
    "online-ewc",
    settings={"labels": "fisher_labels", "temperature": "temperature", "gamma": "gamma"},
    draws="fisher",
    words="holds each weight by its Fisher information, with one term for all tasks",
)
class OnlineEWC(EWC):
    """Online EWC (Schwarz et al. 2018): one term for all tasks, so that its cost does not grow with them.

    Ω ← γ Ω + Ω_task        θ* ← θ

    The other arguments are as for `EWC`.

    Args:
        gamma: γ in [0, 1], how much of the older tasks' importance remains.

    Example:
        >>> penalty = engram.OnlineEWC(model, strength=100, gamma=0.9)
        >>> penalty.consolidate(loader)
    """

    keeps_every_term = False

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        gamma: float = 1.0,
        labels: str = "true",
        temperature: float = 1.0,
        seed: int = 0,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(
            model,
            strength=strength,
            labels=labels,
            temperature=temperature,
            seed=seed,
            regularize_alpha=regularize_alpha,
            protect=protect,
        )
        if not 0 <= gamma <= 1:
            raise InputError(f"gamma must lie in [0, 1], not {gamma}")
        self.gamma = gamma
