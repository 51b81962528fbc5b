"""Engram's penalties in a Trainer of Lightning. Each `fit` is a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engram.common.errors import InputError, check_choice
from engram.penalties import Penalty
from engram.penalties.penalty import check_step

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError as reason:
    raise ModuleNotFoundError(
        "Lightning is not installed: pip install 'engram-cl[lightning]'", name=reason.name
    ) from None


class PenaltyCallback(Callback):
    """One of Engram's penalties in a Trainer.

    The penalty is made when the first `fit` starts, acts in each step, and consolidates on the training samples when
    the `fit` ends. Use the same callback in the `fit` of each task. It takes the same steps as a loop of your own, also
    with clipping and accumulation. Its state is in Lightning's checkpoints; `callback.penalty` is the penalty itself.

    The module's `forward(inputs)` must return logits, and a batch must be (inputs, targets). A plastic head is given
    the targets in your `training_step`. Automatic optimization with one optimizer, in one process, is supported.

    Args:
        penalty: a penalty's class, or a function that makes a penalty for a model.
        penalty_step: "proximal", after the optimizer's step, as in Engram's own runs; or "gradient", in the loss.
        classes: for consolidation: the outputs that take part, where a task has its own; None for all. It may be set
            anew for each task: `callback.classes = (2, 3)`.
        settings: settings of the penalty, such as its strength.

    Raises:
        InputError: if the Trainer works in a way in which the penalty would be wrong.

    Example:
        >>> callback = PenaltyCallback(engram.OnlineEWC, strength=100)
        >>> for loader in tasks:
        ...     Trainer(max_epochs=5, callbacks=[callback]).fit(module, loader)
    """

    penalty: Penalty | None

    def __init__(
        self,
        penalty: Callable[..., Penalty],
        *,
        penalty_step: str = "proximal",
        classes: tuple[int, ...] | None = None,
        **settings: Any,
    ):
        check_choice("penalty_step", penalty_step, ("proximal", "gradient"))
        self.make = partial(penalty, **settings)
        self.penalty_step = penalty_step
        self.classes = classes
        self.penalty = None
        self.saved: dict[str, Tensor] | None = None  # of a checkpoint, until there is a penalty
        self.num_steps = 0  # that the Trainer has taken

    # --- a task

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise InputError("a PenaltyCallback needs automatic optimization with one optimizer: write a loop instead")
        if trainer.world_size > 1:
            raise InputError(
                "a PenaltyCallback works in one process: write a loop with DistributedDataParallel instead"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise InputError("a PenaltyCallback cannot follow a GradScaler: use precision='bf16-mixed' or 32")
        if self.penalty is None:
            self.penalty = self.make(pl_module)
            check_step(self.penalty, self.penalty_step)
        elif self.penalty.model is not pl_module:
            raise InputError("this PenaltyCallback belongs to another module: use one callback for each module")
        elif any(own is not theta for own, theta in zip(*self._weights(pl_module), strict=True)):
            self.penalty.grow()  # the head has grown between two tasks
        if self.saved is not None:
            self.penalty.load_state_dict(self.saved)
            self.saved = None
        self.num_steps = trainer.global_step

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.penalty is not None and self.penalty_step == "gradient":
            loss += self.penalty.loss() / trainer.accumulate_grad_batches  # Lightning divides the loss likewise

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.penalty is not None:
            self.penalty.after_backward()  # Lightning clips the gradients next

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.penalty is None or trainer.global_step == self.num_steps:  # a batch whose gradients are accumulated
            return
        self.num_steps = trainer.global_step
        if self.penalty_step == "proximal":
            self.penalty.proximal_step(trainer.optimizers[0])
        self.penalty.after_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.penalty is not None:
            with torch.enable_grad():
                self.penalty.consolidate(_batches(trainer, pl_module), self.classes)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {} if self.penalty is None else {"penalty": self.penalty.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict.get("penalty")

    def _weights(self, module: LightningModule) -> tuple[list[Any], list[Tensor]]:
        """The module's tensors under the names of the penalty's, and the penalty's."""
        assert self.penalty is not None
        now = dict(module.named_parameters())
        return [now.get(name) for name in self.penalty.parameters], list(self.penalty.parameters.values())


def _batches(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the training loader, on the module's device."""
    for batch in trainer.train_dataloader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise InputError(f"a batch must be (inputs, targets) for a penalty, not a {type(batch).__name__}")
        inputs, targets = module.transfer_batch_to_device(batch, module.device, 0)
        yield inputs, targets
