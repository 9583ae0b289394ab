"""Compare the compiled frame splitter with its reference implementation, per frame.

python benchmarks/micro/bench_frames.py
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from oracle import frames as reference

from dynamo._fast.frames import Splitter, pack
from dynamo.runtime.requests.frames import DATA, LAST_KIND

LIMIT_BYTES = 32 * 1024 * 1024
ITEM = bytes(48)
CALLS = 20_000


def main() -> None:
    """One table."""
    sys.stdout.write(f"{'case':34}{'compiled ns':>14}{'reference ns':>12}\n")
    _row("pack", 1, lambda: pack(DATA, 7, ITEM), lambda: reference.pack(DATA, 7, ITEM))
    for count in (1, 8, 64):
        data = pack(DATA, 7, ITEM) * count
        splitter = Splitter(LIMIT_BYTES, b"", LAST_KIND)

        def compiled(splitter: Splitter = splitter, data: bytes = data) -> object:
            return splitter.feed(data)

        def readable(data: bytes = data) -> object:
            return reference.split(data, LIMIT_BYTES, b"", LAST_KIND)

        _row(f"split, {count} frames a read", count, compiled, readable)


def _row(
    name: str, frames: int, compiled: Callable[[], object], readable: Callable[[], object]
) -> None:
    calls = CALLS // frames
    cells = [
        min(timeit.repeat(work, number=calls, repeat=7)) / calls / frames * 1e9
        for work in (compiled, readable)
    ]
    sys.stdout.write(f"{name:34}{cells[0]:14.0f}{cells[1]:12.0f}\n")


if __name__ == "__main__":
    main()
