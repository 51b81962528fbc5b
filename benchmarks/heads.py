"""What heads with a memory give, as tables and a figure.

python benchmarks/heads.py growth --data DATA --out DIR      new classes, one pass, with more and more random features
python benchmarks/heads.py learned --data DATA --out DIR     a memory on features that learn, with penalties and replay
python benchmarks/heads.py relatives --data DATA --out DIR   DHP beside its relatives on the paper's four benchmarks
python benchmarks/heads.py cost --device cuda                the step of 80 MLPs with each head, and of protection
python benchmarks/heads.py draw --out DIR                    the figure, from what growth left

Each study prints a Markdown table and leaves DIR/STUDY.json, with every trial. Seeds are those of results (0); the
settings were chosen with another seed on validation samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress as Bar
from timing import Contestant, Timing, hardware, measure
from workloads import WORKLOADS, engram_loop

import engram
from engram.common.files import write_atomically
from engram.config.presets import title_of
from engram.engine.build import choose_device, precision_of
from engram.report.figures.drawing import COLOURS, INK, new_figure
from engram.runs.folder import versions

FEATURES = (250, 500, 1000, 2000, 5000, 10_000, 20_000)
MOST_ON_CPU = 5000  # 20,000 features have a second moment of 3 GB
GROWING = ("slda", "ridge")
DATASETS = ("mnist", "mnist-small")
PARTNERS = ("", "online-ewc", "si", "mas", "replay")
LEARNED = ("linear", "ncm", "slda", "ridge")
STEPS = {"epochs": 10, "batch_size": 64}  # the paper's for Split MNIST: memory heads alone have others by default
RELATIVES = ("linear", "dhp", "hebbian-softmax", "fast-weights", "neuromodulated", "retroactive")
BENCHMARKS = ("permuted-mnist", "imbalanced-permuted-mnist", "split-mnist", "vision-mixture")
IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "random-features.png"
Rows = dict[str, dict[str, list[float]]]  # accuracies in % of the trials, by row and column


def growth(options: argparse.Namespace) -> Rows:
    """Class-incremental Split MNIST in a random order of classes, by the number of random features."""
    common = {"scenario": "class", "class_order": "random", "trials": options.trials}
    rows: Rows = {}
    for dataset in DATASETS:
        for count in FEATURES:
            if options.device == "cpu" and count > MOST_ON_CPU:
                continue
            configs = [
                engram.preset("split-mnist", head, dataset=dataset, random_features=count, **common) for head in GROWING
            ]
            for head, accuracies in zip(GROWING, accuracy(configs, f"{dataset}, {count:,}", options), strict=True):
                rows.setdefault(f"{head}, {dataset}", {})[f"{count:,}"] = accuracies
    return rows


def learned(options: argparse.Namespace) -> Rows:
    """Class-incremental Split MNIST with the paper's network, whose features move while the memory stays."""
    common = {"scenario": "class", "trials": options.trials, "dataset": options.dataset}
    rows: Rows = {}
    for head in LEARNED:
        methods = ["+".join(filter(None, (head, partner))) for partner in PARTNERS]
        changes = {} if head == "linear" else {"network": "mlp", "learn_features": True, "random_features": 0}
        configs = [engram.preset("split-mnist", method, **common).replace(**changes, **STEPS) for method in methods]
        found = accuracy(configs, head, options)
        rows[head] = dict(zip((partner or "alone" for partner in PARTNERS), found, strict=True))
    return rows


def relatives(options: argparse.Namespace) -> Rows:
    """Each head alone and, unless told otherwise, with Online EWC, at the paper's settings for DHP.

    All of them start as nn.Linear does.
    """
    rows: Rows = {}
    partners = ("",) if options.alone else ("", "+online-ewc")
    for benchmark in options.only.split(",") if options.only else BENCHMARKS:
        small = {} if options.dataset == "mnist" or benchmark == "vision-mixture" else {"dataset": options.dataset}
        methods = [method for head in RELATIVES for method in (head + partner for partner in partners)]
        fewer = {} if options.epochs is None else {"epochs": options.epochs}
        settings = {"trials": options.trials, "head_init": "linear", **small, **fewer}
        configs = [engram.preset(benchmark, method, **settings) for method in methods]
        for method, accuracies in zip(methods, accuracy(configs, benchmark, options), strict=True):
            rows.setdefault(method, {})[title_of(benchmark)] = accuracies
    return rows


