"""Running a reproduction: stopping it anywhere changes nothing, and nothing of another kind is mixed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import assert_results_equal, refusal
from engram import InputError, Progress, preset
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.data.sources import load
from engram.engine.cpu.program import threads_each
from engram.engine.training import Runtime
from engram.reproduction.folder import part_folder, read_reproduction
from engram.reproduction.plan import Part
from engram.reproduction.run import run_reproduction
from engram.runs.run import Run

TINY = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 2, "batch_size": 8, "hidden": [5]}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("mnist-small").shortened(60)


def tiny_parts(**changes: Any) -> list[Part]:
    """Two parts. Some configs of the first learn with masks, and some without, so not together."""
    settings = TINY | changes
    table = {method: preset("split-mnist", method, **settings) for method in ("finetune", "dhp+si")}
    table |= {f"{method}, unmasked": config.replace(mask_training=False) for method, config in list(table.items())}
    sensitivity = {f"η {eta:g}": preset("split-mnist", "dhp", eta=eta, **settings) for eta in (0.1, 0.001)}
    example = next(iter(table.values()))
    return [
        Part("table", "split-mnist", example, lambda runs: table),
        Part("sensitivity", "split-mnist", example, lambda runs: sensitivity),
    ]


class Stop(Exception):
    """Stands for whatever ends a process."""


class Loader:
    """Loads the datasets, and counts how often it was asked."""

    def __init__(self, digits: Dataset):
        self.digits = digits
        self.asked: list[str] = []

    def __call__(self, config: Config) -> Sequence[Dataset]:
        self.asked.append(config.dataset)
        return [self.digits]


Runs = dict[tuple[str, str], Run]


def reproduce(parts: list[Part], folder: Path, digits: Dataset, **options: Any) -> Runs:
    settings = {"load": Loader(digits), "command": "engram reproduce", "runtime": Runtime("cpu")} | options
    return run_reproduction(parts, folder, **settings)


def showing(call: Callable[[Part, Progress], None]) -> Any:
    """What `show` takes: every progress of every part is passed to a function."""

    @contextmanager
    def show(part: Part) -> Iterator[Callable[[Progress], None]]:
        yield lambda progress: call(part, progress)

    return show


def stop_at(name: str, done: float) -> Any:
    def stop(part: Part, progress: Progress) -> None:
        if part.name == name and progress.done > done:
            raise Stop

    return showing(stop)


@pytest.fixture(scope="module")
def uninterrupted(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, list[str], Path]:
    folder = tmp_path_factory.mktemp("reproduction") / "new"
    lines: list[str] = []
    return reproduce(tiny_parts(), folder, digits, tell=lines.append), lines, folder


def test_every_part_is_a_run_of_its_own(uninterrupted: tuple[Runs, list[str], Path]) -> None:
    runs, lines, folder = uninterrupted
    found = read_reproduction(folder)
    assert list(found.runs) == list(runs) == [("split-mnist", "table"), ("split-mnist", "sensitivity")]
    for part in tiny_parts():
        run = found.runs[part.benchmark, part.name]
        assert run.configs == part.configs
        assert_results_equal(run.results, {label: run.results[label] for label in part.configs})
        assert (run.about["part"], run.about["quick"], run.finished) == (part.name, False, True)
    table, sensitivity = found.runs.values()
    assert bool(table.results["dhp+si"].dynamics)
    assert not sensitivity.results["η 0.1"].dynamics, "dynamics of parts that do not show them would be large"
    assert "split-mnist, table: 2 of the paper's 10 trials were run" in found.missing
    assert lines[0].startswith("split-mnist: table, 8 models in ")


def test_data_are_loaded_once(digits: Dataset, tmp_path: Path) -> None:
    loader = Loader(digits)
    reproduce(tiny_parts(epochs=1), tmp_path / "new", digits, load=loader)
    assert loader.asked == ["mnist-small"]


def test_finished_parts_are_read_and_nothing_is_loaded(
    uninterrupted: tuple[Runs, list[str], Path], digits: Dataset
) -> None:
    runs, _, folder = uninterrupted
    before = {path: path.read_bytes() for path in folder.glob("*/*/*.json")}
    loader = Loader(digits)
    lines: list[str] = []
    again = reproduce(tiny_parts(), folder, digits, load=loader, tell=lines.append)
    assert loader.asked == []
    assert lines == ["split-mnist: table, was finished already", "split-mnist: sensitivity, was finished already"]
    for name, run in again.items():
        for label, result in run.results.items():
            np.testing.assert_array_equal(result.accuracy, runs[name].results[label].accuracy)
    assert {path: path.read_bytes() for path in folder.glob("*/*/*.json")} == before


@pytest.mark.parametrize(("name", "done"), [("table", 0.1), ("table", 0.7), ("sensitivity", 0.4)])
def test_a_resumed_reproduction_equals_an_uninterrupted_one(
    name: str, done: float, uninterrupted: tuple[Runs, list[str], Path], digits: Dataset, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    with pytest.raises(Stop):
        reproduce(tiny_parts(), folder, digits, show=stop_at(name, done))
    resumed = reproduce(tiny_parts(), folder, digits)
    for part, run in uninterrupted[0].items():
        assert_results_equal(resumed[part].results, run.results)


def test_resuming_with_other_threads_warns_and_keeps_what_was_recorded(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    with pytest.raises(Stop):
        reproduce(tiny_parts(), folder, digits, show=stop_at("table", 0.5))
    recorded = torch.get_num_threads()
    lines: list[str] = []
    notes: list[str] = []
    with threads_each(recorded):  # the engine would restore the number that it is told
        monkeypatch.setattr(torch, "get_num_threads", lambda: recorded + 1)
        runs = reproduce(
            tiny_parts(),
            folder,
            digits,
            tell=lines.append,
            show=showing(lambda part, progress: notes.append(progress.note or "")),
        )
    warning = f"threads {recorded} is now {recorded + 1}"
    assert warning in lines[0]
    assert not any(warning in text for text in (*lines[1:], *notes)), "it is shown once"
    assert warning in (folder / "split-mnist" / "table" / "log.txt").read_text()
    assert runs["split-mnist", "table"].about["environment"]["threads"] == recorded


def test_other_data_are_refused(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        reproduce(tiny_parts(), tmp_path / "new", digits, show=stop_at("table", 0.5))
    other = digits.shortened(len(digits.train) - 1)
    assert "the data are not those" in refusal(reproduce, tiny_parts(), tmp_path / "new", other)


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_and_a_complete_reproduction_are_not_mixed(quick: bool, digits: Dataset, tmp_path: Path) -> None:
    with suppress(Stop):
        reproduce(tiny_parts(), tmp_path / "new", digits, quick=quick, show=stop_at("table", 0.1))
    before = (tmp_path / "new" / "reproduction.json").read_bytes()
    sentence = refusal(reproduce, tiny_parts(), tmp_path / "new", digits, quick=not quick)
    assert "quick" in sentence
    assert "--out" in sentence
    assert (tmp_path / "new" / "reproduction.json").read_bytes() == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_part_of_other_settings_is_refused(finished: bool, digits: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with suppress(Stop):
        reproduce(tiny_parts(epochs=1), folder, digits, show=stop_at("table", 2.0 if finished else 0.5))
    assert "table holds a run of other settings" in refusal(reproduce, tiny_parts(epochs=1, hidden=[6]), folder, digits)
    (first, second) = tiny_parts(epochs=1)
    fewer = replace(first, make=lambda runs: dict(list(first.configs.items())[1:]))
    assert "table holds a run of other settings" in refusal(reproduce, [fewer, second], folder, digits)


def test_a_folder_of_something_else_is_refused(digits: Dataset, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty (it holds notes.txt)" in refusal(reproduce, tiny_parts(), tmp_path, digits)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "cannot write to" in refusal(reproduce, tiny_parts(), tmp_path / "notes.txt", digits)


def test_a_benchmark_without_data_is_left_out_once_or_refused(tmp_path: Path) -> None:
    def missing(config: Config) -> Sequence[Dataset]:
        raise InputError("there are no digits")

    lines: list[str] = []
    options = {"runtime": Runtime("cpu"), "tell": lines.append}
    arguments = (tiny_parts(), tmp_path / "new", missing)
    assert refusal(run_reproduction, *arguments, skip_without_data=True, **options).startswith("nothing was run")
    assert lines == ["split-mnist is left out: there are no digits"]
    assert refusal(run_reproduction, tiny_parts(), tmp_path / "other", missing, **options) == "there are no digits"
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_run_one_part_at_once(digits: Dataset, tmp_path: Path) -> None:
    refused: list[str] = []

    def meddle(part: Part, progress: Progress) -> None:
        if not refused:
            refused.append(refusal(reproduce, tiny_parts(epochs=1), tmp_path / "new", digits))

    reproduce(tiny_parts(epochs=1), tmp_path / "new", digits, show=showing(meddle))
    assert "another process" in refused[0]


def test_trials_that_diverge_are_counted(digits: Dataset, tmp_path: Path) -> None:
    configs = {
        "calm": preset("split-mnist", "dhp", **TINY),
        "wild": preset("split-mnist", "dhp", **TINY, learning_rate=1e38),
    }
    lines: list[str] = []
    part = Part("study", "split-mnist", configs["calm"], lambda runs: configs)
    (run,) = reproduce([part], tmp_path / "new", digits, tell=lines.append).values()
    assert [each.trial for each in run.results["wild"].diverged] == [0, 1]
    assert run.results["calm"].diverged == []
    assert lines[-1].endswith("; 2 diverged")
    assert run.path == part_folder(tmp_path / "new", "split-mnist", "study")


def test_a_change_of_the_environment_is_told_once(digits: Dataset, tmp_path: Path) -> None:
    with suppress(Stop):
        reproduce(tiny_parts(), tmp_path / "new", digits, show=stop_at("table", 0.3))
    for path in (tmp_path / "new" / "reproduction.json", tmp_path / "new" / "split-mnist" / "table" / "run.json"):
        content = json.loads(path.read_text())
        content["environment"]["threads"] = 999
        path.write_text(json.dumps(content))
    lines: list[str | None] = []
    show = showing(lambda part, progress: lines.append(progress.note))
    reproduce(tiny_parts(), tmp_path / "new", digits, tell=lines.append, show=show)
    assert sum("threads 999 is now" in line for line in lines if line) == 1
    assert "threads 999 is now" in (tmp_path / "new" / "split-mnist" / "table" / "log.txt").read_text()
