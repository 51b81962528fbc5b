"""Run a reproduction: every part into its own run, BENCHMARK/PART in one folder, from where it was stopped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from engram.common.errors import InputError
from engram.config.settings import Config
from engram.data.samples import Dataset
from engram.engine.learner import Report, StopAsked, never_stop, no_report
from engram.engine.training import Runtime
from engram.reproduction.folder import IN_THE_TABLES, part_folder
from engram.reproduction.plan import Part
from engram.runs.folder import claim_group, versions
from engram.runs.run import REPRODUCTION, Run, has_started, read_run
from engram.runs.start import check_run, complete_run

Load = Callable[[Config], Sequence[Dataset]]
Show = Callable[[Part], AbstractContextManager[Report]]


@contextmanager
def _show_nothing(part: Part) -> Iterator[Report]:
    yield no_report


def run_reproduction(
    parts: Sequence[Part],
    folder: str | Path,
    load: Load,
    *,
    command: str = "",
    quick: bool = False,
    skip_without_data: bool = False,
    runtime: Runtime | None = None,
    show: Show = _show_nothing,
    tell: Callable[[str], None] = lambda line: None,
    stop_asked: StopAsked = never_stop,
) -> dict[tuple[str, str], Run]:
    """Run the parts of a reproduction. Finished parts are read, and parts that were stopped are resumed.

    Args:
        parts: what to run, as `plan` returns it.
        folder: a new or empty folder, or that of a reproduction of the same kind.
        load: returns the datasets of a config; called once for each dataset.
        command: saved, so that `engram run --resume FOLDER` can resume the reproduction.
        quick: whether the parts are those of a quick reproduction. A folder holds either kind, not both.
        skip_without_data: whether a benchmark whose data cannot be loaded is left out, and not an error.
        runtime: where and how to compute. An engine that trains several stacks at a time runs all parts at a time.
        show: entered for each part while it runs; gives the function that is called with each `Progress`.
        tell: called with one line for each part that is finished or left out.
        stop_asked: asked often; when it returns True everything is saved, and `Stopped` is raised.

    Returns:
        The finished runs, by benchmark and part.

    Example:
        >>> runs = run_reproduction(plan(quick=True), "reproduction-quick", load, quick=True)
        >>> runs["split-mnist", "table"].results["dhp+si"].bwt
    """
    folder, runtime = Path(folder), Runtime() if runtime is None else runtime
    for part in parts:  # before anything is made or fetched
        if not part.needs:
            check_run(part.configs, runtime, dynamics=_keeps_dynamics(part))
    _check_needs(parts, folder)
    loader = _Loader(load, folder, skip_without_data, tell)
    wanted = _with_needs([part for part in parts if loader.can_load(part)], folder, tell)
    if not wanted:
        raise InputError("nothing was run: the data of none of the benchmarks can be loaded")
    warning = _claim(folder, command, quick, runtime)
    if warning:
        tell(warning)

    def without_warning(report: Report) -> Report:
        """Each part that is resumed has the same one, and logs it."""
        return lambda progress: report(replace(progress, note=None) if progress.note == warning else progress)

    def run_part(part: Part) -> Run:
        path = part_folder(folder, part.benchmark, part.name)
        was_finished = _is_finished(path)
        configs = part.make({need: needed(*need) for need in part.needs})
        with show(part) as report:
            run = complete_run(
                configs,
                () if was_finished else loader.load(part.example),
                path,
                command=command,
                runtime=runtime,
                about={"part": part.name, "quick": quick},
                dynamics=_keeps_dynamics(part),
                report=without_warning(report),
                stop_asked=stop_asked,
            )
        tell(_in_words(part, run, was_finished))
        return run

    started: dict[tuple[str, str], Future[Run]] = {}

    def needed(benchmark: str, name: str) -> Run:
        if (benchmark, name) in started:
            started[benchmark, name].result()  # waits for it
        return read_run(part_folder(folder, benchmark, name), dynamics=False)

    if runtime.engine.at_once == 1:
        return {(part.benchmark, part.name): run_part(part) for part in wanted}
    with ThreadPoolExecutor(max_workers=len(wanted)) as pool:  # a thread each, since some wait for others
        for part in wanted:
            started[part.benchmark, part.name] = pool.submit(run_part, part)
        return {name: future.result() for name, future in started.items()}


class _Loader:
    """Loads each dataset once, for all parts that use it."""

    def __init__(self, load: Load, folder: Path, skip: bool, tell: Callable[[str], None]):
        self._load = load
        self._folder = folder
        self._skip = skip
        self._tell = tell
        self._loaded: dict[str, Sequence[Dataset]] = {}
        self._left_out: set[str] = set()

    def load(self, config: Config) -> Sequence[Dataset]:
        if config.dataset not in self._loaded:
            self._loaded[config.dataset] = self._load(config)
        return self._loaded[config.dataset]

    def can_load(self, part: Part) -> bool:
        """Whether a part can be run: it is finished, or its data are there."""
        if _is_finished(part_folder(self._folder, part.benchmark, part.name)):
            return True
        try:
            self.load(part.example)
        except InputError as reason:
            if not self._skip:
                raise
            if part.benchmark not in self._left_out:
                self._left_out.add(part.benchmark)
                self._tell(f"{part.benchmark} is left out: {reason}")
            return False
        return True


def _check_needs(parts: Sequence[Part], folder: Path) -> None:
    """Refuse a part that needs another one which is neither finished nor run before it."""
    before: set[tuple[str, str]] = set()
    for part in parts:
        if lacking := _lacking(part, before, folder):
            raise InputError(f"{part.name} of {part.benchmark} needs what is not finished: {lacking}")
        before.add((part.benchmark, part.name))


def _with_needs(parts: Sequence[Part], folder: Path, tell: Callable[[str], None]) -> list[Part]:
    """Leave out a part that needs one whose data cannot be loaded."""
    kept: dict[tuple[str, str], Part] = {}
    for part in parts:
        if lacking := _lacking(part, kept, folder):
            tell(f"{part.name} of {part.benchmark} is left out: it needs {lacking}")
        else:
            kept[part.benchmark, part.name] = part
    return list(kept.values())


def _lacking(part: Part, before: Container[tuple[str, str]], folder: Path) -> str:
    """The parts that this one needs and that are neither finished nor run before it, in words."""
    lacking = [need for need in part.needs if need not in before and not _is_finished(part_folder(folder, *need))]
    return ", ".join(name if other == part.benchmark else f"{name} of {other}" for other, name in lacking)


def _keeps_dynamics(part: Part) -> bool:
    """Only these are shown anywhere; those of the other parts would be large."""
    return part.name in (*IN_THE_TABLES, "divergence", "leak")


def _is_finished(path: Path) -> bool:
    if not has_started(path):
        return False
    run = read_run(path, dynamics=False)
    return run.finished and not run.problems


def _claim(folder: Path, command: str, quick: bool, runtime: Runtime) -> str | None:
    """Make a folder that of a reproduction, or refuse it; returns a warning if the environment has changed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise InputError(f"cannot write to {folder}: {reason.strerror or reason}") from reason
    about = {
        "command": command,
        "arguments": shlex.split(command)[1:],
        "environment": {**runtime.environment(), **versions()},
    }
    return claim_group(folder / REPRODUCTION, {"quick": quick}, about)


def _in_words(part: Part, run: Run, was_finished: bool) -> str:
    diverged = sum(len(result.diverged) for result in run.results.values())
    how = "was finished already" if was_finished else f"{run.num_models} models in {run.about['seconds']:.0f} s"
    return f"{part.benchmark}: {part.name}, {how}" + (f"; {diverged} diverged" if diverged else "")
