"""What is declared of each setting, and everything that is computed from it."""

from __future__ import annotations

import dataclasses

import pytest

from builders import refusal
from engram import preset
from engram.common.registry import HEADS
from engram.config.effect import has_effect
from engram.config.methods import all_datasets, all_methods, baseline_heads, datasets_of, known_methods, parts_of
from engram.config.presets import title_of
from engram.config.settings import SETTINGS, Config, names_of

AGREE = {
    "run": "benchmark trials first_trial seed dataset num_tasks max_samples imbalance_seed class_order scenario "
    "mask_training examine",
    "stack": "consolidate_every epochs batch_size",
    "section": "network hidden leaky_slope input_mean input_std eta_range alpha trace_gradient trace_scale "
    "trace_centred trace_write baseline_head head_bias num_keys normalised random_features random_window "
    "top_k shrinkage learn_features memory_size rehearsal_batch rehearsal_weight distillation_temperature der_alpha "
    "der_beta generator_hidden generator_latent generator_labels joint_start joint_steps optimizer momentum",
    "free": "method initialisation eta alpha_init learn_eta head_init head_gain baseline_trace head_dropout rare_until "
    "strength penalty_step regularize_alpha protect gamma fisher_labels xi temperature learning_rate weight_decay "
    "beta1 beta2 adam_eps reset_optimizer",
}
STAGES = {
    "method": "method",
    "trial": "trials first_trial seed",
    "stream": "benchmark dataset num_tasks max_samples imbalance_seed class_order scenario examine",
    "features": "network hidden leaky_slope input_mean input_std initialisation",
    "head": "eta eta_range alpha alpha_init learn_eta trace_gradient trace_scale trace_centred trace_write head_init "
    "head_gain baseline_head baseline_trace head_bias head_dropout rare_until num_keys normalised random_features "
    "random_window "
    "top_k shrinkage learn_features",
    "penalty": "strength penalty_step regularize_alpha protect gamma fisher_labels xi consolidate_every temperature",
    "rehearsal": "memory_size rehearsal_batch rehearsal_weight distillation_temperature der_alpha "
    "der_beta generator_hidden generator_latent generator_labels joint_start joint_steps",
    "training": "mask_training epochs batch_size learning_rate optimizer momentum weight_decay beta1 beta2 adam_eps "
    "reset_optimizer",
}
TYPES = {
    "benchmark": (str, False),
    "trials": (int, False),
    "max_samples": (int, True),
    "mask_training": (bool, False),
    "hidden": (tuple, False),
    "eta": (float, False),
    "trace_scale": (float, True),
}


def test_every_setting_is_declared_once() -> None:
    assert list(SETTINGS) == [field.name for field in dataclasses.fields(Config)]
    assert sorted(" ".join(AGREE.values()).split()) == sorted(SETTINGS)
    assert sorted(" ".join(STAGES.values()).split()) == sorted(SETTINGS)


@pytest.mark.parametrize("agree", AGREE)
def test_how_far_models_agree(agree: str) -> None:
    assert names_of(agree=agree) == tuple(AGREE[agree].split())  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
def test_stage_of_each_setting(stage: str) -> None:
    assert names_of(stage=stage) == tuple(STAGES[stage].split())  # type: ignore[arg-type]


def test_types_are_those_of_the_fields() -> None:
    assert {name: (SETTINGS[name].type, SETTINGS[name].optional) for name in TYPES} == TYPES


