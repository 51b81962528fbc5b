"""The training loop and evaluation, on artificial data and on real digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import engram
from builders import run_on, small_digits
from engram import NoPenalty, preset, streams
from engram.config.methods import all_methods
from engram.config.settings import Config
from engram.data.batches import batches_of
from engram.data.samples import Dataset
from engram.data.sources import load
from engram.engine import in_process
from engram.engine.build import build_learner, build_model, build_penalty, build_streams
from engram.engine.cpu.program import OneByOne
from engram.engine.learner import Learner, Outcome, Progress
from engram.engine.loop import run_stream, train_task
from engram.engine.program import Batches, accuracy
from engram.engine.training import Runtime
from engram.nn.classes import mask_logits
from engram.report.tables import summary

ON_CPU = Runtime("cpu")


def two_blobs(num_tasks: int = 3, per_class: int = 40) -> streams.Stream:
    """Two well separated classes a task, elsewhere in each task."""
    random = np.random.default_rng(0)

    def samples() -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(2 * per_class) % 2
        return random.normal(size=(2 * per_class, 4)) * 0.1, labels

    tasks = []
    for n in range(num_tasks):
        (x, y), (tx, ty) = samples(), samples()
        centres = random.normal(size=(2, 4))
        tasks.append((x + centres[y], y + 2 * n, tx + centres[ty], ty + 2 * n))
    return streams.from_arrays(tasks, classes=[(2 * n, 2 * n + 1) for n in range(num_tasks)])


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("mnist-small")


def make_learner(config: Config, stream: streams.Stream, trial: int = 0) -> Learner:
    return build_learner(config, trial, stream.input_shape, stream.num_classes, torch.device("cpu"), torch.float32)


def learn(learners: list[Learner], stream: streams.Stream) -> list[Outcome]:
    """Take learners of one trial through a stream."""
    config = learners[0].config
    batches = Batches([learners[0].trial], [stream], config.seed, torch.float32)
    run_stream(OneByOne(learners, batches), batches, config)
    return [learner.outcome for learner in learners]


class Constant(nn.Module):
    """Answers with fixed logits."""

    def __init__(self, logits: list[float]):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(inputs), -1)


def test_accuracy_is_of_the_largest_logit_of_the_task() -> None:
    stream = two_blobs(num_tasks=2)
    assert accuracy(Constant([0.0, 1.0, 5.0, 9.0]), stream[0]) == 0.5
    always_first = Constant([1.0, 0.0, 9.0, 9.0])
    labels = stream[0].test.targets
    assert accuracy(always_first, stream[0]) == (labels == 0).float().mean().item()


def test_evaluation_changes_neither_mode_nor_trace_nor_statistics() -> None:
    model = engram.nn.networks.Network(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), engram.DHPSoftmax(5, 6))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for task in two_blobs():
        accuracy(model, task)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_model_in_evaluation_mode_stays_in_it() -> None:
    model = Constant([0.0] * 6).eval()
    accuracy(model, two_blobs()[0])
    assert not model.training


def test_mask_made_in_inference_mode_can_be_used_in_training() -> None:
    logits = torch.randn(2, 7, requires_grad=True)
    with torch.inference_mode():
        mask_logits(logits, (0, 5))
    mask_logits(logits, (0, 5)).softmax(dim=1)[:, 0].sum().backward()
    assert logits.grad is not None


def test_samples_are_shuffled_anew_in_every_epoch() -> None:
    seen = []

    class Watching(NoPenalty):
        def after_step(self) -> None:
            seen.append(self.model.last)

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            self.last = inputs[0].tolist()
            return self.layer(inputs)

    config = preset("custom", "finetune", epochs=2, batch_size=8, num_tasks=1)
    model = Remembering()
    batches = Batches([0], [two_blobs(num_tasks=3)], config.seed, torch.float32)
    program = OneByOne([Learner(config, 0, model, Watching(model))], batches)
    train_task(program, batches, config)
    assert len(seen) == 20
    assert seen[:10] != seen[10:]


def test_importances_use_only_the_outputs_of_the_task() -> None:
    stream = two_blobs()
    for method in ("mas", "ewc"):
        config = preset("custom", method, strength=1.0, epochs=1, hidden=[8])
        learner = make_learner(config, stream)
        program = OneByOne([learner], Batches([0], [stream], config.seed, torch.float32))
        assert program.consolidate(1).all()
        importance = learner.penalty.terms[0].importance["head.weight"]
        assert (importance[2:4] > 0).any()
        assert torch.equal(importance[[0, 1, 4, 5]], torch.zeros(4, 8))


def test_each_trial_samples_different_labels() -> None:
    config = preset("split-mnist", "ewc", fisher_labels="sampled")
    model = build_model(config, 0, (1, 28, 28), 10)
    assert build_penalty(config, 0, model).seed != build_penalty(config, 1, model).seed


def test_masked_logits_get_no_probability_and_no_gradient() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    p = mask_logits(logits, (1, 3)).softmax(dim=1)
    assert torch.equal(p[:, [0, 2]], torch.zeros(3, 2))
    torch.testing.assert_close(p[:, [1, 3]], logits[:, [1, 3]].softmax(dim=1))
    p[:, 1].sum().backward()
    assert torch.equal(logits.grad[:, [0, 2]], torch.zeros(3, 2))
    assert mask_logits(logits, None) is logits


@pytest.mark.parametrize("penalty_step", ["gradient", "proximal"])
@pytest.mark.parametrize("method", all_methods())
def test_every_method_learns_every_task(method: str, penalty_step: str) -> None:
    config = preset("split-mnist", method, num_tasks=3, hidden=[16], epochs=15, batch_size=8, learning_rate=0.1)
    config = config.replace(penalty_step=penalty_step, strength=config.penalty and 0.01)
    stream = two_blobs()
    (outcome,) = learn([make_learner(config, stream)], stream)
    assert outcome.diverged is None
    assert [len(row) for row in outcome.rows] == [2, 3, 3], "each task so far, and the next one for forward transfer"
    assert all(row[n] > 0.95 for n, row in enumerate(outcome.rows))
    steps = [record.step for record in outcome.records if record.task == 1]
    assert steps[-1] + 1 == 15 * 10
    assert steps == sorted(steps)
    plastic = [record.eta for record in outcome.records]
    assert np.isfinite(plastic).all() if config.plastic else np.isnan(plastic).all()


def test_trial_is_the_same_alone_or_among_others(digits) -> None:
    small = small_digits(600, 200)
    config = preset("permuted-mnist", "dhp+si", dataset="mnist-small", num_tasks=2, epochs=1, hidden=[20], trials=3)
    (together,) = run_on([config], [small], ON_CPU)
    alone = []
    for trial in (2, 0, 1):
        (stream,) = build_streams(config, [trial], [small])
        alone.append((trial, *learn([make_learner(config, stream, trial)], stream)))
    (one,) = run_on([config.replace(first_trial=2, trials=1)], [small], ON_CPU)
    assert np.array_equal(one.accuracy[0], together.accuracy[2], equal_nan=True)
    assert one.dynamics == [row for row in together.dynamics if row["trial"] == 2]
    for trial, outcome in alone:
        assert outcome.untrained == together.untrained[trial].tolist()
        for i, row in enumerate(outcome.rows):
            assert together.accuracy[trial, i, : len(row)].tolist() == row
        own = [row for row in together.dynamics if row["trial"] == trial]
        assert [record.loss for record in outcome.records] == [row["loss"] for row in own]


def test_same_config_gives_the_same_result_and_another_seed_another(digits) -> None:
    small = small_digits(600, 200)
    config = preset("split-mnist", "dhp+mas", dataset="mnist-small", num_tasks=2, epochs=1, hidden=[20], trials=2)
    first, second = (run_on([config], [small], ON_CPU)[0] for _ in range(2))
    assert np.array_equal(first.accuracy, second.accuracy, equal_nan=True)
    assert first.dynamics == second.dynamics
    assert first.dynamics != run_on([config.replace(seed=1)], [small], ON_CPU)[0].dynamics


def test_finetune_forgets_and_consolidation_does_not(digits) -> None:
    """The point of it all, on real digits: with consolidation the first task is still known after the last."""
    config = preset(
        "permuted-mnist", "finetune", dataset="mnist-small", num_tasks=3, epochs=2, batch_size=10,
        hidden=[50], trials=2, learning_rate=0.05,
    )  # fmt: skip
    small = small_digits(3000, 200)
    free, held = run_on([config, config.replace(method="online-ewc", strength=100.0)], [small], ON_CPU)
    assert free.latest_task[:, -1].min() > 0.75
    assert free.bwt.mean() < -0.04
    assert held.bwt.mean() > free.bwt.mean() + 0.03
    assert (held.first_task[:, -1] > free.first_task[:, -1]).all()


def test_outcomes_in_progress_are_those_of_the_tasks_so_far(digits) -> None:
    rows: list[list[list[float]]] = []

    def record(progress: Progress) -> None:
        if progress.task_ended:
            rows.append([list(row) for row in progress.outcomes["finetune", 0].rows])

    config = preset("split-mnist", "finetune", dataset="mnist-small", num_tasks=2, epochs=2, hidden=[8], trials=1)
    (result,) = run_on([config], [small_digits(600, 200)], ON_CPU, record)
    assert [len(found) for found in rows] == [1, 2]
    assert rows[0] == rows[1][:1] == [result.accuracy[0, 0].tolist()]
    assert rows[1][1] == result.accuracy[0, 1].tolist()


def test_diverged_trial_is_marked_and_keeps_what_it_learned_before() -> None:
    stream = two_blobs()
    config = preset("split-mnist", "dhp", num_tasks=3, hidden=[8], epochs=2, batch_size=8, learning_rate=0.1)
    learner, neighbour, alone = (make_learner(config, stream) for _ in range(3))

    class Breaking(NoPenalty):
        """Ruins the weights at the third step of the second task."""

        steps = 0

        def after_step(self) -> None:
            self.steps += 1
            if self.steps == 20 + 3:
                with torch.no_grad():
                    learner.model.features[1].weight.fill_(float("nan"))

    learner.penalty = Breaking(learner.model)
    outcome, of_neighbour = learn([learner, neighbour], stream)
    assert outcome.diverged is not None
    assert (outcome.diverged.task, outcome.diverged.step) == (1, 3), "the fourth step is the first that sees it"
    assert str(outcome.diverged) == "trial 1 diverged in task 2, step 4: its loss became NaN or infinite"
    assert len(outcome.rows) == 1
    assert of_neighbour == learn([alone], stream)[0], "the neighbour was not disturbed"
    assert len(of_neighbour.rows) == 3
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(neighbour.model.state_dict()[name], tensor)


@pytest.mark.parametrize("method", ["finetune", "dhp", "dhp+si", "dhp+ewc"])
def test_overflow_in_the_last_step_of_a_task_is_a_divergence(method: str) -> None:
    stream = two_blobs(num_tasks=3)
    config = preset("custom", method, strength=1.0 if "+" in method else None, hidden=[8], epochs=1, batch_size=80)
    learner = make_learner(config, stream)

    def overflow() -> None:
        with torch.no_grad():
            learner.model.features[1].weight.fill_(float("inf"))

    learner.penalty.after_step = overflow  # after the only step of the first task
    (outcome,) = learn([learner], stream)
    assert outcome.diverged is not None
    assert (outcome.diverged.task, outcome.diverged.step) == (0, 0)
    assert outcome.rows == []


def test_frozen_layer_stays_frozen_after_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).train()
    model[1].eval()
    accuracy(model, two_blobs()[0])
    assert (model.training, model[1].training) == (True, False)


@pytest.mark.parametrize("method", ["finetune", "dhp", "dhp+mas", "si"])
def test_diverged_run_ends_with_a_mark_and_nan(digits, method: str) -> None:
    config = preset(
        "split-mnist", method, dataset="mnist-small", num_tasks=2, epochs=1, hidden=[8], trials=2, learning_rate=1e18
    )
    (result,) = run_on([config], [small_digits(600, 200)], ON_CPU)
    assert [(d.trial, d.task) for d in result.diverged] == [(0, 0), (1, 0)]
    assert "trial 2 diverged in task 1, step " in str(result.diverged[1])
    assert np.isnan(result.accuracy).all()
    assert np.isfinite(result.untrained).all()


def test_run_finds_the_embedded_digits() -> None:
    config = preset("split-mnist", "dhp", dataset="mnist-small", num_tasks=1, epochs=1, hidden=[8], trials=1)
    result = engram.run(config)
    assert result.accuracy.shape == (1, 1, 1)
    assert result.average_accuracy[0, -1] > 0.5
    assert result.data == [{"name": "mnist-small", "origin": "published", "train": 10_000, "test": 2_000}]


@pytest.mark.parametrize("method", ["dhp+si", "online-ewc"])
def test_custom_stream_can_be_learned_and_saved(method: str, tmp_path) -> None:
    config = preset("custom", method, strength=0.01, hidden=[16], epochs=15, batch_size=8, learning_rate=0.1, trials=2)
    result = engram.run(config, stream=two_blobs())
    assert result.accuracy.shape == (2, 3, 3)
    assert result.config.num_tasks == 3
    assert result.latest_task.min() > 0.95
    assert result.data == [{"name": "custom", "origin": "custom", "train": 240, "test": 240}]
    result.save(tmp_path / "custom")
    again = engram.Result.load(tmp_path / "custom")
    assert np.array_equal(again.accuracy, result.accuracy, equal_nan=True)
    assert summary({"dhp": again}).title == "custom on custom, 3 tasks, 2 trials"


def test_stream_is_needed_by_the_custom_benchmark_alone() -> None:
    with pytest.raises(engram.InputError, match="benchmark 'custom'"):
        engram.run(preset("custom", "dhp"))
    with pytest.raises(engram.InputError, match="benchmark 'custom'"):
        engram.run(preset("split-mnist", "dhp"), stream=two_blobs())
    with pytest.raises(engram.InputError, match="strength"):
        preset("custom", "mas")


def test_network_that_does_not_fit_the_inputs_is_refused() -> None:
    with pytest.raises(engram.InputError, match="square images"):
        engram.run(preset("custom", "finetune", network="cnn"), stream=two_blobs())
    with pytest.raises(engram.InputError, match=r"hidden \(10000000000000,\) has more than"):
        engram.run(preset("custom", "finetune", hidden=[10**13]), stream=two_blobs())


@pytest.mark.parametrize("method", ["scaled", "scaled+si", "scaled+replay"])
def test_a_scaled_head_starts_at_its_size_in_a_run_before_anything_is_protected(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The penalty measures how far weights have moved since the start, so the start must be the scaled one."""
    seen = {}
    choose = in_process.choose_program

    def spy(learners: list[Learner], batches: Batches, device: torch.device) -> object:
        for learner in learners:
            inputs = next(batches_of(batches.streams[0][0].train, 256))[0]
            logits = learner.model.eval()(inputs).detach()
            starts = learner.penalty.group("start") if "si" in method else {}
            seen[learner.trial] = (logits, learner.model.head.weight.detach().clone(), starts.get("head.weight"))
        return choose(learners, batches, device)

    monkeypatch.setattr(in_process, "choose_program", spy)
    config = preset("custom", method, epochs=1, trials=2, hidden=[8], batch_size=16)
    engram.run(config, stream=two_blobs(), device="cpu", progress=False)
    assert len(seen) == 2
    for logits, weight, start in seen.values():
        assert float(logits.square().mean().sqrt()) == pytest.approx(0.25, rel=1e-5)
        assert start is None or torch.equal(start, weight)
