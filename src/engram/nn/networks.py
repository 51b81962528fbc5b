"""The paper's networks: features, then a head that is told the targets while it learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """Features from inputs, and a head that turns features into logits."""

    def __init__(self, features: nn.Module, head: nn.Module):
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
        return self.head(self.features(inputs), target)


class Standardised(nn.Module):
    """Inputs less a mean, divided by a standard deviation, both of the dataset."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean = mean
        self.std = std

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


@torch.no_grad()
def initialise_by_he(features: nn.Module, slope: float) -> None:
    """He's uniform initialisation for LeakyReLU of that slope: activations keep their variance from layer to layer."""
    for layer in features.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, a=slope)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def mlp_features(num_inputs: int, hidden: Sequence[int], slope: float) -> nn.Sequential:
    """Fully connected layers with LeakyReLU, of the widths in `hidden`."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in itertools.pairwise([num_inputs, *hidden]):
        layers += [nn.Linear(width_in, width_out), nn.LeakyReLU(slope)]
    return nn.Sequential(*layers)


def cnn_features(num_channels: int, side: int, hidden: Sequence[int], slope: float) -> nn.Sequential:
    """Two convolutions of 5×5 with 20 and 50 channels, each with LeakyReLU and 2×2 max-pooling, then FC layers."""
    pooled = ((side - 4) // 2 - 4) // 2  # a 5×5 kernel takes 4 pixels off, pooling halves
    return nn.Sequential(
        nn.Conv2d(num_channels, 20, kernel_size=5),
        nn.LeakyReLU(slope),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.LeakyReLU(slope),
        nn.MaxPool2d(2),
        *mlp_features(50 * pooled * pooled, hidden, slope),
    )
