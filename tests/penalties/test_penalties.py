"""Each penalty against its formula, and one contract that all of them keep."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram import (
    EWC,
    MAS,
    SI,
    DHPSoftmax,
    InputError,
    LinearSoftmax,
    MatchedSoftmax,
    NoPenalty,
    NotFiniteError,
    OnlineEWC,
    Penalty,
)
from engram.common.registry import PENALTIES as REGISTERED
from engram.nn.networks import Network
from engram.penalties import Quadratic, terms

PENALTIES = {
    "ewc": lambda model, **o: EWC(model, strength=3.0, **o),
    "ewc sampled": lambda model, **o: EWC(model, strength=3.0, labels="sampled", **o),
    "ewc exact": lambda model, **o: EWC(model, strength=3.0, labels="exact", **o),
    "online-ewc": lambda model, **o: OnlineEWC(model, strength=3.0, gamma=0.7, **o),
    "si": lambda model, **o: SI(model, strength=3.0, xi=0.1, **o),
    "mas": lambda model, **o: MAS(model, strength=3.0, **o),
}
for registered in REGISTERED.names():  # a new penalty is put through the same contract
    PENALTIES.setdefault(registered, functools.partial(REGISTERED[registered].make, strength=3.0))
NETWORKS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.LeakyReLU(), nn.Linear(5, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3)
    ),
    "dhp": lambda: Network(nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.LeakyReLU()), DHPSoftmax(5, 3, eta=0.2)),
    "matched": lambda: Network(nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.LeakyReLU()), MatchedSoftmax(5, 3)),
}


@pytest.fixture(params=PENALTIES)
def make_penalty(request):
    return PENALTIES[request.param]


@pytest.fixture(params=NETWORKS)
def model(request) -> nn.Module:
    torch.manual_seed(1)
    return NETWORKS[request.param]().double()


def make_batches(num_batches: int = 3, batch_size: int = 7, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(batch_size, 2, 3, 3, generator=random, dtype=torch.float64),
            torch.randint(3, (batch_size,), generator=random),
        )
        for _ in range(num_batches)
    ]


def importance_of(penalty, batches, classes=None) -> dict[str, Tensor]:
    """Ω of the weights as they are now; nothing is changed."""
    return penalty.importance(penalty.model, penalty.parameters, penalty.state, penalty.settings, batches, classes)


def gradient_of(penalty) -> dict[str, Tensor]:
    return terms.gradient(penalty.terms, penalty.in_force(penalty.snapshot()), penalty.strength)


def call(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, targets) if isinstance(model, Network) else model(inputs)


def train(model: nn.Module, penalty, batches, learning_rate: float = 0.05, with_loss: bool = True) -> None:
    """A plain loop of the kind that people have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    for inputs, targets in batches:
        loss = F.cross_entropy(call(model, inputs, targets), targets)
        if with_loss:
            loss = loss + penalty.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalty.after_step()


# --- the contract ---------------------------------------------------------------------------------------------


def test_zero_before_the_first_consolidation(model, make_penalty) -> None:
    penalty = make_penalty(model)
    loss = penalty.loss()
    assert loss.shape == ()
    assert loss.item() == 0
    loss.backward()
    before = {name: p.clone() for name, p in model.named_parameters()}
    penalty.proximal_step(0.1)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_zero_at_the_anchor_and_positive_away_from_it(model, make_penalty) -> None:
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())
    assert penalty.loss().item() == 0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    assert penalty.loss().item() > 1e-6


def test_the_loss_is_the_quadratic_form_and_its_gradient_is_right(model, make_penalty) -> None:
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())
    train(model, penalty, make_batches(seed=1))
    penalty.consolidate(make_batches(seed=1))
    train(model, penalty, make_batches(seed=2))
    expected = sum(
        3.0 * (term.importance[name] * (p - term.anchor[name]) ** 2).sum()
        for term in penalty.terms
        for name, p in penalty.parameters.items()
    )
    torch.testing.assert_close(penalty.loss(), expected)
    parameters = list(penalty.parameters.values())
    given = torch.autograd.grad(5 * penalty.loss(), parameters)
    by_autograd = torch.autograd.grad(5 * expected, parameters)
    for gradient, reference in zip(given, by_autograd, strict=True):
        torch.testing.assert_close(gradient, reference)
    assert sum(reference.abs().sum() for reference in by_autograd) > 1e-3


