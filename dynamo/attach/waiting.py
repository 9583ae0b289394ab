"""Waiting for a server's first answer, with progress in the log."""

from __future__ import annotations

import asyncio
import logging

from dynamo.attach.describe import ServerDescription, ServerLoading, describe
from dynamo.attach.launch import LaunchedServer, ServerExited
from dynamo.attach.probe import ServerProbe, ServerUnreachable
from dynamo.worker.lifecycle import WorkerLifecycle

__all__ = ["wait_until_ready"]

_INTERVAL_S = 0.25
_PROGRESS_S = 10.0
log = logging.getLogger(__name__)


async def wait_until_ready(
    probe: ServerProbe,
    profile_name: str,
    lifecycle: WorkerLifecycle,
    launched: LaunchedServer | None,
    timeout_s: float,
) -> ServerDescription | None:
    """Return what the server offers as soon as it is ready; None if the worker has to stop.

    A running server is waited for without limit, a ``launched`` one for ``timeout_s``. Raises
    ServerExited if it exits first or is too slow, ConfigError if it can never be used.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    phase, logged_s = "", started_s - _PROGRESS_S
    while True:
        try:
            found = await describe(probe, profile_name)
            # A signal that arrived just now finds no runtime to shut down.
            return None if lifecycle.stopping.is_set() else found
        except ServerUnreachable as error:
            now_phase = "loading" if isinstance(error, ServerLoading) else "not reachable"
            reason = str(error)
        if launched is not None and launched.exited.is_set():
            raise launched.cause()
        now_s = loop.time()
        if now_phase != phase or now_s - logged_s >= _PROGRESS_S:
            phase, logged_s = now_phase, now_s
            log.info(
                "waiting for %s: %s, %.0f s (%s)",
                probe.target.url,
                phase,
                now_s - started_s,
                reason,
            )
        if launched is not None and now_s - started_s > timeout_s:
            raise ServerExited(
                f"{probe.target.url} did not get ready within {timeout_s:g} s ({phase}: {reason}); "
                "raise --startup-timeout-secs if it only needs longer"
            )
        if not await lifecycle.wait(_INTERVAL_S):
            return None
