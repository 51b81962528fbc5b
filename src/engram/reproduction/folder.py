"""The folder of a reproduction: BENCHMARK/PART runs, and what is missing. Reading needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engram.common.errors import InputError
from engram.config.paper import PAPER_BENCHMARKS, PAPER_METHODS, PARTS
from engram.reproduction import stress
from engram.reproduction.ladder import STEPS
from engram.reproduction.plan import NOT_RUN
from engram.runs.run import REPRODUCTION, Run, has_started, read_run

IN_THE_TABLES = ("table", "variant")  # parts that have as many trials as the paper
PAPER_TRIALS = 10


@dataclass(frozen=True)
class Reproduction:
    """All runs of a reproduction that have results, and what is missing, in sentences."""

    folder: Path
    runs: dict[tuple[str, str], Run]  # by benchmark and part
    missing: list[str]

    @property
    def quick(self) -> bool:
        return any(run.about.get("quick") for run in self.runs.values())


def part_folder(folder: Path, benchmark: str, part: str) -> Path:
    """Where one part of a reproduction is: BENCHMARK/PART."""
    return folder / benchmark / part


def holds_reproduction(folder: str | Path) -> bool:
    """Whether a folder is that of a reproduction, started or finished.

    Example:
        holds_reproduction("results")
    """
    return (Path(folder) / REPRODUCTION).exists()


def read_reproduction(folder: str | Path, unreadable: dict[str, str] | None = None) -> Reproduction:
    """Read all runs of a reproduction, and say what is missing from a complete one.

    Args:
        folder: what `engram reproduce` wrote, finished or not.
        unreadable: as in `open_runs`; what is in it is missing too.

    Example:
        read_reproduction("results").runs["split-mnist", "table"].results["dhp+si"]
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    if not holds_reproduction(folder):
        raise InputError(f"{folder} does not hold a reproduction: it has no {REPRODUCTION}")
    runs: dict[tuple[str, str], Run] = {}
    missing = []
    unreadable = {} if unreadable is None else unreadable
    # A folder without any of it was made before there was a ladder, and lacks nothing.
    ladder = any(has_started(part_folder(folder, benchmark, step)) for benchmark in PAPER_BENCHMARKS for step in STEPS)
    later = (*STEPS, *stress.STEPS, "map", "relu", "divergence", "leak")
    for benchmark in PAPER_BENCHMARKS:
        for part, title in PARTS.items():
            path = part_folder(folder, benchmark, part)
            if not has_started(path):
                expected = (benchmark, part) not in NOT_RUN and (part not in later or ladder)
                missing += [f"{benchmark}: {title} was not run"] if expected else []
                continue
            try:
                run = read_run(path)
            except InputError as error:
                unreadable[f"{benchmark}/{part}"] = str(error)
                missing.append(f"{benchmark}, {part}: {error}")
                continue
            if (run.benchmark, run.about.get("part")) != (benchmark, part):
                raise InputError(f"{path} is in the wrong folder: it is {run.about.get('part')} of {run.benchmark}")
            missing += missing_from_part(run)
            if run.results:
                runs[benchmark, part] = run
    if not runs:
        raise InputError(next(iter(unreadable.values()), f"the reproduction in {folder} has no results yet"))
    return Reproduction(folder, runs, missing)


def missing_from_part(run: Run) -> list[str]:
    """What one part of a reproduction lacks, in sentences without a full stop."""
    name = f"{run.benchmark}, {run.about['part']}"
    sentences = [f"{name}: {label}: {problem}" for label, problem in run.problems.items()]
    if not run.results:
        return [*sentences, f"{name} has no results yet"]
    sentences += [
        f"{name}: {label} has finished {result.trials_finished} of {result.config.trials} trials"
        for label, result in run.results.items()
        if result.trials_finished + len(result.diverged) < result.config.trials
    ]
    expected = PAPER_METHODS if run.about["part"] == "table" else run.configs
    sentences += [
        f"{name}: {label} was not run" for label in expected if label not in run.results and label not in run.problems
    ]
    planned = min(config.trials for config in run.configs.values())
    if run.about["part"] in IN_THE_TABLES and planned < PAPER_TRIALS and not run.about.get("quick"):
        sentences.append(f"{name}: {planned} of the paper's {PAPER_TRIALS} trials were run")
    learned = min(result.tasks_learned for result in run.results.values())
    num_tasks = next(iter(run.configs.values())).num_tasks
    if learned < num_tasks:
        sentences.append(f"{name}: {learned} of {num_tasks} tasks were learned")
    return sentences
