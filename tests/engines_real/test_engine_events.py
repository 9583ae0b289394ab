"""The router's view of the engine's cache."""

from __future__ import annotations

import json

from answers_kit import COMPLETIONS, completion
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


def overlap(server: EngineDeployment, body: dict[str, object]) -> int:
    """The blocks that the router assumes on the best worker."""
    status, _, answer = server.request("POST", "/v1/route", body)
    assert status == 200, answer
    found = json.loads(answer)
    return max(int(one["overlap_blocks"]) for one in found["candidates"])
