"""The same request to two servers, and what must be equal in their answers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from servers_kit import EngineDeployment

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_SUBJECTS = (
    "The river",
    "A small dog",
    "Über uns",
    "def main():",
    "SELECT name",
    "价格是",
    "Привет",
)
_ACTIONS = ("runs through", "said to the", "= [x for x in", "😀 und", "\n\n  return", "does not")
_OBJECTS = ("the old town.", "42, 43 and 44", "<b>bold</b>", "naïve café", "router", "天气很好。")


def prompts(count: int = 50) -> list[str]:
    """``count`` different texts in several languages, from a few to some hundred tokens."""
    chosen = random.Random(50)
    found = []
    for number in range(count):
        sentences = [
            f"{chosen.choice(_SUBJECTS)} {chosen.choice(_ACTIONS)} {chosen.choice(_OBJECTS)}"
            for _ in range(1 + number % 10)
        ]
        found.append(f"{number}. " + " ".join(sentences))
    return found


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request of one message; greedy unless ``fields`` say otherwise."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def completion(text: str | list[int], **fields: Any) -> dict[str, Any]:
    """A text completion; greedy unless ``fields`` say otherwise."""
    return {"prompt": text, "temperature": 0, "max_tokens": 24, **fields}


def ask(server: EngineDeployment, path: str, body: dict[str, Any]) -> list[Any]:
    """Every choice and the usage of the answer, in the form that :func:`assert_equal` compares."""
    answer = server.post(path, _sent(server, body))
    choices = [_choice(server, choice) for choice in answer["choices"]]
    return [*sorted(choices, key=_index), _usage(answer["usage"])]


def ask_streamed(server: EngineDeployment, path: str, body: dict[str, Any]) -> list[Any]:
    """As :func:`ask`, put together from a stream."""
    body = {**body, "stream_options": {"include_usage": True}}
    events = server.stream(path, _sent(server, body))
    assert events[-1]["choices"] == []
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    joined = [_joined(server, index, chunks) for index, chunks in sorted(parts.items())]
    return [*joined, _usage(events[-1]["usage"])]


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Compare two answers; log probabilities may differ by rounding."""
    if isinstance(theirs, dict):
        same = isinstance(ours, dict) and sorted(ours) == sorted(theirs)
        assert same, f"{where}: {ours} instead of {theirs}"
        for key, value in theirs.items():
            assert_equal(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), f"{where}: {ours} instead of {theirs}"
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"{where}[{number}]")
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, abs_tol=2e-3), f"{where}: {ours} instead of {theirs}"
    else:
        assert ours == theirs, f"{where}: {ours!r} instead of {theirs!r}"


def _sent(server: EngineDeployment, body: dict[str, Any]) -> dict[str, Any]:
    """VLLM shows a token that is part of a character as the text that it completes, so it is
    asked for ids; see :func:`_name`."""
    return body if server.tokenizer is None else {**body, "return_tokens_as_token_ids": True}


def _index(choice: dict[str, Any]) -> int:
    index: int = choice["index"]
    return index


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _choice(server: EngineDeployment, choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "index": choice["index"],
        "text": text,
        "finish_reason": choice["finish_reason"],
        "logprobs": _logprobs(server, [choice["logprobs"]]),
    }


def _joined(server: EngineDeployment, index: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [each["delta"].get("content") if "delta" in each else each["text"] for each in chunks]
    reasons = [each["finish_reason"] for each in chunks if each.get("finish_reason")]
    assert len(reasons) == 1 and chunks[-1]["finish_reason"] == reasons[0]
    return {
        "index": index,
        "text": "".join(text or "" for text in texts),
        "finish_reason": reasons[0],
        "logprobs": _logprobs(server, [each.get("logprobs") for each in chunks]),
    }


def _logprobs(server: EngineDeployment, parts: Iterable[dict[str, Any] | None]) -> list[Any]:
    """One entry a token: its text, its log probability, the alternatives by text."""
    found: list[Any] = []
    tops: list[Any]
    for part in parts:
        if part is None:
            continue
        if "content" in part:
            for entry in part["content"] or ():
                tops = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
                found.append(_token(server, entry["token"], entry["logprob"], tops))
        else:
            tops = [list((each or {}).items()) for each in part["top_logprobs"]]
            for row in zip(part["tokens"], part["token_logprobs"], tops, strict=True):
                found.append(_token(server, *row))
    return found


def _token(server: EngineDeployment, token: str, logprob: float | None, tops: list[Any]) -> Any:
    named = {_name(server, each): value for each, value in tops}
    return [_name(server, token), logprob, named]


def _name(server: EngineDeployment, token: str) -> str:
    if server.tokenizer is None:
        return token
    return server.tokenizer.token_text(int(token.removeprefix("token_id:")))


def assert_same(
    ours: EngineDeployment, theirs: EngineDeployment, path: str, body: dict[str, Any]
) -> list[Any]:
    """Send ``body`` to both, streamed and not; return our answer after comparing them."""
    mine, other = ask(ours, path, body), ask(theirs, path, body)
    assert_equal(mine, other, f"{path} {body}")
    streamed = ask_streamed(ours, path, body)
    assert_equal(streamed, ask_streamed(theirs, path, body), f"{path} streamed {body}")
    return mine
