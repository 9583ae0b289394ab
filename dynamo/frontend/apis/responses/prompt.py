"""Bodies of POST /v1/responses: typed, checked, converted to chat requests.

Everything that a chat of ours serves is served; the rest is refused by its name. docs/apis.md has
the table.

Free-form members (items, tools, formats) are checked where they are converted.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from dynamo.config.frontend import REFUSE
from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.apis.responses.input_items import (
    REFERENCE,
    ItemConverter,
    OfferedTools,
    additional_tools,
    arranged,
    chat_choice,
    offered_tools,
)
from dynamo.frontend.prompt.validation import BodyDecoder, check_chat
from dynamo.protocols.openai import (
    RANGES,
    ChatCompletionRequest,
    GenerationRequest,
    MaxTokens,
    TokenCount,
)

MAX_ECHO_BYTES = 256 << 10
"""Of ``instructions``, ``tools``, ``text`` and ``tool_choice`` each: larger ones come back empty,
because the event loop copies them into three events."""
MAX_REFERENCES = 1024
"""Items of a request in which one is a reference: those are converted on the event loop."""
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_UNSUPPORTED = {
    "background": "requests run while the client waits; leave it out or set it to false",
    "conversation": "there are no conversations; use 'previous_response_id' or send all items",
    "prompt": "no prompts are stored here; send 'instructions' and 'input'",
    "max_tokens": "use 'max_output_tokens'",
    "response_format": "use 'text.format'",
    "n": "a response has one answer; leave it out",
    "best_of": "a response has one answer; leave it out",
    "prompt_logprobs": "use /v1/chat/completions",
    "return_token_ids": "use /v1/chat/completions",
}
_REASONING = frozenset(("effort", "generate_summary", "summary"))
_TEXT = frozenset(("format", "verbosity"))
_FORMAT = frozenset(("description", "name", "schema", "strict", "type"))
_OBJECT_BYTES = 200
_SCALAR_BYTES = 32
_TOP_LOGPROBS = Meta(ge=RANGES["top_logprobs"][0], le=RANGES["top_logprobs"][1])
Label = Annotated[str, Meta(max_length=1024)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ResponsesRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/responses, and of POST /v1/responses/input_tokens.

    It takes the sampling fields of a chat as well. Those of the last group are accepted without
    effect, or refused with a reason.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, _TOP_LOGPROBS] | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: bool | None = None
    client_metadata: Any = None
    conversation: Any = None
    max_tool_calls: TokenCount | None = None
    prompt: Any = None


_decode = BodyDecoder(ResponsesRequest)


class ResponseOrigin:
    """What the answer, and the store, need of the body.

    ``items`` are those of ``input``, each with an id; ``messages`` the same as a chat, None while
    they have a reference. ``echo`` are the members of the response that repeat the request;
    ``summarizes``: reasoning is shown as a summary. ``size_bytes`` is that of the body,
    ``items_bytes`` what the items take in memory. ``keep``, if set, stores the response: this
    origin, id, body, output items.
    """

    __slots__ = (
        "echo",
        "ignore_unsupported",
        "instructions",
        "items",
        "items_bytes",
        "keep",
        "messages",
        "previous_id",
        "shows_logprobs",
        "size_bytes",
        "stores",
        "summarizes",
        "tools",
    )

    def __init__(self, body: ResponsesRequest, size_bytes: int, ignore_unsupported: bool) -> None:
        self.size_bytes = size_bytes
        self.ignore_unsupported = ignore_unsupported
        self.items = _items(body.input)
        self.items_bytes = memory_bytes(self.items)
        self.instructions = body.instructions
        self.previous_id = body.previous_response_id
        self.stores = body.store is not False
        self.tools = offered_tools((body.tools or []) + additional_tools(self.items))
        reasoning = body.reasoning or {}
        summary = reasoning.get("summary", reasoning.get("generate_summary"))
        self.summarizes = summary not in (None, "none")
        self.shows_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
        self.messages: list[dict[str, Any]] | None = None
        if all(item.get("type") != REFERENCE for item in self.items):
            self.messages = self.converted(self.items)
        self.keep: Callable[[ResponseOrigin, str, bytes, list[dict[str, Any]]], None] | None = None
        self.echo = _echo(body, self.tools)

    def converted(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """``items``, of which none is a reference, as messages. Raises InvalidArgument."""
        converter = ItemConverter(self.ignore_unsupported)
        for number, item in enumerate(items):
            converter.add(f"input[{number}]", item)
        return converter.messages


class ResponseChatRequest(ChatCompletionRequest, kw_only=True):
    """The chat that a response is an answer to; :meth:`add_history` completes its messages."""

    origin: ResponseOrigin

    def add_history(self, earlier: list[dict[str, Any]]) -> None:
        """Put the messages of earlier responses in front. Raises InvalidArgument.

        O(messages).
        """
        own = self.origin.messages
        assert own is not None, "references are resolved before"
        self.messages = arranged(self.origin.instructions, earlier + own)
        check_chat(self)


def parse_response(body: bytes, *, unknown: str = REFUSE) -> ResponseChatRequest:
    """Decode and check a body. Its messages are complete after :meth:`add_history`.

    Unknown fields are refused or ignored. Raises InvalidArgument; as :class:`BodyDecoder`.
    """
    wire = _decode(body, unknown)
    ignore_unsupported = unknown != REFUSE
    _check(wire, ignore_unsupported)
    origin = ResponseOrigin(wire, len(body), ignore_unsupported)
    shared = {name: getattr(wire, name) for name in GenerationRequest.__struct_fields__}
    request = ResponseChatRequest(**shared, messages=[], origin=origin)
    request.max_tokens = wire.max_output_tokens
    request.response_format = _response_format(wire.text)
    request.chat_template_kwargs = wire.chat_template_kwargs
    request.reasoning_effort = _effort(wire.reasoning)
    request.parallel_tool_calls = wire.parallel_tool_calls
    request.logprobs = origin.shows_logprobs
    request.top_logprobs = wire.top_logprobs
    functions = origin.tools.functions
    if wire.tool_choice is not None:
        request.tool_choice, functions = chat_choice(wire.tool_choice, origin.tools)
    request.tools = functions or None
    return request


def _check(wire: ResponsesRequest, ignore_unsupported: bool) -> None:
    """Refuse by name what is not served here."""
    for name, remedy in _UNSUPPORTED.items():
        value = getattr(wire, name)
        # 1 is what n and best_of default to; True equals it, but asks for something.
        if value is not None and value is not False and (value is True or value != 1):
            raise InvalidArgument(
                f"Validation: '{name}' is not supported by /v1/responses; {remedy}"
            )
    if wire.truncation not in (None, "disabled"):
        raise InvalidArgument(
            f"Validation: 'truncation' must be 'disabled', got {shorten(repr(wire.truncation))}; "
            "a prompt that is too long is refused, shorten it in the client"
        )
    for name in wire.include or ():
        if name not in _INCLUDABLE:
            raise InvalidArgument(
                f"Validation: 'include' must be of {', '.join(_INCLUDABLE)}, got "
                f"{shorten(repr(name))}"
            )
    if wire.nvext is not None and wire.nvext.annotations:
        raise InvalidArgument(
            "Validation: 'nvext.annotations' is not supported by /v1/responses; use "
            "/v1/chat/completions"
        )
    if not ignore_unsupported:
        _check_members("reasoning", wire.reasoning, _REASONING)
        _check_members("text", wire.text, _TEXT)


def _check_members(where: str, value: dict[str, Any] | None, allowed: frozenset[str]) -> None:
    unknown = sorted(name for name in (value or {}).keys() - allowed if value and value[name])
    if unknown:
        names = ", ".join(f"`{where}.{shorten(name)}`" for name in unknown[:8])
        raise InvalidArgument(f"Unsupported parameter(s): {names}")


def _items(value: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The items of ``input``, each with an id: clients refer to them by it."""
    if not value:
        return []
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    prefix = secrets.token_hex(12)
    return [_with_id(number, item, prefix) for number, item in enumerate(value)]


