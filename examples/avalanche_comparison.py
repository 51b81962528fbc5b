"""Permuted MNIST in Avalanche with its own methods, in Avalanche with Engram's plugins, and by `engram.run`.

All start with the same weights and see the same batches in the same order. Each method has the best of a few strengths,
chosen on validation samples of a trial that is not reported. Times are processor times on one thread, as multiples of
that of `engram.run` in the same trial; the table shows medians.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn

import engram
from engram.cli.terminal import columns
from engram.data.batches import epoch_order
from engram.engine.build import build_model, build_streams, load_datasets
from engram.report.tables import Table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training.plugins import EvaluationPlugin, EWCPlugin, MASPlugin, SynapticIntelligencePlugin
    from avalanche.training.supervised import Naive

    from engram.integrations.avalanche import PenaltyPlugin, TracePlugin, as_benchmark

PENALTIES: dict[str, Callable[..., engram.Penalty]] = {
    "online-ewc": engram.OnlineEWC,
    "si": engram.SI,
    "mas": engram.MAS,
}
ENGRAM_STRENGTHS: dict[str, tuple[float, ...]] = {
    "online-ewc": (10, 100, 1000),
    "si": (0.01, 0.1, 1),
    "mas": (0.01, 0.1, 1),
}
AVALANCHE_STRENGTHS: dict[str, tuple[float, ...]] = {
    "online-ewc": (100, 1000, 10_000),
    "si": (1,),  # it has no effect, see docs/guides/from-avalanche.md
    "mas": (0.1, 1, 10),
}
METHODS = ("finetune", "online-ewc", "si", "mas", "dhp", "dhp+si")
OWN, PLUGINS, ENGRAM = "Avalanche", "Avalanche with Engram's plugins", "engram.run"


@dataclass(frozen=True)
class Outcome:
    accuracy: float  # the average over all tasks after the last, in %
    seconds: float  # of the processor


def in_engram(config: engram.Config, precision: str = "float32") -> Outcome:
    start = time.process_time()
    result = engram.run(config, device="cpu", precision=precision)
    return Outcome(100 * float(result.average_accuracy[0, -1]), time.process_time() - start)


def in_avalanche(config: engram.Config, plugins: list[Any], precision: str = "float32") -> Outcome:
    """The same tasks, initial weights, batches and evaluations as in `in_engram`."""
    (stream,) = build_streams(config, [config.first_trial], load_datasets(config, None))
    model = build_model(config, config.first_trial, stream.input_shape, stream.num_classes)
    dtype = getattr(torch, precision)
    benchmark = as_benchmark(in_order(stream, config), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing logger
        evaluator = EvaluationPlugin(accuracy_metrics(experience=True))
    strategy = Naive(
        model=model.to(dtype),
        optimizer=torch.optim.SGD(model.parameters(), lr=config.learning_rate),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=config.batch_size,
        train_epochs=1,
        eval_mb_size=1000,
        plugins=plugins,
        evaluator=evaluator,
    )
    start = time.process_time()
    strategy.eval(benchmark.test_stream)
    for n, experience in enumerate(benchmark.train_stream):
        strategy.train(experience, shuffle=False)
        found = strategy.eval(benchmark.test_stream[: n + 2])
    seconds = time.process_time() - start
    names = [f"Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp{n:03}" for n in range(len(stream))]
    return Outcome(100 * statistics.mean(found[name] for name in names), seconds)


def in_order(stream: engram.streams.Stream, config: engram.Config) -> engram.streams.Stream:
    """The stream with its samples in the order in which `engram.run` takes them in its only epoch."""

    def ordered(n: int, task: engram.streams.Task) -> engram.streams.Task:
        order = epoch_order(task.train, config.seed, config.first_trial, n, 0)
        return replace(task, train=task.train[order])

    return replace(stream, tasks=tuple(ordered(n, task) for n, task in enumerate(stream)))


def avalanches_own(method: str, strength: float) -> list[Any]:
    if method == "finetune":
        return []
    if method == "online-ewc":
        return [EWCPlugin(ewc_lambda=strength, mode="online", decay_factor=1.0)]
    return [SynapticIntelligencePlugin(si_lambda=strength) if method == "si" else MASPlugin(lambda_reg=strength)]


def engrams(config: engram.Config) -> list[Any]:
    plugins: list[Any] = [TracePlugin()] if config.plastic else []
    if config.penalty is not None:
        settings = {"xi": config.xi} if config.penalty == "si" else {}
        plugins.append(PenaltyPlugin(PENALTIES[config.penalty], strength=config.strength, **settings))
    return plugins


def compare(
    tasks: int = 3,
    trials: int = 3,
    hidden: int = 100,
    batch_size: int = 10,
    learning_rate: float = 0.1,  # enough to learn a task in one epoch, and to forget the others
    max_samples: int = 5000,
) -> None:
    """Run every method in all three ways, trial after trial, on the package's own digits, and print the table."""
    torch.set_num_threads(1)

    def config(method: str, trial: int, strength: float | None = None, **changes: Any) -> engram.Config:
        settings = {"num_tasks": tasks, "hidden": [hidden, hidden], "epochs": 1, "batch_size": batch_size}
        settings |= {"baseline_head": "linear", "dataset": "mnist-small", "trials": 1, "first_trial": trial}
        settings |= {"max_samples": max_samples, "learning_rate": learning_rate, "head_init": "linear"}
        if strength is not None:
            settings["strength"] = strength
        return engram.preset("permuted-mnist", method).replace(**settings, **changes)

    grids = [*ENGRAM_STRENGTHS.values(), *AVALANCHE_STRENGTHS.values()]
    num_own = sum("dhp" not in method for method in METHODS)
    num_runs = sum(map(len, grids)) + trials * (2 * len(METHODS) + num_own)
    with Progress(*columns("runs"), console=Console(stderr=True)) as bar:
        whole = bar.add_task("", total=num_runs)

        def advance(outcome: Outcome) -> Outcome:
            bar.advance(whole)
            return outcome

        def best(strengths: tuple[float, ...], accuracy: Callable[[float], float]) -> float:
            return max(strengths, key=accuracy)

        seen = {"examine": "validation"}
        ours, theirs = {}, {}
        for name in PENALTIES:
            ours[name] = best(
                ENGRAM_STRENGTHS[name], lambda s, m=name: advance(in_engram(config(m, 0, s, **seen))).accuracy
            )
            theirs[name] = best(
                AVALANCHE_STRENGTHS[name],
                lambda s, m=name: advance(in_avalanche(config(m, 0, s, **seen), avalanches_own(m, s))).accuracy,
            )
        outcomes: dict[tuple[str, str], list[Outcome]] = {}
        for trial in range(1, trials + 1):
            for method in METHODS:
                name = method.split("+")[-1]
                chosen = config(method, trial, ours.get(name))
                if not chosen.plastic:
                    own = avalanches_own(method, theirs.get(name, 0.0))
                    outcomes.setdefault((method, OWN), []).append(advance(in_avalanche(chosen, own)))
                outcomes.setdefault((method, PLUGINS), []).append(advance(in_avalanche(chosen, engrams(chosen))))
                outcomes.setdefault((method, ENGRAM), []).append(advance(in_engram(chosen)))
    print(table_of(outcomes, ours, theirs).to_markdown())