def accuracy(configs: list[engram.Config], what: str, options: argparse.Namespace) -> list[list[float]]:
    """The accuracy in % of each trial of each config, over all tasks after the last."""
    with Bar(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(what, total=1.0)

        def report(progress: engram.Progress) -> None:
            bar.update(line, completed=progress.done)

        results = engram.run_many(configs, data=options.data, device=options.device, report=report)
    return [(100 * result.average_accuracy[:, -1]).tolist() for result in results]


def cost(options: argparse.Namespace) -> Rows:
    """The milliseconds of a step of 80 MLPs with each head, and with protection of what is in force, in each round."""
    device, workload = choose_device(options.device), WORKLOADS["mlp"]
    configs = {}
    for head in engram.heads.list():
        if head != "dhp-uniform":
            changes = {"network": "mlp", "learn_features": head in ("ncm", "slda", "ridge"), "random_features": 0}
            configs[head] = engram.preset(workload.benchmark, head).replace(**changes, batch_size=workload.batch_size)
    for method, protect in itertools.product(("dhp+online-ewc", "steady+online-ewc"), ("slow", "in-force")):
        configs[f"{method} ({protect})"] = engram.preset(workload.benchmark, method, protect=protect)
    if options.only:
        configs = {name: configs[name] for name in options.only.split(",")}
    with precision_of("tf32") as dtype:
        contestants = []
        for name, config in configs.items():
            learners = workload.learners([(config, k) for k in range(options.models)], device, dtype)
            contestants.append(Contestant(name, options.models, engram_loop(workload, learners, device, dtype)))
        timings = measure(contestants, options.seconds)
    return {name: {"ms": [1000 * s for s in t.rounds]} for name, t in zip(configs, timings, strict=True)}


def cost_table(rows: Rows) -> str:
    """The time of each step, over the plain head's, the paper's layer's, and over the same with slow weights protected.

    Each is a lower quartile of rounds in which all take turns, and so are the times in its ratios.
    """
    ms = {name: 1000 * Timing(tuple(s / 1000 for s in cells["ms"])).seconds for name, cells in rows.items()}
    lines = ["| | ms | × linear | × dhp | × slow |", "|---|---:|---:|---:|---:|"]
    for name, own in ms.items():
        slow = name.replace("in-force", "slow") if "in-force" in name else ""
        ratios = [f"{own / ms[other]:.3f}" if other in ms else "–" for other in ("linear", "dhp", slow)]
        lines.append(f"| {name} | {own:.3f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def table(rows: Rows) -> str:
    """Means with their standard errors, as Markdown."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, cells in rows.items():
        lines.append(f"| {name} | " + " | ".join(cell(cells.get(column, [])) for column in columns) + " |")
    return "\n".join(lines)


def cell(values: list[float]) -> str:
    if not values or not np.isfinite(values).all():
        return "–" if not values else f"diverged in {int((~np.isfinite(values)).sum())} of {len(values)}"
    mean = f"{np.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f}"


def draw(folder: Path) -> None:
    """Accuracy by the number of random features, a line for each head and dataset."""
    rows: Rows = json.loads((folder / "growth.json").read_text(encoding="utf-8"))["rows"]
    figure = new_figure(6.4, 3.4)
    axes = figure.subplots()
    styles = {"slda": ("-", "online-ewc"), "ridge": ("--", "mas")}
    for name, cells in rows.items():
        head, dataset = name.split(", ")
        counts = [int(column.replace(",", "")) for column in cells]
        mean = [float(np.mean(values)) for values in cells.values()]
        line, colour = styles[head]
        marker = "o" if dataset == "mnist" else "s"
        axes.plot(counts, mean, line, marker=marker, ms=4, color=COLOURS[colour], label=f"{head}, {dataset}")
    for accuracy_of, style, what in ((98.23, "-.", "joint training"), (93.79, ":", "the best with nothing stored")):
        axes.axhline(accuracy_of, lw=0.8, color=INK, ls=style, label=f"{what}, published (mnist)")
    axes.set(xscale="log", xlabel="random features", ylabel="accuracy among all ten, %")
    axes.set_xticks(FEATURES, [f"{count:,}" for count in FEATURES], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(IMAGE, dpi=150)
    print(f"wrote {IMAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = {"growth": growth, "learned": learned, "relatives": relatives, "cost": cost}
    parser.add_argument("study", choices=[*studies, "draw"])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--dataset", default="mnist", choices=DATASETS, help="of learned and relatives")
    parser.add_argument("--only", help="of relatives: benchmarks, of cost: rows; by commas")
    parser.add_argument("--alone", action="store_true", help="of relatives: not with Online EWC too")
    parser.add_argument("--epochs", type=int, help="of relatives: in place of the paper's")
    parser.add_argument("--models", type=int, default=80, help="of cost: in the stack")
    parser.add_argument("--seconds", type=float, default=2.0, help="of cost: for each head")
    parser.add_argument("--data", help="the folder with the datasets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="the folder for the record")
    options = parser.parse_args()
    if options.study == "draw":
        if options.out is None or not (options.out / "growth.json").is_file():
            parser.error("draw needs --out DIR, a folder in which growth left its growth.json")
        draw(options.out)
        return
    rows = studies[options.study](options)
    print(cost_table(rows) if options.study == "cost" else table(rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "hardware": hardware(options.device),
            "threads": torch.get_num_threads(),
        }
        text = json.dumps({**about, "versions": versions(), "rows": rows}, indent=1) + "\n"
        write_atomically(options.out / f"{options.study}.json", text.encode())


if __name__ == "__main__":
    main()
