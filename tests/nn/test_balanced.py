"""The balanced head: a random part of the features, and the frequencies of the classes."""

from __future__ import annotations

import pytest
import torch

import engram
from engram.nn.balanced import FADING, RAREST, BalancedSoftmax, BalancedTrace, mixed


def make(**settings: object) -> BalancedSoftmax:
    torch.manual_seed(0)
    return BalancedSoftmax(200, 4, **settings).double()


def test_training_is_the_equation() -> None:
    """z = θ (k ⊙ h) / (1 − d) + log π, with counts that fade."""
    head, hidden = make(head_dropout=0.25), torch.randn(3, 6, 200).double()
    targets = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [2, 2, 0, 0, 1, 1]])
    count = torch.zeros(4).double()
    for h, y in zip(hidden, targets, strict=True):
        kept = head.kept()
        assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
        count = (1 - FADING) * count + torch.bincount(y, minlength=4)
        expected = (h * kept) @ head.weight.T + (count / count.sum()).clamp(min=RAREST).log()
        torch.testing.assert_close(head(h, y), expected)
        assert not torch.equal(head.kept(), kept)  # the next batch keeps another part
    torch.testing.assert_close(head.eval()(hidden[0]), hidden[0] @ head.weight.T)


def test_with_a_trace_it_is_the_steady_head_on_what_is_kept() -> None:
    """z = (θ + α Ĥ) (k ⊙ h) / (1 − d) + log π, where Hebb is written from what is kept."""
    torch.manual_seed(0)
    head = BalancedTrace(20, 4, head_dropout=0.25).double()
    steady = engram.heads.create("steady", 20, 4).double()
    steady.load_state_dict({name: tensor for name, tensor in head.state_dict().items() if name in steady.state_dict()})
    count = torch.zeros(4).double()
    for _ in range(3):
        hidden, targets, kept = torch.randn(6, 20).double(), torch.tensor([0, 0, 0, 1, 1, 2]), head.kept()
        assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
        count = (1 - FADING) * count + torch.bincount(targets, minlength=4)
        expected = steady(hidden * kept, targets) + (count / count.sum()).clamp(min=RAREST).log()
        torch.testing.assert_close(head(hidden, targets), expected)
        torch.testing.assert_close(head.hebb, steady.hebb)
    torch.testing.assert_close(head.eval()(hidden), steady.eval()(hidden))
    torch.testing.assert_close(head.fold()(hidden), steady(hidden))


def test_a_trace_and_its_balance_grow_together() -> None:
    head = BalancedTrace(20, 4)
    head(torch.randn(6, 20), torch.tensor([0, 0, 0, 1, 1, 3]))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    head.grow(6)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor[:4] if tensor.ndim else tensor, before[name]), name
    assert head.around.shape == (6,)
    head(torch.randn(2, 20), torch.tensor([4, 5]))


def test_each_batch_keeps_another_part_and_each_feature_as_often() -> None:
    head, parts = make(head_dropout=0.3), []
    for _ in range(400):
        parts.append(head.kept() > 0)
        head.batches += 1
    kept = torch.stack(parts).double()
    assert abs(kept.mean() - 0.7) < 0.01
    assert (kept.mean(dim=0) - 0.7).abs().max() < 0.1  # four standard errors
    assert torch.corrcoef(kept[:100]).fill_diagonal_(0).abs().max() < 0.35


def test_the_part_depends_on_the_key_and_on_the_number_of_the_batch_alone() -> None:
    one, other = make(), make()
    assert torch.equal(one.kept(), other.kept())
    other.key += 1
    assert not torch.equal(one.kept(), other.kept())
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.kept(), other.kept())


def test_mixed_numbers_fill_their_range() -> None:
    numbers = mixed(torch.arange(100_000) + 2**40)
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < 2**32
    assert len(numbers.unique()) > 99_990
    assert torch.histc(numbers.double(), 10, 0, 2**32).sub(10_000).abs().max() < 400


def test_a_rare_class_learns_as_a_frequent_one_does() -> None:
    """Two classes of the same features, one nine times as frequent: a plain layer prefers it, this one does not."""
    hidden, targets = torch.ones(10, 200).double(), torch.tensor([0] * 9 + [1])
    preferences = []
    for head in (engram.LinearSoftmax(200, 2).double(), BalancedSoftmax(200, 2, head_dropout=0.0).double()):
        with torch.no_grad():
            head.weight.zero_()
        optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
        for _ in range(200):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(hidden, targets), targets).backward()
            optimizer.step()
        preferences.append(float(head.eval()(hidden[:1]).softmax(dim=1)[0, 0].detach()))
    assert preferences[0] == pytest.approx(0.9, abs=0.01)
    assert preferences[1] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_fraction_that_leaves_no_features_is_refused(share: float) -> None:
    with pytest.raises(engram.InputError, match=r"head_dropout must be at least 0 and below 1, not"):
        BalancedSoftmax(4, 2, head_dropout=share)
