"""The DHP Softmax against the plain reading of the paper: Eq. 2, Eq. 3 and Algorithm 1, class by class."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engram import DHPSoftmax, InputError, NotFiniteError
from engram.nn import dhp
from engram.nn.dhp import algorithm_1
from engram.nn.trace import PlasticSoftmax, class_shares


def write_trace(hebb: Tensor, hidden: Tensor, target: Tensor, eta: Tensor) -> Tensor:
    """Eq. 3 as the paper writes it:  (1 − η) Hebb + η h̃  for the classes of the batch."""
    share, present = class_shares(target, len(hebb), hidden.dtype)
    return torch.where(present > 0, (1 - eta) * hebb + eta * (share.T @ hidden), hebb)


def double_head(num_features: int, num_classes: int, seed: int = 0, **options) -> DHPSoftmax:
    """A head in float64 whose trace and coefficients are of the size of its weights."""
    torch.manual_seed(seed)
    head = DHPSoftmax(num_features, num_classes, **options).double()
    head.hebb.normal_()
    torch.nn.init.normal_(head.alpha)
    torch.nn.init.constant_(head.eta, 0.3)
    return head


# Few classes and small batches, so that absent, repeated and single classes all occur.
batches = st.integers(1, 5).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.integers(1, 4),
        st.lists(st.integers(0, classes - 1), min_size=1, max_size=8),
        st.integers(0, 2**31),
    )
)


@settings(max_examples=150, deadline=None)
@given(batches, st.sampled_from(["synapse", "uniform"]), st.floats(0, 1))
def test_layer_equals_algorithm_1_forward_and_in_all_gradients(batch, alpha, eta) -> None:
    num_classes, num_features, labels, seed = batch
    head = double_head(num_features, num_classes, seed, alpha=alpha)
    torch.nn.init.constant_(head.eta, eta)
    hidden = torch.randn(len(labels), num_features, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(labels)
    wanted = (head.weight, head.alpha, head.eta, hidden)
    logits_by_paper, trace_by_paper = algorithm_1(hidden, target, head.weight, head.alpha, head.eta, head.hebb)
    probe = torch.randn_like(logits_by_paper)
    gradients_by_paper = torch.autograd.grad((logits_by_paper * probe).sum(), wanted)

    logits = head(hidden, target)
    gradients = torch.autograd.grad((logits * probe).sum(), wanted)

    torch.testing.assert_close(logits, logits_by_paper, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.hebb, trace_by_paper.detach(), rtol=1e-12, atol=1e-12)
    for gradient, by_paper in zip(gradients, gradients_by_paper, strict=True):
        torch.testing.assert_close(gradient, by_paper, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alpha", ["synapse", "uniform"])
@pytest.mark.parametrize("labels", [[0, 1, 1, 2], [3, 3, 3, 3], [2]])
def test_gradcheck(alpha: str, labels: list[int]) -> None:
    template = double_head(3, 4, alpha=alpha, eta_range="unbounded")
    target = torch.tensor(labels)

    def logits(weight, alpha, eta, hidden) -> Tensor:
        head = copy.deepcopy(template)
        return torch.func.functional_call(head, {"weight": weight, "alpha": alpha, "eta": eta}, (hidden, target))

    hidden = torch.randn(len(labels), 3, dtype=torch.float64)
    inputs = [t.detach().clone().requires_grad_() for t in (template.weight, template.alpha, template.eta, hidden)]
    assert torch.autograd.gradcheck(logits, inputs)


def test_hidden_activations_get_gradient_by_two_paths() -> None:
    head = double_head(3, 2)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    (through_both,) = torch.autograd.grad(head(hidden, torch.tensor([0, 1, 0, 1])).sum(), hidden)
    direct = head.fold().weight.sum(dim=0).expand(4, 3)
    assert not torch.allclose(through_both, direct)


def test_trace_is_a_buffer_that_is_saved_with_the_model() -> None:
    head = DHPSoftmax(3, 2)
    head(torch.rand(4, 3), torch.tensor([0, 0, 1, 1]))
    assert "hebb" in head.state_dict()
    assert "hebb" not in dict(head.named_parameters())
    other = DHPSoftmax(3, 2)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.hebb, head.hebb)
    assert head.hebb.abs().sum() > 0


def test_trace_starts_empty_and_keeps_absent_classes_exactly() -> None:
    head = DHPSoftmax(3, 4, eta=0.5)
    assert torch.equal(head.hebb, torch.zeros(4, 3))
    head(torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]))
    before = head.hebb.clone()
    head(torch.rand(2, 3), torch.tensor([1, 1]))
    assert torch.equal(head.hebb[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(head.hebb[1], before[1])


def test_evaluation_reads_the_trace_and_never_writes_it() -> None:
    head = double_head(3, 2).eval()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    hidden = torch.randn(5, 3, dtype=torch.float64)
    logits = head(hidden, torch.tensor([0, 1, 0, 1, 0]))
    torch.testing.assert_close(logits, hidden @ (head.weight + head.alpha * head.hebb).T)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_graphs_of_several_batches_can_be_open_at_once() -> None:
    head = double_head(3, 2)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 0])
    twice = head(hidden[0], target).square().sum() + head(hidden[1], target).square().sum()
    twice.backward()
    assert torch.isfinite(head.eta.grad)


def test_the_previous_trace_is_a_constant_of_the_gradient() -> None:
    head = double_head(3, 2)
    first = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head(first, torch.tensor([0, 1, 1, 0]))
    head(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])).sum().backward()
    assert first.grad is None


@pytest.mark.parametrize(("stepped_to", "used"), [(-0.4, 0.0), (1.7, 1.0), (0.25, 0.25)])
def test_eta_is_projected_where_the_trace_is_a_weighted_mean(stepped_to: float, used: float) -> None:
    head = double_head(3, 2)
    with torch.no_grad():
        head.eta.fill_(stepped_to)
    hidden, target = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    expected = write_trace(head.hebb.clone(), hidden, target, torch.tensor(used, dtype=torch.float64))
    head(hidden, target).sum().backward()
    assert head.eta.item() == used
    assert head.eta.grad.abs() > 0, "at the edge η must still get a gradient, or it could never come back"
    torch.testing.assert_close(head.hebb, expected)


@pytest.mark.parametrize("eta_range", ["unit", "unbounded"])
@pytest.mark.parametrize("stepped_to", [-0.4, 0.0, 0.003, 0.25, 0.75, 1.0, 1.7])
def test_reported_eta_is_the_one_that_the_next_batch_uses(stepped_to: float, eta_range: str) -> None:
    head = double_head(3, 2, eta_range=eta_range)
    with torch.no_grad():
        head.eta.fill_(stepped_to)
    reported = head.dynamics()["eta"].item()
    assert reported == (min(max(stepped_to, 0.0), 1.0) if eta_range == "unit" else stepped_to)
    assert head.eta.item() == stepped_to, "reporting changes nothing"
    head(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
    assert head.eta.item() == reported


def test_the_plain_reading_by_hand() -> None:
    """Two samples of class 0 with h = 1 and 3, η = ½: Hebb goes from 4 to ½ · 4 + ½ · 2 = 3, and z = (1 + 2 · 3) h."""
    hidden, target = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
    weight, alpha, eta = torch.tensor([[1.0], [5.0]]), torch.tensor(2.0), torch.tensor(0.5)
    logits, hebb = algorithm_1(hidden, target, weight, alpha, eta, torch.tensor([[4.0], [1.0]]))
    assert hebb.tolist() == [[3.0], [1.0]], "the other class keeps its trace"
    assert logits.tolist() == [[7.0, 7.0], [21.0, 21.0]]


def test_mixed_precision_keeps_the_trace_in_full_precision() -> None:
    head = DHPSoftmax(3, 2, eta=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(torch.rand(4, 3, dtype=torch.bfloat16), torch.tensor([0, 1, 1, 0]))
    logits.float().sum().backward()
    assert head.hebb.dtype == torch.float32
    assert head.weight.grad.abs().sum() > 0


def test_unbounded_eta_is_the_literal_form() -> None:
    head = double_head(3, 2, eta_range="unbounded")
    with torch.no_grad():
        head.eta.fill_(1.7)
    hidden, target = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    expected = write_trace(head.hebb.clone(), hidden, target, head.eta.detach())
    head(hidden, target)
    assert head.eta.item() == 1.7
    torch.testing.assert_close(head.hebb, expected)


@pytest.mark.parametrize("alpha", ["synapse", "uniform"])
def test_fold_is_the_same_function_as_a_plain_layer(alpha: str) -> None:
    head = double_head(5, 3, alpha=alpha).eval()
    folded = head.fold()
    hidden = torch.randn(7, 5, dtype=torch.float64)
    assert isinstance(folded, torch.nn.Linear)
    assert folded.bias is None
    torch.testing.assert_close(folded(hidden), head(hidden))
    with torch.no_grad():
        head.hebb.zero_()
    assert not torch.allclose(folded(hidden), head(hidden)), "a folded layer must not follow the trace any more"


def test_shapes_names_and_initial_values() -> None:
    torch.manual_seed(0)
    head = DHPSoftmax(512, 10)
    assert (head.weight.shape, head.alpha.shape, head.eta.shape, head.hebb.shape) == (
        (10, 512),
        (10, 512),
        (),
        (10, 512),
    )
    assert DHPSoftmax(512, 10, alpha="uniform").alpha.shape == ()
    assert head.eta.item() == pytest.approx(1e-3)
    assert 0 <= head.alpha.min() < 0.001
    assert 0.009 < head.alpha.max() <= 0.01
    bound = 512**-0.5  # of PyTorch's own Linear
    assert 0.95 * bound < head.weight.abs().max() <= bound


def test_learning_lowers_the_loss_and_moves_every_parameter() -> None:
    torch.manual_seed(0)
    head = DHPSoftmax(8, 3, eta=0.05)
    centres = torch.randn(3, 8)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        target = torch.randint(3, (32,))
        loss = torch.nn.functional.cross_entropy(head(centres[target] + 0.1 * torch.randn(32, 8), target), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in head.named_parameters())


HIDDEN = torch.rand(4, 3)
TARGET = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("hidden", "target", "sentence"),
    [
        (HIDDEN, None, "needs the batch's targets"),
        (HIDDEN, TARGET[:3], r"shape \(4,\)"),
        (HIDDEN, TARGET[:, None], r"shape \(4,\)"),
        (HIDDEN, TARGET.float(), "class numbers"),
        (HIDDEN, TARGET + 1, r"lie in 0\.\.1, not 1\.\.2"),
        (HIDDEN, TARGET - 1, r"lie in 0\.\.1, not -1\.\.0"),
        (torch.rand(4, 5), TARGET, r"shape \(batch, 3\), not \(4, 5\)"),
        (torch.rand(3), TARGET, r"shape \(batch, 3\)"),
        (torch.ones(4, 3, dtype=torch.int64), TARGET, "torch.float32 like the layer, not torch.int64"),
        (torch.rand(4, 3, dtype=torch.float64), TARGET, "torch.float32 like the layer, not torch.float64"),
        (HIDDEN, [0, 1, 1, 0], "not a list"),
    ],
)
def test_bad_batches_are_refused_before_the_trace_is_touched(hidden, target, sentence) -> None:
    head = DHPSoftmax(3, 2)
    with pytest.raises(InputError, match=sentence):
        head(hidden, target)
    assert torch.equal(head.hebb, torch.zeros(2, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_with_nan_is_refused_before_the_trace_is_touched(bad: float) -> None:
    head = DHPSoftmax(3, 2)
    hidden = HIDDEN.clone()
    hidden[1, 2] = bad
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        head(hidden, TARGET)
    assert torch.equal(head.hebb, torch.zeros(2, 3))


@pytest.mark.parametrize(
    "options",
    [{"eta": -0.1}, {"eta": 1.1}, {"eta": float("nan")}, {"eta": float("inf"), "eta_range": "unbounded"},
     {"alpha": "none"}, {"eta_range": "open"}],
)  # fmt: skip
def test_bad_options_are_refused(options: dict) -> None:
    with pytest.raises(InputError):
        DHPSoftmax(3, 2, **options)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError):
        DHPSoftmax(0, 2)


def test_works_under_functional_call_and_deepcopy() -> None:
    head = double_head(3, 2).eval()
    twin = copy.deepcopy(head)
    hidden = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(twin(hidden), head(hidden))
    twin.train()(hidden, torch.tensor([0, 1]))
    assert not torch.equal(twin.hebb, head.hebb)


def test_it_is_mapped_along_whatever_axis_is_asked_for() -> None:
    heads = [double_head(3, 2, seed) for seed in range(4)]
    hidden = torch.randn(5, 4, 3, dtype=torch.float64)  # the second axis is the heads'
    target = torch.tensor([0, 1, 1, 0, 1])
    parameters = {n: torch.stack([h.get_parameter(n).detach() for h in heads]) for n in ("weight", "alpha", "eta")}
    traces = torch.stack([head.hebb for head in heads])
    one = copy.deepcopy(heads[0])
    one.check_values = False

    def call(parameters: dict[str, Tensor], trace: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(one, (parameters, {"hebb": trace}), (x, target))

    logits = torch.func.vmap(call, in_dims=(0, 0, 1))(parameters, traces, hidden)
    for i, head in enumerate(heads):
        torch.testing.assert_close(logits[i], head(hidden[:, i], target).detach())
        torch.testing.assert_close(traces[i], head.hebb)


# --- the layer's options, against a loop written from its description

OPTIONS = [
    {"trace_gradient": False},
    {"trace_centred": True},
    {"trace_scale": 2.0},
    {"trace_scale": 0.5, "trace_centred": True},
    {"trace_scale": 2.0, "trace_gradient": False},
    {"trace_scale": 2.0, "trace_centred": True, "trace_gradient": False},
]
AFTER = [{"trace_write": "after"}, {"trace_write": "after", "trace_scale": 2.0, "trace_centred": True}]


def by_description(head: DHPSoftmax, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Written trace, read trace and logits, class after class, as the arguments of the layer are described."""
    labels = y.tolist()
    before = head.trace_write == "before"
    written_from = h if head.trace_gradient and before else h.detach()
    eta = head.eta if head.trace_gradient and before else head.eta.detach()
    means = {}
    for c in sorted(set(labels)):
        own = [written_from[b] for b in range(len(labels)) if labels[b] == c]
        means[c] = sum(own) / len(own)
    centre = sum(means.values()) / len(means) if head.trace_centred else 0
    written = list(head.hebb.detach().clone().unbind(0))
    for c, mean in means.items():
        written[c] = (1 - eta) * written[c] + eta * (mean - centre)

    def scaled(row: Tensor) -> Tensor:
        size = float((row.detach() ** 2).mean().sqrt())
        return row if head.trace_scale is None else row * 0 if size == 0 else row * (head.trace_scale / size)

    read = [scaled(row) for row in written]
    used = read if before else [scaled(row) for row in head.hebb.detach().clone()]
    alpha = head.alpha if head.alpha.ndim else head.alpha.expand(head.weight.shape)
    logits = torch.stack([
        torch.stack([((head.weight[j] + alpha[j] * used[j]) * x).sum() for j in range(len(used))]) for x in h
    ])  # fmt: skip
    return torch.stack(written), torch.stack(read), logits


