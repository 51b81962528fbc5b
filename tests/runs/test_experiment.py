"""Experiments: many models together are as many alone, however they are divided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import engram
from builders import assert_numbers_equal, custom_stream, digits_for, run_on, small_digits
from engram import InputError, Progress, Result, preset, streams
from engram.config.methods import all_methods
from engram.config.settings import Config
from engram.data.samples import Samples
from engram.engine.build import build_learner, build_model, build_streams, precision_of
from engram.engine.cpu.descent import ContractDescent, FactoredDescent
from engram.engine.cpu.program import OneByOne
from engram.engine.learner import Learner
from engram.engine.loop import run_stream
from engram.engine.program import Batches
from engram.engine.stacks import plan_stacks
from engram.engine.training import Runtime
from engram.penalties import MAS
from engram.runs.experiment import results_of

# --- N together are N alone

QUICK = {"epochs": 2, "batch_size": 16, "num_tasks": 2, "trials": 2}
KINDS = {
    "permuted": ("permuted-mnist", {"dataset": "mnist-small"}),
    "imbalanced": ("imbalanced-permuted-mnist", {"dataset": "mnist-small"}),
    "split": ("split-mnist", {"dataset": "mnist-small", "batch_size": 4}),
    "mixture": ("vision-mixture", {}),
    "custom": ("custom", {}),
}


def run_kind(configs: list[Config], **options: object) -> list[Result]:
    if configs[0].benchmark == "custom":
        return engram.run_many(configs, stream=custom_stream(), device="cpu", precision="float64", **options)
    return run_on(configs, digits_for(configs[0], 32, 20), Runtime("cpu", "float64"), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "network"),
    [(kind, "mlp") for kind in KINDS]
    + [pytest.param(kind, "cnn", marks=pytest.mark.slow) for kind in ("mixture", "imbalanced")],
)
def test_together_is_exactly_alone_for_every_method(kind: str, network: str) -> None:
    benchmark, more = KINDS[kind]
    methods = all_methods() if network == "mlp" else ("finetune", "dhp", "dhp+si", "online-ewc", "ewc", "mas")
    small = {"network": network, "hidden": [12], "epochs": 2 if network == "mlp" else 1}
    configs = [
        preset(benchmark, method, **({"strength": 1.0} if preset_needs_strength(benchmark, method) else {}))
        .replace(**QUICK | more | small)
        for method in methods
    ]  # fmt: skip
    together = run_kind(configs)
    for place, (config, result) in enumerate(zip(configs, together, strict=True)):
        trial = place % 2
        (alone,) = run_kind([config.replace(trials=1, first_trial=trial)])
        assert np.array_equal(alone.accuracy[0], result.accuracy[trial], equal_nan=True), config.method
        assert np.array_equal(alone.untrained[0], result.untrained[trial])
        assert repr(alone.dynamics) == repr([row for row in result.dynamics if row["trial"] == trial]), config.method
    losses = {repr([row["loss"] for row in result.dynamics]) for result in together}
    assert len(losses) == len(methods) - (2 if network == "mlp" else 1), (
        "in the second of two tasks EWC and Online EWC are the same, and no others"
    )


def preset_needs_strength(benchmark: str, method: str) -> bool:
    try:
        preset(benchmark, method)
    except InputError:
        return True
    return False


def test_points_of_a_grid_train_together_each_with_its_own_values() -> None:
    base = preset("permuted-mnist", "dhp+online-ewc", dataset="mnist-small", hidden=[12], **QUICK | {"num_tasks": 3})
    grid = [
        base,
        base.replace(strength=1.0),
        base.replace(eta=0.1),
        base.replace(learning_rate=0.05),
        base.replace(gamma=0.1),
        base.replace(fisher_labels="sampled"),
        base.replace(penalty_step="gradient", strength=0.1),
        base.replace(regularize_alpha=True),
        base.replace(hidden=[7, 7]),
    ]
    together = run_kind(grid)
    for config, result in zip(grid, together, strict=True):
        assert_numbers_equal(run_kind([config])[0], result)
    assert len({repr(result.dynamics[-1]) for result in together}) == len(grid), "each value tells"


def test_configs_with_other_steps_train_beside_each_other() -> None:
    base = preset("split-mnist", "dhp", dataset="mnist-small", hidden=[12], **QUICK)
    configs = [base, base.replace(batch_size=10), base.replace(epochs=1), base.replace(method="finetune")]
    labelled = {str(c): config for c, config in enumerate(configs)}
    assert [plan.labels for plan in plan_stacks(labelled, None)] == [("0", "3"), ("1",), ("2",)]
    for config, result in zip(configs, run_kind(configs), strict=True):
        assert_numbers_equal(run_kind([config])[0], result)


# --- how an experiment is divided


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([8, 16])), min_size=1, max_size=9),
    st.integers(1, 7),
    st.integers(0, 3),
    st.none() | st.integers(1, 40),
)
def test_every_model_is_in_one_stack_and_no_stack_is_too_large(
    steps: list[tuple[int, int]], trials: int, first: int, limit: int | None
) -> None:
    base = preset("split-mnist", "dhp", trials=trials, first_trial=first)
    configs = {
        str(c): base.replace(epochs=epochs, batch_size=batch_size) for c, (epochs, batch_size) in enumerate(steps)
    }
    plans = plan_stacks(configs, limit)
    keys = [key for plan in plans for key in plan.keys]
    assert sorted(keys) == [(str(c), first + t) for c in range(len(configs)) for t in range(trials)]
    for plan in plans:
        assert len(plan) == len(plan.keys) <= (limit or len(keys))
        assert len({steps[int(label)] for label in plan.labels}) == 1
    if limit is None:
        assert len(plans) == len(set(steps))


def test_a_stack_of_no_models_is_refused() -> None:
    with pytest.raises(InputError, match="at least one model, not 0"):
        engram.run(preset("split-mnist", "dhp", dataset="mnist-small"), max_stack=0)


@pytest.mark.parametrize("max_stack", [1, 3, 5])
def test_a_divided_experiment_gives_the_same_results_and_says_so(max_stack: int) -> None:
    configs = [
        preset("permuted-mnist", method, dataset="mnist-small", hidden=[12], **QUICK | {"trials": 3})
        for method in ("finetune", "dhp+si")
    ]
    seen: list[Progress] = []
    started: list[int] = []

    def see(progress: Progress) -> None:
        seen.append(progress)
        if progress.task_ended and not started:
            results = results_of(progress.configs, progress.outcomes, [])
            started.extend(len(result.trials) for result in results.values())

    whole = run_on(configs, [small_digits(80, 40)], Runtime("cpu"))
    divided = run_on(configs, [small_digits(80, 40)], Runtime("cpu", max_stack=max_stack), see)
    for one, other in zip(whole, divided, strict=True):
        assert_numbers_equal(one, other)
    num_stacks = {1: 6, 3: 3, 5: 2}[max_stack]
    notes = [progress.note for progress in seen if progress.note]
    assert notes == [f"6 models in {num_stacks} stacks of " + {1: "1", 3: "2", 5: "2 to 4"}[max_stack]]
    shares = [progress.done for progress in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert started == {1: [1, 0], 3: [1, 1], 5: [2, 2]}[max_stack], "trials that had started when a task first ended"


@pytest.mark.parametrize(("name", "other"), [("benchmark", "split-mnist"), ("dataset", "notmnist")])
def test_configs_of_one_run_have_the_same_benchmark_and_dataset(name: str, other: str) -> None:
    base = preset("permuted-mnist", "dhp")
    with pytest.raises(InputError, match=f"must have one {name}, not "):
        engram.run_many([base, base.replace(**{name: other})])


def test_configs_with_other_tasks_train_in_groups_and_come_back_in_order() -> None:
    base = preset("permuted-mnist", "dhp", dataset="mnist-small", hidden=[8], **QUICK)
    configs = [base, base.replace(num_tasks=3), base.replace(trials=1, first_trial=1), base.replace(seed=1)]
    datasets = [small_digits(60, 30)]
    together = run_on(configs, datasets, Runtime("cpu"))
    assert [result.config for result in together] == configs
    assert [result.trials for result in together] == [(0, 1), (0, 1), (1,), (0, 1)]
    for config, result in zip(configs, together, strict=True):
        assert_numbers_equal(run_on([config], datasets, Runtime("cpu"))[0], result)


# --- which samples and outputs take part


def outputs_of(model: nn.Module, samples: Samples) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(samples[slice(None)].inputs.double() / 255)


@pytest.mark.parametrize("mask_training", [True, False])
def test_all_outputs_take_part_in_training_only_where_they_are_to(mask_training: bool) -> None:
    """The loss of the only step, on the only batch, and the accuracy before it, from the network as it is made."""
    config = preset("split-mnist", "finetune", dataset="mnist-small", hidden=[8], num_tasks=2, trials=1, epochs=1)
    config = config.replace(batch_size=1000, mask_training=mask_training)
    data = small_digits(200, 100)
    (result,) = run_on([config], [data], Runtime("cpu", "float64"))
    (stream,) = build_streams(config, [0], [data])
    model = build_model(config, 0, stream.input_shape, stream.num_classes).double()
    first = stream[0]
    assert set(first.train.labels.tolist()) == {0, 1}
    logits = outputs_of(model, first.train)
    own = logits if not mask_training else logits[:, :2]
    assert result.dynamics[0]["loss"] == pytest.approx(float(F.cross_entropy(own, first.train.labels)), rel=1e-12)
    for n, task in enumerate(stream):
        guessed = outputs_of(model, task.test)[:, list(task.classes)].argmax(dim=1) + task.classes[0]
        assert result.untrained[0, n] == float((guessed == task.test.labels).double().mean()), "masks when examined"


@pytest.mark.parametrize("method", ["online-ewc", "mas"])
def test_importances_are_of_the_outputs_that_took_part_in_training(method: str) -> None:
    weighed = {}
    for mask_training in (True, False):
        config = preset("split-mnist", method, dataset="mnist-small", hidden=[8], num_tasks=1, trials=1, epochs=1)
        config = config.replace(mask_training=mask_training)
        streams_ = build_streams(config, [0], [small_digits(200, 100)])
        task = streams_[0][0]
        learner = build_learner(config, 0, (1, 28, 28), 10, torch.device("cpu"), torch.float64)
        batches = Batches([0], streams_, 0, torch.float64)
        run_stream(OneByOne([learner], batches), batches, config)
        weighed[mask_training] = learner.penalty.terms[0].importance["head.weight"]
        samples = task.train[slice(None)]
        own_batches = [(samples.inputs.double() / 255, samples.targets)]
        penalty, classes = learner.penalty, (0, 1) if mask_training else None
        own = penalty.importance(
            penalty.model, penalty.parameters, penalty.state, penalty.settings, own_batches, classes
        )
        torch.testing.assert_close(weighed[mask_training], own["head.weight"], rtol=1e-10, atol=1e-15)
    assert torch.equal(weighed[True][2:], torch.zeros_like(weighed[True][2:]))
    assert (weighed[False][2:].sum(dim=1) > 0).all()


def test_test_samples_have_no_say_where_validation_samples_examine() -> None:
    config = preset("split-mnist", "dhp+mas", dataset="mnist-small", hidden=[8], num_tasks=2, trials=1, epochs=1)
    data = small_digits(300, 100)
    other = replace(data, test=Samples(255 - data.test.inputs, data.test.targets.flip(0)))
    by_validation = [run_on([config.replace(examine="validation")], [d], Runtime("cpu"))[0] for d in (data, other)]
    by_test = [run_on([config], [d], Runtime("cpu"))[0] for d in (data, other)]
    assert_numbers_equal(*by_validation)
    assert not np.array_equal(by_test[0].accuracy, by_test[1].accuracy)


def test_a_shortened_run_is_a_run_on_less() -> None:
    config = preset("permuted-mnist", "dhp+si", dataset="mnist-small", hidden=[8], num_tasks=2, trials=1, epochs=1)
    (short,) = run_on([config.replace(max_samples=30)], [small_digits(80, 50)], Runtime("cpu"))
    (less,) = run_on([config], [small_digits(30, 30)], Runtime("cpu"))
    assert_numbers_equal(short, less)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_samples": 3}, "max_samples is a setting of datasets, which a custom stream does not have"),
        ({"examine": "validation"}, "examine is a setting of datasets, which a custom stream does not have"),
    ],
)
def test_a_custom_stream_is_never_shortened_silently(changes: dict, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        engram.run(preset("custom", "dhp", **changes), stream=custom_stream())
    assert str(error.value) == sentence


def test_a_custom_stream_may_be_masked_only_in_evaluation() -> None:
    pairs = [(np.eye(4)[[0, 1]], [2 * n, 2 * n + 1], np.eye(4)[[0, 1]], [2 * n, 2 * n + 1]) for n in range(2)]
    stream = streams.from_arrays(pairs, classes=[(0, 1), (2, 3)])
    config = preset("custom", "finetune", hidden=[5], epochs=1, trials=1)
    masked, unmasked = (
        engram.run(config.replace(mask_training=mask), stream=stream, device="cpu", precision="float64")
        for mask in (True, False)
    )
    assert masked.dynamics[0]["loss"] < np.log(2) + 0.3 < np.log(4) - 0.3 < unmasked.dynamics[0]["loss"]


def test_nothing_to_run_gives_nothing() -> None:
    assert engram.run_many([]) == []


# --- custom features


def own_features() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 9))


@pytest.mark.parametrize("method", ["finetune", "dhp+si", "ewc"])
def test_custom_features_get_the_method_s_head(method: str) -> None:
    config = preset("custom", method, network="custom", epochs=20, batch_size=8, learning_rate=0.05, trials=2,
                    **({} if method == "finetune" else {"strength": 1e-3}))  # fmt: skip
    result = engram.run(config, stream=custom_stream(), features=own_features)
    assert result.latest_task.min() > 0.9
    assert not np.array_equal(result.dynamics[0]["loss"], result.dynamics[len(result.dynamics) // 2]["loss"])
    (alone,) = engram.run_many([config.replace(trials=1, first_trial=1)], stream=custom_stream(), features=own_features)
    assert np.array_equal(alone.accuracy[0], result.accuracy[1], equal_nan=True)


def test_features_and_network_own_go_together() -> None:
    config = preset("custom", "dhp")
    with pytest.raises(InputError, match="features go with network='custom'"):
        engram.run(config, stream=custom_stream(), features=own_features)
    with pytest.raises(InputError, match="features go with network='custom'"):
        engram.run(config.replace(network="custom"), stream=custom_stream())
    with pytest.raises(InputError, match="one row per sample"):
        engram.run(config.replace(network="custom"), stream=custom_stream(), features=lambda: nn.Conv2d(1, 2, 3))


# --- neighbours


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_model_that_diverges_leaves_its_neighbours_untouched(network: str) -> None:
    configs = [
        preset("custom", method, strength=0.1 if "si" in method or "mas" in method else None).replace(
            network=network, hidden=[12], **QUICK
        )
        for method in ("dhp", "si", "dhp+mas", "finetune")
    ]
    wild = [config.replace(learning_rate=1e38) if config.method in ("si", "dhp") else config for config in configs]
    with_wild = run_kind(wild)
    for config, result in zip(configs, with_wild, strict=True):
        if config.method in ("si", "dhp"):
            assert [lost.trial for lost in result.diverged] == [0, 1]
            assert np.isnan(result.accuracy[:, -1]).all()
        else:
            assert_numbers_equal(run_kind([config])[0], result)


# --- a custom penalty


class Noted(MAS):
    """MAS that looks at each step."""

    def __init__(self, *given: object, **options: object):
        super().__init__(*given, **options)
        self.seen = 0

    def after_step(self) -> None:
        assert all(theta.grad is not None for theta in self.parameters.values())
        self.seen += 1


@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
def test_a_penalty_with_steps_of_its_own_is_called_as_in_anybody_s_loop(penalty_step: str) -> None:
    stream = custom_stream()
    config = preset("custom", "dhp+mas", strength=0.1, hidden=[12], epochs=2, batch_size=16, penalty_step=penalty_step)

    def make() -> Learner:
        return build_learner(config, 0, stream.input_shape, 3, torch.device("cpu"), torch.float64)

    learner, usual = make(), make()
    learner.penalty = Noted(learner.model, strength=0.1)
    batches = Batches([0], [stream], config.seed, torch.float64)
    program = OneByOne([learner, usual], batches)
    assert [type(descent) for descent in program.descents] == [ContractDescent, FactoredDescent]
    run_stream(program, batches, config)
    assert learner.penalty.seen == 2 * (2 + 3)
    for name, tensor in usual.model.state_dict().items():
        torch.testing.assert_close(learner.model.state_dict()[name], tensor, rtol=1e-10, atol=1e-12)
    assert learner.outcome.rows == usual.outcome.rows


def test_convolutions_are_summed_up_in_one_order_while_something_is_run() -> None:
    before = torch.backends.cudnn.deterministic
    with precision_of("tf32"):
        assert torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.deterministic == before


def test_what_is_no_config_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"config must be a Config, such as engram.preset\(...\) returns, not 'si'"):
        engram.run("si")


def test_a_head_that_cannot_be_read_fails_alone_and_is_refused_where_nothing_else_is_learned() -> None:
    """32 samples of 256 numbers each: without shrinkage their second moment is singular."""
    lost = preset("custom", "slda", random_features=0, shrinkage=0.0, trials=2)
    words = "the second moment of the 256 features is singular"
    with pytest.raises(InputError, match=f"^{words}"):
        engram.run(lost, stream=custom_stream())
    one, other = engram.run_many([lost, lost.replace(shrinkage=0.1)], stream=custom_stream())
    assert [str(each).partition(",")[0] for each in one.diverged] == [f"trial {k} failed in task 1" for k in (1, 2)]
    assert all(words in str(each) for each in one.diverged)
    assert np.isnan(one.accuracy).all()
    assert (other.diverged, other.trials_finished) == ([], 2)


def test_a_strength_without_a_penalty_is_refused_before_anything_runs() -> None:
    config = preset("custom", "finetune", epochs=1, hidden=[8])
    for with_strength in (config.replace(strength=5.0), preset("custom", "dhp").replace(strength=5.0)):
        with pytest.raises(InputError, match=f"strength has no effect on {with_strength.method}"):
            engram.run(with_strength, stream=custom_stream())
    custom = engram.run(
        config.replace(strength=5.0), stream=custom_stream(), penalty=lambda model: MAS(model, strength=5.0)
    )
    assert custom.average_accuracy.size


@pytest.mark.parametrize(("method", "samples", "said"), [("si", 67, True), ("si", 72, False), ("finetune", 67, False)])
def test_a_run_says_that_a_penalty_suffers_from_a_tiny_last_batch(method: str, samples: int, said: bool) -> None:
    random = np.random.default_rng(0)
    task = (random.normal(size=(samples, 4)), np.arange(samples) % 2) * 2
    seen: list[Progress] = []
    config = preset("custom", method, epochs=1, trials=1, batch_size=32, hidden=[4])
    engram.run(config, stream=streams.from_arrays([task]), report=seen.append)
    notes = [progress.note for progress in seen if progress.note and "last batch" in progress.note]
    assert any(note.startswith("the last batch of 'task 1' has 3 of 32 samples: ") for note in notes) == said
    assert bool(notes) == said
