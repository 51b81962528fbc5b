"""A head, a penalty and a benchmark of another package are one file: every command and the stack take them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engram.config.methods import all_methods

PLUGIN = '''
"""A head, a penalty and a benchmark of another package."""

import torch
from torch import nn

from engram.common.registry import BENCHMARKS, HEADS, PENALTIES
from engram.data import streams
from engram.penalties import Quadratic


@HEADS.register("amplified", settings={"scale": "baseline_trace"})
class Amplified(nn.Linear):
    """z = c θ h"""

    def __init__(self, in_features, out_features, *, scale=1.0):
        super().__init__(in_features, out_features, bias=False)
        self.scale = scale

    def forward(self, hidden, target=None):
        return self.scale * super().forward(hidden)


@HEADS.register("doubled", baseline=True)
class Doubled(Amplified):
    """A baseline: `--methods all` leaves it out, and `baseline_head` chooses it."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, scale=2.0)


@PENALTIES.register("uniform", strength=0.5, settings={"least": "xi"})
class Uniform(Quadratic):
    """Every weight is as important as every other."""

    def __init__(self, model, *, least=0.1, **settings):
        super().__init__(model, **settings)
        self.least = least

    @classmethod
    def importance(cls, model, parameters, state, settings, batches, classes=None):
        return {name: torch.full_like(theta, settings["least"]) for name, theta in parameters.items()}


@BENCHMARKS.register(
    "thirds",
    title="Three digits a task",
    datasets=["mnist-small"],
    settings={"num_tasks": "num_tasks"},
    preset={"dataset": "mnist-small", "num_tasks": 3, "hidden": [16], "epochs": 1},
    strengths={"si": 2.0},
)
def thirds(datasets, trials, *, num_tasks):
    return [streams.split(datasets[0], num_tasks=num_tasks, classes_per_task=3)] * len(trials)
