"""The parts of the memory heads, each against a direct reading of its equation in float64."""

from __future__ import annotations

import pytest
import torch

from engram.common.errors import InputError
from engram.nn import memory
from engram.nn.psi import Psi, draw_projection, random_relu


def samples(num_samples: int = 60, num_features: int = 5, num_classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(num_samples) % num_classes
    psi = torch.randn(num_samples, num_features, generator=generator, dtype=torch.float64)
    return psi + target[:, None], target


def sums(psi: torch.Tensor, target: torch.Tensor, num_classes: int = 3) -> tuple[torch.Tensor, ...]:
    return (*memory.class_sums(psi, target, num_classes), memory.second_moment(psi))


def test_psi_divides_by_the_norm() -> None:
    hidden, _ = samples()
    assert torch.allclose(memory.normalise(hidden).norm(dim=1), torch.ones(60, dtype=torch.float64))
    assert torch.equal(memory.normalise(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_psi_keeps_the_largest_features() -> None:
    assert memory.top_k(torch.tensor([[1.0, 5.0, 3.0, 4.0]]), 2).tolist() == [[0, 5, 0, 4]]


def test_random_features_are_never_negative() -> None:
    hidden, _ = samples()
    projection = torch.randn(5, 8, dtype=torch.float64)
    expected = [[max(0.0, float(h @ r)) for r in projection.T] for h in hidden]
    assert torch.allclose(random_relu(hidden, projection), torch.tensor(expected, dtype=torch.float64))


def test_a_random_feature_sees_a_window_of_neighbouring_inputs() -> None:
    torch.manual_seed(0)  # one of a few million draws is exactly 0
    projection = draw_projection(784, 2000, window=200)
    seen = projection != 0
    assert torch.equal(seen.sum(dim=0), torch.full((2000,), 200))
    assert torch.equal((seen[1:] != seen[:-1]).sum(dim=0) + seen[0].int() + seen[-1].int(), torch.full((2000,), 2))
    assert seen.any(dim=1).all(), "each input is seen"
    assert abs(float(projection.square().sum(dim=0).mean()) - 1) < 0.01
    assert Psi(5, random_features=3, random_window=9).projection.ne(0).all(), "a window is no wider than the inputs"


def test_sums_are_those_of_each_class() -> None:
    psi, target = samples()
    count, total, moment = sums(psi, target)
    for c in range(3):
        assert count[c] == (target == c).sum()
        assert torch.allclose(total[c], psi[target == c].sum(dim=0), rtol=1e-14)
    assert torch.allclose(moment, sum(torch.outer(p, p) for p in psi), rtol=1e-13)


def test_a_weight_of_two_counts_as_two_samples() -> None:
    psi, target = samples()
    weight = torch.ones(60, dtype=torch.float64)
    weight[:10] = 2
    twice = torch.cat([torch.arange(60), torch.arange(10)])
    weighted = (*memory.class_sums(psi, target, 3, weight), memory.second_moment(psi, weight))
    for one, other in zip(weighted, sums(psi[twice], target[twice]), strict=True):
        assert torch.allclose(one, other, rtol=1e-13)


def test_covariance_is_that_within_classes() -> None:
    psi, target = samples()
    centred = torch.cat([psi[target == c] - psi[target == c].mean(dim=0) for c in range(3)])
    expected = centred.T @ centred / 60
    assert torch.allclose(memory.within_class_covariance(*sums(psi, target)), expected, atol=1e-13)


def test_nearest_mean_is_the_nearest() -> None:
    psi, target = samples()
    count, total, _ = sums(psi, target)
    mean = memory.class_means(count, total)
    weight, bias = memory.read_nearest_mean(mean)
    distance = torch.cdist(psi, mean).square()
    assert torch.allclose(psi @ weight.T + bias, psi.square().sum(dim=1, keepdim=True) - distance, atol=1e-12)


def test_lda_is_scikit_learns_without_priors() -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    psi, target = samples()
    count, total, moment = sums(psi, target)
    covariance = memory.within_class_covariance(count, total, moment)
    weight, bias = memory.read_lda(memory.class_means(count, total), covariance, shrinkage=0.3)
    # scikit-learn standardises each feature first, so features of one variance make its shrinkage the same as ours
    peer = LinearDiscriminantAnalysis(
        solver="lsqr",
        covariance_estimator=_Given(
            ((1 - 0.3) * covariance + 0.3 * covariance.diagonal().mean() * torch.eye(5)).numpy()
        ),
        priors=[1 / 3] * 3,
    ).fit(psi.numpy(), target.numpy())
    ours = psi @ weight.T + bias
    theirs = torch.from_numpy(peer.decision_function(psi.numpy()))
    assert torch.allclose(ours - ours.mean(dim=1, keepdim=True), theirs - theirs.mean(dim=1, keepdim=True), atol=1e-9)


class _Given:
    """A covariance estimator of scikit-learn that returns the covariance that it was given."""

    def __init__(self, covariance):
        self.covariance_ = covariance

    def get_params(self, deep: bool = True) -> dict:
        return {"covariance": self.covariance_}

    def fit(self, X, y=None):
        return self


def test_ridge_is_scikit_learns() -> None:
    from sklearn.linear_model import Ridge

    psi, target = samples()
    goal = torch.nn.functional.one_hot(target, 3).double()
    weight, bias = memory.read_ridge(
        memory.second_moment(psi), psi.T @ goal, psi.sum(dim=0), goal.sum(dim=0), torch.tensor(60.0).double(), ridge=2.5
    )
    peer = Ridge(alpha=2.5).fit(psi.numpy(), goal.numpy())
    assert torch.allclose(weight, torch.from_numpy(peer.coef_), atol=1e-12)
    assert torch.allclose(bias, torch.from_numpy(peer.intercept_), atol=1e-12)


def test_a_singular_moment_is_refused() -> None:
    psi = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"singular.* raise ridge"):
        memory.solve(memory.second_moment(psi), torch.ones(3, 1, dtype=torch.float64), "ridge")


def test_a_moment_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(InputError, match=r"takes 8,000,000,000,000 bytes"):
        memory.check_moment_fits(10**6)


def test_the_usual_shrinkage_falls_as_samples_come() -> None:
    found = [float(memory.usual_shrinkage(1000, torch.tensor(n).double())) for n in (0, 10, 1000, 10_000)]
    assert found == pytest.approx([1, 1, 0.15, 0.015])
