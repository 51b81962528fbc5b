"""What a reproduction runs."""

from __future__ import annotations

from typing import Any

import pytest

from engram import InputError, preset
from engram.config.effect import has_effect
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS, PARTS
from engram.config.presets import STEADY, changes_from_preset
from engram.engine.stacks import SAME_TASKS, group_by
from engram.reproduction import plan as planning
from engram.reproduction.divergence import AS_PUBLISHED, CURES, LEAKS, PLAIN, SHORT
from engram.reproduction.ladder import ENDINGS
from engram.reproduction.plan import ETAS, NOT_RUN, Part, plan
from engram.reproduction.study import BASE, CHANGES, PERMUTED, PERMUTED_CHANGES, STUDY_TRIALS

PLASTIC = ("dhp", "dhp+si", "dhp+online-ewc", "dhp+mas")
FREE = ("finetune", "dhp")  # of any penalty


def parts_of(name: str, **options: Any) -> dict[str, Part]:
    return {part.benchmark: part for part in plan(parts=[name], **options)}


# --- the plan


@pytest.mark.parametrize("benchmark", ["permuted-mnist", "imbalanced-permuted-mnist", "split-mnist"])
def test_the_map_varies_learning_rate_and_epochs_alone(benchmark: str) -> None:
    configs = parts_of("map")[benchmark].configs
    assert len(configs) == 3 * 4 * 2 * 5
    for label, config in configs.items():
        where, _, method = label.partition(": ")
        assert where == f"{config.epochs} epoch{'s' * (config.epochs > 1)}, rate {config.learning_rate:g}"
        assert (config.method, config.head_init, config.examine) == (method, "published", "test")
        assert config.seed not in (0, 1, 1000), "seeds of other parts"
    methods = {config.replace(epochs=1, learning_rate=0.1) for config in configs.values()}
    assert len(methods) == 10, "one for each head alone and with SI"


def test_relu_is_the_only_change_from_rung_1() -> None:
    (part,) = plan(parts=["relu"])
    (rung_1,) = plan(["split-mnist"], ["rung-1"])
    assert list(part.configs) == [head + ending for head in ("linear", "dhp") for ending in ENDINGS]
    for label, config in part.configs.items():
        assert config.leaky_slope == 0
        assert config.replace(leaky_slope=0.01) == rung_1.configs[label]


def test_what_may_prevent_divergence_is_tried_one_thing_at_a_time() -> None:
    (part,) = plan(parts=["divergence"])
    assert part.benchmark == "vision-mixture"
    assert set(part.configs) == {*CURES, PLAIN}
    usual = part.configs["as in the paper"]
    assert {name: getattr(usual, name) for name in SHORT} == SHORT
    assert {*changes_from_preset(usual), "trials"} == {*SHORT, "head_init"}, "otherwise as in the paper"
    for label, config in part.configs.items():
        if label == PLAIN:
            assert config == preset("vision-mixture", "linear+online-ewc").replace(**SHORT)
            continue
        assert config == usual.replace(**CURES[label])
        assert all(has_effect(name, config) for name in CURES[label]), label
        assert set(CURES[label]) <= {"learn_eta", "eta"} or len(set(CURES[label]) - {"learn_eta", "eta"}) == 1, label
        assert ("eta" in CURES[label]) <= ("learn_eta" in CURES[label]), "η is given only where it is fixed"
        assert len(group_by(SAME_TASKS, {"it": config, "usual": usual})) == 1, "the same tasks in the same trials"


def test_whether_labels_leak_is_tried_on_rung_1_s_heads_without_a_penalty() -> None:
    (part,) = plan(parts=["leak"])
    assert part.benchmark == "vision-mixture"
    assert list(part.configs) == [AS_PUBLISHED, *LEAKS, PLAIN]
    (rung_1,) = plan(["vision-mixture"], ["rung-1"])
    for label, config in part.configs.items():
        head, changes = ("linear", {}) if label == PLAIN else ("dhp", LEAKS.get(label, {}))
        assert config == rung_1.configs[head].replace(**SHORT | {"num_tasks": 5}, **changes), label