def test_defaults_obey_their_rules() -> None:
    for setting in SETTINGS.values():
        if setting.default is None:
            assert setting.optional
        elif setting.default is not dataclasses.MISSING:
            assert type(setting.default) is setting.type
            assert all(rule.holds(setting.default) for rule in setting.rules), setting.name
            assert setting.choices is None or setting.default in setting.choices()


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("eta", {"dhp", "dhp+si", "dhp+ewc"}),
        ("trace_scale", {"dhp", "dhp+si", "dhp+ewc"}),
        ("baseline_head", {"finetune", "si", "ewc", "replay"}),
        ("baseline_trace", {"finetune", "si", "ewc", "replay"}),
        ("strength", {"si", "ewc", "dhp+si", "dhp+ewc"}),
        ("protect", {"si", "ewc", "dhp+si", "dhp+ewc"}),
        ("regularize_alpha", {"dhp+si", "dhp+ewc"}),
        ("xi", {"si", "dhp+si"}),
        ("temperature", {"si", "ewc", "dhp+si", "dhp+ewc"}),
        ("fisher_labels", {"ewc", "dhp+ewc"}),
        ("gamma", set()),
        ("memory_size", {"replay"}),
        ("joint_start", set()),
        ("learning_rate", {"finetune", "dhp", "si", "ewc", "dhp+si", "dhp+ewc", "replay"}),
    ],
)
def test_settings_have_an_effect_on_methods_that_use_them(name: str, methods: set[str]) -> None:
    tried = ("finetune", "dhp", "si", "ewc", "dhp+si", "dhp+ewc", "replay")
    assert {method for method in tried if has_effect(name, preset("split-mnist", method))} == methods


def test_linear_head_has_no_trace() -> None:
    assert not has_effect("baseline_trace", preset("split-mnist", "si", baseline_head="linear"))


def test_steps_of_gradients_have_no_effect_where_nothing_is_trained() -> None:
    names = ("optimizer", "learning_rate", "weight_decay", "momentum")
    for head in ("ncm", "slda", "ridge"):
        alone = preset("split-mnist", head)
        assert not any(has_effect(name, alone) for name in names)
        assert all(has_effect(name, alone) for name in ("epochs", "batch_size", "seed")), "a pass writes every sample"
        learning = [preset("split-mnist", f"{head}+si"), preset("split-mnist", f"{head}+generative-replay"),
                    preset("split-mnist", head, network="mlp", learn_features=True)]  # fmt: skip
        assert all(has_effect(name, config) for name in names for config in learning)


def test_a_window_needs_random_features() -> None:
    assert has_effect("random_window", preset("split-mnist", "slda"))
    assert not has_effect("random_window", preset("split-mnist", "slda", random_features=0))
    assert not has_effect("random_window", preset("split-mnist", "slda+si"))
    assert not has_effect("random_window", preset("split-mnist", "si").replace(random_features=9))


def test_only_one_benchmark_is_imbalanced() -> None:
    assert has_effect("imbalance_seed", preset("imbalanced-permuted-mnist", "si"))
    assert not has_effect("imbalance_seed", preset("permuted-mnist", "si"))
    assert has_effect("num_tasks", preset("custom", "dhp"))


def test_methods_are_made_of_a_head_and_a_penalty_or_a_rehearsal() -> None:
    assert parts_of("finetune") == (None, None, None)
    assert parts_of("dhp") == ("dhp", None, None)
    assert parts_of("online-ewc") == (None, "online-ewc", None)
    assert parts_of("dhp+online-ewc") == ("dhp", "online-ewc", None)
    assert parts_of("der++") == (None, None, "der++")
    assert parts_of("matched+der++") == ("matched", None, "der++")
    assert not {"matched", "linear", "matched+si", "slda"} & set(all_methods())
    assert set(baseline_heads()) == {"matched", "linear"}
    assert {*HEADS.names(), "matched+si", "slda+mas"} < set(known_methods())


def test_head_is_the_methods_or_the_baselines() -> None:
    assert preset("split-mnist", "dhp+si").head == "dhp"
    assert preset("split-mnist", "si").head == "matched"
    assert preset("split-mnist", "si", baseline_head="linear").head == "linear"


def test_benchmarks_have_titles_and_datasets() -> None:
    assert title_of("split-mnist") == "Split MNIST"
    assert title_of("custom") == "Custom stream"
    assert datasets_of("vision-mixture") == ("five-datasets",)
    assert datasets_of("custom") == ("custom",)
    assert all_datasets() == ("mnist", "mnist-small", "fashion-mnist", "notmnist", "five-datasets", "custom")


def test_custom_stream_has_no_other_dataset() -> None:
    assert preset("custom", "dhp").dataset == "custom"
    assert refusal(preset, "custom", "dhp", dataset="mnist") == "the dataset of custom cannot be 'mnist'"
    assert refusal(preset, "split-mnist", "dhp", dataset="custom") == "the dataset of split-mnist cannot be 'custom'"
    assert "there is no benchmark 'own', only" in refusal(preset, "own", "dhp")
