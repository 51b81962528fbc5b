"""The settings of an experiment: one method on one benchmark, over some trials. Every default lives here, once."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, check_choice, reason, shortened
from engram.common.files import parse_json, read_text

BENCHMARKS = ("permuted-mnist", "imbalanced-permuted-mnist", "split-mnist", "vision-mixture")
PENALTIES = ("si", "ewc", "online-ewc", "mas")
METHODS = ("finetune", "dhp", *(head + penalty for penalty in PENALTIES for head in ("", "dhp+")))
PAPER_METHODS = tuple(method for method in METHODS if method not in ("ewc", "dhp+ewc"))
LARGEST = 3.4028234663852886e38  # of the 32-bit numbers that networks compute with
MAX_BYTES = 2**14  # of a file of settings, which has one or two thousand
MAX_WHOLE = 2**128 - 1  # of whole numbers; larger ones than any seed cannot even be written down
MOST = {"trials": 10**6, "num_tasks": 10**4}  # tables of results grow with them
DATASETS = ("mnist", "mnist-small", "fashion-mnist", "notmnist", "five-datasets", "own")
DATASET_OF = {"vision-mixture": "five-datasets", "own": "own"}  # the other benchmarks have a choice


@dataclass(frozen=True)
class Config:
    """All that a result depends on, but for the data themselves. `engram.preset` fills in the paper's values.

    The benchmark "own" stands for a stream of one's own, given to `engram.run`.
    """

    benchmark: str
    method: str

    trials: int = 10
    first_trial: int = 0  # trial 7 alone is first_trial=7, trials=1
    seed: int = 0

    # the stream
    dataset: str = "mnist"
    num_tasks: int = 10
    max_samples: int | None = None  # of each dataset, for training and for testing each: the first; None for all
    imbalance_seed: int = 0  # of the removal probabilities; the same in all experiments
    mask_training: bool = True  # other tasks' outputs, in training too; else only when examined
    examine: str = "test"  # or "validation": the last sixth of the training samples, on which nothing is trained

    # the network
    network: str = "mlp"  # or "cnn", or "own" for features that are given to `engram.run`
    hidden: tuple[int, ...] = (400, 400)
    leaky_slope: float = 0.01
    input_mean: float = 0.0  # of the pixels in [0, 1]; the network sees (pixel − mean) / std
    input_std: float = 1.0
    initialisation: str = "pytorch"  # of the features; or "he"

    # the head: plastic for the methods with "dhp", else the baseline
    eta: float = 1e-3
    eta_range: str = "unit"
    alpha: str = "synapse"
    alpha_init: float = 0.01  # α = alpha_init · U(0, 1)
    learn_eta: bool = True
    trace_gradient: bool = True  # whether the loss is differentiated through what a batch writes
    trace_scale: float | None = None  # the root mean square at which each class's trace is read; None for as written
    trace_centred: bool = False  # write each class's mean less the mean of all classes of the batch
    baseline_head: str = "matched"
    baseline_trace: float = 1.0  # the constant that stands in the place of a trace in the matched head

    # the penalty; None for the methods without
    strength: float | None = None
    penalty_step: str = "proximal"
    regularize_alpha: bool = False
    protect: str = "slow"  # weights; or "in-force", slow plus fast
    gamma: float = 1.0  # Online EWC
    fisher_labels: str = "true"  # EWC and Online EWC
    xi: float = 0.1  # SI

    # training by plain SGD
    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 0.01

    def __post_init__(self) -> None:
        check_choice("benchmark", self.benchmark, (*BENCHMARKS, "own"))
        check_choice("method", self.method, METHODS)
        check_choice("dataset", self.dataset, DATASETS)
        only = DATASET_OF.get(self.benchmark)
        if self.dataset != only and (only is not None or self.dataset in DATASET_OF.values()):
            raise InputError(f"the dataset of {self.benchmark} cannot be {shortened(self.dataset)}")
        check_choice("network", self.network, ("mlp", "cnn", "own"))
        check_choice("examine", self.examine, ("test", "validation"))
        check_choice("initialisation", self.initialisation, ("pytorch", "he"))
        check_choice("protect", self.protect, ("slow", "in-force"))
        check_choice("eta_range", self.eta_range, ("unit", "unbounded"))
        check_choice("alpha", self.alpha, ("synapse", "uniform"))
        check_choice("baseline_head", self.baseline_head, ("matched", "plain"))
        check_choice("penalty_step", self.penalty_step, ("proximal", "gradient"))
        check_choice("fisher_labels", self.fisher_labels, ("true", "sampled", "exact"))
        for name in ("trials", "num_tasks", "epochs", "batch_size"):
            _check(name, getattr(self, name) >= 1, self, "at least 1")
        for name, most in MOST.items():
            _check(name, getattr(self, name) <= most, self, f"at most {most}")
        for name in ("seed", "imbalance_seed", "first_trial"):
            _check(name, getattr(self, name) >= 0, self, "at least 0")
        _check(
            "hidden",
            len(self.hidden) > 0 and all(width >= 1 for width in self.hidden),
            self,
            "widths of at least 1",
        )
        _check("leaky_slope", 0 <= self.leaky_slope <= 1, self, "in [0, 1]")
        _check("eta", abs(self.eta) <= LARGEST, self, "a number")
        _check("eta", self.eta_range == "unbounded" or 0 <= self.eta <= 1, self, "in [0, 1]")
        _check("input_mean", abs(self.input_mean) <= LARGEST, self, "a number")
        _check("input_std", 0 < self.input_std <= LARGEST, self, "above 0")
        _check("baseline_trace", 0 < self.baseline_trace <= LARGEST, self, "above 0")
        _check("alpha_init", 0 <= self.alpha_init <= LARGEST, self, "at least 0")
        _check("trace_scale", self.trace_scale is None or 0 < self.trace_scale <= LARGEST, self, "above 0")
        _check("learning_rate", 0 < self.learning_rate <= LARGEST, self, "above 0")
        _check("gamma", 0 <= self.gamma <= 1, self, "in [0, 1]")
        _check("xi", 0 < self.xi <= LARGEST, self, "above 0")
        _check("max_samples", self.max_samples is None or self.max_samples >= 1, self, "at least 1")
        if self.strength is not None:
            _check("strength", 0 < self.strength <= LARGEST, self, "above 0")
        elif self.penalty is not None:
            raise InputError(f"the method {self.method} needs a strength, and has none: strength must be above 0")

    @property
    def plastic(self) -> bool:
        """Whether the method has the DHP Softmax as its head."""
        return self.method.split("+")[0] == "dhp"

    @property
    def penalty(self) -> str | None:
        """The method's consolidation, or None."""
        last = self.method.split("+")[-1]
        return last if last in PENALTIES else None

    def replace(self, **changes: Any) -> Config:
        """The same settings but for some; unknown names and values of the wrong type are refused."""
        return from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "hidden": list(self.hidden)}

    def to_toml(self) -> str:
        """One `name = value` a line; what is None is left out."""
        settings = ((name, value) for name, value in self.to_dict().items() if value is not None)
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


