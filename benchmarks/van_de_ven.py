"""Other people's numbers: Split and Permuted MNIST with the networks, optimizers and strengths of van de Ven & Tolias.

python benchmarks/van_de_ven.py --data DATA --out results/van-de-ven
python benchmarks/van_de_ven.py --only split-mnist/class --methods none,lwf --trials 2

Published are means over 20 trials (arXiv 1904.07734, Table 4; Permuted MNIST: arXiv 1809.10635, Table 4). The settings
are those of their code at that time: inputs in [0, 1]; two hidden layers of 400 ReLU units (Split) or 1,000 (Permuted);
Adam, not reset between tasks; batches of 128; 2,000 steps a task at 1e-3 (Split), which is 21 epochs, or 5,000 at 1e-4
(Permuted), 11 epochs. For Permuted MNIST batches of 256 are stated too, but 128 is what their code has, unless told
otherwise, and with 128 the numbers agree. Split MNIST assigns the digits to tasks at random in each trial. Permuted
MNIST has images that are padded to 32×32, so each task has its pixels in other places. The Fisher information is that
of predicted labels, and their EWC has λ/2 where Engram has λ.

Two of their methods are not quite those of the papers that they name, and have rows of their own:

si-theirs    the penalty's own gradient is part of SI's path, and importances may be negative
lwf-theirs   the distillation is a mean over samples and outputs, so it is divided by the number of outputs

Their SI follows each step of its own model, so its models train one by one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress as Bar
from torch import Tensor

import engram
from engram.common.registry import BENCHMARKS, PENALTIES, REHEARSALS
from engram.config.presets import parse_setting
from engram.data.samples import Dataset, Samples, Stream
from engram.rehearsal.lwf import LwF
from engram.rehearsal.rehearsal import distillation, masked, teacher_logits

COMMON: dict[str, Any] = {
    "leaky_slope": 0.0,
    "baseline_head": "linear",
    "head_bias": True,
    "optimizer": "adam",
    "reset_optimizer": False,
    "batch_size": 128,
    "penalty_step": "gradient",
    "joint_start": "continue",
    "joint_steps": "task",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "split-mnist": {
        **COMMON,
        "hidden": [400, 400],
        "epochs": 21,
        "learning_rate": 1e-3,
        "class_order": "random",
    },
    "padded-mnist": {
        **COMMON,
        "hidden": [1000, 1000],
        "epochs": 11,
        "learning_rate": 1e-4,
        "num_tasks": 10,
        "generator_hidden": [1000, 1000],
    },
}
METHODS = ("none", "ewc", "online-ewc", "si", "lwf", "generative-replay", "joint")
PUBLISHED = {  # accuracies in %, in the order of METHODS
    "split-mnist/task": (87.2, 98.6, 99.1, 99.1, 99.6, 99.5, 99.7),
    "split-mnist/domain": (59.2, 64.0, 64.3, 65.4, 71.5, 95.7, 98.4),
    "split-mnist/class": (19.90, 20.01, 19.96, 19.99, 23.85, 90.79, 97.9),
    "padded-mnist/domain": (78.51, 94.31, 94.42, 95.33, 72.64, 95.09, 97.59),
}
STRENGTHS = {  # λ of EWC; λ and γ of Online EWC, which multiplies the old importances by γ twice; c of SI
    "split-mnist/task": (1e7, 1e8, 0.8, 50.0),
    "split-mnist/domain": (1e6, 1e8, 0.7, 500.0),
    "split-mnist/class": (1e8, 1e9, 0.8, 0.5),
    "padded-mnist/domain": (500.0, 1000.0, 0.9, 5.0),
}


@BENCHMARKS.register(
    "padded-mnist",
    title="Permuted MNIST, padded",
    scenario="domain",
    datasets=["mnist", "mnist-small"],
    settings={"num_tasks": "num_tasks", "seed": "seed"},
    preset={"num_tasks": 10},
    strengths={},
)
def padded_mnist(datasets: Sequence[Dataset], trials: Sequence[int], *, num_tasks: int, seed: int) -> list[Stream]:
    """Permuted MNIST with images of 32×32, whose border is permuted too."""
    (dataset,) = datasets
    train, test = (Samples(F.pad(part.inputs, (2, 2, 2, 2)), part.targets) for part in (dataset.train, dataset.test))
    padded = replace(dataset, train=train, test=test)
    return [engram.streams.permuted(padded, num_tasks=num_tasks, seed=seed, trial=trial) for trial in trials]


@REHEARSALS.register("lwf-theirs", settings={"temperature": "distillation_temperature", "weight": "rehearsal_weight"})
class TheirLwF(LwF):
    """LwF as van de Ven & Tolias had it: the distillation is divided by the number of outputs."""

    def loss(self, model: Any, still: Any, state: Any, batch: Any, random: Any, moment: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs, batch.targets)
        new = F.cross_entropy(masked(logits, moment.new), batch.targets)
        if moment.task == 0:
            return new, logits
        w, teacher = self.share(moment.task), teacher_logits(still, state, batch.inputs)
        parts = [distillation(logits, teacher, group, self.temperature) / group[0].sum() for group in moment.groups]
        return (1 - w) * new + w * torch.stack(parts).mean(), logits


@PENALTIES.register("si-theirs", settings={"xi": "xi"})
class TheirSI(engram.SI):
    """SI as van de Ven & Tolias have it. It follows each step of its own model, so models train one by one."""

    def _gradient_of_the_penalty(self) -> dict[str, Tensor]:
        return {}  # nothing is taken out of the gradient

    def after_step(self) -> None:
        super().after_step()

    @classmethod
    def importance(cls, model: Any, parameters: Any, state: Any, settings: Any, *batches: Any) -> dict[str, Tensor]:
        return {
            name: state[f"path.{name}"] / ((theta.detach() - state[f"start.{name}"]).square() + settings["xi"])
            for name, theta in parameters.items()
        }


def config_of(experiment: str, method: str, changes: dict[str, Any]) -> engram.Config:
    """The settings of one row."""
    benchmark, scenario = experiment.split("/")
    ewc, online, gamma, si = STRENGTHS[experiment]
    own: dict[str, Any] = {}
    if method == "ewc":
        own = {"strength": ewc / 2, "fisher_labels": "predicted"}
    if method == "online-ewc":
        own = {"strength": gamma * online / 2, "gamma": gamma, "fisher_labels": "predicted"}
    if method in ("si", "si-theirs"):
        own = {"strength": si, "xi": 0.1}
    common = {**SETTINGS[benchmark], "scenario": scenario, **changes}  # some of which have no effect on some methods
    return engram.preset(benchmark, "finetune" if method == "none" else method, **own).replace(**common)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="experiments, separated by commas: split-mnist/class,padded-mnist/domain")
    parser.add_argument("--methods", help="methods, separated by commas")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], help="a changed setting, name=value")
    parser.add_argument("--data", help="the folder with the datasets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="where to keep the results as JSON")
    given = parser.parse_args()
    changes: dict[str, Any] = {"trials": given.trials}
    for text in given.set:
        changes |= parse_setting(text)
    rows: list[dict[str, Any]] = []
    print("| experiment | method | published | here | ± | difference |\n|---|---|---:|---:|---:|---:|")
    experiments = given.only.split(",") if given.only else list(PUBLISHED)
    if unknown := set(experiments) - set(PUBLISHED):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}: there are {', '.join(PUBLISHED)}")
    for experiment in experiments:
        published = dict(zip(METHODS, PUBLISHED[experiment], strict=True))
        published |= {f"{method}-theirs": published[method] for method in ("si", "lwf")}
        methods = given.methods.split(",") if given.methods else list(published)
        if unknown := set(methods) - set(published):
            parser.error(f"nothing is published for {', '.join(sorted(unknown))}: there are {', '.join(published)}")
        configs = [config_of(experiment, method, changes) for method in methods]
        for method, result in zip(methods, trained(experiment, configs, given.data, given.device), strict=True):
            values = 100 * result.average_accuracy[:, -1]
            mean, sem, known = values.mean(), values.std(ddof=1) / len(values) ** 0.5, published[method]
            rows.append({"experiment": experiment, "method": method, "published": known, "trials": values.tolist()})
            print(
                f"| {experiment} | {method} | {known:.2f} | {mean:.2f} | {sem:.2f} | {mean - known:+.2f} |", flush=True
            )
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "van-de-ven.json").write_text(json.dumps(rows, indent=2) + "\n")


def trained(experiment: str, configs: list[engram.Config], data: str | None, device: str) -> list[engram.Result]:
    """The results of all rows of an experiment, with a progress bar, and the log's lines below it."""
    with Bar(transient=True) as bar:
        line = bar.add_task(experiment, total=1.0)

        def report(progress: engram.Progress) -> None:
            bar.update(line, completed=progress.done)
            if progress.note:
                bar.console.print(progress.note)

        return engram.run_many(configs, data=data, device=device, report=report)


if __name__ == "__main__":
    main()