@pytest.mark.parametrize("options", [*OPTIONS, *AFTER], ids=str)
@settings(max_examples=40, deadline=None)
@given(batches, st.sampled_from(["synapse", "uniform"]), st.booleans())
def test_every_option_is_what_its_description_says(options, batch, alpha, unseen) -> None:
    num_classes, num_features, labels, seed = batch
    head = double_head(num_features, num_classes, seed, alpha=alpha, **options)
    if unseen:
        head.hebb.zero_()
    hidden = torch.randn(len(labels), num_features, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(labels)
    wanted = (head.weight, head.alpha, head.eta, hidden)
    written, read, expected = by_description(head, hidden, target)
    probe = torch.randn_like(expected)
    by_loop = torch.autograd.grad((expected * probe).sum(), wanted, allow_unused=True)

    logits = head(hidden, target)
    gradients = torch.autograd.grad((logits * probe).sum(), wanted, allow_unused=True)

    torch.testing.assert_close(head.hebb, written.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(head.read(head.hebb), read.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
    for name, gradient, reference in zip(("θ", "α", "η", "h"), gradients, by_loop, strict=True):
        assert (gradient is None) == (reference is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"trace_scale": 2.0}, {"trace_centred": True}], ids=str)
def test_without_a_gradient_through_the_trace_h_has_one_path_and_eta_none(options: dict) -> None:
    head = double_head(3, 2, trace_gradient=False, **options)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    head(hidden, torch.tensor([0, 1, 0, 1])).sum().backward()
    torch.testing.assert_close(hidden.grad, head.fold().weight.sum(dim=0).detach().expand(4, 3))
    assert head.eta.grad is None
    assert head.weight.grad is not None
    assert head.alpha.grad is not None


@pytest.mark.parametrize("options", AFTER, ids=str)
def test_a_batch_that_is_written_after_its_logits_does_not_see_its_own_targets(options: dict) -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64)
    one, other = (double_head(3, 2, eta=0.5, **options) for _ in range(2))
    assert torch.equal(one(hidden, torch.tensor([0, 1, 0, 1])), other(hidden, torch.tensor([1, 1, 0, 0])))
    assert not torch.equal(one(hidden, torch.tensor([0, 1, 0, 1])), other(hidden, torch.tensor([0, 1, 0, 1])))


