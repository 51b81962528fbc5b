"""Where settings come from: the paper's for a method on a benchmark, the steady form of DHP, a file, or typed text."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, check_choice, reason, shortened
from engram.common.files import parse_json, read_text
from engram.common.registry import BENCHMARKS, HEADS, PENALTIES
from engram.config.effect import has_effect, refuse_without_effect
from engram.config.methods import CUSTOM, check_method, parts_of
from engram.config.settings import SETTINGS, Config, check_name, from_dict, names_of

# The steady trace (docs/reproduction/steady.md says how it was found). The trace is a slow mean of each class's
# activations minus the mean over classes; it is read at a size that does not depend on theirs; the loss is not
# differentiated through it; and a penalty protects slow plus fast weights.
STEADY: dict[str, Any] = {
    "trace_scale": 2.0,
    "trace_centred": True,
    "trace_gradient": False,
    "alpha_init": 0.1,
    "learn_eta": False,
    "eta": 1e-4,
    "protect": "in-force",
    "head_init": "linear",
}

# A head that remembers sums, alone: there are no features to learn, and a second pass would count every sample twice.
MEMORY_ALONE: dict[str, Any] = {
    "network": "none",
    "random_features": 2000,
    "random_window": 200,  # of 100 to 784, the best with these on validation samples of mnist-small
    "epochs": 1,
    "batch_size": 500,
}
# The same head on features that learn.
MEMORY_ON_FEATURES: dict[str, Any] = {"learn_features": True}

# For choosing settings: a seed and samples that no published result uses.
CHOOSING: dict[str, Any] = {"seed": 1000, "examine": "validation"}

MOST_NAMED = 2  # settings in the form of a head
BEST = Path(__file__).with_name("best.json")  # made from results/ by tools/write_results.py
MAX_BEST_BYTES = 2**20
MAX_BYTES = 2**14  # the largest file of settings; usual ones have one or two thousand bytes


def preset(benchmark: str, method: str, *, best: bool = False, **changes: Any) -> Config:
    """The paper's settings of a method on a benchmark, or the best that are known, with changes.

    DHP starts as its author published it, on the paper's benchmarks; other heads start as nn.Linear does (`head_init`).
    A head that remembers sums ("slda") has settings of its own: alone, random features of the inputs and one pass;
    with a penalty or a rehearsal, the benchmark's network.

    Args:
        benchmark: a registered benchmark such as "split-mnist", or "custom" for a stream that you pass to `engram.run`.
        method: "finetune", a head, a penalty, a rehearsal, or a head with one of these: "dhp+si", "matched+replay".
        best: whether learning rate, strength and the head's settings are those that were best on validation samples
            (docs/reproduction/settings.md), and not the paper's.
        changes: settings that differ from the preset, by name. One that has no effect on the method is refused, unless
            it is None; `Config.replace` takes it, for a penalty of your own or to treat several methods alike.

    Example:
        >>> engram.preset("split-mnist", "dhp+si", trials=3).strength
        1.0
    """
    check_choice("benchmark", benchmark, (*BENCHMARKS.names(), CUSTOM))
    check_method(method)
    facts: Mapping[str, Any] = {"preset": {"dataset": CUSTOM}} if benchmark == CUSTOM else BENCHMARKS.facts(benchmark)
    settings: dict[str, Any] = {"benchmark": benchmark, "method": method, **facts.get("preset", {})}
    head, penalty, rehearsal = parts_of(method)
    if head is not None:
        settings |= {**HEADS.facts(head).get("preset", {}), **facts.get("heads", {}).get(head, {})}
        if HEADS.facts(head).get("memory"):
            settings |= MEMORY_ALONE if penalty is None and rehearsal is None else MEMORY_ON_FEATURES
    if penalty is not None:
        usual = PENALTIES.facts(penalty).get("strength")  # where the benchmark has none for it
        settings["strength"] = facts.get("strengths", {}).get(penalty, usual)
    if best:
        settings |= best_settings(benchmark, method)
    config = from_dict({**settings, **changes})
    refuse_without_effect((name for name, value in changes.items() if value is not None), [config])
    return config


def best_settings(benchmark: str, method: str) -> dict[str, Any]:
    """How the best settings that are known of a method on a benchmark differ from the paper's.

    A method without a head has the paper's baseline, the matched one.

    Args:
        benchmark: a benchmark of the paper.
        method: a head, alone or with SI, Online EWC or MAS.

    Example:
        >>> best_settings("split-mnist", "linear+si")["learning_rate"]
        0.03
    """
    known = _all_best().get(benchmark, {})
    head, penalty, rehearsal = parts_of(method)
    name = f"matched+{penalty}" if head is None and penalty else "matched" if method == "finetune" else method
    if rehearsal is not None or name not in known:
        heads = ", ".join(dict.fromkeys(name.partition("+")[0] for name in known))
        penalties = ", ".join(dict.fromkeys(name.partition("+")[2] or "no penalty" for name in known))
        those = f": only of the heads {heads}, with {penalties}" if known else f", only on {', '.join(_all_best())}"
        raise InputError(f"no best settings of {method} on {benchmark} are known{those}")
    return dict(known[name])


@cache
def _all_best() -> dict[str, dict[str, dict[str, Any]]]:
    return parse_json(read_text(BEST, MAX_BEST_BYTES))


def title_of(benchmark: str) -> str:
    """A benchmark's name as headings show it: "Split MNIST"."""
    return "Custom stream" if benchmark == CUSTOM else BENCHMARKS.facts(benchmark).get("title", benchmark)


