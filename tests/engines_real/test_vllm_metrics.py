"""The page of a worker has vLLM's metrics, as the page of vLLM's own server."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from answers_kit import CHAT, COMPLETIONS, chat, completion
from capacity_kit import OpenRequest
from prometheus_client.parser import text_string_to_metric_families
from servers_kit import EngineDeployment

PREFIX = "vllm:"
TIMES = ("_created", "_seconds_sum", "_seconds_bucket")
# Counts of vLLM's own parsers, which run in its server: here the frontend parses answers.
OF_ITS_SERVER = (
    "vllm:tool_call_parser_invocations",
    "vllm:tool_call_parser_invocations_created",
)
RUNNING = "vllm:num_requests_running"
REQUESTS = "vllm:e2e_request_latency_seconds_count"


def page(server: EngineDeployment, port: int | None) -> list[Any]:
    text = server.request("GET", "/metrics", port=port)[2].decode()
    families = text_string_to_metric_families(text)
    return [family for family in families if family.name.startswith(PREFIX)]


def shape(families: list[Any]) -> dict[str, Any]:
    """What a dashboard can rely on: type, help, and each combination of constant labels."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {
                (sample.name, tuple(sorted(sample.labels.items())))
                for sample in family.samples
                if "adapters" not in "".join(sample.labels)
            },
        )
        for family in families
        if family.name != "vllm:cache_config_info"  # its labels are the sizes of each engine
    }


def values(families: list[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


class Page:
    """The page of a server, and what a load adds to it."""

    def __init__(self, server: EngineDeployment, port: int | None = None) -> None:
        self.server = server
        self.port = port
        self.before = values(self.read())

    def read(self) -> list[Any]:
        return page(self.server, self.port)

    def sum(self, name: str) -> float:
        """What was added to all samples of a name."""
        return sum(value for (sample, _), value in self.added().items() if sample == name)

    def runs(self, requests: int) -> bool:
        """Whether so many requests run now, as the page says."""
        now = values(self.read())
        return sum(count for (name, _), count in now.items() if name == RUNNING) == requests

    def added(self) -> Counter[Any]:
        now: Counter[Any] = Counter(values(self.read()))
        now.subtract(Counter(self.before))
        return now

    def until(self, requests: int) -> None:
        self.server.until(lambda: self.sum(REQUESTS) == requests, f"{requests} requests counted")


@pytest.fixture(scope="module")
def pages(ours: EngineDeployment, vllm_tiny: EngineDeployment) -> tuple[Page, Page]:
    return Page(ours, ours.status_port), Page(vllm_tiny)


def complete(server: EngineDeployment, **fields: Any) -> Any:
    body = completion("The quick brown fox jumps over the lazy dog", ignore_eos=True, **fields)
    return server.post(COMPLETIONS, {"model": "tiny", **body})


def send_all(server: EngineDeployment) -> int:
    """Requests of each kind, one at a time; return how many."""
    bodies = [
        (COMPLETIONS, completion("The quick brown fox", max_tokens=40, ignore_eos=True)),
        (COMPLETIONS, completion([17, 18, 19], max_tokens=12, min_tokens=12, logprobs=1)),
        (CHAT, chat("How are you?", max_tokens=9, ignore_eos=True)),
        (CHAT, chat("Ahoy", model="pirate", max_tokens=5, ignore_eos=True)),
        (COMPLETIONS, completion("one token", max_tokens=1)),
    ]
    for path, body in bodies:
        server.post(path, {"model": "tiny", **body})
    return len(bodies)


def test_names_types_labels_and_buckets_are_those_of_vllm(pages: tuple[Page, Page]) -> None:
    mine, theirs = (shape(one.read()) for one in pages)
    for name in OF_ITS_SERVER:
        del theirs[name]
    assert mine.keys() == theirs.keys()
    for name, family in theirs.items():
        assert mine[name] == family, name


def test_a_load_counts_as_in_vllm(pages: tuple[Page, Page]) -> None:
    for one in pages:
        one.before = values(one.read())
        one.until(send_all(one.server))
    mine, theirs = (
        {
            key: count
            for key, count in one.added().items()
            if count and not key[0].endswith(TIMES) and "adapters" not in str(key)
        }
        for one in pages
    )
    different = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
    assert not {key: (mine.get(key), theirs.get(key)) for key in different}


def test_a_stop_string_is_a_success_as_in_vllm(pages: tuple[Page, Page]) -> None:
    """The frontend finds it: until the worker has aborted, its engine may be some tokens ahead."""
    text = complete(pages[0].server, max_tokens=40)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for one in pages:
        one.before = values(one.read())
        tokens = complete(one.server, max_tokens=400, stop=[stop])["usage"]["completion_tokens"]
        one.until(1)
        key = ("engine", "0"), ("finished_reason", "stop"), ("model_name", "tiny")
        assert one.added()["vllm:request_success_total", key] == 1
        counted = one.sum("vllm:request_generation_tokens_sum")
        assert tokens <= counted <= tokens + 10, one


def test_a_client_that_leaves_is_not_counted(pages: tuple[Page, Page]) -> None:
    for one in pages:
        one.before = values(one.read())
        body = chat("Tell me more", model="tiny", max_tokens=1500, ignore_eos=True, stream=True)
        client = OpenRequest(one.server, body)
        one.server.until(partial(one.runs, 1), "it runs")
        client.drop()
        one.server.until(partial(one.runs, 0), "nothing runs")
        complete(one.server, max_tokens=2)
        one.until(1)


def test_the_gaps_of_a_request_are_its_time_of_decoding(pages: tuple[Page, Page]) -> None:
    """Most tokens are counted in C: their gaps sum up to what the first and the last output say."""
    mine, _ = pages
    mine.before = values(mine.read())
    bodies = [completion([20 + number] * 5, max_tokens=64, ignore_eos=True) for number in range(4)]
    for body in bodies:
        mine.server.post(COMPLETIONS, {"model": "tiny", **body})
    mine.until(len(bodies))
    decoding = mine.sum("vllm:request_decode_time_seconds_sum")
    assert mine.sum("vllm:inter_token_latency_seconds_sum") == pytest.approx(decoding, abs=1e-6)
    assert mine.sum("vllm:inter_token_latency_seconds_count") == len(bodies) * 63
    parts = ("queue", "prefill", "decode")
    total = sum(mine.sum(f"vllm:request_{part}_time_seconds_sum") for part in parts)
    inference = mine.sum("vllm:request_inference_time_seconds_sum")
    queued = mine.sum("vllm:request_queue_time_seconds_sum")
    assert total == pytest.approx(inference + queued, abs=1e-6)
    assert 0 < total < mine.sum("vllm:e2e_request_latency_seconds_sum")
    first = mine.sum("vllm:time_to_first_token_seconds_sum")
    assert 0 < first < mine.sum("vllm:e2e_request_latency_seconds_sum")
