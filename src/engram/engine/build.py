"""Build what settings name: streams, models, penalties, the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engram.common.errors import InputError, check_choice, reason, shortened
from engram.common.registry import BENCHMARKS, HEADS, PENALTIES, REHEARSALS, Registration
from engram.common.seeding import DRAWING, derive_seed
from engram.config.settings import Config
from engram.data.benchmarks import source_names
from engram.data.samples import Dataset, Stream
from engram.data.scenarios import arrange
from engram.data.sources import load
from engram.engine.learner import Learner
from engram.nn.modules import frozen
from engram.nn.networks import Network, Standardised, cnn_features, initialise_by_he, mlp_features
from engram.penalties import NoPenalty, Penalty
from engram.rehearsal import Rehearsal


@dataclass(frozen=True)
class Custom:
    """Functions that make the parts of a model, called once for every model, in place of what its config names.

    Args:
        features: makes a module from inputs to features (batch, width), for configs with network="custom".
        head: makes a head from (width, classes); it is called as head(hidden, targets).
        penalty: makes a penalty for a model.

    Example:
        >>> Custom(features=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU()))
    """

    features: Callable[[], nn.Module] | None = None
    head: Callable[[int, int], nn.Module] | None = None
    penalty: Callable[[nn.Module], Penalty] | None = None


NOTHING_CUSTOM = Custom()
PRECISIONS = ("tf32", "float32", "float64")
MAX_WEIGHTS = 2**30  # in a network's layers: 4 GiB, and training takes several times as much


def dataset_names(config: Config) -> tuple[str, ...]:
    """The names of the datasets that a config needs."""
    return source_names(config.dataset, config.num_tasks)


def load_datasets(config: Config, folder: str | Path | None) -> list[Dataset]:
    """Load the datasets that a config needs, from a folder or from where `engram data` puts them."""
    return [load(name, folder) for name in dataset_names(config)]


def build_streams(config: Config, trials: Sequence[int], datasets: Sequence[Dataset]) -> list[Stream]:
    """The stream of each trial; if it does not depend on the trial, all trials have the same one."""
    if config.examine == "validation":
        datasets = [dataset.held_out() for dataset in datasets]
    if config.max_samples is not None:
        datasets = [dataset.shortened(config.max_samples) for dataset in datasets]
    made: list[Stream] = _built(BENCHMARKS[config.benchmark], config, datasets, trials)
    return arrange(made, config.scenario, config.mask_training)


def build_learner(
    config: Config,
    trial: int,
    input_shape: Sequence[int],
    num_classes: int,
    device: torch.device,
    dtype: torch.dtype,
    custom: Custom = NOTHING_CUSTOM,
) -> Learner:
    """A model of one trial, on its device, with its penalty."""
    model = build_model(config, trial, input_shape, num_classes, custom)
    return learner_from(config, trial, model, device, dtype, custom, input_shape, num_classes)


def learner_from(
    config: Config,
    trial: int,
    model: Network,
    device: torch.device,
    dtype: torch.dtype,
    custom: Custom,
    input_shape: Sequence[int],
    num_classes: int,
) -> Learner:
    """The model that `build_model` made, moved to its device, with its penalty or its rehearsal."""
    model = model.to(device=device, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "check_values"):
            # Streams have checked their targets, and the loop detects NaN.
            setattr(module, "check_values", False)  # noqa: B010 - modules in general have no such attribute
    penalty = build_penalty(config, trial, model) if custom.penalty is None else custom.penalty(model)
    penalty.unwatch()
    rehearsal = build_rehearsal(config)
    remembered = {} if rehearsal is None else rehearsal.initial_state(model, input_shape, num_classes)
    return Learner(config, trial, model, penalty, rehearsal=rehearsal, remembered=remembered)


def build_model(
    config: Config, trial: int, input_shape: Sequence[int], num_classes: int, custom: Custom = NOTHING_CUSTOM
) -> Network:
    """The network of one trial. All methods of a trial start with the same features and slow weights."""
    try:
        with DRAWING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(config.seed, "weights", trial))  # not the GPU's
            features = build_features(config, input_shape) if custom.features is None else custom.features()
            if custom.features is None and config.initialisation == "he":
                initialise_by_he(features, config.leaky_slope)
            width = _width_of(features, config, input_shape)
            if custom.head is not None:
                head = custom.head(width, num_classes)
            else:
                head = _built(HEADS[config.head], config, width, num_classes)
            model, rehearsal = Network(features, head), build_rehearsal(config)
            if rehearsal is not None:
                rehearsal.attach(model, input_shape)
            return model
    except (RuntimeError, TypeError, OverflowError) as error:  # raised by PyTorch if the network is too large
        raise InputError(f"the network of {config.method} cannot be built: {reason(error)}") from error


def build_features(config: Config, input_shape: Sequence[int]) -> nn.Module:
    """The layers before the head, which standardise the inputs first where the settings say so."""
    num_weights = sum(a * b for a, b in itertools.pairwise([math.prod(input_shape), *config.hidden]))
    if num_weights > MAX_WEIGHTS and config.network != "none":
        raise InputError(f"a network with hidden {shortened(config.hidden)} has more than {MAX_WEIGHTS} weights")
    if config.network == "none":
        made = nn.Sequential(nn.Flatten())
    elif config.network == "mlp":
        made = mlp_features(math.prod(input_shape), config.hidden, config.leaky_slope)
    elif len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] < 16:
        raise InputError(f"the cnn needs square images (channels, side, side) from side 16, not {tuple(input_shape)}")
    else:
        made = cnn_features(input_shape[0], input_shape[1], config.hidden, config.leaky_slope)
    if (config.input_mean, config.input_std) == (0, 1):
        return made
    return nn.Sequential(Standardised(config.input_mean, config.input_std), *made)


def _width_of(features: nn.Module, config: Config, input_shape: Sequence[int]) -> int:
    """The number of features; a custom module is called to find out."""
    if config.network == "none":
        return math.prod(input_shape)
    if config.network != "custom":
        return config.hidden[-1]
    if not isinstance(features, nn.Module):
        raise InputError(f"features must be a function that makes a module, not a {type(features).__name__}")
    with frozen(features), torch.no_grad():
        made = features(torch.zeros(2, *input_shape))
    if not isinstance(made, torch.Tensor) or made.ndim != 2 or len(made) != 2:
        shape = tuple(made.shape) if isinstance(made, torch.Tensor) else type(made).__name__
        raise InputError(f"features must return one row per sample, (batch, width), not {shape} for a batch of 2")
    return made.shape[1]


def build_penalty(config: Config, trial: int, model: nn.Module) -> Penalty:
    if config.strength is None or config.penalty is None:
        return NoPenalty(model)
    registration = PENALTIES[config.penalty]
    more: dict[str, Any] = {name: getattr(config, name) for name in ("strength", "regularize_alpha", "protect")}
    if "draws" in registration.facts:
        more["seed"] = derive_seed(config.seed, registration.facts["draws"], trial)
    penalty = _built(registration, config, model, **more)
    penalty.unwatch()
    return penalty


def build_rehearsal(config: Config) -> Rehearsal | None:
    return None if config.rehearsal is None else _built(REHEARSALS[config.rehearsal], config)


def _built(registration: Registration, config: Config, *inputs: Any, **more: Any) -> Any:
    """Call what is registered, with the settings that its registration names."""
    settings = registration.facts.get("settings", {})
    return registration.make(*inputs, **more, **{name: getattr(config, field) for name, field in settings.items()})


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str):
        raise InputError(f"a device is named by a word such as cpu, not {shortened(name)}")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # also refuses "meta", which computes nothing
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise InputError(
            f"there is no device {shortened(name)} here; use auto, cpu, or cuda if there is a GPU"
        ) from error
    return device


@contextmanager
def precision_of(name: str) -> Iterator[torch.dtype]:
    """Compute in this precision, with gradients, independent of the caller's settings; yields its type.

    GPUs use TensorFloat-32 in matrix products, and bfloat16 in stacked convolutions, only for "tf32". cuDNN uses
    deterministic algorithms, so that the same run gives the same numbers.
    """
    check_choice("precision", name, PRECISIONS)
    cudnn = torch.backends.cudnn
    before = (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = name == "tf32"
    cudnn.deterministic = True
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield torch.float64 if name == "float64" else torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
