"""The paper's networks: features, then a head that gets the targets too in training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram.nn.modules import frozen


class Network(nn.Module):
    """Features of the inputs, and a head that turns features into logits.

    Args:
        features: from inputs to features (B, m).
        head: called as head(features, target).

    Example:
        >>> model = Network(mlp_features(784, [400], 0.01), engram.DHPSoftmax(400, 10))
        >>> logits = model(inputs, targets)
    """

    def __init__(self, features: nn.Module, head: nn.Module):
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, inputs: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (B, C) of a batch of inputs; a plastic head needs the targets in training mode."""
        return self.head(self.features(inputs), target)

    @torch.no_grad()
    def start(self, inputs: Tensor) -> None:
        """Before anything is learned or protected: a head whose size depends on the features sees some.

        Args:
            inputs: of some samples.

        Example:
            >>> model.start(inputs[:256])
        """
        if getattr(self.head, "waits", False):
            with frozen(self):
                self.head.scale(self.features(inputs))  # type: ignore[operator]


class Standardised(nn.Module):
    """Inputs minus a mean, divided by a standard deviation, both of the dataset.

    Args:
        mean: of all pixels.
        std: of all pixels.

    Example:
        >>> Standardised(0.5, 2.0)(torch.tensor([4.5]))
        tensor([2.])
    """

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean = mean
        self.std = std

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


@torch.no_grad()
def initialise_by_he(features: nn.Module, slope: float) -> None:
    """He's uniform initialisation for LeakyReLU of that slope: activations keep their variance from layer to layer.

    Args:
        features: whose linear and convolutional layers are initialised.
        slope: of the LeakyReLU.

    Example:
        >>> initialise_by_he(features, slope=0.01)
    """
    for layer in features.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, a=slope)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def mlp_features(num_inputs: int, hidden: Sequence[int], slope: float) -> nn.Sequential:
    """Fully connected layers with LeakyReLU.

    Args:
        num_inputs: of one sample.
        hidden: the widths of the layers.
        slope: of the LeakyReLU.

    Example:
        >>> features = mlp_features(784, [400, 400], 0.01)
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in itertools.pairwise([num_inputs, *hidden]):
        layers += [nn.Linear(width_in, width_out), nn.LeakyReLU(slope)]
    return nn.Sequential(*layers)


def cnn_features(num_channels: int, side: int, hidden: Sequence[int], slope: float) -> nn.Sequential:
    """Two convolutions of 5×5 with 20 and 50 channels, each with LeakyReLU and 2×2 max-pooling, then FC layers.

    Args:
        num_channels: of the images.
        side: of the images, which are square.
        hidden: the widths of the fully connected layers.
        slope: of the LeakyReLU.

    Example:
        >>> features = cnn_features(3, 32, [500], 0.01)
    """
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
