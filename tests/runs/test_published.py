"""What we publish in results/: readable, complete, and the numbers of the documents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from engram.runs.metrics import estimate
from engram.runs.run import Run, open_runs

RESULTS = Path(__file__).parents[2] / "results"
# Of every number of these parts, made before the files had their present format.
BEFORE = ("table", "variant", "sensitivity", "study")
REGISTERED = "split-mnist/rung-4-registered"  # rung 4 after three rounds, as docs/reproduction/registration.md says
DIGEST = "b9214a9d538199fcc1f242f5fc921d097d6122c52981964ffec8d78099a06e27"


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return open_runs(RESULTS)


def test_published_runs_are_complete(runs: dict[str, Run]) -> None:
    assert sum(run.about["part"] in BEFORE for run in runs.values()) == 13
    for name, run in runs.items():
        assert name in (f"{run.benchmark}/{run.about['part']}", REGISTERED)
        assert run.problems == {}
        assert list(run.results) == list(run.configs)
        assert all(run.state(label) in ("finished", "diverged") for label in run.configs)
        assert all(result.trials == tuple(range(result.config.trials)) for result in run.results.values())


def test_published_numbers_are_those_that_were_measured(runs: dict[str, Run]) -> None:
    assert digest_of({name: run for name, run in runs.items() if run.about["part"] in BEFORE}) == DIGEST


def digest_of(runs: dict[str, Run]) -> str:
    """Of every accuracy, divergence and record, by benchmark, part and label."""
    digest = hashlib.sha256()
    for name, run in sorted(runs.items()):
        for label, result in run.results.items():
            rows = [[row[key] for key in sorted(row) if key != "trial"] for row in result.dynamics]
            diverged = [[each.trial, each.task, each.step] for each in result.diverged]
            described = [name, label, result.accuracy.tolist(), result.untrained.tolist(), diverged, rows]
            digest.update(json.dumps(described).encode())
    return digest.hexdigest()


def test_published_tables_are_those_of_the_document(runs: dict[str, Run]) -> None:
    """Every accuracy of Table I, as the page about it prints it."""
    document = (RESULTS.parent / "docs" / "reproduction" / "table-one.md").read_text(encoding="utf-8")
    for name, run in runs.items():
        if run.about["part"] != "table":
            continue
        for label, result in run.results.items():
            accuracy = estimate(100 * result.average_accuracy[:, -1])
            if accuracy.num_trials:  # else all of them diverged
                assert f"{accuracy.mean:.2f} ± {accuracy.sem:.2f}" in document, (name, label)
