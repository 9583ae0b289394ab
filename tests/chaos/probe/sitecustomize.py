"""What a soak counts inside each process: asyncio tasks and allocated blocks of memory.

Python imports this module at the start of every process that has the directory in PYTHONPATH. A
thread of its own writes ``<pid>`` in DYN_TEST_PROBE every few seconds, and the numbers of objects
by type to ``<pid>.types`` when a file ``<pid>.ask`` appears.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PERIOD_S = 5.0


def _count_tasks() -> int:
    module = sys.modules.get("asyncio.tasks")
    for name in ("_all_tasks", "_scheduled_tasks"):
        for _ in range(20):
            with suppress(RuntimeError):  # the loop changed the set
                return sum(not task.done() for task in list(getattr(module, name, ())))
    return 0


def _write_types(path: Path) -> None:
    import gc
    from collections import Counter

    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    path.write_text("".join(f"{count} {name}\n" for name, count in found.most_common()))


def _probe(directory: Path) -> None:
    while True:
        path = directory / f"{os.getpid()}"
        with suppress(OSError):
            path.write_text(f"{_count_tasks()} {sys.getallocatedblocks()}")
            ask = path.with_suffix(".ask")
            if ask.exists():
                ask.unlink()
                _write_types(path.with_suffix(".types"))
        time.sleep(PERIOD_S)


def _start() -> None:
    directory = Path(os.environ["DYN_TEST_PROBE"])
    threading.Thread(target=_probe, args=(directory,), name="probe", daemon=True).start()


if "DYN_TEST_PROBE" in os.environ:
    _start()
    os.register_at_fork(after_in_child=_start)  # the arbiter is a fork of the guard
