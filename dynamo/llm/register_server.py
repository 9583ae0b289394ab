"""Registration of a model of another OpenAI-compatible server, in front of which a worker is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.register import card_key, encode_card, note_block_size, slug_of
from dynamo.llm.types import ModelType
from dynamo.protocols.card import DEFAULT_BLOCK_SIZE, ModelCard, RuntimeConfig
from dynamo.protocols.relay import HTTP_INPUT, ROUTES
from dynamo.runtime import Endpoint

__all__ = ["register_server"]


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