def table_of(outcomes: dict[tuple[str, str], list[Outcome]], ours: dict[str, float], theirs: dict[str, float]) -> Table:
    def accuracy(method: str, code: str) -> str:
        found = outcomes.get((method, code))
        return f"{statistics.mean(one.accuracy for one in found):.2f}" if found else ""

    def ratio(method: str, code: str) -> str:
        pairs = zip(outcomes.get((method, code), []), outcomes[method, ENGRAM], strict=False)
        ratios = [theirs.seconds / ours.seconds for theirs, ours in pairs]
        return f"{statistics.median(ratios):.2f}" if ratios else ""

    rows = []
    for method in METHODS:
        name = method.split("+")[-1]
        strengths = [f"{theirs[name]:g}" if method in theirs else "", f"{ours[name]:g}" if name in ours else ""]
        accuracies = [accuracy(method, code) for code in (OWN, PLUGINS, ENGRAM)]
        rows.append((method, *strengths, *accuracies, ratio(method, OWN), ratio(method, PLUGINS)))
    header = ("method", "λ of Avalanche's", "λ of Engram's", OWN, PLUGINS, ENGRAM, f"time, {OWN}", f"time, {PLUGINS}")
    return Table("Average accuracy in %, and times as multiples of engram.run's", header, tuple(rows))


if __name__ == "__main__":
    typer.run(compare)