def test_the_plan_has_every_part_on_every_benchmark_that_has_it_the_table_first() -> None:
    everything = plan()
    assert [part.name for part in everything] == sorted((p.name for p in everything), key=list(PARTS).index)
    expected = {(b, p) for b in PAPER_BENCHMARKS for p in PARTS} - NOT_RUN
    assert {(part.benchmark, part.name) for part in everything} == expected
    assert len(everything) == len(expected)
    for part in everything:
        assert part.example.benchmark == part.benchmark
        if not part.needs:
            assert {config.dataset for config in part.configs.values()} == {part.example.dataset}, "what is loaded"
            assert {config.benchmark for config in part.configs.values()} == {part.benchmark}


def test_rounds_that_a_benchmark_does_not_have_are_in_no_plan_and_needed_by_nothing() -> None:
    rounds = {b: [p.name for p in plan([b]) if p.name.startswith(("grid", "search"))] for b in PAPER_BENCHMARKS}
    grids, searches = [f"grid-{k}" for k in (1, 2, 3)], [f"search-{k}" for k in (1, 2, 3, 4)]
    assert rounds.pop("vision-mixture") == [*grids, *searches[:2]]
    assert all(found == [*grids[:2], *searches] for found in rounds.values())
    for name, of_mixture, of_others in (("rung-2", 3, 2), ("rung-3", 3, 2), ("grid-3", 2, None)):
        for benchmark, part in parts_of(name).items():
            number = of_mixture if benchmark == "vision-mixture" else of_others
            assert part.needs == tuple((benchmark, grid) for grid in grids[:number])
    assert {*grids, *searches} <= set(planning.MANY), "short where all is short"


def test_the_table_is_the_paper_s_eight_methods_ten_trials_and_four_benchmarks() -> None:
    tables = parts_of("table")
    assert tuple(tables) == PAPER_BENCHMARKS
    for benchmark, part in tables.items():
        assert tuple(part.configs) == PAPER_METHODS
        assert part.num_models == 80
        for method, config in part.configs.items():
            assert config == preset(benchmark, method, head_init="linear")
            assert (config.trials, config.examine, config.seed) == (10, "test", 0)


def test_the_variant_is_the_steady_trace_in_the_trials_of_the_table() -> None:
    variants = parts_of("variant")
    assert tuple(variants) == PAPER_BENCHMARKS
    for benchmark, part in variants.items():
        assert tuple(part.configs) == PLASTIC
        for method, config in part.configs.items():
            assert config == preset(benchmark, method).replace(**STEADY)
            same = {"steady": config, "table": preset(benchmark, method)}
            assert len(group_by(SAME_TASKS, same)) == 1, "the same tasks in the same trials"


def test_the_sensitivity_is_of_five_etas_five_trials_each_on_three_benchmarks() -> None:
    parts = parts_of("sensitivity")
    assert tuple(parts) == ("permuted-mnist", "imbalanced-permuted-mnist", "split-mnist")
    for benchmark, part in parts.items():
        assert part.num_models == 25
        assert sorted(config.eta for config in part.configs.values()) == sorted(ETAS)
        for label, config in part.configs.items():
            assert label == f"η {config.eta:g}"
            assert config == preset(benchmark, "dhp", eta=config.eta, trials=5, head_init="linear")


QUESTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "inputs standardised": ({"input_mean": 0.1307, "input_std": 0.3081}, PAPER_METHODS),
    "He's initialisation": ({"initialisation": "he"}, PAPER_METHODS),
    "LeakyReLU slope 0.3": ({"leaky_slope": 0.3}, PAPER_METHODS),
    "η unbounded": ({"eta_range": "unbounded"}, PLASTIC),
    "no gradient through the trace": ({"trace_gradient": False}, PLASTIC),
    "α regularised too": ({"regularize_alpha": True}, PLASTIC[1:]),
    "penalty by its gradient": ({"penalty_step": "gradient"}, tuple(m for m in PAPER_METHODS if m not in FREE)),
    "Fisher of sampled labels": ({"fisher_labels": "sampled"}, ("online-ewc", "dhp+online-ewc")),
    "exact Fisher": ({"fisher_labels": "exact"}, ("online-ewc", "dhp+online-ewc")),
    "γ = 0.9": ({"gamma": 0.9}, ("online-ewc", "dhp+online-ewc")),
    "plain baseline": ({"baseline_head": "linear"}, tuple(m for m in PAPER_METHODS if m not in PLASTIC)),
    "uniform plasticity": ({"alpha": "uniform"}, PLASTIC),
    "steady trace": (STEADY, PLASTIC),
}  # fmt: skip


@pytest.mark.parametrize("benchmark", ["permuted-mnist", "split-mnist"])
def test_the_study_varies_one_thing_at_a_time(benchmark: str) -> None:
    configs = parts_of("study")[benchmark].configs
    base = {method: configs[f"{BASE}: {method}"] for method in PAPER_METHODS}
    for method, config in base.items():
        usual = preset(benchmark, method, trials=STUDY_TRIALS, seed=1, head_init="linear")
        assert config == (usual if benchmark == "split-mnist" else usual.replace(**PERMUTED))
        assert config.seed != preset(benchmark, method).seed, "other trials than the table's"
    masks = {"masks in evaluation only": ({"mask_training": False}, PAPER_METHODS)}
    questions = QUESTIONS | masks
    if benchmark != "split-mnist":
        questions = {name: QUESTIONS[name] for name in QUESTIONS if name in PERMUTED_CHANGES}
    assert len(questions) > 8
    for name, (settings, methods) in questions.items():
        asked = {label.rpartition(": ")[2]: c for label, c in configs.items() if label.rpartition(": ")[0] == name}
        assert tuple(asked) == methods, name
        for method, config in asked.items():
            assert config == base[method].replace(**settings), name


def test_the_study_varies_the_epochs() -> None:
    configs = parts_of("study")["split-mnist"].configs
    assert configs["a quarter of the epochs: si"].epochs == 2
    assert configs["twice the epochs: si"].epochs == 20


def test_every_change_of_the_study_changes_something_and_no_two_are_the_same() -> None:
    configs = parts_of("study")["split-mnist"].configs
    assert {name for name, change in CHANGES.items() if not change.settings} == {BASE}
    assert len({repr(config) for config in configs.values()}) == len(configs)


def test_a_quick_plan_asks_the_same_of_less() -> None:
    whole, quick = ([part for part in each if not part.needs] for each in (plan(), plan(quick=True)))
    assert [(p.name, p.benchmark, list(p.configs)) for p in quick] == [
        (p.name, p.benchmark, list(p.configs)) for p in whole
    ]
    for part in quick:
        for config in part.configs.values():
            assert config.trials <= 2
            assert config.epochs == 1
            assert config.max_samples is not None
            assert config.max_samples <= 5000
            assert config.dataset in ("mnist-small", "five-datasets"), "nothing to download but for the mixture"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"benchmarks": ["splitmnist"]}, "no benchmark 'splitmnist' (did you mean split-mnist?)"),
        ({"benchmarks": ["custom"]}, "no benchmark 'custom'"),
        ({"parts": ["tables"]}, "no part 'tables' (did you mean table?)"),
    ],
)
def test_an_unknown_benchmark_or_part_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        plan(**given)
    assert words in str(error.value)


@pytest.mark.parametrize(("quick", "most", "trials"), [(True, None, 2), (True, 1, 1), (True, 7, 2), (False, 4, 4)])
def test_there_are_no_more_trials_than_asked_for(quick: bool, most: int | None, trials: int) -> None:
    (part,) = plan(["split-mnist"], ["table"], quick, most)
    assert {config.trials for config in part.configs.values()} == {trials}


def test_quick_has_settings_for_every_benchmark() -> None:
    assert tuple(planning.QUICK) == PAPER_BENCHMARKS
