"""Answers of pooling models: long ones are sent in pieces, as fast as the client reads them."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest
from test_request import Site, turn
from text_kit import card

from dynamo.errors import EngineFailure
from dynamo.frontend.answer.pooling import (
    ClassifyAnswer,
    PoolingAnswer,
    PoolingOrigin,
    RerankAnswer,
    ScoreAnswer,
    VectorsAnswer,
)
from dynamo.frontend.apis.pooling.route import PoolingRoutes
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
    site.entry.card = card(display_name="tiny")
    PoolingRoutes(site.active, site, site.tasks).install(site.routes)  # type: ignore[arg-type]
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


def answered(answer: PoolingAnswer, *vectors: list[float], rows: list[int] | None = None) -> Any:
    raw = [array("f", vector).tobytes() for vector in vectors]
    answer.receive(encode({"embeddings": raw, "prompt_tokens": 5, "row_sizes": rows or []}))
    return json.loads(b"".join(answer.pieces()))


def test_the_best_documents_come_first_and_equal_ones_in_their_order() -> None:
    texts = ["a", "b", "c", "d"]
    body = answered(
        RerankAnswer(PoolingOrigin("m", 4, 9, "rerank-1"), texts, 3), [1], [2], [2], [-5]
    )
    assert [(row["index"], row["document"]) for row in body["results"]] == [
        (1, {"text": "b"}),
        (2, {"text": "c"}),
        (0, {"text": "a"}),
    ]
    assert body["id"] == "rerank-1" and body["usage"]["prompt_tokens"] == 5
    bare = answered(RerankAnswer(PoolingOrigin("m", 1, 9), None, 0), [1])
    assert bare["results"] == [{"index": 0, "relevance_score": 1.0}]


@pytest.mark.parametrize("vectors", [[[1.0]], [[1.0], [1.0, 2.0]], [[1.0], []]])
def test_a_worker_that_sends_no_score_for_a_pair(vectors: list[list[float]]) -> None:
    with pytest.raises(EngineFailure):
        answered(ScoreAnswer(PoolingOrigin("m", 2, 9)), *vectors)


def test_the_class_without_a_name_is_null() -> None:
    (named, none) = answered(
        ClassifyAnswer(PoolingOrigin("m", 2, 9), ["no"]), [0.75, 0.25], [0.25, 0.75]
    )["data"]
    assert (named["label"], none["label"]) == ("no", None)
    assert named["probs"] == [0.75, 0.25] and none["num_classes"] == 2


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_vectors_of_tokens_are_sent_in_pieces(encoding: str) -> None:
    width, height = 100, 3000
    numbers = [float(number % 977) for number in range(width * height)]
    answer = VectorsAnswer(PoolingOrigin("m", 2, 9), encoding == "base64")
    raw = [array("f", numbers).tobytes(), array("f", [1, 2]).tobytes()]
    answer.receive(encode({"embeddings": raw, "row_sizes": [width, 1]}))
    assert not answer.is_short
    pieces = list(answer.pieces())
    assert len(pieces) > 5 and max(map(len, pieces)) < 1 << 20
    first, second = json.loads(b"".join(pieces))["data"]
    if encoding == "base64":
        assert array("f", base64.b64decode(first["data"])).tolist() == numbers
        return
    assert first["data"][1] == numbers[width : 2 * width] and len(first["data"]) == height
    assert second["data"] == [[1.0], [2.0]]


@pytest.mark.parametrize("rows", [[3, 1], [2], [0, 1]])
def test_rows_that_do_not_fit(rows: list[int]) -> None:
    with pytest.raises(EngineFailure):
        answered(VectorsAnswer(PoolingOrigin("m", 2, 9), False), [1, 2], [1], rows=rows)


def test_long_documents_make_a_long_answer() -> None:
    texts = ["x" * 100_000 for _ in range(40)]
    answer = RerankAnswer(PoolingOrigin("m", 40, 9), texts, 0)
    answered(answer, *[[1.0]] * 40)
    assert not answer.is_short and len(list(answer.pieces())) > 2
