"""OpenAI chunks to the one body that a client gets without ``stream``.

Deltas of a choice are joined: texts and lists of log probabilities are appended, tool calls are
merged by their index, and the last value of everything else counts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ChunkFold"]

_BODY_OBJECTS = {"chat.completion.chunk": "chat.completion"}


class ChunkFold:
    """Add each chunk, then take :meth:`body`. An item without ``choices`` replaces the body."""

    __slots__ = ("_body", "_choices")

    def __init__(self) -> None:
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """Join a chunk to those before it. O(its size)."""
        choices = chunk.get("choices")
        body = self._body
        for name, value in chunk.items():
            # The first chunk gives id, created and model; a later one may give what it lacks.
            newer = name == "usage" and value is not None
            if newer or (name != "choices" and body.get(name) is None):
                body[name] = value
        if not isinstance(choices, list):
            return
        for choice in choices:
            if isinstance(choice, dict):
                index = choice.get("index", 0)
                joined = self._choices.setdefault(index, {"index": index})
                _join_choice(joined, choice)

    def body(self) -> dict[str, Any]:
        """The whole response."""
        body = dict(self._body)
        kind = body.get("object")
        if isinstance(kind, str):
            body["object"] = _BODY_OBJECTS.get(kind, kind)
        if self._choices:
            body["choices"] = [self._choices[index] for index in sorted(self._choices)]
        return body


def _join_choice(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    for name, value in choice.items():
        if name == "delta" and isinstance(value, dict):
            message = joined.setdefault("message", {"role": "assistant", "content": None})
            _join_delta(message, value)
        elif name == "text" and isinstance(value, str):
            joined["text"] = joined.get("text", "") + value
        elif name == "logprobs":
            joined["logprobs"] = _join_logprobs(joined.get("logprobs"), value)
        elif value is not None or name not in joined:
            joined[name] = value


def _join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls" and isinstance(value, list):
            _join_tool_calls(message.setdefault("tool_calls", []), value)
        elif name != "role" and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _join_tool_calls(joined: list[dict[str, Any]], calls: list[Any]) -> None:
    """Join the parts of calls; ``index`` is the place of a call, and only chunks have it."""
    for call in calls:
        if not isinstance(call, dict):
            continue
        place = call.get("index", len(joined))
        if not isinstance(place, int) or not 0 <= place <= len(joined):
            place = len(joined)
        if place == len(joined):
            joined.append({"function": {"name": "", "arguments": ""}})
        known = joined[place]
        for name, value in call.items():
            if name == "function" and isinstance(value, dict):
                _join_function(known["function"], value)
            elif name != "index" and value is not None:
                known[name] = value


def _join_function(function: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name == "arguments" and isinstance(value, str):
            function["arguments"] += value
        elif value is not None:
            function[name] = value


def _join_logprobs(joined: Any, part: Any) -> Any:
    if not isinstance(joined, dict) or not isinstance(part, dict):
        return joined if part is None else part
    for name, value in part.items():
        if isinstance(value, list) and isinstance(joined.get(name), list):
            joined[name] = joined[name] + value
        elif value is not None:
            joined[name] = value
    return joined