def test_consolidation_leaves_the_model_as_it_was(model, make_penalty) -> None:
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    model.train()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    penalty.consolidate(make_batches())
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before), "traces and BatchNorm statistics included"
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if name in gradients)
    assert gradients
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_state_survives_save_and_load(model, make_penalty, tmp_path) -> None:
    penalty = make_penalty(model)
    for seed in range(2):
        train(model, penalty, make_batches(seed=seed))
        penalty.consolidate(make_batches(seed=seed))
    train(model, penalty, make_batches(1, seed=2))  # in the middle of a task
    torch.save({"model": model.state_dict(), "penalty": penalty.state_dict()}, tmp_path / "state.pt")

    torch.manual_seed(99)
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        nn.init.normal_(p)
    restored = make_penalty(twin)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    twin.load_state_dict(state["model"])
    restored.load_state_dict(state["penalty"])

    for learner, own in ((model, penalty), (twin, restored)):
        torch.manual_seed(5)  # dropout
        train(learner, own, make_batches(seed=3))
        own.consolidate(make_batches(seed=3))
        train(learner, own, make_batches(seed=4))
    assert torch.equal(restored.loss(), penalty.loss())
    for name, p in model.named_parameters():
        assert torch.equal(p, dict(twin.named_parameters())[name])


def test_state_of_another_model_is_refused_and_changes_nothing(make_penalty) -> None:
    torch.manual_seed(0)
    small, large = nn.Linear(18, 3).double(), nn.Linear(20, 3).double()
    penalty, other = make_penalty(small), make_penalty(large)
    for own, width in ((penalty, 18), (other, 20)):
        batch = (torch.randn(4, width, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
        train(own.model, own, [batch])
        own.consolidate([batch])
    kept = penalty.state_dict()
    with pytest.raises(InputError, match="not of this model"):
        penalty.load_state_dict(other.state_dict())
    with pytest.raises(InputError, match="does not belong"):
        penalty.load_state_dict({**kept, "surprise": torch.zeros(1)})
    assert all(torch.equal(value, kept[name]) for name, value in penalty.state_dict().items())


def test_state_is_a_copy_and_not_a_view(make_penalty) -> None:
    model = NETWORKS["linear"]().double()
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())
    state = penalty.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    train(model, penalty, make_batches(seed=1))
    penalty.consolidate(make_batches(seed=1))
    assert all(torch.equal(value, kept[name]) for name, value in state.items())


def test_plastic_parameters_stay_free_unless_alpha_is_asked_for(make_penalty) -> None:
    model = NETWORKS["dhp"]().double()
    assert set(make_penalty(model).parameters) == {"features.1.weight", "features.1.bias", "head.weight"}
    with_alpha = make_penalty(model, regularize_alpha=True)
    assert set(with_alpha.parameters) == {"features.1.weight", "features.1.bias", "head.weight", "head.alpha"}
    train(model, with_alpha, make_batches())
    with_alpha.consolidate(make_batches())
    assert with_alpha.terms[0].importance["head.alpha"].sum() > 0


def test_frozen_weights_are_not_protected(make_penalty) -> None:
    model = NETWORKS["linear"]()
    model[1].requires_grad_(False)
    assert set(make_penalty(model).parameters) == {"3.weight", "3.bias"}
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable slow weights"):
        make_penalty(model)


def test_the_proximal_step_minimises_its_objective(model, make_penalty) -> None:
    penalty = make_penalty(model)
    for seed in range(2):
        train(model, penalty, make_batches(seed=seed))
        penalty.consolidate(make_batches(seed=seed))
    train(model, penalty, make_batches(seed=2), with_loss=False)
    start = penalty.snapshot()
    penalty.proximal_step(0.5)
    # at the minimiser of |θ′ − θ|² / (2 lr) + loss(θ′) the gradient, (θ′ − θ) / lr + loss′(θ′), is zero
    pull = gradient_of(penalty)
    for name, theta in penalty.parameters.items():
        torch.testing.assert_close((theta - start[name]) / 0.5 + pull[name], torch.zeros_like(theta))
    assert sum((theta - start[name]).abs().sum() for name, theta in penalty.parameters.items()) > 1e-3


def test_the_proximal_step_cannot_diverge_where_the_gradient_does(make_penalty) -> None:
    torch.manual_seed(0)
    model = NETWORKS["linear"]().double()
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())
    penalty.strength = 1e9
    for _ in range(20):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        distance = penalty.loss().item()
        penalty.proximal_step(0.1)
        assert penalty.loss().item() < distance
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    for p, g in zip(
        penalty.parameters.values(),
        torch.autograd.grad(penalty.loss(), list(penalty.parameters.values())),
        strict=True,
    ):
        p.data.sub_(0.1 * g)
    assert penalty.loss().item() > 1e3 * distance, "the plain gradient step overshoots here"


def test_the_proximal_step_holds_at_the_anchor_where_the_strength_overflows() -> None:
    model = nn.Linear(2, 1, bias=False)
    penalty = MAS(model, strength=3e38)
    penalty.consolidate([torch.full((2, 2), 1e3)])
    anchor = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    penalty.proximal_step(1.0)
    torch.testing.assert_close(model.weight.detach(), anchor)


