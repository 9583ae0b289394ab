"""Requests that wait for a place before an attached server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from dynamo.attach.service import AttachService, RelayedRequest
from dynamo.observability.metrics import Registry
from dynamo.runtime.endpoints.admission import AdmissionQueue


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

    def on_cancel(self, callback: Callable[..., None]) -> None:
        """The connection breaks without a word."""

    def off_cancel(self, callback: Callable[..., None]) -> None:
        """Forget it."""

    def end(self) -> None:
        self.ended += 1


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
