"""Runs side by side: what is compared with what, and why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engram.config.presets import preset
from engram.config.settings import Config
from engram.report.compare import (
    Side,
    differences_table,
    pair_of,
    reason_against,
    settings_table,
)
from engram.runs.result import Result

TASKS = 3


def config_of(method: str = "si", **changes: Any) -> Config:
    return preset("split-mnist", method, **({"dataset": "mnist-small", "num_tasks": TASKS, "trials": 2} | changes))


def result_of(config: Config, level: float = 0.5) -> Result:
    """A result whose accuracies differ from trial to trial."""
    trials = tuple(range(config.first_trial, config.first_trial + config.trials))
    shape = (config.trials, config.num_tasks, config.num_tasks)
    generator = np.random.default_rng(int(100 * level))
    accuracy = np.where(np.tri(config.num_tasks) > 0, level + 0.1 * generator.random(shape), np.nan)
    return Result(config, trials, accuracy, np.full(shape[:2], 0.1))


def side_of(config: Config, level: float = 0.5, run: str = "run", **about: Any) -> Side:
    return Side(run, config.method, result_of(config, level), about)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "their seed differs (1 and 0)"),
        ({"num_tasks": 2}, "their num_tasks differs (2 and 3)"),
        ({"dataset": "mnist"}, "their dataset differs (mnist and mnist-small)"),
        ({"max_samples": 10}, "their max_samples differs (10 and none)"),
        ({"examine": "validation"}, "their examine differs (validation and test)"),
        ({"first_trial": 2}, "they have no trial in common (2 to 3 and 0 to 1)"),
        ({"first_trial": 1}, None),
        ({"epochs": 3}, None),
        ({"strength": 3.0, "hidden": [5]}, None),
        ({"imbalance_seed": 3}, None),
    ],
)
def test_trials_are_paired_only_on_the_same_tasks(changes: dict[str, Any], reason: str | None) -> None:
    config = config_of()
    assert reason_against(side_of(config.replace(**changes)), side_of(config)) == reason


def test_the_imbalance_seed_matters_on_the_imbalanced_benchmark() -> None:
    config = preset("imbalanced-permuted-mnist", "si", num_tasks=TASKS, trials=2)
    reason = reason_against(side_of(config.replace(imbalance_seed=3)), side_of(config))
    assert reason == "their imbalance_seed differs (3 and 0)"


def test_other_data_of_the_same_name_are_no_pair() -> None:
    here, there = (side_of(config_of(), fingerprints=[mark]) for mark in "ab")
    assert reason_against(here, there) == "their data are not the same files"
    assert reason_against(here, here) is None
    custom = side_of(preset("custom", "si", strength=1.0, num_tasks=TASKS, trials=2))
    assert reason_against(custom, custom) == "nothing was saved that tells whether two custom streams are the same"


def test_pairs_are_trials_of_the_same_number() -> None:
    long, short = config_of(trials=5), config_of(trials=3, first_trial=1)
    ours, theirs = side_of(long, 0.6), side_of(short, 0.2)
    pair = pair_of(ours, theirs)
    by_hand = ours.result.average_accuracy[1:4, -1] - theirs.result.average_accuracy[:, -1]
    assert pair.trials == (1, 2, 3)
    assert pair.accuracy.num_trials == 3
    assert pair.accuracy.mean == pytest.approx(by_hand.mean())
    assert pair.transfer.mean == pytest.approx((ours.result.bwt[1:4] - theirs.result.bwt).mean())
    assert pair_of(theirs, ours).accuracy.mean == pytest.approx(-by_hand.mean())


def test_two_runs_of_one_method_each_are_compared_with_each_other() -> None:
    sides = [side_of(config_of("si"), run="a"), side_of(config_of("dhp+si"), run="b")]
    table = differences_table(sides)
    assert [row[:2] for row in table.rows] == [("b", "dhp+si − si")]
    more = [*sides, side_of(config_of("mas"), run="b")]
    assert differences_table(more).rows == []
    assert differences_table(more).notes[0] == "dhp+si of b has no pair: a did not run it."


def test_settings_of_different_methods_are_no_differences_of_runs() -> None:
    a = [side_of(config_of(method), run="a") for method in ("si", "mas")]
    b = [side_of(config_of("si", epochs=3), run="b")]
    assert [row[0] for row in settings_table([*a, *b]).rows] == ["epochs"]
    assert settings_table([*a, side_of(config_of("si"), run="b")]).notes == ("All settings are the same.",)