def test_the_proximal_step_follows_strength_learning_rate_and_new_terms(make_penalty) -> None:
    torch.manual_seed(0)
    model = NETWORKS["linear"]().double()
    penalty = make_penalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())

    def distance_after(learning_rate: float) -> float:
        with torch.no_grad():
            for name, p in penalty.parameters.items():
                p.copy_(penalty.terms[-1].anchor[name] + 1)
        penalty.proximal_step(learning_rate)
        return sum((p - penalty.terms[-1].anchor[n]).square().sum().item() for n, p in penalty.parameters.items())

    near, far = distance_after(1.0), distance_after(0.01)
    assert near < far
    penalty.strength = 30.0
    assert distance_after(0.01) < far
    penalty.strength = 3.0
    train(model, penalty, make_batches(seed=1))
    penalty.consolidate(make_batches(seed=1))
    start = penalty.snapshot()
    penalty.proximal_step(0.01)
    moved = {n: p.clone() for n, p in penalty.parameters.items()}
    hold = {n: sum(t.importance[n] for t in penalty.terms) for n in start}
    pull = {n: sum(t.importance[n] * t.anchor[n] for t in penalty.terms) for n in start}
    for n in start:
        torch.testing.assert_close(moved[n], (start[n] + 0.06 * pull[n]) / (1 + 0.06 * hold[n]))


@pytest.mark.parametrize("name", ["ewc", "ewc exact", "online-ewc", "mas"])
def test_importances_do_not_depend_on_the_batch_size(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS["conv"]().double()
    inputs, targets = (torch.cat(parts) for parts in zip(*make_batches(), strict=True))
    whole, single = PENALTIES[name](model), PENALTIES[name](model)
    whole.consolidate([(inputs, targets)])
    single.consolidate([(inputs[i : i + 1], targets[i : i + 1]) for i in range(len(targets))])
    for key in whole.parameters:
        torch.testing.assert_close(whole.terms[0].importance[key], single.terms[0].importance[key])


@pytest.mark.parametrize("strength", [0, -1, float("nan"), float("inf")])
def test_bad_strengths_are_refused(strength: float, make_penalty) -> None:
    for kind in (EWC, OnlineEWC, SI, MAS):
        with pytest.raises(InputError, match="strength"):
            kind(nn.Linear(2, 2), strength=strength)


def test_bad_options_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="gamma"):
        OnlineEWC(model, strength=1, gamma=1.5)
    with pytest.raises(InputError, match="xi"):
        SI(model, strength=1, xi=0)
    with pytest.raises(InputError, match="labels"):
        EWC(model, strength=1, labels="guessed")


@pytest.mark.parametrize("name", ["ewc", "online-ewc", "mas"])
def test_consolidation_needs_samples_that_are_numbers(name: str) -> None:
    penalty = PENALTIES[name](nn.Linear(4, 3))
    with pytest.raises(InputError, match="batches is empty"):
        penalty.consolidate([])
    with pytest.raises(NotFiniteError, match="NaN or infinite"):
        penalty.consolidate([(torch.full((2, 4), float("nan")), torch.tensor([0, 1]))])
    assert penalty.terms == []


# --- EWC and Online EWC ---------------------------------------------------------------------------------------


def fisher_by_loop(model: nn.Module, names, batches, weigh) -> dict[str, Tensor]:
    """The diagonal Fisher by its definition: for each sample and label, the squared gradient of log p(y | x)."""
    model.eval()
    parameters = {name: dict(model.named_parameters())[name] for name in names}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    count = 0
    for inputs, targets in batches:
        for x, y in zip(inputs, targets, strict=True):
            p = model(x[None]).softmax(dim=1)[0].detach()
            for label, weight in weigh(p, int(y)):
                log_p = model(x[None]).log_softmax(dim=1)[0, label]
                for name, gradient in zip(total, torch.autograd.grad(log_p, list(parameters.values())), strict=True):
                    total[name] += weight * gradient**2
            count += 1
    return {name: value / count for name, value in total.items()}


@pytest.mark.parametrize(
    ("labels", "weigh"),
    [
        ("true", lambda p, y: [(y, 1.0)]),
        ("predicted", lambda p, y: [(int(p.argmax()), 1.0)]),
        ("exact", lambda p, y: [(c, p[c]) for c in range(3)]),
    ],
)
def test_fisher_equals_a_loop_over_samples(model, labels: str, weigh) -> None:
    penalty = EWC(model, strength=1, labels=labels)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches(seed=1))
    expected = fisher_by_loop(model, penalty.parameters, make_batches(seed=1), weigh)
    for name, value in expected.items():
        torch.testing.assert_close(penalty.terms[0].importance[name], value)


def test_sampled_fisher_approaches_the_exact_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    inputs = torch.randn(1, 3, dtype=torch.float64).expand(20_000, 3)
    batch = [(inputs, torch.zeros(20_000, dtype=torch.long))]
    sampled, exact, true = (
        importance_of(EWC(model, strength=1, labels=labels), batch) for labels in ("sampled", "exact", "true")
    )
    torch.testing.assert_close(sampled["weight"], exact["weight"], rtol=0.05, atol=0)
    assert not torch.allclose(true["weight"], exact["weight"], rtol=0.05)


