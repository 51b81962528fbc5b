"""Other people's numbers: Split and Permuted MNIST with the networks, optimizers and strengths of van de Ven & Tolias.

python benchmarks/van_de_ven.py --data DATA --out results/van-de-ven
python benchmarks/van_de_ven.py --only split-mnist/class --methods none,lwf --trials 2

Published are means over 20 trials (arXiv 1904.07734, Table 4; Permuted MNIST: arXiv 1809.10635, Table 4). The settings
are theirs: inputs in [0, 1]; two hidden layers of 400 ReLU units (Split) or 1,000 (Permuted); Adam, not reset between
tasks; 2,000 steps of 128 samples a task at 1e-3 (Split), or 5,000 steps of 256 at 1e-4 (Permuted), which is 21 epochs.
Their EWC has λ/2 where Engram has λ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.progress import Progress as Bar

import engram
from engram.config.presets import parse_setting

COMMON: dict[str, Any] = {
    "leaky_slope": 0.0,
    "baseline_head": "linear",
    "head_bias": True,
    "optimizer": "adam",
    "reset_optimizer": False,
    "epochs": 21,
    "penalty_step": "gradient",
    "joint_start": "continue",
    "joint_steps": "task",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "split-mnist": {**COMMON, "hidden": [400, 400], "batch_size": 128, "learning_rate": 1e-3},
    "permuted-mnist": {
        **COMMON,
        "hidden": [1000, 1000],
        "batch_size": 256,
        "learning_rate": 1e-4,
        "num_tasks": 10,
        "generator_hidden": [1000, 1000],
    },
}
# For each experiment the strength λ of EWC and c of SI, and the published accuracies in %.
EXPERIMENTS: dict[str, tuple[float, float, dict[str, float]]] = {
    "split-mnist/task": (
        1e5,
        10.0,
        {"none": 87.2, "ewc": 98.6, "online-ewc": 99.1, "si": 99.1, "lwf": 99.6, "generative-replay": 99.5,
         "joint": 99.7},
    ),
    "split-mnist/domain": (
        1e10,
        5e4,
        {"none": 59.2, "ewc": 64.0, "online-ewc": 64.3, "si": 65.4, "lwf": 71.5, "generative-replay": 95.7,
         "joint": 98.4},
    ),
    "split-mnist/class": (
        1e9,
        5e3,
        {"none": 19.90, "ewc": 20.01, "online-ewc": 19.96, "si": 19.99, "lwf": 23.85, "generative-replay": 90.79,
         "joint": 97.9},
    ),
    "permuted-mnist/domain": (
        100.0,
        10.0,
        {"none": 78.51, "ewc": 94.31, "online-ewc": 94.42, "si": 95.33, "lwf": 72.64, "generative-replay": 95.09,
         "joint": 97.59},
    ),
}  # fmt: skip


def config_of(experiment: str, method: str, changes: dict[str, Any]) -> engram.Config:
    """The settings of one row."""
    benchmark, scenario = experiment.split("/")
    ewc, si, _ = EXPERIMENTS[experiment]
    settings = {**SETTINGS[benchmark], "scenario": scenario}
    if "ewc" in method:
        settings |= {"strength": ewc / 2, "fisher_labels": "true"}
    if method == "si":
        settings |= {"strength": si, "xi": 0.1}
    return engram.preset(benchmark, "finetune" if method == "none" else method, **{**settings, **changes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="experiments, separated by commas: split-mnist/class,permuted-mnist/domain")
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
    for experiment in given.only.split(",") if given.only else EXPERIMENTS:
        published = EXPERIMENTS[experiment][2]
        methods = given.methods.split(",") if given.methods else list(published)
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
