"""``dynamo.attach`` in front of a real llama-server, which it starts, and a frontend."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deployment import free_port
from gguf_kit import CONTEXT, write_gguf
from servers_kit import EngineDeployment, closing

SERVER = shutil.which("llama-server")
CHAT = "/v1/chat/completions"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "cache_prompt": False}
SLOTS = 4
pytestmark = [
    pytest.mark.skipif(SERVER is None, reason="llama-server is missing, run scripts/test-engines"),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is missing"),
]


class Llama(EngineDeployment):
    """A llama-server behind our frontend, and its own port to compare with."""

    def __init__(self, directory: Path, *options: str, ranks: bool = False) -> None:
        super().__init__(directory)
        self.server_port = free_port()
        self.options = options
        self.model = write_gguf(directory / "tiny.gguf", ranks=ranks)

    def attach(self, *flags: str) -> None:
        """Start the worker, which starts the server on the known port."""
        words = [str(SERVER), "-m", str(self.model), "-t", "1", "-np", str(SLOTS), "--metrics"]
        words += self.options
        exact = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")  # the same numbers in any batch
        command = " ".join([*words, *exact, "--kv-unified", "--port", "{port}"])
        url = f"http://127.0.0.1:{self.server_port}"
        self.start(
            *("dynamo.attach", "--exec", command, "--url", url, "--poll-interval-secs", "0.1"),
            *("--served-model-name", "tiny", *flags),
        )

    def direct(self, path: str, body: Any = None) -> bytes:
        """Ask the server itself; return the body of its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=30)
        with contextlib.closing(connection):
            method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read()

    def running(self) -> int:
        """The requests in the server, by its own metrics."""
        page = self.direct("/metrics").decode()
        (line,) = [one for one in page.splitlines() if one.startswith("llamacpp:requests_proc")]
        return int(float(line.split()[1]))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    with closing(Llama(tmp_path_factory.mktemp("llama"))) as made:
        assert isinstance(made, Llama)
        made.frontend("--router-mode", "kv")
        made.attach()
        made.wait_for_models("tiny")
        yield made


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {**GREEDY, "messages": [{"role": "user", "content": text}], **more}


def test_the_server_is_known(llama: Llama) -> None:
    (row,) = json.loads(llama.request("GET", "/v1/models")[2])["data"]
    assert (row["id"], row["context_window"]) == ("tiny", CONTEXT)
    assert "(llama.cpp) at dyn://" in llama.tail()


def test_the_same_answers_as_without_us(llama: Llama) -> None:
    prompts = [f"Count to {number}, then stop." for number in range(20)]
    # One after another, as the direct ones: a batch of several rounds differently.
    ours = [llama.post(CHAT, chat(text)) for text in prompts]
    assert len({one["choices"][0]["message"]["content"] for one in ours}) > 10
    for text, answer in zip(prompts, ours, strict=True):
        direct = json.loads(llama.direct(CHAT, chat(text)))
        assert answer["choices"] == direct["choices"]
        assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
        assert "timings" in answer  # a field that only llama.cpp has


def test_a_stream_has_the_same_text(llama: Llama) -> None:
    body = chat("Tell me a story.")
    events = llama.stream(CHAT, body)
    text = "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    )
    assert text == llama.post(CHAT, body)["choices"][0]["message"]["content"]
    assert len(events) > GREEDY["max_tokens"]  # type: ignore[operator]


def test_other_routes_of_the_server(llama: Llama) -> None:
    prompt = {**GREEDY, "prompt": "Once upon a time"}
    assert llama.post("/v1/completions", prompt)["choices"][0]["text"]
    message = {**GREEDY, "messages": [{"role": "user", "content": "hi"}]}
    assert llama.post("/v1/messages", message)["type"] == "message"
    assert llama.post("/v1/responses", {**GREEDY, "input": "hi"})["object"] == "response"


def test_an_error_is_the_servers_own(llama: Llama) -> None:
    body = chat("x " * 2 * CONTEXT)
    status, _, answer = llama.request("POST", CHAT, body)
    assert status == 400 and json.loads(answer)["error"]["n_ctx"] == CONTEXT


def test_a_client_that_leaves_frees_the_slot(llama: Llama) -> None:
    def leaves_early() -> bool:
        """Whether the answer was still computed when the client left: it ends with the context."""
        connection = http.client.HTTPConnection("127.0.0.1", llama.port, timeout=30)
        with contextlib.closing(connection):
            body = chat("Go on.", stream=True, max_tokens=-1, ignore_eos=True, n_predict=-1)
            connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.read(20).startswith(b"data: ")
            was_running = llama.running() == 1
            answer.close()
            return was_running

    llama.until(leaves_early, "a client that leaves early")
    llama.until(lambda: llama.running() == 0, "the slot is free")


def test_a_killed_server_ends_the_worker(tmp_path: Path) -> None:
    with closing(Llama(tmp_path)) as made:
        assert isinstance(made, Llama)
        made.attach()
        made.until(lambda: "model tiny: llama.cpp" in made.tail(), "the worker serves")
        (server,) = [one for one in made.descendants() if "tiny.gguf" in " ".join(words(one))]
        server.send_signal(signal.SIGKILL)
        assert made.processes[0].wait(20) == 1
        assert "was ended by SIGKILL" in made.tail()


def words(process: psutil.Process) -> list[str]:
    """The command line of a server, not of those that started it."""
    found = process.cmdline()
    return found if found and found[0] == SERVER else []


def test_a_reranker_on_every_path_of_its_api(tmp_path: Path) -> None:
    """llama-server has /v1/rerank; clients of Cohere ask for /v2/rerank."""
    body = {"model": "tiny", "query": "which?", "documents": ["this", "that one"], "top_n": 2}
    with closing(Llama(tmp_path / "llama", "--reranking", ranks=True)) as ranker:
        assert isinstance(ranker, Llama)
        ranker.frontend()
        ranker.attach()
        ranker.wait_for_models("tiny")
        direct = json.loads(ranker.direct("/v1/rerank", body))["results"]
        scores = {row["index"]: row["relevance_score"] for row in direct}
        assert len(set(scores.values())) == 2
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            rows = ranker.post(path, body)["results"]
            assert {row["index"]: row["relevance_score"] for row in rows} == pytest.approx(scores)
        status, _, answer = ranker.request("POST", "/v1/score", {"model": "tiny", "text_1": "a"})
        assert status == 404 and b"has no /v1/score" in answer
        page = ranker.request("GET", "/metrics")[2].decode()
        assert 'endpoint="rerank",error_type="",model="tiny"' in page
