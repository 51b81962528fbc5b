"""Pairs: two Results trial by trial, by trial number; and our numbers next to the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engram.common.registry import HEADS
from engram.config.effect import has_effect, learns
from engram.config.methods import CUSTOM, parts_of
from engram.config.paper import PAPER_RESULTS
from engram.config.presets import changes_from_preset, scenario_of
from engram.config.settings import Config, names_of
from engram.report.layout import in_short, shown
from engram.runs import metrics
from engram.runs.metrics import Array, Estimate
from engram.runs.result import Result

# Everything that the samples of a task and their order are drawn from, apart from the trial's number.
TASKS = (*names_of(stage="stream"), "seed")
# The initial weights of a head, by `head_init` or by the head's own start.
START_OF = {
    "linear": "as nn.Linear's (linear)",
    "published": "as the paper's author published them (published)",
    "scaled": "as large as suits the features (scaled)",
}


@dataclass(frozen=True)
class Pair:
    """Two Results, trial by trial: only the trials that both have.

    `label` and `baseline_label` name the two, `result` and `baseline` are the Results. Every difference is the result
    minus the baseline.

    Example:
        pair = Pair("dhp+si", "si", run.results["dhp+si"], run.results["si"])
        print(pair.trials, pair.accuracy.mean)
    """

    label: str
    baseline_label: str
    result: Result
    baseline: Result

    @property
    def benchmark(self) -> str:
        return self.result.config.benchmark

    @cached_property
    def trials(self) -> tuple[int, ...]:
        """The numbers of the trials that both have."""
        others = set(self.baseline.trials)
        return tuple(trial for trial in self.result.trials if trial in others)

    @cached_property
    def accuracy(self) -> Estimate:
        """Of the differences in average accuracy after the last task, in [-1, 1]."""
        return self.difference(lambda result: result.average_accuracy[:, -1])

    @cached_property
    def transfer(self) -> Estimate:
        """Of the differences in BWT."""
        return self.difference(lambda result: result.bwt)

    @property
    def paper(self) -> float | None:
        """The paper's own difference in accuracy, in points; None where other data were used."""
        ours, theirs = paper_value(self.result), paper_value(self.baseline)
        return None if ours is None or theirs is None else ours[0] - theirs[0]

    @property
    def same_features(self) -> bool:
        """Whether the features of both began each trial with the same weights."""
        return self._agree(names_of(stage="features"))

    @property
    def same_start(self) -> bool:
        """Whether their heads did so too."""
        starts = (start_of(result.config) for result in (self.result, self.baseline))
        return self.same_features and self._agree(("head_gain",)) and len(set(starts)) == 1

    def _agree(self, names: Sequence[str]) -> bool:
        return all(getattr(self.result.config, name) == getattr(self.baseline.config, name) for name in names)

    def difference(self, measure: Callable[[Result], Array]) -> Estimate:
        """The result minus the baseline, in a measure with one value per trial; trials without a value are left out.

        Example:
            pair.difference(lambda result: result.first_task[:, -1])
        """
        return metrics.paired_difference(
            measure(self.result)[_rows(self.result, self.trials)],
            measure(self.baseline)[_rows(self.baseline, self.trials)],
        )


def why_not_paired(result: Result, baseline: Result, same_data: bool | None = None) -> str | None:
    """The reason why trial k of one cannot be compared with trial k of the other; None where it can.

    `same_data` says whether both were trained on the same files, where that is known: it is, of two Results of one
    run. None leaves it to what the Results say of their data.

    Example:
        why_not_paired(run.results["dhp"], run.results["finetune"], same_data=True)
    """
    here, there = result.config, baseline.config
    for name in TASKS:
        ours, theirs = (getattr(config, name) for config in (here, there))
        if name == "scenario":
            ours, theirs = (value or scenario_of(here.benchmark) for value in (ours, theirs))
        if ours != theirs and has_effect(name, here):
            return f"their {name} differs ({shown(ours)} and {shown(theirs)})"
    if here.benchmark == CUSTOM and same_data is None:
        return "nothing was saved that tells whether two custom streams are the same"
    if same_data is False or result.data != baseline.data:
        return "their data are not the same files"
    if not set(result.trials) & set(baseline.trials):
        return f"they have no trial in common ({_span(result.trials)} and {_span(baseline.trials)})"
    return None


def accuracy_difference(result: Result, baseline: Result) -> Estimate:
    """Of the differences in final average accuracy, over the trials that both have.

    Example:
        accuracy_difference(run.results["dhp+si"], run.results["si"]).mean
    """
    return Pair(result.config.method, baseline.config.method, result, baseline).accuracy


