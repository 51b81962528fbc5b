"""Generative replay: samples of a generator that learns with the network, labelled by the network before the task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engram.common.registry import REHEARSALS
from engram.common.tensor_file import tensors_under
from engram.rehearsal.rehearsal import (
    Batch,
    Draws,
    Moment,
    Rehearsal,
    Shapes,
    State,
    masked,
    mean_distillation,
    snapshot,
    teacher_logits,
    tensors_of,
)


class Generator(nn.Module):
    """A variational auto-encoder of samples in [0, 1] (Kingma & Welling 2014), with fully connected layers.

    Args:
        input_shape: of a sample.
        hidden: the widths of the encoder's layers; the decoder has the same in reverse.
        latent: the number of latent variables.

    Example:
        >>> generator = Generator((1, 28, 28), (400, 400), 100)
        >>> generator.decode(torch.zeros(3, 100)).shape
        torch.Size([3, 1, 28, 28])
    """

    def __init__(self, input_shape: Sequence[int], hidden: Sequence[int], latent: int):
        super().__init__()
        self.input_shape = tuple(input_shape)
        pixels = math.prod(input_shape)
        self.encoder = _relu_layers([pixels, *hidden])
        self.mean = nn.Linear(hidden[-1], latent)
        self.log_variance = nn.Linear(hidden[-1], latent)
        self.decoder = nn.Sequential(*_relu_layers([latent, *reversed(hidden)]), nn.Linear(hidden[0], pixels))

    def forward(self, normal: Tensor) -> Tensor:
        """Samples (B, *shape) from normal numbers (B, latent)."""
        return self.decode(normal)

    def decode(self, latent: Tensor) -> Tensor:
        """Samples (B, *shape) in [0, 1] from latent variables (B, latent)."""
        return self.decoder(latent).sigmoid().reshape(-1, *self.input_shape)

    def cost(self, inputs: Tensor, normal: Tensor) -> Tensor:
        """The negative evidence lower bound of each input (B,), divided by the number of pixels:

        BCE(x, decode(μ + σ ε)) + KL(N(μ, σ²) ‖ N(0, 1)),    KL = −½ Σ (1 + log σ² − μ² − σ²)

        Args:
            inputs: x (B, *shape), in [0, 1].
            normal: ε (B, latent).
        """
        flat = inputs.flatten(1)
        hidden = self.encoder(flat)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        decoded = self.decoder(mean + (log_variance / 2).exp() * normal)
        difference = F.binary_cross_entropy_with_logits(decoded, flat, reduction="none").sum(dim=1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
        return (difference + divergence) / flat.shape[1]


@REHEARSALS.register(
    "generative-replay",
    settings={
        "hidden": "generator_hidden",
        "latent": "generator_latent",
        "labels": "generator_labels",
        "batch_size": "rehearsal_batch",
        "temperature": "distillation_temperature",
        "weight": "rehearsal_weight",
    },
    words="repeats samples that a generator makes of earlier tasks",
)
class GenerativeReplay(Rehearsal):
    """Deep generative replay (Shin 2017), with the form and weights of van de Ven & Tolias (2019).

        loss = (1/n) [CE(z(x), y) + V(x)] + (1 − 1/n) [L(z(x̃), z̃(x̃)) + V(x̃)]        x̃ = decode(ε),  ε ∼ N(0, 1)

    x̃ comes from the generator before the task and z̃ from the network before the task. V is the generator's cost. L is
    the cross-entropy of z̃'s most likely class ("hard", Shin) or the distillation D_T ("soft", with distillation). The
    generator takes the same kind of steps as the network. No sample is stored.

    Args:
        hidden: the widths of the generator's layers.
        latent: the number of its latent variables.
        labels: "hard" or "soft".
        batch_size: how many samples a step generates; None for as many as there are new ones.
        temperature: T of the distillation.
        weight: in place of 1 − 1/n.

    Example:
        >>> GenerativeReplay(latent=20).draws(64)["encode"]
        (64, 20)
    """

    unit_inputs = True

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (400, 400),
        latent: int = 100,
        labels: str = "hard",
        batch_size: int | None = None,
        temperature: float = 2.0,
        weight: float | None = None,
    ):
        super().__init__(weight=weight)
        self.hidden = tuple(hidden)
        self.latent = latent
        self.labels = labels
        self.batch_size = batch_size
        self.temperature = temperature

    def attach(self, model: nn.Module, input_shape: Sequence[int]) -> None:
        model.add_module("generator", Generator(input_shape, self.hidden, self.latent))

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        return snapshot(tensors_of(model))

    def draws(self, batch_size: int) -> Shapes:
        repeated = (self.batch_size or batch_size, self.latent)
        return {"encode": (batch_size, self.latent), "decode": repeated, "again": repeated}

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        normal = {name: as_normal(uniform).to(batch.inputs.dtype) for name, uniform in random.items()}
        generator = model.get_submodule("generator")
        assert isinstance(generator, Generator)
        learned = generator.cost(batch.inputs, normal["encode"]).mean()
        if moment.task == 0:
            loss, logits = super().loss(model, still, state, batch, random, moment)
            return loss + learned, logits
        with torch.no_grad():
            before = tensors_under(state, "teacher.generator.")
            inputs = functional_call(still.get_submodule("generator"), before, (normal["decode"],))
        teacher = teacher_logits(still, state, inputs)
        known = torch.stack([then for _, then in moment.groups]).any(dim=0)
        labels = masked(teacher, known).argmax(dim=1)
        logits = model(torch.cat([batch.inputs, inputs]), torch.cat([batch.targets, labels]))
        size, w = len(batch.targets), self.share(moment.task)
        new = F.cross_entropy(masked(logits[:size], moment.new), batch.targets) + learned
        repeated = self._repeated(logits[size:], teacher, moment) + generator.cost(inputs, normal["again"]).mean()
        return (1 - w) * new + w * repeated, logits[:size]

    def _repeated(self, logits: Tensor, teacher: Tensor, moment: Moment) -> Tensor:
        """L, the mean over the kinds of earlier tasks."""
        if self.labels == "soft":
            return mean_distillation(logits, teacher, moment, self.temperature)
        parts = [F.cross_entropy(masked(logits, now), masked(teacher, then).argmax(1)) for now, then in moment.groups]
        return torch.stack(parts).mean()

    def end_task(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> State:
        return {**state, **snapshot(tensors)}


def as_normal(uniform: Tensor) -> Tensor:
    """Standard normal numbers from uniform ones in [0, 1):  √2 erf⁻¹(2u − 1)."""
    return math.sqrt(2) * torch.erfinv((2 * uniform - 1).clamp(min=-1 + 1e-12))


def _relu_layers(widths: Sequence[int]) -> nn.Sequential:
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)
