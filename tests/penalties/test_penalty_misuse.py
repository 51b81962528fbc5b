"""Ways to use a penalty that would give wrong numbers without a word: each is right, refused, or warned about once."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from engram import EWC, MAS, SI, InputError, OnlineEWC, Penalty
from engram.nn.baselines import LinearSoftmax

# --- half precision -----------------------------------------------------------------------------------------------


def importances_of(kind: type[Penalty], dtype: torch.dtype, num_batches: int, **options: object) -> dict[str, Tensor]:
    """Of a model whose weights and samples are those of bfloat16, computed in another type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 4)).bfloat16().to(dtype)
    batches = [(torch.randn(4, 6).bfloat16().to(dtype), torch.randint(4, (4,))) for _ in range(num_batches)]
    penalty = kind(model, strength=1.0, **options)
    penalty.consolidate(batches)
    return penalty.terms[0].importance


@pytest.mark.parametrize(("labels", "num_batches"), [("true", 100), ("exact", 50)])  # which is four sums a batch
def test_importances_of_a_model_in_half_precision_are_summed_in_single(labels: str, num_batches: int) -> None:
    """In half precision a sum of so many is 0.8% and more low in bfloat16, and 0.05% in float16; of more, 20%."""
    right = importances_of(EWC, torch.float64, num_batches, labels=labels)
    for dtype, tolerance in ((torch.bfloat16, 0.002), (torch.float16, 0.0003)):
        for name, omega in importances_of(EWC, dtype, num_batches, labels=labels).items():
            assert omega.dtype == torch.float32
            assert omega.sum().item() == pytest.approx(right[name].sum().item(), rel=tolerance)


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


# --- models that change after the penalty was made -----------------------------------------------------------------


def consolidated(kind: type[Penalty] = OnlineEWC) -> tuple[nn.Module, Penalty, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), LinearSoftmax(5, 4))
    penalty, optimizer = kind(model, strength=1e3), torch.optim.SGD(model.parameters(), lr=0.1)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    return model, penalty, optimizer


CHANGES = {
    "grown": lambda model: model[2].grow(6),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "replaced": lambda model: setattr(model, "2", nn.Linear(5, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS, SI])
def test_no_verb_protects_tensors_that_the_model_has_replaced(kind: type[Penalty], change: str) -> None:
    model, penalty, optimizer = consolidated(kind)
    penalty.loss().backward()
    penalty.proximal_step(optimizer)
    CHANGES[change](model)
    verbs = [penalty.loss, lambda: penalty.proximal_step(optimizer), lambda: penalty.proximal_step(0.1)]
    verbs += [penalty.after_step] if kind is SI else [lambda: penalty.consolidate([(torch.ones(1, 6), torch.ones(1))])]
    for verb in verbs:
        with pytest.raises(InputError, match=r"no longer the tensor .* call penalty\.grow\(\)"):
            verb()
    if change != "replaced":
        penalty.grow()
        penalty.loss()
        penalty.proximal_step(0.1)


@pytest.mark.parametrize("kind", [OnlineEWC, SI])
def test_layers_that_are_unfrozen_later_are_warned_about_once(kind: type[Penalty]) -> None:
    model = nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4))
    penalty = kind(model, strength=1.0)
    penalty.loss()
    model[1].requires_grad_(False)  # freezing, and back, is no mistake
    penalty.loss()
    model[1].requires_grad_(True)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    penalty.loss()
    model[0].requires_grad_(True)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    with pytest.warns(UserWarning, match=r"now trains '0\.weight' and 1 more, frozen when this penalty was made"):
        penalty.proximal_step(0.1)
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    penalty.loss()  # a second warning would be an error here


