"""GET /v1/record: what a recording says of requests, what it hides, and what it may cost."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_bench import Bench

from dynamo.config.frontend import FrontendSettings
from dynamo.frontend.apis.operator.record import RecordRoutes, write_count
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http.routes import Routes
from dynamo.observability.metrics import Registry
from dynamo.protocols.engine import MmObject, MmRoutingInfo, PreprocessedRequest, Routing
from dynamo.protocols.status import TRACE_BLOCK_TOKENS as B
from dynamo.runtime.process.tasks import Tasks


class Site:
    """The route, and a client for each recording."""

    def __init__(self) -> None:
        self.registry = RequestRegistry(FrontendSettings(), FrontendMetrics(Registry()))
        self.tasks = Tasks("test")
        self.routes = Routes()
        RecordRoutes(self.registry, self, self.tasks).install(self.routes)  # type: ignore[arg-type]

    @property
    def on_demand(self) -> Any:
        return SimpleNamespace(record={"later": SimpleNamespace(model="tiny")}.get)

    def named(self, name: str) -> Any:
        return SimpleNamespace(name="tiny") if name in ("tiny", "small") else None

    async def connect(self, query: str = "", method: str = "GET") -> Bench:
        bench = Bench(self.routes)
        bench.feed(f"{method} /v1/record{query} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        await asyncio.sleep(0)
        return bench

    def end(self, *prompts: Any, model: str = "tiny", age_s: float = 0.0) -> None:
        """End a request that arrived ``age_s`` ago."""
        ended: Any = SimpleNamespace(
            exchange=SimpleNamespace(received_at=time.monotonic() - age_s),
            model=SimpleNamespace(name=model),
            engine_requests=prompts,
        )
        for record in self.registry.recordings:
            record(ended)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.tasks.close()
    site.registry.close()


def prompt(tokens: Any, output: int = 5, **routing: Any) -> Any:
    where = Routing(**routing) if routing else None
    request = PreprocessedRequest("tiny", array("I", tokens), routing=where)
    return SimpleNamespace(original=request, routing=where, tokens=output)


def lines(bench: Bench) -> list[dict[str, Any]]:
    """The records so far, without the counts."""
    body = bench.transport.out.partition(b"\r\n\r\n")[2]
    found = [json.loads(one) for one in body.split(b"\n") if one.startswith(b"{")]
    return [one for one in found if one["type"] == "request"]


def counts(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench.transport.out[bench.transport.out.rfind(b"{") :][:-2])
    return found


async def test_a_record_has_lengths_times_and_shared_beginnings(site: Site) -> None:
    bench = await site.connect()
    begun = list(range(2 * B))
    site.end(prompt([*begun, 7]))
    site.end(prompt([*begun, 8], output=9))
    site.end(prompt(begun[:-1]))
    one, other, short = lines(bench)
    assert (one["input_length"], one["output_length"], one["model"]) == (2 * B + 1, 5, "tiny")
    assert 0 <= one["arrived_ms"] <= one["ended_ms"] < 60_000
    assert (other["output_length"], len(one["blocks"]), len(short["blocks"])) == (9, 3, 2)
    assert one["blocks"][:2] == other["blocks"][:2] and one["blocks"][2] != other["blocks"][2]
    assert short["blocks"][0] == one["blocks"][0] and short["blocks"][1] != one["blocks"][1]


async def test_a_block_id_depends_on_all_before_it(site: Site) -> None:
    bench = await site.connect()
    site.end(prompt([1] * B + [2] * B))
    site.end(prompt([3] * B + [2] * B))
    one, other = lines(bench)
    assert not set(one["blocks"]) & set(other["blocks"])


async def test_nothing_of_the_content_is_in_a_record(site: Site) -> None:
    bench = await site.connect()
    site.end(prompt([4_012_345_678] * 3, session_id="alice@example.org", lora_name="secret"))
    (record,) = lines(bench)
    assert set(record) == {
        *("type", "model", "arrived_ms", "ended_ms", "input_length", "output_length"),
        *("blocks", "session"),
    }
    text = bench.transport.out
    assert b"alice" not in text and b"secret" not in text and b"4012345678" not in text


async def test_two_recordings_cannot_be_matched(site: Site) -> None:
    first, second = await site.connect(), await site.connect()
    for number in range(50):
        site.end(prompt(range(number, number + 3 * B), session_id=f"s{number % 5}"))
    ids = [
        {block for one in lines(bench) for block in one["blocks"]}
        | {one["session"] for one in lines(bench)}
        for bench in (first, second)
    ]
    assert len(ids[0]) == len(ids[1]) == 50 * 3 + 5
    assert not ids[0] & ids[1]


async def test_models_adapters_and_images_share_no_blocks(site: Site) -> None:
    bench = await site.connect()
    tokens = [5] * (B + 1)

    def image(number: int) -> MmRoutingInfo:
        return MmRoutingInfo(array("I", tokens), [MmObject(number, [(B, B + 1)])])

    site.end(prompt(tokens))
    site.end(prompt(tokens), model="other")
    site.end(prompt(tokens, lora_name="a"))
    site.end(prompt(tokens, cache_namespace="a"))
    site.end(prompt([5], mm_routing_info=image(1)), prompt([5], mm_routing_info=image(2)))
    site.end(prompt(tokens))
    *others, one, two, again = lines(bench)
    assert len({block for record in others for block in record["blocks"]}) == 4 * 2
    assert again["blocks"] == others[0]["blocks"]
    assert one["input_length"] == B + 1
    assert one["blocks"][0] == two["blocks"][0] and one["blocks"][1] != two["blocks"][1]


async def test_sessions_have_numbers(site: Site) -> None:
    bench = await site.connect()
    for name in ("a", "b", "a", None):
        site.end(prompt([1], session_id=name))
    a, b, again, none = lines(bench)
    assert a["session"] == again["session"] != b["session"] and "session" not in none


@pytest.mark.parametrize("name", ["tiny", "small", "later"])
async def test_one_model_and_only_requests_that_arrive_later(site: Site, name: str) -> None:
    bench = await site.connect(f"?model={name}")
    site.end(prompt([1]), model="other")
    site.end(prompt([2]), age_s=5.0)
    site.end(prompt([3], output=3), prompt([3], output=4))  # two choices of one request
    assert [one["output_length"] for one in lines(bench)] == [3, 4]


async def test_a_slow_client_loses_records_and_is_told(site: Site) -> None:
    bench = await site.connect()
    bench.connection.pause_writing()
    before = len(bench.transport.out)
    for _ in range(1000):
        site.end(prompt(range(B)))
    bench.connection.resume_writing()
    assert len(bench.transport.out) == before  # nothing has accumulated
    site.end(prompt([1]))
    (recording,) = site.registry.recordings
    own = recording.__self__  # type: ignore[attr-defined]
    write_count(own._exchange, own, 3)
    assert len(lines(bench)) == 1
    assert counts(bench) == {"type": "count", "recorded": 1, "lost": 1000, "running": 3}


async def test_a_prompt_that_cannot_be_hashed_is_lost(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await site.connect()
    wrong = prompt([1])
    wrong.original.token_ids = [-1]
    site.end(wrong)
    (recording,) = site.registry.recordings
    own = recording.__self__  # type: ignore[attr-defined]
    write_count(own._exchange, own, 0)
    assert counts(bench)["lost"] == 1
    assert "cannot be recorded" in caplog.text


async def test_a_client_that_disconnects_leaves_nothing(site: Site) -> None:
    bench = await site.connect()
    assert len(site.registry.recordings) == 1
    bench.connection.connection_lost(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert site.registry.recordings == []
    gc.collect()
    site.end(prompt([1]))


async def test_bad_questions_and_too_many_clients(site: Site) -> None:
    for query, status in (("?model=none", b"404"), ("?seconds=3", b"400")):
        assert (await site.connect(query)).transport.out[9:12] == status
    head = await site.connect(method="HEAD")
    assert head.transport.out[9:12] == b"200" and site.registry.recordings == []
    benches = [await site.connect() for _ in range(5)]
    assert [bench.transport.out[9:12] for bench in benches] == [b"200"] * 4 + [b"503"]
    assert len(site.registry.recordings) == 4
