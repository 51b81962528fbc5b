"""The forward and backward pass of a multilayer perceptron, without autograd.

A network this small takes a sixth of its step for autograd's graph, its hooks and the calls of modules. Here the same
operations that autograd would call are called in its order, so every gradient is equal to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.engine.inspection import chain_of, has_gradient_hooks, is_as_made
from engram.nn import trace
from engram.nn.classes import mask_logits, masked_classes
from engram.nn.dhp import DHPSoftmax
from engram.nn.heads import LinearSoftmax
from engram.nn.networks import Network

aten = torch.ops.aten  # PyTorch's own derivatives, which have no public names
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Slopes:
    """The loss of a batch, and its gradient with respect to everything that is trained."""

    loss: Tensor
    products: Sequence[tuple[str, Tensor | None, Tensor]]  # of a linear layer: its prefix, δ (B, out) and x (B, in)
    direct: Mapping[str, Tensor | None]  # of other weights: their gradients by name


@dataclass(frozen=True)
class Layer:
    """A linear layer, with the activation that follows it, if one does.

    Args:
        prefix: its name, with a dot.
        linear: the layer.
        activation: ReLU, LeakyReLU or None.
    """

    prefix: str
    linear: nn.Linear
    activation: nn.Module | None = None

    def forward(self, entered: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output z = x Wᵀ + b, and what its activation makes of it."""
        z = F.linear(entered, self.linear.weight, self.linear.bias)
        if self.activation is None:
            return z, z
        if isinstance(self.activation, nn.LeakyReLU):
            return z, F.leaky_relu(z, self.activation.negative_slope)
        return z, F.relu(z)

    def backward(self, by_activated: Tensor, z: Tensor) -> Tensor:
        """δ, the gradient with respect to z."""
        if self.activation is None:
            return by_activated
        if isinstance(self.activation, nn.LeakyReLU):
            return aten.leaky_relu_backward.default(by_activated, z, self.activation.negative_slope, False)
        return aten.threshold_backward.default(by_activated, z, 0)


def plastic_pass(head: DHPSoftmax, hidden: Tensor, targets: Tensor) -> tuple[Tensor, HeadBackward]:
    """The logits of the DHP Softmax, which writes its trace, and its backward pass."""
    if head.eta_range == "unit":
        trace.project_rate(head.eta)
    logits, written, saved = trace.write_and_read(hidden, targets, head.weight, head.alpha, head.eta, head.hebb)
    head.hebb.copy_(written)

    def backward(d: Tensor) -> tuple[Tensor, Gradients]:
        by_hidden, weight, alpha, eta = trace.slopes_of(d, saved)
        return by_hidden, {"head.weight": weight, "head.alpha": alpha, "head.eta": eta}

    return logits, backward


def linear_pass(head: LinearSoftmax, hidden: Tensor, targets: Tensor) -> tuple[Tensor, HeadBackward]:
    """The logits of the plain head, and its backward pass."""

    def backward(d: Tensor) -> tuple[Tensor, Gradients]:
        bias = {} if head.bias is None else {"head.bias": d.sum(dim=0)}
        return d.mm(head.weight), {"head.weight": d.t().mm(hidden), **bias}

    return F.linear(hidden, head.weight, head.bias), backward


HeadBackward = Callable[[Tensor], tuple[Tensor, Gradients]]  # from ∂L/∂z of the logits to ∂L/∂h and those of its weights
HEAD_PASSES = {DHPSoftmax: plastic_pass, LinearSoftmax: linear_pass}


@dataclass(frozen=True)
class Chain:
    """Linear layers with their activations, and a head.

    Args:
        layers: in the order in which they are called.
        head: one of those in `HEAD_PASSES`.

    Example:
        >>> slopes = Chain([Layer("features.1.", linear, nn.ReLU())], head).slopes(inputs, targets, classes=(0, 1))
    """

    layers: Sequence[Layer]
    head: nn.Module
    ones: dict[torch.dtype, Tensor] = field(default_factory=dict)  # ∂L/∂L

    @torch.no_grad()
    def slopes(self, inputs: Tensor, targets: Tensor, classes: Sequence[int]) -> Slopes:
        """The loss of a batch and its gradients; a plastic head has then written its trace.

        Args:
            inputs: (B, ...).
            targets: class numbers (B,).
            classes: the outputs that take part.
        """
        hidden = inputs.flatten(1)
        passed = []
        for layer in self.layers:
            entered = hidden
            z, hidden = layer.forward(entered)
            passed.append((layer, entered, z))
        logits, head_backward = HEAD_PASSES[type(self.head)](self.head, hidden, targets)  # type: ignore[operator]
        loss, by_logits = self._cross_entropy(logits, targets, classes)
        by_hidden, direct = head_backward(by_logits)
        products: list[tuple[str, Tensor | None, Tensor]] = []
        for layer, entered, z in reversed(passed):
            delta = layer.backward(by_hidden, z)
            products.append((layer.prefix, delta, entered))
            if layer is not self.layers[0]:
                by_hidden = delta.mm(layer.linear.weight)
        return Slopes(loss, products[::-1], direct)

    def _cross_entropy(self, logits: Tensor, targets: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient with respect to the logits."""
        log_p = torch.log_softmax(mask_logits(logits, classes), dim=1)
        mean, ignored = 1, -100  # as `cross_entropy` has them
        loss, total = aten.nll_loss_forward.default(log_p, targets, None, mean, ignored)
        one = self.ones.setdefault(loss.dtype, torch.ones_like(loss))
        by_log_p = aten.nll_loss_backward.default(one, log_p, targets, None, mean, ignored, total)
        by_logits = aten._log_softmax_backward_data.default(by_log_p, log_p, 1, log_p.dtype)
        if len(classes) < logits.shape[-1]:
            by_logits = by_logits.masked_fill(masked_classes(tuple(classes), logits.shape[-1], logits.device), 0)
        return loss, by_logits


def known_chain(model: nn.Module, factored: Collection[str]) -> Chain | None:
    """The model as a chain, if it is one of layers that are known here, and nothing else looks at what they compute.

    Args:
        model: any.
        factored: the prefixes of the linear layers whose gradients may stay products.

    Example:
        >>> known_chain(Network(mlp_features(784, [400], 0.01), DHPSoftmax(400, 10)), ["features.1."]) is None
        False
    """
    if type(model) is not Network or not is_as_made(model) or not _is_known_head(model.head):
        return None
    if any(has_gradient_hooks(theta) for theta in model.parameters()):
        return None
    layers: list[Layer] = []
    for link in chain_of(model):
        if not link.sole:
            return None
        if type(link.layer) is nn.Linear and f"{link.name}." in factored:
            layers.append(Layer(f"{link.name}.", link.layer))
        elif _is_known_activation(link.layer) and layers and layers[-1].activation is None:
            layers[-1] = Layer(layers[-1].prefix, layers[-1].linear, link.layer)
        elif not (_is_plain_flatten(link.layer) and not layers):
            return None
    return Chain(tuple(layers), model.head) if layers else None


def _is_known_head(head: nn.Module) -> bool:
    if type(head) not in HEAD_PASSES or not is_as_made(head):
        return False
    return not isinstance(head, DHPSoftmax) or (head.literal and not head.check_values)


def _is_known_activation(layer: nn.Module) -> bool:
    return type(layer) in (nn.LeakyReLU, nn.ReLU) and not layer.inplace


def _is_plain_flatten(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
