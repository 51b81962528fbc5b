"""Dark experience replay: stored samples with the logits that they had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.registry import REHEARSALS
from engram.rehearsal import reservoir
from engram.rehearsal.rehearsal import Batch, Draws, Moment, Shapes, State, masked
from engram.rehearsal.replay import Replay


@REHEARSALS.register(
    "der++",
    settings={
        "memory_size": "memory_size",
        "batch_size": "rehearsal_batch",
        "alpha": "der_alpha",
        "beta": "der_beta",
    },
    words="repeats stored samples, with the logits that they had",
)
class DERPlusPlus(Replay):
    """DER++ (Buzzega 2020): two draws from the reservoir, one for the logits and one for the labels.

        loss = CE(new) + α ‖z(x′) − z̃′‖² / C + β CE(x″, y″)        z̃′ the logits of x′ when it was stored

    The mean of squares is over the outputs that the sample's task allows. Samples are offered in every epoch, so that
    stored logits are of many moments of the training, as in the paper.

    Args:
        memory_size: the number of stored samples.
        batch_size: the size of each draw; None for as many as there are new samples.
        alpha: α.
        beta: β.

    Example:
        >>> DERPlusPlus(alpha=0.2, beta=1.0, batch_size=32).draws(64)
        {'read': (32,), 'write': (64,), 'read labels': (32,)}
    """

    def __init__(self, *, memory_size: int = 200, batch_size: int | None = None, alpha: float = 0.2, beta: float = 1.0):
        super().__init__(memory_size=memory_size, batch_size=batch_size)
        self.alpha = alpha
        self.beta = beta

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        state = super().initial_state(model, input_shape, num_classes)
        reservoir.check_fits(self.memory_size, num_classes * state["inputs"].element_size(), state["inputs"].device)
        return {**state, "logits": state["inputs"].new_zeros(self.memory_size + 1, num_classes)}

    def draws(self, batch_size: int) -> Shapes:
        return {**super().draws(batch_size), "read labels": (self.batch_size or batch_size,)}

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        if moment.first:
            return super().loss(model, still, state, batch, random, moment)
        rows = [reservoir.read(state, random[name]) for name in ("read", "read labels")]
        first, second = (reservoir.stored(state, some) for some in rows)
        assert first.tasks is not None
        assert second.tasks is not None
        parts = (batch, first, second)
        logits = model(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
        of_new, of_first, of_second = logits.split([len(part.targets) for part in parts])
        new = F.cross_entropy(masked(of_new, moment.new), batch.targets)
        allowed = moment.allowed[first.tasks]
        squares = torch.where(allowed, of_first - state["logits"][rows[0]], 0).square()
        dark = (squares.sum(dim=1) / allowed.sum(dim=1)).mean()
        labels = F.cross_entropy(masked(of_second, moment.allowed[second.tasks]), second.targets)
        return new + self.alpha * dark + self.beta * labels, of_new

    def stores_in(self, epoch: int) -> bool:
        return True

    def store(self, state: State, batch: Batch, logits: Tensor, random: Draws, n: int) -> State:
        rows = {**reservoir.rows_of(batch, n), "logits": logits}
        return reservoir.write(state, rows, random["write"])
