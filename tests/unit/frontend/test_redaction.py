"""What is replaced in recorded bodies and answers, however it is written or cut into chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo.frontend.requests.redaction import cleaned_answer, cleaned_body
from dynamo.http.api_keys import new_key

BASIC = "bWU6aHVudGVyMg=="
KIND = "RSA PRIVATE KEY"
PEM = f"-----BEGIN {KIND}-----\nProc-Type: 4,ENCRYPTED\n\nMIIEow+/=\n-----END {KIND}-----"
KEYS = [
    "sk-proj-0123456789abcdefghij",
    "hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "github_pat_0123456789abcdefghij_ABCDEFGHIJ",
    "AKIA0123456789ABCDEF",
    "eyJhbGciOiJIUzI1NiIsInR5.eyJzdWIiOiIxMjM0NTY3.SflKxwRJSMeKKF2QT4",
    "Bearer abcdefghijklmnop12345",
    "BEARER abcdefghijklmnop12345",
    f"basic {BASIC}",
    f"dyn-{'Ab3_' * 10}xyz",
    PEM,
]
VALUES: list[Any] = [
    "a b c",
    'pass"word',
    "end\\",
    "\u00e4\u00f6",
    1234567,
    1.5,
    ["x1", "x2"],
    "€\n'",
]
NAMES = [
    *("password", "DB_PASSWORD", "passwd", "private_key", "clientSecret", "Authorization"),
    *("proxy-authorization", "X-Api-Key", "api key", "access_token", "aws_secret_access_key"),
    *("Set-Cookie", "credentials", "passphrase", "sshKey", "refreshToken"),
]


def body_of(value: Any) -> Any:
    return json.loads(cleaned_body(json.dumps(value).encode()))


def test_keys_of_this_kind_are_replaced() -> None:
    assert body_of([new_key()]) == ["[redacted]"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_found_behind_anything_but_a_letter(key: str) -> None:
    for before in ("use (", "A=1\n", "\t", "\r\n", '"', "KEY=", "\u00e4", "\x1b[31m", "%20"):
        found = body_of({"messages": [{"role": "user", "content": f"{before}{key}) ok"}]})
        assert found["messages"][0]["content"] == f"{before}[redacted]) ok", before


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_key_is_found_in_json_within_json(key: str, ascii_only: bool) -> None:
    text = f"A=1\n{key}\n\u00e4"
    for _ in range(4):
        text = json.dumps({"a": text}, ensure_ascii=ascii_only)
        for given in (text, text[:-1], f"see {text}"):  # also where it is not JSON
            (cleaned,) = body_of([given])
            assert key.split("\n")[0] not in cleaned and key[-12:] not in cleaned
            assert "[redacted]" in cleaned


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_secret_name_is_replaced_whatever_it_is(name: str) -> None:
    for value in VALUES:
        redacted = ["[redacted]"] * 2 if isinstance(value, list) else "[redacted]"
        fields, wanted = {name: value, "user": "me"}, {name: redacted, "user": "me"}
        assert body_of(fields) == wanted
        assert json.loads(body_of([json.dumps(fields)])[0]) == wanted
        if not isinstance(value, list):
            text = f"{json.dumps(fields)} is it, also {json.dumps(json.dumps(fields))}"
            (cleaned,) = body_of([text])
            assert json.dumps(value).strip('"') not in cleaned, value
            assert cleaned.count("[redacted]") == 2 and cleaned.count("me") == 2, value


def test_headers_settings_and_addresses_in_a_text_are_replaced() -> None:
    for text, wanted in (
        ("Authorization: Token x=y, z\nHost: a", "Authorization: [redacted]\nHost: a"),
        ("-H 'x-api-key: abcdef123'", "-H 'x-api-key: [redacted]'"),
        ("OPENAI_API_KEY=abc PASSWORD='a b'", "OPENAI_API_KEY=[redacted] PASSWORD='[redacted]'"),
        ("{'password': 'a\\'b', 'n': 1}", "{'password': '[redacted]', 'n': 1}"),
        (
            "postgres://me:pa:ss@db/x?token=abc&n=1",
            "postgres://[redacted]@db/x?token=[redacted]&n=1",
        ),
    ):
        assert body_of([text]) == [wanted]
    named = {"name": "Authorization", "value": "x"}
    assert body_of([named, ["Cookie", "a=b"]]) == [
        {"name": "Authorization", "value": "[redacted]"},
        ["Cookie", "[redacted]"],
    ]


def test_other_texts_and_schemas_stay() -> None:
    schema = {"type": "object", "properties": {"password": {"type": "string", "title": "The one"}}}
    body = {
        "max_tokens": 5,
        "tools": [{"function": {"parameters": {**schema, "required": ["password", "user"]}}}],
        "prompt": [1, 2, 3],
        "stop_token_ids": [1],
        "password": None,
        "messages": [
            "skip-level task-force, hf_short, a bearer of news and the password is long",
            "basic understandings, api_key: str = None, secrets: none; max_tokens: 5 \u0130stanbul",
        ],
    }
    assert body_of(body) == body
    assert cleaned_body(b"\xff") == "\ufffd" and cleaned_body(b"") == ""
    assert cleaned_body(b'{"a":"\\u0073k-proj-0123456789abcdef"') == '{"a":"[redacted]"'
    deep = b"[" * 100_000
    assert cleaned_body(deep).encode() == deep


def chunks(text: str, seed: int) -> Iterator[str]:
    random_ = random.Random(seed)
    while text:
        size = random_.randint(1, 9)
        yield text[:size]
        text = text[size:]


def chat(index: int, piece: str) -> dict[str, Any]:
    logprobs = {"content": [{"token": piece, "bytes": [*piece.encode()], "top_logprobs": []}]}
    choice = {"index": index, "delta": {"content": piece}, "logprobs": logprobs}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def arguments(index: int, piece: str) -> dict[str, Any]:
    call = {"index": index, "function": {"arguments": piece}}
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}


def message(index: int, piece: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"partial_json": piece}}


def response(index: int, piece: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": index, "delta": piece}


def completion(index: int, piece: str) -> dict[str, Any]:
    logprobs = {"tokens": [piece], "top_logprobs": [{piece: -0.1}]}
    return {"choices": [{"index": index, "text": piece, "logprobs": logprobs, "token_ids": [5]}]}


@pytest.mark.parametrize("event", [chat, arguments, message, response, completion])
@pytest.mark.parametrize("secret", [*KEYS[:5], PEM, json.dumps({"password": 'a"b', "user": "me"})])
def test_a_secret_split_over_the_chunks_of_a_choice_is_replaced(event: Any, secret: str) -> None:
    lone = secret.startswith("{")
    text = secret if lone else f"use {secret} please"
    for seed in range(5):
        split = [[*chunks(text, seed)], [*chunks(text, seed + 100)]]
        events = [
            event(index, parts[number])
            for number in range(max(map(len, split)))
            for index, parts in enumerate(split)
            if number < len(parts)
        ]
        stream = "".join(f"event: x\ndata: {json.dumps(one)}\n\n" for one in events)
        cleaned = cleaned_answer(f"{stream}data: [DONE]\n\n".encode())
        found = [json.loads(line[6:]) for line in cleaned.split("\n") if line.startswith("data: {")]
        assert len(found) == len(events) and cleaned.endswith("data: [DONE]\n\n")
        texts = ["", ""]
        for position, one in enumerate(found):
            index = next(
                i for i in (0, 1) if event(i, "").keys() and same(events[position], event, i)
            )
            texts[index] += piece_of(one)
        wanted = '{"password":"[redacted]","user":"me"}' if lone else "use [redacted] please"
        assert texts == [wanted, wanted]
        assert (
            all(secret[at : at + 9] not in cleaned for at in range(0, len(secret) - 9, 3)) or lone
        )


def same(given: dict[str, Any], event: Any, index: int) -> bool:
    return bool(event(index, piece_of(given)) == given)


def piece_of(event: dict[str, Any]) -> str:
    """The text of an event of any of the APIs."""
    if "choices" not in event:
        delta = event["delta"]
        return str(delta if isinstance(delta, str) else delta["partial_json"])
    (choice,) = event["choices"]
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    return str(
        delta["content"] if "content" in delta else delta["tool_calls"][0]["function"]["arguments"]
    )


def test_the_last_event_of_a_stream_that_was_cut_is_left_out() -> None:
    whole = f"data: {json.dumps(chat(0, 'use sk-proj-01234'))}\n\n"
    cut = json.dumps(chat(0, "56789abcdefghij"))[:-3]
    cleaned = cleaned_answer(f"{whole}data: {cut}".encode())
    assert "01234" not in cleaned and "56789" not in cleaned
    assert cleaned.endswith("data: [left out]")


def test_tokens_of_an_answer_are_left_out() -> None:
    answer = {
        "choices": [{"message": {"content": "hi"}, "logprobs": {"content": [{"token": "h"}]}}]
    }
    found = json.loads(cleaned_answer(json.dumps(answer).encode()))
    assert found["choices"] == [{"message": {"content": "hi"}, "logprobs": "[left out]"}]
