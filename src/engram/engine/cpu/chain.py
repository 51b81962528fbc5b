"""The forward and backward pass of a multilayer perceptron, without autograd.

In a network this small, autograd's graph, its hooks and the calls of modules are a good part of a step. Here the
operations that autograd would call are called in its order, so every gradient is equal to the last digit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.engine.inspection import chain_of, has_gradient_hooks, is_as_made
from engram.nn import trace
from engram.nn.baselines import LinearSoftmax, MatchedSoftmax
from engram.nn.classes import mask_logits, masked_classes
from engram.nn.dhp import DHPSoftmax
from engram.nn.networks import Network

aten = torch.ops.aten  # PyTorch's own derivatives, which have no public names
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Slopes:
    """The loss of a batch, and its gradient with respect to everything that is trained."""

    loss: Tensor
    products: Sequence[tuple[str, Tensor | None, Tensor]]  # of a linear layer: its prefix, δ (B, out) and x (B, in)
    direct: Mapping[str, Tensor | None]  # of other weights: their gradients by name

    def gradients(self, into: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The gradient of each weight by its name, with the products carried out.

        Args:
            into: tensors of the shapes of the linear layers' weights, in which their gradients are computed.
        """
        found = dict(self.direct)
        for prefix, delta, entered in self.products:
            weight, bias = prefix + "weight", prefix + "bias"
            found[weight] = None if delta is None else torch.mm(delta.t(), entered, out=into[weight])
            if bias in into:
                found[bias] = None if delta is None else torch.sum(delta, dim=0, out=into[bias])
        return found


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

    def forward(self, entered: Tensor) -> Tensor:
        """What the activation makes of the layer's output z = x Wᵀ + b, in place of z."""
        z = F.linear(entered, self.linear.weight, self.linear.bias)
        if self.activation is None:
            return z
        if isinstance(self.activation, nn.LeakyReLU):
            return F.leaky_relu_(z, self.activation.negative_slope)
        return F.relu_(z)

    def backward(self, by_activated: Tensor, activated: Tensor) -> Tensor:
        """δ, the gradient with respect to z, in place of that with respect to what was made of it.

        It depends on the sign of z alone, which the activation keeps.
        """
        if self.activation is None:
            return by_activated
        if isinstance(self.activation, nn.LeakyReLU):
            slope = self.activation.negative_slope
            return aten.leaky_relu_backward.grad_input(by_activated, activated, slope, True, grad_input=by_activated)
        return aten.threshold_backward.grad_input(by_activated, activated, 0, grad_input=by_activated)


