"""A penalty in Lightning's Trainer takes the same steps as in a loop, to the last digit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import engram
from builders import refusal

pytest.importorskip("lightning", reason="needs Lightning: make test-frameworks")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer

    from engram.integrations.lightning import PenaltyCallback

pytestmark = pytest.mark.filterwarnings("ignore")
PENALTIES = {
    "ewc": (engram.EWC, {"strength": 30.0}),
    "online-ewc": (engram.OnlineEWC, {"strength": 30.0, "gamma": 0.9}),
    "si": (engram.SI, {"strength": 3.0}),
    "mas": (engram.MAS, {"strength": 1.0}),
}


class Module(LightningModule):
    def __init__(self, rate: float = 0.1):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = engram.DHPSoftmax(8, 3, eta=0.1)
        self.rate = rate

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.features(inputs), targets)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return cross_entropy(self(*batch), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def tasks() -> list[DataLoader]:
    random = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        centres = 2 * torch.randn(3, 6, generator=random)
        labels = torch.arange(40) % 3
        made.append(DataLoader(TensorDataset(centres[labels] + torch.randn(40, 6, generator=random), labels), 8))
    return made


def trainer(*callbacks: PenaltyCallback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 2}
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})


def by_hand(kind: Any, settings: dict, step: str, clip: float | None = None, every: int = 1) -> tuple[Module, Any]:
    """The same, as a loop."""
    module = Module()
    penalty = kind(module, **settings)
    for loader in tasks():
        optimizer = module.configure_optimizers()
        module.train()
        for _ in range(2):
            batches = list(loader)
            for n, (inputs, targets) in enumerate(batches):
                loss = cross_entropy(module(inputs, targets), targets) / every
                if step == "gradient":
                    loss = loss + penalty.loss() / every
                loss.backward()
                if (n + 1) % every and n + 1 < len(batches):
                    continue
                penalty.after_backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
                optimizer.step()
                if step == "proximal":
                    penalty.proximal_step(optimizer)
                penalty.after_step()
                optimizer.zero_grad()
        penalty.consolidate(loader)
    return module, penalty


def assert_same(module: Module, callback: PenaltyCallback, other: Module, penalty: Any) -> None:
    for name, tensor in other.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert callback.penalty.state_dict().keys() == penalty.state_dict().keys()
    for name, tensor in penalty.state_dict().items():
        assert torch.equal(callback.penalty.state_dict()[name], tensor), name


@pytest.mark.parametrize("step", ["proximal", "gradient"])
@pytest.mark.parametrize("name", PENALTIES)
def test_three_tasks_are_those_of_a_loop_to_the_last_digit(name: str, step: str) -> None:
    kind, settings = PENALTIES[name]
    module, callback = Module(), PenaltyCallback(kind, penalty_step=step, **settings)
    for loader in tasks():
        trainer(callback).fit(module, loader)
    assert_same(module, callback, *by_hand(kind, settings, step))
    plain = Module()
    for loader in tasks():
        trainer().fit(plain, loader)
    assert not torch.equal(plain.head.weight, module.head.weight), "the penalty does something"


@pytest.mark.parametrize(
    ("options", "own"), [({"gradient_clip_val": 0.1}, {"clip": 0.1}), ({"accumulate_grad_batches": 2}, {"every": 2})]
)
@pytest.mark.parametrize("name", ["si", "online-ewc"])
def test_clipping_and_accumulation(name: str, options: dict, own: dict) -> None:
    kind, settings = PENALTIES[name]
    module, callback = Module(), PenaltyCallback(kind, **settings)
    for loader in tasks():
        trainer(callback, **options).fit(module, loader)
    assert_same(module, callback, *by_hand(kind, settings, "proximal", **own))


def test_a_checkpoint_holds_the_penalty(tmp_path: Path) -> None:
    kind, settings = PENALTIES["si"]
    first, second, *_ = tasks()
    module, callback = Module(), PenaltyCallback(kind, **settings)
    trainer(callback).fit(module, first)
    halfway = trainer(callback, max_epochs=1)
    halfway.fit(module, second)
    halfway.save_checkpoint(tmp_path / "half.ckpt")
    other, restored = Module(), PenaltyCallback(kind, **settings)
    trainer(restored, max_epochs=1).fit(other, second, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert restored.penalty.loss().item() == callback.penalty.loss().item() == 0
    for name in ("importance", "anchor"):
        for key, tensor in callback.penalty.state_dict().items():
            if name in key:
                assert torch.equal(restored.penalty.state_dict()[key], tensor), key


def test_a_head_may_grow_between_tasks() -> None:
    module, callback = Module(), PenaltyCallback(engram.OnlineEWC, strength=30.0)
    first, second, _ = tasks()
    trainer(callback).fit(module, first)
    module.head.grow(5)
    trainer(callback).fit(module, second)
    assert callback.penalty.parameters["head.weight"] is module.head.weight


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Named(Module):
    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), number)


def test_what_a_penalty_cannot_follow_is_refused() -> None:
    loader = tasks()[0]
    callback = PenaltyCallback(engram.OnlineEWC, strength=30.0)
    assert "automatic optimization" in refusal(trainer(callback).fit, Manual(), loader)
    assert "penalty_step" in refusal(PenaltyCallback, engram.SI, penalty_step="sideways")
    trainer(callback).fit(Module(), loader)
    assert "another module" in refusal(trainer(callback).fit, Module(), loader)
    named = DataLoader([{"x": x, "y": y} for x, y in loader.dataset], 8)
    callback = PenaltyCallback(engram.OnlineEWC, strength=30.0)
    assert "must be (inputs, targets) for a penalty, not a dict" in refusal(trainer(callback).fit, Named(), named)