def _with_id(number: int, item: dict[str, Any], prefix: str) -> dict[str, Any]:
    item_id = item.get("id")
    if item_id is None:
        return {"type": "message", **item, "id": f"item_{prefix}{number:x}"}
    if not isinstance(item_id, str):
        raise InvalidArgument(
            f"Validation: input[{number}].id: expected `str`, got {item_id!r:.64}"
        )
    return item if "type" in item else {"type": "message", **item}


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as ``response_format`` of a chat, which has its members one level deeper."""
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise InvalidArgument(
            "Validation: text.format.type must be 'text', 'json_object' or 'json_schema', got "
            f"{shorten(repr(kind))}"
        )
    _check_members("text.format", form, _FORMAT)
    members = {name: value for name, value in form.items() if name != "type"}
    return {"type": kind, kind: members}


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidArgument(
            f"Validation: reasoning.effort: expected `str`, got `{type(effort).__name__}`"
        )
    return effort


def _echo(body: ResponsesRequest, tools: OfferedTools) -> dict[str, Any]:
    """The members of a response that repeat the request, the large ones as JSON already.

    ``tools`` are those that the model was offered.
    """
    text = {"format": {"type": "text"}, **(body.text or {})}
    reasoning = {"effort": None, "summary": None, **(body.reasoning or {})}
    return {
        "background": False,
        "instructions": _json(body.instructions, None),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": _json(reasoning, {}),
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": _json(text, {}),
        "tool_choice": _json("auto" if body.tool_choice is None else body.tool_choice, "auto"),
        "tools": _json(tools.declared, []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _json(value: Any, instead: Any) -> orjson.Fragment:
    """Free-form JSON, whose integers may have any size; ``instead`` of one that is too large."""
    text = msgspec.json.encode(value)
    return orjson.Fragment(text if len(text) <= MAX_ECHO_BYTES else msgspec.json.encode(instead))


def memory_bytes(value: Any) -> int:
    """What a JSON value takes in memory, about. O(values), not O(characters)."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    if isinstance(value, dict | list):
        inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
        return _OBJECT_BYTES + sum(map(memory_bytes, inside))
    return _SCALAR_BYTES
