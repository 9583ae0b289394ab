"""Bodies of pooling APIs to token ids: pairs, chats, cuts, bounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from text_kit import EXAMPLE, card

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.pooling import inputs as module
from dynamo.frontend.apis.pooling.inputs import Inputs
from dynamo.frontend.apis.pooling.route import APIS
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.pooling import PoolingFacts, aliases, offered_path

API = {api.name: api for api in APIS}
CROSS = PoolingFacts(task="classify", scoring="cross-encoder", token_types=True)
JOINED = PoolingFacts(task="classify", scoring="cross-encoder", separates=False)
TWO = PoolingFacts(scoring="bi-encoder")
TEMPLATE = "{{ instruction | default('x') }}|{{ messages[0].content }}|{{ messages[1].content }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model with a form for two texts: its first token before, between and behind."""
    directory = tmp_path_factory.mktemp("pairs") / "model"
    shutil.copytree(EXAMPLE, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    mark = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    number = next(
        token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|im_start|>"
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, mark, second],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [number], "tokens": ["<|im_start|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def preprocessor(model: Path) -> Preprocessor:
    return Preprocessor(card(source_path=str(model), context_length=64))


def made(preprocessor: Preprocessor, facts: PoolingFacts, name: str, **fields: Any) -> Inputs:
    api = API[name]
    body = api.parse(json.dumps({"model": "m", **fields}).encode())
    inputs: Inputs = api.inputs(preprocessor, facts, body)
    return inputs


def test_two_texts_are_one_input(preprocessor: Preprocessor) -> None:
    encode = preprocessor.tokenizer.encode
    query, one, two = (encode(text).tolist() for text in ("which is it", "this", "that one"))
    (mark,) = encode("", True)
    inputs = made(
        preprocessor, CROSS, "rerank", query="which is it", documents=["this", {"text": "that one"}]
    )
    assert [ids.tolist() for ids in inputs.token_ids] == [
        [mark, *query, mark, *one],
        [mark, *query, mark, *two],
    ]
    begins = 2 + len(query)
    assert inputs.type_one_at == [begins, begins] and inputs.vectors == 2
    plain = PoolingFacts(task="classify", scoring="cross-encoder")
    assert made(preprocessor, plain, "rerank", query="a", documents=["b"]).type_one_at is None


def test_two_texts_are_two_inputs(preprocessor: Preprocessor) -> None:
    inputs = made(preprocessor, TWO, "score", text_1=["a b", "c"], text_2=["d", "e f g"])
    encode = preprocessor.tokenizer.encode
    assert inputs.token_ids == [encode(text, True) for text in ("a b", "c", "d", "e f g")]
    assert (inputs.queries, inputs.vectors, inputs.type_one_at) == (2, 2, None)
    assert len(inputs.joined) == sum(map(len, inputs.token_ids))


def test_two_texts_are_joined(preprocessor: Preprocessor) -> None:
    inputs = made(preprocessor, JOINED, "score", data_1="which ", data_2=["this", "that"])
    expected = [preprocessor.tokenizer.encode(text, True) for text in ("which this", "which that")]
    assert inputs.token_ids == expected


def test_two_texts_are_rendered(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "score.jinja"
    path.write_text(TEMPLATE)
    rendering = Preprocessor(
        card(source_path=str(model), context_length=64, custom_template_path=str(path))
    )
    for more, prompt in (
        ({}, "x|which|this"),
        ({"instruction": "y"}, "y|which|this"),
        ({"instruction": "y", "chat_template_kwargs": {"instruction": "z"}}, "z|which|this"),
    ):
        inputs = made(rendering, CROSS, "score", queries="which", items="this", **more)
        assert inputs.token_ids == [rendering.tokenizer.encode(prompt, True)]


def test_limits_of_each_text(preprocessor: Preprocessor) -> None:
    encode = preprocessor.tokenizer.encode
    text = "one two three four five six"
    for facts in (CROSS, TWO, JOINED):
        fields = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
        inputs = made(preprocessor, facts, "rerank", query=text, documents=[text], **fields)
        special = 0 if facts is JOINED else 2
        # The example's tokens are whole words here: what is cut is encoded to the same ids again.
        expected = [*encode(text)[:2], *encode(text)[:3]]
        count = sum(map(len, inputs.token_ids))
        assert count == len(expected) + special + (facts is JOINED)


@pytest.mark.parametrize(
    ("facts", "name", "fields", "text"),
    [
        (CROSS, "rerank", {"query": "a", "documents": []}, "at least one text"),
        (CROSS, "rerank", {"query": "a", "documents": ["b"] * 2049}, "2048 documents"),
        (CROSS, "rerank", {"query": ["a"], "documents": ["b"]}, "query: expected"),
        (CROSS, "rerank", {"query": "a", "documents": [{"image": "b"}]}, "'documents' takes texts"),
        (CROSS, "rerank", {"query": "a", "documents": ["b " * 99]}, "'documents' 0 has"),
        (CROSS, "rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "--custom-jinja"),
        (CROSS, "rerank", {"query": "a", "documents": ["b"], "wrong": 1}, "wrong"),
        (CROSS, "score", {"text_1": ["a", "b"], "text_2": "c"}, "2 first texts and 1 second"),
        (CROSS, "score", {"text_1": "a", "data_2": "c"}, "give the pairs as"),
        (PoolingFacts(), "score", {"text_1": "a", "text_2": "c"}, "cannot score texts"),
        (TWO, "embeddings", {"input": "a", "messages": [{}]}, "either 'input' or 'messages'"),
        (TWO, "embeddings", {}, "either 'input' or 'messages'"),
        (TWO, "embeddings", {"messages": []}, "'messages' and its entries cannot be empty"),
        (TWO, "embeddings", {"messages": [{"role": "user"}, [{}]]}, "not a mixture"),
        (TWO, "embeddings", {"input": "a", "truncate_prompt_tokens": 65}, "is 65, it must be -1"),
        (TWO, "embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "is 0, it must be -1"),
        (TWO, "embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side: invalid"),
        (TWO, "embeddings", {"input": "a", "endianness": "big"}, "endianness: invalid"),
        (TWO, "pooling", {"input": "a", "task": "classify"}, "computes 'embed'"),
    ],
)
def test_faults_name_the_field(
    preprocessor: Preprocessor, facts: PoolingFacts, name: str, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        made(preprocessor, facts, name, **fields)
    assert text in raised.value.message


@pytest.mark.parametrize("facts", [CROSS, TWO, JOINED])
def test_all_pairs_together_are_bounded(
    preprocessor: Preprocessor, facts: PoolingFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long first text counts with each pair, also one that is cut."""
    monkeypatch.setattr(module, "MAX_BATCH_TOKENS", 500)
    fields = {"query": "a " * 40, "truncate_prompt_tokens": 8}
    if facts is TWO:  # the first text is one input
        fields["query"] = "a " * 495
    assert made(preprocessor, facts, "rerank", documents=["b"], **fields).vectors == 1
    with pytest.raises(InvalidArgument, match="at most 500 tokens in all"):
        made(preprocessor, facts, "rerank", documents=["b"] * 20, **fields)


def test_an_input_that_is_cut_keeps_its_special_tokens(preprocessor: Preprocessor) -> None:
    (mark,) = preprocessor.tokenizer.encode("", True)
    content = preprocessor.tokenizer.encode("a b c d e f").tolist()
    for side, expected in ((None, [mark, *content[:3]]), ("left", content[-4:])):
        fields = {} if side is None else {"truncation_side": side}
        inputs = made(
            preprocessor, TWO, "embeddings", input="a b c d e f", truncate_prompt_tokens=4, **fields
        )
        assert inputs.token_ids[0].tolist() == expected
    left = PoolingFacts(truncates_left=True)
    inputs = made(preprocessor, left, "embeddings", input="a b c d e f", truncate_prompt_tokens=4)
    assert inputs.token_ids[0].tolist() == [mark, *content[-3:]]


def test_a_server_that_has_another_name_of_the_path() -> None:
    assert aliases("rerank")[0] == "/v1/rerank"
    assert offered_path("/v2/rerank", {"/v1/rerank", "/v1/score"}) == "/v1/rerank"
    assert offered_path("/score", {"/v1/rerank"}) is None
    assert offered_path("/v1/models", {"/v1/models"}) == "/v1/models"
    assert offered_path("/v1/other", {"/v1/rerank"}) is None
