"""``dynamo.attach`` in front of vLLM's own server: exact routing by its KV events, and its load."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import free_port
from servers_kit import EngineDeployment, closing, in_parallel
from weights_kit import CONTEXT

CHAT = "/v1/chat/completions"
BLOCK = 32
WORDS = "one two three four five six seven eight nine ten eleven twelve "


class AttachedEngine(EngineDeployment):
    """Our frontend and worker, in front of the server of ``engine``."""

    def __init__(self, directory: Path, engine: EngineDeployment) -> None:
        super().__init__(directory)
        self.engine = engine

    def attach(self, *flags: str) -> None:
        """Start the worker."""
        self.start("dynamo.attach", "--url", self.engine.url, *flags)

    def overlap(self, body: dict[str, Any]) -> tuple[int, int]:
        """The blocks of a prompt, and those of them that our router takes as cached."""
        found = json.loads(self.request("POST", "/v1/route", body)[2])
        return found["prompt_blocks"], found["candidates"][0]["overlap_blocks"]


@pytest.fixture(scope="module")
def attached(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[AttachedEngine]:
    with contextlib.ExitStack() as stack:
        engine = EngineDeployment(tmp_path_factory.mktemp("vllm-events"))
        stack.enter_context(closing(engine))
        port = free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
        }
        flags = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
        engine.vllm_server(tiny_model, "own", "--kv-events-config", json.dumps(events), *flags)
        made = AttachedEngine(tmp_path_factory.mktemp("attached"), engine)
        stack.enter_context(closing(made))
        made.frontend("--router-mode", "kv", "--admission-control", "token-capacity")
        made.attach(
            *("--served-model-name", "tiny=own", "--model-path", str(tiny_model)),
            *("--kv-events-endpoint", f"tcp://127.0.0.1:{port}", "--poll-interval-secs", "0.1"),
        )
        engine.wait_for_models("own")
        made.wait_for_models("tiny")
        yield made


def chat(text: str, **more: Any) -> dict[str, Any]:
    given = {"temperature": 0, "max_tokens": 16, **more}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **given}


def test_the_server_is_known(attached: AttachedEngine) -> None:
    (row,) = json.loads(attached.request("GET", "/v1/models")[2])["data"]
    assert (row["id"], row["context_window"]) == ("tiny", CONTEXT)
    assert "(vllm) at dyn://" in attached.tail()


def test_the_same_answers_as_without_us(attached: AttachedEngine) -> None:
    prompts = [f"Count to {number}, then stop." for number in range(20)]
    more = {"logprobs": True, "top_logprobs": 2}
    ours = in_parallel(lambda text: attached.post(CHAT, chat(text, **more)), prompts)
    assert len({one["choices"][0]["message"]["content"] for one in ours}) > 10
    for text, answer in zip(prompts, ours, strict=True):
        direct = attached.engine.post(CHAT, {**chat(text, **more), "model": "own"})
        ours_text, direct_text = (
            one["choices"][0]["message"]["content"] for one in (answer, direct)
        )
        assert ours_text == direct_text
        assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
        assert answer["choices"][0].keys() == direct["choices"][0].keys()


def test_a_stream_has_the_same_text(attached: AttachedEngine) -> None:
    body = chat("Tell me a story.")
    events = attached.stream(CHAT, body)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == attached.post(CHAT, body)["choices"][0]["message"]["content"]


def test_the_router_knows_what_the_engine_caches(attached: AttachedEngine) -> None:
    """The overlap is by the engine's events, and equal to what the engine then reports."""
    body = chat("events: " + WORDS * 20)
    blocks, before = attached.overlap(body)
    assert blocks > 5 and before * BLOCK < 3 * BLOCK  # the start of the template may be cached
    prompt_tokens = attached.post(CHAT, body)["usage"]["prompt_tokens"]
    full = prompt_tokens // BLOCK
    attached.until(lambda: attached.overlap(body)[1] == full, "the events have arrived")
    longer = chat("events: " + WORDS * 20 + "and then?")
    expected = attached.overlap(longer)[1] * BLOCK
    usage = attached.post(CHAT, longer)["usage"]
    assert expected > 3 * BLOCK
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected


def test_a_client_that_leaves_aborts_in_the_engine(attached: AttachedEngine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", attached.port, timeout=30)
    with contextlib.closing(connection):
        body = chat("Go on.", stream=True, max_tokens=CONTEXT - 100, ignore_eos=True)
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(20).startswith(b"data: ")
        attached.until(lambda: running(attached.engine) == 1, "the engine computes")
        answer.close()
    attached.until(lambda: running(attached.engine) == 0, "the abort")
    assert attached.engine.sample("vllm:generation_tokens_total") < CONTEXT - 100


def running(engine: EngineDeployment) -> float:
    """The requests that the engine computes, by its own metrics."""
    return engine.sample("vllm:num_requests_running")


def test_the_load_of_the_engine_reaches_the_router(attached: AttachedEngine) -> None:
    """A threshold on the used blocks, which only the engine's own page shows."""
    body = {"model": "tiny", "active_decode_blocks_threshold": 0.0}
    assert attached.request("POST", "/busy_threshold", body)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", attached.port, timeout=30)
    with contextlib.closing(connection):
        long = chat(WORDS * 50, stream=True, max_tokens=CONTEXT - 1000, ignore_eos=True)
        connection.request("POST", CHAT, json.dumps(long), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read(20).startswith(b"data: ")
        attached.until(
            lambda: attached.request("POST", CHAT, chat("hello"))[0] == 503, "the worker is busy"
        )
        answer.close()
    attached.until(
        lambda: attached.request("POST", CHAT, chat("hello"))[0] == 200, "it is free again"
    )
    body["active_decode_blocks_threshold"] = 1.0
    attached.request("POST", "/busy_threshold", body)


def test_embeddings_of_a_pooling_server(tmp_path: Path, tiny_model: Path) -> None:
    with contextlib.ExitStack() as stack:
        engine = EngineDeployment(tmp_path / "engine")
        stack.enter_context(closing(engine))
        engine.vllm_server(tiny_model, "embed", "--runner", "pooling", "--convert", "embed")
        made = AttachedEngine(tmp_path / "ours", engine)
        stack.enter_context(closing(made))
        made.frontend()
        made.attach("--poll-interval-secs", "0.1")
        engine.wait_for_models("embed")
        made.wait_for_models("embed")
        body = {"model": "embed", "input": ["hello", "a longer text"]}
        ours, direct = (one.post("/v1/embeddings", body)["data"] for one in (made, engine))
        assert [len(row["embedding"]) for row in ours] == [256, 256]
        assert ours == direct
        status, _, answer = made.request("POST", CHAT, {**body, "messages": []})
        assert status == 404 and b"has no /v1/chat/completions" in answer
        (core,) = engine.engine_cores()
        core.send_signal(signal.SIGKILL)
        made.until(lambda: made.request("POST", "/v1/embeddings", body)[0] == 503, "down")
        engine.processes[0].wait(30)
        engine.processes.clear()
