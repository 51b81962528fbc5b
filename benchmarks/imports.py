"""What the first `DHPSoftmax` of a process costs, over `import torch`: fresh processes that take turns.

python benchmarks/imports.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from arguments import whole_number

PROGRAMS = {
    "import torch": "import torch",
    "import torch, import engram, a first DHPSoftmax": "import torch, engram; engram.DHPSoftmax(400, 10)",
}
TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"


def seconds_of(program: str) -> float:
    """The time that a program takes in a fresh process, without that of starting Python."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(program)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="imports.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=whole_number, default=15, help="how often each program is started")
    rounds = parser.parse_args(arguments).rounds
    for program in PROGRAMS.values():  # files are read once before
        seconds_of(program)
    taken = [[seconds_of(program) for program in PROGRAMS.values()] for _ in range(rounds)]
    for name, times in zip(PROGRAMS, zip(*taken, strict=True), strict=True):
        print(f"{name}: {statistics.median(times):.3f} s (median of {rounds})")
    more = [second - first for first, second in taken]
    print(f"difference: {statistics.median(more):.3f} s (median; {min(more):.3f} to {max(more):.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
