"""Settings to start from: the paper's for a method on a benchmark, and the steady form of DHP."""

from __future__ import annotations

from typing import Any

from engram.common.errors import check_choice
from engram.common.registry import BENCHMARKS, PENALTIES
from engram.config.methods import CUSTOM, all_methods, parts_of
from engram.config.settings import Config, from_dict, names_of

# The steady trace: the form of the DHP Softmax in which it helps (docs/reproduction.md says how it was found). The
# trace is a slow mean of each class's activations minus the mean over classes; it is read at a size that does not
# depend on theirs; the loss is not differentiated through it; and a penalty protects slow plus fast weights.
STEADY: dict[str, Any] = {
    "trace_scale": 2.0,
    "trace_centred": True,
    "trace_gradient": False,
    "alpha_init": 0.1,
    "learn_eta": False,
    "eta": 1e-4,
    "protect": "in-force",
}

# To choose settings by: seeds and samples from which no published result comes.
CHOOSING: dict[str, Any] = {"seed": 1000, "examine": "validation"}


def preset(benchmark: str, method: str, **changes: Any) -> Config:
    """The paper's settings of a method on a benchmark, with changes.

    Args:
        benchmark: a registered benchmark such as "split-mnist", or "custom" for a stream that you pass to `engram.run`.
        method: "finetune", a head, a penalty, or both: "dhp+si".
        changes: settings that differ from the preset, by name.

        preset("split-mnist", "dhp+si", trials=3, epochs=1)
    """
    check_choice("benchmark", benchmark, (*BENCHMARKS.names(), CUSTOM))
    check_choice("method", method, all_methods())
    facts = {"preset": {"dataset": CUSTOM}} if benchmark == CUSTOM else BENCHMARKS.facts(benchmark)
    settings: dict[str, Any] = {"benchmark": benchmark, "method": method, **facts.get("preset", {})}
    penalty = parts_of(method).penalty
    if penalty is not None:
        usual = PENALTIES.facts(penalty).get("strength")  # where the benchmark has none for it
        settings["strength"] = facts.get("strengths", {}).get(penalty, usual)
    return from_dict({**settings, **changes})


def title_of(benchmark: str) -> str:
    """A benchmark's name as headings show it: "Split MNIST"."""
    return "Custom stream" if benchmark == CUSTOM else BENCHMARKS.facts(benchmark).get("title", benchmark)


def changes_from_preset(config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the preset, as {name: (value, the preset's)}, except for trials and seed."""
    if config.benchmark == CUSTOM:
        return {}
    usual = preset(config.benchmark, config.method).to_dict()
    here = config.to_dict()
    ignored = names_of(stage="trial")
    return {n: (here[n], usual[n]) for n in here if here[n] != usual[n] and n not in ignored}