@pytest.mark.parametrize("pull", ["none", "of the optimizer", "of a number"])
@pytest.mark.parametrize("head", ["linear", "dhp", "hebbian-softmax"])
def test_an_optimizer_of_before_growth_is_warned_about_once(head: str, pull: str) -> None:
    """Also where the new weights change: by the proximal step, or since the head writes into them."""
    layer = engram.heads.create(head, 5, 4)
    features = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    penalty = OnlineEWC(nn.Sequential(features, layer), strength=10.0)
    optimizer = torch.optim.SGD(penalty.model.parameters(), lr=0.1)
    layer.grow(5)
    layer.grow(6)
    penalty.grow()
    penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
    x, y = torch.randn(8, 6), torch.randint(6, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(layer(features(x), y), y).backward()
        optimizer.step()
        if pull != "none":
            penalty.proximal_step(0.1 if pull == "of a number" else optimizer)

    step()
    with pytest.warns(UserWarning, match=r"does not move the new ones: make a new optimizer after head\.grow") as seen:
        step()
    assert len(seen) == 1
    step()
    step()
    optimizer = torch.optim.SGD(penalty.model.parameters(), lr=0.1)
    step()


@pytest.mark.parametrize("way", ["new", "added", "another"])
def test_an_optimizer_that_knows_what_grew_is_no_mistake(way: str) -> None:
    model, _, optimizer = consolidated()
    before = model[2].weight
    model[2].grow(6)
    optimizers = [optimizer]
    if way == "new":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    elif way == "added":
        optimizer.add_param_group({"params": [model[2].weight]})
    else:
        optimizers.append(torch.optim.SGD(model[2].parameters(), lr=0.1))
    for _ in range(4):
        model.zero_grad()
        F.cross_entropy(model(torch.randn(8, 6)), torch.randint(6, (8,))).backward()
        for each in optimizers:
            each.step()
    assert before.shape == (4, 5)


def test_a_learning_rate_is_read_at_every_step() -> None:
    model, penalty, _ = consolidated()
    rate = torch.tensor(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for given in (rate, optimizer):
        with torch.no_grad():
            model[0].weight.add_(1)
        rate.fill_(0.0)
        before = model[0].weight.detach().clone()
        penalty.proximal_step(given)
        assert torch.equal(model[0].weight, before)
        rate.fill_(0.1)
        penalty.proximal_step(given)
        assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, torch.tensor(float("nan"))])
def test_a_learning_rate_that_is_none_is_refused(rate: float | Tensor) -> None:
    model, penalty, optimizer = consolidated()
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = rate
    for given in (rate, optimizer):
        with pytest.raises(InputError, match="a learning rate must be a number of at least 0"):
            penalty.proximal_step(given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- what consolidate is given -------------------------------------------------------------------------------------


def classifier(num_outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, num_outputs))


def samples(count: int = 16, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    return torch.randn(count, 6, generator=random), torch.randint(num_classes, (count,), generator=random)


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS])
def test_a_task_that_is_consolidated_twice_is_warned_about(kind: type[Penalty]) -> None:
    model = classifier()
    penalty = kind(model, strength=1.0)
    penalty.consolidate([samples()])
    with pytest.warns(UserWarning, match=r"no weight has changed since the last consolidate\(\)"):
        penalty.consolidate([samples()])
    with torch.no_grad():
        model[0].weight[0, 0] += 0.1
    penalty.loss()
    penalty.consolidate([samples()])


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS, SI])
@pytest.mark.parametrize("use", ["nothing", "loss", "proximal step", "loaded"])
def test_a_penalty_that_is_never_used_is_warned_about(kind: type[Penalty], use: str) -> None:
    model, inputs, targets = classifier(), *samples()
    penalty = kind(model, strength=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def learn() -> None:
        for _ in range(2):
            loss = F.cross_entropy(model(inputs), targets) + (penalty.loss() if use == "loss" else 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if use == "proximal step":
                penalty.proximal_step(optimizer)
            penalty.after_step()

    learn()
    penalty.consolidate([(inputs, targets)])  # there was nothing to hold yet
    learn()
    if use == "loaded":
        penalty.load_state_dict(penalty.state_dict())  # nobody knows what was done before
    expected = pytest.warns(UserWarning, match="the penalty did not hold them") if use == "nothing" else nullcontext()
    with expected:
        penalty.consolidate([(inputs, targets)])


@pytest.mark.parametrize("kind", [EWC, MAS, SI])
@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ([0, 0, 1], "classes has 0 more than once"),
        ([0, -1], "not -1"),
        ([0, 1.5], "not 1.5"),
        ([], "classes names no output: leave it out"),
    ],
)
def test_classes_count_once(kind: type[Penalty], classes: list[int], sentence: str) -> None:
    penalty = kind(classifier(), strength=1.0)
    with pytest.raises(InputError, match=sentence):
        penalty.consolidate([samples(num_classes=2)], classes)
    assert not penalty.terms


