"""A penalty in Hugging Face's Trainer takes the same steps as in a loop, to the last digit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import engram
from builders import refusal

pytest.importorskip("transformers", reason="needs transformers: make test-frameworks")
pytest.importorskip("accelerate", reason="needs accelerate: make test-frameworks")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments

    from engram.integrations.huggingface import PenaltyCallback

pytestmark = pytest.mark.filterwarnings("ignore")
PENALTIES = {
    "ewc": (engram.EWC, {"strength": 30.0}),
    "online-ewc": (engram.OnlineEWC, {"strength": 30.0, "gamma": 0.9}),
    "si": (engram.SI, {"strength": 3.0}),
    "mas": (engram.MAS, {"strength": 1.0}),
}


class Model(nn.Module):
    """As models of transformers: named inputs, and a loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = engram.DHPSoftmax(8, 3, eta=0.1)
        self.seen: list[tuple[Tensor, Tensor]] = []  # the training batches

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and labels is not None:
            self.seen.append((x, labels))
        logits = self.head(self.features(x), labels if self.training else None)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def tasks() -> list[list[dict[str, Tensor]]]:
    random = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        centres = 2 * torch.randn(3, 6, generator=random)
        made.append(
            [{"x": centres[n % 3] + torch.randn(6, generator=random), "labels": torch.tensor(n % 3)} for n in range(40)]
        )
    return made


def train(model: nn.Module, dataset: Any, callback: PenaltyCallback | None, folder: Path, **changes: Any) -> None:
    options = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "max_grad_norm": 0.0, "use_cpu": True}
    options |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    arguments = TrainingArguments(output_dir=str(folder), **{**options, **changes})
    callbacks = [] if callback is None else [callback]
    Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks, optimizers=(optimizer, schedule)).train()


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, step) for name in PENALTIES for step in ("proximal", "gradient") if (name, step) != ("si", "gradient")],
)
def test_three_tasks_are_those_of_a_plain_loop_to_the_last_digit(name: str, step: str, tmp_path: Path) -> None:
    kind, settings = PENALTIES[name]
    model, callback = Model(), PenaltyCallback(kind, inputs="x", penalty_step=step, **settings)
    other = Model()
    penalty = kind(nn.Sequential(other.features, other.head), **settings)
    for dataset in tasks():
        model.seen.clear()
        train(model, dataset, callback, tmp_path)
        assert len(model.seen) == 10
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        other.train()
        for x, labels in model.seen:
            loss = other(x, labels)["loss"]
            optimizer.zero_grad()
            (loss + penalty.loss() if step == "gradient" else loss).backward()
            optimizer.step()
            if step == "proximal":
                penalty.proximal_step(optimizer)
            penalty.after_step()
            schedule.step()
        whole = [
            (torch.stack([s["x"] for s in part]), torch.stack([s["labels"] for s in part])) for part in chunks(dataset)
        ]
        penalty.consolidate(whole)
        for key, tensor in other.state_dict().items():
            assert torch.equal(model.state_dict()[key], tensor), key
    found = list(callback.penalty.state_dict().values())
    for one, expected in zip(found, penalty.state_dict().values(), strict=True):
        assert torch.equal(one, expected)


def chunks(dataset: list) -> list[list]:
    return [dataset[n : n + 8] for n in range(0, len(dataset), 8)]


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    model, callback = Model(), PenaltyCallback(engram.SI, inputs="x", strength=3.0)
    first, second, _ = tasks()
    for dataset in (first, second):
        train(model, dataset, callback, tmp_path, gradient_accumulation_steps=5)
    assert callback.penalty.loss().item() == 0
    assert len(model.seen) == 20


def test_several_inputs_of_one_shape() -> None:
    from engram.integrations.huggingface import _Logits

    class Masked(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            return {"logits": (ids * mask).float()}

    ids, mask = torch.arange(6).reshape(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    model = _Logits(Masked(), ("ids", "mask"))
    assert torch.equal(model(torch.stack([ids, mask], dim=1)), (ids * mask).float())


def test_what_a_penalty_cannot_follow_is_refused(tmp_path: Path) -> None:
    dataset = tasks()[0]
    callback = PenaltyCallback(engram.SI, inputs="x", strength=3.0)
    assert "set max_grad_norm=0" in refusal(train, Model(), dataset, callback, tmp_path, max_grad_norm=1.0)
    assert "penalty_step" in refusal(PenaltyCallback, engram.SI, inputs="x", penalty_step="sideways")
    added = PenaltyCallback(engram.SI, inputs="x", penalty_step="gradient", strength=3.0)
    assert "use its proximal step" in refusal(train, Model(), dataset, added, tmp_path)
    assert "another model" in refusal(train, Model(), dataset, callback, tmp_path)
    callback = PenaltyCallback(engram.OnlineEWC, inputs="pixels", strength=3.0)
    assert "a batch has no 'pixels', only 'x', 'labels'" in refusal(train, Model(), dataset, callback, tmp_path)
