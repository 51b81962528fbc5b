"""Ways to use a head that would give wrong numbers without a word: each is right, or refused in one sentence."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engram
from builders import refusal
from engram import DHPSoftmax, InputError
from engram.common.registry import HEADS
from engram.config.settings import SETTINGS
from engram.nn.dhp import algorithm_1

FAMILY = [name for name in engram.heads.list() if name not in ("linear", "matched", "scaled")]
WRITERS = ("dhp", "hebbian-softmax", "cope", "neuromodulated", "retroactive")


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=random, dtype=dtype), torch.tensor([0, 2, 2, 0, 3, 0, 2, 3])


def plastic(alpha: str = "synapse") -> DHPSoftmax:
    """A head with a trace; class 1 is in no batch."""
    torch.manual_seed(0)
    head = DHPSoftmax(5, 4, eta=0.3, alpha=alpha).double()
    nn.init.normal_(head.alpha)
    nn.init.normal_(head.hebb)
    return head


@pytest.mark.parametrize("alpha", ["synapse", "uniform"])
def test_gradients_of_gradients_are_those_of_the_paper_s_algorithm(alpha: str) -> None:
    head = plastic(alpha)
    hidden, target = batch()
    hidden.requires_grad_()
    before = head.hebb.clone()
    inputs = [hidden, head.weight, head.alpha, head.eta]

    def second(logits: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(F.cross_entropy(logits, target), inputs, create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in first), inputs)

    expected = second(algorithm_1(hidden, target, head.weight, head.alpha, head.eta, before)[0])
    for found, right in zip(second(head(hidden, target)), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_gradients_of_gradients_pass_gradcheck_and_leave_the_first_ones_as_they_were() -> None:
    head = plastic()
    hidden, target = batch()
    before = head.hebb.clone()

    def logits(hidden: Tensor, weight: Tensor, alpha: Tensor, eta: Tensor) -> Tensor:
        head.hebb.copy_(before)
        values = {"weight": weight, "alpha": alpha, "eta": eta * 1}
        return torch.func.functional_call(head, values, (hidden, target))

    inputs = [tensor.detach().clone().requires_grad_() for tensor in (hidden, head.weight, head.alpha, head.eta)]
    assert torch.autograd.gradgradcheck(logits, inputs)
    once = torch.autograd.grad(logits(*inputs).square().sum(), inputs)
    again = torch.autograd.grad(logits(*inputs).square().sum(), inputs, create_graph=True)
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", [*WRITERS, "slda", "fast-weights"])
def test_a_head_within_activation_checkpointing_is_refused(name: str, reentrant: bool) -> None:
    head = engram.heads.create(name, 5, 4)
    hidden, target = batch(torch.float32)
    hidden.requires_grad_()
    if name == "slda":
        model = nn.Sequential(nn.Linear(5, 5), engram.heads.create("slda", 5, 4, learn_features=True))
        head = model[1]
    loss = F.cross_entropy(checkpoint(head, hidden, target, use_reentrant=reentrant), target)
    written = copy.deepcopy(head.state_dict())
    with pytest.raises(InputError, match=f"a {type(head).__name__} is called a second time .* checkpoint the features"):
        loss.backward()
    for key, tensor in head.state_dict().items():
        torch.testing.assert_close(tensor, written[key], rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_features_in_front_of_a_head_change_nothing(reentrant: bool) -> None:
    hidden, target = batch()
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        features, head = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double(), plastic()
        inputs = hidden.clone().requires_grad_()
        h = checkpoint(features, inputs, use_reentrant=reentrant) if checkpointed else features(inputs)
        F.cross_entropy(head(h, target), target).backward()
        found.append([head.hebb, *(p.grad for p in (*features.parameters(), *head.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRITERS)
def test_a_memory_in_half_precision_is_refused_in_training_and_read_in_evaluation(
    name: str, dtype: torch.dtype
) -> None:
    head = engram.heads.create(name, 5, 4)
    hidden, target = batch(torch.float32)
    head(hidden, target)
    head.to(dtype)
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(InputError, match=f"would stop moving in {dtype}: train it in float32"):
        head(hidden.to(dtype), target)
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())
    assert head.eval()(hidden.to(dtype)).dtype == dtype


def test_the_advice_about_half_precision_works() -> None:
    """0.497 is right after 300 batches of ones at η = 0.002 and a bit; in bfloat16 the trace stalled at 0.125."""
    features, head = nn.Linear(5, 5).bfloat16(), DHPSoftmax(5, 4, eta=0.0023)
    hidden, target = batch(torch.bfloat16)
    head(features(hidden).float(), target)
    head.reset_parameters()
    for _ in range(300):
        head(torch.ones(1, 5), torch.tensor([0]))
    torch.testing.assert_close(head.hebb[0], torch.full((5,), 1 - (1 - 0.0023) ** 300), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["slda", "ridge", "ncm"])
def test_sums_in_double_precision_take_features_in_half(name: str) -> None:
    """They stay exact, whatever the type of the features."""
    hidden, target = batch(torch.bfloat16)
    head, exact = (engram.heads.create(name, 5, 4) for _ in range(2))
    head.bfloat16()(hidden, target)
    exact(hidden.float(), target)
    torch.testing.assert_close(head.total, exact.total, rtol=0, atol=0)


# --- what it is given


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("shape", [(4, 10), (40,), (10, 4, 1)])
def test_targets_of_a_sequence_have_its_shape(name: str, shape: tuple[int, ...]) -> None:
    head = engram.heads.create(name, 5, 4)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    with pytest.raises(InputError, match="must have shape"):
        head(torch.randn(10, 4, 5), torch.zeros(shape, dtype=torch.int64))
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize("name", FAMILY)
def test_features_of_another_type_are_refused_before_they_are_written(name: str) -> None:
    head = engram.heads.create(name, 5, 4)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    with pytest.raises(InputError, match=r"must be torch\.float32 like the layer, not torch\.float64"):
        head(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 4)
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("slda", {"head_init": "bogus"}, "there is no head_init 'bogus'"),
        ("linear", {"head_gain": 0.0}, "head_gain must be a positive number"),
        ("hebbian-softmax", {"rare_until": -1}, "rare_until must be at least 0"),
        ("cope", {"temperature": float("inf")}, "temperature must be a finite number, not inf"),
        ("dhp", {"eta": 10**400}, "eta must be a finite number"),
        ("dhp", {"device": "moon"}, "device must be a device, not 'moon'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        engram.heads.create(name, 5, 4, **settings)


NAN = float("nan")
# For the type of a setting's default: the words for it, and values of other types.
WRONG: dict[type, tuple[str, list[object]]] = {
    bool: ("True or False", ["no", None, [True], NAN, 1, 0.0]),
    int: ("a whole number", ["a", None, [1], NAN, True, 1.5]),
    float: ("a finite number", ["a", None, [0.1], {}, NAN, True, 1j, torch.ones(2)]),
    str: ("a word", [None, ["linear"], NAN, True, 1, b"linear"]),
}
OPTIONAL = {"shrinkage": float, "trace_scale": float}  # whose default is None
PLACES = ("device", "dtype")  # where a layer is, and in which precision: no settings of what it computes


def settings_of(name: str) -> dict[str, type]:
    """Every setting of a head, and its type, as its default or the config says it."""
    parameters = inspect.signature(HEADS[name].make).parameters.values()
    found = {p.name: type(p.default) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in PLACES}
    of_config = {argument: SETTINGS[named].type for argument, named in HEADS.facts(name).get("settings", {}).items()}
    return of_config | found | {setting: OPTIONAL[setting] for setting in OPTIONAL if setting in of_config}


@pytest.mark.parametrize("name", engram.heads.list())
def test_a_setting_of_another_type_is_refused_in_one_sentence(name: str) -> None:
    settings = settings_of(name)
    assert settings
    for setting, kind in settings.items():
        words, values = WRONG[kind]
        for value in values:
            if value is None and setting in OPTIONAL:
                continue
            more = {"random_features": 3} if setting == "random_window" else {}
            sentence = refusal(engram.heads.create, name, 5, 4, **more, **{setting: value})
            assert sentence.startswith(f"{setting} must be {words}, not "), sentence


@pytest.mark.parametrize("name", engram.heads.list())
def test_numbers_of_numpy_and_whole_numbers_are_numbers(name: str) -> None:
    for setting, kind in settings_of(name).items():
        more = {"random_features": 3} if setting == "random_window" else {}
        for value in {
            float: [np.float32(0.5), np.float64(0.5), 1 - (setting == "head_dropout")],
            int: [np.int64(2)],
        }.get(kind, []):
            engram.heads.create(name, 5, 4, **more, **{setting: value})


@pytest.mark.parametrize("name", ["DHPSoftmax", "LinearSoftmax", "MatchedSoftmax"])
def test_sizes_of_another_type_are_refused_too(name: str) -> None:
    for sizes in (("5", 4), (5, None), (5.0, 4), (5, [4]), (True, 4)):
        assert "_features must be a whole number, not " in refusal(getattr(engram, name), *sizes)


def test_only_ratios_of_weights_matter_at_a_fixed_shrinkage() -> None:
    torch.manual_seed(0)
    y = torch.arange(40) % 4
    features = torch.randn(40, 5) + y[:, None]
    logits = []
    for weight in (1.0, 0.001):
        head = engram.heads.create("slda", 5, 4, shrinkage=0.1)
        head.write(features, y, torch.full((40,), weight))
        logits.append(head.eval()(features))
    torch.testing.assert_close(*logits)


def test_weights_of_samples_have_the_shape_of_the_targets() -> None:
    torch.manual_seed(0)
    features, y, weight = torch.randn(10, 4, 5), torch.randint(4, (10, 4)), torch.rand(10, 4)
    flat, whole = engram.heads.create("slda", 5, 4), engram.heads.create("slda", 5, 4)
    flat.write(features.flatten(0, 1), y.flatten(), weight.flatten())
    whole.write(features, y, weight)
    assert torch.equal(flat.moment, whole.moment)
    for wrong in (torch.ones(10), torch.ones(4, 10), [1.0] * 40):
        with pytest.raises(InputError, match="weights"):
            whole.write(features, y, wrong)
