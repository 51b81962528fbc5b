"""Ways to use a penalty that would give wrong numbers without a word: each is right, refused, or warned about once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram import EWC, MAS, SI, Penalty

# --- half precision -----------------------------------------------------------------------------------------------


def importances_of(kind: type[Penalty], dtype: torch.dtype, **options: object) -> dict[str, Tensor]:
    """Of a model whose weights and samples are those of bfloat16, computed in another type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 4)).bfloat16().to(dtype)
    batches = [(torch.randn(4, 6).bfloat16().to(dtype), torch.randint(4, (4,))) for _ in range(200)]
    penalty = kind(model, strength=1.0, **options)
    penalty.consolidate(batches)
    return penalty.terms[0].importance


@pytest.mark.parametrize("labels", ["true", "exact"])
def test_importances_of_a_model_in_half_precision_are_summed_in_single(labels: str) -> None:
    right = importances_of(EWC, torch.float64, labels=labels)
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003)):
        for name, omega in importances_of(EWC, dtype, labels=labels).items():
            assert omega.dtype == torch.float32
            assert omega.sum().item() == pytest.approx(right[name].sum().item(), rel=tolerance), "was 20% and more low"


def test_the_path_of_a_model_in_half_precision_is_summed_in_single() -> None:
    """Steps that each lower the loss by the same little: in bfloat16 their sum stops at 256 times the first."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    penalty = SI(model, strength=1.0)
    for _ in range(600):
        with torch.no_grad():
            model.weight.zero_()
        model.weight.grad = torch.ones_like(model.weight)
        penalty.state["before.weight"].zero_()
        with torch.no_grad():
            model.weight.sub_(2.0**-9)
        penalty.after_step()
    assert penalty.state["path.weight"].item() == pytest.approx(600 * 2.0**-9)


@pytest.mark.parametrize("kind", [EWC, MAS, SI])
def test_a_model_in_half_precision_is_protected_saved_and_loaded(kind: type[Penalty]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    x, y = torch.randn(8, 6).bfloat16(), torch.randint(4, (8,))
    penalty, twin = kind(model, strength=1e4), kind(model, strength=1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    penalty.after_step()
    penalty.consolidate([(x, y)])
    twin.load_state_dict(penalty.state_dict())
    anchor = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 0.5
    for each in (penalty, twin):
        weight = copy.deepcopy(model.state_dict())
        torch.testing.assert_close(each.loss(), penalty.loss())
        model.zero_grad()
        each.loss().backward()
        assert model.weight.grad.dtype == torch.bfloat16
        each.proximal_step(0.1)
        assert (model.weight - anchor).abs().sum() < 0.5 * 0.5 * anchor.numel(), "it was pulled back"
        model.load_state_dict(weight)
