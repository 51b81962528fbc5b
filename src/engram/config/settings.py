"""The settings of an experiment: one method on one benchmark, over some trials. Each is declared once, in `Config`.

A field's metadata hold the rules for its value, the stage of an experiment that it touches, and which models must share
its value. Everything else that depends on such facts is computed from `SETTINGS`.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram.common.errors import InputError, check_choice, nearest, shortened
from engram.common.registry import BENCHMARKS, HEADS
from engram.config.methods import CUSTOM, all_datasets, baseline_heads, check_method, datasets_of, parts_of
from engram.config.rules import (
    BELOW_ONE,
    FINITE,
    FRACTION,
    LARGEST,
    MAX_FEATURES,
    MAX_TASKS,
    MAX_TRIALS,
    NOT_NEGATIVE,
    OPTIMIZERS,
    POSITIVE,
    WIDTHS,
    Agree,
    Stage,
    at_least,
    at_most,
    declared,
    is_whole,
    one_of,
    setting,
)

# Values that had another name once, in saved runs and models.
RENAMED = {("baseline_head", "plain"): "linear"}
FISHER_LABELS = one_of("true", "predicted", "sampled", "exact")
NETWORKS = one_of("mlp", "cnn", "none", CUSTOM)


@dataclass(frozen=True)
class Config:
    """Everything that a result depends on, except for the data. `engram.preset` fills in the paper's values.

    Example:
        >>> config = engram.Config("split-mnist", "dhp+si", strength=1.0, num_tasks=5)
        >>> config.replace(epochs=3).epochs
        3
    """

    benchmark: str = dataclasses.field(metadata={"stage": "stream", "agree": "run"})
    method: str = dataclasses.field(metadata={"stage": "method"})

    trials: int = setting(at_least(1), at_most(MAX_TRIALS), default=10, stage="trial", agree="run")
    first_trial: int = setting(at_least(0), default=0, stage="trial", agree="run")  # trial 7 alone: 7, with trials=1
    seed: int = setting(at_least(0), default=0, stage="trial", agree="run")

    dataset: str = setting(default="mnist", stage="stream", agree="run")
    num_tasks: int = setting(at_least(1), at_most(MAX_TASKS), default=10, stage="stream", agree="run")
    # Use only the first samples of each dataset, at most this many for training and for testing; None for all.
    max_samples: int | None = setting(at_least(1), default=None, stage="stream", agree="run")
    # Of the removal probabilities; the same in all experiments.
    imbalance_seed: int = setting(at_least(0), default=0, stage="stream", agree="run")
    # Split MNIST: which classes form a task. "random": in each trial others.
    class_order: str = setting(default="fixed", stage="stream", agree="run", choices=one_of("fixed", "random"))
    # Which outputs the tasks have, and among which a network is evaluated; None for what the benchmark is.
    scenario: str | None = setting(default=None, stage="stream", agree="run", choices=one_of("task", "domain", "class"))
    # Whether other tasks' outputs are masked in training too, or only in evaluation.
    mask_training: bool = setting(default=True, stage="training", agree="run")
    # What networks are evaluated on. "validation": the last sixth of the training samples, which are not trained on.
    examine: str = setting(default="test", stage="stream", agree="run", choices=one_of("test", "validation"))

    # "none" for the inputs as they are; "custom" for features that are passed to `engram.run`.
    network: str = setting(default="mlp", stage="features", agree="section", choices=NETWORKS)
    hidden: tuple[int, ...] = setting(WIDTHS, default=(400, 400), stage="features", agree="section")
    leaky_slope: float = setting(FRACTION, default=0.01, stage="features", agree="section")
    # Of pixels in [0, 1]: the network's inputs are (pixel − mean) / std.
    input_mean: float = setting(FINITE, default=0.0, stage="features", agree="section")
    input_std: float = setting(POSITIVE, default=1.0, stage="features", agree="section")
    initialisation: str = setting(default="pytorch", stage="features", choices=one_of("pytorch", "he"))

    eta: float = setting(FINITE, default=1e-3, stage="head")
    eta_range: str = setting(default="unit", stage="head", agree="section", choices=one_of("unit", "unbounded"))
    alpha: str = setting(default="synapse", stage="head", agree="section", choices=one_of("synapse", "uniform"))
    alpha_init: float = setting(NOT_NEGATIVE, default=0.01, stage="head")  # α = alpha_init · U(0, 1)
    learn_eta: bool = setting(default=True, stage="head")
    # Whether the loss is differentiated through what a batch writes into the trace.
    trace_gradient: bool = setting(default=True, stage="head", agree="section")
    # The root mean square at which each class's trace is read; None for the trace as it was written.
    trace_scale: float | None = setting(POSITIVE, default=None, stage="head", agree="section")
    # Write each class's mean minus the mean over all classes of the batch.
    trace_centred: bool = setting(default=False, stage="head", agree="section")
    # When a batch is written: before its logits are computed, or after.
    trace_write: str = setting(default="before", stage="head", agree="section", choices=one_of("before", "after"))
    # How slow weights start: U(±1/√features), as in nn.Linear; or U(±1/√classes), as the paper's author published it.
    head_init: str = setting(default="linear", stage="head", choices=one_of("linear", "published"))
    head_gain: float = setting(POSITIVE, default=1.0, stage="head")  # of initial weights
    # The head of methods that name none.
    baseline_head: str = setting(default="matched", stage="head", agree="section", choices=baseline_heads)
    # The constant in place of a trace in the matched head.
    baseline_trace: float = setting(POSITIVE, default=1.0, stage="head")
    head_bias: bool = setting(default=False, stage="head", agree="section")  # of the linear head

    head_dropout: float = setting(BELOW_ONE, default=0.5, stage="head")  # balanced, balanced-trace
    rare_until: float = setting(NOT_NEGATIVE, default=500.0, stage="head")  # hebbian-softmax
    # fast-weights
    num_keys: int = setting(at_least(1), at_most(MAX_FEATURES), default=64, stage="head", agree="section")

    # Of heads with a memory: ψ, what they use of the features; the shrinkage of their covariance; and whether they have
    # slow weights too, which train the features.
    normalised: bool = setting(default=False, stage="head", agree="section")
    random_features: int = setting(at_least(0), at_most(MAX_FEATURES), default=0, stage="head", agree="section")
    random_window: int = setting(at_least(0), at_most(MAX_FEATURES), default=0, stage="head", agree="section")
    top_k: int = setting(at_least(0), at_most(MAX_FEATURES), default=0, stage="head", agree="section")
    # None: 0.15 features / samples
    shrinkage: float | None = setting(FRACTION, default=None, stage="head", agree="section")
    learn_features: bool = setting(default=False, stage="head", agree="section")

    strength: float | None = setting(POSITIVE, default=None, stage="penalty")  # None for methods without a penalty
    penalty_step: str = setting(default="proximal", stage="penalty", choices=one_of("proximal", "gradient"))
    regularize_alpha: bool = setting(default=False, stage="penalty")
    # The weights that are protected: slow ones, or slow plus fast ones.
    protect: str = setting(default="slow", stage="penalty", choices=one_of("slow", "in-force"))
    gamma: float = setting(FRACTION, default=1.0, stage="penalty")  # Online EWC
    fisher_labels: str = setting(default="true", stage="penalty", choices=FISHER_LABELS)  # EWC and Online EWC
    xi: float = setting(POSITIVE, default=0.1, stage="penalty")  # SI
    # Also consolidate within a task, after every so many steps, on the samples seen since; None only at its end.
    consolidate_every: int | None = setting(at_least(1), default=None, stage="penalty", agree="stack")
    # EWC, Online EWC and SI: logits are divided by it where importances are computed, so that they do not fade.
    temperature: float = setting(POSITIVE, default=1.0, stage="penalty")

    # Reference methods that repeat earlier tasks. How many samples are stored, or made up by pseudo-rehearsal.
    memory_size: int = setting(at_least(1), default=200, stage="rehearsal", agree="section")
    # How many samples a step repeats; None for as many as there are new ones.
    rehearsal_batch: int | None = setting(at_least(1), at_most(10**6), default=None, stage="rehearsal", agree="section")
    # The share of the repeated samples in the loss; None for that of the method's publication.
    rehearsal_weight: float | None = setting(FRACTION, default=None, stage="rehearsal", agree="section")
    distillation_temperature: float = setting(POSITIVE, default=2.0, stage="rehearsal", agree="section")
    der_alpha: float = setting(NOT_NEGATIVE, default=0.2, stage="rehearsal", agree="section")
    der_beta: float = setting(NOT_NEGATIVE, default=1.0, stage="rehearsal", agree="section")
    generator_hidden: tuple[int, ...] = setting(WIDTHS, default=(400, 400), stage="rehearsal", agree="section")
    generator_latent: int = setting(at_least(1), default=100, stage="rehearsal", agree="section")
    # "soft": with distillation
    generator_labels: str = setting(default="hard", stage="rehearsal", agree="section", choices=one_of("hard", "soft"))
    joint_start: str = setting(default="anew", stage="rehearsal", agree="section", choices=one_of("anew", "continue"))
    # As many epochs over all samples so far, or as many steps as the new task alone has.
    joint_steps: str = setting(default="epochs", stage="rehearsal", agree="section", choices=one_of("epochs", "task"))

    epochs: int = setting(at_least(1), default=20, stage="training", agree="stack")
    batch_size: int = setting(at_least(1), default=64, stage="training", agree="stack")
    learning_rate: float = setting(POSITIVE, default=0.01, stage="training")
    # How a gradient becomes a step: see engine/optimizer.py. Without momentum and decay, "sgd" is plain SGD.
    optimizer: str = setting(default="sgd", stage="training", agree="section", choices=one_of(*OPTIMIZERS))
    momentum: float = setting(BELOW_ONE, default=0.0, stage="training", agree="section")  # none takes no memory
    weight_decay: float = setting(NOT_NEGATIVE, default=0.0, stage="training")  # of every trained parameter
    beta1: float = setting(BELOW_ONE, default=0.9, stage="training")  # Adam and AdamW, as the next two
    beta2: float = setting(BELOW_ONE, default=0.999, stage="training")
    adam_eps: float = setting(POSITIVE, default=1e-8, stage="training")
    # Whether each task starts with a new state of the optimizer, or goes on with what it has of earlier tasks.
    reset_optimizer: bool = setting(default=True, stage="training")

    def __post_init__(self) -> None:
        check_choice("benchmark", self.benchmark, (*BENCHMARKS.names(), CUSTOM))
        check_method(self.method)
        if self.baseline_head in HEADS:
            HEADS.facts(self.baseline_head)  # imports that of another package
        allowed_datasets = datasets_of(self.benchmark)
        if self.dataset not in allowed_datasets:
            if self.dataset in all_datasets():
                raise InputError(f"the dataset of {self.benchmark} cannot be {shortened(self.dataset)}")
            check_choice("dataset", self.dataset, allowed_datasets)
        for name, value in vars(self).items():
            facts = SETTINGS[name]
            if value != facts.default:  # a default is always allowed, and choices may take a while to list
                facts.check(value)
        if self.eta_range != "unbounded" and not 0 <= self.eta <= 1:
            raise InputError(f"eta must be {FRACTION.words}, not {shortened(self.eta)}")
        if self.penalty is not None and self.strength is None:
            raise InputError(f"the method {self.method} needs a strength, and has none: strength must be above 0")
        partner = self.penalty or self.rehearsal
        if partner is not None and HEADS.facts(self.head).get("memory") and not self.learn_features:
            work = "protect" if self.penalty else "rehearse"
            raise InputError(f"{partner} has nothing to {work}, as {self.head} learns nothing: set learn_features")

    @property
    def head(self) -> str:
        """The name of the head: the method's, or the baseline's for a method that names none."""
        return parts_of(self.method).head or self.baseline_head

    @property
    def plastic(self) -> bool:
        """Whether the method names a head that is no baseline, as "dhp" and "dhp+si" do."""
        named = parts_of(self.method).head
        return named is not None and not HEADS.facts(named).get("baseline")

    @property
    def penalty(self) -> str | None:
        """The name of the method's penalty, or None."""
        return parts_of(self.method).penalty

    @property
    def rehearsal(self) -> str | None:
        """The name of the method's rehearsal, or None."""
        return parts_of(self.method).rehearsal

    def replace(self, **changes: Any) -> Config:
        """The same settings with some changed. Unknown names and values of the wrong type are refused.

        Args:
            changes: values by the names of settings.

        Example:
            >>> engram.preset("split-mnist", "si").replace(trials=3).trials
            3
        """
        return from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The settings by name, as JSON can hold them."""
        # not `dataclasses.asdict`, which copies deeply and takes several times as long
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def to_toml(self) -> str:
        """One line `name = value` for each setting that is not None.

        Example:
            >>> print(engram.preset("split-mnist", "si").to_toml().splitlines()[1])
            method = "si"
        """
        settings = ((name, value) for name, value in self.to_dict().items() if value is not None)
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings)

    def to_json(self) -> str:
        """The settings as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