class TimeFirst(nn.Module):
    """Takes (time, batch, features), as PyTorch's recurrent layers do by default, and returns (batch, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(6, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.rnn(inputs)[0][-1])


@pytest.mark.parametrize("length", [7, 4])
@pytest.mark.parametrize(("kind", "options"), [(MAS, {}), (EWC, {"labels": "exact"})])
def test_samples_must_be_on_the_first_axis(kind: type[Penalty], options: dict, length: int) -> None:
    """Where the sequence is as long as the batch, single samples still give it away."""
    penalty = kind(TimeFirst(), strength=1.0, **options)
    with pytest.raises(InputError, match="importances need the samples on the first axis"):
        penalty.consolidate([torch.randn(length, 4, 6)])


def test_classes_may_be_a_tensor() -> None:
    x, y = torch.randn(8, 6), torch.randint(2, (8,))
    found = []
    for classes in ([0, 1], torch.tensor([0, 1])):
        torch.manual_seed(0)
        penalty = EWC(nn.Linear(6, 4), strength=1.0)
        penalty.consolidate([(x, y)], classes=classes)
        found.append(penalty.terms[0].importance["weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize(("kind", "options"), [(MAS, {}), (EWC, {"labels": "exact"}), (EWC, {"labels": "predicted"})])
def test_outputs_and_targets_of_other_axes_are_refused(kind: type[Penalty], options: dict) -> None:
    """A model of sequences with the steps first and an output for each, of which 7 steps would count as 7 samples."""
    model = nn.Sequential(nn.Linear(5, 4))
    with pytest.raises(InputError, match=r"needs one row of logits|length 7 and 8 targets"):
        kind(model, strength=1.0, **options).consolidate([(torch.randn(7, 8, 5), torch.zeros(8).long())])
    if kind is EWC:
        with pytest.raises(InputError, match=r"shape \(8, 7, 4\), and EWC needs one row of logits"):
            kind(model, strength=1.0, **options).consolidate([(torch.randn(8, 7, 5), torch.zeros(8).long())])


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS, SI])
def test_weights_that_the_first_batch_will_change_are_not_protected_before_it(kind: type[Penalty]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), engram.heads.create("scaled", 5, 4))
    penalty = kind(model, strength=1.0)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    with pytest.raises(InputError, match=r"cannot be protected yet: train .* or call head\.scale\(features\)"):
        penalty.consolidate([(x, y)])
    model(x)
    penalty.consolidate([(x, y)])


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, MAS, SI])
def test_the_loss_may_come_before_the_first_batch_of_a_scaled_head(kind: type[Penalty]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), engram.heads.create("scaled", 5, 4))
    penalty = kind(model, strength=1.0)
    (penalty.loss() + F.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,)))).backward()
    assert all(theta.grad.any() for theta in model.parameters())


def test_a_third_part_that_may_be_the_targets_is_warned_about_once() -> None:
    x, y = samples()
    penalty = EWC(classifier(), strength=1.0)
    penalty.consolidate([(x, y, torch.rand(16))])  # weights of samples, say: these are no targets
    with torch.no_grad():
        penalty.model[0].weight += 0.1
    penalty.loss()
    with pytest.warns(UserWarning, match="the second for the targets"):
        penalty.consolidate([(x, torch.zeros(16, dtype=torch.long), y)])
    with torch.no_grad():
        penalty.model[0].weight += 0.1
    penalty.loss()
    penalty.consolidate([(x, y, y)])


@pytest.mark.parametrize("labels", ["true", "predicted", "sampled", "exact"])
@pytest.mark.parametrize("shape", [(-1, 1), (-1,)])
def test_a_single_logit_is_refused(labels: str, shape: tuple[int, ...]) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs).reshape(shape)

    x, _ = samples()
    penalty = EWC(Single(), strength=1.0, labels=labels)
    with pytest.raises(InputError, match="a single output, whose softmax is always 1"):
        penalty.consolidate([(x, torch.zeros(16, dtype=torch.long))])


def test_a_head_that_grows_may_have_one_class_so_far() -> None:
    x, _ = samples()
    OnlineEWC(LinearSoftmax(6, 1), strength=1.0).consolidate([(x, torch.zeros(16, dtype=torch.long))])


@pytest.mark.parametrize("part", ["features", "probabilities"])
def test_outputs_that_are_no_logits_are_warned_about_once(part: str) -> None:
    whole = classifier()
    model = whole[:2] if part == "features" else nn.Sequential(whole, nn.Softmax(dim=1))
    penalty = OnlineEWC(model, strength=1.0)
    with pytest.warns(UserWarning, match="for logits: make the penalty for the whole model"):
        penalty.consolidate([samples()])
    with torch.no_grad():
        whole[0].weight += 0.1
    penalty.loss()
    penalty.consolidate([samples()])
    zero = classifier()
    nn.init.zeros_(zero[2].weight)
    nn.init.zeros_(zero[2].bias)
    OnlineEWC(zero, strength=1.0).consolidate([samples()])  # logits before training may all be 0


class Deep(nn.Module):
    """As deep as its batch says, for batches of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.tied: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(int(inputs[0, 0].round())):
            hidden = torch.tanh(self.again(hidden))
        if inputs[0, 0] > 2.5:
            hidden = hidden @ self.first.weight
        return self.head(hidden)


