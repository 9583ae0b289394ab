"""Recorded content: what is replaced in it, what of a response is kept, and its bounds."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.frontend.requests import content
from dynamo.frontend.requests.content import (
    MIB,
    ContentCopy,
    ContentRecording,
    HeldBytes,
    response_body,
)


def test_the_body_of_a_response_with_any_framing() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert response_body(head + b"3\r\na\r\n\r\n2\r\nbc\r\n0\r\n\r\n") == b"a\r\nbc"
    assert response_body(head + b"A\r\nabc") == b"abc"
    assert response_body(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc") == b"abc"
    assert response_body(b"") == b""


def test_the_body_of_a_response_whose_head_was_sent_before() -> None:
    """As by the progress of a load."""
    assert response_body(b"3\r\na\r\n\r\n2\r\nbc\r\n0\r\n\r\n") == b"a\r\nbc"
    assert response_body(b"data: {}\n\n") == b"data: {}\n\n"


def test_a_long_response_is_cut() -> None:
    held = HeldBytes()
    copy = ContentCopy(b"x", held)
    for _ in range(3):
        copy.add(b"x" * (content.BODY_BYTES // 2))
    copy.add(b"y")
    assert copy.cut and copy.size_bytes == content.BODY_BYTES
    assert held.count == content.BODY_BYTES + 1
    del copy
    assert held.count == 0


def test_the_responses_of_running_requests_are_bounded_together() -> None:
    held = HeldBytes()
    copies = [ContentCopy(b"x", held) for _ in range(300)]
    for copy in copies:
        copy.add(b"x" * content.BODY_BYTES)
    assert held.count <= 64 * MIB + content.BODY_BYTES + 300
    assert copies[0].response and not copies[0].cut
    assert copies[-1].cut and not copies[-1].response


class Client:
    """The connection of the operator."""

    def __init__(self) -> None:
        self.above_high_water = False
        self.lines: list[Any] = []

    def write(self, data: bytes) -> None:
        self.lines.append(json.loads(data))


class Asked:
    """A request; its response is copied if it is recorded."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.path = "/v1/completions"
        self.received_at = time.monotonic()
        self.copied: ContentCopy | None = None

    def copy_to(self, owner: ContentCopy, copy: Any) -> None:
        self.copied = owner


def end(recording: ContentRecording, asked: Asked, request_id: str, model: str = "tiny") -> None:
    ended: Any = SimpleNamespace(
        exchange=asked,
        model=SimpleNamespace(name=model),
        info=SimpleNamespace(request_id=request_id),
        metrics=SimpleNamespace(ended_s=time.monotonic(), outcome="ok"),
    )
    recording.ended(ended)


def begun(recording: ContentRecording, size_bytes: int) -> Asked:
    asked: Any = Asked(b"x" * size_bytes)
    recording.begin(asked)
    found: Asked = asked
    return found


async def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Client()
    recording = ContentRecording(client, "tiny", 2 * MIB, time.monotonic() + 60)
    early = Asked(b"early")
    early.received_at -= 10
    end(recording, early, "early")
    end(recording, begun(recording, content.BODY_BYTES + 1), "large")
    assert recording.lost == 1
    running = [begun(recording, content.BODY_BYTES) for _ in range(200)]
    kept = [one for one in running if one.copied is not None]
    assert len(kept) * content.BODY_BYTES == 64 * MIB + content.BODY_BYTES
    del running, kept  # as requests that end: nothing else refers to the copies
    monkeypatch.setattr(content, "_SHOWN_BYTES", 1_200_000)
    for number in range(4):
        end(recording, begun(recording, 500_000), f"r{number}")
    end(recording, begun(recording, 10), "foreign", model="other")
    client.above_high_water = True
    sending = asyncio.ensure_future(recording.send())
    for _ in range(60_000):  # a thread cleans each record
        if recording.lost == 5:
            break
        await asyncio.sleep(0.001)
    assert recording.lost == 5
    client.above_high_water = False
    dropped = [recording.find(f"r{number}") is None for number in range(4)]
    assert dropped == [True, True, False, False]
    for number in range(9):
        end(recording, begun(recording, 500_000), f"s{number}")
    assert await sending == "2 MiB are recorded"
    assert [one["request_id"] for one in client.lines] == ["s0", "s1", "s2", "s3"]
    assert recording.recorded == 4


async def test_the_time_is_bounded() -> None:
    client: Any = Client()
    recording = ContentRecording(client, None, MIB, time.monotonic() + 0.05)
    assert await recording.send() == "its time is over"
    await asyncio.sleep(0.02)  # the loop's clock may be a millisecond ahead
    for number in range(3):  # requests that end all the time do not prolong it
        end(recording, begun(recording, 10), f"r{number}")
    assert await recording.send() == "its time is over"
    assert client.lines == []
