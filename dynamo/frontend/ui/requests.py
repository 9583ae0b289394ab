"""The recent requests that the page shows: those of this frontend and of its deployment's others.

A page that opens the section asks for the whole list once, then gets what has ended since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dynamo.errors import ModelNotFound
from dynamo.frontend.requests.recent import RecentRequests
from dynamo.protocols.status import RecentList, RequestRecord
from dynamo.status.recent import PeerRequests, merged

_MOST = 1000
_AT_ONCE = 100
"""Requests of one event: at 100 a second a page costs 4 ms of CPU and 40 kB in each of them."""
_OVERLAP_S = 2.0


class RequestFeed:
    """The requests of ``recent``, the ring of this frontend, and of its ``peers``."""

    def __init__(
        self,
        recent: RecentRequests,
        running: Callable[[str], RequestRecord | None],
        peers: PeerRequests,
    ) -> None:
        self._recent = recent
        self._running = running
        self._peers = peers
        self._cursor = 0.0

    async def all(self) -> RecentList:
        """Return the newest 1,000."""
        own = self._recent.after(0.0, _MOST)
        return merged([own, await asyncio.to_thread(self._peers.all, _MOST)], _MOST)

    async def read(self, first: bool) -> RecentList | None:
        """Return what ended since the last call; None for nothing.

        The ``first`` time some seconds more, so that nothing is missing behind the whole list: the
        page identifies a request by its id.
        """
        if first:
            self._cursor = time.monotonic() - _OVERLAP_S
            await asyncio.to_thread(self._peers.begin, self._cursor)
        own = self._recent.after(self._cursor, _AT_ONCE)
        self._cursor = own.cursor
        found = merged([own, await asyncio.to_thread(self._peers.newer, _AT_ONCE)], _AT_ONCE)
        return found if found.requests or found.problems else None

    async def find(self, request_id: str) -> RequestRecord:
        """Return one request with its route, also one that is running here. Raises ModelNotFound
        (404)."""
        try:
            return self._recent.find(request_id).explained()
        except ModelNotFound:
            found = self._running(request_id)
            if found is None:
                found = await asyncio.to_thread(self._peers.find, request_id)
            if found is None:
                raise
            return found
