"""The models of the attached server: their names, their cards, their registration."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote_plus

import msgspec

from dynamo.attach.describe import ServedModel, ServerCapacity, ServerDescription
from dynamo.attach.profiles import model_type_of
from dynamo.attach.settings import AttachSettings
from dynamo.errors import ConfigError
from dynamo.http.routes import field_span
from dynamo.llm import unregister_model
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.register import card_key, encode_card, note_block_size, slug_of
from dynamo.llm.types import ModelType
from dynamo.protocols.control import DEFAULT_BLOCK_SIZE, ROOT_KEY, ModelCard, RuntimeConfig
from dynamo.protocols.engine import HTTP_INPUT, ROUTES
from dynamo.runtime import Endpoint

log = logging.getLogger(__name__)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str)
_encode = msgspec.json.encode


def choose_models(wanted: str | None, listed: Sequence[str]) -> dict[str, str]:
    """Return {name to offer: name in the server}; by default every listed one.

    ``wanted`` is the value of ``--served-model-name``: names that the server lists, or
    ``name=server_name``. A new name alone renames the only model. Raises ConfigError.
    """
    if not wanted:
        return {name: name for name in listed}
    chosen: dict[str, str] = {}
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        name, _, server_name = word.partition("=")
        if not server_name:
            server_name = name if name in listed or len(listed) != 1 else listed[0]
        if server_name not in listed:
            raise ConfigError(
                f"--served-model-name {word!r}: the server has no model {server_name!r}, only "
                f"{', '.join(listed)}; give one of these, or NAME=SERVER_NAME"
            )
        chosen[name] = server_name
    if not chosen:
        raise ConfigError(f"--served-model-name {wanted!r} names no model")
    return chosen


class ModelNames:
    """Replaces the name of a renamed model in requests."""

    def __init__(self, chosen: dict[str, str] | None = None) -> None:
        self._renamed = {
            name: _encode(server_name)
            for name, server_name in (chosen or {}).items()
            if name != server_name
        }

    def rewrite(self, body: bytes) -> bytes:
        """Return ``body`` with the server's own name of its model, all other values unchanged.

        Without a renamed model, and for a body that is no JSON object with such a ``model``, the
        body itself. O(size), only if a model is renamed.
        """
        if not self._renamed:
            return body
        try:
            # Raw values: all but the name keep their text, such as the digits of a number.
            fields = _FIELDS.decode(body)
            name = _NAME.decode(fields["model"])
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError):
            return body
        server_name = self._renamed.get(name)
        if server_name is None:
            return body
        fields["model"] = msgspec.Raw(server_name)
        return _encode(fields)

    def rewrite_target(self, target: str, spans: Iterable[tuple[int, int]]) -> str:
        """As :meth:`rewrite`, of path and query: ``spans`` are the parameters of the path."""
        if not self._renamed:
            return target
        path, mark, query = target.partition("?")
        # From the end: positions before a replaced part stay valid.
        for begin, end in sorted(spans, reverse=True):
            path = path[:begin] + self._quoted(path[begin:end]) + path[end:]
        fields = query.split("&")
        for number, field in enumerate(fields):
            if field.startswith("model="):
                fields[number] = f"model={self._quoted(field[6:])}"
        return f"{path}{mark}{'&'.join(fields)}"

    def rewrite_form(self, body: bytes, content_type: str) -> bytes:
        """As :meth:`rewrite`, of a form with files."""
        span = field_span(body, content_type, "model") if self._renamed else None
        if span is None:
            return body
        begin, end = span
        server_name = self._renamed.get(body[begin:end].decode(errors="replace"))
        if server_name is None:
            return body
        return b"".join((body[:begin], _NAME.decode(server_name).encode(), body[end:]))

    def _quoted(self, text: str) -> str:
        """The server's name for ``text`` from a URL, else ``text``."""
        server_name = self._renamed.get(unquote_plus(text))
        return text if server_name is None else quote(_NAME.decode(server_name), safe="")


async def register_server(  # noqa: PLR0913 - the parts of a card
    endpoint: Endpoint,
    name: str,
    routes: Sequence[str],
    model_type: ModelType,
    *,
    model: ModelDirectory | None = None,
    card_name: str | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    lora_name: str | None = None,
    runtime_config: RuntimeConfig | None = None,
) -> None:
    """Register ``name`` as served by the worker of ``endpoint``, which takes HTTP requests.

    ``routes`` are the paths that the server answers. ``model`` has the tokenizer for routing by
    tokens; without it the frontend routes by text. A worker with several models gives each but the
    first a ``card_name``, with which ``unregister_model`` deletes its card. Raises InvalidArgument
    for values out of range.
    """
    block_size = kv_cache_block_size or DEFAULT_BLOCK_SIZE
    note_block_size(endpoint, "register_server", block_size)
    card = ModelCard(
        display_name=name,
        slug=slug_of(name),
        source_path="" if model is None else str(model.path),
        namespace=endpoint.namespace,
        component=endpoint.component,
        endpoint=endpoint.name,
        instance_id=endpoint.runtime.instance_id,
        model_type=str(model_type),
        model_input=HTTP_INPUT,
        context_length=context_length,
        kv_cache_block_size=block_size,
        user_data={ROUTES: list(routes)},
        lora_name=lora_name,
        checksum=_checksum(model, block_size),
        runtime_config=runtime_config or RuntimeConfig(),
    )
    encoded, lease = encode_card(card), await endpoint.runtime.granted()
    await endpoint.runtime.discovery.put(card_key(endpoint, card_name), encoded, lease.id)