KINDS = {field.name: str(field.type) for field in dataclasses.fields(Config)}  # of all settings, by name


def from_dict(settings: Mapping[str, Any]) -> Config:
    values = {name: as_setting(name, value) for name, value in settings.items()}
    missing = {"benchmark", "method"} - set(values)
    if missing:
        raise InputError(f"the settings do not name a {min(missing)}")
    return Config(**values)


def as_setting(name: str, value: Any) -> Any:
    """The value as a setting of that name has it; unknown names and values of the wrong type are refused."""
    check_choice("setting", name, KINDS)
    return _as_type(name, value, KINDS[name])


def load_config(path: str | Path) -> Config:
    """Read settings from a .toml or .json file."""
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
    read = readers.get(path.suffix)
    if read is None:
        raise InputError(f"settings are read from a .toml or a .json file, not from {path}")
    try:
        settings = read(read_text(path, MAX_BYTES))
        if not isinstance(settings, dict):
            raise InputError("they are not a table of names and values")
        return from_dict(settings)
    except InputError as error:
        raise InputError(f"cannot use the settings in {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot use the settings in {path}: {reason(error)}") from error


def parse_setting(text: str) -> dict[str, Any]:
    """A setting as a person types it: `epochs=3`, `hidden=[256,256]`, `alpha=uniform`."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InputError(f"a setting is written name=value, not {shortened(text)}")
    check_choice("setting", name, KINDS)
    if KINDS[name] == "str":
        return {name: value}
    try:
        return {name: parse_json(value)}
    except InputError:
        raise InputError(f"{name} must be {_in_words(KINDS[name])}, not {shortened(value)}") from None


def _check(name: str, holds: bool, config: Config, rule: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {rule}, not {shortened(getattr(config, name))}")


def _as_type(name: str, value: Any, kind: str) -> Any:
    """The value as the type that its field declares; a whole number serves as a float."""
    if value is None and "None" in kind:
        return None
    kind = kind.removesuffix(" | None")
    if kind == "tuple[int, ...]" and isinstance(value, list | tuple) and all(_is_whole(v) for v in value):
        return tuple(value)
    if kind == "float" and type(value) in (int, float) and abs(value) <= LARGEST:
        return float(value)
    if type(value).__name__ == kind and (kind != "int" or _is_whole(value)):
        return value
    raise InputError(f"{name} must be {_in_words(kind)}, not {shortened(value)}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_WHOLE


def _in_words(kind: str) -> str:
    words = {"str": "a word", "int": "a whole number", "float": "a number", "bool": "true or false"}
    return words.get(kind.removesuffix(" | None"), "a list of whole numbers")
