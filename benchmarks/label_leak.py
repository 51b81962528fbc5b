"""Do the labels of a batch leak into its own logits? The mixture's network with the DHP Softmax learns digits.

python benchmarks/label_leak.py         the table of docs/reproduction/why.md

After some epochs, batches of test digits are shown to a copy of the layer in training mode, once with their own labels
and once with random ones. What it predicts should not depend on them. If they leak, it predicts what it was given.
"""

from __future__ import annotations

import argparse
import copy

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import engram
from engram.data.samples import Samples
from engram.data.sources import load
from engram.nn.networks import cnn_features
from engram.runs.metrics import estimate

SEEDS = (0, 1, 2)
BATCH, SHOWN = 32, (1, 5, 20)


def images(part: Samples) -> Tensor:
    """Digits as the mixture has them: 32×32 pixels, three channels."""
    digits: Tensor = part.inputs.reshape(-1, 1, 28, 28) / 255
    return pad(digits, (2, 2, 2, 2)).expand(-1, 3, -1, -1)


@torch.no_grad()
def agreement(features: nn.Module, head: nn.Module, inputs: Tensor, given: Tensor) -> float:
    """How often a copy of the layer, in training with these labels, predicts the label that it was given."""
    head = copy.deepcopy(head)
    batches = zip(inputs.split(BATCH), given.split(BATCH), strict=True)
    return float(torch.cat([head(features(x), y).argmax(dim=1) == y for x, y in batches]).float().mean())


def leak(seed: int) -> dict[int, list[float]]:
    """By epoch: η, and the shares of test digits, in %."""
    torch.manual_seed(seed)
    digits = load("mnist-small")
    x, y = images(digits.train), digits.train.targets
    test_x, test_y = images(digits.test), digits.test.targets
    random_y = torch.randint(10, test_y.shape)
    features, head = cnn_features(3, 32, [500], 0.3), engram.DHPSoftmax(500, 10, eta=1e-4)
    optimizer = torch.optim.SGD([*features.parameters(), *head.parameters()], lr=0.03)
    found = {}
    for epoch in track(range(1, max(SHOWN) + 1), f"seed {seed}", transient=True):
        for rows in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(head(features(x[rows]), y[rows]), y[rows]).backward()
            optimizer.step()
        if epoch in SHOWN:
            read = agreement(features, copy.deepcopy(head).eval(), test_x, test_y)
            shares = [read, *(agreement(features, head, test_x, labels) for labels in (test_y, random_y))]
            found[epoch] = [float(head.eta.detach().clamp(0, 1)), *(100 * share for share in shares)]
    return found


def main() -> None:
    argparse.ArgumentParser(prog="label_leak.py", description=__doc__.splitlines()[0]).parse_args()
    found = [leak(seed) for seed in SEEDS]
    print("| epoch | η | only read: right, % | own labels written: right, % | random labels written: as given, % |")
    print("|---:|---:|---:|---:|---:|")
    for epoch in SHOWN:
        estimates = [estimate(values) for values in zip(*(each[epoch] for each in found), strict=True)]
        digits = (2, 1, 1, 1)
        cells = (f"{e.mean:.{n}f} ± {e.sem:.{n}f}" for e, n in zip(estimates, digits, strict=True))
        print(f"| {epoch} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
