"""Draw the time of Table I, from records of `columns.py`: now, before, and in a plain loop.

python benchmarks/draw.py benchmarks/records/2026-11-15-nvidia-h200/columns.json
python benchmarks/draw.py NOW/record.json MORE/record.json --before EARLIER/record.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speed import PLAIN

from engram.common.errors import InputError
from engram.common.files import write_atomically
from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import title_of
from engram.report.figures.drawing import COLOURS, INK, SMALL, WIDTH, Cell, Drawing, legend_below, new_figure, tidy
from engram.report.layout import Table

IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "table-one.png"
TABLE = "Table I"
HEIGHT = 0.26  # of a bar, in units of the distance of two columns of the table
Times = dict[str, float]  # seconds, by the name of a column of the table


def times_of(record: Mapping[str, Any]) -> Times:
    """The first round of each command, with nothing compiled, and the parts of one that makes all of Table I."""
    times: Times = {}
    for column in record["columns"]:
        if not column["rounds"]:
            continue
        first = column["rounds"][0]
        before = 0.0
        for part, until in first["parts"].items():
            times.setdefault(part, until - before)
            before = until
        times[column["name"]] = first["seconds"]
    return times


def plain_times_of(record: Mapping[str, Any]) -> Times:
    """What the steps alone would take in a plain loop, one model after another: their number times their time."""
    times: Times = {}
    for column in record["columns"]:
        each = {one["benchmark"]: _plain_seconds(one) for one in column["steps"] if PLAIN in one["rounds_ms"]}
        times |= each
        if column["name"] == TABLE and each and len(each) == len(column["steps"]):
            times[TABLE] = sum(each.values())
    if TABLE not in times and set(PAPER_BENCHMARKS) <= set(times):
        times[TABLE] = sum(times[name] for name in PAPER_BENCHMARKS)
    return times


def _plain_seconds(steps: Mapping[str, Any]) -> float:
    rounds = steps["rounds_ms"][PLAIN]
    ms = rounds[0] if len(rounds) == 1 else statistics.quantiles(rounds, n=4, method="inclusive")[0]
    return steps["steps"] * steps["models"] * ms / 1e3


def drawing_of(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Drawing:
    """Bars on a logarithmic axis: hours in a plain loop stand beside seconds.

    Args:
        now: a record of `columns.py`.
        before: an earlier one, of the same hardware.

    Example:
        >>> drawing_of(json.loads(Path("record.json").read_text())).to_bytes("png")
    """
    kinds = {f"Engram, {now['date']}": times_of(now)}
    if before is not None:
        kinds[f"before, {before['date']}"] = times_of(before)
    kinds["plain loop, steps alone"] = {**plain_times_of(before or {"columns": []}), **plain_times_of(now)}
    names = list(dict.fromkeys(name for times in list(kinds.values())[:-1] for name in times))
    names.sort(key=lambda name: name == TABLE)  # the sum last
    looks: list[dict[str, Any]] = [{"color": COLOURS["si"]}, {"color": COLOURS["si"], "alpha": 0.45}][: len(kinds) - 1]
    looks.append({"facecolor": "none", "edgecolor": INK, "linewidth": 0.8})  # what Engram did is filled
    figure = new_figure(WIDTH, 0.9 + 0.22 * len(names) * len(kinds))
    axes = figure.subplots()
    longest = max(seconds for times in kinds.values() for seconds in times.values())
    handles: list[Any] = []
    rows: list[tuple[Cell, ...]] = []
    for k, ((kind, times), look) in enumerate(zip(kinds.items(), looks, strict=True)):
        known = [(place, name) for place, name in enumerate(names) if name in times]
        places = [place + (k - (len(kinds) - 1) / 2) * HEIGHT for place, _ in known]
        bars = axes.barh(places, [times[name] for _, name in known], 0.85 * HEIGHT, label=kind, **look)
        handles.append(bars)
        for place, (_, name) in zip(places, known, strict=True):
            axes.annotate(
                in_words(times[name]),
                (times[name], place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=SMALL,
            )
            rows.append((name, kind, times[name]))
    axes.set(xscale="log", xlim=(1, 10 ** math.ceil(math.log10(3 * longest))))
    axes.set_yticks(range(len(names)), [name if name == TABLE else title_of(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    tidy(axes, "seconds from the command to the table")
    legend_below(figure, handles)
    readable = [(f"{name}: {kind}", f"{seconds:,.1f}") for name, kind, seconds in rows]
    caption = f"80 models each on {now['hardware']}; a plain loop without penalties, importances and evaluation."
    numbers = Table("Time of Table I", ("column", "seconds"), readable)
    return Drawing("table-one", "Time of Table I", caption, figure, ("column", "kind", "seconds"), rows, numbers)


def in_words(seconds: float) -> str:
    """As a person would say it: 16 s, 14 min, 4.3 h."""
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="draw.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path, nargs="+", help="record.json of columns.py; of several, all columns")
    parser.add_argument("--before", type=Path, help="an earlier one, of the same hardware")
    parser.add_argument("--out", type=Path, default=IMAGE, help="the picture: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    try:
        now, *further = (json.loads(path.read_text(encoding="utf-8")) for path in options.record)
        before = json.loads(options.before.read_text(encoding="utf-8")) if options.before else None
        for record in further:
            now["columns"] += record["columns"]
        drawing = drawing_of(now, before)
        write_atomically(options.out, drawing.to_bytes(options.out.suffix.removeprefix(".")))
    except OSError as reason:
        parser.error(f"cannot read or write {reason.filename}: {reason.strerror}")
    except (KeyError, ValueError, InputError) as reason:
        parser.error(f"cannot draw this: {reason}")
    print(drawing.numbers.to_markdown())
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
