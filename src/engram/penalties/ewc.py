"""Elastic Weight Consolidation: importance is the diagonal of the Fisher information."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import PENALTIES
from engram.nn.distributed import rank_of, ranks_of
from engram.nn.modules import frozen
from engram.nn.classes import mask_logits
from engram.nn.classes import check_targets
from engram.penalties.base import Penalty
from engram.penalties.importance import mean_per_sample, unpack


@PENALTIES.register("ewc", settings={"labels": "fisher_labels"}, draws="fisher")
class EWC(Penalty):
    """EWC (Kirkpatrick et al. 2017), with a term of its own for every task.

    Ω_k = mean over samples of (∂ log p(y | x) / ∂θ_k)²        loss = λ Σ_tasks Σ_k Ω_k (θ_k − θ*_k)²

    Each sample's gradient is squared before the mean. The square of a batch's mean gradient is another,
    smaller quantity, for which published strengths do not hold.

    Args:
        labels: whose y. "true": the data's (the empirical Fisher); "sampled": one drawn from the model's own
            p(y | x); "exact": the expectation over all classes under p(y | x).
        seed: for the draws of "sampled".
    """

    keeps_every_term = True

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        labels: str = "true",
        seed: int = 0,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(model, strength=strength, regularize_alpha=regularize_alpha, protect=protect)
        check_choice("labels", labels, ("true", "sampled", "exact"))
        self.labels = labels
        self.seed = seed

    def consolidate(self, batches: Iterable[Any], classes: Sequence[int] | None = None) -> None:
        super().consolidate((self._checked(batch, classes) for batch in batches), classes)

    def importance(self, batches: Iterable[Any], classes: Sequence[int] | None = None) -> dict[str, Tensor]:
        """The diagonal of the Fisher information of the weights as they are now."""
        random = torch.Generator().manual_seed(self.seed + rank_of(ranks_of(self.model)))  # each rank its own draws

        def log_likelihood(outputs: Tensor, label: Tensor, weight: Tensor) -> Tensor:
            log_p = mask_logits(outputs, classes).log_softmax(dim=1)
            return weight * log_p.gather(1, label[:, None])[:, 0]

        def labelled(inputs: Tensor, targets: Tensor | None) -> Iterable[tuple[Tensor, Tensor]]:
            """The labels to take the gradient for, each with the root of its weight, since the gradient is squared."""
            if self.labels == "true":
                yield torch.as_tensor(targets).long(), torch.ones(len(inputs), device=inputs.device)
                return
            p = mask_logits(self.model(inputs), classes).softmax(dim=1)
            if self.labels == "sampled":
                drawn = torch.multinomial(p.cpu(), 1, generator=random)[:, 0].to(p.device)
                yield drawn, torch.ones_like(p[:, 0])
                return
            for c in range(p.shape[1]) if classes is None else classes:
                yield torch.full((len(inputs),), c, device=p.device), p[:, c].sqrt()

        return mean_per_sample(self.model, self.parameters, log_likelihood, torch.square, batches, labelled)

    @torch.no_grad()
    def _checked(self, batch: Any, classes: Sequence[int] | None) -> Any:
        """The batch, once its labels are known to be some that the model can have."""
        if self.labels != "true":
            return batch
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
        return batch


@PENALTIES.register("online-ewc", settings={"labels": "fisher_labels", "gamma": "gamma"}, draws="fisher")
class OnlineEWC(EWC):
    """Online EWC (Schwarz et al. 2018): one term for all tasks, so that its cost does not grow with them.

    Ω ← γ Ω + Ω_task        θ* ← θ

    Args:
        gamma: γ in [0, 1], how much of the older tasks' importance stays.
    """

    keeps_every_term = False

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        gamma: float = 1.0,
        labels: str = "true",
        seed: int = 0,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(
            model, strength=strength, labels=labels, seed=seed, regularize_alpha=regularize_alpha, protect=protect
        )
        if not 0 <= gamma <= 1:
            raise InputError(f"gamma must lie in [0, 1], not {gamma}")
        self.gamma = gamma
