"""Rehearsals as parts of methods: names, settings, refusals, memory, outputs, and rows of a table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_methods import CPU, config_of, tiny_stream, trained

import engram
from builders import refusal
from engram.common.registry import REHEARSALS
from engram.config.methods import all_methods, check_method, known_methods, parts_of
from engram.config.settings import Config
from engram.engine.build import build_learner
from engram.engine.rehearsal import draw, kept_by
from engram.penalties import MAS
from engram.rehearsal import Rehearsal
from engram.rehearsal.rehearsal import distillation, moment_of
from engram.rehearsal.reservoir import empty, read, read_earlier, write
from engram.report.figures.drawing import colour_of_method
from engram.report.pairs import baseline_of
from engram.report.tables import summary
from engram.sklearn import ContinualClassifier

METHODS = ("a-gem", "der++", "generative-replay", "joint", "lwf", "pseudo-rehearsal", "replay")


def test_seven_methods_are_registered_and_each_can_have_any_head() -> None:
    assert REHEARSALS.names() == METHODS
    assert {f"{head}+{name}" for head in engram.heads.list() for name in METHODS} < set(known_methods())
    assert not set(METHODS) & set(all_methods())
    assert [parts_of(f"dhp+{name}") for name in METHODS] == [("dhp", None, name) for name in METHODS]
    check_method("matched+der++")


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_those_of_the_constructor(name: str) -> None:
    made = REHEARSALS[name].make()
    declared = REHEARSALS.facts(name)["settings"]
    assert isinstance(made, Rehearsal)
    assert set(declared) <= set(made.settings)
    config = Config("split-mnist", name)
    for own, field in declared.items():
        assert made.settings[own] == getattr(config, field), own


def test_method_has_a_penalty_or_a_rehearsal_and_not_both() -> None:
    assert "there is no method 'si+replay'" in refusal(check_method, "si+replay")
    assert "there is no method 'replay+si'" in refusal(check_method, "replay+si")
    config, stream = config_of("replay"), tiny_stream("task")
    sentence = refusal(engram.run, config, stream=stream, penalty=lambda model: MAS(model, strength=1.0))
    assert sentence == "a method has a penalty or a rehearsal, and not both: a custom penalty goes with finetune"


def test_memory_of_nothing_is_refused() -> None:
    assert refusal(engram.preset, "split-mnist", "replay", memory_size=0) == "memory_size must be at least 1, not 0"
    made = REHEARSALS["replay"].make
    assert refusal(made, memory_size=0) == "a memory of stored samples must hold at least 1, not 0"


@pytest.mark.parametrize("size", [10**12, 10**30])
@pytest.mark.parametrize("name", ["a-gem", "der++", "pseudo-rehearsal", "replay"])
def test_a_memory_that_is_too_large_is_refused_in_bytes_before_it_is_made(name: str, size: int) -> None:
    config = engram.preset("split-mnist", name, dataset="mnist-small", hidden=[8], max_samples=200, memory_size=size)
    sentence = refusal(engram.run, config, device="cpu")
    assert sentence.startswith(f"a memory of {size} samples takes ")
    assert sentence.endswith(": lower memory_size")


def test_stored_outputs_count_too() -> None:
    """Of few inputs and many classes they take the most."""
    model = torch.nn.Linear(1, 1)
    sentence = refusal(REHEARSALS["der++"].make(memory_size=1000).initial_state, model, (1,), 10**9)
    assert sentence.startswith("a memory of 1000 samples takes 4,000,000,000,000 bytes")


@pytest.mark.parametrize("method", ["generative-replay", "pseudo-rehearsal"])
def test_made_up_inputs_are_as_pixels_are(method: str) -> None:
    inputs, labels = torch.linspace(-1, 3, 40).reshape(10, 4), torch.arange(10) % 2
    stream = engram.streams.from_arrays([(inputs, labels, inputs, labels)])
    sentence = refusal(engram.run, config_of(method, num_tasks=1), stream=stream)
    assert sentence == (f"{method} needs inputs in [0, 1], as pixels are, and those of task 'task 1' go from -1 to 3")


def test_numbers_depend_on_the_position_alone() -> None:
    shapes = {"read": (3,), "write": (2, 2)}
    numbers = draw(shapes, 0, 1, 2, 3, 4)
    again = draw(shapes, 0, 1, 2, 3, 4)
    assert {name: tuple(tensor.shape) for name, tensor in numbers.items()} == shapes
    for name, tensor in numbers.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, draw(shapes, 0, 1, 2, 3, 5)[name])


def test_reservoir_is_a_uniform_choice_of_all_samples() -> None:
    generator, size, offered, kept = torch.Generator().manual_seed(0), 5, 40, torch.zeros(40)
    for _ in range(800):
        state = empty(size, (1,), torch.zeros(()))
        for start in range(0, offered, 8):
            numbers = torch.arange(start, start + 8)
            rows = {"inputs": numbers[:, None].float(), "targets": numbers, "tasks": numbers // 8}
            state = write(state, rows, torch.rand(8, generator=generator, dtype=torch.float64))
        found = state["targets"][:size]
        assert len(found.unique()) == size
        assert torch.equal(state["inputs"][:size, 0].long(), found)
        kept[found] += 1
    expected = 800 * size / offered
    assert float((kept - expected).abs().max()) < 5 * (expected * (1 - size / offered)) ** 0.5
    assert int(read(state, torch.tensor([0.999999])).max()) < size
    rows, any_earlier = read_earlier(state, torch.tensor([0.0, 0.999]), n=2)
    assert not any_earlier or (state["tasks"][rows] < 2).all()


def test_outputs_of_earlier_samples_follow_the_scenario() -> None:
    own = moment_of([(0, 1), (2, 3), (4, 5)], 2, 6, CPU)
    assert own.allowed.int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert len(own.groups) == 2
    seen = moment_of([(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)], 2, 6, CPU)
    assert seen.allowed.int().tolist() == [[1] * 6] * 3
    ((now, then),) = seen.groups
    assert now.all()
    assert then.int().tolist() == [1, 1, 1, 1, 0, 0]


def test_distillation_is_least_where_the_model_equals_the_teacher() -> None:
    teacher = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(6, dtype=torch.bool)
    logits = teacher.clone().requires_grad_()
    loss = distillation(logits, teacher, (everything, everything), 2.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_memory_is_stated_in_samples_and_bytes() -> None:
    stream = tiny_stream("task")
    kept = {}
    for method in METHODS:
        learner = build_learner(config_of(method), 0, stream.input_shape, stream.num_classes, CPU, torch.float64)
        kept[method] = kept_by(learner, stream)
    assert kept["replay"] == kept["a-gem"] == (9, 9 * (6 * 8 + 8 + 8))
    assert kept["der++"] == (9, 9 * (6 * 8 + 8 + 8 + 6 * 8))
    assert kept["pseudo-rehearsal"] == (0, 9 * (6 + 6) * 8)
    weights = 8 * ((6 * 5 + 5) + 2 * 5 * 6)  # a hidden layer and a matched head
    assert kept["lwf"] == (0, weights)
    samples = len(stream[0].train) + len(stream[1].train)
    assert kept["joint"] == (samples, weights + samples * (6 * stream[0].train.inputs.element_size() + 8))
    assert kept_by(trained(config_of("finetune"), stream)[0], stream) is None


def test_all_methods_of_a_trial_start_with_the_same_weights() -> None:
    stream = tiny_stream("task")
    facts = (stream.input_shape, stream.num_classes, CPU, torch.float64)
    first = build_learner(config_of("finetune"), 0, *facts).model.state_dict()
    for method in METHODS:
        state = build_learner(config_of(method), 0, *facts).model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in first.items()), method


def test_reference_methods_are_rows_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engram.cli.main import main
    from engram.runs.run import read_run

    options = "--dataset mnist-small --scenario class --trials 1 --epochs 1 --tasks 2 --device cpu"
    settings = "--set max_samples=200 --set hidden=[8]"
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(f"run split-mnist --methods joint,replay,lwf {options} {settings} --out {folder}".split())
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    results = read_run(folder).results
    assert list(results) == ["joint", "replay", "lwf"]
    assert "replay keeps 200 samples of earlier tasks, 630,400 bytes in all" in printed
    assert "s of training in task 2 (mean of 1 trials)" in (folder / "log.txt").read_text()
    table = summary(results)
    assert [row[0] for row in table.rows] == ["joint", "replay", "lwf"]
    assert any(note.startswith("Kept between tasks, at most: joint 47 samples") for note in table.notes), table.notes
    assert all("kept" in entry for entry in json.loads((folder / "results.json").read_text())["results"])


def test_classifier_refuses_a_rehearsal() -> None:
    X, y = np.random.default_rng(0).uniform(size=(20, 4)), np.arange(20) % 2
    sentence = refusal(ContinualClassifier(method="replay").fit, X, y)
    assert sentence == "ContinualClassifier stores no samples of old tasks: replay is a method of engram.run"


def test_head_is_compared_with_the_same_rehearsal_without_it() -> None:
    assert baseline_of("dhp+replay") == "replay"
    assert baseline_of("dhp+der++") == "der++"
    assert colour_of_method("replay") != colour_of_method("finetune")
