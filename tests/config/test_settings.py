"""Settings survive their files exactly, and whatever cannot be meant is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from builders import refusal
from engram.common.errors import InputError
from engram.common.registry import PENALTIES
from engram.config.methods import all_methods
from engram.config.paper import PAPER_METHODS
from engram.config.presets import load_config, parse_setting
from engram.config.settings import Config, from_dict

MINIMAL = {"benchmark": "split-mnist", "method": "si", "strength": 1.0}

positive = st.floats(0, 3.4e38, exclude_min=True)
unit = st.floats(0, 1)
counts = st.integers(1, 10**6)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    benchmark = draw(st.sampled_from(["permuted-mnist", "imbalanced-permuted-mnist", "split-mnist", "vision-mixture"]))
    mixture = benchmark == "vision-mixture"
    datasets = ["five-datasets"] if mixture else ["mnist", "mnist-small", "fashion-mnist", "notmnist"]
    method = draw(st.sampled_from(all_methods()))
    eta_range = draw(st.sampled_from(["unit", "unbounded"]))
    return Config(
        benchmark=benchmark,
        method=method,
        trials=draw(counts),
        seed=draw(st.integers(0, 2**70)),
        dataset=draw(st.sampled_from(datasets)),
        num_tasks=draw(st.integers(1, 10**4)),
        imbalance_seed=draw(st.integers(0, 2**70)),
        network=draw(st.sampled_from(["mlp", "cnn"])),
        hidden=tuple(draw(st.lists(counts, min_size=1, max_size=4))),
        leaky_slope=draw(unit),
        eta=draw(unit if eta_range == "unit" else st.floats(allow_nan=False, allow_infinity=False, width=32)),
        eta_range=eta_range,
        alpha=draw(st.sampled_from(["synapse", "uniform"])),
        alpha_init=draw(st.floats(0, 3.4e38)),
        learn_eta=draw(st.booleans()),
        trace_gradient=draw(st.booleans()),
        trace_scale=draw(st.none() | positive),
        trace_centred=draw(st.booleans()),
        max_samples=draw(st.none() | counts),
        mask_training=draw(st.booleans()),
        examine=draw(st.sampled_from(["test", "validation"])),
        input_mean=draw(st.floats(allow_nan=False, allow_infinity=False, width=32)),
        input_std=draw(positive),
        initialisation=draw(st.sampled_from(["pytorch", "he"])),
        protect=draw(st.sampled_from(["slow", "in-force"])),
        baseline_head=draw(st.sampled_from(["matched", "linear"])),
        strength=None if method in ("finetune", "dhp") else draw(positive),
        penalty_step=draw(st.sampled_from(["proximal", "gradient"])),
        regularize_alpha=draw(st.booleans()),
        gamma=draw(unit),
        fisher_labels=draw(st.sampled_from(["true", "predicted", "sampled", "exact"])),
        xi=draw(positive),
        epochs=draw(counts),
        batch_size=draw(counts),
        learning_rate=draw(st.floats(0, 1e38, exclude_min=True)),
    )


def refused(**changes: Any) -> str:
    """The sentence that refuses settings."""
    return refusal(from_dict, {**MINIMAL, **changes})


@hypothesis_settings(max_examples=100, deadline=None)
@given(config=configs())
def test_toml_and_json_read_back_exactly(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("config")
    (folder / "a.toml").write_text(config.to_toml(), encoding="utf-8")
    (folder / "a.json").write_text(config.to_json(), encoding="utf-8")
    assert load_config(folder / "a.toml") == config
    assert load_config(folder / "a.json") == config
    assert from_dict(config.to_dict()) == config


@hypothesis_settings(max_examples=50, deadline=None)
@given(config=configs())
def test_types_read_back_too(config: Config) -> None:
    read = from_dict(tomllib.loads(config.to_toml()))
    for field in dataclasses.fields(Config):
        assert type(getattr(read, field.name)) is type(getattr(config, field.name)), field.name


def test_toml_has_a_line_for_each_setting_that_is_not_none() -> None:
    lines = Config("split-mnist", "dhp", hidden=(7,), eta=1e-7).to_toml().splitlines()
    assert lines[:2] == ['benchmark = "split-mnist"', 'method = "dhp"']
    assert "hidden = [7]" in lines
    assert "eta = 1e-07" in lines
    assert "regularize_alpha = false" in lines
    assert not any(line.startswith("strength") for line in lines)
    config = Config("split-mnist", "dhp")
    assert len(lines) == sum(getattr(config, field.name) is not None for field in dataclasses.fields(Config))


def test_json_has_null_for_none() -> None:
    assert json.loads(Config("split-mnist", "dhp").to_json())["strength"] is None


def test_methods_are_the_papers_eight_then_every_penalty_without_dhp_and_with_it() -> None:
    paper = ("finetune", "dhp", "si", "dhp+si", "online-ewc", "dhp+online-ewc", "mas", "dhp+mas")
    assert all_methods()[:8] == paper == tuple(PAPER_METHODS)
    others = [name for name in PENALTIES.names() if name not in paper]
    assert all_methods()[8:] == tuple(method for name in others for method in (name, f"dhp+{name}"))
    assert "ewc" in others


@pytest.mark.parametrize(
    ("method", "plastic", "penalty"),
    [
        ("finetune", False, None),
        ("dhp", True, None),
        ("si", False, "si"),
        ("dhp+si", True, "si"),
        ("online-ewc", False, "online-ewc"),
        ("dhp+online-ewc", True, "online-ewc"),
        ("ewc", False, "ewc"),
        ("dhp+mas", True, "mas"),
    ],
)
def test_method_names_its_head_and_penalty(method: str, plastic: bool, penalty: str | None) -> None:
    config = Config("split-mnist", method, strength=1.0)
    assert (config.plastic, config.penalty) == (plastic, penalty)


def test_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("split-mnist", "dhp").epochs = 3  # type: ignore[misc]


def test_replace_changes_only_what_it_names() -> None:
    config = from_dict(MINIMAL)
    changed = config.replace(epochs=3, hidden=[5, 6])
    assert (changed.epochs, changed.hidden) == (3, (5, 6))
    assert changed.replace(epochs=config.epochs, hidden=config.hidden) == config


def test_replace_refuses_unknown_settings() -> None:
    with pytest.raises(InputError, match="epoch"):
        from_dict(MINIMAL).replace(epoch=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"benchmark": "splitmnist"}, ("no benchmark 'splitmnist'", "did you mean split-mnist?")),
        ({"benchmark": "x"}, ("no benchmark 'x'", "vision-mixture")),
        ({"method": "dhp+sl"}, ("no method 'dhp+sl'", "did you mean dhp+si?")),
        ({"method": "si+dhp"}, ("no method 'si+dhp'",)),
        ({"dataset": "cifar"}, ("no dataset 'cifar'", "mnist-small")),
        ({"epoch": 3}, ("no setting 'epoch'", "did you mean epochs?")),
        ({"network": "rnn"}, ("network must be mlp, cnn, none or custom, not 'rnn'",)),
        ({"eta_range": "any"}, ("eta_range must be",)),
        ({"alpha": "none"}, ("alpha must be",)),
        ({"baseline_head": "both"}, ("baseline_head must be",)),
        ({"penalty_step": "euler"}, ("penalty_step must be proximal or gradient, not 'euler'",)),
        ({"fisher_labels": "false"}, ("fisher_labels must be true, predicted, sampled or exact, not 'false'",)),
        ({"examine": "valid"}, ("examine must be test or validation, not 'valid'", "did you mean validation?")),
        ({"initialisation": "xavier"}, ("initialisation must be pytorch or he, not 'xavier'",)),
        ({"protect": "fast"}, ("protect must be slow or in-force, not 'fast'",)),
    ],
)
def test_unknown_name_or_choice_is_refused_with_a_hint(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    sentence = refused(**changes)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trials", 1.0),
        ("trials", "3"),
        ("trials", True),
        ("trials", None),
        ("seed", 0.5),
        ("hidden", 400),
        ("hidden", [400.0]),
        ("hidden", "400"),
        ("hidden", [[400]]),
        ("hidden", [True]),
        ("eta", "0.1"),
        ("eta", None),
        ("eta", False),
        ("eta", [0.1]),
        ("strength", "strong"),
        ("regularize_alpha", 1),
        ("regularize_alpha", "true"),
        ("alpha", 0.01),
        ("benchmark", 3),
        ("method", ["si"]),
        ("learning_rate", {}),
        ("max_samples", 1.5),
        ("max_samples", "all"),
        ("mask_training", 0),
        ("learn_eta", "yes"),
        ("trace_gradient", 1),
        ("trace_centred", None),
        ("trace_scale", "2"),
        ("trace_scale", True),
        ("input_std", None),
        ("examine", None),
    ],
)
def test_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    sentence = refused(**{name: value})
    assert name in sentence
    assert repr(value) in sentence


@pytest.mark.parametrize("name", ["trials", "num_tasks", "epochs", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_at_least_one(name: str, value: int) -> None:
    assert refused(**{name: value}) == f"{name} must be at least 1, not {value}"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", (-1,)),
        ("imbalance_seed", (-1,)),
        ("hidden", ([], [0], [400, -1])),
        ("leaky_slope", (-0.01, 1.01, math.nan, math.inf)),
        ("eta", (-1e-9, 1.0000001, math.nan, math.inf, -math.inf)),
        ("learning_rate", (0.0, -0.01, math.nan, math.inf)),
        ("gamma", (-0.1, 1.1, math.nan)),
        ("xi", (0.0, -0.1, math.nan, math.inf)),
        ("strength", (0.0, -1.0, math.nan, math.inf)),
        ("max_samples", (0, -1)),
        ("input_mean", (math.nan, math.inf, -math.inf)),
        ("input_std", (0.0, -1.0, math.nan, math.inf)),
        ("alpha_init", (-0.1, math.nan, math.inf)),
        ("trace_scale", (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_number_out_of_range_is_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert refused(**{name: value}).startswith(f"{name} must be "), value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("trials", (1,)),
        ("seed", (0,)),
        ("hidden", ([1],)),
        ("leaky_slope", (0, 1)),
        ("eta", (0, 1, 0.5)),
        ("gamma", (0, 1)),
        ("xi", (1e-12,)),
        ("strength", (1e-12, 1e6, 3)),
        ("max_samples", (1, None)),
        ("input_mean", (0, -3.5)),
        ("input_std", (1e-12,)),
        ("alpha_init", (0, 5)),
        ("trace_scale", (1e-12, 3, None)),
    ],
)
def test_bounds_of_a_range_are_allowed(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(from_dict({**MINIMAL, name: value}), name) == expected


@pytest.mark.parametrize("eta", [-3.0, 0.0, 1.5, 100.0])
def test_unbounded_eta_may_be_any_finite_number(eta: float) -> None:
    assert from_dict({**MINIMAL, "eta": eta, "eta_range": "unbounded"}).eta == eta


@pytest.mark.parametrize("eta", [math.nan, math.inf, -math.inf])
def test_unbounded_eta_must_be_finite(eta: float) -> None:
    assert refused(eta=eta, eta_range="unbounded").startswith("eta must be ")


def test_integer_is_accepted_as_a_float() -> None:
    config = from_dict({**MINIMAL, "strength": 3})
    assert type(config.strength) is float


def test_integer_too_large_for_a_float_is_refused() -> None:
    assert "learning_rate" in refused(learning_rate=10**400)


@pytest.mark.parametrize(
    ("benchmark", "dataset"),
    [("vision-mixture", "mnist"), ("vision-mixture", "mnist-small"), ("split-mnist", "five-datasets")],
)
def test_dataset_of_another_benchmark_is_refused(benchmark: str, dataset: str) -> None:
    sentence = refused(benchmark=benchmark, dataset=dataset)
    assert benchmark in sentence
    assert repr(dataset) in sentence


@pytest.mark.parametrize("missing", ["benchmark", "method"])
def test_benchmark_and_method_are_required(missing: str) -> None:
    with pytest.raises(InputError, match=f"do not name a {missing}"):
        from_dict({name: value for name, value in MINIMAL.items() if name != missing})


def test_method_without_penalty_needs_no_strength() -> None:
    assert from_dict({"benchmark": "split-mnist", "method": "dhp"}).strength is None


@pytest.mark.parametrize("strength", [0.0, -1.0, math.nan, math.inf])
def test_bad_strength_is_refused_even_if_it_is_not_used(strength: float) -> None:
    assert "strength" in refused(method="finetune", strength=strength)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("damaged.toml", b'benchmark = "split-mnist\nmethod'),
        ("twice.toml", b"epochs = 1\nepochs = 2\n"),
        ("damaged.json", b'{"benchmark": "split-mnist", '),
        ("empty.json", b""),
        ("list.json", b"[1, 2]"),
        ("number.json", b"3"),
        ("latin.toml", b'benchmark = "\xff"'),
        ("binary.json", b"\x00\xff\xfe"),
        ("empty.toml", b""),
        ("nested.toml", b'benchmark = "split-mnist"\nmethod = "dhp"\n[epochs]\nfirst = 3\n'),
        ("long.json", b'{"benchmark": "split-mnist", "method": "dhp", "seed": ' + b"9" * 5000 + b"}"),
        ("deep.json", b"[" * 100_000),
        ("deep.toml", b"hidden = " + b"[" * 100_000),
        ("settings.yaml", b"benchmark: split-mnist"),
        ("settings", b""),
    ],
)
def test_damaged_file_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        load_config(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.toml", "missing.json", "no/such/folder/x.toml"])
def test_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=name) as error:
        load_config(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs=3", {"epochs": 3}),
        ("eta=1e-3", {"eta": 0.001}),
        ("hidden=[256, 256]", {"hidden": [256, 256]}),
        ("alpha=uniform", {"alpha": "uniform"}),
        (" alpha = uniform ", {"alpha": "uniform"}),
        ("regularize_alpha=true", {"regularize_alpha": True}),
        ("strength=null", {"strength": None}),
        ("alpha=a=b", {"alpha": "a=b"}),
        ("alpha=", {"alpha": ""}),
    ],
)
def test_settings_are_parsed_as_they_are_typed(text: str, expected: dict[str, Any]) -> None:
    assert parse_setting(text) == expected


def test_method_with_a_penalty_needs_a_strength() -> None:
    with pytest.raises(InputError, match=r"the method dhp\+si needs a strength"):
        from_dict({"benchmark": "split-mnist", "method": "dhp+si"})


def test_true_stays_a_word_where_the_setting_is_a_word() -> None:
    """`fisher_labels=true` reads as JSON's true, but a person means the choice named "true"."""
    config = from_dict({**MINIMAL, **parse_setting("fisher_labels=true")})
    assert config.fisher_labels == "true"


@pytest.mark.parametrize("text", ["epochs", "", "epochs:3"])
def test_setting_without_an_equals_sign_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="name=value"):
        parse_setting(text)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["long", "deep"])
def test_huge_setting_is_refused(value: str) -> None:
    with pytest.raises(InputError):
        from_dict({**MINIMAL, **parse_setting(f"epochs={value}")})
