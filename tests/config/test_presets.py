"""The presets against the paper's appendix and Table I, whose numbers are written down here a second time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from builders import refusal
from engram.common.errors import InputError
from engram.common.registry import HEADS, PENALTIES
from engram.config.methods import all_methods
from engram.config.paper import PAPER_RESULTS
from engram.config.presets import STEADY, best_settings, changes_from_preset, form_of_head, preset
from engram.config.settings import Config
from engram.data.benchmarks import MIXTURE
from engram.engine.build import build_model, build_penalty
from engram.nn.baselines import MatchedSoftmax
from engram.nn.dhp import DHPSoftmax
from engram.penalties import NoPenalty

BENCHMARKS = ("permuted-mnist", "imbalanced-permuted-mnist", "split-mnist", "vision-mixture")
SHAPES = {
    "permuted-mnist": (784,),
    "imbalanced-permuted-mnist": (784,),
    "split-mnist": (1, 28, 28),
    "vision-mixture": (3, 32, 32),
}
CLASSES = {"permuted-mnist": 10, "imbalanced-permuted-mnist": 10, "split-mnist": 10, "vision-mixture": 50}

# Appendix A, and the sections on each benchmark: tasks, epochs, batch size, initial eta, xi of SI
TRAINING = {
    "permuted-mnist": (10, 20, 64, 0.001, 0.1),
    "imbalanced-permuted-mnist": (10, 20, 64, 0.001, 0.1),
    "split-mnist": (5, 10, 64, 0.001, 0.001),
    "vision-mixture": (5, 50, 32, 0.0001, 0.1),
}

# Appendix A: lambda of Online EWC, SI, MAS
LAMBDA = {
    "permuted-mnist": (100, 0.1, 0.1),
    "imbalanced-permuted-mnist": (400, 1.0, 0.1),
    "split-mnist": (400, 1.0, 1.5),
    "vision-mixture": (100, 0.1, 1.0),
}

# Table I, row by row as printed
TABLE = """
finetune        76.73 -0.19  76.44 -0.20  90.43 -0.13  60.02 -0.33
dhp             78.49 -0.16  80.85 -0.14  98.23 -0.02  62.94 -0.26
si              84.72 -0.13  85.92 -0.06  97.77 -0.04  81.26 -0.06
dhp+si          85.20 -0.09  85.39 -0.06  99.15  0.00  81.75 -0.04
online-ewc      86.24 -0.11  87.18 -0.09  97.65 -0.03  78.61 -0.07
dhp+online-ewc  87.30 -0.09  87.43 -0.08  98.96 -0.01  79.10 -0.04
mas             88.52 -0.08  87.32 -0.09  98.24 -0.02  78.51 -0.05
dhp+mas         89.53 -0.06  88.80 -0.05  98.43 -0.01  80.66 -0.01
"""


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("method", all_methods())
def test_training_is_the_papers(benchmark: str, method: str) -> None:
    config = preset(benchmark, method)
    assert (config.num_tasks, config.epochs, config.batch_size, config.eta, config.xi) == TRAINING[benchmark]
    assert config.learning_rate == 0.01
    assert config.trials == 10
    assert config.alpha == "synapse"
    assert config.baseline_head == "matched"  # "we add an extra set of slow weights ... to match the capacity"
    assert config.regularize_alpha is False  # "the plastic components are not regularized"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_paper_s_layer_starts_as_published_and_every_other_head_as_nn_linear(benchmark: str) -> None:
    for head in HEADS.names():
        for method in (head, f"{head}+si"):
            assert preset(benchmark, method).head_init == ("published" if head == "dhp" else "linear"), method
    for method in ("finetune", "si", "joint"):
        assert preset(benchmark, method).head_init == "linear"
    assert preset(benchmark, "dhp+si", head_init="linear").head_init == "linear", "a change wins"
    assert form_of_head(preset(benchmark, "dhp+si")) == ""
    assert form_of_head(preset(benchmark, "dhp+si", head_init="linear")) == "head_init=linear"
    assert form_of_head(preset(benchmark, "dhp+si", **STEADY)) == "steady"
    assert preset(benchmark, "dhp+si", **STEADY).head_init == preset(benchmark, "steady+si").head_init


def test_on_a_stream_of_one_s_own_the_paper_s_layer_starts_as_nn_linear_as_its_class_does() -> None:
    assert preset("custom", "dhp").head_init == DHPSoftmax(4, 3).head_init == "linear"


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_strengths_are_the_papers_with_and_without_dhp(benchmark: str) -> None:
    for penalty, strength in zip(("online-ewc", "si", "mas"), LAMBDA[benchmark], strict=True):
        assert preset(benchmark, penalty).strength == strength
        assert preset(benchmark, f"dhp+{penalty}").strength == strength
    assert preset(benchmark, "ewc").strength == LAMBDA[benchmark][0]
    assert preset(benchmark, "finetune").strength is None
    assert preset(benchmark, "dhp").strength is None


@pytest.mark.parametrize(
    ("benchmark", "width"), [("permuted-mnist", 400), ("imbalanced-permuted-mnist", 400), ("split-mnist", 256)]
)
def test_mlp_is_the_papers(benchmark: str, width: int) -> None:
    model = build_model(preset(benchmark, "dhp"), 0, SHAPES[benchmark], 10)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == [(784, width), (width, width)]
    assert len([m for m in model.modules() if isinstance(m, nn.LeakyReLU)]) == 2
    assert model.head.weight.shape == (10, width)


def test_cnn_is_the_papers() -> None:
    model = build_model(preset("vision-mixture", "dhp"), 0, (3, 32, 32), 50)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size) for m in convolutions] == [(3, 20, (5, 5)), (20, 50, (5, 5))]
    assert [m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)] == [0.3, 0.3, 0.3]
    assert [(m.kernel_size, m.stride) for m in model.modules() if isinstance(m, nn.MaxPool2d)] == [(2, 2), (2, 2)]
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [500]
    assert model.head.weight.shape == (50, 500)


def test_the_mixture_is_in_the_papers_order() -> None:
    assert MIXTURE == ("mnist", "notmnist", "fashion-mnist", "svhn", "cifar-10")
    assert preset("vision-mixture", "dhp").dataset == "five-datasets"


def test_the_other_benchmarks_are_made_of_mnist() -> None:
    assert {preset(benchmark, "dhp").dataset for benchmark in BENCHMARKS[:3]} == {"mnist"}


def test_table_one_is_the_papers() -> None:
    rows = [line.split() for line in TABLE.strip().splitlines()]
    expected: dict[str, dict[str, tuple[float, float]]] = {benchmark: {} for benchmark in BENCHMARKS}
    for method, *numbers in rows:
        for k, benchmark in enumerate(BENCHMARKS):
            expected[benchmark][method] = (float(numbers[2 * k]), float(numbers[2 * k + 1]))
    assert expected == PAPER_RESULTS


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("method", all_methods())
def test_every_method_builds_and_computes_on_every_benchmark(benchmark: str, method: str) -> None:
    config = preset(benchmark, method)
    model = build_model(config, 0, SHAPES[benchmark], CLASSES[benchmark])
    penalty = build_penalty(config, 0, model)
    assert type(model.head) is (DHPSoftmax if method.startswith("dhp") else MatchedSoftmax)
    assert type(penalty) is (PENALTIES[config.penalty].make if config.penalty else NoPenalty)
    if config.penalty:
        assert penalty.strength == config.strength
    logits = model(torch.rand(4, *SHAPES[benchmark]), torch.tensor([0, 1, 1, 9]))
    assert logits.shape == (4, CLASSES[benchmark])
    assert torch.isfinite(logits).all()
    assert penalty.loss().item() == 0


@pytest.mark.parametrize(("method", "name", "value"), [("dhp+si", "xi", 0.001), ("online-ewc", "gamma", 1.0)])
def test_penalty_gets_its_settings(method: str, name: str, value: float) -> None:
    config = preset("split-mnist", method)
    penalty = build_penalty(config, 0, build_model(config, 0, (784,), 10))
    assert getattr(penalty, name) == value
    other = config.replace(**{name: 0.5})
    assert getattr(build_penalty(other, 0, build_model(other, 0, (784,), 10)), name) == 0.5


def test_all_methods_of_a_trial_start_with_the_same_slow_weights_and_those_of_dhp_as_wide_as_published() -> None:
    configs = {method: preset("split-mnist", method) for method in all_methods()}
    models = {method: build_model(config, 3, (784,), 10) for method, config in configs.items()}
    start = models["finetune"].state_dict()
    for method, model in models.items():
        for name, weights in model.state_dict().items():
            if name.startswith("features."):
                assert torch.equal(weights, start[name])
            if name == "head.weight":
                wider = math.sqrt(256 / 10) if configs[method].head == "dhp" else 1
                assert torch.equal(weights, start[name] * wider)
    other_trial = build_model(preset("split-mnist", "finetune"), 4, (784,), 10).state_dict()
    assert not torch.equal(other_trial["head.weight"], start["head.weight"])


def test_the_best_settings_are_those_of_the_method_s_own_head() -> None:
    best = preset("split-mnist", "linear+si", best=True)
    assert best.learning_rate != preset("split-mnist", "linear+si").learning_rate
    assert (best.epochs, best.hidden, best.trials) == (10, (256, 256), 10), "all else is the paper's"
    for method, same in (("si", "matched+si"), ("finetune", "matched"), ("dhp+mas", "dhp+mas")):
        assert best_settings("split-mnist", method) == best_settings("split-mnist", same)
    assert preset("split-mnist", "linear+si", best=True, strength=3).strength == 3, "a change wins"
    for benchmark, method, words in (
        ("split-mnist", "joint", "of joint on split-mnist are known: only of the heads linear,"),
        ("custom", "si", "of si on custom are known, only on permuted-mnist,"),
    ):
        with pytest.raises(InputError, match=words):
            preset(benchmark, method, best=True)


def test_changes_are_taken_and_checked() -> None:
    assert preset("split-mnist", "dhp+si", trials=3, hidden=[7]) == Config(
        "split-mnist",
        "dhp+si",
        trials=3,
        num_tasks=5,
        hidden=(7,),
        head_init="published",
        strength=1.0,
        xi=0.001,
        epochs=10,
    )
    with pytest.raises(InputError, match="no setting 'trial'"):
        preset("split-mnist", "dhp", trial=3)


@pytest.mark.parametrize(
    ("benchmark", "method", "changes", "words"),
    [
        ("split-mnist", "finetune", {"strength": 3.0}, "strength has no effect on finetune"),
        ("split-mnist", "si", {"memory_size": 200}, "memory_size has no effect on si"),
        ("split-mnist", "mas", {"trials": 3, "eta": 0.1}, "eta has no effect on mas"),
        ("split-mnist", "dhp+si", {"baseline_head": "linear"}, "baseline_head has no effect on dhp+si"),
        ("split-mnist", "si", {"beta1": 0.8}, "beta1 has no effect on sgd as it is set here"),
        ("split-mnist", "slda", {"momentum": 0.9}, "momentum has no effect on slda, where nothing is trained"),
        ("custom", "slda", {"random_features": 0, "random_window": 9},
         "random_window has no effect on slda without random_features"),
        ("permuted-mnist", "si", {"class_order": "random"}, "class_order has no effect on permuted-mnist"),
        ("custom", "dhp", {"strength": 1.0}, "strength has no effect on dhp"),
    ],
)  # fmt: skip
def test_a_change_without_an_effect_is_refused_in_the_words_of_the_command(
    benchmark: str, method: str, changes: dict[str, object], words: str
) -> None:
    assert refusal(preset, benchmark, method, **changes) == f"{words}: leave it out"
    assert preset(benchmark, method).replace(**changes).method == method, "`replace` takes it"


def test_a_change_that_gives_another_an_effect_is_seen_and_none_is_no_change() -> None:
    assert preset("split-mnist", "si", optimizer="adam", beta1=0.8).beta1 == 0.8
    assert preset("split-mnist", "slda", learn_features=True, network="mlp", learning_rate=0.1).learn_features
    assert preset("split-mnist", "finetune", strength=None, rehearsal_batch=None).strength is None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="no benchmark 'mnist'"):
        preset("mnist", "dhp")
    with pytest.raises(InputError, match=r"no method 'DHP'.*did you mean dhp"):
        preset("split-mnist", "DHP")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_preset_has_no_changes_from_itself(benchmark: str) -> None:
    for method in all_methods():
        assert changes_from_preset(preset(benchmark, method)) == {}


def test_changes_from_preset_name_both_values_but_not_trials_and_seed() -> None:
    config = preset("split-mnist", "si", epochs=1, hidden=[8], strength=2.0, trials=2, seed=5)
    assert changes_from_preset(config) == {"epochs": (1, 10), "hidden": ([8], [256, 256]), "strength": (2.0, 1.0)}
