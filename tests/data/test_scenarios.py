"""The three scenarios: which outputs each task has, and among which it is trained and evaluated."""

from __future__ import annotations

import pytest
import torch

from builders import refusal, small_digits
from engram import preset, streams
from engram.config.settings import SETTINGS
from engram.data.samples import Samples, Stream, Task
from engram.data.scenarios import SCENARIOS, arrange, candidates
from engram.engine.build import build_streams

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
TEN = tuple(range(10))


def test_scenarios_of_a_config_are_those_of_streams() -> None:
    assert tuple(SETTINGS["scenario"].choices()) == SCENARIOS  # type: ignore[misc]


def test_split_in_the_task_scenario_is_split() -> None:
    plain = streams.split(small_digits())
    stream = streams.in_scenario(plain, "task")
    assert stream.num_classes == 10
    for task, own in zip(stream, plain, strict=True):
        assert (task.classes, task.taught, task.train, task.test) == (own.classes, own.taught, own.train, own.test)


def test_split_in_the_domain_scenario_asks_for_the_place_in_the_pair() -> None:
    plain = streams.split(small_digits())
    stream = streams.in_scenario(plain, "domain")
    assert stream.num_classes == 2
    for task, own in zip(stream, plain, strict=True):
        assert task.classes == task.taught == (0, 1)
        assert torch.equal(task.train.labels, own.train.labels % 2)
        assert torch.equal(task.test.labels, own.test.labels % 2)
        assert task.train.inputs is own.train.inputs


def test_split_in_the_class_scenario_learns_among_all_classes_so_far() -> None:
    stream = streams.in_scenario(streams.split(small_digits()), "class")
    assert [task.classes for task in stream] == PAIRS
    assert [task.taught for task in stream] == [TEN[:2], TEN[:4], TEN[:6], TEN[:8], TEN]
    assert [candidates(stream, 0, learned) for learned in range(6)] == [TEN[:2], *(t.taught for t in stream)]
    assert candidates(stream, 3, learned=3) == TEN[:8], "a task that comes next is evaluated among its own classes too"
    assert {candidates(stream, n, learned=5) for n in range(5)} == {TEN}


def test_permuted_in_the_domain_scenario_is_permuted() -> None:
    plain = streams.permuted(small_digits(), num_tasks=3)
    stream = streams.in_scenario(plain, "domain")
    assert stream.num_classes == 10
    for task, own in zip(stream, plain, strict=True):
        assert (task.classes, task.taught, task.train, task.test) == (own.classes, own.taught, own.train, own.test)


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_permuted_has_ten_outputs_for_each_task(scenario: str) -> None:
    plain = streams.permuted(small_digits(), num_tasks=3)
    stream = streams.in_scenario(plain, scenario)
    assert stream.num_classes == 30
    for n, (task, own) in enumerate(zip(stream, plain, strict=True)):
        assert task.classes == tuple(range(10 * n, 10 * n + 10))
        assert task.taught == (task.classes if scenario == "task" else tuple(range(10 * n + 10)))
        assert torch.equal(task.train.labels, own.train.labels + 10 * n)
        assert torch.equal(task.permutation, own.permutation)  # type: ignore[arg-type]


def test_mixture_in_the_domain_scenario_shares_ten_outputs() -> None:
    stream = streams.in_scenario(streams.mixture([small_digits(), small_digits()]), "domain")
    assert stream.num_classes == 10
    assert torch.equal(stream[1].train.labels, small_digits().train.labels)


def custom(first: list[int], second: list[int], **more: object) -> Stream:
    x = torch.rand(4, 8)
    y, z = torch.tensor(first), torch.tensor(second)
    return streams.from_arrays([(x, y, x, y), (x, z, x, z)], **more)  # type: ignore[arg-type]


def test_custom_tasks_without_named_classes_have_the_labels_found_in_them() -> None:
    stream = streams.in_scenario(custom([5, 1, 5, 1], [2, 3, 2, 3]), "class")
    assert stream.num_classes == 6
    assert [task.classes for task in stream] == [(1, 5), (2, 3)]
    assert stream[1].taught == (1, 2, 3, 5)
    places = streams.in_scenario(stream, "domain")
    assert [task.train.labels.tolist() for task in places] == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_classes_that_return_in_some_tasks_keep_their_outputs() -> None:
    stream = streams.in_scenario(custom([0, 1, 0, 1], [1, 2, 1, 2], classes=[(0, 1), (1, 2)]), "class")
    assert [task.classes for task in stream] == [(0, 1), (1, 2)]
    assert stream[1].train.labels.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_returning_labels_without_named_classes_are_refused(scenario: str) -> None:
    x = torch.rand(4, 3)
    labels = [torch.tensor(two).repeat(2) for two in ([0, 1], [1, 2], [0, 3])]
    stream = streams.from_arrays([(x, y, x, y) for y in labels])
    sentence = refusal(streams.in_scenario, stream, scenario)
    assert sentence.startswith("tasks 1 and 2 name the same classes but hold different labels")
    assert sentence.endswith("say with classes= which classes each task has")
    named = streams.from_arrays([(x, y, x, y) for y in labels], classes=[[0, 1], [1, 2], [0, 3]])
    assert streams.in_scenario(named, scenario).num_classes == 4


def test_domain_has_as_many_outputs_as_the_largest_task() -> None:
    stream = streams.in_scenario(custom([0, 1, 2, 0], [3, 4, 3, 4], classes=[(0, 1, 2), (3, 4)]), "domain")
    assert [task.classes for task in stream] == [(0, 1, 2)] * 2
    assert stream[1].train.labels.tolist() == [0, 1, 0, 1]


def test_the_order_of_a_tasks_classes_gives_their_places() -> None:
    stream = streams.in_scenario(custom([1, 0, 1, 0], [3, 2, 3, 2], classes=[(1, 0), (2, 3)]), "domain")
    assert [task.train.labels.tolist() for task in stream] == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_rows_stay_and_other_samples_do_not_matter() -> None:
    samples = Samples(torch.rand(4, 8), torch.tensor([7, 2, 3, 2]), torch.tensor([1, 2]))
    task = Task("a", samples, samples, classes=(2, 3))
    stream = streams.in_scenario(Stream((task,), 4), "domain")
    assert stream[0].train.labels.tolist() == [0, 1]
    assert stream[0].train.inputs is samples.inputs


def test_trials_share_targets_and_streams() -> None:
    digits = small_digits()
    made = [streams.imbalanced(digits, num_tasks=2, trial=trial) for trial in (0, 1)]
    one, other, same = arrange([*made, made[0]], "class", mask_training=True)
    assert one[1].train.targets is other[1].train.targets
    assert one[1].train.inputs is other[1].train.inputs
    assert same is one


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_masks_in_training_all_outputs_are_taught_and_the_evaluation_stays(scenario: str) -> None:
    config = preset("split-mnist", "si", dataset="mnist-small", scenario=scenario)
    (masked,), (open_,) = (
        build_streams(config.replace(mask_training=mask), [0], [small_digits()]) for mask in (True, False)
    )
    assert {task.taught for task in open_} == {tuple(range(masked.num_classes))}
    for learned in range(6):
        assert [candidates(open_, n, learned) for n in range(5)] == [candidates(masked, n, learned) for n in range(5)]


def test_an_unknown_scenario_is_refused_with_what_there_is() -> None:
    sentence = refusal(streams.in_scenario, streams.split(small_digits()), "clas")
    assert sentence == "there is no scenario 'clas' (did you mean class?), only task, domain, class"
    assert refusal(preset, "split-mnist", "si", scenario="clas").startswith("scenario must be task, domain or class,")
