"""The pooling APIs over small BERT models: the numbers of vLLM's own server."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bert_kit import CONTEXT, LABELS, write_bert
from servers_kit import AttachedEngine, EngineDeployment, closing

BERT = ("--runner", "pooling", "--max-model-len", str(CONTEXT))
QUERY = "what is the capital of france?"
DOCUMENTS = [
    "the capital of france is paris.",
    "berlin is a city in germany",
    "the art of music",
    "a dog and a cat",
]
LONG = "the river in the country and " * 40
PAIRS: list[dict[str, Any]] = [
    {"text_1": QUERY, "text_2": DOCUMENTS[0]},
    {"queries": QUERY, "documents": DOCUMENTS},
    {"queries": [QUERY, "which bird"], "items": ["paris", "a bird in the tree"]},
    {"data_1": QUERY, "data_2": ["", "paris"]},
    {"text_1": QUERY, "text_2": [LONG, "paris"], "truncate_prompt_tokens": 20},
    {"text_1": "a " * 70_000, "text_2": ["paris", "the dog"], "truncate_prompt_tokens": 20},
    {"text_1": LONG, "text_2": [LONG, "paris"], "truncate_prompt_tokens": -1},
    {"text_1": QUERY, "text_2": LONG, "truncate_prompt_tokens": 20, "truncation_side": "left"},
    {"text_1": QUERY, "text_2": [LONG, "paris"], "max_tokens_per_doc": 7},
    {"text_1": LONG, "text_2": DOCUMENTS, "max_tokens_per_query": 9},
    {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False},
]


TEMPLATE = """<|im_start|>system
Answer yes or no.<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction | default("Find what answers the query") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
<|im_end|>
<|im_start|>assistant
"""
OVERRIDES = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["a", "b"],
    "method": "from_2_way_softmax",
}
RERANKER = ("--runner", "pooling", "--hf-overrides", json.dumps(OVERRIDES))
CUT = {"truncate_prompt_tokens": 20}


class Side:
    """A model, behind our worker and behind vLLM's server."""

    def __init__(self, ours: EngineDeployment, theirs: EngineDeployment) -> None:
        self.ours = ours
        self.theirs = theirs

    def both(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.ours.post(path, {"model": "m", **body}), self.theirs.post(
            path, {"model": "m", **body}
        )

    def refused(self, path: str, body: dict[str, Any], status: int, text: str) -> None:
        got, _, answer = self.ours.request("POST", path, {"model": "m", **body})
        assert got == status and text in json.loads(answer)["error"]["message"], answer


def deployed(
    directory: Path, model: Path, *flags: str, template: Path | None = None
) -> Iterator[Side]:
    """``template`` is one for scores, whose flag has another name on vLLM's server."""
    with (
        closing(EngineDeployment(directory / "ours")) as ours,
        closing(EngineDeployment(directory / "theirs")) as theirs,
    ):
        given = () if template is None else (str(template),)
        ours.frontend("--router-mode", "kv")
        ours.worker(model, "m", *flags, *(("--custom-jinja-template", *given) if given else ()))
        theirs.vllm_server(model, "m", *flags, *(("--chat-template", *given) if given else ()))
        ours.wait_for_models("m")
        theirs.wait_for_models("m")
        yield Side(ours, theirs)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    directory = tmp_path_factory.mktemp("reranker")
    yield from deployed(directory, write_bert(directory / "model", ("LABEL_0",)), *BERT)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    directory = tmp_path_factory.mktemp("classifier")
    yield from deployed(directory, write_bert(directory / "model", LABELS), *BERT)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    directory = tmp_path_factory.mktemp("embedder")
    yield from deployed(directory, write_bert(directory / "model"), *BERT)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    directory = tmp_path_factory.mktemp("late")
    flags = *BERT, "--pooler-config", '{"task": "token_embed"}'
    yield from deployed(directory, write_bert(directory / "model"), *flags)


@pytest.fixture(scope="module", params=["template", "joined"])
def generator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Side]:
    """A generating model that is a classifier of two of its tokens, as Qwen3-Reranker."""
    directory = tmp_path_factory.mktemp("generator")
    template = directory / "score.jinja"
    template.write_text(TEMPLATE)
    given = template if request.param == "template" else None
    yield from deployed(directory, tiny_model, *RERANKER, template=given)


