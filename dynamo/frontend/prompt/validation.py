"""Request bodies to typed requests, or to an error that names the field and the value. Spec 5.5.

The decoder checks types and ranges in one pass. Only when it refuses is the body read a second
time, slowly, to say what is wrong in the words clients know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.answer_options import check_answer_options, check_tool_choice
from dynamo.frontend.prompt.bounds import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    check_engine_value,
    check_json,
)
from dynamo.protocols.openai import (
    MAX_TOKENS_LIMIT,
    RANGES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StrictChatCompletionRequest,
    StrictCompletionRequest,
)

__all__ = ["parse_chat", "parse_completion"]

_CHAT = msgspec.json.Decoder(StrictChatCompletionRequest)
_CHAT_LENIENT = msgspec.json.Decoder(ChatCompletionRequest)
_COMPLETION = msgspec.json.Decoder(StrictCompletionRequest)
_COMPLETION_LENIENT = msgspec.json.Decoder(CompletionRequest)
_DESERIALIZE = "Failed to deserialize the JSON body into the target type: "
_NAMED = 8


def parse_chat(body: bytes, *, ignore_unsupported: bool = False) -> ChatCompletionRequest:
    """Decode and check a chat request.

    ``ignore_unsupported`` lets unknown fields pass (DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS).
    Raises InvalidArgument. O(bytes); of more than ``INLINE_BODY_BYTES`` in a thread.
    """
    check_json(body)
    request: ChatCompletionRequest
    try:
        request = (_CHAT_LENIENT if ignore_unsupported else _CHAT).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(body, error, ChatCompletionRequest, ignore_unsupported) from None
    if not request.messages:
        raise InvalidArgument(
            "Validation: The 'messages' field cannot be empty. At least one message is required."
        )
    _check_length("messages", request.messages, MAX_MESSAGES)
    if request.tools is not None:
        _check_length("tools", request.tools, MAX_TOOLS)
    for position, message in enumerate(request.messages):
        if type(message.get("role")) is not str or type(message.get("content", "")) is not str:
            _check_message(position, message)
    if request.top_logprobs and not request.logprobs:
        raise InvalidArgument("Validation: Top_logprobs requires 'logprobs' to be true")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidArgument(
            "Validation: 'continue_final_message' and 'add_generation_prompt' exclude each other"
        )
    if request.tool_choice is not None or request.function_call is not None:
        check_tool_choice(request)
    _check_common(request, request.max_completion_tokens or request.max_tokens)
    return request


def parse_completion(body: bytes, *, ignore_unsupported: bool = False) -> CompletionRequest:
    """Decode and check a text completion request; as :func:`parse_chat`."""
    check_json(body)
    request: CompletionRequest
    try:
        request = (_COMPLETION_LENIENT if ignore_unsupported else _COMPLETION).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain(body, error, CompletionRequest, ignore_unsupported) from None
    _check_prompt(request.prompt, request.n or 1)
    if request.suffix:
        raise InvalidArgument("Validation: 'suffix' is not supported, leave it out")
    _check_common(request, request.max_tokens)
    return request


def _check_common(request: GenerationRequest, limit: int | None) -> None:
    if request.min_tokens and limit is not None and request.min_tokens > limit:
        raise InvalidArgument(
            f"Validation: Min tokens must not exceed max tokens, got {request.min_tokens} > {limit}"
        )
    check_answer_options(request)
    if request.logit_bias and not all(key.isdecimal() for key in request.logit_bias):
        raise InvalidArgument("Validation: 'logit_bias' keys must be token ids")
    if request.guided_json is not None:
        check_engine_value("guided_json", request.guided_json)
    if request.response_format is not None:
        check_engine_value("response_format", request.response_format)
    if request.nvext is not None and request.nvext.router_config_override is not None:
        check_engine_value("nvext.router_config_override", request.nvext.router_config_override)


def _check_length(name: str, values: list[Any], limit: int) -> None:
    if len(values) > limit:
        raise InvalidArgument(
            f"Validation: '{name}' must have at most {limit} entries, got {len(values)}"
        )


def _check_message(position: int, message: dict[str, Any]) -> None:
    where = f"{_DESERIALIZE}messages[{position}]"
    role = message.get("role")
    if role is None:
        raise InvalidArgument(f"{where}: missing field `role`")
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role: expected `str`, got `{type(role).__name__}`")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        kind = type(content).__name__
        raise InvalidArgument(f"{where}.content: expected `str | array | null`, got `{kind}`")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidArgument(f"{where}.content[{number}]: expected an object with a `type`")


def _check_prompt(prompt: str | list[Any], n: int) -> None:
    if isinstance(prompt, str):
        empty = not prompt
    else:
        kinds = set(map(type, prompt))
        choices = n if kinds == {int} else n * len(prompt)
        if choices > MAX_CHOICES:
            raise InvalidArgument(
                f"Validation: the prompts in 'prompt' times 'n' must not exceed {MAX_CHOICES} "
                f"choices, got {choices}"
            )
        if len(kinds) > 1:
            raise InvalidArgument(
                "Validation: 'prompt' must be a string, a list of strings, a list of token ids "
                "or a list of lists of token ids, not a mixture"
            )
        empty = not prompt or (kinds != {int} and not all(prompt))
    if empty:
        raise InvalidArgument("Validation: Prompt string cannot be empty")


def _explain(
    body: bytes, error: Exception, kind: type[GenerationRequest], ignore_unsupported: bool
) -> InvalidArgument:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as syntax:
        return InvalidArgument(f"{_DESERIALIZE}{syntax}")
    if not isinstance(raw, dict):
        return InvalidArgument(f"{_DESERIALIZE}expected `object`, got `{type(raw).__name__}`")
    unknown = sorted(raw.keys() - set(kind.__struct_fields__))
    if unknown and not ignore_unsupported:
        names = ", ".join(f"`{shorten(name)}`" for name in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        return InvalidArgument(f"Unsupported parameter(s): {names}{more}")
    return InvalidArgument(_out_of_range(raw) or _DESERIALIZE + _where(str(error)))


def _out_of_range(raw: dict[str, Any]) -> str | None:
    for value in _numbers((raw.get("max_tokens"), raw.get("max_completion_tokens"))):
        if value <= 0:
            return f"Validation: Max tokens must be greater than 0, got {shorten(value)}"
        if value > MAX_TOKENS_LIMIT:
            return (
                f"Validation: Max tokens must not exceed {MAX_TOKENS_LIMIT}, got {shorten(value)}"
            )
    for name, (low, high) in RANGES.items():
        given = raw.get(name)
        for value in _numbers(given.values() if isinstance(given, dict) else (given,)):
            if not low <= value <= high or (name == "repetition_penalty" and value == 0):
                title = name.replace("_penalty", " penalty").replace("_bias", " bias").capitalize()
                return f"Validation: {title} must be between {low} and {high}, got {shorten(value)}"
    return None


def _numbers(values: Iterable[Any]) -> list[int | float]:
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def _where(text: str) -> str:
    """``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected `int`, got `str` ``."""
    what, found, path = text.rpartition(" - at `$")
    if not found:
        what, path = text, ""
    what = what.removeprefix("Object ").replace("missing required field", "missing field")
    what = what[:1].lower() + what[1:]
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {what}" if path else what
