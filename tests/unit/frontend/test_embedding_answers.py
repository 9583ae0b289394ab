"""Answers to /v1/embeddings: long ones are sent in pieces, as fast as the client reads them."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest
from test_request import Site, turn

from dynamo.frontend.apis.embeddings import EmbeddingRoutes
from dynamo.protocols.codec import encode, plain_decode, tokens
from dynamo.protocols.engine import PreprocessedRequest

INPUTS, LENGTH = 300, 1024
VECTORS = [array("f", [number / 7] * LENGTH) for number in range(INPUTS)]


class EmbeddingSite(Site):
    payload = b""

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        self.payload = payload
        return super().open(
            worker_id, encode(PreprocessedRequest("tiny", tokens([1]))), sink, headers
        )


@pytest.fixture
async def site() -> EmbeddingSite:
    site = EmbeddingSite()
    site.entry.card = type("Card", (), {"lora_name": None, "checksum": ""})()
    EmbeddingRoutes(site.active, site, site.tasks).install(site.routes)  # type: ignore[arg-type]
    return site


def ask(site: Site, inputs: int, **fields: Any) -> None:
    site.post({"model": "tiny", "input": [[1]] * inputs, **fields}, "/v1/embeddings")
    sink, vectors = site.streams[-1].sink, [one.tobytes() for one in VECTORS[:inputs]]
    sink.on_data(encode({"embeddings": vectors, "prompt_tokens": inputs}))
    sink.on_end()


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_a_long_answer_comes_in_pieces(site: Site, encoding: str) -> None:
    ask(site, INPUTS, encoding_format=encoding)
    before, turns = 0, 0
    while site.active.admitted:
        size = len(site.bench.transport.out)
        assert size - before < 2 << 20, "one piece in a turn"
        before, turns = size, turns + 1
        await turn()
    assert turns > 5 and site.status == 200
    for number, one in enumerate(site.answer["data"]):
        given = one["embedding"]
        if encoding == "base64":
            given = array("f", base64.b64decode(given)).tolist()
        assert one["index"] == number and given == VECTORS[number].tolist()
    assert site.answer["usage"] == {"prompt_tokens": INPUTS, "total_tokens": INPUTS}
    site.settled()


async def test_a_short_answer_is_one_body(site: Site) -> None:
    ask(site, 2)
    assert site.status == 200 and "content-length" in site.head
    assert json.loads(site.body)["data"][1]["embedding"] == VECTORS[1].tolist()
    site.settled()


async def test_a_client_that_reads_slowly(site: Site) -> None:
    ask(site, INPUTS)
    site.bench.connection.pause_writing()
    await turn()
    size = len(site.bench.transport.out)
    for _ in range(5):
        await turn()
    assert len(site.bench.transport.out) == size and site.active.admitted
    site.bench.connection.resume_writing()
    while site.active.admitted:
        await turn()
    assert len(site.answer["data"]) == INPUTS
    site.settled()


async def test_a_client_that_leaves(site: Site) -> None:
    ask(site, INPUTS)
    await turn()
    site.bench.connection.connection_lost(None)
    await turn()
    assert not site.active.admitted
    site.settled()


async def test_the_worker_gets_rank_and_tenant(site: EmbeddingSite) -> None:
    site.post({"model": "tiny", "input": "hi"}, "/v1/embeddings", x_tenant_id="T", x_dp_rank="1")
    routing = plain_decode(site.payload)["routing"]
    assert routing["dp_rank"] == 1
    assert routing["cache_namespace"] and len(site.routings) == 1
    assert routing["cache_namespace"] == site.routings[0].cache_namespace
