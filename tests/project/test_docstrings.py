"""The examples in the docstrings of what users call run, and show what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import engram
from engram.data.sources import load
from engram.engine.build import load_datasets
from engram.engine.stacks import Source
from engram.nn.networks import Network
from engram.runs.start import start_run

SMALL = {"num_tasks": 2, "epochs": 1, "hidden": [8], "max_samples": 200}
MODULES = (
    *("common.errors", "common.files", "common.registry", "common.seeding", "common.tensor_file"),
    *("config.methods", "config.presets", "config.settings"),
    *("data.batches", "data.custom", "data.samples", "data.sources", "data.streams"),
    *("nn.dhp", "nn.baselines", "nn.heads"),
    *("penalties.penalty", "penalties.quadratic", "penalties.ewc", "penalties.si", "penalties.mas"),
    *(
        "engine",
        "engine.learner",
        "engine.training",
        "runs.experiment",
        "runs.log",
        "runs.metrics",
        "runs.result",
        "runs.run",
        "runs.start",
    ),
    *(
        "integrations.export",
        "integrations.model_file",
        "integrations.testing",
        "sklearn.classifier",
        "sklearn.regressor",
        "sklearn.features",
    ),
)
HEADS = {"nn.dhp": engram.DHPSoftmax, "nn.baselines": engram.MatchedSoftmax}


def tensors(module: str) -> dict[str, Any]:
    """What an example of a head or a penalty takes as given: a model, a batch, an optimizer."""
    head = HEADS.get(module, engram.LinearSoftmax)(8, 3)
    model = Network(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), head)
    inputs, targets, hidden = torch.rand(4, 6), torch.randint(3, (4,)), torch.rand(4, 8)
    penalty = engram.SI(model, strength=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = cross_entropy(head(model.features(inputs), targets), targets)
    given = {"head": head, "model": model, "inputs": inputs, "targets": targets, "target": targets, "hidden": hidden}
    given |= {"penalty": penalty, "optimizer": optimizer, "loader": [(inputs, targets)], "cross_entropy": cross_entropy}
    given |= {"loss": loss, "make_model": lambda: model}
    if module == "nn.dhp":
        given |= {"weight": head.weight, "alpha": head.alpha, "eta": head.eta, "hebb": head.hebb}
    return given


def runs(module: str) -> dict[str, Any]:
    """What an example about runs takes as given: a config, a result, and folders that hold runs."""
    config = engram.preset("split-mnist", "dhp+si", dataset="mnist-small", trials=2)
    given = {"config": config, "configs": [config], "load_datasets": load_datasets}
    if module == "engine.learner":
        given |= {"Network": Network, "features": nn.Linear(6, 8)}
    if module == "engine.training":
        (dataset,) = load_datasets(config, None)
        given |= {"configs": {"mine": config}, "dataset": dataset, "source": Source((dataset,)), "folder": Path()}
    if module in ("runs.result", "runs.run"):
        given["result"] = engram.run(config)
    if module == "runs.run":
        given["result"].save("runs/demo")
    if module == "runs.start":
        with pytest.raises(KeyboardInterrupt):
            start_run({"mine": config}, load_datasets(config, None), "runs/stopped", report=interrupt)
    return given


def interrupt(progress: engram.Progress) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets of small networks, with few samples."""

    def preset(benchmark: str, method: str, preset=engram.preset, **changes: object) -> engram.Config:
        return preset(benchmark, method, **SMALL | changes)

    monkeypatch.setattr(engram, "preset", preset)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.usefixtures("quick")
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"engram.{name}")
    found = [test for test in doctest.DocTestFinder().find(module, f"engram.{name}") if test.examples]
    assert found
    for number, test in enumerate(found):
        if test.name.endswith(".to_frame") and find_spec("pandas") is None:
            continue
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        test.globs |= {"engram": engram, "torch": torch, "nn": nn, "load": load}
        if name.startswith(("nn.", "penalties.", "integrations.")):
            test.globs |= tensors(name)
        if name.startswith(("runs.", "engine")):
            test.globs |= runs(name)
        if name == "sklearn.classifier" and ".ContinualClassifier." in test.name:
            X, y = torch.rand(8, 1).numpy(), ["cold", "warm"] * 4
            classifier = module.ContinualClassifier(random_state=0).partial_fit(X, y, task="winter")
            test.globs |= {"classifier": classifier, "X": X, "y": y}
        if name == "sklearn.regressor":
            test.globs["regressor"] = module.ContinualRegressor().fit([[0.0], [1.0]], [1.0, 3.0])
        if name == "data.custom":
            pytest.importorskip("pandas")
        if name == "integrations.export":
            test.globs["onnxruntime"] = pytest.importorskip("onnxruntime")
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, test.name
