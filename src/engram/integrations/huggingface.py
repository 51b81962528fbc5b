"""Engram's penalties in a Trainer of Hugging Face's transformers. Each `train` is a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from engram.common.errors import InputError, check_choice
from engram.penalties import SI, Penalty
from engram.penalties.penalty import check_step

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as reason:
    raise ModuleNotFoundError(
        "transformers is not installed: pip install 'engram-cl[huggingface]'", name=reason.name
    ) from None


class PenaltyCallback(TrainerCallback):
    """One of Engram's penalties in a Trainer.

    The penalty is made when the first `train` starts, acts in each step, and consolidates on the training samples when
    the `train` ends. Use the same callback, and the same model, in the Trainer of each task; `callback.penalty` is the
    penalty itself, whose `state_dict()` you save.

    Args:
        penalty: a penalty's class, or a function that makes a penalty for a model.
        inputs: the name of the model's input, such as "pixel_values", or the names of several of one shape and type,
            such as ("input_ids", "attention_mask").
        labels: the name of the class numbers.
        penalty_step: "proximal", after the optimizer's step, as in Engram's own runs; or "gradient", added to the
            gradient before it, after the Trainer's clipping.
        classes: for consolidation: the outputs that take part, where a task has its own; None for all.
        settings: settings of the penalty, such as its strength.

    Raises:
        InputError: if the Trainer works in a way in which the penalty would be wrong.

    Example:
        >>> callback = PenaltyCallback(engram.OnlineEWC, inputs="pixel_values", strength=100)
        >>> for dataset in tasks:
        ...     Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()
    """

    penalty: Penalty | None

    def __init__(
        self,
        penalty: Callable[..., Penalty],
        *,
        inputs: str | Sequence[str],
        labels: str = "labels",
        penalty_step: str = "proximal",
        classes: tuple[int, ...] | None = None,
        **settings: Any,
    ):
        check_choice("penalty_step", penalty_step, ("proximal", "gradient"))
        self.make = partial(penalty, **settings)
        self.inputs = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        self.labels = labels
        self.penalty_step = penalty_step
        self.classes = classes
        self.penalty = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.world_size > 1:
            raise InputError(
                "a PenaltyCallback works in one process: write a loop with DistributedDataParallel instead"
            )
        if args.fp16:
            raise InputError("a PenaltyCallback cannot follow a GradScaler: use bf16=True, or neither")
        model: nn.Module = given["model"]
        if self.penalty is None:
            self.penalty = self.make(_Logits(model, self.inputs))
            check_step(self.penalty, self.penalty_step)
        elif getattr(self.penalty.model, "model", None) is not model:
            raise InputError("this PenaltyCallback belongs to another model: use one callback for each model")
        else:
            self.penalty.check_alive()
        if isinstance(self.penalty, SI) and args.max_grad_norm > 0:
            raise InputError("SI must read the gradients before they are clipped: set max_grad_norm=0")
        if isinstance(self.penalty, SI) and self.penalty_step == "gradient":
            raise InputError("SI cannot follow a gradient that is added after the Trainer's: use its proximal step")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if isinstance(self.penalty, SI):
            # To measure the norm, the Trainer multiplies gradients by 1, since `max_grad_norm` is 0.
            self.penalty.gradients.accept()
        if self.penalty is not None and self.penalty_step == "gradient":
            self.penalty.loss().backward()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.penalty is None:
            return
        if self.penalty_step == "proximal":
            optimizer = given["optimizer"]
            self.penalty.proximal_step(getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it
        self.penalty.after_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.penalty is not None:
            batches = self._batches(given["train_dataloader"], args.per_device_train_batch_size, args.device)
            self.penalty.consolidate(batches, self.classes)

    def _batches(self, loader: Any, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's samples in their own order, so that no random number is drawn."""
        for batch in DataLoader(loader.dataset, batch_size=batch_size, collate_fn=loader.collate_fn):
            for name in (*self.inputs, self.labels):
                if name not in batch:
                    raise InputError(f"a batch has no {name!r}, only {', '.join(map(repr, batch))}")
            parts = [batch[name].to(device) for name in self.inputs]
            yield parts[0] if len(parts) == 1 else torch.stack(parts, dim=1), batch[self.labels].to(device)


class _Logits(nn.Module):
    """The model as penalties see one: a tensor of inputs to logits."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, inputs: Tensor) -> Tensor:
        parts = (inputs,) if len(self.names) == 1 else inputs.unbind(dim=1)
        outputs = self.model(**dict(zip(self.names, parts, strict=True)))
        return outputs if isinstance(outputs, Tensor) else outputs["logits"]
