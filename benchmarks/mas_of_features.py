"""Does it matter whether MAS measures the logits or the features?

python benchmarks/mas_of_features.py --data DATA       the table of docs/reproduction/why.md

A comment in the paper's source says that MAS takes the squared norm of the penultimate layer; MAS's own paper, and
Engram, take that of the outputs. With the features h, the output layer itself is not protected at all:

    Ω ← Ω + mean over samples of |∂ ‖h(x)‖² / ∂θ|
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import engram
from engram.config.settings import Config
from engram.penalties import MAS
from engram.penalties.importance import mean_per_sample
from engram.penalties.terms import Batches, Classes, Settings, Weights
from engram.report.pairs import Pair
from engram.report.tables import final_accuracy
from engram.reproduction.verdicts import points
from engram.runs.result import Result

HEADS = ("linear", "matched", "dhp")
BEFORE = "features."  # the names of their weights begin so


class MASOfFeatures(MAS):
    """MAS whose function is the features, not the logits."""

    @classmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches,
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        features = model.get_submodule(BEFORE.rstrip("."))
        own = {name.removeprefix(BEFORE): theta for name, theta in parameters.items() if name.startswith(BEFORE)}
        found = mean_per_sample(features, own, lambda h: h.square().sum(dim=1), torch.abs, batches)
        none = {name: torch.zeros_like(theta) for name, theta in parameters.items()}
        return none | {BEFORE + name: omega for name, omega in found.items()}


def run_with(penalty: type[MAS], config: Config, data: str | None) -> Result:
    """The config with this penalty, at its strength."""
    strength = config.strength
    assert strength is not None
    make = lambda model: penalty(model, strength=strength)  # noqa: E731
    plain = config.replace(method=config.method.removesuffix("+mas"), strength=None)
    return engram.run(plain, penalty=make, data=data, device="cpu", precision="float32")


def row_of(strength: float, results: Mapping[str, Result]) -> str:
    """The accuracy of the plain head, and what the others add to it."""
    plain = results["linear"]
    added = [points(Pair(head, "linear", results[head], plain).accuracy) for head in HEADS[1:]]
    return " | ".join(("", f"{strength:g}", final_accuracy(plain), *added, "")).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with the datasets")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.5, 1.5])
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    print("| strength | plain, % ± SEM |", " | ".join(f"{head} adds, points" for head in HEADS[1:]), "|")
    print("|---:|" + "---:|" * len(HEADS))
    for strength in options.strengths:
        configs = {h: engram.preset("split-mnist", f"{h}+mas", strength=strength, trials=options.trials) for h in HEADS}
        results = {head: run_with(MASOfFeatures, config, options.data) for head, config in configs.items()}
        print(row_of(strength, results), flush=True)


if __name__ == "__main__":
    main()