class HeadPass(Protocol):
    """The passes of one head: forward, then backward for the same batch."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor: ...  # the logits

    def backward(
        self, d: Tensor
    ) -> tuple[Tensor, Gradients]: ...  # ∂L/∂h, and the gradients of the weights, from ∂L/∂z


class LinearPass:
    """The plain head:  z = θ h + b.

    Args:
        head: whose passes.

    Example:
        >>> passes = LinearPass(head)
        >>> logits = passes.forward(hidden, targets)
        >>> by_hidden, gradients = passes.backward(d)
    """

    def __init__(self, head: LinearSoftmax):
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.hidden = hidden
        return F.linear(hidden, self.head.weight, self.head.bias)

    def backward(self, d: Tensor) -> tuple[Tensor, Gradients]:
        bias = {} if self.head.bias is None else {"head.bias": d.sum(dim=0)}
        return d.mm(self.head.weight), {"head.weight": d.t().mm(self.hidden), **bias}


class MatchedPass:
    """The paper's baseline:  z = (θ + c θ′) h.

    Args:
        head: whose passes.

    Example:
        >>> logits = MatchedPass(head).forward(hidden, targets)
    """

    def __init__(self, head: MatchedSoftmax):
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.hidden, self.in_force = hidden, self.head.in_force()
        return F.linear(hidden, self.in_force)

    def backward(self, d: Tensor) -> tuple[Tensor, Gradients]:
        slope = d.t().mm(self.hidden)
        return d.mm(self.in_force), {"head.weight": slope, "head.extra": slope * self.head.trace}


class PlasticPass:
    """The DHP Softmax, which writes its trace in the forward pass.

    Args:
        head: whose passes.

    Example:
        >>> logits = PlasticPass(head).forward(hidden, targets)
    """

    def __init__(self, head: DHPSoftmax):
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        head = self.head
        if head.eta_range == "unit":
            head.eta.clamp_(0, 1)
        logits, written, self.saved = trace.write_and_read(
            hidden, targets, head.weight, head.alpha, head.eta, head.hebb
        )
        head.hebb.copy_(written)
        return logits

    def backward(self, d: Tensor) -> tuple[Tensor, Gradients]:
        by_hidden, weight, alpha, eta = trace.slopes_of(d, self.saved)
        return by_hidden, {"head.weight": weight, "head.alpha": alpha, "head.eta": eta}


def pass_of(head: nn.Module) -> HeadPass | None:
    """The passes of a head; None if it is not known here.

    Args:
        head: any.

    Example:
        >>> pass_of(LinearSoftmax(4, 3)).forward(hidden, targets)
    """
    if type(head) is LinearSoftmax:
        return LinearPass(head)
    if type(head) is MatchedSoftmax:
        return MatchedPass(head)
    if type(head) is DHPSoftmax and head.literal and not head.check_values:
        return PlasticPass(head)
    return None


@dataclass(frozen=True)
class Chain:
    """Linear layers with their activations, and a head.

    Args:
        layers: in the order in which they are called.
        head: the passes of the head.

    Example:
        >>> chain = Chain([Layer("features.1.", linear, nn.ReLU())], pass_of(head))
        >>> with torch.no_grad():
        ...     slopes = chain.slopes(inputs, targets, classes=(0, 1))
    """

    layers: Sequence[Layer]
    head: HeadPass

    def slopes(self, inputs: Tensor, targets: Tensor, classes: Sequence[int], weight: Tensor | None = None) -> Slopes:
        """The loss of a batch and its gradients; a plastic head has then written its trace. Call it without autograd.

        Args:
            inputs: (B, ...).
            targets: class numbers (B,).
            classes: the outputs that take part.
            weight: by which the loss of each sample is multiplied (B,); None for 1.
        """
        entered = [inputs.flatten(1)]
        for layer in self.layers:
            entered.append(layer.forward(entered[-1]))
        hidden = entered[-1]
        loss, by_logits = _cross_entropy(self.head.forward(hidden, targets), targets, classes, weight)
        by_hidden, direct = self.head.backward(by_logits)
        products: list[tuple[str, Tensor | None, Tensor]] = []
        for layer, x, activated in zip(self.layers[::-1], entered[-2::-1], entered[::-1], strict=False):
            delta = layer.backward(by_hidden, activated)
            products.append((layer.prefix, delta, x))
            if layer is not self.layers[0]:
                by_hidden = delta.mm(layer.linear.weight)
        return Slopes(loss, products[::-1], direct)


def _cross_entropy(
    logits: Tensor, targets: Tensor, classes: Sequence[int], weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the logits."""
    log_p = torch.log_softmax(mask_logits(logits, classes), dim=1)
    each, mean, ignored = 0, 1, -100  # as `cross_entropy` has them
    loss, total = aten.nll_loss_forward.default(log_p, targets, None, mean if weight is None else each, ignored)
    by_loss, kind = _one(loss.dtype, loss.device), mean
    if weight is not None:
        loss, by_loss, kind = (loss * weight).mean(), by_loss / len(targets) * weight, each
    by_log_p = aten.nll_loss_backward.default(by_loss, log_p, targets, None, kind, ignored, total)
    by_logits = aten._log_softmax_backward_data.default(by_log_p, log_p, 1, log_p.dtype)
    if len(classes) < logits.shape[-1]:
        by_logits = by_logits.masked_fill(masked_classes(tuple(classes), logits.shape[-1], logits.device), 0)
    return loss, by_logits


@lru_cache(maxsize=16)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """∂L/∂L."""
    return torch.ones((), dtype=dtype, device=device)


def known_chain(model: nn.Module, factored: Collection[str] | None = None) -> Chain | None:
    """The model as a chain, if it is one of layers that are known here, and nothing else looks at what they compute.

    Args:
        model: any.
        factored: the prefixes of the linear layers whose gradients may stay products; None for all, where inputs have
            one row per sample.

    Example:
        >>> known_chain(Network(mlp_features(784, [400], 0.01), DHPSoftmax(400, 10)), ["features.1."]) is None
        False
    """
    if type(model) is not Network or not is_as_made(model) or not is_as_made(model.head):
        return None
    head = pass_of(model.head)
    if head is None or any(has_gradient_hooks(theta) for theta in model.parameters()):
        return None
    layers: list[Layer] = []
    for link in chain_of(model):
        if not link.sole:
            return None
        if type(link.layer) is nn.Linear and (factored is None or f"{link.name}." in factored):
            layers.append(Layer(f"{link.name}.", link.layer))
        elif _is_known_activation(link.layer) and layers and layers[-1].activation is None:
            layers[-1] = Layer(layers[-1].prefix, layers[-1].linear, link.layer)
        elif not (_is_plain_flatten(link.layer) and not layers):
            return None
    return Chain(tuple(layers), head) if layers else None


def _is_known_activation(layer: nn.Module) -> bool:
    """Whether it is one that keeps the sign: a negative slope of LeakyReLU may be any number."""
    if isinstance(layer, nn.LeakyReLU) and layer.negative_slope < 0:
        return False
    return type(layer) in (nn.LeakyReLU, nn.ReLU) and not layer.inplace


def _is_plain_flatten(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
