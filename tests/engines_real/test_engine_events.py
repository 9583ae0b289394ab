"""The router's view of the engine's cache, and what becomes of cancelled requests."""

from __future__ import annotations

import http.client
import json

from answers_kit import CHAT, COMPLETIONS, chat, completion
from servers_kit import EngineDeployment

BLOCK = 32


def test_cached_tokens_are_those_that_the_engine_found(ours: EngineDeployment) -> None:
    """The router predicts the overlap from KV events; the engine reports what it reused."""
    long = [7 + number % 900 for number in range(10 * BLOCK + 5)]
    body = completion(long, model="tiny", max_tokens=2)
    first = ours.post(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first == 0
    ours.until(lambda: overlap(ours, body) == 10, "the router has the blocks of the prompt")
    again = ours.post(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again == 10 * BLOCK
    shorter = completion(long[: 4 * BLOCK + 3], model="tiny", max_tokens=2)
    assert overlap(ours, shorter) == 4
    assert ours.post(COMPLETIONS, shorter)["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 4 * BLOCK
    }


def test_a_salt_separates_caches(ours: EngineDeployment) -> None:
    prompt = [11 + number % 800 for number in range(4 * BLOCK + 1)]
    cached = []
    for salt in ("one", "two", "one"):
        body = completion(prompt, model="tiny", max_tokens=1, cache_salt=salt)
        usage = ours.post(COMPLETIONS, body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 4 * BLOCK]
    # The router tells them apart, too, by the engine's events.
    for salt, blocks in (("one", 4), ("two", 4), ("three", 0)):
        body = completion(prompt, model="tiny", max_tokens=1, cache_salt=salt)
        ours.until(lambda body=body, n=blocks: overlap(ours, body) == n, f"{blocks} of {salt}")


def test_a_disconnect_frees_the_engine(ours: EngineDeployment) -> None:
    """The client leaves in the middle of a long answer; the engine stops at once."""
    body = chat("Tell me more", model="tiny", max_tokens=1900, ignore_eos=True, stream=True)
    connection = http.client.HTTPConnection("127.0.0.1", ours.port, timeout=30)
    connection.request(
        "POST", CHAT, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    before = ours.engine_sample("vllm:generation_tokens_total")
    assert answer.readline().startswith(b"data: ")
    ours.until(lambda: running(ours) == 1, "the engine computes the answer")
    answer.close()
    connection.close()
    ours.until(lambda: running(ours) == 0, "the engine has aborted the request")
    # It did not end by itself.
    assert ours.engine_sample("vllm:generation_tokens_total") - before < 1500


def overlap(server: EngineDeployment, body: dict[str, object]) -> int:
    """The blocks that the router assumes on the best worker."""
    status, _, answer = server.request("POST", "/v1/route", body)
    assert status == 200, answer
    found = json.loads(answer)
    return max(int(one["overlap_blocks"]) for one in found["candidates"])


def running(server: EngineDeployment) -> float:
    """The requests in the engine of ``tiny``."""
    return server.engine_sample("vllm:num_requests_running")
