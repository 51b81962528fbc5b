"""Streams: what each task holds, and that everything random is a function of (seed, trial, task)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engram import InputError, preset, streams
from engram.common.seeding import derive_seed
from engram.config.methods import all_methods
from engram.data.batches import (
    batches_of,
    epoch_order,
    move_streams,
    num_batches,
    plan_epoch,
    read_inputs,
    record_steps,
)
from engram.data.samples import Dataset, Samples, as_colour_32
from engram.data.sources import load
from engram.data.streams import removal_probabilities
from engram.engine.build import build_streams


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("mnist-small")


def pictures(name: str, channels: int, side: int, count: int = 20) -> Dataset:
    def samples(seed: int) -> Samples:
        random = torch.Generator().manual_seed(seed)
        inputs = torch.randint(1, 256, (count, channels, side, side), generator=random, dtype=torch.uint8)
        return Samples(inputs, torch.arange(count) % 10)

    return Dataset(name, samples(0), samples(1), "published")


def test_permuted_tasks_are_permutations_of_the_same_pixels(digits) -> None:
    stream = streams.permuted(digits, num_tasks=3)
    assert len(stream) == 3
    assert stream.num_classes == 10
    for task in stream.tasks:
        assert sorted(task.permutation.tolist()) == list(range(784))
        assert task.classes == tuple(range(10))
        assert task.train is digits.train, "the pixels are there once"
    assert not torch.equal(stream[0].permutation, stream[1].permutation)
    assert not torch.equal(stream[0].permutation, torch.arange(784)), "the paper permutes every task, the first too"


def test_permutation_applies_to_training_and_test_samples(digits) -> None:
    task = streams.permuted(digits, num_tasks=1)[0]
    for samples in (task.train, task.test):
        inputs, _ = next(batches_of(samples, 5, permutation=task.permutation))
        raw = samples.inputs[:5].flatten(1)
        for i in range(5):
            expected = [int(raw[i, p]) for p in task.permutation.tolist()]
            assert (inputs[i].flatten() * 255).round().int().tolist() == expected


def test_streams_depend_on_seed_trial_and_task_and_on_nothing_else(digits) -> None:
    def permutations(**place) -> list[list[int]]:
        return [task.permutation.tolist() for task in streams.permuted(digits, num_tasks=3, **place).tasks]

    torch.manual_seed(1)
    reference = permutations(seed=4, trial=7)
    torch.manual_seed(2)
    torch.rand(100)
    assert permutations(seed=4, trial=7) == reference
    assert permutations(seed=4, trial=6) != reference
    assert permutations(seed=5, trial=7) != reference
    longer = streams.permuted(digits, num_tasks=5, seed=4, trial=7)
    assert [task.permutation.tolist() for task in longer.tasks[:3]] == reference


def test_imbalanced_removes_each_class_with_its_own_probability(digits) -> None:
    stream = streams.imbalanced(digits, num_tasks=4)
    removal = removal_probabilities(4, 10)
    for n, task in enumerate(stream.tasks):
        kept = task.train.labels.bincount(minlength=10)
        for c in range(10):
            expected, spread = 1000 * (1 - removal[n, c]), (1000 * removal[n, c] * (1 - removal[n, c])) ** 0.5
            assert abs(kept[c] - expected) < 5 * spread + 1
        assert task.test is digits.test, "test samples are not removed"
    assert removal.min() < 0.1
    assert removal.max() > 0.9
    assert not torch.equal(removal[0], removal[1]), "for each class and each task"


def test_removal_probabilities_are_the_same_in_all_experiments(digits) -> None:
    def sizes(**place) -> list[int]:
        return [len(task.train) for task in streams.imbalanced(digits, num_tasks=2, **place).tasks]

    assert torch.equal(removal_probabilities(2, 10), removal_probabilities(5, 10)[:2])
    assert not torch.equal(removal_probabilities(2, 10), removal_probabilities(2, 10, imbalance_seed=1))
    first, other_trial = sizes(seed=0, trial=0), sizes(seed=9, trial=3)
    assert first != sizes(seed=0, trial=3), "which samples go is drawn anew in each trial"
    assert first != other_trial
    assert np.allclose(first, other_trial, rtol=0.05), "but with the same probabilities"
    assert not np.allclose(first, sizes(imbalance_seed=1), rtol=0.05)


def test_split_has_five_pairs_of_digits(digits) -> None:
    stream = streams.split(digits)
    assert [task.classes for task in stream.tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert [task.name for task in stream.tasks] == ["0/1", "2/3", "4/5", "6/7", "8/9"]
    assert stream.num_classes == 10
    for task in stream.tasks:
        assert set(task.train.targets.tolist()) == set(task.classes) == set(task.test.targets.tolist())
        assert (len(task.train), len(task.test)) == (2000, 400)


def test_split_in_another_order_renumbers_the_labels(digits) -> None:
    order = [7, 2, 9, 0, 1, 3, 4, 5, 6, 8]
    stream, plain = streams.split(digits, order=order), streams.split(digits)
    assert [task.classes for task in stream] == [task.classes for task in plain]
    assert [task.name for task in stream] == [f"task {n}" for n in range(1, 6)]
    for n, task in enumerate(stream):
        for samples, whole in ((task.train, digits.train), (task.test, digits.test)):
            own = torch.isin(whole.targets, torch.tensor(order[2 * n : 2 * n + 2]))
            assert torch.equal(samples[:].inputs, whole.inputs[own])
            assert [order[label] for label in samples.labels.tolist()] == whole.targets[own].tolist()


def test_the_tasks_of_a_split_have_their_own_samples_unless_they_are_shared(digits) -> None:
    order = [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]
    own, shared = (streams.split(digits, order=order, shared=kind)[1] for kind in (False, True))
    assert own.train.rows is None
    assert len(own.train.inputs) == len(own.train) == len(shared.train) < len(shared.train.inputs)
    assert torch.equal(own.train.inputs, shared.train[:].inputs)


@pytest.mark.parametrize("order", [[0, 1], [0, *range(9)], list(range(1, 11))])
def test_an_order_that_lacks_a_label_is_refused(digits, order: list[int]) -> None:
    with pytest.raises(InputError, match="each label from 0 to 9 once"):
        streams.split(digits, order=order)


def test_each_trial_has_its_own_random_order_of_classes(digits) -> None:
    config = preset("split-mnist", "si", dataset="mnist-small", class_order="random")
    first, second, again = build_streams(config, [0, 1, 0], [digits])
    labels = [task.train.labels for task in first], [task.train.labels for task in second]
    assert not all(torch.equal(a, b) for a, b in zip(*labels, strict=True))
    assert all(torch.equal(a, b.train.labels) for a, b in zip(labels[0], again, strict=True))
    other = build_streams(config.replace(seed=1), [0], [digits])[0]
    assert not all(torch.equal(a, b.train.labels) for a, b in zip(labels[0], other, strict=True))


def test_mixture_has_colour_images_of_32_and_separate_outputs_for_each_task() -> None:
    stream = streams.mixture([pictures("grey", 1, 28), pictures("colour", 3, 32)])
    assert stream.input_shape == (3, 32, 32)
    assert stream.num_classes == 20
    assert [task.classes for task in stream.tasks] == [tuple(range(10)), tuple(range(10, 20))]
    grey, colour = stream.tasks
    assert set(grey.train.targets.tolist()) == set(range(10))
    assert set(colour.train.targets.tolist()) == set(range(10, 20))
    original = pictures("grey", 1, 28).train.inputs
    assert torch.equal(grey.train.inputs[:, :, 2:30, 2:30], original.expand(-1, 3, -1, -1))
    assert grey.train.inputs.sum() == 3 * original.sum(), "the border is zero"
    assert torch.equal(colour.train.inputs, pictures("colour", 3, 32).train.inputs)


def test_as_colour_32_pads_all_sides_equally() -> None:
    image = as_colour_32(torch.ones(1, 1, 28, 28, dtype=torch.uint8))
    assert torch.equal(image, image.flip(2))
    assert torch.equal(image, image.flip(3))


def test_from_arrays_takes_numpy_and_torch() -> None:
    random = np.random.default_rng(0)
    first = (random.normal(size=(8, 5)), np.arange(8) % 3, random.normal(size=(4, 5)), np.arange(4) % 3)
    second = (torch.randn(6, 5), torch.arange(6) % 4, torch.randn(2, 5), torch.tensor([0, 3], dtype=torch.int32))
    stream = streams.from_arrays([first, second])
    assert stream.num_classes == 4
    assert stream.input_shape == (5,)
    assert [task.classes for task in stream] == [(0, 1, 2, 3)] * 2
    assert stream[:1] == stream.tasks[:1]
    assert stream[0].train.inputs.dtype == torch.float32
    own = streams.from_arrays([first, second], classes=[(0, 1, 2), (0, 1, 2, 3)], names=["a", "b"])
    assert [(task.name, task.classes) for task in own.tasks] == [("a", (0, 1, 2)), ("b", (0, 1, 2, 3))]


GOOD = (np.zeros((4, 2)), np.array([0, 1, 0, 1]), np.zeros((2, 2)), np.array([0, 1]))


@pytest.mark.parametrize(
    ("tasks", "options", "sentence"),
    [
        ([], {}, "at least one task"),
        ([(*GOOD[:1], GOOD[1][:3], *GOOD[2:])], {}, "4 inputs but 3 targets"),
        ([(GOOD[0], GOOD[1] * 0.5, *GOOD[2:])], {}, "whole class numbers"),
        ([(GOOD[0], GOOD[1] - 1, *GOOD[2:])], {}, "label -1"),
        ([GOOD], {"num_classes": 1}, "label 1"),
        ([(GOOD[0] * np.nan, *GOOD[1:])], {}, "NaN or infinity"),
        ([GOOD, (np.zeros((4, 3)), *GOOD[1:])], {}, r"shape \(3,\), those of the first task \(2,\)"),
        ([(*GOOD[:2], np.zeros((0, 2)), np.zeros(0, int))], {}, "empty"),
        ([GOOD], {"classes": [(0, 1), (1,)]}, "1 tasks but 2 groups"),
        ([GOOD], {"classes": [(0, 5)], "num_classes": 2}, r"lie in 0\.\.1"),
        ([GOOD[:3]], {}, "not 3 arrays"),
        ([GOOD], {"classes": [(0, 1, 1)]}, "once each"),
        ([(np.zeros((0, 2)), np.zeros(0, int)) * 2], {}, "empty"),
        ([(GOOD[0], np.array(["a", "b", "a", "b"]), *GOOD[2:])], {}, "must hold numbers"),
    ],
)
def test_bad_arrays_are_refused(tasks, options, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        streams.from_arrays(tasks, **options)


def test_bad_numbers_of_tasks_are_refused(digits) -> None:
    for make in (
        lambda: streams.permuted(digits, num_tasks=0),
        lambda: streams.imbalanced(digits, num_tasks=-1),
        lambda: streams.split(digits, num_tasks=6),
        lambda: streams.split(digits, classes_per_task=0),
        lambda: streams.mixture([pictures("grey", 1, 28)], num_tasks=2),
    ):
        with pytest.raises(InputError, match="task"):
            make()


def test_moved_streams_still_share_samples(digits) -> None:
    streams_of_trials = [streams.permuted(digits, num_tasks=3, trial=trial) for trial in (0, 1)]
    one, other = move_streams(streams_of_trials, torch.device("cpu"))
    assert one[0].train is one[2].train
    assert one[0].train is other[1].train
    assert torch.equal(other[1].permutation, streams_of_trials[1][1].permutation)
    thinned = move_streams([streams.imbalanced(digits, num_tasks=2)], torch.device("cpu"))[0]
    assert thinned[0].train.inputs is thinned[1].train.inputs, "a selection is rows of one store of pixels"


def test_batches_have_every_sample_once_in_order() -> None:
    samples = Samples(torch.arange(23.0)[:, None], torch.arange(23))
    seen = list(batches_of(samples, 5))
    assert [len(targets) for _, targets in seen] == [5, 5, 5, 5, 3]
    assert len(seen) == num_batches(23, 5)
    targets = torch.cat([t for _, t in seen])
    assert targets.tolist() == list(range(23))
    assert torch.equal(torch.cat([x for x, _ in seen])[:, 0], targets.float())


def test_epoch_order_has_every_sample_once_and_depends_only_on_its_position() -> None:
    samples = Samples(torch.arange(23.0)[:, None], torch.arange(23))
    order = epoch_order(samples, 0, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(23))
    assert order.tolist() != list(range(23))
    torch.manual_seed(5)
    assert torch.equal(epoch_order(samples, 0, 1, 2, 3), order)
    for place in ((1, 1, 2, 3), (0, 0, 2, 3), (0, 1, 0, 3), (0, 1, 2, 0)):
        assert not torch.equal(epoch_order(samples, *place), order)
    few = samples.select(samples.targets % 3 == 0)
    assert sorted(epoch_order(few, 0, 1, 2, 3).tolist()) == list(range(0, 23, 3)), "rows of the store"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 70), st.integers(1, 5))
def test_epoch_plan_has_every_sample_of_every_trial_once_and_in_order(
    sizes: list[int], batch_size: int, records: int
) -> None:
    pieces = plan_epoch(sizes, batch_size, records)
    for trial, size in enumerate(sizes):
        own = [piece for piece in pieces if trial in range(len(sizes))[piece.trials]]
        next_step = next_sample = 0
        batches = []
        for piece in own:
            assert (piece.first_step, piece.first_sample) == (next_step, next_sample)
            next_step = piece.end
            batches += [piece.batch_size] * piece.num_steps
            next_sample += piece.num_steps * piece.batch_size
        full, rest = divmod(size, batch_size)
        assert batches == [batch_size] * full + [rest] * (rest > 0)
        inner = {i + 1 for piece in own for i in range(piece.first_step, piece.end - 1)}
        assert not inner & {i + 1 for i in record_steps(len(batches), records)}, "a piece crosses a record"
    for piece in pieces:
        assert 1 <= piece.num_steps <= 64


@given(st.integers(1, 1000), st.integers(1, 8))
def test_records_are_evenly_spaced_and_include_the_last_step(num_steps: int, records: int) -> None:
    steps = record_steps(num_steps, records)
    assert steps[-1] == num_steps - 1
    assert len(steps) == min(num_steps, records)
    gaps = np.diff([-1, *steps])
    assert gaps.max() - gaps.min() <= 1


def test_pixels_are_scaled_and_floats_are_not() -> None:
    assert read_inputs(torch.tensor([[0, 51, 255]], dtype=torch.uint8)).tolist() == [[0.0, pytest.approx(0.2), 1.0]]
    assert read_inputs(torch.tensor([[3.5]])).tolist() == [[3.5]]


def test_seeds_differ_by_seed_purpose_and_position() -> None:
    places = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a", 0),
        (0, "a", 1),
        (0, "a", 0, 1),
        (0, "a", 1, 0),
        (0, "a", 10),
        (0, "a", 0, 1, 2),
    ]
    seeds = [derive_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "order", 7, 3, 1) == 8545335507777531823, (
        "published numbers depend on it: it must never change"
    )


def test_dataset_may_be_given_by_name(digits) -> None:
    by_name, given = streams.split("mnist-small"), streams.split(digits)
    assert torch.equal(by_name[3].train.inputs, given[3].train.inputs)
    assert len(streams.permuted("mnist-small", num_tasks=2)) == len(streams.imbalanced("mnist-small", num_tasks=2)) == 2
    assert streams.mixture(["mnist-small", "mnist-small"]).num_classes == 20
    with pytest.raises(InputError, match="no dataset 'minst'"):
        streams.permuted("minst")


# --- fewer samples, and samples for choices


@pytest.mark.parametrize("benchmark", ["permuted-mnist", "imbalanced-permuted-mnist", "split-mnist", "vision-mixture"])
def test_validation_samples_are_the_last_sixth_of_the_training_samples(benchmark: str) -> None:
    """The same for every method, apart from what is trained on; and no test sample is among them."""
    data = pictures("mnist", 1, 28, 600)
    number = torch.arange(600)
    for samples, first in ((data.train, 0), (data.test, 600)):
        where = number + first
        samples.inputs[:, 0, 0, 0], samples.inputs[:, 0, 0, 1] = (where // 256).byte(), (where % 256).byte()

    def numbers(samples: Samples) -> set[int]:
        """Of the samples, which carry them in two pixels of the first row."""
        first = samples[slice(None)].inputs[:, 0]
        row = 2 if benchmark == "vision-mixture" else 0  # padded by two
        return set((first[:, row, row].int() * 256 + first[:, row, row + 1].int()).tolist())

    mixture = benchmark == "vision-mixture"
    settings = {"num_tasks": 2} if mixture else {"num_tasks": 2, "dataset": "mnist-small"}
    found = []
    for method in all_methods():
        config = preset(benchmark, method, **({"strength": 1.0} if method not in ("finetune", "dhp") else {}))
        (stream,) = build_streams(config.replace(examine="validation", **settings), [3], [data] * (1 + mixture))
        found.append([(numbers(task.train), numbers(task.test)) for task in stream])
    assert all(other == found[0] for other in found)
    trained = set().union(*(train for train, _ in found[0]))
    examined = set().union(*(test for _, test in found[0]))
    assert trained <= set(range(500))
    assert examined <= set(range(500, 600))
    if benchmark != "split-mnist":
        assert examined == set(range(500, 600))
    if benchmark in ("permuted-mnist", "vision-mixture"):
        assert trained == set(range(500))


def test_shortened_dataset_has_the_first_samples_of_each_split() -> None:
    data = pictures("mnist", 1, 28, 20)
    config = preset("permuted-mnist", "dhp", dataset="mnist-small", num_tasks=1)
    for limit, length in ((7, 7), (20, 20), (50, 20), (None, 20)):
        task = build_streams(config.replace(max_samples=limit), [0], [data])[0][0]
        for kept, whole in ((task.train, data.train), (task.test, data.test)):
            assert len(kept) == length
            assert torch.equal(kept.inputs, whole.inputs[:length])
            assert torch.equal(kept.targets, whole.targets[:length])


def test_validation_samples_are_held_out_before_the_rest_is_shortened() -> None:
    data = pictures("mnist", 1, 28, 60)
    config = preset("permuted-mnist", "dhp", dataset="mnist-small", num_tasks=1, examine="validation", max_samples=8)
    task = build_streams(config, [0], [data])[0][0]
    assert torch.equal(task.train.inputs, data.train.inputs[:8])
    assert torch.equal(task.test.inputs, data.train.inputs[50:58])


def test_too_few_samples_for_a_task_are_refused() -> None:
    config = preset("split-mnist", "dhp", dataset="mnist-small")
    with pytest.raises(InputError, match="mnist splits into 1 to 2 tasks of 2 classes, not 5"):
        build_streams(config.replace(max_samples=4), [0], [pictures("mnist", 1, 28)])
    with pytest.raises(InputError, match="the test samples of task '0/1' are empty"):
        build_streams(config.replace(examine="validation"), [0], [pictures("mnist", 1, 28)])


def test_masked_only_in_evaluation_trains_all_outputs_and_evaluates_those_of_the_task() -> None:
    config = preset("split-mnist", "dhp", dataset="mnist-small")
    masked, unmasked = (
        build_streams(config.replace(mask_training=mask), [0, 1], [pictures("mnist", 1, 28)]) for mask in (True, False)
    )
    for with_masks, without in zip(masked[1], unmasked[1], strict=True):
        assert with_masks.taught == with_masks.classes == without.classes
        assert without.taught == tuple(range(10))
        assert torch.equal(with_masks.train.inputs, without.train.inputs)
    on_device = move_streams(unmasked, torch.device("cpu"))
    assert on_device[0][0].taught == tuple(range(10))


def test_a_target_that_is_no_class_number_is_refused() -> None:
    x = torch.ones(9, 6)
    with pytest.raises(InputError, match="the largest target is 1000000000000: number the classes from 0"):
        streams.from_arrays([(x, torch.full((9,), 10**12), x, torch.zeros(9, dtype=torch.int64))])


@pytest.mark.parametrize("shape", [(1, 33, 32), (3, 32, 64)])
def test_images_that_would_be_cropped_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"images of {shape[1]}×{shape[2]} pixels do not fit into 32×32"):
        as_colour_32(torch.zeros(2, *shape))
    assert as_colour_32(torch.zeros(2, 3, 32, 32)).shape == (2, 3, 32, 32)


def test_seeds_follow_the_documented_formula() -> None:
    """docs/guides/runs.md has it, for those who draw the same numbers elsewhere."""
    digest = hashlib.sha256(b"engram/0/weights/7").hexdigest()
    assert derive_seed(0, "weights", 7) == int(digest[:16], 16) // 2
