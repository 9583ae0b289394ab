"""Chat messages as clients send them to messages as templates want them.

A message whose content is a text is passed as it is; only what a template would stumble over is
copied and changed: missing content, content in parts, arguments of tool calls in JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.validation import check_json

__all__ = ["ContentForm", "message_text", "template_messages"]

Message = Mapping[str, Any]


class ContentForm(enum.Enum):
    """What a template can read as the content of a message."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


def template_messages(messages: Sequence[Message], form: ContentForm) -> list[Message]:
    """``messages`` in the form a template wants. Raises InvalidArgument for parts without text."""
    return [
        message
        if type(message.get("content")) is str
        and "tool_calls" not in message
        and form is not ContentForm.PARTS
        else _convert(position, message, form)
        for position, message in enumerate(messages)
    ]


def message_text(position: int, message: Message) -> str:
    """The text of one message; parts are put on lines of their own."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_part_text(position, number, part) for number, part in enumerate(content))
    return content if isinstance(content, str) else ""


def _convert(position: int, message: Message, form: ContentForm) -> Message:
    changed = dict(message)
    content = message.get("content")
    text = message_text(position, message)
    if form is ContentForm.PARTS and not isinstance(content, list):
        changed["content"] = [{"type": "text", "text": text}] if text else []
    elif form is ContentForm.TEXT or not isinstance(content, list):
        changed["content"] = text
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidArgument(
            f"Validation: messages[{position}].tool_calls: expected `array | null`, "
            f"got `{type(calls).__name__}`"
        )
    if calls:
        changed["tool_calls"] = [_call(position, each) for each in calls]
    elif "tool_calls" in changed:
        del changed["tool_calls"]  # null and [] mean none, but templates ask whether it is there
    return changed


def _part_text(position: int, number: int, part: Mapping[str, Any]) -> str:
    for key in ("text", "refusal"):
        if part.get("type") == key and isinstance(part.get(key), str):
            return str(part[key])
    raise InvalidArgument(
        f"Validation: messages[{position}].content[{number}]: this model takes text, "
        f"got a part of type `{shorten(part.get('type'))}`"
    )


def _call(position: int, call: Any) -> Any:
    """Templates print ``arguments`` with ``tojson``: give them the object, not its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument(f"Validation: messages[{position}].tool_calls: missing `function`")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    text = arguments.encode()
    check_json(text, f"messages[{position}].tool_calls: `arguments`")
    try:
        parsed = msgspec.json.decode(text) if text.strip() else {}
    except msgspec.DecodeError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}
