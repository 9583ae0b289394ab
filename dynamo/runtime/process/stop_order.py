"""The order in which a deployment stops: workers serve until the frontends have finished.

``dynamo serve`` stops its processes in that order. A signal to the whole process tree also reaches
the workers directly; requests still in the frontend would then find no worker. So the arbiter
writes the stage that it stops into the run directory, and a worker waits for its stage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from dynamo.config import environ, from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.paths import run_dir, write_atomic

STOP_STAGE = "stop-stage"
"""File in the run directory: ``frontends`` or ``workers``, the stage that the arbiter stops."""

_FRONTENDS, _WORKERS = b"frontends", b"workers"
_NOTICE_S = 0.5  # until the arbiter has received its copy of the signal
_MASK = Mask.MOVED_TO | Mask.DELETE | Mask.ONLYDIR
log = logging.getLogger(__name__)


def is_supervised() -> bool:
    """Return whether ``dynamo serve`` started this process."""
    return "DYN_WATCHER_NAME" in environ()


def write_stop_stage(directory: Path, workers: bool) -> None:
    """Write the stage that the arbiter stops now into the run directory ``directory``."""
    try:
        write_atomic(directory / STOP_STAGE, _WORKERS if workers else _FRONTENDS)
    except OSError as error:
        log.warning("workers may stop before the frontends: %s: %s", directory, error)


async def wait_for_frontends(timeout_s: float) -> None:
    """Wait until a worker that received a stop signal may stop, at most ``timeout_s``.

    If the signal was for this worker alone, the arbiter writes no stage, and the wait ends after
    0.5 s.
    """
    try:
        path = run_dir(from_env(RuntimeSettings)) / STOP_STAGE
        changed = asyncio.Event()
        inotify = Inotify(changed.set)
    except ConfigError as error:
        log.warning("stopping without waiting for the frontends: %s", error.message)
        return
    clock = asyncio.get_running_loop().time
    notice_s, limit_s = clock() + _NOTICE_S, clock() + timeout_s
    try:
        inotify.add(path.parent, _MASK, lambda name, mask: changed.set())
        while (stage := _read(path)) != _WORKERS:
            # The deployment stops: wait longer, for our own stage. Looked at once more after the
            # notice: without inotify a change is seen after a second.
            end_s = limit_s if stage == _FRONTENDS else notice_s
            if clock() >= end_s:
                return
            changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end_s):
                    await changed.wait()
    except OSError as error:
        log.warning("stopping without waiting for the frontends: %s", error)
    finally:
        inotify.close()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