def test_fisher_by_hand() -> None:
    """Two classes, one input x = 2, weights 0: p = ½, so ∂ log p(y) / ∂w_c = (1[y = c] − ½) · 2 = ±1."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    penalty = EWC(model, strength=10)
    penalty.consolidate([(torch.tensor([[2.0]]), torch.tensor([0]))])
    assert penalty.terms[0].importance["weight"].tolist() == [[1.0], [1.0]]
    nn.init.constant_(model.weight, 0.5)
    assert penalty.loss().item() == pytest.approx(10 * (0.25 + 0.25))


def test_fisher_over_the_task_s_own_classes_only() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    inputs, targets = torch.randn(6, 3, dtype=torch.float64), torch.tensor([2, 3, 2, 3, 3, 2])
    for labels in ("true", "exact"):
        penalty = EWC(model, strength=1, labels=labels)
        penalty.consolidate([(inputs, targets)], classes=(2, 3))
        importance = penalty.terms[0].importance["weight"]
        assert torch.equal(importance[:2], torch.zeros_like(importance[:2]))
        two_way = nn.Linear(3, 2).double()
        with torch.no_grad():
            two_way.weight.copy_(model.weight[2:])
            two_way.bias.copy_(model.bias[2:])
        reference = EWC(two_way, strength=1, labels=labels)
        reference.consolidate([(inputs, targets - 2)])
        torch.testing.assert_close(importance[2:], reference.terms[0].importance["weight"])


def test_ewc_has_a_term_a_task_and_online_ewc_one_with_decay() -> None:
    torch.manual_seed(0)
    model = NETWORKS["linear"]().double()
    ewc, online = EWC(model, strength=2.0), OnlineEWC(model, strength=2.0, gamma=0.7)
    fishers, anchors = [], []
    for seed in range(3):
        fishers.append(importance_of(ewc, make_batches(seed=seed)))
        anchors.append(ewc.snapshot())
        ewc.consolidate(make_batches(seed=seed))
        online.consolidate(make_batches(seed=seed))
        train(model, NoPenalty(model), make_batches(seed=seed))
        ewc.loss(), online.loss()
    assert len(ewc.terms) == 3
    assert len(online.terms) == 1
    for name, p in ewc.parameters.items():
        decayed = 0.7 * (0.7 * fishers[0][name] + fishers[1][name]) + fishers[2][name]
        torch.testing.assert_close(online.terms[0].importance[name], decayed)
        assert torch.equal(online.terms[0].anchor[name], anchors[2][name])
        for term, fisher, anchor in zip(ewc.terms, fishers, anchors, strict=True):
            assert torch.equal(term.importance[name], fisher[name])
            assert torch.equal(term.anchor[name], anchor[name])
        assert not torch.equal(p, anchors[2][name])


# --- SI -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["gradient", "proximal"])
def test_si_equals_a_stored_trajectory(model, step: str) -> None:
    """Ω from every θ and every gradient of the task's loss alone, kept on the way and summed at the end."""
    penalty = SI(model, strength=3.0, xi=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = {name: torch.zeros_like(p) for name, p in penalty.parameters.items()}
    for task in range(3):
        visited, slopes = [penalty.snapshot()], []
        model.train()
        for inputs, targets in make_batches(seed=task):
            torch.manual_seed(task)  # dropout, the same in both passes
            state = copy.deepcopy(model.state_dict())
            task_loss = F.cross_entropy(call(model, inputs, targets), targets)
            slopes.append(torch.autograd.grad(task_loss, list(penalty.parameters.values())))
            model.load_state_dict(state)
            torch.manual_seed(task)
            loss = F.cross_entropy(call(model, inputs, targets), targets)
            optimizer.zero_grad()
            (loss + penalty.loss() if step == "gradient" else loss).backward()
            optimizer.step()
            if step == "proximal":
                penalty.proximal_step(0.05)
            penalty.after_step()
            visited.append(penalty.snapshot())
        penalty.consolidate()
        for i, name in enumerate(penalty.parameters):
            path = -sum(
                slope[i] * (after[name] - before[name])
                for slope, before, after in zip(slopes, visited[:-1], visited[1:], strict=True)
            )
            moved = visited[-1][name] - visited[0][name]
            expected[name] = expected[name] + path.clamp(min=0) / (moved**2 + 0.05)
            torch.testing.assert_close(penalty.terms[0].importance[name], expected[name])
            assert torch.equal(penalty.terms[0].anchor[name], visited[-1][name])


def test_si_by_hand() -> None:
    """L = 2 w, lr = 0.1, two steps: w goes 1 → 0.8 → 0.6, path = 2 · 2 · 0.2 = 0.8, Ω = 0.8 / (0.16 + 0.04) = 4."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    penalty = SI(model, strength=1.0, xi=0.04)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (2 * model.weight.sum()).backward()
        optimizer.step()
        penalty.after_step()
    penalty.consolidate()
    assert penalty.terms[0].importance["weight"].item() == pytest.approx(4.0)


def test_si_takes_out_exactly_as_much_of_its_own_gradient_as_went_in() -> None:
    """Gradient accumulation: half the penalty in each of two backward passes, or all of it in the second."""
    paths = []
    for shares in ((0.5, 0.5), (0.0, 1.0)):
        torch.manual_seed(0)
        model = NETWORKS["linear"]().double()
        penalty = SI(model, strength=3.0)
        train(model, penalty, make_batches())
        penalty.consolidate()
        train(model, penalty, make_batches(seed=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        for share, (inputs, targets) in zip(shares, make_batches(2, seed=2), strict=True):
            loss = 0.5 * F.cross_entropy(model(inputs), targets)
            (loss + share * penalty.loss() if share else loss).backward()
        optimizer.step()
        penalty.after_step()
        paths.append(penalty.group("path"))
    for name in paths[0]:
        torch.testing.assert_close(paths[0][name], paths[1][name])


def test_si_takes_out_half_where_half_went_in() -> None:
    model = NETWORKS["linear"]().double()
    penalty = SI(model, strength=3.0)
    train(model, penalty, make_batches())
    penalty.consolidate()
    train(model, penalty, make_batches(seed=1))
    ((inputs, targets),) = make_batches(1, seed=2)
    names, weights = zip(*penalty.parameters.items(), strict=True)
    of_task = torch.autograd.grad(F.cross_entropy(model(inputs), targets), weights)
    path, start = copy.deepcopy(penalty.group("path")), penalty.snapshot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    (F.cross_entropy(model(inputs), targets) + 0.5 * penalty.loss()).backward()
    optimizer.step()
    penalty.after_step()
    for name, weight, slope in zip(names, weights, of_task, strict=True):
        torch.testing.assert_close(penalty.state[f"path.{name}"], path[name] - slope * (weight - start[name]))


def test_si_forgets_a_backward_pass_that_was_thrown_away() -> None:
    """A step skipped for a bad batch: its gradients are zeroed, and the penalty's share in them must go too."""
    paths = []
    for thrown_away in (False, True):
        torch.manual_seed(0)
        model = NETWORKS["linear"]().double()
        penalty = SI(model, strength=3.0)
        train(model, penalty, make_batches())
        penalty.consolidate()
        train(model, penalty, make_batches(seed=1))
        if thrown_away:
            model.zero_grad()
            (F.cross_entropy(model(make_batches()[0][0]), make_batches()[0][1]) + penalty.loss()).backward()
            model.zero_grad()
        train(model, penalty, make_batches(1, seed=2))
        paths.append(penalty.group("path"))
    for name in paths[0]:
        torch.testing.assert_close(paths[0][name], paths[1][name])


def test_si_refuses_importances_that_are_not_numbers_and_keeps_what_it_had() -> None:
    model = NETWORKS["linear"]().double()
    penalty = SI(model, strength=3.0)
    train(model, penalty, make_batches())
    penalty.state["path.1.weight"][0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"'1\.weight' is NaN or infinite"):
        penalty.consolidate()
    assert penalty.terms == []


def test_si_after_step_without_gradients_is_refused() -> None:
    model = nn.Linear(2, 2)
    penalty = SI(model, strength=1.0)
    with pytest.raises(InputError, match="before zero_grad"):
        penalty.after_step()


# --- MAS ------------------------------------------------------------------------------------------------------


def test_mas_equals_autograd_for_each_sample(model) -> None:
    penalty = MAS(model, strength=1)
    expected = {name: torch.zeros_like(p) for name, p in penalty.parameters.items()}
    for task in range(2):
        train(model, penalty, make_batches(seed=task))
        penalty.consolidate(make_batches(seed=task))
        model.eval()
        inputs = torch.cat([batch for batch, _ in make_batches(seed=task)])
        for x in inputs:
            norm = model(x[None]).square().sum()
            for name, gradient in zip(
                expected, torch.autograd.grad(norm, list(penalty.parameters.values())), strict=True
            ):
                expected[name] = expected[name] + gradient.abs() / len(inputs)
        for name, value in expected.items():
            torch.testing.assert_close(penalty.terms[0].importance[name], value)


def test_mas_by_hand_without_labels_and_with_the_task_s_classes() -> None:
    """f(x) = (w₀ x, w₁ x): ∂ ‖f‖² / ∂w_c = 2 w_c x², averaged over x = 1 and x = 2 with w = (3, −1)."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0], [-1.0]]))
    penalty = MAS(model, strength=1)
    penalty.consolidate([torch.tensor([[1.0], [2.0]])])
    assert penalty.terms[0].importance["weight"].tolist() == [[15.0], [5.0]]
    own = MAS(model, strength=1)
    own.consolidate([torch.tensor([[1.0], [2.0]])], classes=[1])
    assert own.terms[0].importance["weight"].tolist() == [[0.0], [5.0]]


def test_mas_takes_batches_of_inputs_alone_as_loaders_yield_them() -> None:
    model = nn.Linear(1, 2, bias=False)
    inputs = torch.tensor([[1.0], [2.0]])
    importances = []
    for batch in (inputs, [inputs], (inputs, torch.tensor([0, 1])), (inputs, torch.tensor([0, 1]), "extra")):
        penalty = MAS(model, strength=1)
        penalty.consolidate([batch])
        importances.append(penalty.terms[0].importance["weight"])
    assert all(torch.equal(importance, importances[0]) for importance in importances)


@pytest.mark.parametrize(
    ("targets", "classes", "sentence"),
    [
        (torch.tensor([0.0, 1.5]), None, "class numbers"),
        (torch.tensor([0]), None, r"shape \(2,\)"),
        (torch.tensor([[0], [1]]), None, r"shape \(2,\)"),
        (torch.tensor([0, 2]), None, "label 2 is not among the classes 0, 1"),
        (torch.tensor([0, -1]), None, "label -1"),
        (torch.tensor([0, 1]), (0,), "label 1"),
    ],
)
def test_bad_labels_are_refused(targets: Tensor, classes, sentence: str) -> None:
    penalty = EWC(nn.Linear(3, 2), strength=1)
    with pytest.raises(InputError, match=sentence):
        penalty.consolidate([(torch.rand(2, 3), targets)], classes)
    assert penalty.terms == []


@pytest.mark.filterwarnings("ignore:no weight has changed")
def test_online_ewc_refuses_the_state_of_ewc() -> None:
    model = NETWORKS["linear"]().double()
    ewc, online = EWC(model, strength=1), OnlineEWC(model, strength=1)
    for _ in range(2):
        ewc.consolidate(make_batches())
    with pytest.raises(InputError, match="2 terms"):
        online.load_state_dict(dict(ewc.state_dict()))  # which no longer says whose it is


@pytest.mark.parametrize("labels", ["predicted", "sampled", "exact"])
def test_ewc_with_labels_of_its_own_takes_inputs_alone(labels: str) -> None:
    model = nn.Linear(3, 2).double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    penalty = EWC(model, strength=1, labels=labels)
    with_targets = importance_of(penalty, [(inputs, torch.zeros(5, dtype=torch.long))])
    alone = importance_of(penalty, [inputs])
    assert torch.equal(alone["weight"], with_targets["weight"])


def test_ewc_without_labels_is_refused() -> None:
    with pytest.raises(InputError, match="true labels need them"):
        EWC(nn.Linear(1, 2), strength=1).consolidate([torch.ones(2, 1)])


def test_no_penalty_never_costs_anything() -> None:
    model = NETWORKS["linear"]().double()
    penalty = NoPenalty(model)
    train(model, penalty, make_batches())
    penalty.consolidate(make_batches())
    train(model, penalty, make_batches())
    assert penalty.loss().item() == 0


# --- weights in force


FAST_HEADS = {
    "as written": {},
    "uniform": {"alpha": "uniform"},
    "steady": {"trace_scale": 2.0, "trace_centred": True, "trace_gradient": False},
}


@pytest.fixture(params=FAST_HEADS)
def plastic_model(request) -> Network:
    """With a trace as large as the weights."""
    torch.manual_seed(3)
    head = DHPSoftmax(5, 3, eta=0.3, alpha_init=1.0, **FAST_HEADS[request.param])
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.LeakyReLU()), head).double()


def weights_in_force(model: Network) -> dict[str, Tensor]:
    """Copies, the head's written out here once more."""
    head = model.head
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    size = head.hebb.square().mean(dim=1, keepdim=True).sqrt()
    trace = head.hebb if head.trace_scale is None else head.hebb * head.trace_scale / size.clamp(min=1e-12)
    weights["head.weight"] = (head.weight + head.alpha * trace).detach().clone()
    return weights


def by_definition(penalty, anchors: list[dict[str, Tensor]], theta: dict[str, Tensor], fast: Tensor) -> Tensor:
    """λ Σ Ω ((θ + α Hebb) − (θ* + α* Hebb*))², the fast part a constant."""
    cost = torch.zeros((), dtype=torch.float64)
    for term, anchor in zip(penalty.terms, anchors, strict=True):
        for name, value in theta.items():
            now = value + fast if name == "head.weight" else value
            cost = cost + penalty.strength * (term.importance[name] * (now - anchor[name]) ** 2).sum()
    return cost


def learn_two_tasks(model: Network, penalty) -> list[dict[str, Tensor]]:
    """Two tasks and a part of a third; returns what the penalty should be anchored at."""
    anchors = []
    for seed in range(2):
        train(model, penalty, make_batches(seed=seed))
        penalty.consolidate(make_batches(seed=seed))
        anchors.append(weights_in_force(model))
    train(model, penalty, make_batches(seed=2))
    return anchors if penalty.keeps_every_term else anchors[-1:]


@pytest.mark.parametrize("with_alpha", [False, True])
def test_in_force_the_penalty_is_of_slow_plus_fast(plastic_model, make_penalty, with_alpha: bool) -> None:
    penalty = make_penalty(plastic_model, protect="in-force", regularize_alpha=with_alpha)
    anchors = learn_two_tasks(plastic_model, penalty)
    for term, anchor in zip(penalty.terms, anchors, strict=True):
        for name, value in term.anchor.items():
            torch.testing.assert_close(value, anchor[name], rtol=1e-12, atol=1e-12)
    theta = {name: p.detach().clone().requires_grad_() for name, p in penalty.parameters.items()}
    fast = weights_in_force(plastic_model)["head.weight"] - plastic_model.head.weight.detach()
    assert fast.abs().max() > 0.05
    expected = by_definition(penalty, anchors, theta, fast)
    reference = torch.autograd.grad(expected, list(theta.values()))
    torch.testing.assert_close(penalty.loss(), expected.detach(), rtol=1e-10, atol=1e-14)
    plastic_model.zero_grad()
    penalty.loss().backward()
    for (name, p), gradient in zip(penalty.parameters.items(), reference, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(gradient_of(penalty)[name], gradient, rtol=1e-10, atol=1e-13)
    assert reference[list(theta).index("head.weight")].abs().max() > 1e-6
    if not with_alpha:
        assert plastic_model.head.alpha.grad is None, "α is free: the penalty looks at the fast part, and leaves it"


@pytest.mark.parametrize("with_alpha", [False, True])
def test_in_force_the_proximal_step_is_the_minimiser(plastic_model, make_penalty, with_alpha: bool) -> None:
    penalty = make_penalty(plastic_model, protect="in-force", regularize_alpha=with_alpha)
    anchors = learn_two_tasks(plastic_model, penalty)
    penalty.strength = 40.0
    before = penalty.snapshot()
    trace = plastic_model.head.hebb.clone()
    penalty.proximal_step(0.1)
    after = {name: p.detach().clone().requires_grad_() for name, p in penalty.parameters.items()}
    fast = weights_in_force(plastic_model)["head.weight"] - plastic_model.head.weight.detach()
    distance = sum(((after[name] - before[name]) ** 2).sum() for name in after) / (2 * 0.1)
    slope = torch.autograd.grad(distance + by_definition(penalty, anchors, after, fast), list(after.values()))
    for gradient in slope:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)
    assert (after["head.weight"] - before["head.weight"]).abs().max() > 1e-5
    assert torch.equal(plastic_model.head.hebb, trace)


def test_in_force_a_trace_that_changes_costs_something_and_the_slow_weight_makes_up_for_it(plastic_model) -> None:
    slow, in_force = (OnlineEWC(plastic_model, strength=1e6, protect=what) for what in ("slow", "in-force"))
    for penalty in (slow, in_force):
        penalty.consolidate(make_batches())
        assert penalty.loss().item() == 0
    anchor = weights_in_force(plastic_model)["head.weight"]
    with torch.no_grad():
        plastic_model.head.alpha.mul_(1.5)
        plastic_model.head.hebb.normal_(generator=torch.Generator().manual_seed(0))
    assert slow.loss().item() == 0
    assert in_force.loss().item() > 1
    held = in_force.terms[0].importance["head.weight"] > 1e-3
    assert held.any()
    in_force.proximal_step(1.0)
    torch.testing.assert_close(weights_in_force(plastic_model)["head.weight"][held], anchor[held], rtol=0, atol=1e-2)


@pytest.mark.parametrize("head", [MatchedSoftmax, LinearSoftmax])
def test_without_a_trace_weights_in_force_are_the_slow_ones(head, make_penalty) -> None:
    torch.manual_seed(1)
    model = Network(nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.LeakyReLU()), head(5, 3)).double()
    twin = copy.deepcopy(model)
    in_force, slow = make_penalty(model, protect="in-force"), make_penalty(twin)
    assert in_force.fast == {}
    for penalty in (in_force, slow):
        train(penalty.model, penalty, make_batches())
        penalty.consolidate(make_batches())
        train(penalty.model, penalty, make_batches(seed=1))
        penalty.proximal_step(0.1)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(in_force.loss(), slow.loss())


