"""The recent requests of the other frontends of a deployment, for the page that one of them serves.

They are read over HTTP (``/v1/requests``): each frontend keeps those that it has served itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import quote

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import StatefileError
from dynamo.protocols.status import RecentList, RequestRecord
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.frontends import KnownFrontend, frontends_in
from dynamo.serve.state.statefile import Statefile
from dynamo.status.reading import get

_PATH = "/v1/requests"
_decode = msgspec.json.Decoder(RecentList).decode
_decode_one = msgspec.json.Decoder(RequestRecord).decode


class PeerRequests:
    """Asks the frontends of the namespace of ``runtime``, without this process. Blocks.

    Without a deployment there are none.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._statefile = Statefile(state_path(runtime), runtime.namespace)
        self._cursors: dict[str, float] = {}

    def all(self, limit: int) -> RecentList:
        """Return the newest ``limit`` requests of each."""
        return merged([self._ask(one, 0.0, limit) for one in self._peers()], limit)

    def begin(self, cursor: float) -> None:
        """Let :meth:`newer` begin at ``cursor``."""
        self._cursors = {one.entry.name: cursor for one in self._peers()}

    def newer(self, limit: int) -> RecentList:
        """Return the newest ``limit`` requests since the last call."""
        found = []
        for one in self._peers():
            answer = self._ask(one, self._cursors.get(one.entry.name, 0.0), limit)
            self._cursors[one.entry.name] = answer.cursor
            found.append(answer)
        return merged(found, limit)

    def find(self, request_id: str) -> RequestRecord | None:
        """Return one request with its route; None if no frontend has it."""
        for one in self._peers():
            try:
                status, body = get(one, None, f"{_PATH}/{quote(request_id, safe='')}")
                if status == 200:
                    return _decode_one(body)
            except (OSError, ValueError, msgspec.MsgspecError):
                continue
        return None

    def _ask(self, frontend: KnownFrontend, cursor: float, limit: int) -> RecentList:
        try:
            status, body = get(frontend, None, f"{_PATH}?limit={limit}&after={cursor!r}")
            if status == 200:
                return _decode(body)
            # Its operator's key is not ours to send: the one of the page is not kept here.
            problem = "needs a key" if status in (401, 403) else f"answered {status}"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            problem = str(error)
        text = f"the requests of {frontend.entry.name} are missing: {problem}"
        return RecentList(requests=(), cursor=cursor, problems=(text,))

    def _peers(self) -> Iterator[KnownFrontend]:
        try:
            document = self._statefile.read()
        except StatefileError:  # the sample of the page says so
            return
        if document is not None:
            yield from (one for one in frontends_in(document) if os.getpid() not in one.entry.pids)


def merged(lists: list[RecentList], limit: int) -> RecentList:
    """Return the newest ``limit`` requests of all, the last one that ended first."""
    found = [one for each in lists for one in each.requests]
    found.sort(key=lambda one: one.received_at_s + one.duration_s, reverse=True)
    return RecentList(
        requests=tuple(found[:limit]),
        left_out=sum(one.left_out for one in lists) + len(found[limit:]),
        problems=tuple(problem for one in lists for problem in one.problems),
    )
