"""Each relative of the DHP Softmax against a direct reading of its equations, sample by sample, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from engram import InputError
from engram.config.presets import STEADY
from engram.nn import writing
from engram.nn.modulated import Neuromodulated, Retroactive
from engram.nn.prototypes import CoPE
from engram.nn.relatives import FastWeights, HebbianSoftmax

M, C = 5, 4


def batches(number: int = 6, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(torch.randn(size, M, dtype=torch.float64), torch.randint(C - 1, (size,))) for _ in range(number)]


def means(values: Tensor, target: Tensor) -> dict[int, Tensor]:
    return {int(c): values[target == c].mean(dim=0) for c in target.unique()}


def step(head: nn.Module, hidden: Tensor, target: Tensor, rate: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a training step of plain SGD."""
    head.zero_grad()
    logits = head(hidden, target)
    F.cross_entropy(logits, target).backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for p in head.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad)
    return logits.detach(), gradients


# --- the parts


def test_rates_and_gates_are_those_of_their_equations() -> None:
    added, count = torch.tensor([[2.0], [0.0], [1.0]]), torch.tensor([[2.0], [5.0], [50.0]])
    assert writing.running_rate(added, count, 0.1).flatten().tolist() == pytest.approx([1.0, 0.0, 0.1])
    rate = writing.running_rate(added, count, 0.1)
    assert writing.while_rare(rate, count, 50).flatten().tolist() == [1.0, 0.0, 0.0]


def test_a_mean_at_the_running_rate_is_the_mean_of_all_samples() -> None:
    mean, count, seen = torch.zeros(C, M, dtype=torch.float64), torch.zeros(C, 1, dtype=torch.float64), []
    for hidden, target in batches():
        sums, added = writing.batch_sums(hidden, target, C)
        count = count + added
        mean = writing.blend(mean, sums / added.clamp(min=1), writing.running_rate(added, count))
        seen.append((hidden, target))
    for c, expected in means(torch.cat([h for h, _ in seen]), torch.cat([t for _, t in seen])).items():
        torch.testing.assert_close(mean[c], expected, rtol=1e-12, atol=1e-14)
    assert not mean[C - 1].any()


def test_a_clipped_sum_stays_within_its_bound() -> None:
    assert writing.clipped_sum(torch.tensor([0.9, -0.9, 0.1]), torch.tensor([0.5, -0.5, 0.1])).tolist() == (
        pytest.approx([1.0, -1.0, 0.2])
    )


def test_a_modulator_is_a_tanh_of_the_features() -> None:
    ((hidden, _),) = batches(1)
    weight, bias = torch.randn(M, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    for row, signal in zip(hidden, writing.modulator(hidden, weight, bias), strict=True):
        assert float(signal) == pytest.approx(math.tanh(sum(map(float, row * weight)) + 0.3))


# --- the heads


def test_hebbian_softmax() -> None:
    head = HebbianSoftmax(M, C, slowest_rate=0.2, rare_until=12).double()
    theta, count = head.weight.detach().clone(), [0] * C
    pending: dict[int, Tensor] = {}
    pending_count: dict[int, int] = {}
    for hidden, target in batches():
        for c, mean in pending.items():  # after the step of the last batch
            rate = max(pending_count[c] / count[c], 0.2) if count[c] < 12 else 0.0
            theta[c] = (1 - rate) * theta[c] + rate * mean
        expected = hidden @ theta.T
        logits, gradients = step(head, hidden, target)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-14)
        theta -= 0.1 * gradients["weight"]
        pending, pending_count = means(hidden, target), {int(c): int((target == c).sum()) for c in target.unique()}
        for c, number in pending_count.items():
            count[c] += number
    for c, mean in pending.items():
        rate = max(pending_count[c] / count[c], 0.2) if count[c] < 12 else 0.0
        theta[c] = (1 - rate) * theta[c] + rate * mean
    torch.testing.assert_close(head.eval()(hidden), hidden @ theta.T, rtol=1e-12, atol=1e-14)
    head.settle()
    torch.testing.assert_close(head.weight.detach(), theta, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(head(hidden), hidden @ theta.T, rtol=1e-12, atol=1e-14)
    assert max(count) > 12, "the gate closed on the way"


def test_fast_weights() -> None:
    head = FastWeights(M, C, num_keys=3).double()
    seen: list[tuple[Tensor, int]] = []
    for hidden, target in batches():
        theta, key = (p.detach().clone().requires_grad_() for p in (head.weight, head.keys.linear.weight))
        keys = torch.tanh(hidden @ key.T)
        rows = []
        for c in range(C):
            own = [f for f, y in seen if y == c] + [f for f, y in zip(keys, target, strict=True) if y == c]
            rows.append(torch.stack(own).mean(dim=0) if own else torch.zeros(3, dtype=torch.float64))
        expected = hidden @ theta.T + keys @ torch.stack(rows).T
        F.cross_entropy(expected, target).backward()
        logits, gradients = step(head, hidden, target)
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients["weight"], theta.grad, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(gradients["keys.linear.weight"], key.grad, rtol=1e-11, atol=1e-14)
        seen += [(f.detach(), int(y)) for f, y in zip(keys, target, strict=True)]


def test_neuromodulated() -> None:
    head = Neuromodulated(M, C, alpha_init=2.0).double()
    trace = torch.zeros(C, M, dtype=torch.float64)
    for hidden, target in batches():
        names = ("weight", "alpha", "gate", "gate_bias")
        theta, alpha, w, b = (getattr(head, name).detach().clone().requires_grad_() for name in names)
        signal = torch.tanh(hidden @ w + b)
        rows = [trace[c] for c in range(C)]
        for c, mean in means(signal[:, None] * hidden, target).items():
            rows[c] = (trace[c] + mean).clamp(-1, 1)
        written = torch.stack(rows)
        expected = hidden @ (theta + alpha * written).T
        F.cross_entropy(expected, target).backward()
        logits, gradients = step(head, hidden, target)
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-12, atol=1e-14)
        for name, leaf in zip(names, (theta, alpha, w, b), strict=True):
            torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-10, atol=1e-14)
        trace = written.detach()
    torch.testing.assert_close(head.hebb, trace, rtol=1e-12, atol=1e-14)
    assert (trace.abs() == 1).any(), "the trace was clipped on the way"


