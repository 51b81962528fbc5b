"""The paper's results as data, and the parts of a reproduction. The paper's settings are in `data/benchmarks.py`."""

from __future__ import annotations

# Table I: average test accuracy in % and BWT after all tasks, over ten trials.
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
PAPER_BENCHMARKS = tuple(PAPER_RESULTS)
PAPER_METHODS = tuple(PAPER_RESULTS["permuted-mnist"])

# The parts of a reproduction, in the order in which they are run.
PARTS = {
    "rung-1": "rung 1 of the ladder: as published",
    "grid-1": "the grids over the strengths, first round",
    "grid-2": "the grids over the strengths, second round",
    "grid-3": "the grids over the strengths, third round",
    "rung-2": "rung 2: each at the best strength of its own grid",
    "rung-3": "rung 3: one initialisation for all",
    "search-1": "the search for rung 4, first round",
    "search-2": "the search for rung 4, second round",
    "search-3": "the search for rung 4, third round",
    "search-4": "the search for rung 4, fourth round",
    "rung-4": "rung 4: the same number of settings to try for all",
    "rates-1": "the learning rates of other optimizers, first round",
    "rates-2": "the learning rates of other optimizers, second round",
    "stress": "the stress table: the chosen head and the plain one, one thing changed at a time",
    "stress-classes": "the stress table with 100 classes",
    "map": "where a head helps: learning rates and epochs, on few digits",
    "relu": "rung 1 with ReLU in place of LeakyReLU, as in the first author's post",
    "divergence": "why DHP diverges on the mixture, and what prevents it",
    "leak": "why DHP without a penalty learns less of the mixture",
    "table": "Table I: the paper's eight methods",
    "variant": "the steady trace, a variant of DHP",
    "sensitivity": "the initial value of η",
    "study": "one thing varied at a time",
}
