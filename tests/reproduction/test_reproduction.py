"""A reproduction: what it runs, and that stopping it anywhere changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram import InputError, Progress, Result, preset
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.data.sources import load
from engram.engine.checkpoint import CheckpointFolder
from engram.runs import parts as running
from engram.runs.experiment import Setting
from engram.runs.parts import Part, run_part
from engram.runs.sheets import Sheet, read_sheet, sheet_path

# --- running a part


TINY = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 2, "batch_size": 8, "hidden": [5]}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("mnist-small").shortened(60)


def tiny_part(**changes: Any) -> Part:
    """Two groups: the second has masks in evaluation only."""
    settings = TINY | changes
    entries = {method: preset("split-mnist", method, **settings) for method in ("finetune", "dhp+si", "dhp+mas")}
    entries |= {f"{m}, unmasked": c.replace(mask_training=False) for m, c in list(entries.items())[1:]}
    return Part("table", "split-mnist", entries)


class Stop(Exception):
    """Stands for whatever ends a process."""


class Loader:
    """Loads the datasets, and knows how often it was asked."""

    def __init__(self, digits: Dataset):
        self.digits = digits
        self.asked: list[Config] = []

    def __call__(self, config: Config) -> Sequence[Dataset]:
        self.asked.append(config)
        return [self.digits]


def run_tiny(part: Part, folder: Path, digits: Dataset, **options: Any) -> Sheet:
    path = sheet_path(folder, part.benchmark, part.name)
    return run_part(part, path, Loader(digits), command="engram reproduce", setting=Setting("cpu"), **options)


def assert_same(one: Sheet, other: Sheet) -> None:
    assert list(one.entries) == list(other.entries)
    for label, result in one.entries.items():
        found = other.entries[label]
        assert found.config == result.config
        assert np.array_equal(found.accuracy, result.accuracy, equal_nan=True), label
        assert np.array_equal(found.untrained, result.untrained)
        assert repr(found.dynamics) == repr(result.dynamics)
        assert found.diverged == result.diverged
    known = ("command", "quick", "device", "precision", "versions", "data", "models")
    assert {name: one.about[name] for name in known} == {name: other.about[name] for name in known}


@pytest.fixture(scope="module")
def uninterrupted(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sheet, list[Progress], Path]:
    folder = tmp_path_factory.mktemp("whole")
    told: list[Progress] = []
    return run_tiny(tiny_part(), folder, digits, report=told.append), told, folder


def test_a_part_leaves_its_sheet_and_nothing_else(uninterrupted: tuple[Sheet, list[Progress], Path]) -> None:
    sheet, _, folder = uninterrupted
    assert [str(p.relative_to(folder)) for p in folder.rglob("*")] == ["split-mnist", "split-mnist/table.json"]
    assert_same(sheet, read_sheet(sheet_path(folder, "split-mnist", "table")))
    assert list(sheet.entries) == list(tiny_part().entries), "in the order of the plan, not of the groups"
    assert "split-mnist, table: 2 of the paper's 10 trials were run" in sheet.missing
    assert sheet.about["models"] == 10
    assert sheet.about["seconds"] >= 0
    assert not sheet.quick
    assert sheet.about["data"][0]["name"] == "mnist-small"
    for result in sheet.entries.values():
        assert result.accuracy.shape == (2, 2, 2)
        assert bool(result.dynamics) == result.config.plastic


def test_a_part_tells_how_far_it_is_over_all_its_groups(uninterrupted: tuple[Sheet, list[Progress], Path]) -> None:
    shares = [progress.share for progress in uninterrupted[1]]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert any(share == pytest.approx(0.6) for share in shares), "three of five entries are the first group"


def test_a_sheet_that_is_there_is_read_and_nothing_is_run_or_loaded(
    uninterrupted: tuple[Sheet, list[Progress], Path], digits: Dataset
) -> None:
    sheet, _, folder = uninterrupted
    before = sheet_path(folder, "split-mnist", "table").read_bytes()
    loader = Loader(digits)
    told: list[Progress] = []
    again = run_part(
        tiny_part(),
        sheet_path(folder, "split-mnist", "table"),
        loader,
        command="another",
        setting=Setting("cpu"),
        report=told.append,
    )
    assert (loader.asked, told) == ([], [])
    assert_same(again, sheet)
    assert sheet_path(folder, "split-mnist", "table").read_bytes() == before


@pytest.mark.parametrize("seconds", [0.0, 180.0], ids=["from a checkpoint", "from the beginning of a group"])
@pytest.mark.parametrize("stop_at", [0.1, 0.45, 0.6, 0.8])
def test_a_part_that_was_stopped_goes_on_to_the_same_sheet(
    stop_at: float,
    seconds: float,
    uninterrupted: tuple[Sheet, list[Progress], Path],
    digits: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "CheckpointFolder", lambda folder: CheckpointFolder(folder, seconds))
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        if progress.share > stop_at:
            raise Stop

    with pytest.raises(Stop):
        run_tiny(tiny_part(), tmp_path, digits, report=stop)
    path = sheet_path(tmp_path, "split-mnist", "table")
    assert not path.exists(), "a sheet is whole, or not there"
    assert (path.parent / ".table" / "0.json").exists() == (stop_at >= 0.6)
    sheet = run_tiny(tiny_part(), tmp_path, digits, report=told.append)
    assert_same(sheet, uninterrupted[0])
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    went_on = [progress.note for progress in told if progress.note and progress.note.startswith("goes on from")]
    assert bool(went_on) == (seconds == 0 and stop_at != 0.6), "at 0.6 nothing of the second group was kept yet"
    if stop_at >= 0.6:
        assert told[0].share >= 0.6, "a group that was finished is not run again"


def test_a_group_that_was_finished_is_not_loaded_for_again(digits: Dataset, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.share > 0.6:
            raise Stop

    with pytest.raises(Stop):
        run_tiny(tiny_part(), tmp_path, digits, report=stop)
    loader = Loader(digits)
    run_part(
        tiny_part(),
        sheet_path(tmp_path, "split-mnist", "table"),
        loader,
        command="engram reproduce",
        setting=Setting("cpu"),
    )
    assert [config.mask_training for config in loader.asked] == [False]


def test_a_group_does_not_go_on_with_other_data(digits: Dataset, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.share > 0.1:
            raise Stop

    with pytest.raises(Stop):
        run_tiny(tiny_part(), tmp_path, digits, report=stop)
    with pytest.raises(InputError, match="the data are not those"):
        run_tiny(tiny_part(), tmp_path, digits.shortened(len(digits.train) - 1))


@pytest.mark.parametrize(
    ("was_quick", "words"), [(True, "there is a quick reproduction"), (False, "there is a whole reproduction")]
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_the_other_kind_is_refused(
    was_quick: bool, words: str, finished: bool, digits: Dataset, tmp_path: Path
) -> None:
    """Also where the other was stopped: what it had finished has the same labels, and other numbers."""

    def stop(progress: Progress) -> None:
        if not finished and progress.share > 0.6:
            raise Stop

    with suppress(Stop):
        run_tiny(tiny_part(), tmp_path, digits, quick=was_quick, report=stop)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.json") if p.name != "plan.json"}
    assert len(before) == 1
    with pytest.raises(InputError) as error:
        run_tiny(tiny_part(), tmp_path, digits, quick=not was_quick)
    assert words in str(error.value)
    assert "--out" in str(error.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.json") if p.name != "plan.json"} == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_other_settings_is_refused(finished: bool, digits: Dataset, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if not finished and progress.share > 0.6:
            raise Stop

    with suppress(Stop):
        run_tiny(tiny_part(), tmp_path, digits, report=stop)
    left = "table.json" if finished else ".table"
    with pytest.raises(InputError, match=f"{left} is of other settings: remove it, or name another folder"):
        run_tiny(tiny_part(hidden=[6]), tmp_path, digits)
    fewer = Part("table", "split-mnist", dict(list(tiny_part().entries.items())[1:]))
    with pytest.raises(InputError, match="is of other settings"):
        run_tiny(fewer, tmp_path, digits)


def test_a_damaged_sheet_says_how_to_go_on(digits: Dataset, tmp_path: Path) -> None:
    path = sheet_path(tmp_path, "split-mnist", "table")
    path.parent.mkdir(parents=True)
    path.write_text("half of o")
    with pytest.raises(InputError, match="remove it, and it is run again"):
        run_tiny(tiny_part(), tmp_path, digits)
    assert path.read_text() == "half of o"


def test_two_processes_do_not_run_one_part_at_once(digits: Dataset, tmp_path: Path) -> None:
    refused: list[str] = []

    def meddle(progress: Progress) -> None:
        if not refused:
            with pytest.raises(InputError) as error:
                run_tiny(tiny_part(), tmp_path, digits)
            refused.append(str(error.value))

    sheet = run_tiny(tiny_part(), tmp_path, digits, report=meddle)
    assert refused[0].startswith("another process is using the run in")
    assert all(len(result.accuracy) == 2 for result in sheet.entries.values())


def test_trials_that_diverge_are_kept_in_the_sheet(digits: Dataset, tmp_path: Path) -> None:
    entries = {
        "calm": preset("split-mnist", "dhp", **TINY),
        "wild": preset("split-mnist", "dhp", **TINY, learning_rate=1e38),
    }
    sheet = run_tiny(Part("study", "split-mnist", entries), tmp_path, digits)
    assert [lost.trial for lost in sheet.entries["wild"].diverged] == [0, 1]
    assert np.isnan(sheet.entries["wild"].accuracy[:, -1]).all()
    calm: Result = sheet.entries["calm"]
    assert calm.diverged == []
    assert np.isfinite(calm.accuracy[:, -1]).all()
