"""What all generation requests of a frontend share, and the two things done to all of them."""

from __future__ import annotations

import asyncio
import itertools
import time

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import DynamoError
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.requests.drain import Admission
from dynamo.frontend.requests.errors import BackendSilent
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.http import WriteBatch

__all__ = ["RequestRegistry"]

_MIB = 1024 * 1024


class RequestRegistry:
    """Make it on the running loop; :meth:`close` stops its timer."""

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        admission: Admission,
        write_batch: WriteBatch | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.admission = admission
        self.overload_status = settings.overload_status
        self.held_limit_bytes = settings.slow_client_limit_mb * _MIB
        self.off_loop = OffLoop()
        self.live: set[ActiveRequest] = set()
        self._engine_ids: set[str] = set()
        self._duplicates = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.write_batch = write_batch or WriteBatch()
        self._silence_s = settings.backend_stream_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        if self._silence_s is not None:
            self._sweep()
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        if settings.sse_keep_alive_ms is not None:
            self._keep_alive(settings.sse_keep_alive_ms / 1e3)

    def close(self) -> None:
        """Stop looking for silent engines and streams; drop large requests not begun."""
        self.off_loop.close()
        for timer in (self._timer, self._keep_alive_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._keep_alive_timer = None

    def claim_id(self, request_id: str) -> str:
        """An id for the engine that no other request has until :meth:`release_id`.

        ``request_id`` itself, or with a suffix while another request of that id runs: clients may
        use one twice at once, and engines refuse an id that they already serve.
        """
        if request_id in self._engine_ids:
            request_id = f"{request_id}.{next(self._duplicates)}"
        self._engine_ids.add(request_id)
        return request_id

    def release_id(self, engine_id: str) -> None:
        """The request that claimed this id is over. Unknown ids are ignored."""
        self._engine_ids.discard(engine_id)

    def fail_all(self, error: DynamoError) -> None:
        """End every request with ``error``: the time for draining is over."""
        for call in list(self.live):
            call.fail(error)

    def _sweep(self) -> None:
        assert self._silence_s is not None, "armed only with a timeout"
        limit_s = time.monotonic() - self._silence_s
        for call in [one for one in self.live if one.heard_at < limit_s]:
            call.fail(BackendSilent(f"the engine was silent for {self._silence_s:g} s"))
        self._timer = self._loop.call_later(min(1.0, self._silence_s / 4), self._sweep)

    def _keep_alive(self, interval_s: float) -> None:
        before = time.monotonic() - interval_s
        for call in [one for one in self.live if one.quiet_since < before]:
            call.keep_alive()
        self._keep_alive_timer = self._loop.call_later(interval_s, self._keep_alive, interval_s)
