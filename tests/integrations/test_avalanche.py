"""Engram's plugins inside Avalanche's own strategies take the steps of a loop that is written out here."""

from __future__ import annotations

import copy
import pickle
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from avalanche_lib import IS_INSTALLED, REASON, import_avalanche
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import engram
from engram.nn.classes import mask_logits

if not IS_INSTALLED:
    pytest.skip(REASON, allow_module_level=True)
import_avalanche()

import dill  # noqa: E402
from avalanche.benchmarks import nc_benchmark, split_online_stream  # noqa: E402
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint  # noqa: E402
from avalanche.evaluation.metrics import accuracy_metrics  # noqa: E402
from avalanche.models import IncrementalClassifier, MultiHeadClassifier  # noqa: E402
from avalanche.training.plugins import (  # noqa: E402
    AGEMPlugin,
    EvaluationPlugin,
    EWCPlugin,
    LwFPlugin,
    MASPlugin,
    MIRPlugin,
    ReplayPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.supervised import DER, ER_ACE, LwF, Naive  # noqa: E402

from engram.integrations.avalanche import OwnClassesPlugin, PenaltyPlugin, TracePlugin, as_benchmark, own_classes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:No loggers specified")
ROOT = Path(__file__).parents[2]
WIDTH, CLASSES, BATCH, RATE = 5, 6, 8, 0.1
PENALTIES: dict[str, tuple[Callable[..., engram.Penalty], dict[str, Any]]] = {
    "ewc": (engram.EWC, {"strength": 30.0}),
    "online-ewc": (engram.OnlineEWC, {"strength": 30.0, "gamma": 0.9}),
    "si": (engram.SI, {"strength": 2.0}),
    "mas": (engram.MAS, {"strength": 2.0}),
}


def make_stream(num_tasks: int = 3, split: bool = False) -> engram.streams.Stream:
    random = torch.Generator().manual_seed(1)
    classes = [(2 * n, 2 * n + 1) if split else tuple(range(CLASSES)) for n in range(num_tasks)]

    def samples(n: int, count: int) -> tuple[Tensor, Tensor]:
        targets = torch.tensor(classes[n])[torch.arange(count) % len(classes[n])]
        return torch.randn(count, WIDTH, generator=random) + targets[:, None] * torch.sin(
            torch.arange(WIDTH) + n
        ), targets

    return engram.streams.from_arrays(
        [(*samples(n, 30), *samples(n, 12)) for n in range(num_tasks)], classes=classes, num_classes=CLASSES
    )


def make_model(head: str = "dhp") -> nn.Sequential:
    torch.manual_seed(3)
    made: nn.Module = engram.DHPSoftmax(7, CLASSES, eta=0.1) if head == "dhp" else nn.Linear(7, CLASSES)
    return nn.Sequential(InDoubles(), nn.Linear(WIDTH, 7), nn.ReLU(), made).double()


class InDoubles(nn.Module):
    """Inputs as doubles, in which two ways of taking the same steps agree to many digits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()


def make_strategy(model: nn.Module, *plugins: Any, kind: Any = Naive, rate: float = RATE, **options: Any) -> Any:
    settings = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=rate),
        "criterion": nn.CrossEntropyLoss(),
        "train_mb_size": BATCH,
        "eval_mb_size": 5,
        "plugins": list(plugins),
        "evaluator": EvaluationPlugin(accuracy_metrics(experience=True)),
    }
    return kind(**(settings | options))


def classic_benchmark() -> Any:
    """Two classes an experience, with task labels, as Avalanche's own benchmarks are made."""

    def dataset(part: str) -> TensorDataset:
        samples = [getattr(task, part) for task in make_stream(split=True)]
        made = TensorDataset(torch.cat([s.inputs for s in samples]), torch.cat([s.targets for s in samples]))
        made.targets = made.tensors[1].tolist()
        return made

    return nc_benchmark(
        dataset("train"), dataset("test"), n_experiences=3, task_labels=True, fixed_class_order=list(range(CLASSES))
    )


def batches(task: engram.streams.Task) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(task.train.inputs.split(BATCH), task.train.targets.split(BATCH), strict=True)


def plain_loop(
    model: nn.Sequential,
    stream: engram.streams.Stream,
    penalty: engram.Penalty,
    step: str = "proximal",
    epochs: int = 2,
    masked: bool = False,
) -> None:
    """What the plugins must compute: Engram in a hand-written loop."""
    *features, head = model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for task in stream:
        classes = task.classes if masked else None
        for _ in range(epochs):
            for inputs, targets in batches(task):
                hidden = nn.Sequential(*features)(inputs)
                logits = head(hidden, targets) if isinstance(head, engram.DHPSoftmax) else head(hidden)
                loss = cross_entropy(mask_logits(logits, classes), targets)
                if step == "gradient":
                    loss = loss + penalty.loss()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step == "proximal":
                    penalty.proximal_step(RATE)
                penalty.after_step()
        penalty.consolidate(batches(task), classes)


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def train(strategy: Any, benchmark: Any, **options: Any) -> None:
    for experience in benchmark.train_stream:
        strategy.train(experience, shuffle=False, **options)


# --- the same steps


@pytest.mark.parametrize("head", ["dhp", "linear"])
@pytest.mark.parametrize("step", ["proximal", "gradient"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_strategy_takes_the_steps_of_a_plain_loop(name: str, step: str, head: str) -> None:
    kind, settings = PENALTIES[name]
    stream, ours, theirs = make_stream(), make_model(head), make_model(head)
    penalty = kind(ours, **settings)
    plain_loop(ours, stream, penalty, step)
    plugin = PenaltyPlugin(kind, penalty_step=step, **settings)
    plugins = [TracePlugin(), plugin] if head == "dhp" else [plugin]
    train(make_strategy(theirs, *plugins, train_epochs=2), as_benchmark(stream))
    assert_close(ours, theirs)
    assert plugin.penalty is not None
    state = plugin.penalty.state_dict()
    assert state.keys() == penalty.state_dict().keys()
    for key, value in penalty.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-12)
    assert max(float(omega.max()) for term in penalty.terms for omega in term.importance.values()) > 0


@pytest.mark.parametrize("called", ["positionally", "by name"])
def test_head_inside_a_model_that_passes_targets_gets_them(called: str) -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
            hidden = self.layers[:-1](inputs)
            return (
                self.layers[-1](hidden, target) if called == "positionally" else self.layers[-1](hidden, target=target)
            )

    stream, ours, theirs = make_stream(), make_model(), Passing()
    plain_loop(ours, stream, engram.NoPenalty(ours))
    train(make_strategy(theirs, TracePlugin(), PenaltyPlugin(engram.NoPenalty), train_epochs=2), as_benchmark(stream))
    assert_close(ours, theirs.layers)


@pytest.mark.parametrize("name", ["online-ewc", "mas"])
def test_only_classes_of_the_experience_are_trained(name: str) -> None:
    kind, settings = PENALTIES[name]
    stream, ours, theirs = make_stream(split=True), make_model(), make_model()
    plain_loop(ours, stream, kind(ours, **settings), masked=True)
    benchmark = as_benchmark(stream)
    strategy = make_strategy(theirs, TracePlugin(), OwnClassesPlugin(), PenaltyPlugin(kind, **settings), train_epochs=2)
    train(strategy, benchmark)
    assert_close(ours, theirs)
    found = strategy.eval(benchmark.test_stream)
    for n, task in enumerate(stream):
        logits = mask_logits(ours.eval()(task.test.inputs), task.classes)
        accuracy = (logits.argmax(dim=1) == task.test.targets).double().mean().item()
        assert found[f"Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp{n:03}"] == pytest.approx(accuracy)


def test_an_online_stream_is_consolidated_once_a_task() -> None:
    stream, ours, theirs = make_stream(), make_model(), make_model()
    plain_loop(ours, stream, engram.EWC(ours, strength=3), epochs=1)
    benchmark = as_benchmark(stream)
    plugin = PenaltyPlugin(engram.EWC, strength=3)
    strategy = make_strategy(theirs, TracePlugin(), plugin, train_epochs=1)
    for experience in benchmark.train_stream:
        pieces = split_online_stream([experience], BATCH, shuffle=False, access_task_boundaries=True)
        for piece in pieces:
            strategy.train(piece, shuffle=False)
    assert plugin.penalty is not None
    assert len(plugin.penalty.terms) == len(stream)
    assert_close(ours, theirs)
    with pytest.raises(engram.InputError, match="access_task_boundaries=True"):
        strategy.train(next(iter(split_online_stream([benchmark.train_stream[0]], BATCH))))


# --- when the trace is written


def test_evaluation_leaves_everything_as_it_was() -> None:
    stream = make_stream()
    benchmark, model = as_benchmark(stream), make_model()
    plugin = PenaltyPlugin(engram.SI, strength=1)
    strategy = make_strategy(model, TracePlugin(), plugin)
    strategy.train(benchmark.train_stream[0])
    before = copy.deepcopy(model.state_dict())
    assert plugin.penalty is not None
    kept = plugin.penalty.state_dict()
    assert before["3.hebb"].abs().sum() > 0
    strategy.eval(benchmark.test_stream)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(torch.equal(value, plugin.penalty.state_dict()[name]) for name, value in kept.items())


def test_evaluation_amid_training_changes_nothing() -> None:
    """The strategy's modes and batches come back, and the trace continues where it was."""
    stream, ours, theirs = make_stream(), make_model(), make_model()
    plain_loop(ours, stream, engram.MAS(ours, strength=2))
    benchmark = as_benchmark(stream)
    often = {"eval_every": 1, "peval_mode": "iteration", "train_epochs": 2}
    strategy = make_strategy(theirs, TracePlugin(), PenaltyPlugin(engram.MAS, strength=2), **often)
    train(strategy, benchmark, eval_streams=[benchmark.test_stream])
    assert_close(ours, theirs)


def written(model: nn.Sequential) -> list[Tensor]:
    """The targets with which the trace is written from now on."""
    head, seen = model[-1], []
    write = head._write_then_read
    head._write_then_read = lambda hidden, target: (seen.append(target), write(hidden, target))[1]
    return seen


@pytest.mark.parametrize(
    ("kind", "plugin"),
    [
        (Naive, lambda: ReplayPlugin(mem_size=20)),
        (Naive, lambda: LwFPlugin()),
        (Naive, lambda: AGEMPlugin(patterns_per_experience=10, sample_size=5)),
        (Naive, lambda: MIRPlugin(batch_size_mem=4, mem_size=20, subsample=8)),
        (Naive, lambda: EWCPlugin(ewc_lambda=1.0)),
        (Naive, lambda: MASPlugin()),
        (Naive, lambda: SynapticIntelligencePlugin(si_lambda=0.1)),
        (ER_ACE, None),
    ],
    ids=["replay", "lwf", "a-gem", "mir", "ewc", "mas", "si", "er-ace"],
)
def test_a_step_writes_once_with_its_own_targets_whatever_else_calls_the_model(kind: Any, plugin: Any) -> None:
    model, benchmark = make_model()[1:].float(), classic_benchmark()
    seen = written(model)
    steps = TargetsOfSteps()
    options = {"kind": ER_ACE, "mem_size": 20, "batch_size_mem": 4} if kind is ER_ACE else {"kind": kind}
    others = [] if plugin is None else [plugin()]
    strategy = make_strategy(model, TracePlugin(), *others, steps, **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    assert len(steps.targets) >= 12
    assert len(seen) == len(steps.targets)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, steps.targets, strict=True))


class TargetsOfSteps(TracePlugin.__mro__[1]):  # type: ignore[misc]  # Avalanche's SupervisedPlugin
    """What each of the strategy's forward passes had as its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Tensor] = []

    def after_forward(self, strategy: Any, **options: Any) -> None:
        self.targets.append(strategy.mb_y)


def test_targets_are_never_stale() -> None:
    """A forward pass that failed leaves targets behind that nobody used; nothing may be written with them."""
    model, benchmark = make_model(), as_benchmark(make_stream())
    plugin = TracePlugin()
    strategy = make_strategy(model, plugin)

    def run_out(*parts: Any) -> None:
        raise RuntimeError("out of memory")

    broken = model[1].register_forward_hook(run_out)
    with pytest.raises(RuntimeError, match="out of memory"):
        strategy.train(benchmark.train_stream[0])
    broken.remove()
    strategy.eval(benchmark.test_stream)
    model.train()(torch.randn(BATCH, WIDTH))
    assert model[-1].hebb.abs().sum() == 0
    strategy.train(benchmark.train_stream[0])
    assert model[-1].hebb.abs().sum() > 0
    with pytest.raises(engram.InputError, match="needs the batch's targets"):
        model.train()(torch.randn(BATCH, WIDTH))


# --- keeping a strategy


def test_strategy_resumes_from_avalanches_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By itself dill writes the optimizer's classes whole, and fails at that with recent releases of typing_extensions.
    monkeypatch.setitem(dill.settings, "byref", True)
    stream, benchmark = make_stream(), as_benchmark(make_stream())

    def begin() -> Any:
        return make_strategy(make_model(), TracePlugin(), PenaltyPlugin(engram.SI, strength=2), train_epochs=2)

    kept = begin()
    kept.train(benchmark.train_stream[0], shuffle=False)
    save_checkpoint(kept, tmp_path / "kept.pkl")
    resumed, done = maybe_load_checkpoint(begin(), tmp_path / "kept.pkl")
    assert done == 1
    for experience in benchmark.train_stream[done:]:
        resumed.train(experience, shuffle=False)
    ours = make_model()
    plain_loop(ours, stream, engram.SI(ours, strength=2))
    assert_close(ours, resumed.model)


def test_pickled_strategy_continues() -> None:
    stream, benchmark, ours = make_stream(), as_benchmark(make_stream()), make_model()
    strategy = make_strategy(make_model(), TracePlugin(), PenaltyPlugin(engram.OnlineEWC, strength=3), train_epochs=2)
    for experience in benchmark.train_stream:
        strategy.train(experience, shuffle=False)
        strategy = pickle.loads(pickle.dumps(strategy))
    plain_loop(ours, stream, engram.OnlineEWC(ours, strength=3))
    assert_close(ours, strategy.model)


# --- benchmarks


def test_a_stream_becomes_a_benchmark_with_the_same_inputs() -> None:
    dataset = engram.streams.permuted("mnist-small", num_tasks=2)
    benchmark = as_benchmark(engram.streams.Stream(tuple(dataset), dataset.num_classes))
    inputs, target, label = benchmark.train_stream[1].dataset[3]
    task = dataset[1]
    expected = (task.train.inputs[3].double() / 255).flatten()[task.permutation].view(1, 28, 28)
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=1e-6)
    assert (target, label) == (task.train.targets[3], 0)
    assert [experience.task_label for experience in benchmark.test_stream] == [0, 0]
    assert own_classes(as_benchmark(make_stream(split=True)).test_stream[1]) == (2, 3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(LwF, {"alpha": 1.0, "temperature": 2.0}), (DER, {"mem_size": 20, "batch_size_mem": 4})],
    ids=["lwf", "der"],
)
def test_strategies_that_ask_for_task_labels_have_them(kind: Any, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, CLASSES))
    benchmark = as_benchmark(make_stream(split=True))
    strategy = make_strategy(model, PenaltyPlugin(engram.SI, strength=1), kind=kind, **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    assert len(strategy.eval(benchmark.test_stream)) == 3


@pytest.mark.parametrize("kind", [engram.EWC, engram.OnlineEWC, engram.SI, engram.MAS])
def test_a_penalty_follows_a_classifier_that_grows(kind: type) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 7), IncrementalClassifier(7, 2, masking=False))
    strategy = make_strategy(model, PenaltyPlugin(kind, strength=1))
    benchmark = as_benchmark(make_stream(split=True))
    strategy.train(benchmark.train_stream[0])
    (penalty,) = [plugin.penalty for plugin in strategy.plugins if isinstance(plugin, PenaltyPlugin)]
    before = penalty.terms[0].importance["1.classifier.weight"].clone()
    num_before = len(before)
    strategy.train(benchmark.train_stream[1])
    after = penalty.terms[0].importance["1.classifier.weight"]
    assert len(after) > num_before
    if kind is engram.EWC:  # whose first term is of the first task alone
        assert torch.equal(after[:num_before], before)
    assert (after[:num_before] >= before).all()
    assert torch.isfinite(model(torch.randn(3, WIDTH))).all()


# --- what cannot be


def test_replaced_model_is_refused() -> None:
    strategy = make_strategy(make_model("linear"), PenaltyPlugin(engram.MAS, strength=1))
    benchmark = as_benchmark(make_stream(split=True))
    strategy.train(benchmark.train_stream[0])
    strategy.model = make_model("linear")
    with pytest.raises(engram.InputError, match="is not a weight that MAS was built for"):
        strategy.train(benchmark.train_stream[1])


def test_each_parameter_group_has_its_rate() -> None:
    """With a rate of 0 in one group, the proximal step leaves that group where it is."""
    model = make_model("linear")
    groups = [{"params": model[1].parameters(), "lr": 0.0}, {"params": model[-1].parameters(), "lr": 0.2}]
    strategy = make_strategy(model, PenaltyPlugin(engram.SI, strength=1), optimizer=torch.optim.SGD(groups))
    still, moved = model[1].weight.clone(), model[-1].weight.clone()
    for experience in classic_benchmark().train_stream[:2]:
        strategy.train(experience)
    assert torch.equal(model[1].weight, still)
    assert not torch.equal(model[-1].weight, moved)


def test_misuse_is_refused_in_one_sentence() -> None:
    benchmark = classic_benchmark()
    first, second = benchmark.train_stream[:2]
    with pytest.raises(engram.InputError, match="needs a DHPSoftmax"):
        make_strategy(make_model("linear"), TracePlugin()).train(first)
    with pytest.raises(engram.InputError, match="needs the batch's targets"):
        make_strategy(make_model()).train(first)
    with pytest.raises(engram.InputError, match="there is no penalty_step 'loss'"):
        PenaltyPlugin(engram.SI, penalty_step="loss", strength=1)
    with pytest.raises(engram.InputError, match="MultiHeadClassifier takes task labels"):
        make_strategy(MultiHeadClassifier(WIDTH, CLASSES), PenaltyPlugin(engram.SI, strength=1)).train(first)
    strategy = make_strategy(make_model("linear"), ReplayPlugin(mem_size=10), OwnClassesPlugin())
    strategy.train(first)
    with pytest.raises(
        engram.InputError, match="a batch has the label 0, which is not a class of the experience: 2, 3"
    ):
        strategy.train(second)


# --- the page and the example


def test_the_page_runs_as_it_is_printed() -> None:
    page = (ROOT / "docs" / "guides" / "from-avalanche.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(block, names)
    assert 0.1 < names["accuracy"] < 1
    assert 0.1 < names["result"].average_accuracy[0, -1] < 1


def test_the_example_has_the_same_numbers_in_avalanche_and_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "avalanche_comparison.py"))
    settings = {"dataset": "mnist-small", "max_samples": 800, "num_tasks": 2, "hidden": [20], "batch_size": 10}
    config = engram.preset("permuted-mnist", "dhp+si", **settings, epochs=1, trials=1, first_trial=1, strength=10)
    in_avalanche = example["in_avalanche"](config, example["engrams"](config), "float64").accuracy
    assert in_avalanche == pytest.approx(example["in_engram"](config, "float64").accuracy, abs=1e-4)
    assert in_avalanche > 15
    example["compare"](tasks=1, trials=1, hidden=4, max_samples=40)
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["method", *example["METHODS"]]


def test_avalanches_own_penalties_are_as_the_page_says() -> None:
    assert metadata.version("avalanche-lib") == "0.6.0", "read its code again, and change docs/guides/from-avalanche.md"
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, CLASSES))
    benchmark = as_benchmark(make_stream())
    si, ewc = SynapticIntelligencePlugin(si_lambda=1e6), EWCPlugin(ewc_lambda=0, mode="online", decay_factor=0.0)
    ours, before, after = PenaltyPlugin(engram.OnlineEWC, strength=1e-9), BatchesSeen(), BatchesSeen()
    strategy = make_strategy(model, si, ewc, ours, before, MASPlugin(), after)
    strategy.train(benchmark.train_stream[0])
    assert max(float(omega.data.abs().max()) for omega in si.ewc_data[1].values()) == 0
    assert ours.penalty is not None
    per_sample = sum(float(omega.sum()) for omega in ours.penalty.terms[0].importance.values())
    assert sum(float(omega.data.sum()) for omega in ewc.importances[0].values()) < per_sample / 2
    assert after.count > before.count


class BatchesSeen(TracePlugin.__mro__[1]):  # type: ignore[misc]  # Avalanche's SupervisedPlugin
    """How many batches BatchNorm had seen when this plugin's turn came."""

    def after_training_exp(self, strategy: Any, **options: Any) -> None:
        self.count = int(strategy.model[1].num_batches_tracked)
