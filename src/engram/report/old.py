"""Runs and sheets of format 1 as Runs, while the commands still write them."""

from __future__ import annotations

from pathlib import Path

from engram.config.paper import PAPER_BENCHMARKS, PARTS
from engram.runs import run as runs
from engram.runs.result import read_run
from engram.runs.run import Run
from engram.runs.sheets import read_sheet, sheet_path


def open_runs(path: str | Path) -> dict[str, Run]:
    path = Path(path)
    if (path / "accuracy.json").exists() or any(path.glob("*/accuracy.json")):
        about, results = read_run(path)
        by_label = {result.config.method: result for result in results}
        about = {"data": results[0].data, "runtime": {"device": about.get("device")}, **about}
        about.setdefault("environment", about.get("surroundings", {}))
        if about["methods"] and "finished" in about:
            about["finished"] = about["finished"] or "yes"
        return {path.name: Run(path, {label: result.config for label, result in by_label.items()}, by_label, about)}
    return runs.open_runs(path)


def old_parts(folder: Path) -> dict[tuple[str, str], Run]:
    found = {}
    for benchmark in PAPER_BENCHMARKS:
        for part in PARTS:
            path = sheet_path(folder, benchmark, part)
            if path.exists():
                sheet = read_sheet(path)
                about = {**sheet.about, "part": part, "finished": "yes"}
                about["environment"] = {name: sheet.about.get(name) for name in ("device", "gpu", "threads")}
                about["runtime"] = {name: sheet.about.get(name) for name in ("device", "precision")}
                configs = {label: result.config for label, result in sheet.entries.items()}
                found[benchmark, part] = Run(path, configs, sheet.entries, about)
    return found
