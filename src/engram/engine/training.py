"""Train configs to the end of their streams: the one way of `engram.run`, `run`, `sweep` and `reproduce`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engram.common.errors import InputError, check_choice, shortened
from engram.common.registry import PENALTIES
from engram.config.settings import Config
from engram.engine.build import NOTHING_CUSTOM, PRECISIONS, Custom
from engram.engine.checkpoint import SECONDS_BETWEEN, CheckpointFolder
from engram.engine.in_process import Engine, InProcess, Stack
from engram.engine.learner import Outcomes, Progress, Report, StopAsked, never_stop, no_report
from engram.engine.stacks import SAME_TASKS, Builder, Source, group_by, plan_stacks
from engram.penalties import Penalty
from engram.penalties.penalty import check_step


@dataclass(frozen=True)
class Runtime:
    """Where and how to compute.

    Args:
        device: "auto" (the GPU if there is one), "cpu", "cuda", ...
        precision: "tf32" (on GPUs that have it, otherwise as float32), "float32" or "float64".
        max_stack: the largest number of models that train together; by default as many as fit into memory.
        engine: what trains the stacks; see `engram.engine.start_engine`.

    Example:
        >>> Runtime("cpu", precision="float64").device
        'cpu'
    """

    device: str = "auto"
    precision: str = "tf32"
    max_stack: int | None = None
    engine: Engine = field(default_factory=InProcess)

    def check(self) -> None:
        """Refuse values that no machine can use."""
        check_choice("precision", self.precision, PRECISIONS)
        if self.max_stack is not None and (type(self.max_stack) is not int or self.max_stack < 1):
            raise InputError(f"a stack has at least one model, not {shortened(self.max_stack)}")

    def environment(self) -> dict[str, Any]:
        """What the last bits of a number may depend on: the device that is meant, threads, the GPU's name."""
        self.check()
        return self.engine.environment(self.device)


class Training:
    """Every config in all its trials, as many models together as fit into memory.

    Everything is checked and built before anything is trained, so that bad input leaves no trace.

    Args:
        configs: the settings, by label. They must agree on the benchmark and the dataset. Those that agree on all
            tasks and steps train together.
        source: the datasets or the stream.
        runtime: where and how to compute.
        custom: functions that make parts of the models, in place of what the configs name.

    Example:
        >>> training = Training({"mine": config}, Source((dataset,)), Runtime("cpu"))  # raises InputError
        >>> outcomes = training.run(folder / "checkpoints")
        >>> len(outcomes["mine", 0].rows[-1])  # accuracy on each task after the last one
        2
    """

    def __init__(
        self, configs: Mapping[str, Config], source: Source, runtime: Runtime, custom: Custom = NOTHING_CUSTOM
    ):
        runtime.check()
        check_together(configs, custom)
        self.configs = dict(configs)
        self.runtime = runtime
        self.builders = [
            Builder(group, source, custom, runtime.device, runtime.precision) for group in group_by(SAME_TASKS, configs)
        ]
        for builder in self.builders:
            builder.check()
        self.outcomes: Outcomes = {}

    def run(
        self,
        checkpoints: Path | None = None,
        seconds_between: float = SECONDS_BETWEEN,
        report: Report = no_report,
        stop_asked: StopAsked = never_stop,
    ) -> Outcomes:
        """Train to the end.

        Args:
            checkpoints: a folder for checkpoints, whose parent exists. If it holds any, training resumes from them.
            seconds_between: the time between two checkpoints.
            report: called with a `Progress` several times an epoch, after each task, and with notes.
            stop_asked: asked often; when it returns True, everything is saved and `Stopped` is raised.

        Returns:
            The outcome of each trial, by label and trial.
        """
        folder = None if checkpoints is None else CheckpointFolder(checkpoints, seconds_between)
        if folder is not None:
            folder.make()
        plans = [
            (plan, builder)
            for builder, limit in zip(self.builders, self._limits(folder), strict=True)
            for plan in plan_stacks(builder.configs, limit)
        ]
        stacks = [Stack(number, plan, builder, folder) for number, (plan, builder) in enumerate(plans)]
        # How much of the whole each stack is, in models times epochs.
        first = [next(iter(stack.configs.values())) for stack in stacks]
        work = [len(stack.plan) * c.num_tasks * c.epochs for stack, c in zip(stacks, first, strict=True)]
        done = [0.0] * len(stacks)

        def report_whole(number: int, progress: Progress) -> None:
            """Put the progress of one stack together with what is known of the others."""
            done[number] = max(done[number], progress.done)
            self.outcomes |= progress.outcomes
            overall = sum(part * size for part, size in zip(done, work, strict=True)) / sum(work)
            report(replace(progress, done=overall, configs=self.configs, outcomes=self.outcomes))

        if len(stacks) > 1:
            sizes = [len(stack.plan) for stack in stacks]
            each = f"of {sizes[0]}" if len(set(sizes)) == 1 else f"of {min(sizes)} to {max(sizes)}"
            note = f"{sum(sizes)} models in {len(sizes)} stacks {each}"
            report(Progress(0, 0, self.configs, self.outcomes, note=note))
        self.runtime.engine.train(stacks, report_whole, stop_asked)
        return self.outcomes

    def _limits(self, folder: CheckpointFolder | None) -> list[int | None]:
        """How many models a stack of each builder may have. A resumed run uses the limits that it started with."""
        saved = None if folder is None else folder.read_limits(self.configs, len(self.builders))
        if saved is not None:
            return saved
        most = self.runtime.max_stack
        limits = [self.runtime.engine.limit(builder) if most is None else most for builder in self.builders]
        if folder is not None:
            folder.save_limits(self.configs, limits)
        return limits


def check_learned(outcomes: Outcomes) -> None:
    """Refuse settings with which every trial failed before it had learned a task, though no loss was NaN."""
    lost = [outcome.diverged for outcome in outcomes.values() if outcome.diverged is not None and not outcome.rows]
    if lost and len(lost) == len(outcomes) and all(each.why is not None for each in lost):
        raise InputError(str(lost[0].why))


def check_together(configs: Mapping[str, Config], custom: Custom = NOTHING_CUSTOM) -> None:
    """Refuse configs that cannot be one run, and custom parts that do not belong to them."""
    if not configs:
        raise InputError("there is nothing to train: no config was given")
    for name in ("benchmark", "dataset"):
        values = {getattr(config, name): None for config in configs.values()}
        if len(values) > 1:
            raise InputError(f"what is run together must have one {name}, not {' and '.join(map(str, values))}")
    if any((custom.features is not None) != (config.network == "custom") for config in configs.values()):
        raise InputError("features go with network='custom', and only with that: engram.run(config, features=...)")
    if custom.penalty is not None and any(config.penalty is not None for config in configs.values()):
        raise InputError("a custom penalty goes with the methods finetune and dhp, which have none")
    if custom.penalty is not None and any(config.rehearsal is not None for config in configs.values()):
        raise InputError("a method has a penalty or a rehearsal, and not both: a custom penalty goes with finetune")
    for config in configs.values():
        if config.rehearsal is not None and config.consolidate_every is not None:
            raise InputError(f"{config.method} has no penalty that could consolidate: leave consolidate_every out")
        made = None if config.penalty is None else PENALTIES[config.penalty].make
        if isinstance(made, type) and issubclass(made, Penalty):  # not a function: `Builder.check` calls that
            check_step(made, config.penalty_step)
            if config.consolidate_every is not None and getattr(made, "keeps_every_term", False):
                other = "set consolidate_every only for penalties with one term for all, such as online-ewc"
                raise InputError(f"{config.penalty} keeps a term for every consolidation: {other}")
