"""Does a bound on η keep the paper's layer from diverging on the mixture?

python benchmarks/bounded_eta.py --data DATA       rows of the first table of docs/reproduction/why.md

The stream, the settings and the trials are those of the part `divergence` of a reproduction. There η is learned up to
1, its usual bound. Here it is learned, too, but not above a smaller one:

    η ← min(max(η, 0), bound)      before each batch
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import engram
from engram.config.settings import Config
from engram.reproduction.divergence import divergence_configs, table_of_changes
from engram.runs.result import Result


class BoundedDHP(engram.DHPSoftmax):
    """The paper's layer with η in [0, bound]."""

    def __init__(self, in_features: int, out_features: int, *, bound: float, eta: float):
        super().__init__(in_features, out_features, eta=eta)
        self.bound = bound

    @torch.no_grad()
    def project(self) -> None:
        """Back onto the interval, if the optimizer has stepped outside."""
        self.eta.copy_(self.eta.clamp(0, self.bound))

    def _learn(self, hidden: Tensor, target: Tensor) -> Tensor:
        self.project()
        return super()._learn(hidden, target)

    @torch.no_grad()
    def dynamics(self) -> dict[str, Tensor]:
        return {**super().dynamics(), "eta": self.eta.clamp(0, self.bound)}  # as the next batch will use it


def with_bounds(config: Config, bounds: Sequence[float], data: str | Path | None = None) -> dict[str, Result]:
    """The results of a config with each bound, by what is changed."""
    found = {}
    for bound in bounds:
        head = partial(BoundedDHP, bound=bound, eta=config.eta)
        found[f"η at most {bound:g}"] = engram.run(config, head=head, data=data, device="cpu", precision="float32")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with the datasets")
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.01, 0.1, 0.5])
    options = parser.parse_args()
    config = divergence_configs("vision-mixture")["as in the paper"]
    print(table_of_changes(with_bounds(config, options.bounds, options.data)).to_markdown())


if __name__ == "__main__":
    main()
