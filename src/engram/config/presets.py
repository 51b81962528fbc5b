"""The paper's settings of each benchmark (with the choices of docs/departures.md) and its results, as data."""

from __future__ import annotations

from typing import Any

from engram.common.errors import check_choice
from engram.config.settings import BENCHMARKS, METHODS, Config, from_dict

MIXTURE = ("mnist", "notmnist", "fashion-mnist", "svhn", "cifar-10")  # the five datasets, in the paper's order

TITLES = {
    "permuted-mnist": "Permuted MNIST",
    "imbalanced-permuted-mnist": "Imbalanced Permuted MNIST",
    "split-mnist": "Split MNIST",
    "vision-mixture": "Vision datasets mixture",
    "own": "A stream of one's own",
}

# The parts of a reproduction, in the order in which they are run, and read.
PARTS = {
    "table": "Table I: the paper's eight methods",
    "variant": "the steady trace: DHP so that it helps",
    "sensitivity": "the initial value of η",
    "strengths": "the grid over the penalties' strengths",
    "study": "one thing varied at a time",
}

# Appendix A. What a benchmark does not say here is as in `Config`.
SETTINGS: dict[str, dict[str, Any]] = {
    "permuted-mnist": {"num_tasks": 10, "hidden": [400, 400], "epochs": 20, "xi": 0.1},
    "imbalanced-permuted-mnist": {"num_tasks": 10, "hidden": [400, 400], "epochs": 20, "xi": 0.1},
    "split-mnist": {"num_tasks": 5, "hidden": [256, 256], "epochs": 10, "xi": 0.001},
    "vision-mixture": {
        "dataset": "five-datasets",
        "num_tasks": 5,
        "network": "cnn",
        "hidden": [500],
        "leaky_slope": 0.3,
        "eta": 1e-4,
        "epochs": 50,
        "batch_size": 32,
        "xi": 0.1,
    },
    "own": {"dataset": "own"},
}

# λ of each penalty. The paper has none for EWC with a term per task: it takes Online EWC's.
STRENGTHS: dict[str, dict[str, float]] = {
    "permuted-mnist": {"online-ewc": 100, "ewc": 100, "si": 0.1, "mas": 0.1},
    "imbalanced-permuted-mnist": {"online-ewc": 400, "ewc": 400, "si": 1.0, "mas": 0.1},
    "split-mnist": {"online-ewc": 400, "ewc": 400, "si": 1.0, "mas": 1.5},
    "vision-mixture": {"online-ewc": 100, "ewc": 100, "si": 0.1, "mas": 1.0},
}

# Table I: average test accuracy in % and BWT, after all tasks, over ten trials.
PAPER_RESULTS: dict[str, dict[str, tuple[float, float]]] = {
    "permuted-mnist": {
        "finetune": (76.73, -0.19),
        "dhp": (78.49, -0.16),
        "si": (84.72, -0.13),
        "dhp+si": (85.20, -0.09),
        "online-ewc": (86.24, -0.11),
        "dhp+online-ewc": (87.30, -0.09),
        "mas": (88.52, -0.08),
        "dhp+mas": (89.53, -0.06),
    },
    "imbalanced-permuted-mnist": {
        "finetune": (76.44, -0.20),
        "dhp": (80.85, -0.14),
        "si": (85.92, -0.06),
        "dhp+si": (85.39, -0.06),
        "online-ewc": (87.18, -0.09),
        "dhp+online-ewc": (87.43, -0.08),
        "mas": (87.32, -0.09),
        "dhp+mas": (88.80, -0.05),
    },
    "split-mnist": {
        "finetune": (90.43, -0.13),
        "dhp": (98.23, -0.02),
        "si": (97.77, -0.04),
        "dhp+si": (99.15, 0.00),
        "online-ewc": (97.65, -0.03),
        "dhp+online-ewc": (98.96, -0.01),
        "mas": (98.24, -0.02),
        "dhp+mas": (98.43, -0.01),
    },
    "vision-mixture": {
        "finetune": (60.02, -0.33),
        "dhp": (62.94, -0.26),
        "si": (81.26, -0.06),
        "dhp+si": (81.75, -0.04),
        "online-ewc": (78.61, -0.07),
        "dhp+online-ewc": (79.10, -0.04),
        "mas": (78.51, -0.05),
        "dhp+mas": (80.66, -0.01),
    },
}

# The steady trace: the form of the DHP Softmax in which it helps (docs/reproduction.md says how it was found). The
# trace is a slow mean of each class's activations, less the mean over classes, and is read at a size that does not
# depend on theirs; it is nothing to differentiate through; and a penalty protects the weights that are in force.
STEADY: dict[str, Any] = {
    "trace_scale": 2.0,
    "trace_centred": True,
    "trace_gradient": False,
    "alpha_init": 0.1,
    "learn_eta": False,
    "eta": 1e-4,
    "protect": "in-force",
}
CHOOSING: dict[str, Any] = {
    "seed": 1000,
    "examine": "validation",
}  # choices are made with seeds and samples that no result is from


def preset(benchmark: str, method: str, **changes: Any) -> Config:
    """The paper's settings of a method on a benchmark, with changes: `preset("split-mnist", "dhp+si", trials=3)`."""
    check_choice("benchmark", benchmark, SETTINGS)
    check_choice("method", method, METHODS)
    strength = STRENGTHS.get(benchmark, {}).get(method.split("+")[-1])
    settings = {"benchmark": benchmark, "method": method, "strength": strength, **SETTINGS[benchmark]}
    return from_dict({**settings, **changes})


def changes_from_preset(config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that are not the preset's, as {name: (here, in the preset)}; trials and seed do not count."""
    if config.benchmark not in BENCHMARKS:
        return {}
    usual = preset(config.benchmark, config.method).to_dict()
    here = config.to_dict()
    return {n: (here[n], usual[n]) for n in here if here[n] != usual[n] and n not in ("trials", "first_trial", "seed")}
