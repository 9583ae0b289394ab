"""The ``openai`` client, a frontend, ``dynamo.attach`` and a server of another make, all real."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from lazy_module import openai

MESSAGES: Any = [{"role": "user", "content": "Tell me about key-value caches, please."}]
CHAT = "/v1/chat/completions"


class Attached(Deployment):
    """Servers, one attach worker in front of each, and a frontend."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.ports: list[int] = []
        self.workers: list[subprocess.Popen[bytes]] = []

    def attach(self, *flags: str) -> None:
        """Start a server and a worker in front of it, which offers its model as ``far``."""
        port = self.openai_server()
        self.ports.append(port)
        name = ("--served-model-name", "far=org/remote-model", "--url", f"http://127.0.0.1:{port}")
        self.workers.append(self.start("dynamo.attach", *name, *flags))

    def ask(self, port: int, path: str = "/seen") -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def bodies(self, server: int = 0) -> Any:
        return self.ask(self.ports[server])["bodies"]

    def chat(self, **more: Any) -> tuple[int, dict[str, str], Any]:
        body = {"model": "far", "messages": MESSAGES, **more}
        status, headers, answer = self.request("POST", CHAT, body)
        return status, headers, json.loads(answer)


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Attached]:
    made = Attached(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    """A server and a mocker behind one frontend, for tests that do not change them."""
    made = Attached(tmp_path_factory.mktemp("attached"))
    try:
        made.attach()
        made.mocker("--speedup-ratio", "0", "--block-size", "16")
        made.frontend("--router-mode", "kv")
        made.until(lambda: _models(made) == {"far", "tiny"}, "both models")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def client(shared: Attached) -> Iterator[openai.OpenAI]:
    url = f"{shared.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as made:
        yield made


def _models(deployment: Deployment) -> set[str]:
    rows = json.loads(deployment.request("GET", "/v1/models")[2])["data"]
    return {row["id"] for row in rows}


def test_unary(client: openai.OpenAI, shared: Attached) -> None:
    answer = client.chat.completions.create(
        model="far", messages=MESSAGES, extra_body={"unheard_of": {"deep": [1, None]}}
    )
    assert answer.choices[0].message.content == "w0 w1 w2"
    assert answer.choices[0].message.odd_field == [1, 2]
    assert answer.choices[0].stop_reason == 7
    seen = shared.bodies()[-1]
    assert seen["unheard_of"] == {"deep": [1, None]} and seen["model"] == "org/remote-model"


def test_stream(client: openai.OpenAI, shared: Attached) -> None:
    before = shared.sample("dynamo_frontend_output_tokens_total", model="far")
    chunks = list(client.chat.completions.create(model="far", messages=MESSAGES, stream=True))
    assert [c.choices[0].odd_field for c in chunks[:-1]] == [0, 1, 2]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert shared.sample("dynamo_frontend_output_tokens_total", model="far") == before + 3
    labels = {"model": "far", "status": "success", "request_type": "stream"}
    assert shared.sample("dynamo_frontend_requests_total", **labels) >= 1


def test_embeddings(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="far", input="hello", encoding_format="float")
    assert made.data[0].embedding == [0.25, -1.0]


def test_stored_responses(client: openai.OpenAI, shared: Attached) -> None:
    """The body names no model: there is one server that has these routes."""
    assert client.responses.retrieve("resp_1").status == "completed"
    client.responses.delete("resp_1", extra_query={"model": "far"})
    assert client.responses.cancel("resp_1").status == "cancelled"
    path = "/v1/responses/resp_1"
    assert shared.ask(shared.ports[0])["paths"] == [
        f"GET {path}",
        f"DELETE {path}?model=org%2Fremote-model",
        f"POST {path}/cancel",
    ]
    with pytest.raises(openai.NotFoundError, match="no model `tiny` has GET of this path"):
        client.responses.retrieve("resp_1", extra_query={"model": "tiny"})
    paths = json.loads(shared.request("GET", "/openapi.json")[2])["paths"]
    assert set(paths["/v1/responses/{response_id}"]) == {"get", "delete"}
    with pytest.raises(openai.NotFoundError, match="model `far` has no /v1/responses"):
        client.responses.create(model="far", input="hello")
    own = client.responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert client.responses.retrieve(own.id) == own  # those of this frontend come first


@pytest.mark.parametrize("size", [100, 9 << 20])
def test_a_form_with_a_file(client: openai.OpenAI, shared: Attached, size: int) -> None:
    """The model is found in the form, gets its own name there, and all else is unchanged."""
    audio = bytes(range(256)) * (size // 256 + 1)
    file = ("a.wav", audio, "audio/wav")
    made = client.audio.transcriptions.create(model="far", file=file, language="de")
    seen = shared.bodies()[-1].encode("latin-1")
    assert made.text == f"{len(seen)} bytes"
    assert audio in seen and b'name="language"\r\n\r\nde\r\n' in seen
    assert b'name="model"\r\n\r\norg/remote-model\r\n' in seen
    with pytest.raises(openai.NotFoundError, match="Model not found: absent"):
        client.audio.transcriptions.create(model="absent", file=file)


def test_an_error_keeps_status_headers_and_body(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.chat.completions.create(model="far", messages=MESSAGES, extra_body={"status": 422})
    assert raised.value.body == {
        "message": "upstream says no",
        "type": "odd",
        "param": None,
        "code": "x7",
    }
    assert raised.value.response.headers["retry-after"] == "3"


def test_models_of_both_kinds_side_by_side(client: openai.OpenAI, shared: Attached) -> None:
    assert client.models.retrieve("far").id == "far"
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    with pytest.raises(openai.NotFoundError, match="Model not found: nope"):
        client.chat.completions.create(model="nope", messages=MESSAGES)
    paths = json.loads(shared.request("GET", "/openapi.json")[2])["paths"]
    assert "post" in paths["/v1/embeddings"] and CHAT in paths


def test_a_path_that_the_server_does_not_have(shared: Attached) -> None:
    status, _, body = shared.request("POST", "/v1/rerank", {"model": "far", "query": "q"})
    assert status == 404 and b"model `far` has no /v1/rerank, it has /v1/audio/tran" in body


def test_a_large_body(shared: Attached) -> None:
    text = "long " * 300_000
    status, _, answer = shared.chat(messages=[{"role": "user", "content": text}])
    assert status == 200 and answer["object"] == "chat.completion"
    assert shared.bodies()[-1]["messages"][0]["content"] == text


def test_the_route_is_explained(shared: Attached) -> None:
    body = {"model": "far", "messages": MESSAGES}
    status, _, text = shared.request("POST", "/v1/route", body)
    assert status == 200 and len(json.loads(text)["candidates"]) == 1


def test_a_client_that_leaves_ends_the_request_at_the_server(shared: Attached) -> None:
    before = shared.ask(shared.ports[0])["aborted"]
    with _streaming(shared, words=1000, pause_s=0.02) as answer:
        assert answer.read(20).startswith(b"data: ")
    shared.until(lambda: shared.ask(shared.ports[0])["aborted"] == before + 1, "the abort")
    shared.until(
        lambda: shared.sample("dynamo_frontend_inflight_requests", model="far") == 0, "the end"
    )


def test_a_slow_client_slows_the_server_down(shared: Attached) -> None:
    size = 50_000
    words = 4 * _kernel_buffers() // size + 1000
    with _streaming(shared, words=words, size=size) as answer:
        assert answer.read(20).startswith(b"data: ")
        sent = [0, 1]
        while sent[-1] != sent[-2]:  # until it blocks
            sent.append(shared.ask(shared.ports[0])["sent_bytes"])
            subprocess.run(["sleep", "0.5"], check=True)
        assert sent[-1] - sent[2] < words * size / 2
    shared.until(
        lambda: shared.sample("dynamo_frontend_inflight_requests", model="far") == 0, "the end"
    )


def _kernel_buffers() -> int:
    """Bytes that the kernel may keep for the one connection whose end reads slowly, at most."""
    tcp = Path("/proc/sys/net/ipv4")
    return sum(int((tcp / name).read_text().split()[2]) for name in ("tcp_rmem", "tcp_wmem"))


@contextlib.contextmanager
def _streaming(deployment: Deployment, **body: Any) -> Iterator[http.client.HTTPResponse]:
    """A response that is being read; leaving the block closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    with contextlib.closing(connection):
        data = json.dumps({"model": "far", "messages": MESSAGES, "stream": True, **body})
        connection.request("POST", CHAT, data, {"content-type": "application/json"})
        assert isinstance(connection.sock, socket.socket)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connection.getresponse() as answer:
            yield answer


def test_prompts_go_where_their_beginning_is_cached(attached: Attached) -> None:
    """No events, no tokenizer, no flag but the router's mode: caches are predicted."""
    attached.attach()
    attached.attach()
    attached.frontend("--router-mode", "kv")
    attached.until(lambda: _healthy(attached) == 2, "two workers")
    places: dict[str, set[str]] = {}
    for turn in range(3):
        # A new prompt goes to either worker by chance: all 20 to one in 2 of a million runs.
        for user in string.ascii_letters[:20]:
            system = {"role": "system", "content": user * 4000}
            asked = {"role": "user", "content": f"turn {turn}"}
            _, _, answer = attached.chat(messages=[system, asked])
            places.setdefault(user, set()).add(answer["system_fingerprint"])
    assert all(len(one) == 1 for one in places.values()), places
    assert len(set.union(*places.values())) == 2, places


def _healthy(deployment: Deployment) -> int:
    return len(json.loads(deployment.request("GET", "/health")[2])["instances"])


def test_a_killed_worker_before_and_after_the_first_byte(attached: Attached) -> None:
    attached.attach()
    attached.frontend()
    attached.until(lambda: _models(attached) == {"far"}, "the model")
    with _streaming(attached, words=1000, pause_s=0.05) as answer:
        assert answer.read(20).startswith(b"data: ")
        attached.attach()
        attached.until(lambda: _healthy(attached) == 2, "two workers")
        attached.workers[0].send_signal(signal.SIGKILL)
        text = answer.read()
    assert text.endswith(b"data: [DONE]\n\n") and b'"code":503' in text
    attached.until(lambda: _healthy(attached) == 1, "one worker")
    attached.attach()
    attached.until(lambda: _healthy(attached) == 2, "two workers")
    connections = [_waiting(attached) for _ in range(2)]  # one for each worker
    attached.until(lambda: len(attached.bodies(1)) + len(attached.bodies(2)) == 2, "two requests")
    attached.workers[1].send_signal(signal.SIGKILL)
    for connection in connections:
        with contextlib.closing(connection):
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
    assert len(attached.bodies(2)) == 2


def _waiting(deployment: Deployment) -> http.client.HTTPConnection:
    """A request whose response takes a few seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
    body = json.dumps({"model": "far", "messages": MESSAGES, "pause_s": 3})
    connection.request("POST", CHAT, body, {"content-type": "application/json"})
    return connection
