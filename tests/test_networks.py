"""The paper's networks and the heads that the DHP Softmax is compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram import DHPSoftmax, MatchedSoftmax, PlainSoftmax, preset
from engram.build import build_model
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
    plastic, matched, plain = DHPSoftmax(400, 10), MatchedSoftmax(400, 10), PlainSoftmax(400, 10)
    assert count(plastic) - 1 == count(matched) == 2 * count(plain) == 8000  # one more: η
    assert {name: tensor.shape for name, tensor in plastic.state_dict().items()} == {
        name: tensor.shape for name, tensor in matched.state_dict().items()
    }, "a stack holds both in the same tensors"


def test_matched_head_is_the_sum_of_its_weights_which_learn_alike() -> None:
    head = MatchedSoftmax(4, 3)
    hidden = torch.rand(5, 4)
    logits = head(hidden, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(logits, hidden @ head.weight.T + hidden @ head.extra.T)
    logits.square().sum().backward()
    assert torch.equal(head.weight.grad, head.extra.grad)
    assert not torch.equal(head.weight, head.extra)


def test_plain_head_has_no_bias_and_ignores_the_targets() -> None:
    head = PlainSoftmax(4, 3)
    hidden = torch.rand(5, 4)
    assert torch.equal(head(hidden, torch.arange(5)), hidden @ head.weight.T)


@pytest.mark.parametrize("benchmark", ["split-mnist", "vision-mixture"])
def test_all_methods_of_a_trial_begin_with_the_same_slow_weights(benchmark: str) -> None:
    shape, classes = ((1, 28, 28), 10) if benchmark == "split-mnist" else ((3, 32, 32), 50)

    def initial(method: str, trial: int = 3, **changes) -> dict[str, torch.Tensor]:
        torch.manual_seed(hash(method) % 1000)
        return build_model(preset(benchmark, method, **changes), trial, shape, classes).state_dict()

    baseline = initial("finetune")
    plain = initial("finetune", baseline_head="plain")
    for other in (initial("dhp"), initial("dhp+si"), initial("mas"), plain):
        shared = baseline.keys() & other.keys()
        assert {"head.weight", "features.1.weight"} <= shared or "features.0.weight" in shared
        slow = [name for name in shared if name not in ("head.alpha", "head.eta", "head.hebb")]
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
