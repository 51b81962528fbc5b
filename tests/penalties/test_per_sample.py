"""Per-sample sums by matrix products, against one backward pass per sample."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import engram
from engram import DHPSoftmax, LinearSoftmax, MatchedSoftmax
from engram.nn.modules import frozen
from engram.nn.networks import Network
from engram.penalties import per_sample
from engram.penalties.per_sample import FEW, known_layers, sum_per_sample


def by_loop(model, parameters, objective, function, inputs) -> dict[str, Tensor]:
    """A backward pass per sample, then the function, then the sum."""
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(inputs)):
        gradients = torch.autograd.grad(
            objective(model(inputs[i : i + 1])).sum(), list(parameters.values()), allow_unused=True
        )
        for name, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                sums[name] += function(gradient)
    return sums


class Twice(nn.Module):
    """One layer called twice: its gradient is no single outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Sequence(nn.Module):
    """A layer over positions: gradients add up within a sample before the square."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.view(-1, 2, 2)).tanh().sum(dim=1))


class SequenceFirst(nn.Module):
    """Positions before samples inside, as many of them as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix, self.out = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.stack([x[:, :2], x[:, 2:], x[:, 1:3], x[:, ::2], x[:, ::3], x[:, 1::2]])  # (6, B, 2)
        return self.out(self.mix(self.layer(positions).tanh()).tanh().sum(dim=0))


class MaskedLinear(nn.Linear):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * (torch.arange(self.weight.shape[1]) % 2), self.bias)


class StandardisedConv(nn.Conv2d):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, self.bias)


class TiedByHand(nn.Module):
    """A layer whose weight is used once more outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = nn.Linear(4, 6), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.linear(self.encoder(x).tanh(), self.encoder.weight.T))


class ByName(nn.Module):
    """A layer whose input is passed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class Unused(nn.Module):
    """A layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Branching(nn.Module):
    """Control flow that looks at values, which no mapping over samples can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if float(x.sum()) > 0 else -2 * x * self.scale


def plastic(alpha: str) -> nn.Module:
    head = DHPSoftmax(5, 3, alpha=alpha)
    head.hebb.normal_()
    return Network(nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU()), head)


VECTORS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 3)),
    "in-place activation": lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.3, inplace=True), nn.Linear(6, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)),
    "layer norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    "one layer": lambda: nn.Linear(4, 3),
    "twice": Twice,
    "tied": Tied,
    "sequence": Sequence,
    "sequence first": SequenceFirst,
    "own forward": lambda: nn.Sequential(MaskedLinear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
    "tied by hand": TiedByHand,
    "by name": ByName,
    "unused": Unused,
    "dhp": lambda: plastic("synapse"),
    "dhp uniform": lambda: plastic("uniform"),
    "matched": lambda: Network(nn.Linear(4, 5), MatchedSoftmax(5, 3)),
    "linear": lambda: Network(nn.Linear(4, 5), LinearSoftmax(5, 3)),
    "linear with a bias": lambda: Network(nn.Linear(4, 5), LinearSoftmax(5, 3, bias=True)),
}

IMAGES = {
    "conv": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
    "conv stride padding dilation": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=2, dilation=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)
    ),
    "conv own forward": lambda: nn.Sequential(StandardisedConv(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)),
    "conv groups": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.Flatten(), nn.Linear(64, 3)),
    "conv same": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.Flatten(), nn.Linear(108, 3)),
    "conv circular": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(108, 3)
    ),
    "conv batch norm pool": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", [torch.square, torch.abs])
