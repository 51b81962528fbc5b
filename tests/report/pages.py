"""What the tests of pages share: made-up results, runs and reproductions, and a reader that checks a page."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from builders import labelled
from engram.config.presets import preset
from engram.reproduction.folder import Reproduction
from engram.runs.result import Result
from engram.runs.run import Run

NAN = math.nan
EVIL = '<script>alert("x")</script>'


def make_result(
    method: str = "dhp", *, benchmark: str = "split-mnist", trials: int = 3, dynamics: bool = True, **changes: Any
) -> Result:
    config = preset(benchmark, method).replace(trials=trials, **changes)
    generator = np.random.default_rng(len(method))
    shape = (trials, config.num_tasks, config.num_tasks)
    accuracy = np.where(np.tri(config.num_tasks) > 0, 0.9 + 0.08 * generator.random(shape), NAN)
    rows: list[dict[str, float]] = [
        {"trial": 0, "task": n, "epoch": 0, "step": s, "loss": 0.1, "eta": 0.01, "hebb_norm": 2.0, "alpha_norm": 3.0}
        for n in range(config.num_tasks)
        for s in (1, 2)
    ]
    untrained = np.full(shape[:2], 0.5)
    data = [{"name": "mnist", "origin": "published", "train": 60000, "test": 10000}]
    return Result(config, tuple(range(trials)), accuracy, untrained, rows if dynamics else [], [], data)


def run_of(*results: Result, **about: Any) -> Run:
    """A finished run, as if it had been read from a folder."""
    by_label = labelled(results)
    configs = {label: result.config for label, result in by_label.items()}
    return Run(Path("a"), configs, by_label, {"finished": "now", "data": results[0].data} | about)


class Reader(HTMLParser):
    """Checks that tags close, and keeps what a test asks about."""

    VOID = frozenset(("meta", "link", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in ("href", "src") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def check_page(page: str) -> str:
    """The text of a page that is whole: all tags closed, ids unique, links inside found, nothing outside needed."""
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    assert "script" not in reader.tags
    for address in reader.addresses:
        if address.startswith("#"):
            assert address[1:] in reader.ids, address
        else:
            assert address.startswith(("data:", "https://arxiv.org/")), address
    assert "@import" not in page
    assert "url(http" not in page
    return " ".join(" ".join(reader.text).split())


ALL = ["finetune", "dhp", "si", "dhp+si"]

PARTS = ("table", "variant", "sensitivity", "study")
ABOUT = {
    "command": "engram reproduce",
    "quick": False,
    "runtime": {"device": "cuda", "precision": "tf32"},
    "environment": {"device": "cuda", "gpu": "NVIDIA H200"},
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "seconds": 312.5,
    "finished": "2026-01-31T12:05:00+00:00",
    "data": [{"name": "mnist", "origin": "structure", "train": 60000, "test": 10000}],
}


def make_part(part: str = "table", benchmark: str = "split-mnist", quick: bool = False) -> Run:
    changes: dict[str, dict[str, Any]]
    if part == "sensitivity":
        results = {f"eta {eta:g}": make_result("dhp", eta=eta) for eta in (1e-4, 1e-3, 1e-2)}
    elif part == "table":
        results = {method: make_result(method, benchmark=benchmark) for method in ALL}
    elif part == "variant":
        results = {method: make_result(method, benchmark=benchmark, eta=0.1) for method in ("dhp", "dhp+si")}
    else:
        changes = {"as in the table": {}, EVIL: {"alpha": "uniform"}}
        results = {f"{name}: {m}": make_result(m, **change) for name, change in changes.items() for m in ("dhp", "si")}
    return part_of(part, benchmark, results, quick)


def part_of(part: str, benchmark: str, results: dict[str, Result], quick: bool = False) -> Run:
    configs = {label: result.config for label, result in results.items()}
    about = ABOUT | {"part": part, "quick": quick}
    return Run(Path("reproduction") / benchmark / part, configs, results, about)


def make_reproduction(runs: dict[tuple[str, str], Run], missing: list[str] | None = None) -> Reproduction:
    return Reproduction(Path("reproduction"), runs, missing or [])
