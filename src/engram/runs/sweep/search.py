"""Points that Optuna proposes, and the search as a file that Optuna and its dashboard can open.

The runs in the folder of a sweep are the record. `study.db` is a copy for other programs, in SQLite, which a killed
process cannot leave half-written. Engram takes no point and no score from it: it compares the file with the runs, adds
what is missing, and writes again what says something else. So the file may be removed at any time.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, reason
from engram.config.presets import with_scenario
from engram.config.settings import Config, as_setting
from engram.runs import metrics
from engram.runs.sweep.axes import Axis, Choice, written
from engram.runs.sweep.points import GENERATION, Point, Tried, mean_score

STUDY = "study.db"


class Search:
    """Points by Optuna's tree of Parzen estimators. The same seed and the same scores give the same points."""

    def __init__(self, axes: Sequence[Axis], num_points: int, seed: int):
        self.optuna = _import_optuna()
        self.axes = list(axes)
        self.left = num_points
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an argument is experimental
            sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self.study = self.optuna.create_study(direction="maximize", sampler=sampler)
        self.asked: list[Any] = []

    def next(self) -> list[Point]:
        number = min(self.left, GENERATION)
        self.left -= number
        self.asked = [self.study.ask(_distributions(self.axes)) for _ in range(number)]
        return [{axis.name: _setting(axis, trial.params[axis.name]) for axis in self.axes} for trial in self.asked]

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        state = self.optuna.trial.TrialState
        for trial, own, complete in zip(self.asked, scores, finished, strict=True):
            mean = sum(own) / len(own)
            trial.report(mean, len(own))
            self.study.tell(trial, mean if complete else None, state.COMPLETE if complete else state.PRUNED)


def study_name(config: Config) -> str:
    """The name of a method's study: "split-mnist: dhp+si"."""
    return f"{with_scenario(config.benchmark, config)}: {config.method}"


def save_studies(
    path: Path, axes: Sequence[Axis], proposed: Sequence[Sequence[Tried]], about: Mapping[str, str]
) -> str | None:
    """Bring the file up to date: a study for each method, with a trial of Optuna's for each point that was proposed.

    Points that had all trials are complete, dropped ones are pruned, and those whose trials all failed are failed.
    The value is the mean accuracy, and the intermediate value at step n is the mean over the first n trials.

    Args:
        path: the file, which need not exist.
        axes: what was searched.
        proposed: for each method its points in the order in which they were proposed. A point may be there twice.
        about: what each study says of itself.

    Returns:
        A sentence if the file cannot be written. It is only a copy, so the sweep goes on.

    Example:
        >>> save_studies(Path("sweeps/mine/study.db"), plan.axes, [tried], {"command": "engram sweep"})
    """
    try:
        _save_studies(path, axes, proposed, about)
    except Exception:  # damaged, or written by another version of Optuna, which may use other tables
        try:
            for name in (f"{path.name}-journal", path.name):  # SQLite would apply an old journal to the new file
                path.with_name(name).unlink(missing_ok=True)
            _save_studies(path, axes, proposed, about)
        except Exception as error:
            return f"{path} cannot be written: {reason(error.__cause__ or error)}; the sweep continues without it"
    return None


def _save_studies(
    path: Path, axes: Sequence[Axis], proposed: Sequence[Sequence[Tried]], about: Mapping[str, str]
) -> None:
    import sqlite3  # late, since some builds of Python lack it, and a grid does not need it

    optuna = _import_optuna()
    # Not by an address, in which some characters of a path have a meaning.
    options = {"creator": lambda: sqlite3.connect(path)}
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs=options)
    try:
        for tried in proposed:
            if tried:
                _save_study(optuna, storage, axes, tried, about)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _save_study(
    optuna: Any, storage: Any, axes: Sequence[Axis], tried: Sequence[Tried], about: Mapping[str, str]
) -> None:
    wanted = _trials(optuna, axes, tried)
    name = study_name(tried[0].config)
    study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
    there = study.get_trials()
    if [_said(trial) for trial in there] != [_said(trial) for trial in wanted[: len(there)]]:
        optuna.delete_study(study_name=name, storage=storage)
        study, there = optuna.create_study(storage=storage, study_name=name, direction="maximize"), []
    for key, value in about.items():
        if study.user_attrs.get(key) != value:
            study.set_user_attr(key, value)
    for trial in wanted[len(there) :]:
        study.add_trial(trial)


def _said(trial: Any) -> tuple[Any, ...]:
    """What must be the same in the file and in the folder. Remarks that a person added are not part of it."""
    return trial.state, trial.params, trial.values, trial.intermediate_values


def _trials(optuna: Any, axes: Sequence[Axis], tried: Sequence[Tried]) -> list[Any]:
    """The points as trials of Optuna's."""
    states, found = optuna.trial.TrialState, []
    first: dict[str, int] = {}
    for number, each in enumerate(tried):
        accuracy = metrics.estimate(each.scores)
        remarks = {
            "trials": len(each.scores),
            "failed trials": each.num_diverged,
            "why": each.why or ("diverged" if each.num_diverged else None),
            "standard error": accuracy.sem if accuracy.num_trials > 1 else None,
            "same point as": first.get(each.label),
        }
        first.setdefault(each.label, number)
        state = states.FAIL if each.failed else states.COMPLETE if each.finished else states.PRUNED
        found.append(
            optuna.trial.create_trial(
                state=state,
                value=None if each.failed else each.mean,
                params={axis.name: _parameter(each.point[axis.name]) for axis in axes},
                distributions=_distributions(axes),
                intermediate_values={n: mean_score(each.scores[:n]) for n in range(1, 1 + len(each.scores))},
                user_attrs={name: value for name, value in remarks.items() if value is not None},
            )
        )
    return found


def _distributions(axes: Sequence[Axis]) -> dict[str, Any]:
    kinds = _import_optuna().distributions
    found = {}
    for axis in axes:
        if isinstance(axis, Choice):
            found[axis.name] = kinds.CategoricalDistribution([_parameter(value) for value in axis.values])
        elif axis.whole:
            found[axis.name] = kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        else:
            found[axis.name] = kinds.FloatDistribution(axis.low, axis.high, log=axis.log)
    return found


def _parameter(value: Any) -> Any:
    """A setting as Optuna keeps it; it has no lists."""
    return value if value is None or isinstance(value, bool | int | float | str) else written(value)


def _setting(axis: Axis, found: Any) -> Any:
    """The setting that Optuna proposes."""
    if isinstance(axis, Choice):
        return next(value for value in axis.values if _parameter(value) == found)
    if axis.whole:
        return found
    # Four digits are more than a sweep can tell apart, and easy to type; but they may lie outside of the range.
    return as_setting(axis.name, min(max(float(f"{found:.4g}"), axis.low), axis.high))


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise InputError("Optuna is not installed: pip install 'engram-cl[optuna]'; --grid needs nothing") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
