"""Convert chat messages from the form of the API to the form of the template.

A message whose content is a text stays as it is. Copied and changed are those that a template
would fail on: missing content, content in parts, arguments of tool calls as JSON text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.validation import check_json

Message = Mapping[str, Any]
NewMessage = dict[str, Any]
"""One that is being made, of a request of another API."""

IMAGE: Message = {"type": "image"}
"""What :mod:`dynamo.frontend.prompt.images` puts in place of an image, this very object."""
_UNSEEN: Message = {"type": "text", "text": "(An image, which this model cannot see.)"}
"""In place of an image that a tool has returned to a model that takes no images. An agent sends the
result again with each later request, so that an error would end its session."""


class ToolImage(dict[str, Any]):
    """The part of an image that a tool has returned, in a message of the user."""


class ContentForm(enum.Enum):
    """The kind of message content that a template can print."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


class CallForm(NamedTuple):
    """What a template needs of a message with tool calls: ``text_arguments`` if it appends the
    arguments to a text, ``null_content`` if it looks for calls only beside null, ``thinking`` if
    that is its name of ``reasoning_content`` (gpt-oss, which takes it only without content).
    ``keeps_null``: it may get null where the client sends no content, as in vLLM."""

    text_arguments: bool = False
    null_content: bool = False
    thinking: bool = False
    keeps_null: bool = False


_PLAIN_CALLS = CallForm()


def template_messages(
    messages: Sequence[Message], form: ContentForm, calls: CallForm = _PLAIN_CALLS
) -> list[Message]:
    """Convert ``messages`` to ``form``. Raises InvalidArgument for parts that are not text.

    :data:`IMAGE` passes, and no other part of that type.
    """
    return [
        message
        if type(message.get("content")) is str
        and "tool_calls" not in message
        and form is not ContentForm.PARTS
        else _convert(position, message, form, calls)
        for position, message in enumerate(messages)
    ]


def alternating(messages: Sequence[Message], joins_results: bool) -> list[Message]:
    """``messages`` without two of the user in a row, for templates that fail on them.

    With ``joins_results`` a message of the user that follows a tool's is part of that. O(messages).
    """
    runs: list[tuple[Message, list[Any]]] = []
    last = None
    for message in messages:
        role = message.get("role")
        if role == "user" and (last == "user" or (joins_results and last == "tool")):
            runs[-1][1].append(message.get("content"))
            continue
        runs.append((message, [message.get("content")]))
        last = role
    return [
        first if len(contents) == 1 else {**first, "content": joined_contents(contents)}
        for first, contents in runs
    ]


def joined_contents(contents: list[Any]) -> Any:
    """One content; a text if all are texts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        if isinstance(content, str):
            parts.append({"type": "text", "text": content})
        elif isinstance(content, list):
            parts += content
    return parts


def message_text(position: int, message: Message) -> str:
    """The text of one message, with a line for each part."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_part_text(position, number, part) for number, part in enumerate(content))
    return content if isinstance(content, str) else ""


def _convert(position: int, message: Message, form: ContentForm, call_form: CallForm) -> Message:
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        tools = message.get("role") == "tool"
        content = [_UNSEEN if _is_tools_image(part, tools) else part for part in content]
        changed["content"] = content
    text = message_text(position, changed)
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
        changed |= _with_calls(position, message, calls, call_form)
    elif "tool_calls" in changed:
        del changed["tool_calls"]  # null and [] mean none, but templates test for the key
    return changed


def _is_tools_image(part: Mapping[str, Any], tools: bool) -> bool:
    return type(part) is ToolImage or (tools and part.get("type") == "image_url")


def _part_text(position: int, number: int, part: Mapping[str, Any]) -> str:
    if part is IMAGE:  # a client may send an equal part
        return ""
    for key in ("text", "refusal"):
        if part.get("type") == key and isinstance(part.get(key), str):
            return str(part[key])
    raise InvalidArgument(
        f"Validation: messages[{position}].content[{number}]: this model takes text, "
        f"got a part of type `{shorten(part.get('type'))}`"
    )


def _with_calls(
    position: int, message: Message, calls: list[Any], form: CallForm
) -> dict[str, Any]:
    """The members of a message that change because it has tool calls."""
    convert = _call_with_text if form.text_arguments else _call
    changed: dict[str, Any] = {"tool_calls": [convert(position, call) for call in calls]}
    if not message.get("content"):
        if form.null_content or (form.keeps_null and message.get("content") is None):
            changed["content"] = None
        if form.thinking and "reasoning_content" in message:
            changed["thinking"] = message["reasoning_content"]
    return changed


def _function(position: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument(f"Validation: messages[{position}].tool_calls: missing `function`")
    return function


def _call_with_text(position: int, call: Any) -> Any:
    """Leave ``arguments`` as JSON text, for templates that take nothing else."""
    function = _function(position, call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    text = "{}" if arguments is None else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


def _call(position: int, call: Any) -> Any:
    """Parse ``arguments``, because most templates print the object with ``tojson``."""
    function = _function(position, call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    text = arguments.encode()
    check_json(text, f"messages[{position}].tool_calls: `arguments`")
    try:
        parsed = msgspec.json.decode(text) if text.strip() else {}
    except msgspec.DecodeError:  # text that a model wrote, and the template may print
        return call
    return {**call, "function": {**function, "arguments": parsed}}