def same_usage(mine: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("prompt_tokens", "total_tokens"):
        assert mine["usage"][name] == other["usage"][name]


def same_scores(mine: dict[str, Any], other: dict[str, Any]) -> list[float]:
    scores = [row["score"] for row in mine["data"]]
    assert scores == pytest.approx([row["score"] for row in other["data"]], abs=1e-5)
    assert [row["index"] for row in mine["data"]] == [row["index"] for row in other["data"]]
    same_usage(mine, other)
    return scores


def same_ranks(mine: dict[str, Any], other: dict[str, Any]) -> None:
    for row, expected in zip(mine["results"], other["results"], strict=True):
        assert row["index"] == expected["index"]
        assert row["document"]["text"] == expected["document"]["text"]
        assert row["relevance_score"] == pytest.approx(expected["relevance_score"], abs=1e-5)
    same_usage(mine, other)


@pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: " ".join(pairs))
def test_a_cross_encoder_scores_as_vllm(pairs: dict[str, Any], reranker: Side) -> None:
    scores = same_scores(*reranker.both("/v1/score", pairs))
    # Else a model that ignores its texts would pass.
    assert len(scores) == 1 or max(scores) - min(scores) > 1e-4, scores


@pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: " ".join(pairs))
def test_an_embedder_scores_as_vllm(pairs: dict[str, Any], embedder: Side) -> None:
    same_scores(*embedder.both("/v1/score", pairs))


@pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: " ".join(pairs))
def test_late_interaction_scores_as_vllm(pairs: dict[str, Any], late: Side) -> None:
    mine, other = late.both("/v1/score", pairs)
    scores = [row["score"] for row in mine["data"]]
    assert scores == pytest.approx([row["score"] for row in other["data"]], rel=1e-5)


@pytest.mark.parametrize("pairs", PAIRS, ids=lambda pairs: " ".join(pairs))
def test_a_generating_model_scores_as_vllm(pairs: dict[str, Any], generator: Side) -> None:
    mine, other = generator.both("/v1/score", pairs)
    same_scores(mine, other)


def test_an_instruction(generator: Side, request: pytest.FixtureRequest) -> None:
    pair = {"query": QUERY, "documents": DOCUMENTS}
    for more in (
        {"instruction": "Be kind"},
        {"chat_template_kwargs": {"instruction": "Be short"}, "instruction": "Be kind"},
    ):
        if "joined" in request.node.name:
            generator.refused("/v1/rerank", {**pair, **more}, 400, "need a template for scores")
            continue
        plain, mine = (generator.ours.post("/v1/rerank", {"model": "m", **pair, **fields})
                       for fields in ({}, more))  # fmt: skip
        assert plain["usage"] != mine["usage"]
        same_ranks(*generator.both("/v1/rerank", {**pair, **more}))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("top_n", [None, 2, 99])
def test_rerank(path: str, top_n: int | None, reranker: Side) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
    if top_n is not None:
        body["top_n"] = top_n
    mine, other = reranker.both(path, body)
    assert len(mine["results"]) == min(top_n or 99, len(DOCUMENTS))
    same_ranks(mine, other)


def test_rerank_as_jina_and_cohere_ask(reranker: Side) -> None:
    objects = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS]}
    plain = reranker.ours.post("/v1/rerank", {"model": "m", **objects, "documents": DOCUMENTS})
    jina = reranker.ours.post("/v1/rerank", {"model": "m", **objects, "return_documents": False})
    assert [row["index"] for row in jina["results"]] == [row["index"] for row in plain["results"]]
    assert all("document" not in row for row in jina["results"])


