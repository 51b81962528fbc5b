"""What tests of several rooms build, compare and wait for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engram import InputError, Result, streams
from engram.config.settings import Config
from engram.data.samples import Dataset, Origin, Samples, Stream
from engram.data.sources import load
from engram.engine.build import NOTHING_CUSTOM, Custom, dataset_names
from engram.engine.checkpoint import Checkpoints
from engram.engine.learner import Outcomes, Report, no_report
from engram.engine.stacks import Source
from engram.engine.training import Runtime, Training
from engram.runs.experiment import label_configs, results_of
from engram.runs.format import FORMAT, write_description, write_results

# --- data


@cache
def all_digits() -> Dataset:
    return load("mnist-small")


def small_digits(num_train: int = 300, num_test: int = 100, *, first: int = 0, origin: Origin = "published") -> Dataset:
    """The first samples of mnist-small, or those from `first` on; a copy, for nobody else."""
    digits = all_digits()
    train, test = digits.train[slice(first, first + num_train)], digits.test[slice(num_test)]
    copies = (Samples(part.inputs.clone(), part.targets.clone()) for part in (train, test))
    return Dataset(digits.name, *copies, origin)


def digits_for(config: Config, num_train: int, num_test: int) -> list[Dataset]:
    """The same digits under the name of each dataset that a config asks for."""
    return [replace(small_digits(num_train, num_test), name=name) for name in dataset_names(config)]


def custom_stream(
    num_tasks: int = 2, shape: tuple[int, ...] = (1, 16, 16), num_train: int = 31, num_test: int = 20, more: int = 8
) -> Stream:
    """Tasks of three classes around random centres, as floats; every task has `more` samples than the one before."""
    random = np.random.default_rng(0)

    def samples(count: int, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 3
        return random.normal(size=(count, *shape)) * 0.3 + centres[labels], labels

    tasks = []
    for task in range(num_tasks):
        centres = random.normal(size=(3, *shape))
        tasks.append((*samples(num_train + more * task, centres), *samples(num_test, centres)))
    return streams.from_arrays(tasks)


# --- results and runs


def train(
    configs: Mapping[str, Config], source: Source, runtime: Runtime, *, custom: Custom = NOTHING_CUSTOM, **options: Any
) -> Outcomes:
    """Train without a folder; further options are those of `Training.run`."""
    return Training(configs, source, runtime, custom).run(**options)


def run_on(
    configs: Sequence[Config],
    datasets: Sequence[Dataset],
    runtime: Runtime | None = None,
    report: Report = no_report,
    **options: Any,
) -> list[Result]:
    """Train configs on datasets that are loaded already; further options are those of `train`."""
    by_label = label_configs(configs)
    options = {"report": report, **options}
    outcomes = train(by_label, Source(tuple(datasets)), Runtime() if runtime is None else runtime, **options)
    return list(results_of(by_label, outcomes, [dataset.provenance() for dataset in datasets]).values())


class Interrupted(Exception):
    """Raised in the middle of training."""


@contextmanager
def interrupted(stop: Callable[[tuple[int, int, int]], bool]) -> Iterator[None]:
    """Training within the `with` block ends right after a checkpoint at a position (task, epoch, piece) to stop at."""
    save = Checkpoints.save

    def save_and_stop(self: Checkpoints, *given: Any) -> None:
        save(self, *given)
        position = given[-1]
        if stop((position.task, position.epoch, position.piece)):
            self.wait()
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_stop)
        with pytest.raises(Interrupted):
            yield


def labelled(results: Iterable[Result]) -> dict[str, Result]:
    """Results by label: their methods, with a number where a method is there before."""
    found: dict[str, Result] = {}
    for k, result in enumerate(results):
        method = result.config.method
        found[f"{method} {k}" if method in found else method] = result
    return found


def write_run(folder: Path, results: Mapping[str, Result], **about: Any) -> Path:
    """The folder of a run with these results; what is None in `about` is left out of it."""
    first = next(iter(results.values()))
    described = {
        "command": f"engram run {first.config.benchmark}",
        "started": "2026-01-31T12:00:00+00:00",
        "finished": "2026-01-31T12:05:00+00:00",
        "seconds": 300.0,
        "runtime": {"device": "cpu", "precision": "tf32", "max_stack": None, "engine": "in-process"},
        "environment": {"device": "cpu", "threads": 2},
        "versions": {"python": "3.12.3", "torch": "2.11.0"},
        "data": first.data,
        "configs": {label: result.config for label, result in results.items()},
    } | about
    folder.mkdir(parents=True, exist_ok=True)
    configs = described.pop("configs")
    write_description(folder, configs, {name: value for name, value in described.items() if value is not None})
    write_results(folder, results)
    return folder


def current(**content: Any) -> str:
    """The text of a file of the format that is written now."""
    return json.dumps({"format": FORMAT, **content})


def short_run(folder: Path) -> Path:
    """A short run in a folder, from the published ones: two labels, two trials, some of the dynamics."""
    source = Path(__file__).parents[1] / "results" / "split-mnist" / "table"
    about = json.loads((source / "run.json").read_text())
    about["configs"] = {label: about["configs"][label] for label in ("si", "dhp+si")}
    about["common"]["trials"] = 2
    (folder / "run.json").write_text(json.dumps(about))
    results = json.loads((source / "results.json").read_text())
    kept = [entry for entry in results["results"] if entry["label"] in about["configs"]]
    for entry in kept:
        entry.update({name: entry[name][:2] for name in ("trials", "accuracy", "untrained")}, diverged=[])
    (folder / "results.json").write_text(json.dumps(results | {"results": kept}))
    rows = (source / "dynamics.csv").read_text().splitlines()
    short = [row for row in rows[1:] if row.startswith(("si,", "dhp+si,"))][::40]
    (folder / "dynamics.csv").write_text("\n".join([rows[0], *short]) + "\n")
    return folder


# --- equal, bit for bit


def assert_results_equal(found: Any, expected: Any) -> None:
    """Two Results, or two sequences or mappings of Results, have the same settings and the same numbers."""
    if isinstance(expected, Result):
        assert found.config == expected.config
        assert_numbers_equal(found, expected)
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        assert_results_equal(list(found.values()), list(expected.values()))
    else:
        assert isinstance(expected, Sequence)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_results_equal(one, other)


def assert_numbers_equal(found: Result, expected: Result) -> None:
    """Two Results have the same numbers, whatever their settings."""
    assert found.trials == expected.trials
    np.testing.assert_array_equal(found.accuracy, expected.accuracy)  # NaN equals NaN here, and nothing else is close
    np.testing.assert_array_equal(found.untrained, expected.untrained)
    assert repr(found.dynamics) == repr(expected.dynamics)  # NaN is not equal to itself
    assert found.diverged == expected.diverged


def assert_tensors_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def files_in(folder: Path, pattern: str = "**/*") -> dict[str, bytes]:
    """The content of every file, by its path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob(pattern)) if path.is_file()}


# --- refused


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(InputError) as error:
        call(*arguments, **options)
    sentence = str(error.value)
    assert_one_sentence(sentence)
    return sentence


def assert_one_sentence(sentence: str) -> None:
    assert 10 < len(sentence) < 1000
    assert sentence.isprintable()
    assert not re.search(r"\w\. [A-Z]", sentence)
    assert "Error(" not in sentence


def command_refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr with which `engram` refuses these arguments, with exit code 2."""
    from engram.cli.main import main

    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("engram: ")
    assert line.count("\n") == 1
    assert line.endswith("\n")
    return line.removesuffix("\n")


# --- time


def wait_for(
    condition: Callable[[], bool], *, still_running: Callable[[], bool] = lambda: True, seconds: float = 60
) -> None:
    """Return when the condition holds, or when whatever should bring it about has ended."""
    until = time.monotonic() + seconds
    while not condition() and still_running():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.005)
