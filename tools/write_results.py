"""Fill the numbers and tables of the documents from results/, draw pictures, and write the best settings.

A gap in the text is `<!-- NAME --><!-- end -->`. What stands between the two comments is replaced by what `gaps` has
under that name; everything outside gaps is left as it is.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from document_tables import (
    baseline_table,
    behind_in_the_grids,
    best_settings,
    cells_within,
    control_table,
    data_table,
    differences,
    diverged_table,
    gain_of_start,
    gains_within,
    heads_table,
    num_selected,
    sensitivity_table,
    study_table,
    times_table,
    worst_table,
)

from engram.config.paper import PAPER_BENCHMARKS, PAPER_RESULTS, PARTS
from engram.config.presets import STEADY, title_of
from engram.report.figures import draw_one
from engram.report.layout import Table
from engram.report.pairs import Pair
from engram.report.tables import final, final_accuracy, so_far
from engram.reproduction.claims import accuracy_table, claims_table, rung_claims_table, transfer_table
from engram.reproduction.divergence import divergence_table, leak_table
from engram.reproduction.folder import Reproduction, read_reproduction
from engram.reproduction.form import by_rate_table, counts_table, crossed_table
from engram.reproduction.ladder import CANDIDATES, GRID, KNOBS, STEPS, Runs, rounds_of
from engram.reproduction.map import best_rates_table, map_table
from engram.reproduction.page import draw_overview
from engram.reproduction.rungs import (
    MIXTURE,
    OPPONENTS,
    RUNGS,
    SEARCHED,
    ladder_table,
    one_strength_table,
    rung_differences,
    rung_mean,
    rung_pairs,
    settings_table,
    verdicts_table,
)
from engram.reproduction.stress import BENCHMARK, rates_table, stress_table
from engram.reproduction.study import relu_table
from engram.reproduction.verdicts import FEWEST_PAIRS, counted, points, steady_pairs, table_pairs, where
from engram.runs.run import read_run

ROOT = Path(__file__).parent.parent
OTHERS = [head for head in KNOBS if head not in ("linear", *CANDIDATES)]
APPENDICES = ("table-one", "settings", "why", "steady", "runs", "map")
DOCUMENTS = (
    "docs/reproduction.md",
    *(f"docs/reproduction/{name}.md" for name in APPENDICES),
    "docs/form.md",
    "README.md",
)
IMAGES = ROOT / "docs" / "images"
DARKEST = 0.07  # of a dark page, as a part of white
BEST = "src/engram/config/best.json"  # what `engram run --best` uses
GAP = re.compile(r"<!-- (?P<name>[^>]+?) -->(?P<content>(?:(?!<!--).)*)<!-- end -->", re.DOTALL)


def documents(root: Path = ROOT, results: Path | None = None) -> dict[Path, str]:
    """What each document is to hold."""
    reproduction = read_reproduction(results or root / "results")
    known = gaps(reproduction)
    best = json.dumps(best_settings(reproduction.runs), indent=1) + "\n"
    filled = {root / name: fill((root / name).read_text(encoding="utf-8"), known) for name in DOCUMENTS}
    return {**filled, root / BEST: best}


def fill(text: str, known: Mapping[str, str]) -> str:
    """The text with all its gaps filled; a gap of an unknown name is an error."""

    def filled(gap: re.Match[str]) -> str:
        content = known[gap["name"]].strip()
        if gap["name"].startswith("table") and gap["name"].partition(":")[1]:
            content = f"\n{content}\n" if content else "\n"
        return f"<!-- {gap['name']} -->{content}<!-- end -->"

    return GAP.sub(filled, text)


def gaps(reproduction: Reproduction) -> dict[str, str]:
    """Everything that a document can be filled with, by the names of its gaps."""
    runs, folder = reproduction.runs, reproduction.folder
    registered = _of_rung(as_registered(folder), 4, "rung 4 registered")
    known = {**_numbers(runs, folder), **_of_rungs(runs), **registered, **_tables(runs, folder)}
    return {**known, "missing": _missing(reproduction.missing)}


def _of_rungs(runs: Runs) -> dict[str, str]:
    known: dict[str, str] = {}
    for rung in RUNGS:
        known |= _of_rung(runs, rung, f"rung {rung}")
    for name, within in (("cells", cells_within), ("gains", gains_within)):
        known[name] = str(within(runs, 1)[1])
        known |= {f"{name} within {limit}": str(within(runs, limit)[0]) for limit in (1, 3)}
    known["start: mean"] = points(gain_of_start(runs))
    for initial in ("linear", "published"):
        known[f"mixture's grids: {initial}"] = behind_in_the_grids(runs, MIXTURE, initial)
    return known


def _of_rung(runs: Runs, rung: int, name: str) -> dict[str, str]:
    known: dict[str, str] = {}
    for opponent in OPPONENTS:
        found = rung_differences(runs, rung, opponent)
        known[f"{name}: {opponent}"] = counted(found)
        pairs = [pair for benchmark in PAPER_BENCHMARKS for pair in rung_pairs(runs, benchmark, rung, opponent)]
        on_digits = [where(pair.accuracy) for pair in pairs if pair.benchmark != MIXTURE]
        known[f"{name}: {opponent} above"] = f"{on_digits.count('above zero')} of {len(on_digits)}"
        known[f"{name}: {opponent} mean"] = points(rung_mean(runs, rung, opponent))
        known |= {f"{name}: {opponent} {pair.benchmark} {pair.label}": points(pair.accuracy) for pair in pairs}
    return known


def _numbers(runs: Runs, folder: Path) -> dict[str, str]:
    steady = [pair for pair in steady_pairs(runs) if pair.accuracy.num_trials >= FEWEST_PAIRS]
    with_penalty = [pair.accuracy for pair in steady if pair.label != "dhp"]
    alone = [pair.accuracy for pair in steady if pair.label == "dhp"]
    tables = [run for (_, part), run in runs.items() if part == "table"]
    seconds = sum(float(run.about["seconds"]) for run in tables)
    ladder = [run for (_, part), run in runs.items() if part in STEPS]
    rounds = rounds_of(runs, "permuted-mnist", GRID)
    grid = {k: r for run in rounds for k, r in run.results.items() if k.startswith("matched") and "published" not in k}
    plain = runs["split-mnist", "study"].results["plain baseline: finetune"]
    mas = {head: runs["split-mnist", "rung-1"].results[f"{head}+mas"] for head in ("linear", "matched", "dhp")}
    added = {head: Pair(head, "linear", mas[head], mas["linear"]).accuracy for head in ("matched", "dhp")}
    alone_on_mixture = {head: runs["vision-mixture", "rung-1"].results[head] for head in ("linear", "dhp")}
    return {
        "models": f"{sum(run.num_models for run in runs.values()):,}",
        "candidates": str(num_selected(folder)),
        "ladder models": f"{sum(run.num_models for run in ladder):,}",
        "ladder seconds": f"{sum(float(run.about['seconds']) for run in ladder):,.0f}",
        "counted": counted([pair.accuracy for pair in table_pairs(runs)]),
        "steady counted": counted(with_penalty),
        "alone counted": counted(alone),
        **{f"grid: {label}": f"{100 * final(result).mean:.1f}" for label, result in grid.items()},
        "paper: si": str(PAPER_RESULTS["permuted-mnist"]["si"][0]),
        "study: plain finetune": f"{100 * final(plain).mean:.1f}",
        "mas: plain": final_accuracy(mas["linear"]),
        **{f"mas: {head}": points(difference) for head, difference in added.items()},
        **{f"last task: {h}": f"{100 * r.accuracy[:, -1, -1].mean():.1f}" for h, r in alone_on_mixture.items()},
        "steady settings": ", ".join(f"`{name}={json.dumps(value)}`" for name, value in STEADY.items()),
        "table models": str(sum(run.num_models for run in tables)),
        "table seconds": f"{seconds:,.0f}",
        "table minutes": f"{seconds / 60:.1f}",
    }


def _tables(runs: Runs, folder: Path) -> dict[str, str]:
    studies = [benchmark for benchmark in PAPER_BENCHMARKS if (benchmark, "study") in runs]
    unfinished = [so_far(run.results) for (_, part), run in runs.items() if part == "table"]
    steady = differences(steady_pairs(runs), "The steady trace", against_paper=False)
    return {
        "table: accuracy": accuracy_table(runs).to_markdown(),
        "table: transfer": transfer_table(runs).to_markdown(),
        "tables: ladder": _joined(table for name in OPPONENTS if (table := ladder_table(runs, name)).rows),
        "table: one strength": one_strength_table(runs).to_markdown(),
        "table: verdicts": verdicts_table(runs).to_markdown(),
        "table: counts": counts_table(runs).to_markdown(),
        "tables: heads": _joined(_heads(runs)),
        "tables: crossed": _joined(table for name in PAPER_BENCHMARKS if (table := crossed_table(runs, name)).rows),
        "table: counts registered": counts_table(as_registered(folder)).to_markdown(),
        "tables: heads registered": _joined(_heads(as_registered(folder))),
        "table: rates": by_rate_table(runs).to_markdown(),
        "tables: map": _joined(table for name in PAPER_BENCHMARKS if (table := map_table(runs, name)).rows),
        "tables: best rates": _joined(table for table in [best_rates_table(runs)] if table.rows),
        "tables: divergence": _joined(table for table in [divergence_table(runs)] if table.rows),
        "tables: leak": _joined(table for table in [leak_table(runs)] if table.rows),
        "tables: relu": _joined(table for table in [relu_table(runs)] if table.rows),
        "tables: stress": _joined(table for table in [stress_table(runs)] if table.rows),
        "tables: settings": "\n".join(_settings(runs, benchmark) for benchmark in PAPER_BENCHMARKS),
        "tables: so far": _joined(table for table in unfinished if table is not None),
        "table: diverged": _joined(table for table in [diverged_table(runs)] if table.rows),
        "table: baselines": baseline_table(runs).to_markdown(),
        "table: differences": differences(table_pairs(runs), "The DHP Softmax as in the paper").to_markdown(),
        "table: rung claims": _to_the_left(rung_claims_table(runs)),
        "table: claims": _to_the_left(claims_table(runs)),
        "table: sensitivity": sensitivity_table(runs).to_markdown(),
        "tables: study": _joined(study_table(runs, benchmark) for benchmark in studies),
        "table: steady differences": steady.to_markdown(),
        "table: worst": worst_table(runs).to_markdown(),
        "tables: control": _joined(control_table(runs, benchmark) for benchmark in studies),
        "table: data": data_table(runs).to_markdown(),
        "table: times": times_table(runs).to_markdown(),
    }


def as_registered(folder: Path) -> Runs:
    """Rung 4 on Split MNIST after three rounds, before the amendment of docs/reproduction/registration.md."""
    return {("split-mnist", "rung-4"): read_run(folder / "split-mnist" / "rung-4-registered")}


def _heads(runs: Runs) -> list[Table]:
    return [heads_table(runs, heads, title) for title, heads in (("Candidates", CANDIDATES), ("Others", OTHERS))]


def _joined(tables: Iterable[Table]) -> str:
    return "\n".join(table.to_markdown() for table in tables)


def _settings(runs: Runs, benchmark: str) -> str:
    """What was tried on a benchmark, under a heading; nothing if nothing was. Of rung 4 only what was chosen."""
    tables = [settings_table(runs, benchmark, rung) for rung in SEARCHED]
    *_, searched = tables
    title = "Rung 4: the best settings on validation samples"
    tables[-1] = Table(title, searched.columns[:-1], [row[:-1] for row in searched.rows])
    tables += [rates_table(runs)] if benchmark == BENCHMARK else []
    tables = [made for made in tables if made.rows]
    return "\n".join([f"## {title_of(benchmark)}\n", *map(_to_the_left, tables)]) if tables else ""


def _to_the_left(table: Table) -> str:
    """A table of words, which read badly when aligned to the right."""
    return table.to_markdown().replace("---:", "---")


def _missing(sentences: list[str]) -> str:
    """What a complete reproduction has besides; parts that were not run are named in one line for each benchmark."""
    names = {title: part for part, title in PARTS.items()}
    others, not_run = [], {}
    for sentence in sentences:
        benchmark, _, rest = sentence.partition(": ")
        part = names.get(rest.removesuffix(" was not run"))
        if part is None:
            others.append(f"- {sentence}")
        else:
            not_run.setdefault(benchmark, []).append(f"`{part}`")
    lines = [f"- {title_of(benchmark)}: {', '.join(parts)}" for benchmark, parts in not_run.items()]
    parts = ["Parts of a complete reproduction that were not run:", "", *lines] if lines else []
    return "\n".join([*parts, *others]) or "Nothing is missing from a complete reproduction."


def in_the_dark(image: bytes) -> bytes:
    """A figure for dark pages: light on dark, in the same hues, as docs/site.css turns those of the site.

    A colour v becomes 1 − v, which turns its hue by half a circle; the reflection at the grey of the same mean turns it
    back.
    """
    import numpy as np
    from matplotlib.image import imread, imsave

    inverted = 1 - imread(io.BytesIO(image))[..., :3]
    mean = inverted.mean(axis=-1, keepdims=True)
    dark = DARKEST + (1 - DARKEST) * np.clip(2 * mean - inverted, 0, 1)
    kept = io.BytesIO()
    imsave(kept, dark, format="png", metadata={"Software": None})
    return kept.getvalue()


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
    runs = read_reproduction(ROOT / "results").runs
    for name in ("accuracy", "dynamics"):
        image = draw_one(runs["split-mnist", "table"].results, name).to_bytes("png")
        (IMAGES / f"split-mnist-{name}.png").write_bytes(image)
    # The ladder against the matched head is in the report alone.
    drawn = {drawing.name: drawing for drawing in draw_overview(runs)}
    names = {"ladder-linear": "ladder", "map": "map", "differences": "differences", "variant-differences": "steady"}
    for name, short in names.items():
        (IMAGES / f"reproduction-{short}.png").write_bytes(drawn[name].to_bytes("png"))
    dark = in_the_dark(drawn["ladder-linear"].to_bytes("png"))
    (IMAGES / "reproduction-ladder-dark.png").write_bytes(dark)


if __name__ == "__main__":
    main()
