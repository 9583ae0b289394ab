"""Fields that the graph sets or removes in requests, in every form that a request has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.errors import ConfigError
from dynamo.frontend.apis.messages.prompt import parse_messages
from dynamo.frontend.apis.pooling.route import APIS, EMBEDDINGS_API
from dynamo.frontend.apis.responses.prompt import parse_response
from dynamo.frontend.prompt.field_rules import FieldRules, check_rules, rewritten
from dynamo.frontend.prompt.validation import parse_chat, parse_completion

RULES = FieldRules(
    {"temperature": 0.6, "max_tokens": 50, "chat_template_kwargs": {"a": 1}}, ["top_k"]
)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def applied(parse: Any, body: dict[str, Any], rules: FieldRules = RULES) -> Any:
    request = parse(json.dumps(body).encode())
    rules.apply(request)
    return request


def test_a_chat_request() -> None:
    found = applied(parse_chat, {**CHAT, "top_k": 5})
    assert (found.temperature, found.top_k, found.max_tokens) == (0.6, None, 50)
    assert found.chat_template_kwargs == {"a": 1}
    own = applied(parse_chat, {**CHAT, "temperature": 0, "max_completion_tokens": 9})
    assert (own.temperature, own.max_tokens, own.max_completion_tokens) == (0, None, 9)


def test_other_apis() -> None:
    text = applied(parse_completion, {"model": "m", "prompt": "hi", "top_k": 5})
    assert (text.temperature, text.top_k, text.max_tokens) == (0.6, None, 50)
    message = applied(parse_messages, {**CHAT, "max_tokens": 7, "top_k": 5})
    assert (message.temperature, message.top_k, message.max_tokens) == (0.6, None, 7)
    response = applied(parse_response, {"model": "m", "input": "hi"})
    assert (response.temperature, response.max_tokens) == (0.6, 50)
    assert response.origin.echo["temperature"] == 0.6
    assert response.origin.echo["max_output_tokens"] == 50


def test_pooling_apis_get_the_fields_that_they_have() -> None:
    rules = FieldRules(
        {"dimensions": 64, "use_activation": False, "temperature": 0.6},
        ["top_k", "truncate_prompt_tokens", "documents"],
    )
    text = applied(EMBEDDINGS_API.parse, {"input": "hi", "truncate_prompt_tokens": 3}, rules)
    assert (text.dimensions, text.use_activation, text.truncate_prompt_tokens) == (64, False, None)
    rerank = next(api for api in APIS if api.name == "rerank")
    body = {"query": "hi", "documents": ["ho"], "use_activation": True}
    pairs = applied(rerank.parse, body, rules)
    assert (pairs.use_activation, pairs.documents) == (True, ["ho"])
    relayed = json.loads(rewritten("/v2/rerank", json.dumps(body).encode(), "m", rules))
    assert relayed == body
    body = {"input": ["hi"], "encoding_format": "base64"}
    forbidding = FieldRules({}, ["encoding_format", "documents"])
    assert (
        json.loads(rewritten("/v1/embeddings", json.dumps(body).encode(), "m", forbidding)) == body
    )
    check_rules({"dimensions": 64}, ["use_activation"])
    with pytest.raises(ConfigError, match="dimensions"):
        check_rules({"dimensions": 0}, [])


def test_a_response_shows_no_field_that_is_forbidden() -> None:
    body = {"model": "m", "input": "hi", "temperature": 2, "max_output_tokens": 9}
    found = applied(parse_response, body, FieldRules({}, ["temperature", "max_tokens"]))
    assert (found.temperature, found.max_tokens) == (None, None)
    assert (found.origin.echo["temperature"], found.origin.echo["max_output_tokens"]) == (1.0, None)


def test_a_field_that_is_forbidden_and_has_a_default_is_the_graphs() -> None:
    rules = FieldRules({"temperature": 0.6}, ["temperature"])
    assert applied(parse_chat, {**CHAT, "temperature": 2}, rules).temperature == 0.6


def test_a_field_of_one_kind_alone() -> None:
    rules = FieldRules({"logprobs": True}, [])
    assert applied(parse_chat, CHAT, rules).logprobs is True
    assert applied(parse_completion, {"model": "m", "prompt": "hi"}, rules).logprobs is None


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [], "top_k": 3, "odd": [1]},
            {"messages": [], "odd": [1], "temperature": 0.6, "max_tokens": 50},
        ),
        ("/v1/chat/completions", {"temperature": None}, {"temperature": 0.6, "max_tokens": 50}),
        (
            "/v1/responses",
            {"input": ""},
            {"input": "", "temperature": 0.6, "max_output_tokens": 50},
        ),
        ("/v1/messages", {"max_tokens": 3}, {"max_tokens": 3, "temperature": 0.6}),
        ("/v1/completions", {"prompt": ""}, {"prompt": "", "temperature": 0.6, "max_tokens": 50}),
        (
            "/v1/embeddings",
            {"input": "", "top_k": 3},
            {"input": "", "chat_template_kwargs": {"a": 1}},
        ),
        ("/v1/audio/speech", {"input": "", "top_k": 3}, {"input": "", "top_k": 3}),
    ],
)
def test_a_body_that_is_relayed(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    given = json.dumps({"model": "alias", **body}).encode()
    found = json.loads(rewritten(path, given, "name", RULES))
    if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert found.pop("chat_template_kwargs") == {"a": 1}
    assert found == {"model": "name", **expected}


def test_a_body_that_is_no_object_or_names_no_model_is_not_touched() -> None:
    assert rewritten("/v1/chat/completions", b"[1, 2]", "name", RULES) == b"[1, 2]"
    assert rewritten("/v1/chat/completions", b"{", "name", RULES) == b"{"
    assert json.loads(rewritten("/v1/voices", b'{"a": 1}', "name", None)) == {"a": 1}


@pytest.mark.parametrize(
    ("defaults", "forbid", "text"),
    [
        ({"temprature": 1}, [], "defaults: temprature is not a field"),
        ({}, ["top-k"], "forbid: top-k is not a field"),
        ({"temperature": 3}, [], "defaults: Expected `float` <= 2.0 - at `$.temperature`"),
        ({"stop": [""]}, [], "'stop' strings cannot be empty"),
    ],
)
def test_rules_are_checked(defaults: dict[str, Any], forbid: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match="ServiceArgs") as error:
        check_rules(defaults, forbid)
    assert text in error.value.message


def test_right_rules_pass() -> None:
    check_rules({"temperature": 0.6, "logprobs": True, "suffix": "x"}, ["top_k", "echo"])


@pytest.mark.parametrize(
    "path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"]
)
def test_paths_that_count_a_prompt_get_its_fields(path: str) -> None:
    rules = FieldRules(
        {"temperature": 1, "chat_template_kwargs": {"a": 1}}, ["tools", "max_tokens"]
    )
    body = {"model": "m", "messages": [], "tools": [{}]}
    found = json.loads(rewritten(path, json.dumps(body).encode(), "m", rules))
    assert found == {"model": "m", "messages": [], "chat_template_kwargs": {"a": 1}}
