"""The paper's networks and the heads that the DHP Softmax is compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram import DHPSoftmax, InputError, LinearSoftmax, MatchedSoftmax, heads, preset
from engram.engine.build import build_model
from engram.nn.networks import cnn_features, mlp_features


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def test_mlp_has_the_paper_s_layers() -> None:
    features = mlp_features(784, (400, 400), 0.01)
    widths = [(layer.in_features, layer.out_features) for layer in features if isinstance(layer, nn.Linear)]
    assert widths == [(784, 400), (400, 400)]
    assert [layer.negative_slope for layer in features if isinstance(layer, nn.LeakyReLU)] == [0.01, 0.01]
    assert features(torch.rand(2, 1, 28, 28)).shape == (2, 400)


def test_cnn_has_the_paper_s_layers() -> None:
    features = cnn_features(3, 32, (500,), 0.3)
    shapes = [(c.in_channels, c.out_channels, c.kernel_size) for c in features if isinstance(c, nn.Conv2d)]
    assert shapes == [(3, 20, (5, 5)), (20, 50, (5, 5))]
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in features) == 2
    assert {layer.negative_slope for layer in features if isinstance(layer, nn.LeakyReLU)} == {0.3}
    assert features(torch.rand(2, 3, 32, 32)).shape == (2, 500)


def test_matched_head_has_the_plastic_head_s_capacity_and_plain_half_of_it() -> None:
    plastic, matched, plain = DHPSoftmax(400, 10), MatchedSoftmax(400, 10), LinearSoftmax(400, 10)
    assert count(plastic) - 1 == count(matched) == 2 * count(plain) == 8000  # one more: η


def test_matched_head_is_the_sum_of_its_weights_which_learn_alike() -> None:
    head = MatchedSoftmax(4, 3)
    hidden = torch.rand(5, 4)
    logits = head(hidden, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(logits, hidden @ head.weight.T + hidden @ head.extra.T)
    logits.square().sum().backward()
    assert torch.equal(head.weight.grad, head.extra.grad)
    assert not torch.equal(head.weight, head.extra)


def test_a_matched_head_with_a_larger_trace_starts_the_same_and_learns_faster() -> None:
    heads = []
    for trace in (1.0, 2.0):
        torch.manual_seed(0)
        heads.append(MatchedSoftmax(4, 3, trace=trace).double())
    usual, fast = heads
    hidden = torch.rand(5, 4, dtype=torch.float64)
    torch.testing.assert_close(usual(hidden), fast(hidden))
    moved = []
    for head in heads:
        before = head(hidden).detach()
        head(hidden).square().sum().backward()
        with torch.no_grad():
            for theta in (head.weight, head.extra):
                theta -= 1e-4 * theta.grad
        moved.append(head(hidden) - before)
    torch.testing.assert_close(moved[1], moved[0] * (1 + 2**2) / (1 + 1**2))
    assert fast.weight_slopes()["extra"].unique().tolist() == [2.0]


@pytest.mark.parametrize("trace", [0.0, -1.0])
def test_a_constant_trace_is_above_zero(trace: float) -> None:
    with pytest.raises(InputError, match="trace must be above 0"):
        MatchedSoftmax(4, 3, trace=trace)


def test_plain_head_has_no_bias_and_ignores_the_targets() -> None:
    head = LinearSoftmax(4, 3)
    hidden = torch.rand(5, 4)
    assert torch.equal(head(hidden, torch.arange(5)), hidden @ head.weight.T)


@pytest.mark.parametrize("benchmark", ["split-mnist", "vision-mixture"])
def test_all_methods_of_a_trial_start_with_the_same_slow_weights(benchmark: str) -> None:
    shape, classes = ((1, 28, 28), 10) if benchmark == "split-mnist" else ((3, 32, 32), 50)

    def initial(method: str, trial: int = 3, **changes) -> dict[str, torch.Tensor]:
        torch.manual_seed(hash(method) % 1000)
        return build_model(preset(benchmark, method, **changes), trial, shape, classes).state_dict()

    baseline = initial("finetune")
    plain = initial("finetune", baseline_head="linear")
    alike = {"head_init": "linear"}
    for other in (initial("dhp", **alike), initial("dhp+si", **alike), initial("mas"), plain):
        shared = baseline.keys() & other.keys()
        assert {"head.weight", "features.1.weight"} <= shared or "features.0.weight" in shared
        slow = [name for name in shared if name not in ("head.alpha", "head.extra", "head.eta", "head.hebb")]
        assert all(torch.equal(other[name], baseline[name]) for name in slow)
    assert not torch.equal(initial("finetune", trial=4)["head.weight"], baseline["head.weight"])


def test_building_a_model_leaves_the_global_random_numbers_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    if torch.cuda.is_available():
        on_gpu = torch.cuda.get_rng_state()
    build_model(preset("split-mnist", "dhp"), 0, (1, 28, 28), 10)
    assert torch.equal(torch.get_rng_state(), before)
    if torch.cuda.is_available():
        assert torch.equal(torch.cuda.get_rng_state(), on_gpu)


@pytest.mark.parametrize(("network", "shape"), [("mlp", (1, 28, 28)), ("cnn", (3, 32, 32))])
def test_the_network_sees_standardised_pixels(network: str, shape: tuple[int, ...]) -> None:
    config = preset("split-mnist", "dhp", network=network, hidden=[12])
    usual = build_model(config, 2, shape, 10)
    standardised = build_model(config.replace(input_mean=0.13, input_std=0.31), 2, shape, 10)
    inputs = torch.rand(5, *shape)
    expected = usual.features((inputs - 0.13) / 0.31)
    torch.testing.assert_close(standardised.features(inputs), expected)
    assert not torch.allclose(usual.features(inputs), expected, rtol=0.1)
    for one, other in zip(usual.parameters(), standardised.parameters(), strict=True):
        assert torch.equal(one, other), "the same initial weights"
    assert len(standardised.state_dict()) == len(usual.state_dict()), "and nothing else to save"


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3])
def test_he_s_initialisation_keeps_the_size_of_activations_and_has_no_biases(slope: float) -> None:
    config = preset("split-mnist", "dhp", hidden=[300, 300, 300], leaky_slope=slope)
    model = build_model(config.replace(initialisation="he"), 0, (1, 28, 28), 10)
    layers = [layer for layer in model.features if isinstance(layer, nn.Linear)]
    for layer in layers:
        variance = 2 / ((1 + slope**2) * layer.in_features)
        assert layer.weight.var().item() == pytest.approx(variance, rel=0.03)
        assert layer.weight.abs().max().item() == pytest.approx((3 * variance) ** 0.5, rel=0.01)  # it is uniform
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
    inputs = torch.randn(200, 784, generator=torch.Generator().manual_seed(0))
    assert model.features(inputs).square().mean().item() == pytest.approx(1, rel=0.2)
    assert build_model(config, 0, (1, 28, 28), 10).features(inputs).square().mean() < 0.1, "PyTorch's own shrinks them"


def test_he_s_initialisation_is_of_the_features_alone_and_of_each_trial() -> None:
    def initial(method: str, trial: int, **changes: object) -> dict[str, torch.Tensor]:
        torch.manual_seed(trial * 1000 + len(method))  # whatever the state of the world
        config = preset("vision-mixture", method, initialisation="he", hidden=[20], **changes)
        return build_model(config, trial, (3, 32, 32), 50).state_dict()

    one, again, other = initial("dhp", 0), initial("dhp+mas", 0), initial("dhp", 1)
    for name, value in one.items():
        assert torch.equal(value, again[name]), name
    assert not torch.equal(one["features.0.weight"], other["features.0.weight"])
    assert torch.equal(one["features.0.bias"], torch.zeros(20))
    bound = 50**-0.5  # of the published layer, for fifty classes
    assert 0.95 * bound < one["head.weight"].abs().max() <= bound


def test_unknown_setting_of_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="the head dhp has no setting 'foo', only eta, alpha, "):
        heads.create("dhp", 4, 3, foo=1)