def scenario_of(benchmark: str) -> str | None:
    """The scenario that a benchmark has by itself; None for a custom stream, and where none is registered."""
    return None if benchmark == CUSTOM else BENCHMARKS.facts(benchmark).get("scenario")


def with_scenario(name: str, config: Config) -> str:
    """The name or title of a config's benchmark, with the scenario if it is not the benchmark's own.

    Args:
        name: as it is to be shown.
        config: the settings.

    Example:
        >>> with_scenario("Split MNIST", engram.preset("split-mnist", "si", scenario="class"))
        'Split MNIST, class-incremental'
    """
    own = config.scenario in (None, scenario_of(config.benchmark))
    return name if own else f"{name}, {config.scenario}-incremental"


def changes_from_preset(config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the preset, as {name: (value, the preset's)}, except for trials and seed."""
    if config.benchmark == CUSTOM:
        return {}
    usual = preset(config.benchmark, config.method).to_dict()
    here = config.to_dict()
    if config.scenario == scenario_of(config.benchmark):
        here["scenario"] = None  # the benchmark's own, which a preset does not name
    ignored = names_of(stage="trial")
    return {n: (here[n], usual[n]) for n in here if here[n] != usual[n] and n not in ignored}


def form_of_head(config: Config, in_full: bool = True) -> str:
    """How the head differs from the preset's, in short: "steady", settings such as "eta=0.1", both, or nothing.

    Args:
        config: the settings.
        in_full: whether to name settings, too, and not only the steady form.

    Example:
        >>> form_of_head(engram.preset("split-mnist", "dhp+si", **STEADY))
        'steady'
        >>> form_of_head(engram.preset("split-mnist", "si", baseline_head="linear"))
        'baseline_head=linear'
    """
    usual = _head_settings(config.benchmark, config.method)
    changed = [name for name, value in usual.items() if getattr(config, name) != value]
    if not changed:
        return ""
    words = []
    if config.head == "dhp":
        unlike_steady = [name for name, value in (usual | STEADY).items() if getattr(config, name) != value]
        if len(unlike_steady) < len(changed):
            words, changed = ["steady"], unlike_steady
    if in_full:
        named = [f"{name}={getattr(config, name)}" for name in changed if has_effect(name, config)]
        words += named[:MOST_NAMED] + ["…"] * (len(named) > MOST_NAMED)
    return ", ".join(words)


@cache
def _head_settings(benchmark: str, method: str) -> dict[str, Any]:
    """What a preset says about the head, and which of its weights are protected."""
    strength = {"strength": 1.0} if parts_of(method).penalty else {}  # a custom stream has no preset for it
    usual = preset(benchmark, method, best=False, **strength)
    return {name: getattr(usual, name) for name in (*names_of(stage="head"), "protect")}


def load_config(path: str | Path) -> Config:
    """Read settings from a .toml or .json file.

    Args:
        path: a file as `Config.to_toml` or `Config.to_json` gives it.

    Example:
        >>> Path("dhp.toml").write_text(engram.preset("split-mnist", "dhp").to_toml()) > 0
        True
        >>> engram.load_config("dhp.toml").method
        'dhp'
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
    read = readers.get(path.suffix)
    if read is None:
        raise InputError(f"settings are read from a .toml or .json file, not from {path}")
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
    """A setting as it is typed on the command line: `epochs=3`, `hidden=[256,256]`, `alpha=uniform`.

    Example:
        >>> parse_setting("hidden=[256,256]")
        {'hidden': [256, 256]}
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InputError(f"a setting is written name=value, not {shortened(text)}")
    check_name(name)
    if SETTINGS[name].type is str:
        return {name: value}
    try:
        return {name: parse_json(value)}
    except InputError:
        raise InputError(f"{name} must be {SETTINGS[name].words}, not {shortened(value)}") from None
