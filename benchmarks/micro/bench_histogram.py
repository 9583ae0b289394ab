"""Compare the compiled histogram with its reference implementation, per observation.

python benchmarks/micro/bench_histogram.py
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from oracle.histogram import Histogram as Reference

from dynamo._fast.histogram import Histogram

CALLS = 50_000
TTFT = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100)


def main() -> None:
    """One row each."""
    for kind in (Histogram, Reference):
        observe = kind(TTFT).observe
        given = {"observe": observe}
        best = min(timeit.repeat("observe(0.031)", globals=given, number=CALLS, repeat=9))
        sys.stdout.write(f"{kind.__module__:28}{best / CALLS * 1e9:8.0f} ns\n")


if __name__ == "__main__":
    main()
