"""The collector of a serving process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from dynamo.runtime.process.os_process import freeze_heap
kept = [[] for _ in range(100_000)]
freeze_heap()
assert gc.get_freeze_count() > 100_000
assert gc.get_threshold()[0] >= 10_000 and gc.isenabled()
loop = []
loop.append(loop)
del loop
assert gc.collect() >= 1, "what comes later is still collected"
assert not gc.is_tracked(0) and len(gc.get_objects()) < 50_000
"""


def test_freeze_heap() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=30)