def _checksum(model: ModelDirectory | None, block_size: int) -> str:
    if model is not None:
        return model.checksum(HTTP_INPUT, block_size)
    text = f"{HTTP_INPUT} {block_size}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Card:
    """What one registered card says, to see whether it has changed."""

    name: str
    model: ServedModel
    capacity: ServerCapacity


class ServerCards:
    """Keeps the cards of ``endpoint`` equal to the server's models.

    Several models share the endpoint: each has a card, like adapters of one model.
    """

    def __init__(
        self, endpoint: Endpoint, settings: AttachSettings, model: ModelDirectory | None
    ) -> None:
        self.ranks = max(1, len(settings.kv_events_endpoint))
        self._endpoint = endpoint
        self._settings = settings
        self._model = model
        self._cards: dict[str | None, _Card] = {}

    def block_size(self, description: ServerDescription) -> int:
        """Return the tokens of a KV block. ConfigError: events, and neither side says."""
        size = self._settings.block_size or description.capacity.block_size
        if size is None and self._settings.kv_events_endpoint:
            raise ConfigError(
                "--kv-events-endpoint: the server does not report the size of its KV blocks; give "
                "--block-size"
            )
        return size or DEFAULT_BLOCK_SIZE

    async def apply(self, description: ServerDescription) -> dict[str, str]:
        """Register what is new or changed, delete what is gone; return {name: server's name}.

        Raises ConfigError for a name that the server does not have.
        """
        by_name = {model.name: model for model in description.models}
        chosen = choose_models(self._settings.model_name, list(by_name))
        self._check_one_tokenizer([by_name[server_name] for server_name in chosen.values()])
        wanted: dict[str | None, _Card] = {}
        for name, server_name in chosen.items():
            card_name = _card_name(name, wanted)
            wanted[card_name] = _Card(name, by_name[server_name], description.capacity)
        for card_name in self._cards.keys() - wanted.keys():
            log.info("model %s is gone", self._cards.pop(card_name).name)
            await unregister_model(self._endpoint, card_name)
        for card_name, card in wanted.items():
            if self._cards.get(card_name) != card:
                await self._register(card_name, card, description)
                self._cards[card_name] = card
        return chosen

    async def _register(
        self, card_name: str | None, card: _Card, description: ServerDescription
    ) -> None:
        model, capacity = card.model, card.capacity
        length = model.context_length or (self._model.context_length if self._model else None)
        log.info(
            "model %s: %s, context %s, routes %s",
            card.name,
            description.profile.name,
            length or "unknown",
            " ".join(model.routes),
        )
        await register_server(
            self._endpoint,
            card.name,
            model.routes,
            model_type_of(model.routes),
            model=self._model,
            card_name=card_name,
            context_length=length,
            kv_cache_block_size=self.block_size(description),
            lora_name=model.name if model.is_adapter else None,
            runtime_config=RuntimeConfig(
                total_kv_blocks=capacity.total_blocks,
                max_num_seqs=capacity.max_num_seqs,
                max_num_batched_tokens=capacity.max_num_batched_tokens,
                data_parallel_size=self.ranks,
                context_length=length,
                enable_local_indexer=bool(self._settings.kv_events_endpoint),
                taints=list(self._settings.taints),
                runtime_data={} if model.root is None else {ROOT_KEY: model.root},
            ),
        )

    def _check_one_tokenizer(self, models: list[ServedModel]) -> None:
        bases = [model.name for model in models if not model.is_adapter]
        if self._model is not None and len(bases) > 1:
            raise ConfigError(
                f"--model-path is the tokenizer of one model, and the server has {len(bases)} "
                f"({', '.join(bases)}): choose one with --served-model-name"
            )


def _card_name(name: str, taken: dict[str | None, _Card]) -> str | None:
    """Return the part of the card's key: None for the first; names may share a slug."""
    if not taken:
        return None
    slugs = {slug_of(other) for other in taken if other is not None}
    candidate, number = name, 2
    while slug_of(candidate) in slugs:
        candidate, number = f"{name}-{number}", number + 1
    return candidate