def mean_accuracy_difference(found: Sequence[Pair]) -> Estimate:
    """Of the mean of several differences in final average accuracy, over the trials that all of them have.

    Differences of one trial share their samples and initial weights. So they are averaged within each trial first, and
    the interval is that of the trials' means.

    Args:
        found: at least one.

    Example:
        mean_accuracy_difference(pairs(run.results)).low
    """
    trials = sorted(set.intersection(*(set(pair.trials) for pair in found)))

    def mean(results: Sequence[Result]) -> Array:
        of_each = [result.average_accuracy[_rows(result, trials), -1] for result in results]
        return np.mean(of_each, axis=0)

    return metrics.paired_difference(mean([pair.result for pair in found]), mean([pair.baseline for pair in found]))


def baseline_of(method: str) -> str:
    """The same method without the DHP Softmax: `baseline_of("dhp+si")` is "si", and that of "dhp" is "finetune"."""
    _, penalty, rehearsal = parts_of(method)
    return penalty or rehearsal or "finetune"


def baseline_label(label: str, result: Result) -> str | None:
    """The label of the same settings without the DHP Softmax: of "dhp+si: strength=1", "si: strength=1".

    None for a method without it, and for a label that does not name its method.
    """
    method = result.config.method
    if not result.config.plastic or method not in label:
        return None
    return label.replace(method, baseline_of(method), 1)


def pairs(results: Mapping[str, Result]) -> list[Pair]:
    """Every Result with the DHP Softmax, paired with the one that is the same without it, if they can be paired.

    `results` are those of one run, by label.

    Example:
        for pair in pairs(read_run("runs/demo").results):
            print(pair.label, pair.accuracy.mean)
    """
    return [pair for pair, reason in _candidates(results) if reason is None]


def unpaired(results: Mapping[str, Result]) -> list[str]:
    """A sentence for each Result with the DHP Softmax that has its counterpart here and still cannot be paired."""
    return [
        f"{pair.label} is not paired with {pair.baseline_label}: {reason}."
        for pair, reason in _candidates(results)
        if reason is not None
    ]


def _candidates(results: Mapping[str, Result]) -> Iterator[tuple[Pair, str | None]]:
    for label, result in results.items():
        other = baseline_label(label, result)
        if other is not None and other in results:
            reason = why_not_paired(result, results[other], same_data=True)
            yield Pair(label, other, result, results[other]), reason


def head_of(found: Sequence[Pair]) -> str:
    """What the pairs differ in, in words: "the DHP Softmax", "the head scaled", or "the head" if there are several."""
    heads = {pair.result.config.head for pair in found}
    return "the DHP Softmax" if heads == {"dhp"} else f"the head {heads.pop()}" if len(heads) == 1 else "the head"


def start_of(config: Config) -> str | None:
    """How the weights of a head start: a key of START_OF; None where it has none that learn.

    Example:
        >>> start_of(engram.preset("split-mnist", "scaled+si"))
        'scaled'
    """
    if not learns(config):
        return None
    return HEADS.facts(config.head).get("start", config.head_init if has_effect("head_init", config) else None)


def different_starts(results: Mapping[str, Result]) -> list[str]:
    """A sentence that says how the heads of each label start; none where all of them start alike.

    Example:
        print(*different_starts(read_run("runs/demo").results))
    """
    starts: dict[str, list[str]] = {}
    for label, result in results.items():
        if (start := start_of(result.config)) is not None:
            starts.setdefault(start, []).append(label)
    words = "; ".join(f"{START_OF[name]} in {in_short(labels)}" for name, labels in starts.items())
    return [f"The heads' weights start differently: {words}."] if len(starts) > 1 else []


def has_paper_data(result: Result) -> bool:
    """Whether these are the paper's tasks, made of the paper's datasets (a note says which files they were)."""
    others = set(names_of(stage="stream")) & changes_from_preset(result.config).keys()
    return result.config.benchmark in PAPER_RESULTS and not others


def paper_value(result: Result) -> tuple[float, float] | None:
    """The paper's accuracy in % and BWT of this method on these tasks; None where it has none."""
    return PAPER_RESULTS[result.config.benchmark].get(result.config.method) if has_paper_data(result) else None


def _rows(result: Result, trials: Sequence[int]) -> list[int]:
    row = {trial: k for k, trial in enumerate(result.trials)}
    return [row[trial] for trial in trials]


def _span(trials: Sequence[int]) -> str:
    if not trials:
        return "none"
    return f"{trials[0]} to {trials[-1]}" if len(trials) > 1 else str(trials[0])
