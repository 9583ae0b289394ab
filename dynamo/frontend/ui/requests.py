"""The recent requests that the page shows: those of this frontend and of its deployment's others.

A page that opens the section asks for the whole list once, then gets what has ended since. The
other frontends are asked over HTTP (``/v1/requests``): each keeps those that it has served itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ModelNotFound, StatefileError
from dynamo.frontend.requests.recent import RecentRequests
from dynamo.frontend.ui.stream import Columns, columns
from dynamo.protocols.status import RecentList, RequestRecord
from dynamo.runtime.process.paths import state_path
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.state.frontends import KnownFrontend, frontends_in, local_key
from dynamo.serve.state.statefile import Statefile
from dynamo.status.reading import get

_MOST = 1000
_AT_ONCE = 100
"""Requests of one event: at 100 a second a page costs 4 ms of CPU and 14 kB in each of them."""
_OVERLAP_S = 2.0
_PATH = "/v1/requests"
_decode = msgspec.json.Decoder(RecentList).decode
_decode_one = msgspec.json.Decoder(RequestRecord).decode


class RequestTable(msgspec.Struct, frozen=True, kw_only=True):
    """What the page gets of a :class:`RecentList`."""

    requests: Columns
    left_out: int = 0
    problems: tuple[str, ...] = ()


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

    async def all(self) -> RequestTable:
        """Return the newest 1,000."""
        own = self._recent.after(0.0, _MOST)
        return _table([own, *await in_file_thread(self._peers.all, _MOST)], _MOST)

    async def read(self, first: bool) -> RequestTable | None:
        """Return what ended since the last call; None for nothing.

        The ``first`` time some seconds more, so that nothing is missing behind the whole list: the
        page identifies a request by its id.
        """
        if first:
            self._cursor = time.monotonic() - _OVERLAP_S
            await in_file_thread(self._peers.begin, self._cursor)
        own = self._recent.after(self._cursor, _AT_ONCE)
        self._cursor = own.cursor
        table = _table([own, *await in_file_thread(self._peers.newer, _AT_ONCE)], _AT_ONCE)
        return table if table.requests.count or table.problems else None

    async def find(self, request_id: str) -> RequestRecord:
        """Return one request with its route, also one that is running here. Raises ModelNotFound
        (404)."""
        try:
            return self._recent.find(request_id).explained()
        except ModelNotFound:
            record = self._running(request_id)
            record = record or await in_file_thread(self._peers.find, request_id)
            if record is None:
                raise
            return record


class PeerRequests:
    """Asks the frontends of the namespace of ``runtime``, without this process. Blocks.

    Without a deployment there are none.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._cursors: dict[str, float] = {}

    def all(self, limit: int) -> list[RecentList]:
        """Return the newest ``limit`` requests of each."""
        return [self._ask(peer, 0.0, limit) for peer in self._peers()]

    def begin(self, cursor: float) -> None:
        """Let :meth:`newer` begin at ``cursor``."""
        self._cursors = {peer.entry.name: cursor for peer in self._peers()}

    def newer(self, limit: int) -> list[RecentList]:
        """Return the newest ``limit`` requests of each since the last call."""
        lists = []
        for peer in self._peers():
            lists.append(self._ask(peer, self._cursors.get(peer.entry.name, 0.0), limit))
            self._cursors[peer.entry.name] = lists[-1].cursor
        return lists

    def find(self, request_id: str) -> RequestRecord | None:
        """Return one request with its route; None if no frontend has it."""
        for peer in self._peers():
            try:
                status, body = self._get(peer, f"{_PATH}/{quote(request_id, safe='')}")
                if status == 200:
                    return _decode_one(body)
            except (OSError, ValueError, msgspec.MsgspecError):
                continue
        return None

    def _ask(self, frontend: KnownFrontend, cursor: float, limit: int) -> RecentList:
        try:
            status, body = self._get(frontend, f"{_PATH}?limit={limit}&after={cursor!r}")
            if status == 200:
                return _decode(body)
            problem = "needs another key" if status in (401, 403) else f"answered {status}"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            problem = str(error)
        text = f"the requests of {frontend.entry.name} are missing: {problem}"
        return RecentList(requests=(), cursor=cursor, problems=(text,))

    def _get(self, frontend: KnownFrontend, path: str) -> tuple[int, bytes]:
        # The operator's key of the page is not ours to send.
        key = local_key(self._runtime) if frontend.listens.api_key_file else None
        return get(frontend, key, path)

    def _peers(self) -> Iterator[KnownFrontend]:
        try:
            document = self._statefile.read()
        except StatefileError:  # the sample of the page says so
            return
        if document is not None:
            yield from (
                peer for peer in frontends_in(document) if os.getpid() not in peer.entry.pids
            )


def _table(lists: list[RecentList], limit: int) -> RequestTable:
    """Return the newest ``limit`` requests of all, the last one that ended first."""
    records = [record for recent in lists for record in recent.requests]
    records.sort(key=lambda record: record.received_at_s + record.duration_s, reverse=True)
    return RequestTable(
        requests=columns(records[:limit]),
        left_out=sum(recent.left_out for recent in lists) + len(records[limit:]),
        problems=tuple(problem for recent in lists for problem in recent.problems),
    )
