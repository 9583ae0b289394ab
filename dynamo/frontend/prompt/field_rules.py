"""Fields that the graph sets or removes in the requests of a model: ``defaults`` and ``forbid``.

A forbidden field is removed first, so a field in both has the value of the graph. Names are those
of chat completions; other APIs get them under their own names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.frontend.prompt.validation import check_chat
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from dynamo.protocols.pooling import POOLING_BODIES, POOLING_PATHS, AnyPoolingBody
from dynamo.serve.graph.service import PROTECTED

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one field: a default for the one is none beside the other."""
_PROTECTED_IN_POOLING = frozenset(
    (
        *("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
        *("encoding_format", "max_tokens_per_query", "max_tokens_per_doc"),
    )
)
"""The client's in pooling bodies: the texts (`documents` of a chat are others), and fields without
null, of which a decoded body does not say whether the client gave them."""


class _BodyFields(NamedTuple):
    """A kind of body: the fields that rules may change, and those that it cannot be without."""

    fields: frozenset[str]
    needed: Mapping[str, Any]


def _body_fields(
    kind: type[msgspec.Struct], needed: Mapping[str, Any], *protected: str
) -> _BodyFields:
    return _BodyFields(frozenset(kind.__struct_fields__) - {*PROTECTED, *protected}, needed)


_BODIES: Mapping[type[msgspec.Struct], _BodyFields] = {
    ChatCompletionRequest: _body_fields(
        ChatCompletionRequest, {"messages": [{"role": "user", "content": "."}]}
    ),
    CompletionRequest: _body_fields(CompletionRequest, {"prompt": "."}),
    **{
        kind: _body_fields(kind, {"query": ".", "documents": ["."]}, *_PROTECTED_IN_POOLING)
        for kind in POOLING_BODIES.values()
    },
}
_OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "/v1/responses": {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    },
    "/v1/messages": {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
    "/v1/completions": {"max_completion_tokens": "max_tokens"},
    "/v1/chat/completions": {},
}
"""The paths whose bodies have such fields, and the names there that differ."""
_COUNTED = {
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1/responses/input_tokens": "/v1/responses",
    "/tokenize": "/v1/chat/completions",
}
"""Paths that count the prompt of another: of its fields, these bodies have those of a prompt."""
_PROMPT_FIELDS = frozenset(
    (
        *("tools", "tool_choice", "chat_template_kwargs", "chat_template_args", "documents"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("reasoning_effort", "response_format"),
    )
)
_ECHOED = {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": None}
"""What a response of ``/v1/responses`` shows of a request without these fields."""
_CHAT_ONLY = _BODIES[ChatCompletionRequest].fields - _BODIES[CompletionRequest].fields
_NULL = msgspec.Raw(b"null")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class FieldRules:
    """Changes requests: typed ones in place (:meth:`apply`), others as JSON (:meth:`rewrite`)."""

    def __init__(self, defaults: Mapping[str, Any], forbid: Collection[str]) -> None:
        self._forbid = frozenset(forbid)
        self._defaults = dict(defaults)
        self._typed = {kind: _typed(kind, body, defaults) for kind, body in _BODIES.items()}

    def apply(self, request: GenerationRequest | AnyPoolingBody) -> None:
        """Change a decoded request. O(fields of the rules)."""
        kind = next(kind for kind in _BODIES if isinstance(request, kind))
        # A chat made of a body of /v1/responses: the answer repeats its fields.
        echo = getattr(getattr(request, "origin", None), "echo", {})
        for name in self._forbid & _BODIES[kind].fields:
            setattr(request, name, None)
            echo_name = _OWN_NAMES["/v1/responses"].get(name, name)
            if echo_name in echo and echo_name in _ECHOED:
                echo[echo_name] = _ECHOED[echo_name]
        limited = any(getattr(request, name, None) is not None for name in _LIMITS)
        for name, value in self._typed[kind].items():
            if getattr(request, name) is None and not (limited and name in _LIMITS):
                setattr(request, name, value)
            echo_name = _OWN_NAMES["/v1/responses"].get(name, name)
            if echo_name in echo and isinstance(value, int | float):
                echo[echo_name] = getattr(request, name)

    def rewrite(self, path: str, fields: dict[str, msgspec.Raw]) -> None:
        """Change the members of a JSON body of ``path``; other paths have no such fields."""
        pooling = POOLING_PATHS.get(path)
        if pooling is not None:
            self._rewrite_pooling(_BODIES[POOLING_BODIES[pooling]].fields, fields)
            return
        own = _OWN_NAMES.get(_COUNTED.get(path, path))
        if own is None:
            return
        for name in self._forbid:
            fields.pop(own.get(name, name), None)
        limited = any(fields.get(own.get(name, name), _NULL) != _NULL for name in _LIMITS)
        for name, value in self._defaults.items():
            excluded = (
                (path == "/v1/completions" and name in _CHAT_ONLY and name not in own)
                or (limited and name in _LIMITS)
                or (path in _COUNTED and name not in _PROMPT_FIELDS)
            )
            field = own.get(name, name)
            # null means absent, here as well
            if not excluded and fields.get(field, _NULL) == _NULL:
                fields[field] = msgspec.Raw(msgspec.json.encode(value))

    def _rewrite_pooling(self, names: Collection[str], fields: dict[str, msgspec.Raw]) -> None:
        for name in self._forbid - _PROTECTED_IN_POOLING:
            fields.pop(name, None)
        for name, value in self._defaults.items():
            if name in names and fields.get(name, _NULL) == _NULL:
                fields[name] = msgspec.Raw(msgspec.json.encode(value))


def rewritten(
    path: str, body: bytes, model: str, rules: FieldRules | None, salt: str | None = None
) -> bytes:
    """Return a JSON body that names ``model``, with its fields by ``rules``, and with ``salt``.

    All else is unchanged; a body that is no JSON object stays as it is. O(bytes).
    """
    try:
        fields = _fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    if rules is not None:
        rules.rewrite(path, fields)
    if salt is not None:
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(fields)


def check_rules(defaults: Mapping[str, Any], forbid: Collection[str]) -> None:
    """Check the rules of a model whose requests are decoded here. Raises ConfigError."""
    all_fields = frozenset[str]().union(*(body.fields for body in _BODIES.values()))
    for key, names in (("defaults", defaults), ("forbid", forbid)):
        unknown = sorted(set(names) - all_fields)
        if unknown:
            raise ConfigError(f"ServiceArgs.{key}: {unknown[0]} is not a field of a request")
    unchecked = dict(defaults)
    for kind, body in _BODIES.items():
        # A field of several kinds has the type of the first: `logprobs` of chats and completions.
        values = {name: unchecked.pop(name) for name in body.fields & unchecked.keys()}
        try:
            request = msgspec.convert({"model": ".", **body.needed, **values}, kind)
            if isinstance(request, ChatCompletionRequest):
                check_chat(request)
        except (msgspec.ValidationError, InvalidArgument) as error:
            raise ConfigError(f"ServiceArgs.defaults: {error}") from None


def _typed(
    kind: type[msgspec.Struct], body: _BodyFields, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return those of ``defaults`` that a request of ``kind`` takes, as typed values."""
    typed: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in body.fields:
            try:
                request = msgspec.convert({"model": ".", **body.needed, name: value}, kind)
            except msgspec.ValidationError:
                continue  # refused before the start, or of the other kind, as `logprobs`
            typed[name] = getattr(request, name)
    return typed
