"""Heads by name; and forms of the plain head and of the DHP Softmax that have names of their own."""

from __future__ import annotations

import builtins
import inspect
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from torch import nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn.baselines import LinearSoftmax
from engram.nn.dhp import DHPSoftmax


def list(pattern: str = "*") -> builtins.list[str]:
    """The names of the heads that match a pattern.

    Args:
        pattern: as in a shell: "d*".

    Example:
        >>> engram.heads.list("d*")
        ['dhp', 'dhp-uniform']
    """
    return sorted(name for name in HEADS.names() if fnmatchcase(name, pattern))


def create(name: str, in_features: int, out_features: int, **settings: Any) -> nn.Module:
    """A head by its name.

    Args:
        name: one of `list()`.
        in_features: the width of the features.
        out_features: the number of classes.
        settings: of the head, by name.

    Example:
        >>> head = engram.heads.create("dhp", 512, 10, eta=1e-4)
    """
    make = HEADS[name].make
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # a function that passes them on
        known += HEADS.facts(name).get("settings", {})
    only = f"only {', '.join(known)}" if known else "and none at all"
    for setting in settings:
        if setting not in known:
            raise InputError(f"the head {name} has no setting {setting!r}, {only}")
    for what, size in (("features", in_features), ("classes", out_features)):
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InputError(f"a head needs a whole number of {what}, at least 1, not {size!r}")
    if settings.get("random_window") and "random_features" in known and not settings.get("random_features"):
        raise InputError("random_window has no effect without random_features: leave it out, or give both")
    return make(in_features, out_features, **settings)


@HEADS.register(
    "scaled",
    listed=False,
    start="scaled",
    settings={"bias": "head_bias", "head_gain": "head_gain"},
    words="an ordinary linear output layer, as large at the start as suits the features",
)
def scaled(in_features: int, out_features: int, *, bias: bool = False, head_gain: float = 1.0) -> LinearSoftmax:
    """The ordinary output layer, whose first batch decides how large its weights are: `LinearSoftmax` with "scaled".

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        bias: whether there is a bias.
        head_gain: a factor of the size of the weights at the start.

    Example:
        >>> head = engram.heads.create("scaled", 512, 10)
    """
    return LinearSoftmax(in_features, out_features, bias=bias, head_init="scaled", head_gain=head_gain)


@HEADS.register(
    "dhp-uniform",
    listed=False,
    settings="eta eta_range alpha_init learn_eta trace_gradient trace_scale trace_centred trace_write head_init",
    words="the paper's output layer, with one plasticity coefficient for all synapses",
)
def dhp_uniform(in_features: int, out_features: int, **settings: Any) -> DHPSoftmax:
    """The DHP Softmax with one plasticity coefficient that all synapses share:  z = (θ + α Hebb) h,  α ().

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        settings: those of `DHPSoftmax`, without `alpha`.

    Example:
        >>> head = engram.heads.create("dhp-uniform", 512, 10)
    """
    return DHPSoftmax(in_features, out_features, alpha="uniform", **settings)


@HEADS.register(
    "steady",
    listed=False,
    settings="alpha alpha_init head_init",
    preset={"protect": "in-force", "alpha_init": 0.1},
    words="the paper's output layer with a slow, centred trace, read at a fixed size",
)
def steady(
    in_features: int,
    out_features: int,
    *,
    eta: float = 1e-4,
    alpha: str = "synapse",
    alpha_init: float = 0.1,
    trace_scale: float = 2.0,
    head_init: str = "linear",
) -> DHPSoftmax:
    """The steady trace: the form of the DHP Softmax in which it helps, with a penalty that protects what is in force.

        z = (θ + α s Hebb / rms(Hebb_c)) h        Hebb_c ← (1 − η) Hebb_c + η (h̃_c − mean over classes of h̃)

    η is not learned, and no gradient flows through what a batch writes.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        eta: η, fixed.
        alpha: "synapse" or "uniform".
        alpha_init: α starts at alpha_init · U(0, 1).
        trace_scale: s, the root mean square at which the trace of each class is read.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = engram.heads.create("steady", 512, 10)
    """
    return DHPSoftmax(
        in_features,
        out_features,
        eta=eta,
        alpha=alpha,
        alpha_init=alpha_init,
        learn_eta=False,
        trace_gradient=False,
        trace_scale=trace_scale,
        trace_centred=True,
        head_init=head_init,
    )