@pytest.mark.parametrize("name", [*VECTORS, *IMAGES])
def test_sums_equal_a_loop_over_samples(name: str, function) -> None:
    torch.manual_seed(0)
    model = (VECTORS | IMAGES)[name]().double().eval()
    inputs = torch.randn((6, 4) if name in VECTORS else (6, 2, 6, 6), dtype=torch.float64)
    parameters = {n: p for n, p in model.named_parameters() if not n.endswith("eta")}

    def objective(outputs: Tensor) -> Tensor:
        return outputs.log_softmax(dim=1)[:, 0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = sum_per_sample(model, parameters, objective, function, inputs)
    expected = by_loop(model, parameters, objective, function, inputs)
    assert sums.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(sums[key], expected[key], rtol=1e-9, atol=1e-12)


def test_plain_layers_do_not_go_through_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: the paper's networks, with every head, need matrix products alone."""
    monkeypatch.setattr(per_sample, "_sum_by_mapping", lambda *_: pytest.fail("a layer was left to the mapping"))
    for name in ("mlp", "in-place activation", "dhp", "matched", "linear", "linear with a bias", "conv", "conv groups"):
        model = (VECTORS | IMAGES)[name]().eval()
        inputs = torch.randn((6, 4) if name in VECTORS else (6, 2, 6, 6))
        parameters = {n: p for n, p in model.named_parameters() if not n.endswith("eta")}
        sums = sum_per_sample(model, parameters, lambda z: z.square().sum(dim=1), torch.abs, inputs)
        assert sums.keys() == parameters.keys()


@pytest.mark.parametrize("name", engram.heads.list())
def test_no_head_needs_the_mapping(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the mapping takes a hundred times as long."""
    monkeypatch.setattr(per_sample, "_sum_by_mapping", lambda *_: pytest.fail("a weight was left to the mapping"))
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU())
    model = Network(features, engram.heads.create(name, 6, 3)).double()
    for _ in range(2):
        model.train()(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    parameters = engram.OnlineEWC(model.eval(), strength=1.0).parameters
    inputs = torch.randn(6, 4, dtype=torch.float64)

    def objective(outputs: Tensor) -> Tensor:
        return outputs.log_softmax(dim=1)[:, 0]

    sums = sum_per_sample(model, parameters, objective, torch.square, inputs)
    for key, expected in by_loop(model, parameters, objective, torch.square, inputs).items():
        torch.testing.assert_close(sums[key], expected, rtol=1e-9, atol=1e-12)


def test_a_model_that_cannot_be_mapped_is_computed_sample_by_sample_with_a_warning() -> None:
    model = Branching().double().eval()
    inputs = torch.randn(5, 4, dtype=torch.float64)

    def objective(outputs: Tensor) -> Tensor:
        return outputs.square().sum(dim=1)

    with pytest.warns(RuntimeWarning, match="one backward pass per sample"):
        sums = sum_per_sample(model, dict(model.named_parameters()), objective, torch.abs, inputs)
    expected = by_loop(model, dict(model.named_parameters()), objective, torch.abs, inputs)
    torch.testing.assert_close(sums["scale"], expected["scale"])


class Routed(nn.Module):
    """Of a batch, some rows go through a layer, and the others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return self.head(x.index_put((rows,), self.expert(x[rows])))


@pytest.mark.filterwarnings("ignore:importances take one backward pass per sample")
def test_a_layer_may_see_other_rows_in_the_next_batch() -> None:
    torch.manual_seed(0)
    model = Routed().eval()
    parameters = dict(model.named_parameters())
    first = torch.rand(6, 4) + 0.1
    second = first.clone()
    second[:2, 0] = -1

    with known_layers(model):
        for inputs in (first, second, first):
            found = sum_per_sample(model, parameters, squared, torch.square, inputs)
            torch.testing.assert_close(found, by_loop(model, parameters, squared, torch.square, inputs))


class TwiceIfLarge(Twice):
    """One layer, which larger batches go through twice, so that each sample counts by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > FEW else self.layer(x)


@pytest.mark.filterwarnings("ignore:importances take one backward pass per sample")
def test_few_samples_show_which_layers_have_a_row_for_each_and_the_others_are_checked() -> None:
    torch.manual_seed(0)
    sizes: list[int] = []
    plain = nn.Sequential(nn.Linear(4, 3)).eval()
    plain.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    inputs = torch.rand(3 * FEW, 4)
    for model in (plain, TwiceIfLarge().eval()):
        parameters = dict(model.named_parameters())
        found = sum_per_sample(model, parameters, squared, torch.square, inputs)
        torch.testing.assert_close(found, by_loop(model, parameters, squared, torch.square, inputs))
        if model is plain:
            assert sizes == [FEW, len(inputs), *[1] * len(inputs)], "the last ones are those of the loop"


def squared(outputs: Tensor) -> Tensor:
    return outputs.square().sum(dim=1)


def test_gradients_already_there_are_left_alone() -> None:
    model = VECTORS["mlp"]()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7)
    sum_per_sample(
        model.eval(), dict(model.named_parameters()), lambda z: z.sum(dim=1), torch.square, torch.randn(3, 4)
    )
    assert all(torch.equal(p.grad, torch.full_like(p, 7)) for p in model.parameters())


def test_frozen_returns_each_module_to_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model.train()
    model[1].eval()
    with frozen(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_frozen_returns_the_modes_after_an_error_too() -> None:
    model = nn.Linear(2, 2).train()

    def fail() -> None:
        with frozen(model):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.training


CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "oblong": {"kernel_size": (2, 3)},
    "stride": {"kernel_size": 3, "stride": 2},
    "strides": {"kernel_size": (3, 2), "stride": (1, 3)},
    "padding": {"kernel_size": 3, "padding": 2},
    "paddings": {"kernel_size": (3, 2), "padding": (0, 1)},
    "dilation": {"kernel_size": 2, "dilation": 2},
    "dilations": {"kernel_size": (3, 2), "dilation": (1, 3)},
    "all": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 2), "dilation": (2, 1)},
    "all but dilation": {"kernel_size": (4, 2), "stride": (2, 3), "padding": (3, 1)},
    "larger than the image unpadded": {"kernel_size": 8, "padding": 2},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches_are_those_of_unfold(name: str) -> None:
    layer = nn.Conv2d(3, 4, **CONVOLUTIONS[name])
    images = torch.randn(5, 3, 7, 6)
    options = {k: v for k, v in CONVOLUTIONS[name].items() if k != "kernel_size"}
    found = per_sample._patches(layer, images)
    assert torch.equal(found, nn.functional.unfold(images, layer.kernel_size, **options))
    products = layer.weight.flatten(1) @ found + layer.bias[:, None]
    torch.testing.assert_close(products, layer(images).flatten(2), rtol=1e-4, atol=1e-5)
