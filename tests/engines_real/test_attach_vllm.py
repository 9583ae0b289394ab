"""``dynamo.attach`` in front of vLLM's own server: exact routing by its KV events, and its load."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import free_port
from servers_kit import AttachedEngine, EngineDeployment, closing, in_parallel
from weights_kit import CONTEXT

CHAT = "/v1/chat/completions"
BLOCK = 32
WORDS = "one two three four five six seven eight nine ten eleven twelve "


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


def overlap(attached: AttachedEngine, body: dict[str, Any]) -> tuple[int, int]:
    """The blocks of a prompt, and those of them that our router takes as cached."""
    found = json.loads(attached.request("POST", "/v1/route", body)[2])
    return found["prompt_blocks"], found["candidates"][0]["overlap_blocks"]


def test_the_server_is_known(attached: AttachedEngine) -> None:
    (row,) = json.loads(attached.request("GET", "/v1/models")[2])["data"]
    assert (row["id"], row["context_window"]) == ("tiny", CONTEXT)
    (served,) = json.loads(attached.engine.request("GET", "/v1/models")[2])["data"]
    members = ("max_model_len", "root", "parent")
    assert [row[member] for member in members] == [served[member] for member in members]
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
    blocks, before = overlap(attached, body)
    assert blocks > 5 and before * BLOCK < 3 * BLOCK  # the start of the template may be cached
    prompt_tokens = attached.post(CHAT, body)["usage"]["prompt_tokens"]
    full = prompt_tokens // BLOCK
    attached.until(lambda: overlap(attached, body)[1] == full, "the events have arrived")
    longer = chat("events: " + WORDS * 20 + "and then?")
    expected = overlap(attached, longer)[1] * BLOCK
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