def test_in_force_the_state_survives_save_and_load(plastic_model, make_penalty) -> None:
    penalty = make_penalty(plastic_model, protect="in-force")
    learn_two_tasks(plastic_model, penalty)
    twin = copy.deepcopy(plastic_model)
    for p in twin.parameters():
        nn.init.normal_(p)
    restored = make_penalty(twin, protect="in-force")
    twin.load_state_dict(plastic_model.state_dict())
    restored.load_state_dict(penalty.state_dict())
    assert torch.equal(restored.loss(), penalty.loss())
    for learner, own in ((plastic_model, penalty), (twin, restored)):
        train(learner, own, make_batches(seed=3))
        own.proximal_step(0.1)
        own.consolidate(make_batches(seed=3))
    for (name, a), (_, b) in zip(penalty.state_dict().items(), restored.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for name, value in plastic_model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_in_force_si_still_starts_at_the_slow_weight(plastic_model) -> None:
    penalty = SI(plastic_model, strength=1.0, xi=0.01, protect="in-force")
    train(plastic_model, penalty, make_batches())
    start, path = plastic_model.head.weight.detach().clone(), penalty.state["path.head.weight"].clone()
    moved = start - penalty.state["start.head.weight"]
    penalty.consolidate()
    assert torch.equal(penalty.state["start.head.weight"], start)
    anchor = penalty.terms[0].anchor["head.weight"]
    torch.testing.assert_close(anchor, weights_in_force(plastic_model)["head.weight"], rtol=1e-12, atol=1e-12)
    assert (anchor - start).abs().max() > 0.05
    omega = path.clamp(min=0) / (moved.square() + 0.01)
    torch.testing.assert_close(penalty.terms[0].importance["head.weight"], omega, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_in_force_si_s_path_does_not_see_the_penalty(plastic_model, num_passes: int) -> None:
    """Neither though the step moves α, and so the fast part, nor though each of several passes saw another trace."""
    penalty = SI(plastic_model, strength=500.0, protect="in-force")
    learn_two_tasks(plastic_model, penalty)
    with torch.no_grad():
        plastic_model.head.hebb.add_(0.3)
    penalty.state |= {f"before.{name}": theta for name, theta in penalty.snapshot().items()}
    path, start = penalty.state["path.head.weight"].clone(), plastic_model.head.weight.detach().clone()
    optimizer = torch.optim.SGD(plastic_model.parameters(), lr=0.05)
    optimizer.zero_grad()
    of_task = torch.zeros_like(start)
    for inputs, targets in make_batches(num_passes, seed=9):
        loss = F.cross_entropy(plastic_model(inputs, targets), targets)
        of_task += torch.autograd.grad(loss, plastic_model.head.weight, retain_graph=True)[0]
        (loss + penalty.loss()).backward()
    of_both = plastic_model.head.weight.grad.clone()
    optimizer.step()
    penalty.after_step()
    moved = plastic_model.head.weight.detach() - start
    assert (of_both - of_task).abs().max() > 1e-3, "the penalty pulled"
    torch.testing.assert_close(penalty.state["path.head.weight"] - path, -of_task * moved, rtol=1e-8, atol=1e-13)


def test_protecting_something_else_is_refused(make_penalty) -> None:
    with pytest.raises(InputError, match="no protect 'fast', only slow, in-force"):
        make_penalty(NETWORKS["dhp"](), protect="fast")


# --- what a penalty says that it holds


@pytest.mark.parametrize("kind", [EWC, OnlineEWC, SI, MAS])
@pytest.mark.filterwarnings("ignore:no weight has changed")
def test_its_repr_says_the_strength_the_weights_and_the_tasks(kind: type[Quadratic]) -> None:
    model = NETWORKS["linear"]().double()
    weights = sum(theta.numel() for theta in model.parameters())
    penalty = kind(model, strength=0.5)
    begin = f"{kind.__name__}(strength=0.5, {weights} weights protected, "
    assert repr(penalty) == f"{begin}no task consolidated)"
    penalty.consolidate(make_batches())
    assert repr(penalty) == f"{begin}1 task consolidated)"
    penalty.consolidate(make_batches(seed=1))
    assert repr(penalty) == f"{begin}2 tasks consolidated)"


@pytest.mark.filterwarnings("ignore:no weight has changed")
def test_after_loading_its_repr_says_only_what_a_state_tells() -> None:
    """The terms of EWC can be counted; those of the others are sums over any number of tasks."""
    said = {}
    for kind in (EWC, SI):
        model = NETWORKS["linear"]().double()
        penalty, other = kind(model, strength=0.5), kind(model, strength=0.5)
        other.load_state_dict(penalty.state_dict())
        assert repr(other).endswith("no task consolidated)")
        for seed in range(2):
            penalty.consolidate(make_batches(seed=seed))
        other.load_state_dict(penalty.state_dict())
        said[kind] = repr(other)
        other.load_state_dict(kind(model, strength=0.5).state_dict())
        other.consolidate(make_batches())
        assert repr(other).endswith(" 1 task consolidated)")
    assert said[EWC].endswith(" 2 tasks consolidated)")
    assert said[SI].endswith(" at least 1 task consolidated)")


def test_the_repr_of_what_consolidates_in_its_own_way_is_short() -> None:
    class Absolute(Penalty):
        def loss(self) -> Tensor:
            return torch.zeros(())

        def consolidate(self, batches=(), classes=None) -> None:
            pass

    model = nn.Linear(1000, 2)
    assert repr(Absolute(model, strength=10)) == "Absolute(strength=10, 2,002 weights protected)"
    assert repr(NoPenalty(model)) == "NoPenalty()"
