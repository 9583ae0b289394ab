"""What the frontend reads of a body that it relays: the model, and the prompt for the router.

A router needs token ids to match prompts with caches. Where the exact ones are not known, the bytes
of the prompt's JSON take their place, four in an id: equal beginnings have equal blocks, and a
block is about as long as one of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.config.frontend import IGNORE
from dynamo.errors import InvalidArgument
from dynamo.frontend.models.model import ModelEntry, api_paths
from dynamo.frontend.prompt.bounds import (
    DESERIALIZE,
    INLINE_BODY_BYTES,
    check_engine_value,
    decoder_text,
)
from dynamo.frontend.prompt.engine_options import QUERY_ANNOTATION, routing_of
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.frontend.requests.headers import check_nvext
from dynamo.http.api_keys import ApiKey
from dynamo.http.routes import field_span
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.protocols.openai import CHAT_PATH, COMPLETIONS_PATH, MAX_SESSION_CHARACTERS, NvExt
from dynamo.protocols.pooling import POOLING_PATHS, offered_path

_BYTES_PER_ID = 4
_MAX_FIELD_BYTES = 1024
_TYPED_PATHS = frozenset((CHAT_PATH, COMPLETIONS_PATH, *POOLING_PATHS))
_MAX_IDS = 1 << 18
"""Of a model that does not state its context length."""


class RelayedBody(msgspec.Struct):
    """The members that count; the others stay undecoded. Those of the prompt are in the order in
    which chat templates render them."""

    named_model: str | None = msgspec.field(default=None, name="model")
    stream: Any = None
    cache_salt: Any = None
    priority: Any = None
    session_id: Any = None
    nvext: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def model(self) -> str:
        """The model; "" for a body without one, or with null."""
        return self.named_model or ""

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""
        return self.stream is True

    def constraints(
        self, lora_name: str | None, ignores_nvext: bool, key: ApiKey | None = None
    ) -> tuple[Routing | None, dict[str, Any] | None]:
        """Return what the router obeys, as of other models: what names the caches of the prompt
        (servers ignore a salt of no text), the members of ``nvext``, and its override.

        Raises InvalidArgument, and Forbidden for priorities and pins that a user's ``key`` does not
        grant: with ``ignores_nvext`` too, for the server may read them.
        """
        nvext = None
        if bytes(self.nvext) and not (ignores_nvext and (key is None or key.grants is None)):
            nvext = _extension(bytes(self.nvext))
            check_nvext(nvext, key)
        if ignores_nvext:
            nvext = None
        override = None if nvext is None else nvext.router_config_override
        if override is not None:
            check_engine_value("nvext.router_config_override", override)
        salt = self.cache_salt if isinstance(self.cache_salt, str) else None
        routing = routing_of(nvext, lora_name, salt)
        session_id = self.session_id
        # The server judges another value: it is no session here.
        names_session = (
            isinstance(session_id, str) and 0 < len(session_id) <= MAX_SESSION_CHARACTERS
        )
        if names_session and not ignores_nvext:
            routing = routing or Routing()
            routing.session_id = session_id
        return routing, override

    def prompt_members(self) -> tuple[msgspec.Raw, ...]:
        """The JSON of the members that make the prompt; that of absent ones is empty."""
        return (self.tools, self.system, self.instructions, self.messages, self.prompt, self.input)


class _Extension(msgspec.Struct):
    """A body of this member alone: errors have its whole path."""

    nvext: NvExt | None


_decode = msgspec.json.Decoder(RelayedBody).decode
_decode_extension = msgspec.json.Decoder(_Extension).decode


def peek(body: bytes) -> RelayedBody:
    """Read the members that count. Raises InvalidArgument.

    O(bytes), some 0.7 GB/s with the GIL held: the bounds on JSON apply to large bodies.
    """
    if len(body) > INLINE_BODY_BYTES:
        check_json(body)
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None


def peek_form(body: bytes, content_type: str) -> RelayedBody:
    """As :func:`peek`, of a form with files, as for audio. Raises InvalidArgument."""
    model = _form_field(body, content_type, "model")
    if model is None:
        raise InvalidArgument(
            "Validation: the multipart body has no field `model` among its first 64 parts"
        )
    return RelayedBody(model, _form_field(body, content_type, "stream") == "true")


def name_only_model(fields: RelayedBody, path: str, entries: Sequence[ModelEntry]) -> bool:
    """Set the model of a body without one to the only one with ``path``, if that is relayed.

    Return whether the body has a model then. Adapters do not count as models.
    """
    if not fields.model:
        models = [entry for entry in entries if entry.card.lora_name is None]
        # Other paths, as /v1/responses, are in no table of the models that take tokens.
        if len(models) > 1 and path in _TYPED_PATHS:
            models = [entry for entry in models if offered_path(path, api_paths(entry))]
        if len(models) == 1 and models[0].relayed:
            fields.named_model = models[0].name
    return bool(fields.model)


def prompt_ids(
    preprocessor: Preprocessor | None,
    path: str,
    body: bytes,
    fields: RelayedBody,
    context_length: int | None = None,
) -> Tokens:
    """Return ids of the prompt for the router: of its tokens if ``preprocessor`` can make them,
    else of its bytes, at most as many as the context has. Long bodies belong in a thread. O(bytes).
    """
    if preprocessor is not None and (exact := _tokenized(preprocessor, path, body)) is not None:
        return exact
    texts = [memoryview(member) for member in fields.prompt_members() if member]
    whole = texts[0] if len(texts) == 1 else memoryview(b"".join(texts) or body)
    # An image in the body has more bytes than the model has room for tokens.
    count = min(len(whole) // _BYTES_PER_ID, context_length or _MAX_IDS)
    ids = array("I")
    ids.frombytes(whole[: count * _BYTES_PER_ID])
    return ids


def _extension(raw: bytes) -> NvExt | None:
    """Decode ``nvext``. Raises InvalidArgument, also for what only other models do."""
    try:
        nvext = _decode_extension(b'{"nvext":%b}' % raw).nvext
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(DESERIALIZE + decoder_text(error)) from None
    for annotation in (nvext and nvext.annotations) or ():
        if annotation.partition(":")[0] == QUERY_ANNOTATION:
            raise InvalidArgument(
                f"Validation: 'nvext.annotations' {QUERY_ANNOTATION} is supported only for models "
                "whose workers take tokens; use POST /v1/route"
            )
    return nvext


def _form_field(body: bytes, content_type: str, name: str) -> str | None:
    span = field_span(body, content_type, name)
    return None if span is None else body[slice(*span)][:_MAX_FIELD_BYTES].decode(errors="replace")


def _tokenized(preprocessor: Preprocessor, path: str, body: bytes) -> Tokens | None:
    """The tokens of the prompt; None if the template refuses it, or our types the request.

    The server judges the request: its rules may differ from ours.
    """
    try:
        if path == CHAT_PATH:
            return preprocessor.chat_ids(parse_chat(body, unknown=IGNORE))
        if path == COMPLETIONS_PATH:
            return preprocessor.completion_ids(parse_completion(body, unknown=IGNORE))
    except InvalidArgument:
        pass
    return None