def test_retroactive() -> None:
    head = Retroactive(M, C, alpha_init=2.0, eta=0.3).double()
    trace, eligibility = torch.zeros(2, C, M, dtype=torch.float64)
    for hidden, target in batches():
        names = ("weight", "alpha", "gate", "gate_bias", "eta")
        theta, alpha, w, b, eta = (getattr(head, name).detach().clone().requires_grad_() for name in names)
        own = means(hidden, target)
        none = torch.zeros(M, dtype=torch.float64)
        now = torch.stack([(1 - eta) * eligibility[c] + eta * own.get(c, none) for c in range(C)])
        written = (trace + torch.tanh(hidden @ w + b).mean() * now).clamp(-1, 1)
        expected = hidden @ (theta + alpha * written).T
        F.cross_entropy(expected, target).backward()
        logits, gradients = step(head, hidden, target)
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-12, atol=1e-14)
        for name, leaf in zip(names, (theta, alpha, w, b, eta), strict=True):
            torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-10, atol=1e-14)
        trace, eligibility = written.detach(), now.detach()
    torch.testing.assert_close(head.eligibility, eligibility, rtol=1e-12, atol=1e-14)


def test_cope() -> None:
    head = CoPE(M, C, rate=0.2, temperature=0.5).double()
    prototypes: dict[int, Tensor] = {}
    pending: dict[int, Tensor] = {}
    for hidden, target in [*batches(), (None, None)]:
        for c, mean in pending.items():
            moved = mean if c not in prototypes else 0.8 * prototypes[c] + 0.2 * mean
            prototypes[c] = moved / moved.norm()
        if hidden is None:
            break
        leaf = hidden.clone().requires_grad_()
        psi = leaf / leaf.norm(dim=1, keepdim=True)
        rows = [prototypes.get(c, torch.zeros(M, dtype=torch.float64)) for c in range(C)]
        expected = psi @ torch.stack(rows).T / 0.5
        found = hidden.clone().requires_grad_()
        logits = head(found, target)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-14)
        for z in (expected, logits):
            F.cross_entropy(z, target).backward()
        if leaf.grad is not None:
            torch.testing.assert_close(found.grad, leaf.grad, rtol=1e-11, atol=1e-14)
        pending = means(psi.detach(), target)
    read = head.eval()(batches(1)[0][0])
    assert not read.argmax(dim=1).eq(C - 1).any(), "a class without a prototype never wins"
    torch.testing.assert_close(head.evolved()[0], prototypes[0], rtol=1e-12, atol=1e-14)


def test_two_names_are_forms_of_the_dhp_softmax() -> None:
    torch.manual_seed(0)
    steady = engram.heads.create("steady", M, C)
    torch.manual_seed(0)
    form = {k: v for k, v in STEADY.items() if k != "protect"}
    other = engram.DHPSoftmax(M, C, **form)
    for hidden, target in batches():
        assert torch.equal(steady(hidden.float(), target), other(hidden.float(), target))
    assert engram.preset("split-mnist", "steady+si").protect == "in-force"
    assert engram.heads.create("dhp-uniform", M, C).alpha.shape == ()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("hebbian-softmax", {"slowest_rate": 2}, "slowest_rate must lie in [0, 1], not 2"),
        ("fast-weights", {"num_keys": 0}, "num_keys must be at least 1, not 0"),
        ("neuromodulated", {"alpha_init": -1}, "alpha_init must be at least 0, not -1"),
        ("retroactive", {"eta": 2}, "eta must lie in [0, 1], not 2"),
        ("cope", {"temperature": 0}, "temperature must be above 0, not 0"),
        ("cope", {"rate": -1}, "rate must lie in [0, 1], not -1"),
        ("linear", {"eta": 1}, "the head linear has no setting 'eta', only bias"),
        ("slda", {"random_window": 2}, "random_window has no effect without random_features: leave it out, or give"),
        ("ncm", {"random_window": 2, "random_features": 0}, "random_window has no effect without random_features"),
        ("slda", {"eta": 1}, "the head slda has no setting 'eta', only learn_features, normalised, random_features"),
        ("slda", {"top_k": 9}, "top_k cannot be 9: there are 5 features"),
        ("slda", {"shrinkage": 2}, "shrinkage must be a number in [0, 1], not 2"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(name: str, settings: dict[str, float], words: str) -> None:
    with pytest.raises(InputError) as error:
        engram.heads.create(name, M, C, **settings)
    assert str(error.value).startswith(words)