@pytest.mark.parametrize("centred", [False, True])
def test_the_scaled_trace_has_its_size_in_every_class_seen_and_none_in_the_others(centred: bool) -> None:
    torch.manual_seed(0)
    head = DHPSoftmax(6, 5, eta=0.01, trace_scale=1.7, trace_centred=centred)
    hidden = torch.rand(8, 6) * torch.logspace(-3, 3, 8)[:, None]
    logits = head(hidden, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    logits.square().sum().backward()
    read = head.read(head.hebb)
    torch.testing.assert_close(read[:4].square().mean(dim=1).sqrt(), torch.full((4,), 1.7))
    assert torch.equal(read[4], torch.zeros(6))
    assert not torch.allclose(head.hebb[0].square().mean(), head.hebb[3].square().mean(), rtol=0.5), "written unscaled"
    for parameter in head.parameters():
        assert torch.isfinite(parameter.grad).all()
    assert torch.isfinite(head.eval()(hidden)).all()


def test_what_a_scaled_trace_adds_does_not_depend_on_the_size_of_the_activations() -> None:
    hidden, target = torch.rand(8, 5, dtype=torch.float64), torch.arange(8) % 3
    parts = {}
    for scale in (None, 2.0):
        for factor in (1.0, 64.0):
            head = double_head(5, 3, eta=0.3, trace_scale=scale)
            head.hebb.zero_()
            for _ in range(3):
                head(factor * hidden, target)
            parts[scale, factor] = head.fast_part().detach()
    torch.testing.assert_close(parts[2.0, 64.0], parts[2.0, 1.0])
    torch.testing.assert_close(parts[None, 64.0], 64 * parts[None, 1.0])


@pytest.mark.parametrize("alpha", ["synapse", "uniform"])
@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_all_views_of_the_weight_in_force_agree(options: dict, alpha: str) -> None:
    head = double_head(4, 3, alpha=alpha, **options)
    hidden, target = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 0, 1])
    in_training = head(hidden, target)
    in_force = head.weight + head.fast_part()
    torch.testing.assert_close(in_training, hidden @ in_force.T, rtol=1e-12, atol=1e-12)
    assert torch.equal(head.fold().weight, in_force) or torch.allclose(head.fold().weight, in_force, rtol=1e-14)
    torch.testing.assert_close(head.eval()(hidden), in_training, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.fold()(hidden), in_training, rtol=1e-12, atol=1e-12)
    stack = head.fast_part_of(torch.stack([head.alpha] * 2), torch.stack([head.hebb] * 2))
    assert torch.equal(stack[1], head.fast_part())
    slopes = head.weight_slopes()
    assert torch.equal(slopes["weight"], torch.ones_like(head.weight))
    assert set(slopes) == ({"weight", "alpha"} if alpha == "synapse" else {"weight"})
    if alpha == "synapse":
        (by_alpha,) = torch.autograd.grad(head(hidden).sum(), head.alpha)
        torch.testing.assert_close(by_alpha, hidden.sum(dim=0) * slopes["alpha"])


