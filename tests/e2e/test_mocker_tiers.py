"""Mock workers with host memory, and their KV events in the format of vLLM, in real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from deployment import Deployment, free_port

from dynamo.llm.engine_events import EngineEvent, EngineRemoved, EngineStored, decode_events

TIMEOUT_MS = 60_000
FIRST = "a b c d e f g h i j k l m n o p"
OTHER = "q r s t u v w x y z 0 1 2 3 4 5"


class Engine:
    """What a program that reads the events of an engine receives."""

    def __init__(self, port: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._joined = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.subscribe(b"")
        self._socket.rcvtimeo = TIMEOUT_MS
        self.sequence: list[int] = []

    def join(self) -> None:
        """Wait until the engine sends to this program: earlier messages are lost."""
        assert self._joined.poll(TIMEOUT_MS)

    def receive(self) -> list[EngineEvent]:
        """Return the events of the next message."""
        topic, number, payload = self._socket.recv_multipart()
        assert topic == b""
        self.sequence.append(int.from_bytes(number, "big"))
        malformed: list[Exception] = []
        rank, events = decode_events(payload, malformed.append)
        assert rank == 0 and not malformed
        return events

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


@pytest.fixture
def engine(deployment: Deployment) -> Iterator[Engine]:
    """A deployment with a worker of six blocks, and as many as it likes in host memory."""
    port = free_port()
    made = Engine(port)
    small = ("--block-size", "4", "--num-gpu-blocks-override", "6", "--watermark", "0")
    deployment.frontend("--router-mode", "kv")
    deployment.mocker(
        *small, "--num-host-blocks", "100", "--zmq-kv-events-ports", str(port),
        "--speedup-ratio", "0", "--model-name", "tiny",
    )  # fmt: skip
    deployment.wait_for_workers(1)
    made.join()
    yield made
    made.close()


def ask(deployment: Deployment, prompt: str) -> tuple[int, dict[str, Any]]:
    """Return the cached tokens of an answer, and how it was routed."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    status, headers, answer = deployment.request(
        "POST", "/v1/completions", body, {"x-dynamo-route": "1"}
    )
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], json.loads(headers["x-dynamo-route"])


def test_evicted_blocks_return_from_host_memory(deployment: Deployment, engine: Engine) -> None:
    assert ask(deployment, FIRST)[0] == 0
    (stored,) = engine.receive()
    assert isinstance(stored, EngineStored) and stored.storage_tier == "device"
    assert len(stored.token_ids) == 4 * len(stored.block_hashes) >= 16
    ask(deployment, OTHER)
    events = engine.receive()
    offloaded, removed = events[:2]
    assert isinstance(offloaded, EngineStored) and isinstance(removed, EngineRemoved)
    assert offloaded.storage_tier == "host_pinned" and not offloaded.token_ids
    assert offloaded.block_hashes == removed.block_hashes
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while True:
        cached, route = ask(deployment, FIRST)
        assert cached == 16
        # Four blocks in host memory, by their weight, once the router has applied the events.
        if route["candidates"][0][2] == 3.0:
            break
        assert time.monotonic() < deadline, route
        ask(deployment, OTHER)
    assert engine.sequence == list(range(len(engine.sequence)))