@pytest.mark.parametrize("given", [QUERY, DOCUMENTS, [2, 60, 61, 3], [[2, 60, 3], [2, 71, 3]]])
def test_classify(given: Any, classifier: Side) -> None:
    mine, other = classifier.both("/classify", {"input": given})
    for row, expected in zip(mine["data"], other["data"], strict=True):
        assert row["probs"] == pytest.approx(expected["probs"], abs=1e-5)
        assert row["label"] == expected["label"] and row["label"] in LABELS
        assert row["num_classes"] == expected["num_classes"] == len(LABELS)
    same_usage(mine, other)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_pooling(encoding: str, classifier: Side, embedder: Side, late: Side) -> None:
    for side in (classifier, embedder, late):
        body = {"input": [QUERY, LONG], "encoding_format": encoding, "truncate_prompt_tokens": 16}
        mine, other = side.both("/pooling", body)
        for row, expected in zip(mine["data"], other["data"], strict=True):
            values = [each["data"] for each in (row, expected)]
            if encoding == "base64":
                values = [array("f", base64.b64decode(value)).tolist() for value in values]
            elif side is late:
                assert len(values[0]) == len(values[1]) > 1
                values = [[number for row in value for number in row] for value in values]
            assert values[0] == pytest.approx(values[1], abs=1e-5)
        same_usage(mine, other)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("limit", [1, 2, 9, -1])
def test_embeddings_of_texts_that_are_cut(side: str | None, limit: int, embedder: Side) -> None:
    body = {"input": [LONG, "paris"], "truncate_prompt_tokens": limit}
    mine, other = embedder.both(
        "/v1/embeddings", body | ({"truncation_side": side} if side else {})
    )
    for row, expected in zip(mine["data"], other["data"], strict=True):
        assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-5)
    same_usage(mine, other)


def test_a_model_says_what_it_has(reranker: Side, classifier: Side, embedder: Side) -> None:
    pair = {"query": QUERY, "documents": DOCUMENTS}
    classifier.refused("/v1/rerank", pair, 404, "has no /v1/rerank or /v1/score, it has /classify")
    classifier.refused("/v1/embeddings", {"input": "a"}, 404, "has no /v1/embeddings")
    embedder.refused("/classify", {"input": "a"}, 404, "has no /classify, it has /pooling, /v1/emb")
    reranker.refused("/v1/embeddings", {"input": "a"}, 404, "it has /classify, /pooling, /v1/rer")
    reranker.refused(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}]},
        404,
        "has no /v1/chat",
    )
    embedder.refused("/pooling", {"input": "a", "task": "classify"}, 400, "computes 'embed'")
    embedder.refused("/v1/embeddings", {"input": "a", "dimensions": 8}, 400, "dimensions")


def test_faults_name_the_field(reranker: Side) -> None:
    pair = {"query": QUERY, "documents": DOCUMENTS}
    for more, text in (
        ({"documents": []}, "at least one text"),
        ({"documents": [{"image": "x"}]}, "'documents' takes texts"),
        ({"documents": ["a"] * 2049}, "at most 2048 documents in a request, got 2049"),
        ({"documents": [LONG]}, f"maximum context length is {CONTEXT} tokens"),
        ({"truncate_prompt_tokens": 129}, "'truncate_prompt_tokens' is 129"),
        ({"instruction": "be kind"}, "'instruction' and 'chat_template_kwargs' need a template"),
        ({"top_n": -1}, "top_n"),
        ({"rank_fields": ["a"]}, "rank_fields"),
    ):
        reranker.refused("/v1/rerank", {**pair, **more}, 400, text)
    reranker.refused("/score", {"text_1": "a"}, 400, "give the pairs as 'text_1' and 'text_2'")
    reranker.refused("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, 400, "2 first texts")


def test_an_attached_server(reranker: Side, tmp_path: Path) -> None:
    with closing(AttachedEngine(tmp_path / "attached", reranker.theirs)) as attached:
        attached.frontend()
        attached.attach("--poll-interval-secs", "0.1")
        attached.wait_for_models("m")
        both = Side(attached, reranker.theirs)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            same_ranks(*both.both(path, {"query": QUERY, "documents": DOCUMENTS}))
        same_scores(*both.both("/score", {"text_1": QUERY, "text_2": DOCUMENTS}))
        for path, name in (("/classify", "probs"), ("/pooling", "data")):
            relayed, direct = both.both(path, {"input": QUERY})
            assert relayed["data"][0][name] == pytest.approx(direct["data"][0][name], abs=1e-5)
        both.refused("/v1/embeddings", {"input": "a"}, 404, "has no /v1/embeddings")
        same_scores(*both.both("/v1/score", {"text_1": QUERY, "text_2": ["a " * 90_000]} | CUT))
