"""Registration of a worker's model: its card, stored under the worker's lease."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.llm.model_source import resolve_model
from dynamo.llm.router_config import RouterConfig
from dynamo.llm.types import ModelInput, ModelType, WorkerType
from dynamo.protocols.control import (
    MODEL_CARDS,
    ModelCard,
    RuntimeConfig,
    decode_card,
    instance_key,
)
from dynamo.runtime import DistributedRuntime, Endpoint

_DEFAULT_BLOCK_SIZE = 16
log = logging.getLogger(__name__)

_block_sizes: WeakKeyDictionary[DistributedRuntime, dict[tuple[str, str], dict[str, int]]] = (
    WeakKeyDictionary()
)
"""Per runtime and (namespace, component): block size in tokens, by the call that gave it."""


async def register_model(  # noqa: PLR0913 - Dynamo's signature
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    kv_cache_block_size: int | None = None,
    router_config: RouterConfig | None = None,
    runtime_config: RuntimeConfig | None = None,
    user_data: dict[str, Any] | None = None,
    custom_template_path: str | None = None,
    media_decoder: Any = None,
    media_fetcher: Any = None,
    lora_name: str | None = None,
    base_model_path: str | None = None,
    worker_type: WorkerType | None = None,
    needs: Sequence[Sequence[WorkerType | str]] | None = None,
    self_host_metadata: Any = None,
    *,
    context_length: int | None = None,
    migration_limit: int = 0,
    model_aliases: Sequence[str] | None = None,
    ignore_weights: bool = True,
    **accepted: Any,
) -> None:
    """Register the model ``model_path`` as served by ``endpoint``.

    ``model_path`` is a local directory or an id on Hugging Face, from whose repository the files
    that make prompts are downloaded unless they are cached (all files with ``ignore_weights``
    false). The card is deleted with the worker's lease. ``context_length`` (tokens) defaults to the
    model's own, ``kv_cache_block_size`` to 16, ``model_name`` to the name of the directory, or the
    id. ``router_config`` replaces the frontend's settings for this model. ``media_decoder``,
    ``media_fetcher``, ``self_host_metadata`` and the arguments in ``ACCEPTED`` have no effect; a
    model of ModelInput.Tensor is registered for other workers, no frontend serves it.

    Raises InvalidArgument for a bad model; ValueError for one of ``lora_name`` and
    ``base_model_path`` without the other, and for a prefill worker with an API of its own.
    """
    if unknown := set(accepted) - ACCEPTED:
        raise TypeError(f"register_model got unexpected arguments {sorted(unknown)}")
    if (lora_name is None) != (base_model_path is None):
        raise ValueError("lora_name and base_model_path must be given together")
    _check_roles(model_input, model_type, worker_type, needs)
    config = runtime_config or RuntimeConfig()
    card = _card(endpoint, base_model_path or model_path)
    card.model_type, card.model_input = str(model_type), str(model_input)
    card.worker_type = str(worker_type or _worker_type(model_type))
    card.kv_cache_block_size = kv_cache_block_size or _DEFAULT_BLOCK_SIZE
    card.context_length = context_length or config.context_length
    card.custom_template_path = _template(custom_template_path)
    card.migration_limit, card.user_data, card.lora_name = migration_limit, user_data, lora_name
    card.model_aliases = list(model_aliases or ())
    card.needs = [[str(one) for one in group] for group in needs or ()]
    card.router_config = {} if router_config is None else router_config.for_card()
    card.runtime_config = config
    note_block_size(endpoint, "register_model", card.kv_cache_block_size)
    await _publish(endpoint, card, model_name or lora_name, not ignore_weights)


ACCEPTED = frozenset({"tensor_model_config", "max_gpu_lora_count", "skip_model_assets"})
"""Arguments of Dynamo's :func:`register_model` that are accepted and have no effect."""

register_llm = register_model
"""The older name."""


async def unregister_model(endpoint: Endpoint, lora_name: str | None = None) -> None:
    """Delete the card; no effect without one."""
    await endpoint.runtime.discovery.delete(card_key(endpoint, lora_name))


unregister_llm = unregister_model
"""The older name."""


async def update_model_taints(endpoint: Endpoint, taints: Iterable[str]) -> None:
    """Replace the taints in the card of this worker's model. InvalidArgument: it has none."""
    runtime = endpoint.runtime
    key = card_key(endpoint, None)
    stored = (await runtime.discovery.list(key)).get(key)
    if stored is None:
        raise InvalidArgument(f"{endpoint} has no model yet: call register_model first")
    card = decode_card(stored)
    card.runtime_config.taints = sorted(taints)
    lease = await runtime.granted()
    await runtime.discovery.put(key, encode_card(card), lease.id)


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return the local directory of a model, or the path of a GGUF file; download it if necessary.

    With ``ignore_weights`` only the files that make prompts are downloaded. Raises InvalidArgument.
    """
    try:
        found = await asyncio.to_thread(resolve_model, remote_name, weights=not ignore_weights)
    except ConfigError as error:
        raise InvalidArgument(error.message) from None
    return str(found.path)


fetch_llm = fetch_model
"""The older name."""


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


def _card(endpoint: Endpoint, source: str) -> ModelCard:
    """Return a card of this worker without a name."""
    return ModelCard(
        display_name="",
        slug="",
        source_path=source,
        namespace=endpoint.namespace,
        component=endpoint.component,
        endpoint=endpoint.name,
        instance_id=endpoint.runtime.instance_id,
    )


async def _publish(endpoint: Endpoint, card: ModelCard, name: str | None, weights: bool) -> None:
    """Complete ``card`` and put it into discovery. InvalidArgument: a bad model or value."""
    own_name = card.source_path
    if card.model_input == str(ModelInput.Tensor):
        card.checksum = f"{card.model_input} {card.source_path}"
    else:
        own_name = await asyncio.to_thread(_add_model, card, weights)
    card.display_name = name or own_name
    card.slug = slug_of(card.display_name)
    encoded, lease = encode_card(card), await endpoint.runtime.granted()
    await endpoint.runtime.discovery.put(card_key(endpoint, card.lora_name), encoded, lease.id)


def _check_roles(
    model_input: ModelInput,
    model_type: ModelType,
    worker_type: WorkerType | None,
    needs: Sequence[Sequence[WorkerType | str]] | None,
) -> None:
    if worker_type is not WorkerType.Prefill:
        return
    if model_input is ModelInput.Text:
        raise ValueError(
            "register_model: a prefill worker receives tokens; register it with ModelInput.Tokens"
        )
    if model_type & ~ModelType.Prefill:
        raise ValueError(
            f"register_model: a worker of WorkerType.Prefill must not expose an OpenAI surface, "
            f"got model_type {model_type}; give ModelType.Prefill"
        )
    if needs is not None and not list(needs):
        raise ValueError(
            "register_model: needs is empty; name a worker type that a prefill worker depends on, "
            "as in [[WorkerType.Decode]]"
        )


def _add_model(card: ModelCard, weights: bool) -> str:
    """Complete ``card`` from the files of its model; return the model's own name.

    Blocking. Raises InvalidArgument.
    """
    try:
        found = resolve_model(card.source_path, weights=weights)
        model = found.directory()
        model.require_worker_files()
        card.context_length = card.context_length or model.context_length
    except ConfigError as error:
        raise InvalidArgument(error.message) from None
    template = _content(card.custom_template_path)
    card.checksum = model.checksum(card.model_input, card.kv_cache_block_size, template)
    card.source_path = str(model.path)
    return found.name


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
