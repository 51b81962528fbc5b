"""Draw the picture of the README: what is left of the first task while others are learned.

engram run permuted-mnist --dataset mnist-small --tasks 10 --epochs 5 --trials 3 --strength 1 \
    --methods finetune,si,scaled+si,joint --set max_samples=2000 --set batch_size=20 \
    --set learning_rate=0.1 --set baseline_head=linear --out runs/forgetting
python tools/draw_forgetting.py runs/forgetting
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from engram.common.files import write_atomically
from engram.report.figures.drawing import COLOURS, INK, MEDIUM, Look, band, estimates_of, new_figure, tidy
from engram.runs.run import read_run

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "forgetting.png"
WIDTH, HEIGHT = 4.8, 2.8
LINES = {
    "joint": ("all samples kept", Look(INK, ":")),
    "scaled+si": ("SI, scaled head", Look(COLOURS["online-ewc"], "-")),
    "si": ("SI", Look(COLOURS["si"], "-")),
    "finetune": ("finetuning", Look(INK, "-")),
}


def draw(run: Path) -> bytes:
    """The picture as a PNG: a line for each method, with its name at the end."""
    results = read_run(run).results
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    for method, (words, look) in LINES.items():
        estimates = estimates_of(results[method].first_task)
        tasks = [float(task) for task in range(1, len(estimates) + 1)]
        band(axes, tasks, estimates, look, words)
        end = 100 * estimates[-1].mean
        axes.text(tasks[-1] + 0.3, end, f"{words}: {end:.0f}%", va="center", fontsize=MEDIUM, color=look.colour)
    axes.set_xticks(range(1, len(tasks) + 1))
    axes.set_xlim(0.8, len(tasks) + 5.8)
    tidy(axes, "tasks learned", "accuracy on the first task, %")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=200)
    return image.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run")
    write_atomically(IMAGE, draw(parser.parse_args().run))


if __name__ == "__main__":
    main()
