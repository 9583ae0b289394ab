"""Registration of a worker's model: its card, stored under the worker's lease."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.types import ModelInput, ModelType, WorkerType
from dynamo.protocols.card import ModelCard, RuntimeConfig, decode_card
from dynamo.protocols.control import MODEL_CARDS, instance_key
from dynamo.runtime import Endpoint
from dynamo.runtime.client import RuntimeServices

__all__ = [
    "card_key",
    "encode_card",
    "note_block_size",
    "register_llm",
    "register_model",
    "slug_of",
    "unregister_model",
]

_DEFAULT_BLOCK_SIZE = 16
log = logging.getLogger(__name__)

_block_sizes: WeakKeyDictionary[RuntimeServices, dict[tuple[str, str], dict[str, int]]] = (
    WeakKeyDictionary()
)
"""Per runtime and (namespace, component): block size in tokens, by the call that gave it."""


async def register_model(  # noqa: PLR0913 - Dynamo's signature
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    worker_type: WorkerType | None = None,
    context_length: int | None = None,
    kv_cache_block_size: int | None = None,
    router_config: Any = None,
    runtime_config: RuntimeConfig | None = None,
    migration_limit: int = 0,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | None = None,
    media_decoder: Any = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    needs: Sequence[Sequence[str]] | None = None,
    model_aliases: Sequence[str] | None = None,
) -> None:
    """Register the model in ``model_path``, a local directory, as served by ``endpoint``.

    The card is deleted with the worker's lease. ``context_length`` (tokens) defaults to the model's
    own, ``kv_cache_block_size`` to 16, ``model_name`` to the name of the directory.
    ``router_config`` and ``media_decoder`` are accepted and have no effect. Raises InvalidArgument
    for a bad model directory and ``model_input`` Tensor; ValueError for one of
    ``lora_name`` and ``base_model_path`` without the other.
    """
    _check(model_input, lora_name, base_model_path)
    config = runtime_config or RuntimeConfig()
    length = context_length or config.context_length
    model, length = _read_model(base_model_path or model_path, length)
    name = model_name or lora_name or model.name
    block_size = kv_cache_block_size or _DEFAULT_BLOCK_SIZE
    note_block_size(endpoint, "register_model", block_size)
    card = ModelCard(
        display_name=name,
        slug=slug_of(name),
        source_path=str(model.path),
        namespace=endpoint.namespace,
        component=endpoint.component,
        endpoint=endpoint.name,
        instance_id=endpoint.runtime.instance_id,
        model_type=str(model_type),
        model_input=str(model_input),
        worker_type=str(worker_type or _worker_type(model_type)),
        context_length=length,
        kv_cache_block_size=block_size,
        migration_limit=migration_limit,
        custom_template_path=_template(custom_template_path),
        user_data=user_data,
        lora_name=lora_name,
        model_aliases=list(model_aliases or ()),
        needs=[list(group) for group in needs or ()],
        checksum=model.checksum(str(model_input), block_size, _content(custom_template_path)),
        runtime_config=config,
    )
    encoded, lease = encode_card(card), await endpoint.runtime.granted()
    await endpoint.runtime.discovery.put(card_key(endpoint, lora_name), encoded, lease.id)


register_llm = register_model
"""The older name."""


async def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> None:
    """Delete the card; no effect without one."""
    await endpoint.runtime.discovery.delete(card_key(endpoint, lora_name))


def note_block_size(endpoint: Endpoint, source: str, block_size: int) -> None:
    """Note that the call ``source`` gave ``block_size`` tokens for the KV blocks of this worker.

    Routers ignore the KV events of a worker whose card has another block size, so two sizes are
    logged as an error here, where the cause is.
    """
    sizes = _block_sizes.setdefault(endpoint.runtime, {}).setdefault(endpoint.path[:2], {})
    sizes[source] = block_size
    if len(set(sizes.values())) > 1:
        log.error(
            "the KV blocks of worker %x have two sizes in tokens (%s): routers will not use its "
            "KV events. Give both the engine's own block size",
            endpoint.runtime.instance_id,
            ", ".join(f"{name} {size}" for name, size in sizes.items()),
        )


def slug_of(name: str) -> str:
    """``name`` in lower case with everything but letters, digits, - and _ replaced by _."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower())


def _check(model_input: ModelInput, lora_name: str | None, base_model_path: str | None) -> None:
    if (lora_name is None) != (base_model_path is None):
        raise ValueError("lora_name and base_model_path must be given together")
    if model_input is ModelInput.Tensor:
        raise InvalidArgument(
            f"model_input {model_input} is not supported: the frontend sends token ids or OpenAI "
            "bodies; register with ModelInput.Tokens and read token_ids of each request, or with "
            "ModelInput.Text and yield OpenAI chunks"
        )


def _read_model(path: str, context_length: int | None) -> tuple[ModelDirectory, int | None]:
    """Return the model and its context length, unless one is given. Raises InvalidArgument."""
    try:
        model = ModelDirectory(path)
        model.require_worker_files()
        return model, context_length or model.context_length
    except ConfigError as error:
        raise InvalidArgument(error.message) from None


def encode_card(card: ModelCard) -> bytes:
    """Encode ``card``. InvalidArgument: values that every frontend would reject."""
    try:
        encoded = msgspec.json.encode(card)
        decode_card(encoded)
    except (OverflowError, ValueError) as error:
        text = f"the model card of {card.display_name!r} is out of range: {error}"
        raise InvalidArgument(text) from None
    return encoded


def card_key(endpoint: Endpoint, lora_name: str | None) -> str:
    """Return the discovery key of the card of this process, or of its adapter ``lora_name``."""
    tail = instance_key(*endpoint.path, endpoint.runtime.instance_id)
    return f"{MODEL_CARDS}{tail}" + (f"/{slug_of(lora_name)}" if lora_name else "")


def _worker_type(model_type: ModelType) -> WorkerType:
    return WorkerType.Prefill if ModelType.Prefill in model_type else WorkerType.Aggregated


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise InvalidArgument(f"custom_template_path {path!r} is not a file")
    return str(Path(path).resolve())


def _content(path: str | None) -> str | None:
    return None if path is None else Path(path).read_text(encoding="utf-8")
