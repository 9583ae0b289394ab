"""Fields that the graph sets or removes in the requests of a model: ``defaults`` and ``forbid``.

A forbidden field is removed first, so a field in both has the value of the graph. Names are those
of chat completions; other APIs get them under their own names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.frontend.prompt.validation import check_chat
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.protocols.pooling import POOLING_BODIES, POOLING_PATHS
from dynamo.serve.graph.service import PROTECTED

_LIMITS = ("max_tokens", "max_completion_tokens")
"""Two names of one field: a default for the one is none beside the other."""
_CHAT = frozenset(ChatCompletionRequest.__struct_fields__) - {*PROTECTED}
_COMPLETION = frozenset(CompletionRequest.__struct_fields__) - {*PROTECTED}
_COMPARED = frozenset(
    ("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")
)
"""The texts of pooling bodies, which are the client's; `documents` of a chat are others."""
_UNSET = ("encoding_format", "max_tokens_per_query", "max_tokens_per_doc")
"""Fields without null, of which a decoded body does not say whether the client gave them."""
_POOLING: Mapping[type[msgspec.Struct], frozenset[str]] = {
    kind: frozenset(kind.__struct_fields__) - {*PROTECTED, *_COMPARED, *_UNSET}
    for kind in POOLING_BODIES.values()
}
_ALL = _CHAT.union(_COMPLETION, *_POOLING.values())
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
_CHAT_ONLY = _CHAT - _COMPLETION
_NULL = msgspec.Raw(b"null")
_NEEDED: Mapping[str, Any] = {"query": ".", "documents": ["."]}
"""What pooling bodies cannot be without."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class FieldRules:
    """Changes requests: typed ones in place (:meth:`apply`), others as JSON (:meth:`rewrite`)."""

    def __init__(self, defaults: Mapping[str, Any], forbid: Collection[str]) -> None:
        self._forbid = frozenset(forbid)
        self._defaults = dict(defaults)
        self._chat = _typed(ChatCompletionRequest, {"messages": []}, defaults)
        self._completion = _typed(CompletionRequest, {"prompt": "."}, defaults)
        self._pooling = {kind: _typed(kind, _NEEDED, defaults) for kind in _POOLING}

    def apply(self, request: Any) -> None:
        """Change a decoded request of generation or of pooling. O(fields of the rules)."""
        if isinstance(request, ChatCompletionRequest):
            names, defaults = _CHAT, self._chat
        elif isinstance(request, CompletionRequest):
            names, defaults = _COMPLETION, self._completion
        else:
            kind = next(kind for kind in _POOLING if isinstance(request, kind))
            names, defaults = _POOLING[kind], self._pooling[kind]
        # A chat made of a body of /v1/responses: the answer repeats its fields.
        echo = getattr(getattr(request, "origin", None), "echo", {})
        for name in self._forbid & names:
            setattr(request, name, None)
            echo_name = _OWN_NAMES["/v1/responses"].get(name, name)
            if echo_name in echo and echo_name in _ECHOED:
                echo[echo_name] = _ECHOED[echo_name]
        limited = any(getattr(request, name, None) is not None for name in _LIMITS)
        for name, value in defaults.items():
            if getattr(request, name) is None and not (limited and name in _LIMITS):
                setattr(request, name, value)
            echo_name = _OWN_NAMES["/v1/responses"].get(name, name)
            if echo_name in echo and isinstance(value, int | float):
                echo[echo_name] = getattr(request, name)

    def rewrite(self, path: str, fields: dict[str, msgspec.Raw]) -> None:
        """Change the members of a JSON body of ``path``; other paths have no such fields."""
        pooling = POOLING_PATHS.get(path)
        if pooling is not None:
            self._rewrite_pooling(_POOLING[POOLING_BODIES[pooling]], fields)
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
        for name in self._forbid - _COMPARED:
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
    for key, names in (("defaults", defaults), ("forbid", forbid)):
        unknown = sorted(set(names) - _ALL)
        if unknown:
            raise ConfigError(f"ServiceArgs.{key}: {unknown[0]} is not a field of a request")
    kinds: Iterable[tuple[type[msgspec.Struct], Collection[str], Mapping[str, Any]]] = (
        (ChatCompletionRequest, _CHAT, {"messages": [{"role": "user", "content": "."}]}),
        (CompletionRequest, _COMPLETION - _CHAT, {"prompt": "."}),
        *((kind, names - _CHAT - _COMPLETION, _NEEDED) for kind, names in _POOLING.items()),
    )
    for kind, fields, needed in kinds:
        values = {name: value for name, value in defaults.items() if name in fields}
        try:
            request = msgspec.convert({"model": ".", **needed, **values}, kind)
            if isinstance(request, ChatCompletionRequest):
                check_chat(request)
        except (msgspec.ValidationError, InvalidArgument) as error:
            raise ConfigError(f"ServiceArgs.defaults: {error}") from None


def _typed(
    kind: type[msgspec.Struct], needed: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return those of ``defaults`` that a request of ``kind`` takes, as typed values."""
    typed: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in _POOLING.get(kind, kind.__struct_fields__) and name not in PROTECTED:
            try:
                request = msgspec.convert({"model": ".", **needed, name: value}, kind)
            except msgspec.ValidationError:
                continue  # refused before the start, or of the other kind, as `logprobs`
            typed[name] = getattr(request, name)
    return typed