_HINTS = typing.get_type_hints(Config)
SETTINGS = {field.name: declared(field, _HINTS[field.name]) for field in dataclasses.fields(Config)}


def names_of(*, stage: Stage | None = None, agree: Agree | None = None) -> tuple[str, ...]:
    """The names of the settings of a stage, or those that models of a run, stack or section must share.

    Example:
        >>> names_of(agree="stack")
        ('consolidate_every', 'epochs', 'batch_size')
    """
    chosen = (s for s in SETTINGS.values() if stage in (None, s.stage) and agree in (None, s.agree))
    return tuple(found.name for found in chosen)


def from_dict(settings: Mapping[str, Any]) -> Config:
    """A config from settings by name. Unknown names and values of the wrong type are refused.

    Args:
        settings: as `Config.to_dict` gives them; those left out have their defaults.

    Example:
        >>> from_dict({"benchmark": "split-mnist", "method": "dhp", "hidden": [256]}).hidden
        (256,)
    """
    values = {name: as_setting(name, value) for name, value in settings.items()}
    missing = {"benchmark", "method"} - set(values)
    if missing:
        raise InputError(f"the settings do not name a {min(missing)}")
    return Config(**values)


def check_name(name: str) -> None:
    """Refuse a setting that does not exist."""
    if name not in SETTINGS:
        hint = nearest(name, SETTINGS)
        raise InputError(f"there is no setting {shortened(name)}{hint}; `engram run --help-settings` lists them all")


def as_setting(name: str, value: Any) -> Any:
    """A value as the type of that setting: a whole number serves as a float, a list as a tuple."""
    check_name(name)
    facts = SETTINGS[name]
    if value == facts.default and type(value) is type(facts.default):  # most are, in a list of many runs
        return value
    if value is None and facts.optional:
        return None
    value = RENAMED.get((name, value), value) if facts.type is str and type(value) is str else value
    if type(value) is facts.type and facts.type in (str, bool):
        return value
    if facts.type is int and is_whole(value):
        return value
    if facts.type is float and type(value) in (int, float) and abs(value) <= LARGEST:
        return float(value)
    if facts.type is tuple and isinstance(value, list | tuple) and all(is_whole(v) for v in value):
        return tuple(value)
    raise InputError(f"{name} must be {facts.words}, not {shortened(value)}")
