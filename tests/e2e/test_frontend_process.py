"""The frontend as a process: signals, drains, lost clients and workers."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, free_port, interrupt_again
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from dynamo.config.router import ROUTER_MODES

CHAT = "/v1/chat/completions"


def chat(max_tokens: int, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": max_tokens,
        "stream": stream,
    }


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Processes as users start them."""
    made = Deployment(tmp_path, forked=False)
    yield made
    made.close()


class Streaming:
    """A streamed chat that reads its events one by one."""

    def __init__(
        self, deployment: Deployment, max_tokens: int, headers: dict[str, str] | None = None
    ) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
        body = json.dumps(chat(max_tokens, True))
        given = {"content-type": "application/json", **(headers or {})}
        self.connection.request("POST", CHAT, body, given)
        self.answer = self.connection.getresponse()
        self.sock = self.connection.sock

    def event(self) -> Any:
        """The next event; None at the end of the response."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                return data.decode() if data == b"[DONE]" else json.loads(data)
        return None

    def rest(self) -> list[Any]:
        return list(iter(self.event, None))

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


@pytest.fixture
def started(deployment: Deployment) -> Iterator[Deployment]:
    """One mocker at normal speed (5-10 ms per token) and a frontend."""
    deployment.worker = deployment.mocker("--block-size", "16")  # type: ignore[attr-defined]
    deployment.front = deployment.frontend("--router-mode", "kv")  # type: ignore[attr-defined]
    deployment.wait_for_workers()
    yield deployment


def test_a_port_in_use_is_a_clear_error(deployment: Deployment) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", deployment.port))
        taken.listen()
        process = deployment.frontend()
        assert process.wait(20) == 1
    deployment.processes.remove(process)
    assert f"can't listen on 127.0.0.1:{deployment.port} (Address already in use)" in (
        deployment.tail()
    )


def test_sigterm_drains(started: Deployment) -> None:
    stream = Streaming(started, 100)
    assert stream.event() is not None
    health = http.client.HTTPConnection("127.0.0.1", started.port, timeout=10)
    health.request("GET", "/live")
    assert health.getresponse().read()
    started.front.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while started.request("GET", "/health")[0] != 503:
        assert time.monotonic() < deadline
    assert json.loads(started.request("GET", "/health")[2])["status"] == "draining"
    assert started.request("GET", "/live")[0] == 200
    status, headers, body = started.request("POST", CHAT, chat(1))
    assert status == 503 and json.loads(body)["code"] == 503
    assert headers["connection"] == "close"
    health.request("GET", "/live")  # the idle connection still gets a response, and its end
    last = health.getresponse()
    assert (last.status, last.getheader("connection")) == (200, "close")
    last.read()
    events = stream.rest()
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    stream.close()
    health.close()
    assert started.front.wait(10) == 0  # type: ignore[attr-defined]


def test_the_drain_has_a_deadline(deployment: Deployment) -> None:
    deployment.mocker("--block-size", "16")
    front = deployment.frontend(DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.3")
    deployment.wait_for_workers()
    stream = Streaming(deployment, 4000)
    assert stream.event() is not None
    front.send_signal(signal.SIGINT)
    events = stream.rest()
    assert events[-2]["error"]["code"] == 503 and events[-1] == "[DONE]"
    stream.close()
    assert front.wait(10) == 0


def test_a_second_signal_does_not_wait(deployment: Deployment) -> None:
    deployment.mocker("--block-size", "16")
    front = deployment.frontend(DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="60")
    deployment.wait_for_workers()
    stream = Streaming(deployment, 8000)
    assert stream.event() is not None
    front.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while deployment.request("GET", "/health")[0] != 503:
        assert time.monotonic() < deadline
    interrupt_again(front)
    assert front.wait(10) == 0
    stream.close()


def test_any_number_of_sigterms_lets_streams_finish(deployment: Deployment) -> None:
    deployment.mocker("--block-size", "16")
    front = deployment.frontend()
    deployment.wait_for_workers()
    stream = Streaming(deployment, 300)
    assert stream.event() is not None
    for _ in range(3):
        front.send_signal(signal.SIGTERM)
        while deployment.request("GET", "/health")[0] != 503:
            assert front.poll() is None
    assert stream.rest()[-1] == "[DONE]"
    stream.close()
    assert front.wait(10) == 0


def test_a_restarted_frontend_listens_when_its_model_is_loaded(started: Deployment) -> None:
    started.front.terminate()  # type: ignore[attr-defined]
    assert started.front.wait(20) == 0  # type: ignore[attr-defined]
    started.frontend("--router-mode", "kv")
    answers: list[tuple[int, dict[str, str], bytes]] = []

    def answered() -> bool:
        answers.append(started.request("POST", CHAT, chat(1)))
        return True

    started.until(answered)
    assert answers[0][0] == 200, answers[0]


@pytest.mark.parametrize("more", [b"", b"x" * 100_000])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_disconnects_frees_its_worker(
    started: Deployment, streaming: bool, more: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", started.port)) as client:
        body = json.dumps(chat(8000, streaming)).encode()
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        if streaming:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        started.until(lambda: started.sample("dynamo_frontend_inflight_requests") == 1)
        client.sendall(more)  # pipelined, and too long to keep
    kind = "stream" if streaming else "unary"
    started.until(lambda: started.sample("dynamo_frontend_active_requests") == 0)
    labels = {"endpoint": "chat_completions", "model": "tiny", "request_type": kind}
    assert started.sample("dynamo_frontend_model_cancellation_total", **labels) == 1
    ended = {"error_type": "cancelled", "status": "error", **labels}
    assert started.sample("dynamo_frontend_requests_total", **ended) == 1
    started.until(lambda: started.sample("dynamo_frontend_worker_active_decode_blocks") == 0)
    assert started.request("POST", CHAT, chat(1))[0] == 200


def test_a_worker_dies_and_another_starts(started: Deployment) -> None:
    stream = Streaming(started, 8000)
    assert stream.event() is not None
    started.worker.kill()  # type: ignore[attr-defined]
    killed_at = time.monotonic()
    events = stream.rest()
    assert time.monotonic() - killed_at < 9  # its lease would last longer
    assert events[-2] == {
        "error": {
            "message": "Service temporarily unavailable",
            "type": "service_unavailable",
            "param": None,
            "code": 503,
        }
    }
    assert events[-1] == "[DONE]"
    stream.close()
    started.worker.wait()  # type: ignore[attr-defined]
    status, _, body = started.request("POST", CHAT, chat(1))
    assert status == 503 and "not ready to serve requests yet" in json.loads(body)["message"]
    assert json.loads(started.request("GET", "/v1/models")[2])["data"] == []
    assert started.request("GET", "/health")[0] == 503
    started.mocker("--block-size", "16")
    started.wait_for_workers()
    assert started.request("POST", CHAT, chat(1))[0] == 200


def test_the_frontend_ignores_the_status_port_of_workers(deployment: Deployment) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        deployment.frontend(DYN_SYSTEM_PORT=str(taken.getsockname()[1]))
        deployment.wait_for_workers(0)
    assert deployment.request("GET", "/live")[0] == 200


def test_the_openapi_document_is_complete(started: Deployment) -> None:
    text = started.request("GET", "/openapi.json")[2].decode()
    document = json.loads(text)
    assert document["openapi"].startswith("3.1") and set(document["info"]) >= {"title", "version"}
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for reference in set(re.findall(r'"\$ref":"#/([^"]+)"', text)):
        node = document
        for step in reference.split("/"):
            node = node[step]
    store = {"$id": "urn:api", **document}
    body = {"$ref": "urn:api#/components/schemas/ChatCompletionRequest"}
    registry = Registry().with_resource("urn:api", DRAFT202012.create_resource(store))
    chats = Draft202012Validator(body, registry=registry)
    assert chats.is_valid(chat(5)) and not chats.is_valid({**chat(5), "temperature": 3})
    for path, operations in document["paths"].items():
        first = next(iter(operations.values()))
        assert re.findall(r"{(\w+)}", path) == [one["name"] for one in first.get("parameters", ())]
        for method, operation in operations.items():
            assert operation["responses"]
            if path == "/v1/record":
                continue  # a stream without an end
            asked = path.replace("{model}", "tiny").replace("{request_id}", "last")
            if "{response_id}" in path:
                short = {"model": "tiny", "input": "Hi", "max_output_tokens": 1}
                made = started.request("POST", "/v1/responses", short)
                asked = path.replace("{response_id}", json.loads(made[2])["id"])
            status = started.request(method.upper(), asked, {})[0]
            assert status not in (404, 405), path


def test_kv_blocks_in_every_router_mode(deployment: Deployment) -> None:
    """`curl …/metrics | grep kv_blocks`: used and total of the model, whatever the mode."""
    blocks = ("--block-size", "4", "--num-gpu-blocks-override", "64")
    for _ in range(2):
        deployment.mocker(*blocks, "--speedup-ratio", "0.05")
    for mode in ROUTER_MODES:
        deployment.port = free_port()
        frontend = deployment.frontend("--router-mode", mode)
        deployment.wait_for_workers(2)
        assert kv_blocks(deployment) == (0.0, 64.0)
        instances = json.loads(deployment.request("GET", "/health")[2])["instances"]
        worker = next(one["instance_id"] for one in instances if one["endpoint"] == "generate")
        pin = {"x-worker-instance-id": str(worker)} if mode == "direct" else {}
        stream = Streaming(deployment, 100, pin)
        assert stream.event() is not None
        used, total = kv_blocks(deployment)
        # A prompt of at least one block and what is generated, as a mean of two workers.
        assert 0.5 <= used <= 32 and total == 64, mode
        stream.close()
        deployment.until(lambda: kv_blocks(deployment)[0] == 0, "no blocks in use")
        frontend.terminate()
        assert frontend.wait(30) == 0
        deployment.processes.remove(frontend)


def kv_blocks(deployment: Deployment) -> tuple[float, float]:
    """Return the used and total blocks of the model."""
    lines = deployment.request("GET", "/metrics")[2].decode().splitlines()
    rows = dict(line.rsplit(" ", 1) for line in lines if "kv_blocks{" in line)
    used, total = (
        float(rows[f'dynamo_frontend_model_{kind}_kv_blocks{{model="tiny"}}'])
        for kind in ("used", "total")
    )
    return used, total


def test_informational_routes(started: Deployment) -> None:
    status, headers, body = started.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"dynamo_frontend_model_total_kv_blocks" in body
    document = json.loads(started.request("GET", "/openapi.json")[2])
    assert set(document["paths"]) >= {CHAT, "/v1/completions", "/v1/models", "/health", "/live"}
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    health = json.loads(started.request("GET", "/health")[2])
    assert health["status"] == "healthy"
    assert health["endpoints"] == [f"dyn://{started.namespace}.backend.generate"]
    assert started.request("GET", "/v1/models/nope")[0] == 404
    assert json.loads(started.request("GET", "/v1/models/tiny")[2])["id"] == "tiny"
    status, _, body = started.request("GET", "/v1/models/tiny/ready")
    assert (status, json.loads(body)) == (200, {"id": "tiny", "ready": True})
    assert started.request("GET", "/v1/models/nope/ready")[0] == 404
    status, headers, _ = started.request("GET", "/docs")
    assert status == 303 and dict(headers)["location"] == "/openapi.json"
    for method, path, expected in (
        ("GET", "/nope", 404),
        ("DELETE", "/health", 405),
        ("HEAD", "/health", 200),
    ):
        assert started.request(method, path)[0] == expected


def test_the_state_directory_is_clean_at_the_end(deployment: Deployment) -> None:
    front = deployment.frontend()
    deployment.wait_for_workers(0)
    children = subprocess.run(
        ["ps", "--ppid", str(front.pid), "-o", "pid="], capture_output=True, check=False
    )
    assert children.stdout == b""
    front.send_signal(signal.SIGTERM)
    assert front.wait(10) == 0
    left = [path for path in deployment.state_dir.rglob("*") if not path.is_dir()]
    assert left == [], left
