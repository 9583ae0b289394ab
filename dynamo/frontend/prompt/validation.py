"""Request bodies to typed requests, or to an error that names the field and the value.

The decoder checks types and ranges in one pass; the checks here are those that it cannot make.
Options that the frontend cannot serve are refused, never ignored: a client that asked for the best
of five answers must not take the first for it. docs/openai.md lists the rules.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgspec

from dynamo._fast.json_shape import measure
from dynamo.config.frontend import PASS, REFUSE
from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import (
    DESERIALIZE,
    MAX_CHOICES,
    MAX_JSON_DEPTH,
    MAX_JSON_WEIGHT,
    MAX_MESSAGES,
    MAX_TOOLS,
    check_engine_value,
    invalid_value,
    unsupported,
)
from dynamo.frontend.prompt.tool_choice import check_tool_choice
from dynamo.protocols.openai import (
    MAX_BAD_WORDS_CHARACTERS,
    MAX_BAD_WORDS_TOKENS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    PassingChatCompletionRequest,
    PassingCompletionRequest,
    StructuredOutputs,
)

BodyKind = TypeVar("BodyKind", bound=msgspec.Struct)


def strict_kind(kind: type[BodyKind]) -> type[BodyKind]:
    """Return ``kind`` as it is decoded where an unknown field is an error."""
    strict = msgspec.defstruct(
        kind.__name__, [], bases=(kind,), kw_only=True, forbid_unknown_fields=True
    )
    return cast("type[BodyKind]", strict)


class BodyDecoder(Generic[BodyKind]):
    """Decodes the bodies of one API.

    ``passing`` is ``kind`` with unknown fields as ``passed_fields``, for APIs that can pass them
    on.
    """

    def __init__(self, kind: type[BodyKind], passing: type[BodyKind] | None = None) -> None:
        self._kind = kind
        self._passing = passing
        self._decode = msgspec.json.Decoder(strict_kind(kind)).decode

    def __call__(self, body: bytes, unknown: str = REFUSE) -> BodyKind:
        """Decode a body, with unknown fields as ``unknown`` says. Raises InvalidArgument.

        O(bytes); of more than ``INLINE_BODY_BYTES`` in a thread.
        """
        check_json(body)  # first: the decoder has no bounds
        try:
            return self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._decode_again(body, unknown)

    def _decode_again(self, body: bytes, unknown: str) -> BodyKind:
        """Decode a body with numbers as texts or unknown fields, or explain what is wrong.

        In two steps, because the decoder's own message gives neither the value nor all unknown
        fields.
        """
        try:
            raw = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as syntax:
            raise InvalidArgument(f"{DESERIALIZE}{syntax}") from None
        if not isinstance(raw, dict):
            raise InvalidArgument(f"{DESERIALIZE}expected `object`, got `{type(raw).__name__}`")
        names = raw.keys() - set(self._kind.__struct_fields__)
        if names and unknown == REFUSE:
            raise unsupported(names)
        passed = {name: raw.pop(name) for name in names}
        if raw.get("model", "") is None:
            del raw["model"]
        if self._kind is CompletionRequest and type(raw.get("logprobs")) is bool:
            raw["logprobs"] = 1 if raw["logprobs"] else None
        kind = self._kind
        if passed and unknown == PASS and self._passing is not None:
            for name, value in passed.items():
                check_engine_value(shorten(name), value)
            kind, raw["passed_fields"] = self._passing, passed
        try:
            return msgspec.convert(raw, kind, strict=False)
        except msgspec.ValidationError as error:
            raise invalid_value(raw, error) from None


_decode_chat: BodyDecoder[ChatCompletionRequest] = BodyDecoder(
    ChatCompletionRequest, PassingChatCompletionRequest
)
_decode_completion: BodyDecoder[CompletionRequest] = BodyDecoder(
    CompletionRequest, PassingCompletionRequest
)


def parse_chat(body: bytes, *, unknown: str = REFUSE) -> ChatCompletionRequest:
    """Decode and check a chat request. Raises InvalidArgument; as :class:`BodyDecoder`."""
    return check_chat(_decode_chat(body, unknown))


def check_chat(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """Check what the decoder cannot, also of a request made from the body of another API.

    Return the request. Raises InvalidArgument.
    """
    if not request.messages:
        raise InvalidArgument(
            "Validation: The 'messages' field cannot be empty. At least one message is required."
        )
    _check_length("messages", request.messages, MAX_MESSAGES)
    if request.tools is not None:
        _check_length("tools", request.tools, MAX_TOOLS)
    # Most messages are two texts: they need no call.
    for position, message in enumerate(request.messages):
        if type(message.get("role")) is not str or type(message.get("content", "")) is not str:
            _check_message(position, message)
    if (request.top_logprobs or request.logprob_token_ids) and not request.logprobs:
        name = "Top_logprobs" if request.top_logprobs else "Logprob_token_ids"
        raise InvalidArgument(f"Validation: {name} requires 'logprobs' to be true")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidArgument(
            "Validation: 'continue_final_message' and 'add_generation_prompt' exclude each other"
        )
    if request.tool_choice is not None or request.function_call is not None:
        check_tool_choice(request)
    if (
        request.modalities
        or request.functions
        or (request.audio is not None)
        or (request.web_search_options is not None)
    ):
        _check_unserved(request)
    if request.mm_processor_kwargs is not None or request.media_io_kwargs is not None:
        check_engine_value("mm_processor_kwargs", request.mm_processor_kwargs)
        check_engine_value("media_io_kwargs", request.media_io_kwargs)
    _check_common(request, request.max_completion_tokens or request.max_tokens)
    return request


def parse_completion(body: bytes, *, unknown: str = REFUSE) -> CompletionRequest:
    """Decode and check a text completion request; as :func:`parse_chat`."""
    request = _decode_completion(body, unknown)
    _check_prompt(request.prompt, request.generated_choices)
    if request.logprob_token_ids and request.logprobs is None:
        raise InvalidArgument("Validation: Logprob_token_ids requires 'logprobs'")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidArgument(
            "Validation: Max tokens must be greater than 0, got 0; with 'echo' alone it may be 0"
        )
    if request.suffix:
        raise InvalidArgument("Validation: 'suffix' is not supported, leave it out")
    _check_common(request, request.max_tokens)
    return request


def check_json(text: bytes, where: str = "") -> None:
    """Check what decoding ``text`` costs; not that it is valid JSON. O(bytes).

    Raises InvalidArgument, which names ``where``, or else the top-level member at fault.
    """
    weight, depth, name = measure(text, MAX_JSON_WEIGHT, MAX_JSON_DEPTH)
    if depth > MAX_JSON_DEPTH:
        raise InvalidArgument(
            f"Validation: {where or _member(name)} is nested too deeply: at most {MAX_JSON_DEPTH} "
            "levels of objects and arrays"
        )
    if weight > MAX_JSON_WEIGHT:
        raise InvalidArgument(
            f"Validation: {where or _member(name)} has too many JSON values: up to there they "
            f"weigh more than {MAX_JSON_WEIGHT} (a value weighs 1, an object or array 4, a member "
            "of an object 8); send fewer"
        )


def _check_common(request: GenerationRequest, limit: int | None) -> None:
    if request.min_tokens and limit is not None and request.min_tokens > limit:
        raise InvalidArgument(
            f"Validation: Min tokens must not exceed max tokens, got {request.min_tokens} > {limit}"
        )
    if request.stop is not None:
        _check_stop(request.stop)
    if request.stop_token_ids is not None:
        _check_length("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS)
    if request.best_of is not None:
        _check_best_of(request)
    if request.stream_options is not None or request.prompt_logprobs is not None:
        _check_stream(request)
    if request.cache_salt is not None:
        _check_characters("cache_salt", request.cache_salt, MAX_SALT_CHARACTERS)
    if request.logit_bias or request.bad_words or request.bad_words_token_ids:
        _check_biases(request)
    _check_grammars(request)
    # Asked here: most requests need no call.
    if (
        request.nvext is not None
        or request.vllm_xargs is not None
        or request.kv_transfer_params is not None
        or request.ec_transfer_params is not None
    ):
        _check_engine_values(request)


def _check_engine_values(request: GenerationRequest) -> None:
    """Check the JSON of any form that engine or router get."""
    for name in ("vllm_xargs", "kv_transfer_params", "ec_transfer_params"):
        check_engine_value(name, getattr(request, name))
    if request.nvext is not None:
        check_engine_value("nvext.router_config_override", request.nvext.router_config_override)


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidArgument(
            "Validation: 'stream_options' is only allowed when 'stream' is true; leave it out"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidArgument(
            "Validation: 'prompt_logprobs' is not available when 'stream' is true; leave one out"
        )


def _check_grammars(request: GenerationRequest) -> None:
    # First: the checks below are then those of its parts, too.
    if request.structured_outputs is not None:
        _spread(request, request.structured_outputs)
    if request.guided_json is not None:
        check_engine_value("guided_json", request.guided_json)
    if request.response_format is not None:
        check_engine_value("response_format", request.response_format)
    if request.guided_regex is not None:
        _check_characters("guided_regex", request.guided_regex, MAX_REGEX_CHARACTERS)
    if request.guided_whitespace_pattern is not None:
        pattern = request.guided_whitespace_pattern
        _check_characters("guided_whitespace_pattern", pattern, MAX_REGEX_CHARACTERS)
    if request.guided_grammar is not None:
        _check_characters("guided_grammar", request.guided_grammar, MAX_GRAMMAR_CHARACTERS)
    if request.guided_choice is not None:
        _check_characters("guided_choice", request.guided_choice, MAX_GRAMMAR_CHARACTERS)
    if request.structural_tag is not None:
        _check_characters("structural_tag", request.structural_tag, MAX_GRAMMAR_CHARACTERS)


def _spread(request: GenerationRequest, outputs: StructuredOutputs) -> None:
    """Set the fields of ``structured_outputs``. Raises InvalidArgument if both are there."""
    schema = {"type": "object"} if outputs.json is None and outputs.json_object else outputs.json
    for name, field, value in (
        ("json", "guided_json", schema),
        ("regex", "guided_regex", outputs.regex),
        ("choice", "guided_choice", outputs.choice),
        ("grammar", "guided_grammar", outputs.grammar),
        ("structural_tag", "structural_tag", outputs.structural_tag),
        ("whitespace_pattern", "guided_whitespace_pattern", outputs.whitespace_pattern),
    ):
        if value is None:
            continue
        if getattr(request, field) is not None:
            raise InvalidArgument(
                f"Validation: 'structured_outputs.{name}' and '{field}' are the same "
                "constraint; leave one out"
            )
        setattr(request, field, value)


def _check_stop(stop: str | list[str]) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"Validation: 'stop' takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}"
        )
    for string in strings:
        if not string:
            raise InvalidArgument("Validation: 'stop' strings cannot be empty")
        if len(string) > MAX_STOP_CHARACTERS:
            raise InvalidArgument(
                f"Validation: a 'stop' string takes at most {MAX_STOP_CHARACTERS} characters, "
                f"got {len(string)}: {shorten(repr(string))}"
            )


def _check_unserved(request: ChatCompletionRequest) -> None:
    """Refuse what changes the answer, and no worker can do."""
    outputs = [name for name in request.modalities or () if name != "text"]
    if outputs:
        raise InvalidArgument(
            f"Validation: 'modalities' may be text, got {', '.join(map(shorten, outputs[:3]))}"
        )
    remedies = {
        "audio": "leave it out: answers are text",
        "functions": "describe them in 'tools'",
        "web_search_options": "leave it out, or offer a search in 'tools'",
    }
    for name, remedy in remedies.items():
        if getattr(request, name) not in (None, []):
            raise InvalidArgument(f"Validation: '{name}' is not supported; {remedy}")


def _check_best_of(request: GenerationRequest) -> None:
    best_of, n = request.best_of or 0, request.n or 1
    if 0 < best_of < n:
        raise InvalidArgument(
            f"Validation: 'best_of' must not be less than 'n', got {best_of} < {n}"
        )
    if best_of > n and request.stream:
        raise InvalidArgument(
            f"Validation: 'best_of' above 'n' cannot be streamed, got {best_of} > {n}: the best "
            "are known at the end; leave out 'best_of' or 'stream'"
        )


def _check_biases(request: GenerationRequest) -> None:
    """Check the tokens and words that are made more or less likely."""
    if request.logit_bias and not all(key.isdecimal() for key in request.logit_bias):
        raise InvalidArgument("Validation: 'logit_bias' keys must be token ids")
    if request.bad_words:
        _check_characters("bad_words", request.bad_words, MAX_BAD_WORDS_CHARACTERS)
    count = sum(map(len, request.bad_words_token_ids or ()))
    if count > MAX_BAD_WORDS_TOKENS:
        raise InvalidArgument(
            f"Validation: 'bad_words_token_ids' must have at most {MAX_BAD_WORDS_TOKENS} tokens "
            f"together, got {count}"
        )


def _check_length(name: str, values: list[Any], limit: int) -> None:
    if len(values) > limit:
        raise InvalidArgument(
            f"Validation: '{name}' must have at most {limit} entries, got {len(values)}"
        )


def _check_characters(name: str, value: str | list[str], limit: int) -> None:
    """Check the length of a text, or of all texts of a list together."""
    count = len(value) if isinstance(value, str) else sum(map(len, value))
    if count > limit:
        raise InvalidArgument(
            f"Validation: '{name}' must have at most {limit} characters, got {count}: "
            f"{shorten(value if isinstance(value, str) else value[0])}"
        )


def _check_message(position: int, message: dict[str, Any]) -> None:
    where = f"{DESERIALIZE}messages[{position}]"
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


def _member(name: bytes) -> str:
    return f"'{shorten(name.decode(errors='replace'))}'" if name else "the JSON body"
