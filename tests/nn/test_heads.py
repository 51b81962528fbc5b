"""What every head promises, put to each of `engram.heads.list()`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engram
from builders import refusal
from engram.common.errors import InputError
from engram.nn.head import Head
from engram.nn.modules import constant_for_compiler
from engram.nn.networks import Network

M, C = 6, 4
HEADS = engram.heads.list()
REMEMBER = ("ncm", "slda", "ridge")  # those that learn nothing
IGNORE_TARGETS = ("linear", "matched", "scaled")
NO_SEQUENCES = ("balanced-trace", "dhp", "dhp-uniform", "steady")  # the paper's layer takes (batch, features) alone


def make(name: str, dtype: torch.dtype = torch.float64, **settings: object) -> Network:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(5, M), nn.Tanh())
    return Network(features, engram.heads.create(name, M, C, **settings)).to(dtype)


def batch(seed: int, num_classes: int = C, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(12, 5, generator=random, dtype=dtype), torch.arange(12) % num_classes


def learn(model: Network, steps: range = range(4), num_classes: int = C) -> list[Tensor]:
    """Some steps of SGD; returns the logits before each."""
    model.train()
    seen = []
    for step in steps:
        inputs, targets = batch(step, num_classes, next(model.features.parameters()).dtype)
        logits = model(inputs, targets)
        loss = F.cross_entropy(logits, targets)
        model.zero_grad()
        if loss.requires_grad:
            loss.backward()
        with torch.no_grad():
            for theta in model.parameters():
                theta.sub_(0.1 * theta.grad) if theta.grad is not None else None
        seen.append(logits.detach())
    return seen


def read(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(batch(99)[0].to(next(model.features.parameters()).dtype))


@pytest.mark.parametrize("name", HEADS)
def test_it_learns_and_stays_finite(name: str) -> None:
    model = make(name)
    before = {n: p.clone() for n, p in model.named_parameters()}
    logits = learn(model)
    assert all(z.shape == (12, C) and z.isfinite().all() for z in logits)
    assert read(model).isfinite().all()
    moved = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert moved == (name not in REMEMBER)


@pytest.mark.parametrize("name", HEADS)
def test_evaluation_changes_nothing_but_what_is_read(name: str) -> None:
    model = make(name)
    learn(model)
    first = read(model)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    assert torch.equal(read(model), first)
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_grew_keeps_its_old_classes_bit_for_bit(name: str) -> None:
    model = make(name)
    learn(model)
    logits = read(model)
    kept = {n: t.clone() for n, t in model.head.state_dict().items()}
    model.head.grow(C + 2)
    assert model.head.out_features == C + 2
    for n, t in model.head.state_dict().items():
        assert torch.equal(t[: len(kept[n])] if t.ndim else t, kept[n]), n
    grown = read(model)
    assert grown.shape == (12, C + 2)
    torch.testing.assert_close(grown[:, :C], logits, rtol=1e-12, atol=1e-14)
    learn(model, num_classes=C + 2)
    assert read(model).isfinite().all()
    assert "cannot shrink" in refusal(model.head.grow, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_compiled_model_computes_the_same(name: str) -> None:
    torch._dynamo.reset()  # after some models PyTorch gives up and compiles no more: then nothing would be tested
    model, other = make(name), make(name)
    for each in (model, other):
        each.start(batch(0)[0])  # what a scaled head needs before it is compiled
    compiled = torch.compile(other, backend="aot_eager")
    for seed in range(2):
        learn(model, range(2 * seed, 2 * seed + 2))
        for step in range(2 * seed, 2 * seed + 2):
            inputs, targets = batch(step)
            loss = F.cross_entropy(compiled.train()(inputs, targets), targets)
            other.zero_grad()
            loss.backward() if loss.requires_grad else None
            with torch.no_grad():
                for theta in other.parameters():
                    theta.sub_(0.1 * theta.grad) if theta.grad is not None else None
        with torch.no_grad():
            found = compiled.eval()(batch(99)[0])
        torch.testing.assert_close(found, read(model), rtol=1e-9, atol=1e-11)


def test_a_function_is_marked_as_constant_just_as_pytorch_marks_it() -> None:
    def own() -> None: ...
    def theirs() -> None: ...

    assert constant_for_compiler(own) is own
    assert vars(own) == vars(torch.compiler.assume_constant_result(theirs)) != {}


@pytest.mark.parametrize("name", HEADS)
def test_folding_gives_the_same_logits(name: str) -> None:
    model = make(name)
    learn(model)
    assert torch.equal(engram.fold(model)(batch(99)[0]), read(model))


@pytest.mark.parametrize("name", HEADS)
def test_every_head_folds_to_linear_layers_that_no_longer_follow_it(name: str) -> None:
    model = make(name)
    learn(model)
    expected, hidden = read(model), model.features(batch(99)[0])
    folded = model.head.fold()
    assert type(folded if isinstance(folded, nn.Linear) else folded.linear) is nn.Linear
    learn(model, range(4, 6))
    torch.testing.assert_close(folded.eval()(hidden), expected, rtol=1e-12, atol=1e-14)


def test_a_linear_head_folds_with_its_bias() -> None:
    head = engram.heads.create("linear", M, C, bias=True)
    hidden = torch.randn(3, M)
    folded = head.eval().fold()
    assert torch.equal(folded(hidden), head(hidden))
    assert not folded.training
    assert folded.bias is not head.bias


# What each head is made with below, and how it is printed. Sizes come first.
PRINTED = {
    "balanced": ({"head_dropout": 0.2}, "head_dropout=0.2"),
    "balanced-trace": ({"head_dropout": 0.2}, "head_dropout=0.2"),
    "cope": ({"rate": 0.5, "temperature": 0.1}, "rate=0.5"),
    "dhp": ({"eta": 0.2, "learn_eta": False}, "eta=0.2, learn_eta=False"),
    "dhp-uniform": ({}, "alpha='uniform'"),
    "fast-weights": ({"num_keys": 5}, "num_keys=5"),
    "hebbian-softmax": ({"rare_until": 9}, "rare_until=9"),
    "linear": ({"bias": True}, "bias=True"),
    "scaled": ({"head_gain": 2.0}, "head_init='scaled', head_gain=2.0"),
    "matched": ({"trace": 2.0}, "trace=2.0"),
    "ncm": ({"normalised": True}, "read='nearest-mean'"),
    "neuromodulated": ({"alpha_init": 0.5}, "alpha_init=0.5"),
    "retroactive": ({"eta": 0.5}, "eta=0.5"),
    "ridge": ({"learn_features": True}, "read='ridge', learn_features=True"),
    "slda": ({"shrinkage": 0.1}, "read='lda', shrinkage=0.1"),
    "steady": ({}, "eta=0.0001, alpha_init=0.1, learn_eta=False, trace_gradient=False, trace_scale=2.0, "
               "trace_centred=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_printed_head_shows_its_sizes_and_the_settings_that_are_not_its_defaults(name: str) -> None:
    settings, shown = PRINTED[name]
    head = engram.heads.create(name, M, C, **settings)
    learn(Network(nn.Linear(5, M), head).double())  # what it learns is no setting
    assert head.extra_repr() == f"in_features={M}, out_features={C}, {shown}"
    assert head.extra_repr() in repr(head)
    head.grow(C + 1)
    assert f"out_features={C + 1}" in repr(head)


def test_a_printed_memory_shows_what_it_uses_of_the_features() -> None:
    settings = {"random_features": 9, "random_window": 3, "top_k": 2, "normalised": True}
    assert repr(engram.heads.create("slda", M, C, **settings).psi) == (
        f"Psi(in_features={M}, normalised=True, random_features=9, random_window=3, top_k=2)"
    )
    assert repr(engram.heads.create("slda", M, C).psi) == f"Psi(in_features={M})"


def test_a_head_of_another_package_is_printed_whatever_its_settings_are() -> None:
    class Own(Head):
        def __init__(self, in_features: int, out_features: int, gains: Tensor, unknown: int, *, name: str = "own"):
            super().__init__(in_features, out_features)
            self.gains = gains

    assert repr(Own(2, 3, torch.ones(2), 1)) == "Own(in_features=2, out_features=3, gains=tensor([1., 1.]))"


@pytest.mark.parametrize("name", HEADS)
def test_a_loaded_head_goes_on_as_one_that_was_never_saved(name: str, tmp_path: Path) -> None:
    model, fresh, other = make(name), make(name), make(name)
    learn(model)
    engram.save_model(tmp_path / "model.safetensors", model)
    engram.load_model(tmp_path / "model.safetensors", fresh)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    straight = learn(model, range(4, 7)), read(model)
    for loaded in (fresh, other):
        again = learn(loaded, range(4, 7)), read(loaded)
        assert all(torch.equal(a, b) for a, b in zip(again[0], straight[0], strict=True))
        assert torch.equal(again[1], straight[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_onnxruntime_predicts_as_the_head_does(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make(name, torch.float32)
    learn(model)
    inputs = batch(99, dtype=torch.float32)[0]
    engram.export_onnx(model, tmp_path / "model.onnx", inputs)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"inputs": inputs.numpy()})
    expected = model.eval()(inputs).detach()
    torch.testing.assert_close(torch.as_tensor(logits), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in HEADS if name not in NO_SEQUENCES])
def test_a_sequence_is_as_many_samples(name: str) -> None:
    model, other = make(name), make(name)
    for seed in range(3):
        inputs, targets = batch(seed)
        expected = model(inputs, targets)
        logits = other.head(other.features(inputs).unflatten(0, (3, 4)), targets.unflatten(0, (3, 4)))
        torch.testing.assert_close(logits.flatten(0, 1), expected, rtol=1e-12, atol=1e-14)
    expected = read(model)
    found = other.eval().head(other.features(batch(99)[0]).unflatten(0, (3, 4)))
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("protect", ["slow", "in-force"])
def test_what_a_penalty_protects_is_what_the_head_computes_with(name: str, protect: str) -> None:
    model = make(name)
    learn(model)
    if not list(model.head.parameters()):
        return
    penalty = engram.MAS(model, strength=1.0, protect=protect)
    if "head.weight" in penalty.fast:
        in_force = model.head.weight + penalty.fast["head.weight"]()
        hidden = model.features(batch(99)[0])
        torch.testing.assert_close(hidden @ in_force.T, read(model), rtol=1e-12, atol=1e-14)
    penalty.consolidate([batch(7)])
    assert all(tensor.isfinite().all() for tensor in penalty.state_dict().values())
    anchors = penalty.anchors()
    learn(model, range(4, 6))
    penalty.proximal_step(1e12)
    importance = penalty.terms[0].importance
    for n, theta in penalty.in_force(penalty.parameters).items():
        held = importance[n] > 1e-6
        torch.testing.assert_close(theta[held], anchors[n][held], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in HEADS if name not in IGNORE_TARGETS])
def test_bad_batches_are_refused_and_leave_no_trace(name: str) -> None:
    head = engram.heads.create(name, M, C)
    kept = {n: t.clone() for n, t in head.state_dict().items()}
    hidden, targets = torch.randn(3, M), torch.tensor([0, 1, 2])
    assert "targets" in refusal(head, hidden)
    assert "targets must lie in 0..3" in refusal(head, hidden, torch.tensor([0, 1, C]))
    assert "targets must have shape (3,)" in refusal(head, hidden, targets[:2])
    assert "targets must be class numbers" in refusal(head, hidden, targets.float())
    assert f"must have shape (batch, {M})" in refusal(head, hidden[:, :2], targets)
    assert "NaN" in refusal(head, hidden.index_fill(0, torch.tensor([0]), torch.nan), targets)
    assert all(torch.equal(t, kept[n]) for n, t in head.state_dict().items())


@pytest.mark.parametrize("name", [*REMEMBER, "cope"])
def test_nothing_can_be_read_before_anything_was_written(name: str) -> None:
    head = engram.heads.create(name, M, C).eval()
    assert "nothing was written" in refusal(head, torch.randn(3, M))
    assert "nothing was written" in refusal(head.fold)


@pytest.mark.parametrize("name", ["slda", "ridge"])
def test_a_singular_moment_names_the_setting_that_helps(name: str) -> None:
    head = engram.heads.create(name, M, C, shrinkage=0.0)
    head(torch.randn(3, M), torch.tensor([0, 0, 1]))
    sentence = refusal(head.settle)
    assert sentence.startswith("the second moment of the 6 features is singular")
    assert sentence.endswith("raise shrinkage, or subtract their means first")
    assert not head.read_weight.any(), "nothing is half read"


@pytest.mark.parametrize("name", ["slda", "ridge"])
def test_a_second_moment_that_is_too_large_is_refused_in_bytes_before_it_is_made(name: str) -> None:
    sentence = refusal(engram.heads.create, name, M, C, random_features=10**6)
    assert sentence.startswith("the second moment of 1000000 features takes 8,000,000,000,000 bytes")


@pytest.mark.parametrize("name", ["ncm", "slda", "ridge"])
def test_features_far_from_0_are_as_good_in_single_precision(name: str) -> None:
    hidden, targets = torch.randn(300, 4) + 3 * torch.eye(4)[torch.arange(300) % 3], torch.arange(300) % 3
    for shift in (0.0, 1e4):
        head = engram.heads.create(name, 4, 3)
        head(hidden + shift, targets)
        assert (head.eval()(hidden + shift).argmax(1) == targets).float().mean() > 0.95


@pytest.mark.parametrize("name", ["slda", "ridge"])
def test_samples_that_are_all_alike_give_the_most_frequent_class(name: str) -> None:
    head = engram.heads.create(name, M, C)
    head(torch.ones(3, M), torch.tensor([1, 1, 0]))
    logits = head.eval()(torch.ones(1, M))[0]
    assert torch.isfinite(logits).all()
    assert logits[:2].min() > logits[2:].max(), "classes that were seen come first"


@pytest.mark.parametrize("name", HEADS)
def test_an_empty_batch_does_not_change_what_is_read(name: str) -> None:
    model = make(name)
    learn(model)
    before = read(model)
    inputs, targets = batch(7)
    model.train()(inputs[:0], targets[:0])
    torch.testing.assert_close(read(model), before)


@pytest.mark.parametrize(
    ("weight", "words"),
    [([1.0], r"shape \(3,\)"), ([1.0, -1.0, 1.0], "at least 0"), ([1.0, float("nan"), 1.0], "finite")],
)
def test_weights_of_samples_are_checked_before_they_are_written(weight: list[float], words: str) -> None:
    head = engram.heads.create("slda", M, C)
    with pytest.raises(InputError, match=words):
        head.write(torch.randn(3, M), torch.tensor([0, 1, 2]), torch.tensor(weight))
    assert not head.count.any()


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 3), (4, 0), (4, 3.0), (True, 3), ("4", 3)])
@pytest.mark.parametrize("name", HEADS)
def test_sizes_that_are_no_whole_numbers_are_refused(name: str, in_features: int, out_features: int) -> None:
    assert "a head needs a whole number of" in refusal(engram.heads.create, name, in_features, out_features)


@pytest.mark.parametrize("name", HEADS)
def test_sums_stay_in_double_precision(name: str) -> None:
    head = engram.heads.create(name, M, C).half().float()
    sums = [getattr(head, n) for n in getattr(head, "sums", ())]
    assert all(tensor is None or tensor.dtype == torch.float64 for tensor in sums)


def test_an_unknown_head_is_refused_with_those_that_there_are() -> None:
    words = refusal(engram.heads.create, "sldaa", M, C)
    assert "there is no head 'sldaa' (did you mean slda?), only" in words
    expected = "linear matched dhp dhp-uniform steady hebbian-softmax fast-weights neuromodulated retroactive ncm cope"
    assert {*expected.split(), "slda", "ridge"} <= set(HEADS)


@pytest.mark.parametrize("name", ["ncm", "slda", "ridge"])
def test_a_memory_that_was_not_read_since_is_not_exported(name: str) -> None:
    head = engram.heads.create(name, 6, 3)
    head(torch.rand(30, 6), torch.arange(30) % 3)
    inputs = torch.rand(4, 6)
    head.eval()
    with pytest.raises(Exception, match="call settle"):
        torch.export.export(head, (inputs,))
    head.settle()
    exported = torch.export.export(head, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), head(inputs))


# --- initial weights


SLOW = [name for name in HEADS if name not in ("cope", "scaled")]  # which have prototypes alone, and one start


@pytest.mark.parametrize("name", SLOW)
def test_published_weights_are_the_linear_ones_in_another_range(name: str) -> None:
    """From the same random numbers, so that trials stay paired: U(±1/√m) times √(m/C) is U(±1/√C)."""
    settings = {"learn_features": True} if name in REMEMBER else {}
    torch.manual_seed(0)
    linear = engram.heads.create(name, 64, C, **settings)
    after = torch.rand(1)
    torch.manual_seed(0)
    published = engram.heads.create(name, 64, C, head_init="published", **settings)
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(published.weight, linear.weight * (64 / C) ** 0.5)
    assert 0.95 * C**-0.5 < published.weight.abs().max() <= C**-0.5
    assert "head_init='published'" in repr(published)
    assert "head_init" not in repr(linear)
    for other in set(dict(linear.named_parameters())) - {"weight", "extra"}:
        assert torch.equal(linear.get_parameter(other), published.get_parameter(other)), other


def test_both_sets_of_weights_of_a_matched_head_are_published_ones() -> None:
    head = engram.heads.create("matched", 400, 10, head_init="published", trace=2.0)
    assert 0.95 * 10**-0.5 < 2 * head.extra.abs().max() <= 10**-0.5


@pytest.mark.parametrize("name", IGNORE_TARGETS)
def test_a_gain_is_a_factor_of_the_initial_weights(name: str) -> None:
    torch.manual_seed(0)
    usual = engram.heads.create(name, M, C)
    torch.manual_seed(0)
    wider = engram.heads.create(name, M, C, head_gain=3.0)
    for theta, three_times in zip(usual.parameters(), wider.parameters(), strict=True):
        torch.testing.assert_close(three_times, 3 * theta)


def size(logits: Tensor) -> float:
    return float(logits.detach().square().mean().sqrt())


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("gain", [1.0, 3.0])
def test_a_scaled_head_starts_with_logits_of_one_size_whatever_the_features(factor: float, gain: float) -> None:
    torch.manual_seed(0)
    head = engram.heads.create("scaled", M, C, head_gain=gain)
    first, second = factor * torch.rand(2, 20, M)
    read_before = head.eval()(first)
    torch.testing.assert_close(head(first), read_before)  # evaluation changes nothing
    assert size(head.train()(first)) == pytest.approx(0.25 * gain)
    weight = head.weight.clone()
    head(10 * second)
    assert torch.equal(head.weight, weight), "the first batch alone decides"
    torch.testing.assert_close(read_before * head.factor, head(first))


def test_a_scaled_head_that_is_loaded_is_as_far_as_the_saved_one() -> None:
    hidden = torch.rand(20, M)
    for seen in (False, True):
        head, other = (engram.heads.create("scaled", M, C) for _ in range(2))
        if seen:
            head(hidden)
        other.load_state_dict(head.state_dict())
        weight = other.weight.clone()
        other(5 * hidden)
        assert torch.equal(other.weight, weight) == seen
        assert size(other(5 * hidden)) == pytest.approx(1.25 if seen else 0.25)


def test_new_classes_of_a_scaled_head_start_at_the_size_of_the_old_ones() -> None:
    torch.manual_seed(0)
    head = engram.heads.create("scaled", 400, 10)
    head.grow(20)
    hidden = 7 * torch.rand(50, 400)
    head(hidden)
    before = head.weight.clone()
    head.grow(500)
    logits = head(hidden)
    assert torch.equal(head.weight[:20], before)
    assert size(logits[:, 20:]) == pytest.approx(size(logits[:, :20]), rel=0.2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of PyTorch's compiler
def test_a_scaled_head_that_is_compiled_too_early_says_what_is_missing() -> None:
    torch._dynamo.reset()
    model = make("scaled")
    with pytest.raises(Exception, match=r"call head.scale\(features\) before"):
        torch.compile(model, backend="eager", fullgraph=True)(*batch(0))
    torch._dynamo.reset()
    logits = torch.compile(model, backend="eager")(*batch(0))  # which falls back to PyTorch where it must
    assert size(logits) == pytest.approx(0.25)


@pytest.mark.parametrize("way", ["copied in place", "averaged", "of a plain layer", "reset, saved and loaded"])
def test_a_scaled_head_multiplies_its_own_first_weights_and_no_others(way: str) -> None:
    """DistributedDataParallel copies tensors in place, and so do averages of a model over time."""
    torch.manual_seed(0)
    hidden = torch.rand(20, M)
    head, other = (engram.heads.create("scaled", M, C) for _ in range(2))
    head(hidden)
    if way == "copied in place":
        for tensor, value in zip((other.weight, other.factor), (head.weight, head.factor), strict=True):
            tensor.detach().copy_(value)
    elif way == "averaged":
        average = torch.optim.swa_utils.AveragedModel(other)
        average.update_parameters(head)
        other = average.module
    elif way == "of a plain layer":
        other.load_state_dict(nn.Linear(M, C, bias=False).state_dict(), strict=False)
    else:
        head.reset_parameters()
        other.load_state_dict(head.state_dict())
    weight, waits = other.weight.clone(), other.waits
    logits = other(5 * hidden)
    assert waits == (way == "reset, saved and loaded")
    if waits:
        assert size(logits) == pytest.approx(0.25)
    else:
        assert torch.equal(other.weight, weight)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_scaled_head_starts_at_its_size_in_half_precision(autocast: bool, dtype: torch.dtype, factor: float) -> None:
    """Autocast keeps a copy of the weight: the first logits must not be those of the weight as it was before."""
    torch.manual_seed(0)
    head, hidden = engram.heads.create("scaled", M, C), factor * torch.rand(20, M)
    head.to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        logits = head(hidden if autocast else hidden.to(dtype))
    assert size(logits.float()) == pytest.approx(0.25, rel=0.02)


def test_a_scaled_head_that_is_scaled_again_grows_at_its_size() -> None:
    torch.manual_seed(0)
    head, hidden = engram.heads.create("scaled", 400, 10), torch.rand(50, 400) - 0.5
    head.scale(hidden)
    head.scale(100 * hidden)
    head.grow(40)
    assert size(head(100 * hidden)[:, 10:]) == pytest.approx(0.25, rel=0.1)


def test_a_scaled_head_is_not_scaled_where_that_would_be_lost() -> None:
    hidden, head = torch.rand(20, M), engram.heads.create("scaled", M, C)
    values = {name: theta.detach().clone() for name, theta in head.named_parameters()}
    assert "before the weight" in refusal(torch.func.functional_call, head, values, (hidden,))
    stacked = {name: theta.expand(2, *theta.shape) for name, theta in values.items()}
    mapped = torch.func.vmap(lambda own: torch.func.functional_call(head, own, (hidden,)))
    assert "before a scaled head is compiled or mapped" in refusal(mapped, stacked)
    assert head.waits
    normed = nn.utils.parametrizations.weight_norm(copy.deepcopy(head))
    assert "before the weight" in refusal(normed, hidden)
    head.scale(hidden)
    assert size(mapped({name: theta.expand(2, *theta.shape) for name, theta in head.named_parameters()})) < 0.51
    plain = engram.heads.create("linear", M, C)
    weight = plain.weight.clone()
    assert "only with head_init='scaled'" in refusal(plain.scale, hidden)
    assert torch.equal(plain.weight, weight)


def test_a_scaled_head_refuses_features_that_say_nothing() -> None:
    for hidden in (torch.zeros(3, M), torch.full((3, M), torch.nan)):
        head = engram.heads.create("scaled", M, C)
        weight = head.weight.clone()
        assert "all zero, NaN or infinite" in refusal(head, hidden)
        assert torch.equal(head.weight, weight)
        assert head.waits


def test_new_classes_start_in_the_range_of_all() -> None:
    head = engram.heads.create("linear", 400, 10, head_init="published")
    before = head.weight.clone()
    head.grow(100)
    assert torch.equal(head.weight[:10], before)
    assert 0.095 < head.weight[10:].abs().max() <= 0.1


@pytest.mark.parametrize("name", SLOW)
def test_an_unknown_initialisation_is_refused(name: str) -> None:
    settings = {"learn_features": True} if name in REMEMBER else {}
    with pytest.raises(InputError, match="there is no head_init 'wide', only linear, published"):
        engram.heads.create(name, 4, 3, head_init="wide", **settings)