def singly(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """MAS by autograd, sample by sample."""
    sums = {name: torch.zeros_like(theta) for name, theta in model.named_parameters()}
    for row in torch.cat(batches):
        slopes = torch.autograd.grad(
            model(row[None]).square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        for total, slope in zip(sums.values(), slopes, strict=True):
            total += slope.abs() / sum(map(len, batches))
    return sums


@pytest.mark.filterwarnings("ignore:importances take one backward pass")
@pytest.mark.parametrize("depths", [(1, 2, 0, 1), (0, 1), (1, 3), (2, 1)])
def test_a_depth_that_depends_on_the_batch_has_the_importances_of_single_samples(depths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Deep().double()
    batches = [torch.randn(5, 6).double() for _ in depths]
    for batch, depth in zip(batches, depths, strict=True):
        batch[:, 0] = depth
    penalty = MAS(model, strength=1.0)
    penalty.consolidate(batches)
    for name, omega in singly(model, batches).items():
        torch.testing.assert_close(penalty.terms[0].importance[name], omega)


class Functional(nn.Module):
    """Calls a layer, and uses its weight in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.head = way, nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.held = [self.layer.weight]

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.held[0] if "held elsewhere" in self.way else self.layer.weight
        called = self.layer(inputs) if "both" in self.way or self.way == "output unused" else inputs
        hidden = F.linear(inputs, weight)
        return self.head(hidden + called if "both" in self.way else hidden)


@pytest.mark.parametrize("way", ["output unused", "both", "not called"])
def test_a_weight_that_is_used_functionally_has_the_importances_of_single_samples(way: str) -> None:
    torch.manual_seed(0)
    model, batches = Functional(way).double(), [torch.randn(5, 6).double()]
    penalty = MAS(model, strength=1.0)
    penalty.consolidate(batches)
    for name, omega in singly(model, batches).items():
        torch.testing.assert_close(penalty.terms[0].importance[name], omega)


@pytest.mark.parametrize("way", ["held elsewhere", "held elsewhere, both"])
def test_a_weight_that_is_used_through_another_reference_is_refused(way: str) -> None:
    penalty = MAS(Functional(way), strength=1.0)
    with pytest.raises(InputError, match=r"uses 'layer\.weight' through another reference"):
        penalty.consolidate([torch.randn(5, 6)])


def test_a_state_is_not_loaded_into_another_class(tmp_path: Path) -> None:
    model = classifier()
    penalty = OnlineEWC(model, strength=1.0)
    penalty.consolidate([samples()])
    torch.save({"penalty": penalty.state_dict()}, tmp_path / "state.pt")
    for state in (
        penalty.state_dict(),
        copy.deepcopy(penalty.state_dict()),
        torch.load(tmp_path / "state.pt")["penalty"],
    ):
        for kind in (MAS, EWC, SI):
            other = kind(model, strength=1.0)
            with pytest.raises(InputError, match=f"this state is one of OnlineEWC, .* no {kind.__name__}'s"):
                other.load_state_dict(state)
            assert not other.terms
        again = OnlineEWC(model, strength=1.0)
        again.load_state_dict(state)
        again.load_state_dict(dict(state))  # as saved by others
        assert torch.equal(again.terms[0].importance["0.weight"], penalty.terms[0].importance["0.weight"])
