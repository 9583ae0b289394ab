"""Registration of a worker's model, and of a function as one; completions as one value."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import msgspec

from dynamo.errors import ConfigError, InvalidArgument
from dynamo.llm.model_source import resolve_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType
from dynamo.protocols.control import (
    MODEL_CARDS,
    ModelCard,
    RuntimeConfig,
    decode_card,
    instance_key,
)
from dynamo.runtime import DistributedRuntime, Endpoint, serve_unary_endpoint
from dynamo.runtime.process.threads import in_daemon_thread

if TYPE_CHECKING:
    from dynamo.llm.router_config import RouterConfig

_DEFAULT_BLOCK_SIZE = 16
log = logging.getLogger(__name__)

_block_sizes: WeakKeyDictionary[DistributedRuntime, dict[tuple[str, str], dict[str, int]]] = (
    WeakKeyDictionary()
)
"""Per runtime and (namespace, component): block size in tokens, by the call that gave it."""
_LOGPROBS = ("log_probs", "top_logprobs", "cum_log_probs")


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
    card.needs = [[str(kind) for kind in group] for group in needs or ()]
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
        model = await in_daemon_thread(resolve_model, remote_name, weights=not ignore_weights)
    except ConfigError as error:
        raise InvalidArgument(error.message) from None
    return str(model.path)


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
        own_name = await in_daemon_thread(_add_model, card, weights)
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
        resolved = resolve_model(card.source_path, weights=weights)
        model = resolved.directory()
        model.require_worker_files()
        card.context_length = card.context_length or model.context_length
    except ConfigError as error:
        raise InvalidArgument(error.message) from None
    template = _content(card.custom_template_path)
    card.checksum = model.checksum(card.model_input, card.kv_cache_block_size, template)
    card.source_path = str(model.path)
    return resolved.name


def encode_card(card: ModelCard) -> bytes:
    """Encode ``card``. InvalidArgument: values that every frontend would reject."""
    try:
        # The encoder takes values that the frontend's decoder refuses, so it is decoded once here.
        encoded = msgspec.json.encode(card)
        decode_card(encoded)
    except (OverflowError, ValueError) as error:
        text = f"the model card of {card.display_name!r} is wrong: {error}"
        raise InvalidArgument(text) from None
    return encoded


def card_key(endpoint: Endpoint, lora_name: str | None) -> str:
    """Return the discovery key of the card of this process, or of its adapter ``lora_name``."""
    tail = instance_key(*endpoint.path, endpoint.runtime.instance_id)
    if not lora_name:
        return f"{MODEL_CARDS}{tail}"
    slug = slug_of(lora_name)
    if slug != lora_name:  # other names have the same slug
        slug = f"{slug}-{zlib.crc32(lora_name.encode()):08x}"
    return f"{MODEL_CARDS}{tail}/{slug}"


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


class LLMUnaryClient:
    """Calls workers in turn and returns a whole completion. One choice, without logprobs."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, request: Mapping[str, Any], *, context: Any = None) -> dict[str, Any]:
        """Return the last item of the response, with the token ids of all of them.

        ValueError for a request with several choices or logprobs, RuntimeError for a response that
        is not one complete choice.
        """
        _check_request(request)
        stream = await self._client.round_robin(request, annotated=False, context=context)
        tokens: list[int] = []
        last: dict[str, Any] | None = None
        try:
            async for chunk in stream:
                if last is not None:
                    raise RuntimeError("the response has data after terminal chunk")
                tokens += _tokens_of(chunk)
                if chunk.get("finish_reason") is not None:
                    last = chunk
        finally:
            await stream.aclose()
        if last is None:
            raise RuntimeError("the response has no terminal chunk")
        return {**last, "token_ids": tokens}


class UnaryChatModel:
    """A chat model whose answers a function computes: ``async def handler(request, *, context)``.

    ``source`` is the model of the tokenizer and template, ``namespace`` that of the endpoint
    ``<namespace>.app.generate``, and the default of ``public_name``.
    """

    def __init__(
        self,
        source: str,
        namespace: str,
        public_name: str | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        self._source = source
        self._namespace = namespace
        self._name = public_name or namespace
        self._template = None if chat_template is None else str(chat_template)

    async def serve(self, runtime: Any, handler: Callable[..., Awaitable[Any]]) -> None:
        """Register the model and serve it until the shutdown."""
        endpoint = runtime.endpoint(f"{self._namespace}.app.generate")
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            self._source,
            model_name=self._name,
            custom_template_path=self._template,
            worker_type=WorkerType.Aggregated,
            ignore_weights=True,
        )
        await serve_unary_endpoint(endpoint, handler)


def with_engine_data(completion: Any, values: Any) -> dict[str, Any]:
    """Return a copy of ``completion`` with ``values`` added to its ``engine_data``.

    ValueError for anything but objects, and for a key that is there already.
    """
    _require_mapping("LLM completion", completion)
    _require_mapping("engine_data values", values)
    present = completion.get("engine_data") or {}
    _require_mapping("existing engine_data", present)
    if repeated := sorted(set(present) & set(values)):
        raise ValueError(f"engine_data has {', '.join(repeated)} already")
    return {**completion, "engine_data": {**present, **values}}


def _require_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {type(value).__name__}")


def _check_request(request: Mapping[str, Any]) -> None:
    sampling = _part(request, "sampling_options")
    output = _part(request, "output_options")
    if sampling.get("n") not in (None, 1):
        raise ValueError(f"a unary completion requires n=1, got n={sampling['n']}")
    if any(output.get(name) is not None for name in ("logprobs", "prompt_logprobs")):
        raise ValueError("a unary completion does not support logprobs")


def _part(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part: Any = request.get(name)
    if part is None:
        return {}
    _require_mapping(name, part)
    return cast(Mapping[str, Any], part)


def _tokens_of(chunk: Any) -> list[int]:
    if not isinstance(chunk, Mapping):
        raise RuntimeError(f"the response has a non-object chunk: {type(chunk).__name__}")
    if chunk.get("index") not in (None, 0):
        raise RuntimeError(f"the response has choice index {chunk['index']}, not choice index 0")
    tokens = chunk.get("token_ids") or []
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise RuntimeError(f"the response has invalid token_ids: {tokens!r:.80}")
    reason = chunk.get("finish_reason")
    if reason is not None and not (isinstance(reason, str) and reason):
        raise RuntimeError(f"the response has an invalid finish_reason: {reason!r:.80}")
    if any(chunk.get(name) is not None for name in _LOGPROBS):
        raise RuntimeError("the response has unsupported logprobs")
    return tokens
