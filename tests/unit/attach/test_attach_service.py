"""Requests that wait for a place before an attached server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo.attach.describe import ServerUnreachable
from dynamo.attach.profiles import PROFILES
from dynamo.attach.service import AttachService, RelayedRequest
from dynamo.attach.worker import ServerMonitor
from dynamo.errors import CannotConnect, Disconnected, DynamoError
from dynamo.observability.metrics import Registry
from dynamo.runtime.requests.admission import AdmissionQueue


class Pool:
    """Remembers what is sent to the server."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, sink: RelayedRequest) -> Any:
        self.sent.append(message)


class Stream:
    """The stream of a frontend; a connection that breaks closes it."""

    def __init__(self) -> None:
        self.closed = False
        self.context = self
        self.ended = 0
        self.errors: list[DynamoError] = []

    def on_cancel(self, callback: Callable[..., None]) -> None:
        """The connection breaks without a word."""

    def off_cancel(self, callback: Callable[..., None]) -> None:
        """Forget it."""

    def end(self) -> None:
        self.ended += 1

    def error(self, error: DynamoError) -> None:
        self.errors.append(error)


def test_a_queued_request_whose_stream_has_closed_gives_its_place_to_the_next() -> None:
    pool, admission = Pool(), AdmissionQueue(1, 4, Registry())
    service = AttachService(cast(Any, pool), admission, cast(Any, None), lambda: None)
    requests = []
    for message in (b"first", b"closed", b"next"):
        stream = Stream()
        requests.append((stream, RelayedRequest(service, cast(Any, stream), message)))
        requests[-1][1].submit()
    assert pool.sent == [b"first"] and admission.waiting == 2
    requests[1][0].closed = True
    requests[0][1].on_end()
    assert pool.sent == [b"first", b"next"]
    requests[2][1].on_end()
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize(("error", "calls"), [(CannotConnect("no"), 1), (Disconnected("cut"), 0)])
def test_a_server_that_cannot_be_reached_is_polled_at_once(error: DynamoError, calls: int) -> None:
    called: list[bool] = []
    admission = AdmissionQueue(1, 4, Registry())
    service = AttachService(
        cast(Any, Pool()), admission, cast(Any, None), lambda: called.append(True)
    )
    stream = Stream()
    request = RelayedRequest(service, cast(Any, stream), b"")
    request.submit()
    request.on_failure(error)
    assert stream.errors == [error] and len(called) == calls and admission.running == 0


async def test_one_slow_answer_is_not_the_end_of_a_server() -> None:
    """A busy server is slow, too: it is down the second time in a row."""
    answers = [False, True, False, True, True]
    seen: list[str] = []

    class Slow:
        target = SimpleNamespace(url="http://x")

        async def get(self, path: str) -> tuple[int, bytes]:
            if answers.pop(0):
                raise ServerUnreachable("no answer within 4 s", slow=True)
            return 200, b""

    async def server_down() -> None:
        seen.append("down")

    listener = SimpleNamespace(server_load=seen.append, server_down=server_down)
    description = SimpleNamespace(profile=PROFILES["openai"])
    parts: Any = (Slow(), description, listener, 1.0, "openai")
    monitor = ServerMonitor(*parts)
    up = []
    for _ in range(5):
        await monitor._poll()
        up.append(monitor.is_up)
    assert up == [True, True, True, True, False] and seen == [[], [], "down"]