'''
ENTRY_POINTS = """\
[engram.heads]
amplified = engram_plugin
doubled = engram_plugin
[engram.penalties]
uniform = engram_plugin
[engram.benchmarks]
thirds = engram_plugin
"""
METHODS = ("finetune", "amplified", "uniform", "amplified+uniform", "dhp+uniform", "amplified+si")
SMALL = ["--trials", "2", "--epochs", "2", "--tasks", "2", "--set", "max_samples=600", "--set", "learning_rate=0.1"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package, as `pip install` would leave it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "engram_plugin.py").write_text(PLUGIN)
    information = folder / "engram_plugin-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: engram-plugin\nVersion: 0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def python(plugin: Path, *arguments: object, code: int = 0) -> str:
    """What a Python that has the package installed prints."""
    path = os.pathsep.join([str(plugin), *sys.path])
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def engram(plugin: Path, *arguments: object, code: int = 0) -> str:
    return python(plugin, "-m", "engram", *arguments, code=code)


@pytest.fixture(scope="module")
def run(plugin: Path) -> Path:
    """A run of all its methods, through the command line."""
    out = plugin / "run"
    data = ["--dataset", "mnist-small", "--device", "cpu", "--out", out]
    engram(plugin, "run", "permuted-mnist", "--methods", ",".join(METHODS), *SMALL, *data)
    return out


def test_this_process_does_not_know_the_package() -> None:
    assert "uniform" not in all_methods()


def test_help_names_its_methods_and_imports_neither_it_nor_torch(plugin: Path) -> None:
    program = (
        "import sys\n"
        "from engram.cli.main import main\n"
        "try: main(['run', '--help'])\n"
        "finally: print('imported', {'torch', 'engram_plugin'} & set(sys.modules))\n"
    )
    text = " ".join(python(plugin, "-c", program).split())
    assert "amplified" in text
    assert "thirds" in text
    assert "imported set()" in text


@pytest.mark.slow
def test_run_trains_its_methods(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())["results"]
    accuracy = {entry["label"]: entry["accuracy"] for entry in results}
    assert set(accuracy) == set(METHODS)
    for method, other in (("amplified", "finetune"), ("uniform", "finetune"), ("amplified+uniform", "amplified")):
        assert accuracy[method] != accuracy[other]
    description = json.loads((run / "run.json").read_text())
    assert description["configs"]["amplified+uniform"]["strength"] == 0.5, "the strength that it registered"
    assert description["configs"]["amplified+si"]["strength"] == 0.1, "the benchmark's"


@pytest.mark.slow
def test_table_figures_report_and_list_show_its_methods(plugin: Path, run: Path) -> None:
    table = engram(plugin, "table", run)
    assert all(method in table for method in METHODS)
    gains = table.partition("adds to the same method")[2]
    assert all(method in gains for method in ("amplified ", "amplified+uniform", "dhp+uniform")), "paired by trial"
    engram(plugin, "figures", run, "--out", plugin / "figures")
    assert "amplified+uniform" in (plugin / "figures" / "accuracy.csv").read_text()
    engram(plugin, "report", run, "--out", plugin / "report.html")
    assert "amplified+uniform" in (plugin / "report.html").read_text()
    assert "uniform" in engram(plugin, "runs", "list", plugin)


@pytest.mark.slow
def test_sweep_tries_the_settings_that_its_method_uses(plugin: Path) -> None:
    out = plugin / "sweep"
    base = ["split-mnist", "--methods", "amplified+uniform", *SMALL, "--dataset", "mnist-small", "--device", "cpu"]
    engram(plugin, "sweep", *base, "--grid", "xi=0.1,1", "--grid", "baseline_trace=0.5,1", "--out", out)
    assert "amplified+uniform" in engram(plugin, "table", out)
    engram(plugin, "figures", out, "--out", plugin / "sweep-figures")
    assert list((plugin / "sweep-figures").glob("*.png"))
    refused = engram(plugin, "sweep", *base, "--grid", "gamma=0.1,1", "--out", plugin / "refused", code=2)
    assert "gamma" in refused
    assert refused.count("\n") == 1


@pytest.mark.slow
def test_its_benchmark_runs_with_its_preset(plugin: Path) -> None:
    out = plugin / "thirds"
    engram(plugin, "run", "thirds", "--methods", "si,scaled+uniform", "--trials", "1", "--device", "cpu", "--out", out)
    assert "thirds on mnist-small, 3 tasks" in engram(plugin, "table", out)
    description = json.loads((out / "run.json").read_text())
    settings = {**description["common"], **description["configs"]["si"]}
    assert (settings["benchmark"], settings["num_tasks"], settings["strength"]) == ("thirds", 3, 2.0)
    assert "thirds" in engram(plugin, "run", "third", "--out", plugin / "refused", code=2)


BASELINE = """
import engram
from engram.config.methods import all_methods
config = engram.preset("split-mnist", "uniform", baseline_head="doubled")
assert (config.head, config.plastic, config.strength) == ("doubled", False, 0.5)
assert type(engram.heads.create("doubled", 4, 3)).__name__ == "Doubled"
assert "doubled" not in all_methods() and "amplified" in engram.heads.list()
print(engram.preset("split-mnist", "doubled+si").head)
"""


@pytest.mark.slow
def test_its_baseline_is_chosen_by_baseline_head_or_by_name(plugin: Path) -> None:
    assert python(plugin, "-c", BASELINE) == "doubled\n"


def test_broken_package_is_refused_only_where_it_is_used(plugin: Path, tmp_path: Path) -> None:
    information = tmp_path / "broken-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[engram.heads]\nbroken = broken_module\n")
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    out = ["--trials", "1", "--dataset", "mnist-small", "--out", tmp_path / "run"]
    assert "broken" in engram(tmp_path, "run", "--help")
    refused = engram(tmp_path, "run", "split-mnist", "--methods", "broken+si", *out, code=2)
    assert refused == "engram: the head broken cannot be imported from broken_module: division by zero\n"
    assert not (tmp_path / "run").exists()
    left_out = "from engram.config.methods import *; print(usable_methods(print), all_methods())"
    problem, methods = python(tmp_path, "-c", left_out).splitlines()
    assert problem == f"{refused.removeprefix('engram: ').strip()}; its methods are left out"
    usable, every = methods.split("] (")
    assert "broken" in every
    assert "broken" not in usable
    assert "dhp+si" in usable


STACK = """
import torch
from engram import preset
from engram.data.sources import load
from engram.engine.build import build_learner, build_streams
from engram.engine.choose import choose_program
from engram.engine.cpu.program import OneByOne
from engram.engine.gpu.program import Mapped
from engram.engine.loop import run_stream
from engram.engine.program import Batches

digits = load("mnist-small").shortened(200)
changes = dict(dataset="mnist-small", num_tasks=2, hidden=[12], epochs=1, trials=2)
configs = [preset("split-mnist", m, **changes) for m in METHODS]
configs.append(preset("split-mnist", "amplified+uniform", baseline_trace=2.0, **changes))
streams = build_streams(configs[0], [0, 1], [digits])
found = []
for device in ("cuda", "cpu"):  # the program of a GPU, in plain PyTorch on the CPU; and one model after the other
    args = (streams[0].input_shape, streams[0].num_classes, torch.device("cpu"), torch.float64)
    learners = [build_learner(config, trial, *args) for trial in (0, 1) for config in configs]
    batches = Batches([0, 1], streams, 0, torch.float64)
    program, notes = choose_program(learners, batches, torch.device(device))
    assert isinstance(program, Mapped if device == "cuda" else OneByOne), notes
    run_stream(program, batches, configs[0])
    found.append(learners)
for one, other in zip(*found):
    assert one.outcome.rows == other.outcome.rows, one.config.method
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)
print("equal")
"""


@pytest.mark.slow
def test_stack_computes_what_each_of_its_models_computes_alone(plugin: Path) -> None:
    assert python(plugin, "-c", f"METHODS = {METHODS}\n{STACK}") == "equal\n"
