"""W3C trace context: checked, continued by the frontend, passed to the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_request import Site, ids

from dynamo.errors import Cancelled, EngineFailure
from dynamo.observability.tracing import trace_context
from dynamo.runtime.distributed.component import traced
from dynamo.runtime.requests.stream import REQUEST_ID

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Span:
    """A span that records its calls."""

    recording = True

    def __init__(self, name: str, headers: Mapping[str, str], begun_s: float) -> None:
        self.name, self.parent, self.begun_s = name, headers.get("traceparent"), begun_s
        self.headers = {"traceparent": f"00-{'ab' * 16}-{'ef' * 8}-01"}
        self.steps: list[tuple[str, float, float]] = []
        self.ended: list[tuple[Mapping[str, Any], str]] = []

    def child(self, name: str, begun_s: float, ended_s: float) -> None:
        self.steps.append((name, begun_s, ended_s))

    def end(self, ended_s: float, attributes: Mapping[str, Any], error: str = "") -> None:
        self.ended.append((attributes, error))


class Recording:
    """A tracer whose spans stay here."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start(self, name: str, headers: Mapping[str, str], begun_s: float) -> Span:
        self.spans.append(Span(name, headers, begun_s))
        return self.spans[-1]

    async def close(self) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        (
            {"traceparent": PARENT, "tracestate": "a=b"},
            {"traceparent": PARENT, "tracestate": "a=b"},
        ),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
        ({"tracestate": "a=b"}, {}),
        ({"traceparent": "nonsense"}, {}),
        ({"traceparent": PARENT.upper()}, {}),
        ({"traceparent": f"00-{'0' * 32}-{'cd' * 8}-01"}, {}),
        ({"traceparent": f"ff-{'ab' * 16}-{'cd' * 8}-01"}, {}),
        ({"traceparent": f"01-{'ab' * 16}-{'cd' * 8}-01-{'x' * 600}"}, {}),
    ],
)
def test_valid_context(headers: dict[str, str], expected: dict[str, str]) -> None:
    assert trace_context(headers) == expected


class Traced(Site):
    """A site that shows the headers that its worker gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, str]] = []

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        self.sent.append(headers)
        return super().open(worker_id, payload, sink, headers)


async def test_without_a_tracer_the_context_of_the_client_is_passed_on() -> None:
    site = Traced()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    site.post(body, traceparent=PARENT, tracestate="a=b")
    site.streams[0].sink.on_end()
    site.chat()
    first, second = site.sent
    assert (first["traceparent"], first["tracestate"]) == (PARENT, "a=b")
    assert list(second) == [REQUEST_ID]


async def test_the_span_of_a_request_has_its_stages() -> None:
    site, tracing = Traced(), Recording()
    site.active.tracing = cast(Any, tracing)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    site.post(body, traceparent=PARENT)
    (span,) = tracing.spans
    assert span.parent == PARENT and site.sent[0]["traceparent"] == span.headers["traceparent"]
    site.streams[0].say(ids(site, "a"), finish_reason="stop")
    site.streams[0].sink.on_end()
    assert [name for name, _, _ in span.steps] == ["prepare", "queue", "prefill", "decode"]
    ((attributes, error),) = span.ended
    assert (attributes["dynamo.worker"], attributes["dynamo.overlap_blocks"], error) == ("7", 2, "")
    site.chat()
    site.streams[1].sink.on_error(EngineFailure("cuda"))
    assert tracing.spans[1].ended[0][1] == "internal"
    site.settled()


@pytest.mark.parametrize(
    ("error", "text"),
    [(None, ""), (Cancelled(), ""), (EngineFailure("cuda"), "engine_failure: cuda")],
)
def test_the_span_of_a_handler(error: Any, text: str) -> None:
    tracing = Recording()
    handled: list[Any] = []
    handler = traced(lambda stream, payload: handled.append(stream), cast(Any, tracing))
    plain: Any = SimpleNamespace(headers={REQUEST_ID: "1"}, endpoint="n/c/e", on_finished=None)
    handler(plain, b"")
    assert not tracing.spans and plain.on_finished is None
    stream: Any = SimpleNamespace(
        headers={REQUEST_ID: "1", "traceparent": PARENT}, endpoint="n/c/e", on_finished=None
    )
    handler(stream, b"")
    assert handled == [plain, stream]
    (span,) = tracing.spans
    assert span.parent == PARENT and stream.headers["traceparent"] != PARENT
    stream.on_finished(error)
    assert span.ended == [({"dynamo.endpoint": "n/c/e", "dynamo.request_id": "1"}, text)]