def test_centred_traces_of_a_batch_sum_to_nothing() -> None:
    head = DHPSoftmax(5, 4, eta=1.0, trace_centred=True).double()
    head(torch.rand(7, 5, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 3, 3]))
    torch.testing.assert_close(head.hebb.sum(dim=0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-15)
    assert (head.hebb[[0, 1, 3]].abs().sum(dim=1) > 0.1).all()
    assert torch.equal(head.hebb[2], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_an_empty_batch_leaves_the_trace_alone(options: dict) -> None:
    head = double_head(3, 2, **options)
    before = head.hebb.clone()
    assert head(torch.empty(0, 3, dtype=torch.float64), torch.empty(0, dtype=torch.long)).shape == (0, 2)
    assert torch.equal(head.hebb, before)


def test_alpha_starts_at_its_initial_size() -> None:
    torch.manual_seed(0)
    alpha = DHPSoftmax(512, 10, alpha_init=0.5).alpha
    assert 0 <= alpha.min() < 0.01
    assert 0.49 < alpha.max() <= 0.5
    assert abs(alpha.mean() - 0.25) < 0.01
    assert torch.equal(DHPSoftmax(4, 3, alpha_init=0.0).alpha, torch.zeros(4, 3).T)


def test_a_fixed_eta_writes_the_trace_and_is_not_learned() -> None:
    head = DHPSoftmax(3, 2, eta=0.25, learn_eta=False)
    hidden, target = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    head(hidden, target).square().sum().backward()
    assert not head.eta.requires_grad
    assert head.eta.grad is None
    torch.testing.assert_close(head.hebb[0], 0.25 * (hidden[0] + hidden[3]) / 2)
    assert "eta" in head.state_dict()


@pytest.mark.parametrize("options", [{}, *OPTIONS, {"learn_eta": False}, {"alpha_init": 1.0}], ids=str)
def test_only_the_literal_form_uses_the_explicit_derivatives(options: dict, monkeypatch) -> None:
    """The derivatives of `PlasticSoftmax` are of Eq. 2 and 3 as they stand: it is fast, and wrong for anything else."""
    head = double_head(3, 2, **options)
    calls = []
    usual = dhp.mapped
    monkeypatch.setattr(dhp, "mapped", lambda function, *given: calls.append(function) or usual(function, *given))
    head(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
    literal = not any(name.startswith("trace_") for name in options)
    assert head.literal == literal
    assert calls == ([PlasticSoftmax] if literal else [])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trace_scale": 0.0}, "trace_scale must be above 0, not 0.0"),
        ({"trace_scale": -1.0}, "trace_scale must be above 0, not -1.0"),
        ({"trace_scale": float("nan")}, "trace_scale must be a finite number, not nan"),
        ({"trace_scale": float("inf")}, "trace_scale must be a finite number, not inf"),
        ({"alpha_init": -0.1}, "alpha_init must be at least 0, not -0.1"),
        ({"alpha_init": float("nan")}, "alpha_init must be a finite number, not nan"),
        ({"alpha_init": float("inf")}, "alpha_init must be a finite number, not inf"),
    ],
)
def test_bad_values_of_the_options_are_refused_with_a_sentence(options: dict, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        DHPSoftmax(3, 2, **options)
    assert str(error.value) == sentence


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_mapped_over_a_stack_too(options: dict) -> None:
    heads = [double_head(3, 3, seed, **options) for seed in range(4)]
    hidden, target = torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    parameters = {n: torch.stack([h.get_parameter(n).detach() for h in heads]) for n in ("weight", "alpha", "eta")}
    traces = torch.stack([head.hebb for head in heads])
    one = copy.deepcopy(heads[0])
    one.check_values = False

    def call(parameters: dict[str, Tensor], trace: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(one, (parameters, {"hebb": trace}), (x, target))

    logits = torch.func.vmap(call)(parameters, traces, hidden)
    for i, head in enumerate(heads):
        torch.testing.assert_close(logits[i], head(hidden[i], target).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(traces[i], head.hebb, rtol=1e-12, atol=1e-12)
